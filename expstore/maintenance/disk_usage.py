"""How the fields of a store lie on disk, how much room they take, and for how many more rows there is some.

Used by `expstore info`. It reads zarr.json files, lengths and ids, and no row of the user's.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from expstore.disk.files import Disk
from expstore.errors import StorageError
from expstore.schema.row_fields import ROW_FIELDS
from expstore.storages.columns.column_set import ColumnGroup
from expstore.storages.columns.flat import Column
from expstore.storages.columns.packed.reader import PackedReader
from expstore.storages.format.manifest import Manifest
from expstore.storages.format.paths import COLUMNS

__all__ = ["FieldSize", "StoreSize", "store_size"]

_SAMPLE = 4096


@dataclass(frozen=True, slots=True)
class FieldSize:
    """Say how a field lies on disk.

    Args:
        layout: "flat" or "packed"; None: its zarr.json cannot be read.
        codec: Of what is packed, else None.
        chunk_rows: How many rows are packed together; None: none are.
        disk_bytes: What its files take.
        compression: How many times more the rows in its chunks would take as they are; None: it has none, or
            is flat.
        shared: Which part of its rows lies with the next ones of earlier rows, 0 to 1, by a sample of 4096 of
            packed ones; None: none can, or its files are damaged.
        row_bytes: What a row more takes, on average.
    """

    layout: str | None
    codec: str | None
    chunk_rows: int | None
    disk_bytes: int
    compression: float | None
    shared: float | None
    row_bytes: float


@dataclass(frozen=True, slots=True)
class StoreSize:
    """Say how much room a store takes and has.

    Args:
        disk_bytes: What all of its files take.
        free_bytes: On its disk.
        fields: The user's, in the schema's order.
        row_bytes: What a row more takes in all columns, on average; None: there are no fields yet.
        more_rows: For how many more rows there is space, by that; None: there are no fields yet.
        ring_fits: Whether there is for all that are missing until the ring is full; None: it is none.
    """

    disk_bytes: int
    free_bytes: int
    fields: tuple[FieldSize, ...]
    row_bytes: float | None
    more_rows: int | None
    ring_fits: bool | None


def store_size(disk: Disk, path: Path, manifest: Manifest, held: int) -> StoreSize:
    """Return what a store takes, and what the disk has left.

    The index, the journal and what is known of episodes come on top of what a row takes.

    Args:
        disk: Where files are touched; only read.
        path: The store.
        manifest: Its settings.
        held: How many rows stand in its columns, readable or not.
    """
    schema, slots, free = manifest.schema, manifest.slots, disk.free(path)
    if schema is None:
        return StoreSize(disk.used(path), free, (), None, None, None)
    group = ColumnGroup(disk, path / COLUMNS, (*schema.fields, *ROW_FIELDS), slots, write=False)
    # Somebody may be making the first shards just now.
    for column in group.columns:
        if not column.packed:
            column.look(held, due=False)
    used, means = _segment_sizes(disk, group)
    sizes = [
        FieldSize("segments", manifest.compression, None, used[place], None, None, means[place])
        if place in used
        else _field_size(disk, group, column, held)
        for place, column in enumerate(group.columns)
    ]
    group.close()
    fields = tuple(sizes[: len(schema.fields)])
    row_bytes = sum(size.row_bytes for size in sizes)
    more = int(free / max(1.0, row_bytes))
    fits = None if slots is None else slots - held <= more
    return StoreSize(disk.used(path), free, fields, row_bytes, more, fits)


def _segment_sizes(disk: Disk, group: ColumnGroup) -> tuple[dict[int, int], dict[int, float]]:
    """Return what fields without a fixed size take, by place: of the files, and a row on average."""
    segments = group.segments
    if segments is None:
        return {}, {}
    segments.open_all()
    rows, sizes = segments.field_bytes()
    all_used = disk.used(segments.folder) if disk.exists(segments.folder) else 0
    total = max(1, sum(sizes))
    used = {place: all_used * size // total for place, size in zip(group.segment_places, sizes, strict=True)}
    return used, {place: size / max(1, rows) for place, size in used.items()}


def _field_size(disk: Disk, group: ColumnGroup, column: Column, held: int) -> FieldSize:
    folder, entry = column.folder, column.entry
    used = disk.used(folder) if disk.exists(folder) else 0
    if column.fault is not None:
        return FieldSize(None, None, None, used, None, None, entry.row_bytes)
    if not isinstance(column, PackedReader):
        # Where nothing was written, as for flags that are never set, rows take less.
        row_bytes = min(entry.row_bytes, used / held) if held else entry.row_bytes
        return FieldSize("flat", None, None, used, None, None, row_bytes)
    packing = column.packing
    ratio, shared = None, None
    with contextlib.suppress(StorageError):  # damaged, or a writer gives a file its name just now
        column.look(held)
        ratio, slots = group.packed_size(column)
        if packing.shares and slots.size:
            shared = float((column.distances(np.sort(slots[:: -(-slots.size // _SAMPLE)])) > 0).mean())
    return FieldSize(
        *("packed", packing.codec, packing.rows, used, ratio, shared),
        entry.row_bytes / (ratio or 1),
    )
