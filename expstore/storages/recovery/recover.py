"""Decide which records of a journal are valid after a crash, and what must be redone.

Used by the writer's opening, by readers of a store without a writer, and by verification. The order (see
"Recovery" in docs/format.md): verify what was committed after the newest durable checkpoint, stop at the
first batch that is not whole, reapply updates, rebuild the episodes. This module changes no file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from expstore.core.geometry import RingGeometry
from expstore.core.id_set import IdSet
from expstore.core.parsing import parsing
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


@dataclass(slots=True)
class Past:
    """The journal that a writer has left.

    Args:
        base: The contents of the first record.
        records: The valid records after the first.
        settled: How many of `records` the newest durable checkpoint covers.
        synced: The newest id that the checkpoint covers.
        log_length: How many bytes of episodes.log the checkpoint covers.
        annotated: The address up to which the checkpoint covers the records of annotations.
        clean: Whether the writer closed the store.
        deleted: Deleted rows, as listed in expstore.json; `verify` adds those that records delete.
        state: The state after the records; `verify` computes it.
        cut: How many batches were not whole, and are dropped.
        publishes: The commit records among `records`.
    """

    base: dict[str, Any]
    records: list[Record]
    settled: int
    synced: int
    log_length: int
    annotated: int
    clean: bool
    deleted: IdSet
    state: LogState
    cut: int = 0
    publishes: list[Publish] = field(default_factory=list)

    def find_stored(self, capacity: int | None) -> Window:
        """Return the stored rows."""
        return self.state.find_stored(capacity, self.deleted)

    def find_unsynced(self) -> Iterator[Publish]:
        """Yield the commit records of rows that no checkpoint covers.

        After a power failure such a row gets the priority in its record: the priority column has no checksum
        that could tell whether a later value was synced.
        """
        return (publish for publish in self.publishes if publish.last_id > self.synced)


@parsing("the journal")
def read_past(records: list[Record], deleted: IdSet) -> Past:
    """Find the newest durable checkpoint in the journal; `verify` decides which later records are valid.

    Args:
        records: The records of the journal.
        deleted: Deleted rows, as listed in expstore.json.
    """
    base = records[0].json()
    rest = records[1:]
    past = Past(
        base=base,
        records=rest,
        settled=0,
        synced=base["last"],
        log_length=base["log_length"],
        annotated=base.get("annotated", 0),
        clean=bool(rest) and rest[-1].kind is Kind.CLOSE,
        deleted=deleted,
        state=LogState.of(records[0]),
    )
    for place, record in enumerate(rest):
        if record.kind is Kind.MARK:
            mark = Mark.unpack(record.body)
            # Records between the last one it covers and the checkpoint record itself are not settled.
            past.settled = sum(r.sequence <= mark.sequence for r in rest[: place + 1])
            past.log_length, past.synced, past.annotated = mark.log_length, mark.last_id, mark.annotated
    return past


def explain_lost_records(page: StatePage, past: Past, *, fits: bool) -> str | None:
    """Return why a journal is shorter than STATE says; None if it is not.

    After a process crash every appended record, also a close record, is still in the page cache. Only a power
    failure can lose records, so otherwise a shorter journal is damaged.

    Args:
        page: The STATE page.
        past: The journal.
        fits: Whether the page belongs to this store and was written since the machine started.
    """
    known, last = page.get("sequence"), past.records[-1].sequence if past.records else past.state.sequence
    if fits and page.get("generation") == past.base["generation"] and known > last:
        return f"ends with record {last}, though {known} was written"
    return None


@parsing("the journal")
def verify(past: Past, whole: Callable[[Publish], bool], column_set: int | None = None) -> None:
    """Apply the records; stop at the first one after the checkpoint whose rows are not whole.

    Args:
        past: The journal; its fields are updated.
        whole: Returns whether the rows of a record are in the columns; called in order.
        column_set: The column set of the store's columns. Records of an earlier column set must be covered by
            the checkpoint. None: columns are not checked.

    Raises:
        CorruptionError: A record after the checkpoint refers to another column set.
    """
    for place, record in enumerate(past.records):
        publish = None
        if record.kind is Kind.PUBLISH:
            publish = Publish.unpack(record.body)
            if place >= past.settled and column_set not in (None, publish.column_set):
                raise CorruptionError(
                    f"record {record.sequence} of the journal has rows of column set {publish.column_set}, "
                    f"but the store has {column_set}"
                )
            if place >= past.settled and not whole(publish):
                past.cut = sum(r.kind is Kind.PUBLISH for r in past.records[place:])
                past.records = past.records[:place]
                past.clean = False
                break
            past.publishes.append(publish)
        past.state.apply(record, publish)
    past.deleted = past.deleted.join(past.state.deleted)


def check_dims(geometry: RingGeometry, past: Past) -> None:
    """Check that the sizes of the dims are known if there are rows.

    Raises:
        CorruptionError: expstore.json has other dims than rows need.
    """
    if past.state.last and len(geometry.dims) != geometry.ndim - 1:
        raise CorruptionError(
            f"the store has rows of {geometry.ndim} dims, and dims of sizes {geometry.dims}"
        )


@parsing("the journal")
def rebuild_episodes(
    past: Past, table: EpisodeTable, low: int, rows: Callable[[int, int], tuple[IntArray, IntArray] | None]
) -> list[LogEntry]:
    """Fill an empty episode table from the records.

    Args:
        past: The journal, verified.
        table: The table to fill.
        low: The newest id that can no longer be read.
        rows: Called with (first id, number of rows); returns episodes and steps of these rows, None if they
            cannot be read.

    Returns:
        The log entries of what was committed after the checkpoint: episodes.log may lack them.
    """
    table.load_base(past.base["episodes"])
    base_last = past.base["last"]
    found = rows(low + 1, base_last - low) if base_last > low else None
    if found is not None:
        ids = np.arange(base_last + 1 - found[0].size, base_last + 1)  # the oldest rows may be overwritten
        kept = ~past.deleted.holds(ids)
        if kept.all():
            table.load_rows(ids, *found)
        else:
            table.load_rows(ids[kept], found[0][kept], found[1][kept])
    entries: list[LogEntry] = []
    publishes = iter(past.publishes)
    for place, record in enumerate(past.records):
        publish = next(publishes) if record.kind is Kind.PUBLISH else None
        new = apply_to_episodes(record, table, publish)
        if place >= past.settled:
            entries += new
    table.give_up(past.deleted)
    return entries


@parsing("the journal")
def find_pending_changes(
    past: Past,
    slots: int | None,
    load: Callable[[bytes], Redo],
    times: Callable[[IntArray], IntArray] | None = None,
) -> list[Redo]:
    """Return the updates after the checkpoint, limited to rows that still own their slots.

    Args:
        past: The journal, verified.
        slots: Number of slots of a ring; None: the store is unbounded.
        load: Reads an update from the body of its record.
        times: Returns `_row/time` of rows, as stored in the columns. None: the columns cannot be trusted,
            because a power failure may have lost priorities of rows whose newer times survived.
    """
    changes = []
    for record in past.records[past.settled :]:
        if record.kind is Kind.REDO:
            redo = load(record.body)
            changes.append(redo.cut(redo.ids > (0 if slots is None else past.state.last - slots)))
    replaced = [redo for redo in changes if redo.replaces]
    if times is None or not replaced:
        return [redo for redo in changes if redo.ids.size]
    # As in `_apply`: if a row has its last time, it has its priority, too, perhaps a newer one.
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


@parsing("the journal")
def find_changed_ids(past: Past, load: Callable[[bytes], Redo]) -> list[tuple[int, IntArray]]:
    """Return the number and the ids of each update after the checkpoint."""
    changes = [record for record in past.records[past.settled :] if record.kind is Kind.REDO]
    return [(record.sequence, load(record.body).ids) for record in changes]


@parsing("the journal")
def find_unsettled_blocks(
    past: Past,
    *,
    slots: int | None,
    spare: int,
    horizon: int | None,
    limit: int,
    load: Callable[[bytes], Redo],
) -> set[int]:
    """Return the blocks that the last writer may have written to after its last checkpoint.

    Args:
        past: The journal, verified.
        slots: Number of slots of a ring; None: the store is unbounded.
        spare: How many of the slots are spare.
        horizon: The newest id whose slot may have been written to, by STATE; None: STATE is from before the
            machine's last start.
        limit: Upper bound of the number of slots.
        load: Reads an update from the body of its record.
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
        # Before a batch longer than the spare slots, rows are evicted up to the batch's end in advance.
        reach = past.synced + slots if retired >= past.synced else max(reach, retired + slots)
    return reach


def describe_past(past: Past, cut_episodes: int) -> str | None:
    """Return a line that describes what recovery did; None after a clean close."""
    if past.clean:
        return None
    after = past.state.last - past.synced
    parts = [f"{max(0, after)} rows since the last sync kept"]
    if past.cut:
        parts.append(f"{past.cut} unfinished writes dropped")
    if cut_episodes:
        parts.append(f"{cut_episodes} open episodes ended as cut")
    return "the last writer did not close the store: " + ", ".join(parts)
