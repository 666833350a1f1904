"""The state of a storage at one moment, to be copied while other threads read and write.

Used by snapshots. Only priorities, counts and numbers are copied here. Rows are views, which a
`SnapshotPin` keeps from being overwritten until the copier reports them copied, or packed chunks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from expstore.core.draw_state import to_json
from expstore.core.values import Array, Window
from expstore.episodes.fragments import clip
from expstore.schema.row_fields import ROW_FIELDS
from expstore.schema.schema import Field
from expstore.storages.base import Storage
from expstore.storages.columns.annotated import AnnotationCapture
from expstore.storages.columns.capture import Capture
from expstore.storages.columns.sample_counts import SAMPLED
from expstore.storages.format.chunk_encoding import Packing
from expstore.storages.format.manifest import Manifest
from expstore.storages.row_state import RowState
from expstore.storages.snapshot_access import SnapshotPin


@dataclass(frozen=True, slots=True)
class Frozen:
    """A storage's state at one moment.

    Args:
        manifest: The store's manifest.
        base: The state that a journal's base record stores.
        stored: The readable rows.
        pieces: Where the rows are: (first slot, offset in the run, number of rows).
        columns: Per column, in the order of `fields`, a view of each piece; empty for columns that are
            `apart`.
        captures: The columns that are `apart`, because their rows cannot be viewed.
        counted: Whether the last column is how often each row was sampled.
        log: The bytes of episodes.log.
        episodes: How many episodes have rows.
        sums: An entry per block of 4096 slots, which shows whether the block has changed; None if the storage
            has no checksums.
        snapshot_pin: Called with the rows that are copied.
    """

    manifest: Manifest
    base: dict[str, Any]
    stored: Window
    pieces: Sequence[tuple[int, int, int]]
    columns: Sequence[Sequence[Array]]
    captures: Sequence[Capture]
    counted: bool
    log: bytes
    episodes: int
    sums: Array | None
    snapshot_pin: SnapshotPin

    @property
    def fields(self) -> tuple[Field, ...]:
        """The columns' fields, starting with those that have checksums; () before the first rows."""
        schema = self.manifest.schema
        if schema is None:
            return ()
        return (*schema.fields, *ROW_FIELDS, *([SAMPLED] if self.counted else []))

    def parts(self, place: int) -> Sequence[Array]:
        """Return the values of a column in pieces; packed values are unpacked."""
        for capture in self.captures:
            if place in capture.places:
                return capture.rows(place, self.stored.low + 1, self.stored.size)
        return self.columns[place]

    @property
    def annotated(self) -> int:
        """The address after the newest record of annotations; 0 without annotations."""
        return max((one.end for one in self.captures if isinstance(one, AnnotationCapture)), default=0)

    @property
    def packings(self) -> list[Packing | None]:
        """How each column is packed; None for a column that is not packed."""
        known = {place: how for capture in self.captures for place, how in capture.packings.items()}
        return [known.get(place) for place in range(len(self.fields))]

    @property
    def apart(self) -> set[int]:
        """Columns that are not flat arrays."""
        return {place for capture in self.captures for place in capture.places}

    @property
    def arrays(self) -> list[int]:
        """Columns that are Zarr arrays, flat or packed."""
        packed = {place for capture in self.captures for place in capture.packings}
        return [place for place in range(len(self.fields)) if place in packed or place not in self.apart]

    @property
    def summed(self) -> int:
        """The number of columns, counted from the first, that have checksums."""
        return max(0, len(self.fields) - (2 if self.counted else 1))


def base_of(rows: RowState) -> dict[str, Any]:
    """Return the current state of rows and draws as a journal's base record stores it."""
    draws = rows.draws
    return {
        "content": rows.content,
        "last": rows.last,
        "retired": rows.retired,
        "draw": draws.number,
        "progress": draws.progress,
        "limits": draws.limits,
        "randomness": to_json(draws.note_randomness()),
        "max_priority": rows.priorities.largest,
        "write_count": rows.write_count,
        "episodes": rows.episodes.to_base(),
    }


def manifest_of(storage: Storage) -> Manifest:
    """Return the contents of a storage's expstore.json, also for a storage without such a file."""
    if storage.manifest is not None:
        return storage.manifest
    return Manifest(
        uuid=storage.description.uuid,
        generation=storage.state.content[0],
        storage="zarr",
        capacity=storage.capacity,
        spare=storage.geometry.spare,
        reach=storage.geometry.reach,
        seed=storage.seed,
        created=time.time(),
        schema=storage.schema,
        flatten=storage.description.flatten,
        ndim=storage.ndim,
        dims=storage.geometry.dims,
        ranking=storage.ranking,
        specs=storage.description.specs,
        column_set=storage.epochs.fields // 2,
    )


@contextmanager
def freeze(storage: Storage) -> Iterator[Frozen]:
    """Keep a storage's rows unchanged for the length of the block.

    Rows can still be added. A thread that would overwrite one of these rows, or change one in place, waits
    for `snapshot_pin.move`.

    Raises:
        StateError: The storage is closed, or open for reading only.
        StorageError: Rows could not be synced to the disk.
    """
    with storage.snapshot_pin.acquire():
        storage.sync()
        with storage.lock:
            storage.writer()
            storage.snapshots.settle()
            state = _freeze(storage)
            storage.snapshot_pin.move(state.stored.low + 1)
        yield state


def _freeze(storage: Storage) -> Frozen:
    window = storage.stored
    columns: list[list[Array]] = []
    captures: list[Capture] = []
    base = base_of(storage.state)
    if storage.schema is not None:
        places = range(len(storage.schema.fields) + len(ROW_FIELDS))
        captures = storage.snapshots.captures(window.low)
        apart = {place for capture in captures for place in capture.places}
        flat = [place for place in places if place not in apart]
        found = dict(zip(flat, storage.views(flat, window.low + 1, window.size), strict=True))
        columns = [found.get(place, []) for place in places]
        with storage.priorities.changing:  # priorities may be set while rows are copied
            columns[-1] = [part.copy() for part in columns[-1]]
            base["max_priority"] = storage.priorities.largest
        if (
            storage.description.window_rows is not None and columns[-1]
        ):  # some may be in the column, others in memory
            columns[-1] = [np.concatenate(columns[-1])]
    pieces = storage.geometry.runs(window.low + 1, window.size)
    sampled = storage.state.sampled
    if sampled is not None:
        with storage.locks.sampled:
            columns.append([part.copy() for part in sampled.views(pieces)])
    live = clip(storage.episodes.fragments.capture().columns(), window.low)
    return Frozen(
        manifest=manifest_of(storage).replace(keyed=False),  # idempotency keys are not valid for a copy
        base=base,
        stored=window,
        pieces=pieces,
        columns=columns,
        captures=captures,
        counted=sampled is not None,
        log=storage.snapshots.log_bytes(),
        episodes=np.unique(live[0]).size,
        sums=storage.snapshots.block_sums(),
        snapshot_pin=storage.snapshot_pin,
    )
