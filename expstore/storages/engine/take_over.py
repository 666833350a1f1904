"""Bring a storage to the state that its journal describes.

Used once per opening for writing. It writes only columns.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from expstore.core.values import IntArray, Window
from expstore.episodes.log import LogEntry
from expstore.errors import CorruptionError
from expstore.schema.row_fields import ROW_FIELDS
from expstore.schema.schema import Schema
from expstore.storages.columns.payload import split_payload
from expstore.storages.format.records import Publish
from expstore.storages.recovery.recover import Past, pending_changes, retell, verify

if TYPE_CHECKING:
    from expstore.storages.columns.column_set_writer import WritableColumns
    from expstore.storages.engine.store import JournaledStorage

__all__ = ["take_over"]


def take_over(past: Past, storage: JournaledStorage) -> list[LogEntry]:
    """Bring storage, episodes and columns to the state that the records describe.

    Returns:
        Log entries of what was published after the mark: episodes.log may have lost them.
    """
    columns = storage.columns
    column_set = storage.manifest.column_set
    verify(past, lambda publish: _whole(publish, columns, storage, past.synced), column_set)
    low = past.window_low(storage.capacity)
    if columns is not None:
        for first, count in Window(low, past.last, past.gaps).runs():
            columns.require_rows(first, count)
        _redo(past, storage, columns, storage.require_schema())
    storage.write_count, entries = retell(past, storage.episodes, low, partial(_row_columns, storage))
    return entries


def _whole(publish: Publish, columns: WritableColumns | None, storage: JournaledStorage, synced: int) -> bool:
    if columns is None:
        return False
    if publish.payload:
        _apply(publish, columns, storage, synced)
        return True
    written = storage.geometry.runs(*publish.written)
    if storage.same_boot:
        columns.require(written)  # only the machine can lose a shard whose rows were published
    # Other rows may be found in their places that have the very same bytes.
    if columns.lacks(*publish.written) or columns.checksum(*publish.written) != publish.checksum:
        return False
    # The shard of their priorities may be lost, which have no checksum: they come from the record then.
    columns.ensure(max((slot + n for slot, _, n in written), default=0))
    return True


def _apply(publish: Publish, columns: WritableColumns, storage: JournaledStorage, synced: int) -> None:
    """Write rows to the columns whose bytes the record has."""
    pieces = storage.geometry.runs(publish.first_id, publish.count)
    parts = split_payload(columns, publish.payload, publish.count)
    # Priorities are written first, times last: where these are there, so are priorities, perhaps newer ones.
    # Ids alone would not do: a life that a power cut has undone may have given the same ones.
    ids, times = columns.columns[-len(ROW_FIELDS)], columns.columns[-2]
    there = all(
        slot + n <= columns.ready
        and (ids.read(slot, n) == np.arange(n) + publish.first_id + offset).all()
        and (times.read(slot, n) == publish.time).all()
        for slot, offset, n in pieces
    )
    priorities = None if there else np.full(publish.count, publish.priority, np.float32)
    columns.write_parts(pieces, parts, priorities, synced=synced)


def _redo(past: Past, storage: JournaledStorage, columns: WritableColumns, schema: Schema) -> None:
    """Apply changes in place again."""

    def times(ids: IntArray) -> IntArray:
        return columns.columns[-2].take(storage.geometry.slot_of(ids))

    known = times if storage.same_boot or past.clean else None
    for redo in pending_changes(
        past, storage.geometry.slots, lambda body: storage.load_redo(body, schema), known
    ):
        for place, values in zip(redo.places, redo.columns, strict=True):
            columns.columns[place].write_rows(storage.geometry.slot_of(redo.ids), values)


def _row_columns(storage: JournaledStorage, first_id: int, count: int) -> tuple[IntArray, IntArray] | None:
    if storage.columns is None:
        return None
    schema = storage.require_schema()
    places = [len(schema.fields) + 1, len(schema.fields) + 2]
    parts = storage.views(places, first_id, count)
    episodes, steps = (np.concatenate(part) for part in parts)
    ids = np.arange(first_id, first_id + count)
    if ((episodes < 1) & ~storage.manifest.gaps.holds(ids)).any():
        raise CorruptionError(f"{storage.path}/columns/_row/episode has rows without an episode")
    return episodes, steps
