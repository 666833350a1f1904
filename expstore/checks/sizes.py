"""How the fields of a store lie on disk, how much room they take, and for how many more rows there is some.

Used by `expstore info`. It reads zarr.json files and lengths, no row.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from expstore.errors import CorruptionError
from expstore.files import Disk
from expstore.manifest import Manifest
from expstore.schema import Field
from expstore.storages.base import ROW_FIELDS
from expstore.storages.folder import COLUMNS
from expstore.storages.packedrows import PARTIAL
from expstore.storages.zarrmeta import read_packing

__all__ = ["FieldSize", "StoreSize", "store_size"]


@dataclass(frozen=True, slots=True)
class FieldSize:
    """Say how a field lies on disk.

    Args:
        layout: "flat" or "packed"; None: its zarr.json cannot be read.
        codec: Of what is packed, else None.
        chunk_rows: How many rows are packed together; None: none are.
        disk_bytes: What its files take.
        compression: How many times more its rows would take as they are; None: it has none, or is flat.
        row_bytes: What a row more takes, on average.
    """

    layout: str | None
    codec: str | None
    chunk_rows: int | None
    disk_bytes: int
    compression: float | None
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
        return FieldSize(None, None, None, used, None, entry.row_bytes)
    if packing is None:
        # Where nothing was written, as for flags that are never set, rows take less.
        row_bytes = min(entry.row_bytes, used / held) if held else entry.row_bytes
        return FieldSize("flat", None, None, used, None, row_bytes)
    ratio = held * entry.row_bytes / used if held and used else None
    # The rows of the chunk that is not full do not become more.
    rest = disk.used(folder / PARTIAL) if disk.exists(folder / PARTIAL) else 0
    full = held - held % packing.rows
    row_bytes = max(1, used - rest) / full if full else entry.row_bytes
    return FieldSize("packed", packing.codec, packing.rows, used, ratio, row_bytes)
