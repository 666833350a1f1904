"""The protocol's rules, each with a switch that breaks it, and the opening's half of the protocol.

Used by protocol_writer.py, which opens a store with `recover`, and by the tests for `Rules`.
It never makes the new segment: the writer does, and accepts calls only after that.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

from tests.crash.protocol_disk import (
    Annotate,
    Base,
    Directory,
    Disk,
    Facts,
    Ledger,
    Mark,
    Publish,
    Record,
    Redo,
    Refused,
    Segment,
)

__all__ = ["Rules", "recover"]


@dataclass(frozen=True)
class Rules:
    """The protocol, and one switch for each way of breaking it. The default is the protocol."""

    capacity: int | None = None  # fixed instead of drawn
    spare: int | None = None  # fixed instead of drawn
    # rows and slots
    journal_first: bool = False  # the record before the columns, and a sync may cover it in between
    no_spare: bool = False  # slots are overwritten in place
    reuse_before_mark: bool = False  # a slot is reused as soon as its row has left the readable set
    wait_counts_rows: bool = False  # the wait rule counts rows, not ids: an `empty()` skips ids
    # sync
    mark_before_fsync: bool = False  # the mark is appended before the columns are synced
    mark_before_journal_fsync: bool = False  # the same, before the journal is synced
    mark_without_fsync: bool = False  # slots are released before the mark itself is durable
    note_after_fsync: bool = False  # the mark covers the last record at the time of its own appending
    # durability="sync"
    sync_mode_without_fsync: bool = False  # the call returns before its record is durable
    sync_mode_newest_only: bool = False  # after a rotation, only the newest segment is synced
    sync_mode_record_before_rows: bool = False  # the record is durable, rows that do not ride in it are not
    # redo
    redo_without_sync: bool = False  # rows are changed whose publish record no mark covers
    redo_without_fsync: bool = False  # columns are changed before the redo record is durable
    # rows whose a is the b of an earlier one, and lies there
    no_reach: bool = False  # the slot of that one may be reused while the row can be read
    no_copies: bool = False  # b is changed under the rows that lie with it
    copies_beside: bool = False  # they get their copies, of which the record knows nothing
    # long extends
    long_without_retire: bool = False
    retire_without_fsync: bool = False
    retire_beyond_last: bool = False  # the retired range holds ids that no row has yet
    long_returns_unsynced: bool = False  # the retired rows are gone, the new ones not yet synced
    # rotation
    rotation_without_sync: bool = False  # the old segment goes although no mark reaches past its end
    unlink_before_dir_fsync: bool = False
    fsync_last_segment_only: bool = False  # "the journal" means its last segment, without the directory
    rotate_twice: bool = False  # a second rotation before the first one's directory entry is durable
    base_from_published: bool = False  # the base is what memory shows, not what the last record says
    base_without_retired: bool = False
    # opening
    no_verify: bool = False  # payload is believed
    read_from_lowest: bool = False  # the oldest segment that is there starts the journal
    ignore_missing_segment: bool = False  # a segment is taken although the tail of its predecessor is lost
    any_mark_is_corruption: bool = False  # a mark behind a bad record, though it does not cover that record
    mark_covers_itself: bool = False  # replay starts behind the mark, not behind the position it covers
    change_before_journal_fsync: bool = False  # redo records are applied that are only in the page cache
    fsync_without_rewrite: bool = False  # the old journal is fsynced, but a failed fsync left its pages clean
    recover_without_rewrite: bool = False  # pages that a failed fsync left clean are believed
    recover_without_sync: bool = False  # the new segment is written before the columns are synced
    log_by_sequence: bool = False  # episodes.log entries are not in the records, only stamped with a sequence
    index_by_sequence: bool = False  # an index of another generation is caught up


def read_journal(journal: Directory, rules: Rules) -> tuple[Base, list[Record], list[Segment]]:
    """Find where the journal starts and follow it to its end; returns the segments in use, too."""
    names = sorted(journal.entries)
    read = {number: journal.entries[number].read() for number in names}
    if rules.read_from_lowest:
        start: int | None = names[0]
    else:  # an opening's base needs no predecessor; another's predecessor goes only when it is not needed
        fit = [n for n in names if (b := read[n][0]) is not None and (b.opening or n - 1 not in read)]
        start = max(fit, default=None)
    base = None if start is None else read[start][0]
    if start is None or base is None:
        raise Refused("no segment has a base record to start from")
    sequence, records, used, stray = base.sequence, list[Record](), [journal.entries[start]], list[Mark]()
    ended = False
    for number in names[names.index(start) :]:
        its_base, its_records, behind = read[number]
        if number != start:
            broken = its_base is None or (its_base.sequence != sequence and not rules.ignore_missing_segment)
            ended = ended or broken
            if its_base is not None and not ended:
                records.append(its_base)
                used.append(journal.entries[number])
        if ended:
            stray += [] if rules.any_mark_is_corruption else [r for r in its_records if isinstance(r, Mark)]
            continue
        records += its_records
        sequence = records[-1].sequence if records else sequence
        stray += behind
    if any(mark.covers > sequence or rules.any_mark_is_corruption for mark in stray):
        raise Refused(f"a mark stands behind a bad record {sequence + 1}")
    return base, records, used


def replay(disk: Disk, record: Record, facts: Facts, rules: Rules) -> bool:
    """Write a record's bytes again; False if its payload is not there."""
    if isinstance(record, Publish):
        verify = not record.payload and not rules.no_verify
        if verify and not all(disk.holds(i, row) for i, row in record.rows.items()):
            return False
        if record.payload:
            for _ in disk.put(record.rows):
                pass
        elif not (rules.recover_without_rewrite or rules.no_verify):
            for i in record.rows:
                disk.rewrite(i)
    elif isinstance(record, Redo):
        for i, change in record.rows.items():
            if i > facts.last - disk.slots:  # else the slot belongs to another id now
                for _ in disk.change(i, change):
                    pass
    return True


