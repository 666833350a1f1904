"""Measure how a store's fields are stored, how much disk space they use, and how many more rows fit.

Used by `expstore info`. It reads zarr.json files, file lengths and ids, but none of the user's rows.
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


@dataclass(frozen=True, slots=True)
class StoreSize:
    """The disk space that a store uses and has left.

    Args:
        disk_bytes: Bytes used by all of its files.
        free_bytes: Free bytes on its disk.
        fields: Sizes of the user's fields, in the schema's order.
        row_bytes: Average bytes of one more row in all columns; None if there are no fields yet.
        more_rows: How many more rows fit on the disk, by `row_bytes`; None if there are no fields yet.
        ring_fits: Whether the rows that are missing in a ring fit on the disk; None if the store is
            unbounded.
    """

    disk_bytes: int
    free_bytes: int
    fields: tuple[FieldSize, ...]
    row_bytes: float | None
    more_rows: int | None
    ring_fits: bool | None


def store_size(disk: Disk, path: Path, manifest: Manifest, held: int) -> StoreSize:
    """Return the disk space that a store uses, and what the disk has left.

    `row_bytes` does not include the index, the journal and episodes.log.

    Args:
        disk: Access to files; it only reads.
        path: The store's folder.
        manifest: The store's manifest.
        held: Number of rows in its columns, readable or not.
    """
    schema, slots, free = manifest.schema, manifest.slots, disk.free(path)
    if schema is None:
        return StoreSize(disk.measure_space(path), free, (), None, None, None)
    fields = (*schema.fields, *ROW_FIELDS)
    group = ReadColumns(disk, path / COLUMNS, fields, slots, compression=manifest.compression)
    group.look_briefly(held)
    sizes = [column.size(held, group.row_fields[0].peek) for column in group.columns]
    group.close()
    row_bytes = sum(size.row_bytes for size in sizes)
    more = int(free / max(1.0, row_bytes))
    fits = None if slots is None else slots - held <= more
    return StoreSize(
        disk.measure_space(path), free, tuple(sizes[: len(schema.fields)]), row_bytes, more, fits
    )
