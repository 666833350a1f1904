"""What opening a store does with its journal: find the last state that is whole, and take it over.

Used by the Zarr storage, once per opening. The order (ARCHITECTURE.md, the crash rule): verify what was
published after the last durable mark, end at the first batch that is not whole, apply changes in place again,
rebuild episodes. It writes only columns and episodes.log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from expstore.core.draw_state import Randomness, from_json
from expstore.core.id_set import NO_GAPS, Gaps
from expstore.core.values import IntArray, Window, cut_run
from expstore.episodes.log import LogEntry, unpack_entry
from expstore.episodes.sessions import End, Resume
from expstore.episodes.table import EpisodeTable
from expstore.errors import CorruptionError
from expstore.storages.columns.checksums import BLOCK_ROWS, blocks_of
from expstore.storages.format.journal import Kind, Record
from expstore.storages.format.records import Mark, Publish, Redo

if TYPE_CHECKING:
    from expstore.storages.format.control_page import StatePage

__all__ = [
    "Past",
    "describe_past",
    "lost_records",
    "pending_changes",
    "read_past",
    "retell",
    "rows_written",
    "tell",
    "unsettled_blocks",
    "verify",
]


#: The records that say something of rows or episodes.
TOLD = frozenset({Kind.PUBLISH, Kind.DELETE, Kind.RETIRE, Kind.ANNOTATE, Kind.END, Kind.RESUME})


@dataclass(slots=True)
class Past:
    """Hold what the journal says.

    Args:
        base: The first record's content.
        records: Those after it that count.
        settled: How many of `records` a durable mark covers.
        sequence: Of the last record that counts.
        last: Newest published id.
        retired: Newest id given up.
        draw: Batches handed out, as far as records say.
        progress: How far a sampler had come at the newest mark.
        randomness: The state of the user's generator then.
        limits: What a rate limiter had counted then.
        max_priority: The largest priority so far.
        log_length: Bytes of episodes.log that a mark covers.
        synced: Newest id that a mark covers.
        clean: Whether the writer closed the store.
        content: Position of the last record that says something of rows.
        index_floor: The same at the base: an older index must be rebuilt.
        cut: Batches that were not whole and are dropped.
        gaps: Rows that were given up, because their bytes were damaged.
    """

    base: dict[str, Any]
    records: list[Record]
    settled: int
    sequence: int
    last: int
    retired: int
    draw: int
    progress: tuple[int, ...]
    max_priority: float
    log_length: int
    synced: int
    clean: bool
    content: tuple[int, int]
    index_floor: tuple[int, int]
    randomness: Randomness | None = None
    limits: tuple[int, int] = (0, 0)
    cut: int = 0
    gaps: Gaps = NO_GAPS
    publishes: list[Publish] = field(default_factory=list)

    def window(self, capacity: int | None) -> Window:
        """Return the rows that can be read."""
        low = self.window_low(capacity)
        # Ids beyond the last one will be given again, to rows that can be read.
        return Window(low, self.last, self.gaps.between(low, self.last))

    def unsynced(self) -> Iterator[Publish]:
        """Yield the records of rows that no mark covers.

        After a power cut such a row has the priority that is given there: its place in the column has no
        checksum that would tell whether it came to the disk.
        """
        return (publish for publish in self.publishes if publish.last_id > self.synced)

    def window_low(self, capacity: int | None) -> int:
        """Return the newest id that cannot be read any more."""
        return self.retired if capacity is None else max(self.retired, self.last - capacity)


def read_past(records: list[Record], gaps: Gaps) -> Past:
    """Read the records up to the last durable mark; `verify` judges those after it.

    Args:
        records: As the journal has them.
        gaps: Rows that were given up, as expstore.json has them.
    """
    base = records[0].json()
    rest = records[1:]
    past = Past(
        base=base,
        records=rest,
        settled=0,
        sequence=records[0].sequence,
        last=base["last"],
        retired=base["retired"],
        draw=base["draw"],
        progress=tuple(base["progress"]),
        max_priority=base["max_priority"],
        log_length=base["log_length"],
        synced=base["last"],
        clean=bool(rest) and rest[-1].kind is Kind.CLOSE,
        content=(base["content"][0], base["content"][1]),
        index_floor=(base["content"][0], base["content"][1]),
        randomness=from_json(base["randomness"]),
        limits=(base["limits"][0], base["limits"][1]),
        gaps=gaps,
    )
    for place, record in enumerate(rest):
        if record.kind is Kind.MARK:
            mark = Mark.unpack(record.body)
            # Records between the one it covers and the mark itself are not settled.
            past.settled = sum(r.sequence <= mark.sequence for r in rest[: place + 1])
            past.log_length, past.synced = mark.log_length, mark.last_id
    return past


def lost_records(page: StatePage, past: Past, *, fits: bool) -> str | None:
    """Return what is wrong with a journal that is shorter than STATE says; None: nothing.

    A record that was published outlives its writer: only the machine can lose it. So does that of a close.

    Args:
        page: STATE.
        past: What the journal says.
        fits: Whether the page is of this store and this start of the machine.
    """
    known, last = page.get("sequence"), past.records[-1].sequence if past.records else past.sequence
    if fits and page.get("generation") == past.base["generation"] and known > last:
        return f"ends with record {last}, though {known} was written"
    return None


def verify(past: Past, whole: Callable[[Publish], bool], column_set: int | None = None) -> None:
    """Walk the records; end at the first one after the mark whose rows are not whole.

    Args:
        past: What the journal says; its numbers follow the walk.
        whole: Says whether the rows of a record stand in the columns; asked in order.
        column_set: Of the columns that there are: before others are, a mark covers what speaks of these.
            None: nobody looks at columns.

    Raises:
        CorruptionError: A record after the mark speaks of other columns.
    """
    for place, record in enumerate(past.records):
        if record.kind is Kind.PUBLISH:
            publish = Publish.unpack(record.body)
            if place >= past.settled and column_set not in (None, publish.column_set):
                raise CorruptionError(
                    f"record {record.sequence} of the journal has rows of column set {publish.column_set}, "
                    f"the store has {column_set}"
                )
            if place >= past.settled and not whole(publish):
                past.cut = sum(r.kind is Kind.PUBLISH for r in past.records[place:])
                past.records = past.records[:place]
                past.clean = False
                return
            past.publishes.append(publish)
            past.last, past.draw = publish.last_id, max(past.draw, publish.draw)
            past.max_priority = max(past.max_priority, publish.priority)
        elif record.kind is Kind.MARK:
            mark = Mark.unpack(record.body)
            past.draw = mark.draw if mark.set_back else max(past.draw, mark.draw)
            past.progress, past.randomness, past.limits = mark.progress, mark.randomness, mark.limits
            past.max_priority = max(past.max_priority, mark.max_priority)
        elif record.kind is Kind.REDO:
            past.max_priority = max(past.max_priority, Redo.replaced(record.body)[1])
        elif record.kind is Kind.RETIRE:
            said = record.json()
            past.retired = max(past.retired, said["through"])
            if "blocks" in said:  # rows between others have left, of which no delta speaks
                past.index_floor = (past.base["generation"], record.sequence)
        elif record.kind is Kind.DELETE:
            past.retired = past.last = record.json()["last"]
        past.sequence = record.sequence
        if record.kind in TOLD:
            past.content = (past.base["generation"], record.sequence)


def retell(
    past: Past, table: EpisodeTable, low: int, rows: Callable[[int, int], tuple[IntArray, IntArray] | None]
) -> tuple[int, list[LogEntry]]:
    """Tell an empty table of episodes what happened.

    Args:
        past: What the journal says, verified.
        table: Is filled.
        low: The newest id that cannot be read any more.
        rows: Returns episodes and steps of a run of rows: (first id, rows); None if it cannot.

    Returns:
        How many rows were ever written, and the log entries of what was published after the mark:
        episodes.log may lack them.
    """
    table.load_base(past.base["episodes"])
    base_last = past.base["last"]
    found = rows(low + 1, base_last - low) if base_last > low else None
    if found is not None:
        ids = np.arange(base_last + 1 - found[0].size, base_last + 1)  # the oldest may be overwritten by now
        kept = ~past.gaps.holds(ids)
        if kept.all():
            table.load_rows(ids, *found)
        else:
            table.load_rows(ids[kept], found[0][kept], found[1][kept])
    entries: list[LogEntry] = []
    write_count = int(past.base["write_count"])
    for place, record in enumerate(past.records):
        _, new = tell(record, table)
        write_count += rows_written(record)
        if place >= past.settled:
            entries += new
    table.give_up(past.gaps)
    return write_count, entries


def tell(record: Record, table: EpisodeTable) -> tuple[Publish | None, list[LogEntry]]:
    """Tell a table of episodes what a record says of them.

    Returns:
        What it publishes, and the log entries that it brings.
    """
    if record.kind is Kind.ANNOTATE:
        return None, table.annotate(unpack_entry(record.body), record.sequence)
    if record.kind is Kind.DELETE:
        return None, table.end_episodes(record.sequence)
    if record.kind is Kind.END:
        return None, table.apply(End.unpack(record.json()), record.sequence)
    if record.kind is Kind.RESUME:
        return None, table.apply(Resume.unpack(record.json()), record.sequence)
    if record.kind is not Kind.PUBLISH:
        return None, []
    publish = Publish.unpack(record.body)
    return publish, table.commit(
        publish.segments,
        publish.sources,
        first_id=publish.first_id,
        time=publish.time,
        sequence=record.sequence,
        info=publish.info,
    )


def pending_changes(
    past: Past,
    slots: int | None,
    load: Callable[[bytes], Redo],
    times: Callable[[IntArray], IntArray] | None = None,
) -> list[Redo]:
    """Return the changes in place after the mark, cut to rows whose slots still belong to them.

    Args:
        past: What the journal says, verified.
        slots: How many a ring has.
        load: Reads the body of a redo record.
        times: Returns `_row/time` of rows, as it stands in the columns; None: what stands there may be lost
            priorities beside newer times.
    """
    changes = []
    for record in past.records[past.settled :]:
        if record.kind is Kind.REDO:
            redo = load(record.body)
            changes.append(redo.cut(redo.ids > (0 if slots is None else past.last - slots)))
    replaced = [redo for redo in changes if redo.replaces]
    if times is None or not replaced:
        return [redo for redo in changes if redo.ids.size]
    # As in `_apply`: where the last time of a row is there, so is its priority, perhaps a newer one.
    ids = np.concatenate([redo.ids for redo in replaced])
    newest = np.concatenate([redo.columns[-1] for redo in replaced])[::-1]
    rows, at = np.unique(ids[::-1], return_index=True)
    there = rows[times(rows) == newest[at]]
    found = []
    for redo in changes:
        known = np.isin(redo.ids, there) if redo.replaces else np.zeros(redo.ids.size, bool)
        found.append(redo.cut(~known))
        if known.any():
            found.append(redo.cut(known, slice(1, None)))
    return [redo for redo in found if redo.ids.size]


def rows_written(record: Record) -> int:
    """Return how many rows a record brings."""
    if record.kind is Kind.PUBLISH:
        return Publish.rows_of(record.body)
    return Redo.replaced(record.body)[0] if record.kind is Kind.REDO else 0


def unsettled_blocks(
    past: Past,
    *,
    slots: int | None,
    spare: int,
    horizon: int | None,
    limit: int,
    load: Callable[[bytes], Redo],
) -> set[int]:
    """Return the blocks to which the last writer may have written after its last mark.

    Args:
        past: What it left, verified.
        slots: How many a ring has.
        spare: How many of them are spare.
        horizon: The newest id whose slot it may have written to, as STATE says; None: it is of another
            start of the machine.
        limit: How many slots there can be.
        load: Reads the body of a redo record.
    """
    first = past.synced
    if slots is None:
        touched = blocks_of([(first, 0, limit - first)])
    else:
        count = _reach(past, slots, spare, horizon) - first
        touched = blocks_of([(0, 0, limit)] if count >= slots else cut_run(first + 1, count, slots))
    for record in past.records[past.settled :]:
        if record.kind is Kind.REDO:
            ids = load(record.body).ids
            touched.update(((ids - 1 if slots is None else (ids - 1) % slots) // BLOCK_ROWS).tolist())
        elif record.kind is Kind.RETIRE:
            for start, stop in record.json().get("blocks", ()):
                touched.update(range(start, min(stop, limit // BLOCK_ROWS)))
    return touched


def _reach(past: Past, slots: int, spare: int, horizon: int | None) -> int:
    if horizon is not None:
        return max(past.last, horizon)
    reach = max(past.last, past.synced + spare)
    if past.retired:
        # Before a batch longer than the spare, rows are retired up to where it will have got.
        reach = past.synced + slots if past.retired >= past.synced else max(reach, past.retired + slots)
    return reach


def describe_past(past: Past, cut_episodes: int) -> str | None:
    """Return one line about what opening did; None after a clean close."""
    if past.clean:
        return None
    after = past.last - past.synced
    parts = [f"{max(0, after)} rows since the last sync kept"]
    if past.cut:
        parts.append(f"{past.cut} unfinished writes dropped")
    if cut_episodes:
        parts.append(f"{cut_episodes} open episodes ended as cut")
    return "the last writer did not close the store: " + ", ".join(parts)
