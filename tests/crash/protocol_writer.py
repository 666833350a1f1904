"""The writer's part of the crash protocol: opening, extend, sync, redo, delete, rotation, long extends.

Used by protocol_model.py, which stops it anywhere. The writer never reads the ledger to decide anything: it
only reports operations and promises to it.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import NamedTuple

from tests.crash.protocol_disk import (
    Annotate,
    Base,
    Delete,
    Disk,
    Empty,
    Facts,
    Ledger,
    Mark,
    Publish,
    Record,
    Redo,
    Retire,
    Segment,
    Snapshot,
    Steps,
)
from tests.crash.protocol_recovery import Rules, recover


class Note(NamedTuple):
    """A position: the last record whose bytes are all written, and its state."""

    sequence: int
    last: int
    log_length: int
    rows: int


class Writer:
    """One process that has the store open for writing. When it stops, only the disk remains."""

    def __init__(self, disk: Disk, ledger: Ledger, rules: Rules, reach: int) -> None:
        self.disk, self.ledger, self.rules, self.rng = disk, ledger, rules, disk.rng
        self.reach = reach  # maximum distance to the earlier row whose b is a row's a
        self.durability_sync = self.rng.random() < 0.2
        self.facts = self._published = Facts()
        self.sequence = 0
        self.background: Steps | None = None  # the group sync's thread
        self.syncing = False
        self.delicate = False  # a mark or a redo record is appended and not yet durable
        self._segments: list[Segment] = []
        self._fresh = True  # older segments, or the newest one's name, may not be on the disk
        self._marked = Note(0, 0, 0, 0)
        self._before: Note | None = None  # the position before a record whose bytes are not all written yet
        self._last_publish = 0
        self._rows = 0

    # journal

    def _create(self, facts: Facts, *, opening: bool) -> Segment:
        """Create a segment with a base record, neither of them synced."""
        if self.rules.base_without_retired:
            facts = facts._replace(retired=0)
        segment = Segment(max(self.disk.journal.entries, default=0) + 1, self.disk.segment_cells)
        base = Base(facts, self.disk.generation, opening)
        base.sequence = self.sequence
        segment.append(base)
        self.disk.journal.create(segment)
        return segment

    def _rotate(self) -> None:
        rules, journal = self.rules, self.disk.journal
        if journal.pending and not rules.rotate_twice:
            self._sync_journal()
        new = self._create(self._published if rules.base_from_published else self.facts, opening=False)
        if rules.rotation_without_sync:
            self.disk.fsync(new.file)
            journal.sync()
            while self._segments:
                journal.unlink(self._segments.pop(0).number)
        self._segments.append(new)
        self._fresh = True

    def _append(self, record: Record, snapshot: Snapshot | None = None) -> None:
        """Append a record; `snapshot` is the state after it, if it changes the state."""
        if not self._segments[-1].has_room(record.cells):
            self._rotate()
        self.sequence += 1
        record.sequence = self.sequence
        self._segments[-1].append(record)
        self.delicate = self.delicate or isinstance(record, Mark | Redo)
        self.facts = record.apply(self.facts, self.disk.capacity)
        self.ledger.snapshots.append(snapshot or self.ledger.now())

    def _sync_journal(self) -> None:
        """Run fdatasync on every used segment, and on the directory if it names a new one."""
        rules = self.rules
        self.delicate = False
        for segment in self._segments[-1:] if rules.fsync_last_segment_only else self._segments:
            self.disk.fsync(segment.file)
        if not rules.unlink_before_dir_fsync and not rules.fsync_last_segment_only:
            self.disk.journal.sync()

    def _settle_record(self) -> None:
        """With durability="sync": run fdatasync on everything that makes the last record durable."""
        if self.rules.sync_mode_without_fsync:
            return
        if self._fresh and not self.rules.sync_mode_newest_only:
            self._sync_journal()
        else:
            self.disk.fsync(self._segments[-1].file)
        self._fresh = False

    def _unlink_covered(self) -> Steps:
        """Commit the index, then remove the segments before the last durable mark."""
        while len(self._segments) > 1:
            base: Base = self._segments[1].file.cells[0][0]
            if base.sequence > self._marked.sequence:
                break
            if self.rules.fsync_last_segment_only:
                self.disk.journal.sync()
            yield from self.commit_index()
            self.disk.journal.unlink(self._segments.pop(0).number)
            yield

    def commit_index(self) -> Steps:
        self.disk.commit_index(self.sequence, self.ledger.now())
        yield

    # sync

    def _note(self) -> Note:
        return self._before or Note(self.sequence, self.facts.last, self.facts.log_length, self._rows)

    def _begin_bytes(self) -> None:
        """Announce a record whose bytes are not all written yet, so that no mark covers it."""
        if not self.rules.journal_first:
            self._before = self._note()

    def _end_bytes(self) -> None:
        self._before = None
        self._published = self.facts

    def sync(self) -> Steps:
        rules = self.rules
        note = self._note()
        yield
        if rules.mark_before_fsync:
            self._append(Mark(note.sequence, note.log_length))
            yield
        for file in self.disk.files():
            self.disk.fsync(file)
            yield
        if not rules.mark_before_journal_fsync:
            self._sync_journal()
            yield
        if rules.note_after_fsync:
            note = self._note()
        if not rules.mark_before_fsync:
            self._append(Mark(note.sequence, note.log_length))
            yield
        if not rules.mark_without_fsync:
            self._sync_journal()
        self._marked = note
        self.ledger.durable = max(self.ledger.durable, note.sequence)
        yield
        if self.rng.random() < 0.7:  # otherwise the index commit is not ready: segments accumulate
            yield from self._unlink_covered()

    def _drain(self) -> Steps:
        """Wait for the group sync that is under way."""
        if self.background is not None:
            background, self.background = self.background, None
            self.syncing = True
            yield from background
            self.syncing = False

    def _sync_now(self) -> Steps:
        yield from self._drain()
        self.syncing = True
        yield from self.sync()
        self.syncing = False

    def step_background(self) -> None:
        if self.syncing:
            return
        if self.background is None:
            self.background = self.sync()
        for _ in self.background:
            return
        self.background = None

    # the calls

    def _returned(self) -> None:
        self.ledger.acked = self.sequence

    def flush(self) -> Steps:
        yield from self._sync_now()
        self._returned()

    def _make_room(self, count: int) -> Steps:
        """Wait until the ids not covered by a durable mark, including the new ones, are at most `spare`."""
        rules = self.rules
        if rules.no_spare or rules.reuse_before_mark:
            return
        for wait in (self._drain, self._sync_now):
            ahead = self.facts.last - self._marked.last
            if rules.wait_counts_rows:
                ahead = self._rows - self._marked.rows
            if ahead + count > self.disk.spare:
                yield from wait()

    def _retire(self, count: int) -> Generator[None, None, int]:
        """Delete exactly the oldest rows whose slots a long extend needs.

        Returns the record's sequence, 0 if there were no such rows.
        """
        yield from self._sync_now()
        if self.rules.long_without_retire:
            return 0
        now, disk = self.ledger.now(), self.disk
        window = range(self.facts.last - disk.capacity + 1, self.facts.last + 1)
        gone = set(window[: count - disk.spare])
        kept = {i: row for i, row in now.rows.items() if i not in gone}
        upto = self.facts.last + count - disk.capacity - disk.spare
        if not self.rules.retire_beyond_last:
            upto = min(upto, self.facts.last)  # unassigned ids may be assigned later
        self._append(Retire(upto), Snapshot(kept, now.entries))
        sequence = self.sequence
        yield
        if not self.rules.retire_without_fsync:
            self._sync_journal()
            yield
        return sequence if len(kept) < len(now.rows) else 0

    def _write_log(self, entry: int | None, sequence: int) -> Steps:
        if entry is not None:
            self.disk.log.write(self.facts.log_length - (not self.rules.log_by_sequence), [(sequence, entry)])
            yield

    def extend(self, count: int, *, payload: bool, ends_episode: bool) -> Steps:
        """Publish rows; with `payload` they are in the record if durability="sync"."""
        rules, disk, ledger = self.rules, self.disk, self.ledger
        long = count > disk.spare and not rules.no_spare
        retired = 0
        if long:
            retired = yield from self._retire(count)
        else:
            yield from self._make_room(count)
        first, last = self.facts.last + 1, self.facts.last + count
        written = range(last - min(count, disk.capacity) + 1, last + 1)
        rows, away = self._next_rows(written)
        entry = ledger.token() if ends_episode else None
        payload = payload and self.durability_sync and not long
        # Small batches wait in memory until their record is written; larger ones are written to the columns
        # first.
        record_first = (payload and self.rng.random() < 0.5) or rules.journal_first
        if not record_first:
            yield from disk.put(rows, away)
            if self.durability_sync and not payload and not rules.sync_mode_record_before_rows:
                for file in disk.files():
                    disk.fsync(file)
                    yield
        self._begin_bytes()
        now = ledger.now()
        kept = {i: row for i, row in now.rows.items() if i > last - disk.capacity} | rows
        entries = now.entries if entry is None else (*now.entries, entry)
        if rules.log_by_sequence:
            yield from self._write_log(entry, self.sequence + 1)
        self._append(Publish(first, last, rows, payload, entry), Snapshot(kept, entries))
        published = self._last_publish = self.sequence
        self._rows += count
        yield
        if self.durability_sync:
            self._settle_record()
            yield
        if record_first:
            yield from disk.put(rows, away)
        if not rules.log_by_sequence:
            yield from self._write_log(entry, 0)
        self._end_bytes()
        if long and not rules.long_returns_unsynced:
            yield from self._sync_now()
        self._returned()
        if self.durability_sync:
            ledger.durable = max(ledger.durable, published)
        if retired:
            ledger.given_up.append((retired, published))

    def _next_rows(self, ids: range) -> tuple[dict[int, tuple[int, int]], dict[int, int]]:
        """Return new rows, and for some of them the distance to the earlier row whose b is their a."""
        rows: dict[int, tuple[int, int]] = {}
        away: dict[int, int] = {}
        known = self.ledger.now().rows
        for i in ids:
            near = [p for p in range(i - self.reach, i) if p in rows or p in known]
            if near and self.rng.random() < 0.6:
                lender = self.rng.choice(near)
                away[i] = i - lender
                rows[i] = ((rows.get(lender) or known[lender])[1], self.ledger.token())
            else:
                rows[i] = (self.ledger.token(), self.ledger.token())
        return rows, away

    def _lying_with(self, ids: list[int]) -> dict[int, int]:
        """Return the rows whose a is stored with the b of some rows, with their values."""
        disk, found = self.disk, dict[int, int]()
        for i, (a, _) in self.ledger.now().rows.items():
            distance = disk.away.get((i - 1) % disk.slots)
            if distance and i - distance in ids:
                found[i] = a
        return found

    def redo(self, ids: list[int], *, change_a: bool, change_b: bool) -> Steps:
        """Change rows in place: either the whole change survives or nothing."""
        rules, disk, ledger = self.rules, self.disk, self.ledger
        if not rules.redo_without_sync:
            yield from self._drain()
            if self._last_publish > self._marked.sequence:
                yield from self._sync_now()
        changes = {
            i: (ledger.token() if change_a else None, ledger.token() if change_b else None) for i in ids
        }
        now = ledger.now()
        rows = dict(now.rows)
        for i, (a, b) in changes.items():
            old_a, old_b = rows[i]
            rows[i] = (old_a if a is None else a, old_b if b is None else b)
        if change_b and not rules.no_copies:
            copies = self._lying_with(ids)
            if rules.copies_beside:
                for i, a in copies.items():
                    yield from disk.change(i, (a, None))
            else:
                given = {i: changes.get(i, (None, None)) for i in (*copies, *changes)}
                changes = {i: (copies.get(i) if a is None else a, b) for i, (a, b) in given.items()}
        self._begin_bytes()
        self._append(Redo(changes), Snapshot(rows, now.entries))
        sequence = self.sequence
        yield
        if not rules.redo_without_fsync:
            self._sync_journal()
            self.ledger.durable = max(self.ledger.durable, 0 if rules.redo_without_sync else sequence)
            yield
        for i in changes:  # copies are written before the original changes
            yield from disk.change(i, (changes[i][0], None))
        for i in changes:
            yield from disk.change(i, (None, changes[i][1]))
            yield
        if rules.redo_without_fsync:
            self._sync_journal()
        self._end_bytes()
        self._returned()

    def delete(self, ids: frozenset[int]) -> Steps:
        now = self.ledger.now()
        kept = {i: row for i, row in now.rows.items() if i not in ids}
        self._append(Delete(ids), Snapshot(kept, now.entries))
        self._end_bytes()
        yield
        self._returned()

    def empty(self) -> Steps:
        capacity = self.disk.capacity
        next_id = -(-self.facts.last // capacity) * capacity + 1
        self._append(Empty(next_id), Snapshot({}, self.ledger.now().entries))
        self._end_bytes()
        yield
        self._returned()

    def annotate(self) -> Steps:
        now, entry = self.ledger.now(), self.ledger.token()
        self._begin_bytes()
        if self.rules.log_by_sequence:
            yield from self._write_log(entry, self.sequence)
        self._append(Annotate(entry), Snapshot(now.rows, (*now.entries, entry)))
        yield
        if not self.rules.log_by_sequence:
            yield from self._write_log(entry, 0)
        self._end_bytes()
        self._returned()

    # opening

    def open(self) -> Steps:
        """Recover, sync, write a new segment, fsync it and the directory, unlink the old ones."""
        disk, rules = self.disk, self.rules
        disk.generation += 1
        old = sorted(disk.journal.entries)
        if old:
            self.facts, self.sequence = yield from recover(disk, self.ledger, rules)
        new = self._create(self.facts, opening=True)
        self._segments = [new]
        yield
        disk.fsync(new.file)
        yield
        if not rules.unlink_before_dir_fsync:
            disk.journal.sync()
            yield
        disk.rng.shuffle(old)
        for number in old:
            disk.journal.unlink(number)
            yield
        self._marked = self._note()
        self._published = self.facts
