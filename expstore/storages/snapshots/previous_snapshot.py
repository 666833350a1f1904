"""The previous snapshot of a store: which of its files a new snapshot can share.

Used by snapshots. Stamps and checksums are compared; rows are never read.
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

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Former:
    """The previous snapshot.

    Args:
        folder: Its folder.
        sums: Its checksums, for the current columns of the store.
        origin: The store's own checksums when it was made, for the same columns.
        whole: Which entries of `sums` are of completely summed blocks. Shape `(blocks,)`.
        shared: Which of the current columns with checksums it has, too. Shape `(columns,)`.
        layout: How its arrays are split into shards.
        counted: Whether it has sample counts.
    """

    folder: Path
    sums: Array
    origin: Array
    whole: BoolArray
    shared: BoolArray
    layout: Layout
    counted: bool


def find_former(disk: Disk, folder: Path, state: Frozen) -> Former | None:
    """Return a snapshot if its files can be shared; None if everything must be copied.

    Args:
        disk: Access to files.
        folder: The snapshot's folder. Fields that were added or dropped since are not shared.
        state: The state to be stored now.
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
        return None  # it is damaged, or was made before the first rows
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
    """Return whether the `known` fields are packed in a snapshot's columns as in the captured storage."""
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
    """Return entries with the sums of the columns at these places, and 0 for place -1."""
    found = np.zeros(entries.size, entry_dtype(len(places)))
    found["generation"], found["sequence"] = entries["generation"], entries["sequence"]
    for new, old in enumerate(places):
        if old >= 0:
            found["sums"][:, new] = entries["sums"][:, old]
    return found
