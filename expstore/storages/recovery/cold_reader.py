"""Read the journal of a store without a writer, and write nothing.

Used by followers. The rules for records are those of recovery: a batch after the last durable checkpoint must
be whole. Rows that recovery would write to the columns are kept in memory instead, and hide the columns'
rows.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from expstore.core.geometry import RingGeometry
from expstore.core.values import Array, IntArray
from expstore.disk.files import Disk
from expstore.episodes.log import LogEntry
from expstore.episodes.table import EpisodeTable
from expstore.errors import CorruptionError
from expstore.schema.row_fields import ROW_FIELDS
from expstore.storages.columns.column_set import ReadColumns
from expstore.storages.columns.memtable import Overlay
from expstore.storages.columns.payload import join_payload, split_payload
from expstore.storages.format.journal import no_records, read_journal
from expstore.storages.format.manifest import Manifest
from expstore.storages.format.paths import COLUMNS, JOURNAL
from expstore.storages.format.records import Publish, Redo, load_redo
from expstore.storages.recovery.recover import (
    Past,
    check_dims,
    find_changed_ids,
    find_pending_changes,
    read_past,
    rebuild_episodes,
    verify,
)

_logger = logging.getLogger("expstore")


@dataclass(slots=True)
class Replay:
    """The contents of the journal and the columns together.

    Args:
        past: The journal; None: it has no records yet.
        columns: The columns, opened for reading; None: there are no fields yet.
        overlay: Rows that the columns lack.
        table: The episodes.
        entries: Log entries of what was committed after the checkpoint.
        changes: The updates after the checkpoint: their numbers and ids; None: the writer closed the store.
    """

    past: Past | None
    columns: ReadColumns | None
    overlay: Overlay
    table: EpisodeTable
    entries: list[LogEntry] = field(default_factory=list)
    changes: list[tuple[int, IntArray]] | None = None


class StoreFolder(Protocol):
    """The parts of a store that reading needs."""

    disk: Disk
    path: Path
    manifest: Manifest

    @property
    def geometry(self) -> RingGeometry:
        """How ids, slots and indices correspond."""

    @property
    def capacity(self) -> int | None:
        """The largest number of readable rows; None: unbounded."""


def open_columns(storage: StoreFolder) -> ReadColumns | None:
    """Open a store's columns for reading; return None if there are no fields yet."""
    schema = storage.manifest.schema
    if schema is None:
        return None
    fields = (*schema.fields, *ROW_FIELDS)
    return ReadColumns(storage.disk, storage.path / COLUMNS, fields, storage.geometry.slots)


def replay(storage: StoreFolder, *, same_boot: bool) -> Replay:
    """Read the journal of a store without a writer.

    Args:
        storage: The store's folder and settings; not changed.
        same_boot: Whether the machine has not been restarted since the store was written to. Then all
            committed rows exist.

    Raises:
        CorruptionError: The journal is damaged, or missing although rows were written.
        StorageError: A file could not be read; a writer that has just opened the store may have removed it.
    """
    records = read_journal(storage.disk, storage.path / JOURNAL)
    if not records:
        if storage.manifest.schema is not None:
            raise no_records(storage.disk, storage.path / JOURNAL)
        return Replay(None, None, Overlay(), EpisodeTable())
    columns = open_columns(storage)
    try:
        return _replay(storage, read_past(records, storage.manifest.deleted), columns, same_boot=same_boot)
    except BaseException:
        if columns is not None:
            columns.close()
        raise


