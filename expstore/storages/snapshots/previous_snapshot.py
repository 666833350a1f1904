"""The version before the one that is being made: what of its files may be shared.

Used by snapshots. It compares stamps and sums, and never reads a row.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from expstore.core.values import Array
from expstore.disk.files import Disk
from expstore.errors import CorruptionError, MigrationError, NotFoundError, StorageError
from expstore.schema.row_fields import ROW_FIELDS
from expstore.schema.schema import Field
from expstore.storages.columns.checksums import SUMMED, entry_dtype, read_entries, state_of
from expstore.storages.columns.sample_counts_column import has_sampled
from expstore.storages.format.manifest import Manifest
from expstore.storages.format.paths import CHECKSUMS, COLUMNS, ORIGIN
from expstore.storages.format.zarr_metadata import Layout, read_layout, read_packing
from expstore.storages.snapshots.capture import Frozen

__all__ = ["Former", "find_former"]

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Former:
    """The version before.

    Args:
        folder: Its folder.
        sums: Its checksums, by the columns that there are now.
        origin: The store's when it was made, likewise.
        whole: Which entries of `sums` are. Shape `(blocks,)`.
        shared: Which of the columns that have sums it has, too. Shape `(columns,)`.
        layout: How its arrays are cut.
        counted: Whether it has counts.
    """

    folder: Path
    sums: Array
    origin: Array
    whole: BoolArray
    shared: BoolArray
    layout: Layout
    counted: bool


def find_former(disk: Disk, folder: Path, state: Frozen) -> Former | None:
    """Return a version if its files may be shared; None if everything is to be copied.

    Args:
        disk: Where files are touched.
        folder: The version's; columns that came or went since are not shared.
        state: What is to be kept now.
    """
    if state.manifest.schema is None or state.sums is None:
        return None
    try:
        manifest = Manifest.load(disk, folder)
        users = () if manifest.schema is None else manifest.schema.fields
        fields = (*users, *ROW_FIELDS[:-1]) if users else ()
        sums = read_entries(disk.read_whole(folder / CHECKSUMS), len(fields), folder / CHECKSUMS)
        origin = read_entries(disk.read_whole(folder / ORIGIN), len(fields), folder / ORIGIN)
        layout = read_layout(disk, folder / COLUMNS / ROW_FIELDS[0].path, ROW_FIELDS[0])
    except (StorageError, NotFoundError, MigrationError):
        return None  # it cannot be trusted, or was made before the first rows
    same = manifest.uuid == state.manifest.uuid
    same = same and (manifest.capacity, manifest.slots) == (state.manifest.capacity, state.manifest.slots)
    if not (same and _have_same_packings(disk, folder / COLUMNS, state, set(fields))):
        return None
    places = [fields.index(entry) if entry in fields else -1 for entry in state.fields[: state.summed]]
    return Former(
        folder=folder,
        sums=_select_places(sums, places),
        origin=_select_places(origin, places),
        whole=np.array([state_of(entry) == SUMMED for entry in sums], bool),
        shared=np.array(places, np.int64) >= 0,
        layout=layout,
        counted=has_sampled(disk, folder / COLUMNS),
    )


def _have_same_packings(disk: Disk, columns: Path, state: Frozen, known: Container[Field]) -> bool:
    """Return whether the fields below a folder that are `known` there are packed as a storage's are."""
    packings = state.packings
    users = [(state.fields[place], packings[place]) for place in state.arrays]
    try:
        return all(
            read_packing(disk, columns.joinpath(*entry.key), entry) == packing
            for entry, packing in users
            if entry.key[0] != "_row" and entry in known
        )
    except CorruptionError:
        return False


def _select_places(entries: Array, places: Sequence[int]) -> Array:
    """Return entries with the sums of the columns at these places, 0 at place -1."""
    found = np.zeros(entries.size, entry_dtype(len(places)))
    found["generation"], found["sequence"] = entries["generation"], entries["sequence"]
    for new, old in enumerate(places):
        if old >= 0:
            found["sums"][:, new] = entries["sums"][:, old]
    return found
