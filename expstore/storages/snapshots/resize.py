"""A store's own rows as new content for another capacity: rows keep their ids, but get other slots.

Used by the storage on disk, which builds the new content in the same way as that of a snapshot. The store's
current content is not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from expstore.core.geometry import RingGeometry, round_up
from expstore.core.id_set import NO_IDS
from expstore.core.values import Array, IntArray, Ranking, Window
from expstore.episodes.log import LogEntry
from expstore.errors import StateError
from expstore.schema.ranking import rank_rows
from expstore.schema.row_fields import ROW_FIELDS
from expstore.storages.base import Storage
from expstore.storages.batch import now_us
from expstore.storages.columns.annotated import Annotations
from expstore.storages.columns.checksums import BlockCheck
from expstore.storages.format.lineage import RESIZE
from expstore.storages.format.manifest import Manifest
from expstore.storages.snapshots.capture import base_of, manifest_of
from expstore.storages.snapshots.restore import STEP_BYTES, Arrival

#: Called with bytes done and bytes in all.
Progress = Callable[[int, int], None]


def capacity_for(storage: Storage, capacity: int | None) -> int | None:
    """Return a capacity rounded up to whole steps of time."""
    return None if capacity is None else round_up(capacity, storage.geometry.lanes)


def surplus(storage: Storage, capacity: int | None) -> int:
    """Return the number of a store's rows that do not fit into a capacity."""
    window = storage.stored
    if capacity is None or window.size <= capacity:
        return 0
    if storage.ranking is not None:
        return max(0, window.rows - capacity)
    ids = np.arange(window.low + 1, window.last - capacity + 1)
    return int(window.holds(ids).sum())


def read_resized(
    storage: Storage, capacity: int | None, sums: BlockCheck | None, progress: Progress | None = None
) -> Arrival:
    """Return a store's own content for another capacity.

    Args:
        storage: The store's storage, with its lock held and all rows written to the columns.
        capacity: The result of `capacity_for`.
        sums: Compares rows with the store's checksums; None: the store has no fields.
        progress: Called with the progress of reading.
    """
    told = progress or (lambda done, total: None)
    if storage.ranking is not None and capacity is not None and storage.stored.size > capacity:
        return _Best(storage, storage.ranking, capacity, sums, told)
    return _Newest(storage, capacity, sums, told)


@dataclass(frozen=True, slots=True)
class _Own:
    """The content of a store; its rows are copied.

    Args:
        storage: The store's storage.
        manifest: Its manifest.
        base: Its state, as a journal's base record stores it.
        entries: Entries of episodes.log.
        sums: Compares rows with the store's checksums; None: the store has no fields.
    """

    storage: Storage
    manifest: Manifest
    base: dict[str, Any]
    entries: Sequence[LogEntry]
    sums: BlockCheck | None

    @classmethod
    def of(cls, storage: Storage, sums: BlockCheck | None) -> _Own:
        """Return the current content of a storage."""
        entries = list(storage.state.log.read())
        return cls(storage, manifest_of(storage), base_of(storage.state), entries, sums)

    @property
    def name(self) -> str:
        """The path of the store's folder."""
        return str(self.storage.path)

    @property
    def places(self) -> range:
        """Positions of all columns: the fields, then the row fields."""
        return range(len(self.storage.require_schema().fields) + len(ROW_FIELDS))

    @property
    def row_bytes(self) -> int:
        """The size of a row, bytes."""
        fields = (*self.storage.require_schema().fields, *ROW_FIELDS)
        return sum(entry.row_bytes for entry in fields)

    @property
    def counted(self) -> bool:
        """Whether the store has sample counts."""
        return self.storage.state.sampled is not None

    @property
    def low(self) -> int:
        """The newest id that cannot be read."""
        return self.storage.stored.low

    def rows(self, first_id: int, count: int) -> list[Array]:
        """Copy a run of rows: one array per column."""
        return self.read(np.arange(first_id, first_id + count))

    def read(self, ids: IntArray) -> list[Array]:
        """Copy rows: one array per column.

        Raises:
            CorruptionError: Rows do not have their checksum.
        """
        if self.sums is not None:
            self.sums.check(ids)
        return self.storage.read(ids, self.places)

    def counts(self, first_id: int, count: int) -> Array:
        """Copy how often each of a run of rows was sampled. Shape `(count,)`, uint32."""
        sampled = self.storage.state.sampled
        if sampled is None:
            return np.zeros(count, np.uint32)
        with self.storage.locks.sampled:
            return np.concatenate(sampled.views(self.storage.geometry.runs(first_id, count)))

    def annotations(self) -> Iterable[tuple[Annotations, Callable[[IntArray], IntArray]]]:
        """Yield the records of annotations; see `ContentLike`."""
        found = self.storage.state.annotations
        return [] if found is None else [(found, lambda ids: ids)]


