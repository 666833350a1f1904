"""A store's own rows for another capacity: what stays keeps its id, and lies in another slot.

Used by the storage on disk, which has it built aside as a version's content would be. It never changes what
it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from expstore.core.geometry import RingGeometry, round_up
from expstore.core.id_set import NO_IDS
from expstore.core.values import Array, IntArray, Ranking
from expstore.episodes.log import LogEntry
from expstore.errors import StateError
from expstore.schema.ranking import rank_rows
from expstore.schema.row_fields import ROW_FIELDS
from expstore.storages.base import Storage
from expstore.storages.format.manifest import Manifest
from expstore.storages.snapshots.capture import base_of, manifest_of
from expstore.storages.snapshots.restore import STEP_BYTES, Arrival

__all__ = ["Progress", "capacity_for", "read_resized", "surplus"]

#: Is told bytes done and bytes in all.
Progress = Callable[[int, int], None]


def capacity_for(storage: Storage, capacity: int | None) -> int | None:
    """Return the capacity that a store gets which is asked for one: whole steps of time."""
    return None if capacity is None else round_up(capacity, storage.geometry.lanes)


def surplus(storage: Storage, capacity: int | None) -> int:
    """Return how many of a store's rows do not fit into a capacity."""
    window = storage.window
    if capacity is None or window.size <= capacity:
        return 0
    if storage.ranking is not None:
        return max(0, window.rows - capacity)
    ids = np.arange(window.low + 1, window.last - capacity + 1)
    return int(window.holds(ids).sum())


def read_resized(storage: Storage, capacity: int | None, progress: Progress | None = None) -> Arrival:
    """Return a store's own content as it is to be for another capacity.

    Args:
        storage: The store's, whose lock is held and which has nothing that waits.
        capacity: As `capacity_for` returned it.
        progress: Is told how far reading has come.
    """
    told = progress or (lambda done, total: None)
    if storage.ranking is not None and capacity is not None and storage.window.size > capacity:
        return _Best(storage, storage.ranking, capacity, told)
    return _Newest(storage, capacity, told)


@dataclass(frozen=True, slots=True)
class _Own:
    """Show what a store holds; its rows are copies.

    Args:
        storage: The store's.
        manifest: What it is.
        base: Its state, as a journal's base record keeps it.
        entries: Of episodes.log.
    """

    storage: Storage
    manifest: Manifest
    base: dict[str, Any]
    entries: Sequence[LogEntry]

    @classmethod
    def of(cls, storage: Storage) -> _Own:
        """Return what it holds now."""
        return cls(storage, manifest_of(storage), base_of(storage.state), list(storage.state.log.read()))

    @property
    def name(self) -> str:
        """Return the folder's."""
        return str(self.storage.path)

    @property
    def places(self) -> range:
        """Of all columns, those of the row fields behind the others."""
        return range(len(self.storage.require_schema().fields) + len(ROW_FIELDS))

    @property
    def row_bytes(self) -> int:
        """How many bytes a row takes."""
        fields = (*self.storage.require_schema().fields, *ROW_FIELDS)
        return sum(entry.row_bytes for entry in fields)

    @property
    def counted(self) -> bool:
        """Whether it says how often each row was handed out."""
        return self.storage.state.sampled is not None

    @property
    def low(self) -> int:
        """The newest id that cannot be read."""
        return self.storage.window.low

    def rows(self, first_id: int, count: int) -> list[Array]:
        """Copy a run of rows, all columns."""
        return self.storage.read(np.arange(first_id, first_id + count), self.places)

    def counts(self, first_id: int, count: int) -> Array:
        """Copy how often a run of rows was handed out. Shape `(count,)`, uint32."""
        sampled = self.storage.state.sampled
        if sampled is None:
            return np.zeros(count, np.uint32)
        with self.storage.locks.sampled:
            return np.concatenate(sampled.views(self.storage.geometry.runs(first_id, count)))


