"""Rows in RAM: the reference implementation for tests, and a storage for small runs.

Rows, episodes and SQL work as in a store on disk; nothing survives the process.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from expstore.core.arguments import refuse_keywords
from expstore.core.buffer_pool import LEAST_BYTES, Recycled
from expstore.core.draw_state import DrawState, from_json
from expstore.core.geometry import RingGeometry, round_up
from expstore.core.torchrl_keywords import ON_DISK
from expstore.core.values import Array, IntArray, Key, Window, cut_run
from expstore.episodes.table import EpisodeTable
from expstore.errors import StateError
from expstore.schema.field_roles import Keys
from expstore.schema.row_fields import ROW_FIELDS
from expstore.schema.row_traits import RowTraits
from expstore.schema.schema import Field, Schema
from expstore.storages.batch import Rows, now_us
from expstore.storages.columns.annotated import AnnotatedCells, AnnotationCapture, MemoryAnnotations
from expstore.storages.columns.capture import Capture
from expstore.storages.columns.flat import WIDE_ROW
from expstore.storages.columns.prefetching import RowPrefetcher
from expstore.storages.columns.sample_counts import Sampled
from expstore.storages.description import Description
from expstore.storages.engine.backfill import Filler, check_droppable, places_without
from expstore.storages.format.annotation_log import Part
from expstore.storages.new_field import NewField, check_new_field, check_present
from expstore.storages.row_state import EpisodeList, RowState
from expstore.storages.snapshots.portable_storage import PortableStorage
from expstore.storages.snapshots.restore import Arrival, ContentAccess, ContentLike

if TYPE_CHECKING:
    from expstore.storages.columns.object_cells import Cells

#: One column: an array, or an object with its methods.
_Values: TypeAlias = "Array | Cells | AnnotatedCells"


class MemoryStorage(PortableStorage):
    """Store rows in RAM.

    Threads: as `Storage`. A forked child has its own copy; nothing survives the process. Fields of dtype
    `"object"` contain any Python object, by reference. A store with such a field, or with variable-length
    rows, cannot be dumped.

    Args:
        capacity: Most readable rows; None: unbounded.
        seed: Key of all draws.
        ndim: How many dims of a batch are rows; the first is time; see `Storage`.
        flatten: Whether all dims of a batch are rows, and each index of the other dims is a separate stream,
            as in stores on disk.

    Example:
        >>> from expstore import MemoryStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=MemoryStorage(1000), batch_size=32)
    """

    kind = "memory"
    row_traits = RowTraits(variable=True, objects=True)

    def __init__(
        self,
        capacity: int | None = None,
        *,
        seed: int = 0,
        ndim: int = 1,
        flatten: bool = False,
        **unknown: Any,
    ) -> None:
        refuse_keywords(type(self).__name__, unknown, ("capacity", "seed", "ndim", "flatten"), ON_DISK)
        super().__init__(capacity, ndim=ndim, seed=seed, flatten=flatten)
        self._columns: list[_Values] = []
        self._recycled: defaultdict[int, Recycled] = defaultdict(Recycled)
        self._prefetcher = RowPrefetcher()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the whole content: a copy, here or in another process, is independent of this storage."""
        traits = {name: getattr(self, name) for name in ("device", "row_traits")}
        return _copy, (type(self), self.capacity, self.seed, self.ndim, traits, self.state_dict())

    def _create(self, schema: Schema, keys: Keys) -> None:
        size = self.geometry.slots or 4096
        fields = (*schema.fields, *ROW_FIELDS[:-1])
        self._columns = [_empty(entry, size) for entry in fields]

    def geometry_for(self, schema: Schema, ring: RingGeometry) -> RingGeometry:
        """Return a ring with few spare slots for objects: each slot keeps an object alive."""
        if ring.capacity is None or not schema.objects:
            return super().geometry_for(schema, ring)
        return ring.with_slots(round_up(-(-ring.capacity // 8), ring.lanes), 0)

    @property
    def snapshots(self) -> _Snapshots:
        """Access to the content for snapshots, which read and replace it."""
        return _Snapshots(self, self._check_hooks, self._hook_content)

    @property
    def fields(self) -> _Fields:
        """Adds and drops fields."""
        return _Fields(self)

    def _add_field(self, new_field: NewField) -> None:
        with self.locks.reshaping.act():
            with self.lock:
                self.writer()
                check_new_field(self, new_field.entry)
                known = self.require_schema()
                schema = known.grow(new_field.entry, new_field.default)
                if new_field.entry.annotated:
                    self._add_annotated(schema, new_field)
                    return
                column = _Column(
                    self,
                    np.zeros((len(self._columns[0]), *new_field.entry.shape), new_field.entry.numpy_dtype),
                )
            filler = Filler(self, new_field, column)
            filler.run_ahead()
            with self.lock:
                self.writer()
                if self.schema is not known:
                    raise StateError("the storage's fields have changed", hint="add the field again")
                column.reach(len(self._columns[0]))
                filler.finish()
                place = len(known.fields)
                self._reshape(
                    schema, new_field.specs, [*self._columns[:place], column.rows, *self._columns[place:]]
                )

    def _add_annotated(self, schema: Schema, new_field: NewField) -> None:
        if self._state.annotations is None:
            self._state.annotations = MemoryAnnotations(self.geometry.slots)
        self._annotate_rows(None, np.empty(0, np.int64), (), new_field.entry.key)
        for ids, part in new_field.annotations:
            self._annotate_rows(None, ids, [part])
        column = AnnotatedCells(new_field.entry, self._state.annotations, Path())
        place = len(schema.fields) - 1
        self._reshape(schema, new_field.specs, [*self._columns[:place], column, *self._columns[place:]])

    def _annotate_rows(
        self, by: str | None, ids: IntArray, parts: Sequence[Part], declared: Key | None = None
    ) -> None:
        with self.lock:
            self.writer()
            check_present(self, ids)
            annotations = self._state.annotations
            assert annotations is not None, "there is an annotated field"
            annotations.last = self.last
            with self._note_changes(self.geometry.slot_of(ids)):
                annotations.add(now_us(), by, ids, parts, declared)()

    def _drop_field(self, key: Key, specs: str) -> None:
        with self.locks.reshaping.act(), self.lock:
            self.writer()
            check_droppable(self, key)
            place, schema = self.require_schema().place_of(key), self.require_schema().without(key)
            rest = places_without(len(self._columns), place)
            self._reshape(schema, specs, [self._columns[number] for number in rest])

    def _reshape(self, schema: Schema, specs: str, columns: list[_Values]) -> None:
        with self.epochs.note_field_change():
            self._columns = columns
            # The fields that mark trajectories, ends and rewards stay the same.
            self._describe(replace(self.description, schema=schema, specs=specs))
            self.epochs.note_deleted()

    def _append(self, rows: Rows) -> None:
        skipped = self._reserve(rows)
        self._put(rows, skipped)
        if self._state.annotations is not None:
            self._state.annotations.last = rows.last_id
        runs = self.geometry.runs(rows.first_id + skipped, rows.count - skipped)
        self.priorities.start(runs, self.geometry.slots, self.priorities.largest)
        self._commit(rows)

    def _put(self, rows: Rows, skipped: int) -> None:
        """Write the values of all rows after the first `skipped`."""
        first, count = rows.first_id + skipped, rows.count - skipped
        if self.geometry.slots is None and first + count - 1 > len(self._columns[0]):
            size = 2 * (first + count)
            self._columns = [_grow(column, size) for column in self._columns]
        for column, values in zip(self._columns, (*rows.columns, *rows.assignment.numbers), strict=True):
            for slot, offset, n in self.geometry.runs(first, count):
                part = values[skipped + offset : skipped + offset + n]
                if isinstance(column, np.ndarray):
                    column[slot : slot + n] = part
                else:
                    column.put(np.arange(slot, slot + n), part)

    def _forget(self, last: int) -> None:
        super()._forget(last)
        if self.geometry.slots is None and self.schema is not None:
            for column in self._columns:
                if not isinstance(column, np.ndarray):
                    column.forget(last)
                elif column.dtype.hasobject:
                    column[:last] = None

    def _replace_content(self, content: ContentLike) -> None:
        with self.lock:
            self.snapshot_pin.wait()
            arrival = Arrival.of(content, self)
            manifest = arrival.manifest
            annotations = self._arrange_annotations(arrival)
            columns, priorities, table = self._arrange(arrival, annotations)
            sampled = self._arrange_sampled(arrival)
            moves = self.schema is not None and not self.schema.same(manifest.schema)
            position = self._next_position()
            base = arrival.base(position)
            limits = base["limits"][0], base["limits"][1]
            draws = DrawState(base["draw"], tuple(base["progress"]), limits, from_json(base["randomness"]))
            locks = self.locks
            with self._note_changes(), locks.sampled, locks.episodes, self.epochs.note_field_change(moves):
                self._describe(replace(Description.of(manifest), uuid=self.description.uuid))
                self._columns = columns
                self.priorities.restore(priorities, base["max_priority"])
                self._adopt(
                    RowState(
                        stored=Window(arrival.low, arrival.last, manifest.deleted),
                        horizon=arrival.last,
                        retired=arrival.low,
                        write_count=base["write_count"],
                        episodes=table,
                        log=EpisodeList(arrival.entries()),
                        priorities=self.priorities,
                        write_keys=self._state.write_keys,
                        sampled=sampled,
                        draws=draws,
                        content=position,
                        index_floor=position,
                        annotations=annotations,
                    )
                )
                self.epochs.note_content()

    def _arrange_annotations(self, arrival: Arrival) -> MemoryAnnotations | None:
        """Return the annotations of a snapshot's rows; None if no field is annotated."""
        schema = arrival.manifest.schema
        if schema is None or not schema.annotated:
            return None
        annotations = MemoryAnnotations(arrival.manifest.slots)
        arrival.copy_annotations(annotations)
        annotations.last = arrival.last
        return annotations

    def _arrange(
        self, arrival: Arrival, annotations: MemoryAnnotations | None
    ) -> tuple[list[_Values], Array, EpisodeTable]:
        """Return the columns, the priorities and the episodes of a snapshot in the form used here."""
        manifest, table = arrival.manifest, EpisodeTable(session=self.episodes.session.id)
        table.load_base(arrival.base(self._state.content)["episodes"])
        if manifest.schema is None:
            return [], np.ones(0, np.float32), table
        size = manifest.slots or max(4096, 2 * arrival.last)
        fields = (*manifest.schema.fields, *ROW_FIELDS)
        columns = [_empty(entry, size, annotations) for entry in fields[:-1]]
        priorities = np.ones(size, np.float32)
        found: list[list[Array]] = [[], []]
        for first, arrays in arrival.runs():
            for column, values in zip((*columns, priorities), arrays, strict=True):
                _put(column, (np.arange(first, first + len(values)) - 1) % size, values)
            found[0].append(arrays[-4])
            found[1].append(arrays[-3])
        if arrival.count:
            episodes, steps = (np.concatenate(parts) for parts in found)
            ids = Window(arrival.low, arrival.last, manifest.deleted).ids()
            at = ids - arrival.low - 1
            table.load_rows(ids, episodes[at], steps[at])
        return columns, priorities, table

    def _arrange_sampled(self, arrival: Arrival) -> Sampled | None:
        """Return how often the restored rows were sampled; None if neither side counts."""
        manifest = arrival.manifest
        if manifest.schema is None or not (arrival.counted or self._counting):
            return None
        sampled = Sampled(manifest.slots or 0)
        sampled.put(cut_run(arrival.low + 1, arrival.count, manifest.slots), arrival.counts())
        return sampled

    def _change(
        self, ids: IntArray, places: Sequence[int], columns: Sequence[Array], *, replaces: bool
    ) -> None:
        self.snapshot_pin.wait()
        slots = self.geometry.slot_of(ids)
        with self._note_changes(slots):
            kept = [*self._columns, self.priorities.values]
            for place, values in zip(places, columns, strict=True):
                _put(kept[place], slots, values)
        if replaces:
            self._state.note_replaced(ids.size)

    def take(self, slots: IntArray, places: Sequence[int] | None) -> list[Array]:
        """Copy rows out by slot, whichever rows are there: shapes `(n, *row shape)`; see `ReadView.take`."""
        wanted = range(len(self.require_schema().fields)) if places is None else places
        self._prefetcher.ask(slots, wanted, self._narrow_columns)
        return [self._gather(place, slots) for place in wanted]

    def _narrow_columns(self, places: Sequence[int]) -> list[Array]:
        """Return the narrow columns among those at some positions: their rows are copied one by one."""
        columns = (self._columns[place] for place in places)
        arrays = [column for column in columns if isinstance(column, np.ndarray)]
        return [rows for rows in arrays if rows.strides[0] < WIDE_ROW and not rows.dtype.hasobject]

    def _gather(self, place: int, slots: IntArray) -> Any:
        column = self._columns[place]
        if not isinstance(column, np.ndarray):
            return column.gather(slots)
        if slots.size * column.strides[0] < LEAST_BYTES or column.dtype.hasobject:
            return column.take(slots, axis=0)
        out = self._recycled[place].empty((slots.size, *column.shape[1:]), column.dtype)
        return column.take(slots, axis=0, out=out, mode="clip")  # otherwise NumPy copies twice

    def views(self, places: Sequence[int], first_id: int, count: int) -> list[list[Array]]:
        """View columns over a run of ids without copying: shapes `(m, *row shape)`; see `ReadView.views`."""
        columns = [*self._columns, self.priorities.values]
        runs = self.geometry.runs(first_id, count)
        return [[_part(columns[place], slot, n) for slot, _, n in runs] for place in places]

    def sync(self) -> None:
        """Do nothing: there is no disk."""

    def close(self) -> None:
        """Refuse to read or write from now on; a second call does nothing."""
        self._note_closed()


def _empty(entry: Field, size: int, annotations: MemoryAnnotations | None = None) -> _Values:
    if entry.annotated and annotations is not None:
        return AnnotatedCells(entry, annotations, Path())
    if entry.variable:
        from expstore.storages.columns.object_cells import Cells

        return Cells(entry, size)
    return np.zeros((size, *entry.shape), entry.numpy_dtype)


def _grow(column: _Values, size: int) -> _Values:
    if not isinstance(column, np.ndarray):
        return column.grow(size)
    return np.concatenate([column, np.zeros((size - len(column), *column.shape[1:]), column.dtype)])


def _put(column: _Values, slots: IntArray, values: Any) -> None:
    if isinstance(column, np.ndarray):
        column[slots] = values
    else:
        column.put(slots, values)


def _part(column: _Values, slot: int, count: int) -> Any:
    return column[slot : slot + count] if isinstance(column, np.ndarray) else column.part(slot, count)


class _Fields:
    """Add and drop fields of a storage in RAM.

    Args:
        storage: The storage.
    """

    __slots__ = ("_storage",)

    def __init__(self, storage: MemoryStorage) -> None:
        self._storage = storage

    def add(self, new_field: NewField) -> None:
        """Add a field, completely or not at all."""
        self._storage._add_field(new_field)

    def annotate(self, by: str | None, ids: IntArray, parts: Sequence[Part]) -> None:
        """Add values of annotated fields to rows."""
        self._storage._annotate_rows(by, ids, parts)

    def drop(self, key: Key, specs: str) -> None:
        """Drop a field, completely or not at all."""
        self._storage._drop_field(key, specs)


class _Snapshots(ContentAccess):
    """Read the content of a storage in RAM, and replace it completely or not at all."""

    __slots__ = ()
    _storage: MemoryStorage

    def captures(self, low: int) -> list[Capture]:
        """Capture the annotated fields."""
        columns, annotations = self._storage._columns, self._storage.state.annotations
        annotated = {n: one for n, one in enumerate(columns) if isinstance(one, AnnotatedCells)}
        return [] if annotations is None or not annotated else [AnnotationCapture(annotations, annotated)]

    def adopt(self, content: ContentLike) -> None:
        """Replace the content."""
        self._storage._replace_content(content)


class _Column:
    """The column of a field that is being added; implements `backfill.Place`.

    Args:
        storage: The storage to which the field is added.
        rows: The values by slot. Shape `(slots, *row shape)`.
    """

    def __init__(self, storage: MemoryStorage, rows: Array) -> None:
        self._storage, self.rows = storage, rows

    def reach(self, slots: int) -> None:
        """Make room for at least this number of rows."""
        if len(self.rows) < slots:
            more = np.zeros((slots - len(self.rows), *self.rows.shape[1:]), self.rows.dtype)
            self.rows = np.concatenate([self.rows, more])

    def lay(self, first_id: int, values: Array) -> None:
        """Set the values of a run of rows."""
        for slot, offset, n in self._storage.geometry.runs(first_id, len(values)):
            self.reach(slot + n)
            self.rows[slot : slot + n] = values[offset : offset + n]

    def lay_rows(self, ids: IntArray, values: Array) -> None:
        """Set the values of single rows."""
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