def _replay(storage: StoreFolder, past: Past, columns: ReadColumns | None, *, same_boot: bool) -> Replay:
    found = Replay(past, columns, Overlay(), EpisodeTable(generation=past.base["generation"]))
    if columns is not None:
        if columns.annotations is not None and not (same_boot or past.clean):
            columns.annotations.covered = past.annotated
        columns.look(_slots_of(storage, past.synced))
    column_set = storage.manifest.column_set
    verify(past, lambda publish: _whole(publish, found, storage, same_boot), column_set)
    schema = storage.manifest.schema
    check_dims(storage.geometry, past)
    if columns is not None:
        columns.look(_slots_of(storage, past.state.last))
        columns.end_at(past.state.last)
    if schema is not None and columns is not None:
        place = len(columns.columns) - 2

        def times(ids: IntArray) -> IntArray:
            (stamps,) = found.overlay.read_rows(columns, storage.geometry.slot_of(ids), [place])
            return np.asarray(stamps)

        def load(body: bytes) -> Redo:
            return load_redo(storage.disk, storage.path, body, schema)

        known = times if same_boot or past.clean else None
        for redo in find_pending_changes(past, storage.geometry.slots, load, known):
            slots = storage.geometry.slot_of(redo.ids)
            for place, values in zip(redo.places, redo.columns, strict=True):
                found.overlay.put(place, slots, values)
        if not past.clean:
            found.changes = find_changed_ids(past, load)
    if columns is not None and not (same_boot or past.clean):
        for publish in past.find_unsynced():
            _lay_priorities(publish, found, storage.geometry.runs(*publish.written))
    low = past.state.find_low(storage.capacity)

    def rows(first_id: int, count: int) -> tuple[IntArray, IntArray] | None:
        if columns is None:
            return None
        return episode_rows(columns, found.overlay, storage.geometry.runs(first_id, count))

    found.entries = rebuild_episodes(past, found.table, low, rows)
    return found


def _slots_of(storage: StoreFolder, last: int) -> int:
    """Return how many slots the ids up to `last` occupy."""
    return last if storage.geometry.slots is None else min(last, storage.geometry.slots)


def _whole(publish: Publish, found: Replay, storage: StoreFolder, same_boot: bool) -> bool:
    columns = found.columns
    if columns is None:
        return False
    pieces = storage.geometry.runs(*publish.written)
    columns.look(max(slot + n for slot, _, n in pieces), due=False)
    try:
        if not columns.lacks(*publish.written) and columns.checksum(*publish.written) == publish.checksum:
            return True
    except CorruptionError:
        if same_boot:  # the rows exist, and reading the damaged file raises the error
            return True
    if publish.payload:
        _lay_over(publish, found, pieces)
    return bool(publish.payload)


def _lay_over(publish: Publish, found: Replay, pieces: list[tuple[int, int, int]]) -> None:
    """Put the rows of a record over the columns."""
    assert found.columns is not None
    slots, group = _slots_in(pieces), found.columns
    run = join_payload(group, split_payload(group, publish.payload, publish.count), pieces)
    for place in group.lay(run):
        found.overlay.put(place, slots, run.values[place])
    _lay_priorities(publish, found, pieces)


def _lay_priorities(publish: Publish, found: Replay, pieces: list[tuple[int, int, int]]) -> None:
    """Put the priority of a record over the priorities of its rows."""
    assert found.columns is not None
    place, slots = len(found.columns.columns) - 1, _slots_in(pieces)
    found.overlay.put(place, slots, np.full(slots.size, publish.priority, np.float32))


def _slots_in(pieces: list[tuple[int, int, int]]) -> IntArray:
    return np.concatenate([np.arange(slot, slot + n) for slot, _, n in pieces])


def episode_rows(
    columns: ReadColumns, overlay: Overlay, pieces: list[tuple[int, int, int]]
) -> tuple[IntArray, IntArray] | None:
    """Copy episodes and steps of a run of rows; return None if they cannot be read."""
    fields = len(columns.columns) - len(ROW_FIELDS)
    found: list[IntArray] = []
    for place in (fields + 1, fields + 2):
        parts: list[Array] = []
        try:
            column = columns.row_fields[place - fields]
            for slot, _, n in pieces:
                mapped = overlay.parts(place, column, slot, n)
                # By the map, the pages of all stored rows would stay resident.
                parts += mapped if overlay else [column.read(slot, n)]
        except CorruptionError as exc:
            # Fields can be read without episodes; queries read the same file, and raise the error.
            _logger.warning("episodes of older rows are not known: %s", exc)
            return None
        found.append(np.concatenate(parts))
    return found[0], found[1]