class _Newest(Arrival):
    """Keep ids, episodes and numbers as they are; the oldest rows go if there are too many."""

    def __init__(self, storage: Storage, capacity: int | None, progress: Progress) -> None:
        self._own, self._progress = _Own.of(storage), progress
        last, low = storage.last, self._own.low
        low = low if capacity is None else max(low, last - capacity)
        manifest = _manifest_for(storage, self._own.manifest, capacity)
        numbers = {"low": low, "count": last - low, "id_shift": 0, "episode_shift": 0}
        super().__init__(self._own, manifest, storage.episodes.session, **numbers)

    def base(self, content: tuple[int, int]) -> dict[str, Any]:
        """Return the state that a base record keeps: open episodes stay open."""
        return self.content.base | {"content": content, "last": self.last, "retired": self.low}

    def entries(self) -> Iterator[LogEntry]:
        """Yield what episodes.log says."""
        return iter(self.content.entries)

    def runs(self) -> Iterator[tuple[int, list[Array]]]:
        """Yield all rows, oldest first: (first id, one array per field and row field)."""
        done, total = 0, self.count * self._own.row_bytes if self.count else 0
        for first, arrays in super().runs():
            yield first, arrays
            done += len(arrays[0]) * self._own.row_bytes
            self._progress(done, total)


class _Best(Arrival):
    """Keep the best rows, the earlier place of those that rank alike.

    Their ids are those of places there are no more: they get new ones, above all that there were.
    """

    def __init__(self, storage: Storage, ranking: Ranking, capacity: int, progress: Progress) -> None:
        self._own, self._storage, self._progress = _Own.of(storage), storage, progress
        self._kept = _best_ids(storage, ranking, capacity)
        manifest = _manifest_for(storage, self._own.manifest, capacity).replace(deleted=NO_IDS)
        numbers = {"low": 0, "count": self._kept.size, "id_shift": storage.last, "episode_shift": 0}
        super().__init__(self._own, manifest, storage.episodes.session, **numbers)

    def runs(self) -> Iterator[tuple[int, list[Array]]]:
        """Yield the rows that stay: (first id, one array per field and row field)."""
        each = self._own.row_bytes
        step = max(1, STEP_BYTES // each)
        for start in range(0, self.count, step):
            ids = self._kept[start : start + step]
            arrays = self._storage.read(ids, self._own.places)
            first = self.low + 1 + start
            arrays[-5] = np.arange(first, first + ids.size)
            yield first, arrays
            self._progress((start + ids.size) * each, self.count * each)


def _best_ids(storage: Storage, ranking: Ranking, count: int) -> IntArray:
    """Return the ids of so many rows, ascending."""
    schema, window = storage.require_schema(), storage.window
    if storage.state.sampled is not None:
        raise StateError("a store that keeps the best rows does not count how often they are handed out")
    place, found = schema.place(ranking.key), []
    ids = np.arange(window.low + 1, window.last + 1)
    ids = ids[window.holds(ids)]
    step = max(1, STEP_BYTES // schema.fields[place].row_bytes)
    for start in range(0, ids.size, step):
        (column,) = storage.read(ids[start : start + step], [place])
        found.append(rank_rows(schema.fields[place], column, ranking.reduction))
    order = np.argsort(-np.concatenate(found), kind="stable")
    kept: IntArray = np.sort(ids[order[:count]])
    return kept


def _manifest_for(storage: Storage, own: Manifest, capacity: int | None) -> Manifest:
    """Return what expstore.json says afterwards.

    Raises:
        SchemaError: Chunks of packed fields were asked for that are longer than the capacity.
        StateError: Whole episodes leave it, which is for stores without bound.
    """
    if own.retain and capacity is not None:
        raise StateError(
            "this store says by retain= which rows stay, and with a capacity the last ones do",
            hint="open it with retain={} first",
        )
    ring = RingGeometry(capacity, own.ndim, own.dims)
    if storage.schema is not None:
        ring = storage.geometry_for(storage.schema, ring)
    return own.replace(generation=own.generation + 1, capacity=capacity, spare=ring.spare, reach=ring.reach)