class _Newest(Arrival):
    """Content with the newest rows that fit; ids, episodes and numbers are unchanged."""

    def __init__(
        self, storage: Storage, capacity: int | None, sums: BlockCheck | None, progress: Progress
    ) -> None:
        self._own, self._progress = _Own.of(storage, sums), progress
        last, low = storage.last, self._own.low
        low = low if capacity is None else max(low, last - capacity)
        manifest = _manifest_for(storage, self._own.manifest, capacity)
        manifest = _move_steps(manifest, storage, lambda id: min(max(id - low, 0), last - low), low)
        numbers: dict[str, Any] = {"low": low, "count": last - low, "id_shift": 0, "episode_shift": 0}
        super().__init__(self._own, manifest, storage.episodes.session, **numbers)

    def base(self, content: tuple[int, int]) -> dict[str, Any]:
        """Return the state for a base record: open episodes stay open."""
        return self.content.base | {"content": content, "last": self.last, "retired": self.low}

    def entries(self) -> Iterator[LogEntry]:
        """Yield the entries of episodes.log."""
        return iter(self.content.entries)

    def runs(self) -> Iterator[tuple[int, list[Array]]]:
        """Yield all rows, oldest first: (first id, one array per field and row field)."""
        done, total = 0, self.count * self._own.row_bytes if self.count else 0
        for first, arrays in super().runs():
            yield first, arrays
            done += len(arrays[0]) * self._own.row_bytes
            self._progress(done, total)


class _Best(Arrival):
    """Content with the best rows that fit; among rows of equal rank, those in earlier places.

    Their former ids are not consecutive; they get new ids above all ids of the store.
    """

    def __init__(
        self,
        storage: Storage,
        ranking: Ranking,
        capacity: int,
        sums: BlockCheck | None,
        progress: Progress,
    ) -> None:
        self._own, self._progress = _Own.of(storage, sums), progress
        self._kept = _best_ids(storage, ranking, capacity)
        manifest = _manifest_for(storage, self._own.manifest, capacity).replace(deleted=NO_IDS)
        kept, last = self._kept, storage.last
        manifest = _move_steps(manifest, storage, lambda id: int(np.searchsorted(kept, id, "right")), last)
        numbers: dict[str, Any] = {
            "low": 0,
            "count": self._kept.size,
            "id_shift": storage.last,
            "episode_shift": 0,
        }
        super().__init__(self._own, manifest, storage.episodes.session, **numbers)

    def runs(self) -> Iterator[tuple[int, list[Array]]]:
        """Yield the remaining rows: (first id, one array per field and row field)."""
        each = self._own.row_bytes
        step = max(1, STEP_BYTES // each)
        for start in range(0, self.count, step):
            ids = self._kept[start : start + step]
            arrays = self._own.read(ids)
            first = self.low + 1 + start
            arrays[-5] = np.arange(first, first + ids.size)
            yield first, arrays
            self._progress((start + ids.size) * each, self.count * each)

    def renumber(self) -> IntArray:
        """Return which rows get new ids: first id before, rows, first new id. Shape `(n, 3)`."""
        begins = np.flatnonzero(np.diff(self._kept, prepend=-1) != 1)
        rows = np.diff(begins, append=self.count)
        return np.stack([self._kept[begins], rows, self.low + 1 + begins], axis=1)


def _best_ids(storage: Storage, ranking: Ranking, count: int) -> IntArray:
    """Return the ids of the `count` best rows, ascending."""
    schema, window = storage.require_schema(), storage.stored
    if storage.state.sampled is not None:
        raise StateError("a store that keeps the best rows cannot count samples")
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


def _move_steps(manifest: Manifest, storage: Storage, count: Callable[[int], int], base: int) -> Manifest:
    """Return the manifest with the ids that the rows of its lineage get, and with this step.

    Args:
        manifest: The manifest of the store afterwards.
        storage: The store's storage.
        count: Returns how many of the rows up to an id remain.
        base: The id before the first one of the rows that remain.
    """
    window, facts = Window(base, base + count(storage.last)), {"capacity": manifest.capacity}
    steps = manifest.lineage.move(count, base, storage.last)
    return manifest.replace(lineage=steps.add(RESIZE, now_us(), window, manifest.uuid, **facts))


def _manifest_for(storage: Storage, own: Manifest, capacity: int | None) -> Manifest:
    """Return the manifest of the store afterwards.

    Raises:
        SchemaError: Chunks of packed fields are longer than the capacity.
        StateError: The store has a retention policy or a window, which require a store without a capacity.
    """
    if own.retain and capacity is not None:
        raise StateError(
            "this store has a retain= policy: a store with a capacity keeps the newest rows instead",
            hint="open it with retain={} first",
        )
    if own.window and capacity is not None:
        raise StateError(
            "this store has a window: a store with a capacity keeps only the newest rows",
            hint="open it with window=0 first",
        )
    ring = RingGeometry(capacity, own.ndim, own.dims)
    if storage.schema is not None:
        ring = storage.geometry_for(storage.schema, ring)
    return own.replace(generation=own.generation + 1, capacity=capacity, spare=ring.spare, reach=ring.reach)
