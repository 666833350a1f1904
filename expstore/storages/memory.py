"""Rows in RAM: the reference of the tests, and a buffer for small runs.

Same rows, episodes and SQL as a store on disk; nothing outlives the process.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from expstore.core.buffer_pool import LEAST_BYTES, Recycled
from expstore.core.draw_state import DrawState, from_json
from expstore.core.geometry import RingGeometry, round_up
from expstore.core.values import Array, IntArray, Key, Window, cut_run
from expstore.episodes.log import LogEntry
from expstore.episodes.sessions import End, Resume
from expstore.episodes.table import EpisodeTable
from expstore.errors import StateError
from expstore.schema.row_fields import ROW_FIELDS
from expstore.schema.schema import Field, Schema
from expstore.storages.base import Keys, Rows
from expstore.storages.batch import Payload
from expstore.storages.columns.sample_counts import Sampled
from expstore.storages.engine.backfill import Filler, Reshaping, check_coming, check_going, places_without
from expstore.storages.new_field import Coming
from expstore.storages.row_state import RowState
from expstore.storages.snapshots.portable_storage import PortableStorage
from expstore.storages.snapshots.restore import Arrival, ContentLike, read_content
from expstore.storages.snapshots.snapshot_methods import VersionedStorage

if TYPE_CHECKING:
    from expstore.storages.columns.object_cells import Cells

__all__ = ["MemoryStorage"]


class MemoryStorage(PortableStorage, VersionedStorage):
    """Keep rows in RAM.

    Threads as `Storage`; a forked child has its own copy; nothing survives the process. Fields of dtype
    "object" hold any Python object, itself and no copy; a store with such a field cannot be dumped, nor one
    with rows of no fixed size.

    Args:
        capacity: Most readable rows; None: unbounded.
        seed: Key of all draws.
        ndim: As `Storage`.

    Example:
        >>> rb = ReplayBuffer(storage=MemoryStorage(1000), batch_size=32)
    """

    kind = "memory"
    keeps_variable = True
    keeps_objects = True

    def __init__(self, capacity: int | None = None, *, seed: int = 0, ndim: int = 1) -> None:
        super().__init__(capacity, ndim=ndim)
        self.seed = seed
        self._columns: list[Array | Cells] = []
        self._recycled: defaultdict[int, Recycled] = defaultdict(Recycled)
        self._log: list[LogEntry] = []
        self._reshaping = Reshaping(self.lock_order)

    def __reduce__(self) -> tuple[Any, ...]:
        """Let a copy, here or in another process, have the whole content and go on by itself."""
        traits = {name: getattr(self, name) for name in ("device", "stack_dim", "row_class")}
        return _copy, (type(self), self.capacity, self.seed, self.ndim, traits, self.state_dict())

    def _create(self, schema: Schema, keys: Keys) -> None:
        size = self.geometry.slots or 4096
        fields = (*schema.fields, *ROW_FIELDS[:-1])
        self._columns = [_empty(entry, size) for entry in fields]

    def geometry_for(self, schema: Schema, ring: RingGeometry) -> RingGeometry:
        """Return a ring with few spare slots for objects: each keeps one alive until it is overwritten."""
        if ring.capacity is None or not schema.objects:
            return super().geometry_for(schema, ring)
        return ring.with_slots(round_up(-(-ring.capacity // 8), ring.lanes), 0)

    def _begin_sampled(self) -> None:
        self._state.count_sampled(Sampled(self.geometry.slots or max(4096, self.last)))

    def add_field(self, coming: Coming) -> None:
        """Have one more field: all of it, or nothing."""
        with self._reshaping.act():
            with self.lock:
                self.check_writable()
                check_coming(self, coming.entry)
                known = self.require_schema()
                schema = known.grown(coming.entry, coming.default)
                column = _Column(
                    self, np.zeros((len(self._columns[0]), *coming.entry.shape), coming.entry.numpy_dtype)
                )
            filler = Filler(self, coming, column)
            filler.run_ahead()
            with self.lock:
                self.check_writable()
                if self.schema is not known:
                    raise StateError("the storage has other fields by now", hint="add the field again")
                column.reach(len(self._columns[0]))
                filler.finish()
                place = len(known.fields)
                self._reshape(
                    schema, coming.specs, [*self._columns[:place], column.rows, *self._columns[place:]]
                )

    def drop_field(self, key: Key, specs: str) -> None:
        """Have one field less: all of it goes, or nothing."""
        with self._reshaping.act(), self.lock:
            self.check_writable()
            check_going(self, key)
            place, schema = self.place_of(key), self.require_schema().without(key)
            rest = places_without(len(self._columns), place)
            self._reshape(schema, specs, [self._columns[number] for number in rest])

    def _reshape(self, schema: Schema, specs: str, columns: list[Array | Cells]) -> None:
        with self.moving_places():
            # Which fields say what a row is to its episode stays as it is.
            self._columns, self.schema, self.specs = columns, schema, specs
            self.upheavals += 1

    def _put(self, rows: Rows, skipped: int) -> Payload:
        first, count = rows.first_id + skipped, rows.count - skipped
        if self.geometry.slots is None and first + count - 1 > len(self._columns[0]):
            size = 2 * (first + count)
            self._columns = [_grown(column, size) for column in self._columns]
        for column, values in zip(self._columns, (*rows.columns, *rows.assignment.numbers), strict=True):
            for slot, offset, n in self.geometry.runs(first, count):
                part = values[skipped + offset : skipped + offset + n]
                if isinstance(column, np.ndarray):
                    column[slot : slot + n] = part
                else:
                    column.put(np.arange(slot, slot + n), part)
        return Payload()

    def _publish(self, rows: Rows, skipped: int, payload: Payload) -> None:
        runs = self.geometry.runs(rows.first_id + skipped, rows.count - skipped)
        self.priorities.start(runs, self.geometry.slots)
        assignment = rows.assignment
        with self.episode_lock:
            self._log += self.episodes.commit(
                assignment.segments,
                assignment.sources,
                first_id=rows.first_id,
                time=rows.time,
                sequence=self.counters.extends,
                info=rows.info,
            )
            last, position = rows.first_id + rows.count - 1, (1, self.content[1] + 1)
            self._state.commit(last, rows.count, self.geometry.capacity, position)
            self._note_key(rows)

    def _annotate(self, entry: LogEntry) -> None:
        self._log += self.episodes.annotate(entry, self.counters.extends)
        self._note_content()

    def _record_episodes(self, change: End | Resume) -> None:
        self._log += self.episodes.apply(change, self.counters.extends)
        self._note_content()

    def _note_content(self) -> None:
        self._state.note_content((1, self.content[1] + 1))

    def log_entries(self) -> Iterator[LogEntry]:
        """Return everything that was noted about episodes that ended, in order."""
        return iter(self._log)

    def retire(self, through: int) -> None:
        """Give up the rows with ids <= `through`, for good."""
        with self.episode_lock:
            super().retire(through)
            self._note_content()

    def _forget(self, last: int) -> None:
        with self.episode_lock:
            self._log += self.episodes.end_episodes(self.counters.extends)
            super()._forget(last)
            self._note_content()
        if self.geometry.slots is None and self.schema is not None:
            for column in self._columns:
                if not isinstance(column, np.ndarray):
                    column.forget(last)
                elif column.dtype.hasobject:
                    column[:last] = None

    def load_version(self, folder: Path) -> None:
        """Put the content of the version in a folder in the place of what there is."""
        self.check_writable()
        self._take_content(read_content(self.disk, folder))

    def _take_content(self, content: ContentLike) -> None:
        with self.lock:
            self._wait_for_copy(None)
            arrival = Arrival(content, self)
            manifest = arrival.manifest
            columns, priorities, table = self._arrange(arrival)
            sampled = self._arrange_sampled(arrival)
            moves = self.schema is not None and not self.schema.same(manifest.schema)
            with self.changing(), self.sampled_lock, self.episode_lock, self.moving_places(moves):
                self.schema, self.geometry, self.seed = manifest.schema, manifest.geometry, manifest.seed
                self.flatten = manifest.flatten
                self.ranking, self.specs = manifest.ranking, manifest.specs
                if manifest.schema is not None:
                    self.keys = manifest.find_keys(manifest.schema)
                self._log = list(arrival.entries())
                position = (1, self.content[1] + 1)
                base = arrival.base(position)
                limits = base["limits"][0], base["limits"][1]
                self.draws = DrawState(
                    base["draw"], tuple(base["progress"]), limits, from_json(base["randomness"])
                )
                self._columns = columns
                self.priorities.restore(priorities, base["max_priority"])
                self._state = RowState(
                    window=Window(arrival.low, arrival.last, manifest.gaps),
                    horizon=arrival.last,
                    retired=arrival.low,
                    write_count=base["write_count"],
                    episodes=table,
                    priorities=self.priorities,
                    write_keys=self.write_keys,
                    sampled=sampled,
                    content=position,
                    index_floor=position,
                )
                self.takeovers += 1

    def _arrange(self, arrival: Arrival) -> tuple[list[Array | Cells], Array, EpisodeTable]:
        """Return the columns, the priorities and the episodes that arrive, as they are kept here."""
        manifest, table = arrival.manifest, EpisodeTable(session=self.episodes.session.id)
        table.load_base(arrival.base(self.content)["episodes"])
        if manifest.schema is None:
            return [], np.ones(0, np.float32), table
        size = manifest.slots or max(4096, 2 * arrival.last)
        fields = (*manifest.schema.fields, *ROW_FIELDS)
        columns = [_empty(entry, size) for entry in fields[:-1]]
        priorities = np.ones(size, np.float32)
        found: list[list[Array]] = [[], []]
        for first, arrays in arrival.runs():
            for column, values in zip((*columns, priorities), arrays, strict=True):
                _put(column, (np.arange(first, first + len(values)) - 1) % size, values)
            found[0].append(arrays[-4])
            found[1].append(arrays[-3])
        if arrival.count:
            episodes, steps = (np.concatenate(parts) for parts in found)
            ids = Window(arrival.low, arrival.last, manifest.gaps).ids()
            at = ids - arrival.low - 1
            table.load_rows(ids, episodes[at], steps[at])
        return columns, priorities, table

    def _arrange_sampled(self, arrival: Arrival) -> Sampled | None:
        """Return how often the rows that arrive were handed out; None where nobody asks."""
        manifest = arrival.manifest
        if manifest.schema is None or not (arrival.counted or self._counting):
            return None
        sampled = Sampled(manifest.slots or 0)
        sampled.put(cut_run(arrival.low + 1, arrival.count, manifest.slots), arrival.counts())
        return sampled

    def _make_room(self, count: int) -> None:
        if self.geometry.slots is not None and count > self.geometry.spare:
            through = min(self.last, self.last + count - self.geometry.slots)
            if through > self.window.low:
                self.retire(through)

    def _overwrite(self, slots: IntArray, places: Sequence[int], columns: Sequence[Array]) -> None:
        for place, values in zip(places, columns, strict=True):
            is_priority = place == self.priority_place
            _put(self.priorities.values if is_priority else self._columns[place], slots, values)

    def _take(self, slots: IntArray, places: Sequence[int] | None) -> list[Array]:
        wanted = range(len(self.require_schema().fields)) if places is None else places
        return [self._taken(place, slots) for place in wanted]

    def _taken(self, place: int, slots: IntArray) -> Any:
        column = self._columns[place]
        if not isinstance(column, np.ndarray):
            return column.take(slots)
        if slots.size * column.strides[0] < LEAST_BYTES or column.dtype.hasobject:
            return column.take(slots, axis=0)
        out = self._recycled[place].empty((slots.size, *column.shape[1:]), column.dtype)
        return column.take(slots, axis=0, out=out, mode="clip")  # else NumPy copies twice

    def views(self, places: Sequence[int], first_id: int, count: int) -> list[list[Array]]:
        """View columns over a run of ids without copying."""
        columns = [*self._columns, self.priorities.values]
        runs = self.geometry.runs(first_id, count)
        return [[_part(columns[place], slot, n) for slot, _, n in runs] for place in places]

    def sync(self) -> None:
        """Do nothing: there is no disk."""

    def close(self) -> None:
        """Let go of the rows."""
        self._closed = True


def _empty(entry: Field, size: int) -> Array | Cells:
    if entry.variable:
        from expstore.storages.columns.object_cells import Cells

        return Cells(entry, size)
    return np.zeros((size, *entry.shape), entry.numpy_dtype)


def _grown(column: Array | Cells, size: int) -> Array | Cells:
    if not isinstance(column, np.ndarray):
        return column.grown(size)
    return np.concatenate([column, np.zeros((size - len(column), *column.shape[1:]), column.dtype)])


def _put(column: Array | Cells, slots: IntArray, values: Any) -> None:
    if isinstance(column, np.ndarray):
        column[slots] = values
    else:
        column.put(slots, values)


def _part(column: Array | Cells, slot: int, count: int) -> Any:
    return column[slot : slot + count] if isinstance(column, np.ndarray) else column.part(slot, count)


class _Column:
    """A field that comes: `backfill.Place` for it.

    Args:
        storage: Where it is to be.
        rows: By slot. Shape `(slots, *row shape)`.
    """

    def __init__(self, storage: MemoryStorage, rows: Array) -> None:
        self._storage, self.rows = storage, rows

    def reach(self, slots: int) -> None:
        """Have room for at least so many rows."""
        if len(self.rows) < slots:
            more = np.zeros((slots - len(self.rows), *self.rows.shape[1:]), self.rows.dtype)
            self.rows = np.concatenate([self.rows, more])

    def lay(self, first_id: int, values: Array) -> None:
        """Take the values of a run of rows."""
        for slot, offset, n in self._storage.geometry.runs(first_id, len(values)):
            self.reach(slot + n)
            self.rows[slot : slot + n] = values[offset : offset + n]

    def lay_rows(self, ids: IntArray, values: Array) -> None:
        """Take the values of single rows."""
        self.rows[self._storage.geometry.slot_of(ids)] = values


def _copy(
    kind: type[MemoryStorage],
    capacity: int | None,
    seed: int,
    ndim: int,
    traits: dict[str, Any],
    content: dict[str, Any],
) -> MemoryStorage:
    storage = kind.__new__(kind)
    MemoryStorage.__init__(storage, capacity, seed=seed, ndim=ndim)
    for name, value in traits.items():
        setattr(storage, name, value)
    storage.load_state_dict(content)
    return storage
