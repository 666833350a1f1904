"""How the fields of a store lie on disk, how much room they take, and for how many more rows there is some.

Used by `expstore info`. It reads zarr.json files, lengths and ids, and no row of the user's.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from expstore.disk.files import Disk
from expstore.schema.row_fields import ROW_FIELDS
from expstore.storages.columns.column import FieldSize
from expstore.storages.columns.column_set import ReadColumns
from expstore.storages.format.manifest import Manifest
from expstore.storages.format.paths import COLUMNS

__all__ = ["StoreSize", "store_size"]


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
    fields = (*schema.fields, *ROW_FIELDS)
    group = ReadColumns(disk, path / COLUMNS, fields, slots, compression=manifest.compression)
    group.look_briefly(held)
    sizes = [column.size(held, group.row_fields[0].peek) for column in group.columns]
    group.close()
    row_bytes = sum(size.row_bytes for size in sizes)
    more = int(free / max(1.0, row_bytes))
    fits = None if slots is None else slots - held <= more
    return StoreSize(disk.used(path), free, tuple(sizes[: len(schema.fields)]), row_bytes, more, fits)
