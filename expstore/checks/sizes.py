"""How the fields of a store lie on disk, and how much room they take.

Used by `expstore info`. It reads zarr.json files and lengths, no row.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from expstore.errors import CorruptionError
from expstore.files import Disk
from expstore.manifest import Manifest
from expstore.storages.folder import COLUMNS
from expstore.storages.zarrmeta import read_packing

__all__ = ["FieldSize", "field_sizes"]


@dataclass(frozen=True, slots=True)
class FieldSize:
    """Say how a field lies on disk.

    Args:
        layout: "flat" or "packed"; None: its zarr.json cannot be read.
        codec: Of what is packed, else None.
        chunk_rows: How many rows are packed together; None: none are.
        disk_bytes: What its files take.
        compression: How many times more its rows would take as they are; None: it has none, or is flat.
    """

    layout: str | None
    codec: str | None
    chunk_rows: int | None
    disk_bytes: int
    compression: float | None


def field_sizes(disk: Disk, path: Path, manifest: Manifest, written: int) -> list[FieldSize]:
    """Return what each field of a store takes, in the schema's order.

    Args:
        disk: Where files are touched; only read.
        path: The store.
        manifest: Its settings.
        written: How many rows it has ever had.
    """
    slots = manifest.slots
    rows = written if slots is None else min(written, slots)
    found = []
    for entry in manifest.schema.fields if manifest.schema else ():
        folder = path.joinpath(COLUMNS, *entry.key)
        used = disk.used(folder) if disk.exists(folder) else 0
        try:
            packing = read_packing(disk, folder, entry)
        except CorruptionError:
            found.append(FieldSize(None, None, None, used, None))
            continue
        if packing is None:
            found.append(FieldSize("flat", None, None, used, None))
        else:
            ratio = rows * entry.row_bytes / used if rows and used else None
            found.append(FieldSize("packed", packing.codec, packing.rows, used, ratio))
    return found