def recover_log(disk: Disk, sequence: int, length: int, entries: list[tuple[int, int]], rules: Rules) -> int:
    """Cut episodes.log to the length that the last mark covers; append the later records' entries again."""
    log = disk.log
    if rules.log_by_sequence:
        entries = []
        length = 0
        while log.cells[length] is not None and log.cells[length][0] <= sequence:
            length += 1
    log.write(length, [None] * (len(log.cells) - length))
    if entries:
        log.write(length, list(entries))
    return length + len(entries)


def check_index(disk: Disk, ledger: Ledger, base: Base, sequence: int, rules: Rules) -> None:
    """An index of this generation that is not ahead of the journal is caught up; any other is rebuilt."""
    if disk.index is None:
        return
    generation, at, content = disk.index
    usable = at <= sequence and (generation == base.generation or rules.index_by_sequence)
    if usable and ledger[at] != content:
        raise Refused("the index is caught up from rows that are not there")


def recover(disk: Disk, ledger: Ledger, rules: Rules) -> Generator[None, None, tuple[Facts, int]]:
    """Bring columns and episodes.log to the state after the last surviving record, and sync them.

    Returns what the records say, and the last record's sequence.
    """
    base, records, used = read_journal(disk.journal, rules)
    if not rules.change_before_journal_fsync:
        # No column may change by a record that is only in the page cache; pages that a failed fsync left
        # clean are written again, or fsync would not touch them.
        for segment in used:
            if not rules.fsync_without_rewrite:
                segment.file.write(0, segment.file.cells[:])
            disk.fsync(segment.file)
            yield
        disk.journal.sync()
        yield
    covered, log_length = base.sequence, base.facts.log_length
    for record in records:
        if isinstance(record, Mark):
            covered = record.sequence if rules.mark_covers_itself else record.covers
            log_length = record.log_length
    facts, sequence, entries = base.facts, base.sequence, list[tuple[int, int]]()
    for record in records:
        if record.sequence > covered and not isinstance(record, Base):
            if not replay(disk, record, facts, rules):
                break
            if isinstance(record, Publish | Annotate) and record.entry is not None:
                entries.append((record.sequence, record.entry))
            yield
        facts = record.facts if isinstance(record, Base) else record.apply(facts, disk.capacity)
        sequence = record.sequence
    check_index(disk, ledger, base, sequence, rules)
    facts = facts._replace(log_length=recover_log(disk, sequence, log_length, entries, rules))
    yield
    if not rules.recover_without_sync:
        for file in disk.files():
            disk.fsync(file)
            yield
    return facts, sequence
