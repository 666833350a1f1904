"""How the fields of a store lie on disk, how much room they take, and for how many more rows there is some.

Used by `expstore info`. It reads zarr.json files and lengths, and no row.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from expstore.errors import CorruptionError, StorageError
from expstore.files import Disk
from expstore.manifest import Manifest
from expstore.schema import Field
from expstore.storages.base import ROW_FIELDS
from expstore.storages.folder import COLUMNS
from expstore.storages.packedreader import PackedReader
from expstore.storages.packedrows import PARTIAL
from expstore.storages.packing import Packing
from expstore.storages.zarrmeta import read_packing

__all__ = ["FieldSize", "StoreSize", "store_size"]

_SAMPLE = 4096


@dataclass(frozen=True, slots=True)
class FieldSize:
    """Say how a field lies on disk.

    Args:
        layout: "flat" or "packed"; None: its zarr.json cannot be read.
        codec: Of what is packed, else None.
        interop: Who can read it with other programs; "": every reader of Zarr v3; None: nobody.
        chunk_rows: How many rows are packed together; None: none are.
        disk_bytes: What its files take.
        compression: How many times more its rows would take as they are; None: it has none, or is flat.
        shared: Which part of its rows lies with the next ones of earlier rows, 0 to 1, by a sample of 4096;
            None: none can, or its files are damaged.
        row_bytes: What a row more takes, on average.
    """

    layout: str | None
    codec: str | None
    interop: str | None
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
    fields = tuple(_field_size(disk, path, entry, held) for entry in schema.fields)
    own = [_field_size(disk, path, entry, held) for entry in ROW_FIELDS]
    row_bytes = sum(size.row_bytes for size in (*fields, *own))
    more = int(free / max(1.0, row_bytes))
    fits = None if slots is None else slots - held <= more
    return StoreSize(disk.used(path), free, fields, row_bytes, more, fits)


def _field_size(disk: Disk, path: Path, entry: Field, held: int) -> FieldSize:
    folder = path.joinpath(COLUMNS, *entry.key)
    used = disk.used(folder) if disk.exists(folder) else 0
    try:
        packing = read_packing(disk, folder, entry)
    except CorruptionError:
        return FieldSize(None, None, None, None, used, None, None, entry.row_bytes)
    if packing is None:
        # Where nothing was written, as for flags that are never set, rows take less.
        row_bytes = min(entry.row_bytes, used / held) if held else entry.row_bytes
        return FieldSize("flat", None, "", None, used, None, None, row_bytes)
    ratio = held * entry.row_bytes / used if held and used else None
    # The rows of the chunk that is not full do not become more.
    rest = disk.used(folder / PARTIAL) if disk.exists(folder / PARTIAL) else 0
    full = held - held % packing.rows
    row_bytes = max(1, used - rest) / full if full else entry.row_bytes
    shared = _shared(disk, folder, entry, packing, full)
    return FieldSize(
        "packed", packing.codec, packing.means.interop, packing.rows, used, ratio, shared, row_bytes
    )


def _shared(disk: Disk, folder: Path, entry: Field, packing: Packing, full: int) -> float | None:
    """Return which part of the rows of full chunks lies with the next ones."""
    if not packing.shares or not full:
        return None
    # Without a limit of slots: nobody goes on with it.
    column = PackedReader(disk, folder, entry, None, packing)
    try:
        column.look(full)
        slots = np.unique(np.random.default_rng(0).integers(0, full, _SAMPLE))
        return float((column.distances(slots) > 0).mean())
    except StorageError:  # damaged, or a writer gives a file its name just now
        return None
    finally:
        column.close()
