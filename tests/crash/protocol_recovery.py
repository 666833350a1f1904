"""The protocol's rules, each with a switch that breaks it, and the protocol of opening.

Used by protocol_writer.py, which opens a store with `recover`, and by the tests for `Rules`. `recover` does
not create the new segment: the writer does, and accepts calls only after that.
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


@dataclass(frozen=True)
class Rules:
    """The protocol, with one switch for each way of breaking it. The default is the correct protocol."""

    capacity: int | None = None  # fixed instead of random
    spare: int | None = None  # fixed instead of random
    # rows and slots
    journal_first: bool = False  # the record before the columns, and a sync may cover it in between
    no_spare: bool = False  # slots are overwritten in place
    reuse_before_mark: bool = False  # a slot is reused as soon as its row is no longer readable
    wait_counts_rows: bool = False  # the wait rule counts rows instead of ids: an `empty()` skips ids
    # sync
    mark_before_fsync: bool = False  # the mark is appended before the columns are synced
    mark_before_journal_fsync: bool = False  # the mark is appended before the journal is synced
    mark_without_fsync: bool = False  # slots are released before the mark itself is durable
    note_after_fsync: bool = False  # the mark covers the last record at the time of its own appending
    # durability="sync"
    sync_mode_without_fsync: bool = False  # the call returns before its record is durable
    sync_mode_newest_only: bool = False  # after a rotation, only the newest segment is synced
    sync_mode_record_before_rows: bool = False  # the record is durable, but rows outside of it are not
    # redo
    redo_without_sync: bool = False  # rows are changed whose publish record no mark covers
    redo_without_fsync: bool = False  # columns are changed before the redo record is durable
    # rows whose a is the b of an earlier row and is stored there
    no_reach: bool = False  # the slot of the earlier row may be reused while the row is readable
    no_copies: bool = False  # b is changed although other rows are stored with it
    copies_beside: bool = False  # these rows get copies, but the record does not contain them
    # long extends
    long_without_retire: bool = False
    retire_without_fsync: bool = False
    retire_beyond_last: bool = False  # the retired range includes ids that were not assigned yet
    long_returns_unsynced: bool = False  # the retired rows are deleted before the new ones are synced
    # rotation
    rotation_without_sync: bool = False  # the old segment is removed although no mark reaches its end
    unlink_before_dir_fsync: bool = False
    fsync_last_segment_only: bool = False  # "the journal" means only its last segment, without the directory
    rotate_twice: bool = False  # a second rotation before the first one's directory entry is durable
    base_from_published: bool = False  # the base comes from memory instead of the last record
    base_without_retired: bool = False
    # opening
    no_verify: bool = False  # the payload is not checked
    read_from_lowest: bool = False  # the oldest existing segment starts the journal
    ignore_missing_segment: bool = False  # a segment is used although the tail of its predecessor is lost
    any_mark_is_corruption: bool = False  # a mark after a bad record that does not cover it is refused
    mark_covers_itself: bool = False  # replay starts after the mark instead of the position that it covers
    change_before_journal_fsync: bool = False  # redo records that are only in the page cache are applied
    fsync_without_rewrite: bool = False  # the old journal is fsynced, but a failed fsync left its pages clean
    recover_without_rewrite: bool = False  # pages that a failed fsync left clean are trusted
    recover_without_sync: bool = False  # the new segment is written before the columns are synced
    log_by_sequence: bool = False  # episodes.log entries are not in the records, only stamped with a sequence
    index_by_sequence: bool = False  # an index of another generation is caught up


def read_journal(journal: Directory, rules: Rules) -> tuple[Base, list[Record], list[Segment]]:
    """Find where the journal starts and follow it to its end; return the used segments too."""
    names = sorted(journal.entries)
    read = {number: journal.entries[number].read() for number in names}
    if rules.read_from_lowest:
        start: int | None = names[0]
    else:  # an opening's base needs no predecessor; another's predecessor is removed only when not needed
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
        raise Refused(f"a mark follows a bad record {sequence + 1}")
    return base, records, used


def replay(disk: Disk, record: Record, facts: Facts, rules: Rules) -> bool:
    """Write a record's bytes again; return False if its payload is missing."""
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
            if i > facts.last - disk.slots:  # otherwise the slot belongs to another id now
                for _ in disk.change(i, change):
                    pass
    return True


def recover_log(disk: Disk, sequence: int, length: int, entries: list[tuple[int, int]], rules: Rules) -> int:
    """Truncate episodes.log to the length that the last mark covers; append later entries again."""
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
    """Update an index of this generation that is not ahead of the journal; rebuild any other."""
    if disk.index is None:
        return
    generation, at, content = disk.index
    usable = at <= sequence and (generation == base.generation or rules.index_by_sequence)
    if usable and ledger[at] != content:
        raise Refused("the index is updated from rows that do not exist")


def recover(disk: Disk, ledger: Ledger, rules: Rules) -> Generator[None, None, tuple[Facts, int]]:
    """Bring columns and episodes.log to the state after the last surviving record, and sync them.

    Returns the state in the records, and the last record's sequence.
    """
    base, records, used = read_journal(disk.journal, rules)
    if not rules.change_before_journal_fsync:
        # No column may be changed by a record that is only in the page cache. Pages that a failed fsync left
        # clean are written again, because fsync would skip them.
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
