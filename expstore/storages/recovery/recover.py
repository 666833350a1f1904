"""Which records of a journal count, and what has to be done again after a crash.

Used by the writer's opening, by readers of a store without a writer, and by verification. The order
(ARCHITECTURE.md, the crash rule): verify what was committed after the newest durable checkpoint, end at the
first batch that is not whole, apply changes in place again, rebuild the episodes. It changes no file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from expstore.core.id_set import Gaps
from expstore.core.values import IntArray, Window, cut_run
from expstore.episodes.log import LogEntry
from expstore.episodes.table import EpisodeTable
from expstore.errors import CorruptionError
from expstore.storages.columns.checksums import BLOCK_ROWS, blocks_of
from expstore.storages.format.journal import Kind, Record
from expstore.storages.format.records import Mark, Publish, Redo
from expstore.storages.recovery.log_state import LogState, apply_to_episodes

if TYPE_CHECKING:
    from expstore.storages.format.control_page import StatePage

__all__ = [
    "Past",
    "describe_past",
    "lost_records",
    "pending_changes",
    "read_past",
    "rebuild_episodes",
    "unsettled_blocks",
    "verify",
]


@dataclass(slots=True)
class Past:
    """The journal that a writer has left.

    Args:
        base: The content of the first record.
        records: Those after it that count.
        settled: How many of `records` the newest durable checkpoint covers.
        synced: The newest id that it covers.
        log_length: How many bytes of episodes.log it covers.
        clean: Whether the writer closed the store.
        gaps: Rows that have left, as expstore.json has them.
        state: What the records say; `verify` makes it.
        cut: How many batches were not whole, and are dropped.
        publishes: The commit records among `records`.
    """

    base: dict[str, Any]
    records: list[Record]
    settled: int
    synced: int
    log_length: int
    clean: bool
    gaps: Gaps
    state: LogState
    cut: int = 0
    publishes: list[Publish] = field(default_factory=list)

    def window(self, capacity: int | None) -> Window:
        """Return the rows that can be read."""
        return self.state.window(capacity, self.gaps)

    def unsynced(self) -> Iterator[Publish]:
        """Yield the records of rows that no checkpoint covers.

        After a power cut such a row has the priority that is given there: its place in the column has no
        checksum that would tell whether it came to the disk.
        """
        return (publish for publish in self.publishes if publish.last_id > self.synced)


def read_past(records: list[Record], gaps: Gaps) -> Past:
    """Find the newest durable checkpoint among records; `verify` decides which of those after it count.

    Args:
        records: As the journal has them.
        gaps: Rows that have left, as expstore.json has them.
    """
    base = records[0].json()
    rest = records[1:]
    past = Past(
        base=base,
        records=rest,
        settled=0,
        synced=base["last"],
        log_length=base["log_length"],
        clean=bool(rest) and rest[-1].kind is Kind.CLOSE,
        gaps=gaps,
        state=LogState.of(records[0]),
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
    known, last = page.get("sequence"), past.records[-1].sequence if past.records else past.state.sequence
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
        publish = None
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
        past.state.apply(record, publish)


def rebuild_episodes(
    past: Past, table: EpisodeTable, low: int, rows: Callable[[int, int], tuple[IntArray, IntArray] | None]
) -> list[LogEntry]:
    """Let an empty table of episodes follow the records.

    Args:
        past: What the journal says, verified.
        table: Is filled.
        low: The newest id that cannot be read any more.
        rows: Returns episodes and steps of a run of rows: (first id, rows); None if it cannot.

    Returns:
        The log entries of what was committed after the checkpoint: episodes.log may lack them.
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
    for place, record in enumerate(past.records):
        new = apply_to_episodes(record, table)
        if place >= past.settled:
            entries += new
    table.give_up(past.gaps)
    return entries


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
            changes.append(redo.cut(redo.ids > (0 if slots is None else past.state.last - slots)))
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
    last, retired = past.state.last, past.state.retired
    if horizon is not None:
        return max(last, horizon)
    reach = max(last, past.synced + spare)
    if retired:
        # Before a batch longer than the spare, rows are retired up to where it will have got.
        reach = past.synced + slots if retired >= past.synced else max(reach, retired + slots)
    return reach


def describe_past(past: Past, cut_episodes: int) -> str | None:
    """Return one line about what opening did; None after a clean close."""
    if past.clean:
        return None
    after = past.state.last - past.synced
    parts = [f"{max(0, after)} rows since the last sync kept"]
    if past.cut:
        parts.append(f"{past.cut} unfinished writes dropped")
    if cut_episodes:
        parts.append(f"{cut_episodes} open episodes ended as cut")
    return "the last writer did not close the store: " + ", ".join(parts)
