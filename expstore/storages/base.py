"""The base of every writable storage: assign ids and episodes, append, change and delete rows.

Buffers use this class, and write by `append_rows`. A storage of your own implements the abstract methods at
the end of the class, and `expstore.testing.StorageSuite` tests what buffers rely on. A subclass's `_append`
writes the values first, then commits them.
"""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from expstore.core.arguments import check_whole
from expstore.core.change_log import ChangeLog
from expstore.core.geometry import RingGeometry, check_ndim, round_up
from expstore.core.spare_slots import spare_slots
from expstore.core.values import Array, IntArray, key_name
from expstore.disk.files import Disk
from expstore.episodes.facts import SPLIT
from expstore.episodes.groups import add_groups
from expstore.episodes.log import NewFacts
from expstore.episodes.sessions import End, Resume, SessionKey
from expstore.episodes.table import Assignment, Observations
from expstore.errors import ArgumentError, NotFoundError, SchemaError, StateError
from expstore.schema.field_roles import Keys
from expstore.schema.row_fields import ROW_BYTES, priority_place
from expstore.schema.row_selection import pick
from expstore.schema.schema import Schema, build_annotated_error
from expstore.storages.batch import Rows, now_us
from expstore.storages.capabilities import FieldChanges, Retention, RowAppending
from expstore.storages.columns.priorities import check_priorities
from expstore.storages.columns.sample_counts import Sampled
from expstore.storages.description import Description
from expstore.storages.new_field import NewField, check_new_field
from expstore.storages.read_view import (
    PATIENCE,
    ReadView,
    build_closed_error,
    end_of,
    find,
    keys_for,
    layout_of,
    plain_index,
)
from expstore.storages.row_settings import RowSettings
from expstore.storages.snapshot_access import SnapshotAccess, SnapshotPin

if TYPE_CHECKING:
    from expstore.core.idempotency import WriteKey
    from expstore.data.batch import Batch
    from expstore.episodes.segmentation import Steps

_logger = logging.getLogger("expstore")
#: Takes rows to save or to load, and returns the rows to use instead.
Hook = Callable[[Any], Any]


class Storage(ReadView):
    """Store rows under ever-growing ids.

    A storage of your own implements the abstract methods, and may override the methods under "what subclasses
    may override".

    Threads: one writes at a time (`lock`), any number read without a lock. Processes: one writer. Crashes:
    the subclass defines what survives; a batch is stored completely or not at all.

    Args:
        capacity: Most readable rows; None: unbounded.
        ndim: How many dims of a batch are rows: 1, or more with time as the first. With more than 1, the
            capacity is rounded up to a multiple of the rows of one step when the first rows are written.
        seed: Key of all draws.
        flatten: Whether all dims of a batch are rows, and each index of the other dims is a separate stream,
            as in stores on disk.
        description: The description of the storage, instead of the preceding four arguments.
        disk: The disk on which files are accessed.
        path: The store's folder; None: rows are in RAM.
        index_path: The file of the SQL index; None: in memory.

    Raises:
        ArgumentError: The capacity or `ndim` is less than 1.
    """

    def __init__(
        self,
        capacity: int | None = None,
        *,
        ndim: int = 1,
        seed: int = 0,
        flatten: bool = False,
        description: Description | None = None,
        disk: Disk | None = None,
        path: Path | None = None,
        index_path: Path | None = None,
    ) -> None:
        if capacity is not None:
            capacity = check_whole("capacity", capacity)
            if capacity < 1:
                raise ArgumentError(f"capacity must be at least 1, got {capacity}")
        made = description or Description(
            geometry=RingGeometry(capacity, check_ndim(ndim)), seed=seed, flatten=flatten
        )
        super().__init__(made, disk=disk, path=path, index_path=index_path)
        self.changes: ChangeLog = ChangeLog()
        #: Makes writers wait while rows are copied for a snapshot.
        self.snapshot_pin = SnapshotPin(self.locks.order, self.counters)
        self._counting = False  # whether rows are counted from the first row on

    # -- appending ---------------------------------------------------------------------------------

    def prepare(
        self, schema: Schema, keys: Keys, dims: tuple[int, ...] = (), *, row_class: type | None = None
    ) -> None:
        """Set the fields, once, when the first rows are written.

        Args:
            schema: The fields.
            keys: The fields that mark trajectories, ends and rewards.
            dims: Sizes of a batch's dims after the first, if they are rows too.
            row_class: The tensorclass of the rows; None: rows are not of a tensorclass.

        Raises:
            SchemaError: The fields do not match the specs, or this storage cannot store one of them.
        """
        self.writer()
        former = self.description
        former.geometry.check_dims(dims)
        self.settings.check(schema)
        geometry = self.geometry_for(schema, former.geometry.with_dims(dims))
        self._describe(replace(former, geometry=geometry))
        try:
            self._create(schema, keys)
        except BaseException:
            self._describe(former)
            raise
        if self._counting:
            self._begin_sampled()
        self._describe(self.description.with_fields(schema, keys))
        self.row_traits = replace(self.row_traits, row_class=row_class)

    def write(self, rows: Rows) -> None:
        """Append rows: all of them become readable, or none.

        Raises:
            StateError: The store is closed, not open for writing, or has failed.
            StorageError: The disk failed; no row becomes readable.
        """
        self.writer()
        if self.geometry.lanes > 1:
            self.geometry.check_steps(rows.first_id, rows.count)
        self._admit(rows)
        self._append(rows)
        self.counters.extends += 1

    def _admit(self, rows: Rows) -> None:
        """Wait until rows may be written, and evict the rows that a long batch overwrites."""
        if self.snapshot_pin.first and self.geometry.slots is not None:
            self.snapshot_pin.wait(rows.last_id - self.geometry.slots)
        self._make_room(rows.count)

    def _make_room(self, count: int) -> None:
        """Evict readable rows that `count` more rows would overwrite."""
        ring = self.geometry
        if ring.slots is not None and count > ring.spare:
            through = min(self.last, self.last + count - ring.slots)
            if through > self.window.low:
                self._retire(through)

    def _reserve(self, rows: Rows) -> int:
        """Update the state for slots that rows are about to take, before anything is written to the slots.

        Returns:
            How many of the first rows get no slot: the surplus rows of a batch longer than the ring.
        """
        state, geometry, last = self._state, self.geometry, rows.last_id
        capacity = geometry.capacity
        most = self.description.window_rows if capacity is None else capacity
        if state.priorities.within and most is not None:
            low = min(last - most, state.stored.last - 1)
            state.priorities.lower_largest(low, self.window, geometry)
        skipped = 0 if capacity is None else max(0, rows.count - capacity)
        state.horizon = last
        if state.sampled is not None:
            with self.locks.sampled:
                state.sampled.renew(geometry.runs(rows.first_id + skipped, rows.count - skipped))
        return skipped

    def _commit(self, rows: Rows) -> None:
        """Make written rows readable: episodes and window change together."""
        with self.locks.episodes:
            self._state.commit_rows(rows, self.capacity, self._next_position())

    # -- changing and deleting ---------------------------------------------------------------------

    def change(self, ids: IntArray, places: Sequence[int], columns: Sequence[Array]) -> None:
        """Replace fields of readable rows; episodes do not change.

        Args:
            ids: Ids of the rows, each at most once. Shape `(n,)`.
            places: Positions of the fields in the schema.
            columns: Their new values. Shapes `(n, *row shape)`.

        Raises:
            NotFoundError: A row is no longer in the store; nothing was changed.
            SchemaError: Rows of such a field cannot be changed.
        """
        with self.lock:
            self.writer()
            if ids.size == 0:
                return
            if not self._state.stored.holds(ids).all():
                raise NotFoundError("cannot change rows that are no longer in the store")
            fields = [self.require_schema().fields[place] for place in places]
            if annotated := [entry for entry in fields if entry.annotated]:
                raise build_annotated_error(annotated)
            self._change(ids, places, columns, replaces=False)

    def replace(self, ids: IntArray, columns: Sequence[Array]) -> None:
        """Replace readable rows by other rows: all of them, completely, or none.

        The new rows take over ids, episodes and steps, count as written now, and get the largest priority.

        Args:
            ids: Ids of the rows to replace, each at most once. Shape `(n,)`.
            columns: The new rows: one array per field, in the schema's order. Shapes `(n, *row shape)`.
        """
        with self.lock:
            self.writer()
            schema, count = self.require_schema(), ids.size
            times = np.full(count, now_us())
            priorities = np.full(count, self.priorities.largest, np.float32)
            last = priority_place(schema)
            places = [last, *range(len(schema.fields)), last - 1]
            self._change(ids, places, [priorities, *columns, times], replaces=True)
            self.priorities.raise_largest(ids, priorities)
            self.counters.extends += 1
            self.priorities.tell(self, self.geometry.slot_of(ids))

    @contextmanager
    def _note_changes(self, slots: IntArray | None = None) -> Iterator[None]:
        """Tell readers that rows are being changed in place.

        Args:
            slots: Slots of the rows; None: any slots. Shape `(n,)`.
        """
        self.changes.begin()
        try:
            yield
        finally:
            self.changes.end(slots)

    def set_priorities(self, ids: IntArray, values: Array) -> int:
        """Set priorities; skip rows that are no longer in the store. Returns how many were set.

        Args:
            ids: Row ids; if an id occurs twice, its last value is used. Shape `(n,)`.
            values: Finite and not negative. Shape `(n,)`.

        Raises:
            PriorityError: A value is negative, NaN or infinite; no priority was set.
        """
        values = check_priorities(values)
        with self.lock:
            self.writer()
            here = self.window.holds(ids)
            if not here.all():
                ids, values = ids[here], values[here]
            slots = self.geometry.slot_of(ids)
            if slots.size:
                self.priorities.set(ids, slots, values)
                self._note_unsaved()
                self.priorities.tell(self, slots)
            return int(slots.size)

    def clear(self) -> None:
        """Delete all rows; ids continue at the next multiple of the capacity, plus 1."""
        with self.lock:
            self.writer()
            last = self._state.stored.last
            if self._state.stored.size == 0:
                if self.episodes.has_open(None):
                    self.annotate(End(now_us(), None))
                return
            if self.capacity is not None:
                last = -(-last // self.capacity) * self.capacity
            self._forget(last)

    def _forget(self, last: int) -> None:
        """Delete all rows; the next id is `last` + 1."""
        with self.locks.episodes:
            self.epochs.note_deleted()
            self._state.clear(last, self._next_position())

    def _retire(self, through: int) -> None:
        """Remove the rows with ids <= `through` permanently."""
        with self.locks.episodes:
            self.epochs.note_deleted()
            self._state.retire(through)
            self._state.note_content(self._next_position())

    def _next_position(self) -> tuple[int, int]:
        """Return the position of the next record, for the SQL index. This class counts changes instead."""
        return (1, self._state.content[1] + 1)

    def annotate(self, change: NewFacts | End | Resume) -> None:
        """Store annotations of episodes.

        Args:
            change: New facts about episodes; or which episodes end, or are opened again.

        Raises:
            StateError: The store is closed, not open for writing, or has failed.
            StorageError: The disk failed; nothing was stored.
        """
        with self.lock:
            self.writer()
            with self.locks.episodes:
                self._annotate(change)

    def _annotate(self, change: NewFacts | End | Resume) -> None:
        """Record annotations of episodes, then apply them. The caller holds the lock of the episodes."""
        self._state.annotate(change, self._next_position())

    # -- reading -------------------------------------------------------------------------------------

    def read(self, ids: IntArray, places: Sequence[int] | None = None) -> list[Array]:
        """Copy rows out. Call `intact` afterwards to check that none was overwritten meanwhile.

        Args:
            ids: Ids of the rows. Shape `(n,)`.
            places: Positions of the fields to read; None: all.

        Returns:
            One array per field. Shapes `(n, *row shape)`.
        """
        slots, changes = self.geometry.slot_of(ids), self.changes
        for _ in range(PATIENCE):
            before = changes.number
            columns = self.take(slots, places)
            if before == changes.number and not before & 1:
                return columns
        with self.lock:
            return self.take(slots, places)

    def intact(self, ids: IntArray) -> bool:
        """Return whether no slot of these ids has been overwritten by a later row or given to other rows.

        `ids`: shape `(n,)`, int64.
        """
        state, depth = self._state, self.geometry.depth
        if depth is None:
            # A store without a capacity frees the space of deleted rows.
            deleted, retired = state.stored.deleted, state.retired
            kept = not retired or ids.size == 0 or int(ids.min()) > retired
            return kept and not (deleted and deleted.holds(ids).any())
        return state.horizon <= depth or ids.size == 0 or int(ids.min()) > state.horizon - depth

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Replace rows by index; rows right after the last one are appended.

        Args:
            cursor: An integer, several integers, or a slice.
            data: One row for a single integer, otherwise one row per index.
            set_cursor: Whether rows may be appended; False: only rows that exist are replaced.

        Raises:
            NotFoundError: There is no such row, and it would not be the next row.
            SchemaError: The rows do not fit the schema.
        """
        put(self, cursor, data, appends=set_cursor)

    def __setitem__(self, index: Any, data: Any) -> None:
        self.set(index, data)

    # -- snapshots -----------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Do nothing for a state without rows: the rows are in the folder.

        Raises:
            StateError: The state contains rows.
        """
        if "rows" in state_dict:
            raise StateError(
                f"a {self.kind} storage loads no rows from a state dict, but this one contains rows",
                hint="load it into a LazyMemmapStorage, or use dumps() and loads()",
            )

    def register_save_hook(self, hook: Hook) -> None:
        """Raise an error: `state_dict` contains no rows here.

        Raises:
            StateError: Always.
        """
        raise self._no_hooks()

    def register_load_hook(self, hook: Hook) -> None:
        """Raise an error: `state_dict` contains no rows here.

        Raises:
            StateError: Always.
        """
        raise self._no_hooks()

    def _no_hooks(self) -> StateError:
        return StateError(
            f"state_dict() of a {self.kind} storage has no rows that a hook could change",
            hint="change rows before extend(), or after reading them",
        )

    def __getstate__(self) -> Any:
        """Raise an error: rows cannot be copied along with the object.

        Raises:
            StateError: Always.
        """
        raise StateError(
            f"a {self.kind} storage cannot be copied or sent to another process",
            hint="open its folder there, or use a MemoryStorage",
        )

    # -- life ----------------------------------------------------------------------------------------

    def writer(self) -> Self:
        """Return the storage itself.

        Raises:
            StateError: The storage is closed.
        """
        if self._closed:
            raise build_closed_error()
        return self

    @property
    def can_write(self) -> bool:
        """Whether the storage is open for writing and has not failed."""
        return not self._closed

    # -- what subclasses may override ---------------------------------------------------------------

    @property
    def fields(self) -> FieldChanges | None:
        """Adds and drops fields; None: the fields of this kind of storage never change."""
        return None

    @property
    def retention(self) -> Retention | None:
        """Deletes episodes; None: this kind of storage evicts rows by age, or keeps all rows."""
        return None

    def row_appender(self, schema: Schema, rows: int = 1) -> RowAppending | None:
        """Return an appender that writes a few rows of one stream faster than `write`, or None.

        Args:
            schema: The fields of the rows.
            rows: How many rows are appended together.
        """
        return None

    @property
    def snapshots(self) -> SnapshotAccess:
        """Access to the content for snapshots, which read it and, where possible, replace it."""
        return SnapshotAccess(self, self._check_hooks)

    def _check_hooks(self) -> None:
        """Raise SnapshotError if a save hook returns other rows than it gets; this class has no hooks."""

    def _hook_content(self, content: Any) -> Any:
        """Return the content of a snapshot after the load hooks were applied; this class has no hooks."""
        return content

    @property
    def settings(self) -> RowSettings:
        """Settings of the rows: their ranking, their specs, and whether samples are counted."""
        return RowSettings(self, self._describe, self._count_sampled)

    def _count_sampled(self) -> None:
        """Begin to count how often rows are sampled. The caller holds the lock."""
        self._counting = True
        if self._state.sampled is None and self.schema is not None:
            self._begin_sampled()

    def _begin_sampled(self) -> None:
        """Create counts of 0 for all slots."""
        self._state.count_sampled(Sampled(self.geometry.slots or max(4096, self.last)))

    def geometry_for(self, schema: Schema, ring: RingGeometry) -> RingGeometry:
        """Return a ring with the slots beyond its capacity that rows of a schema need.

        The number of these slots is a multiple of the lanes, so that only whole steps of time are
        overwritten.
        """
        spare = spare_slots(ring.capacity, schema.row_bytes + ROW_BYTES)
        return ring.with_slots(round_up(spare, ring.lanes), 0)

    def _note_unsaved(self) -> None:
        """Record that priorities were set, so that they are saved soon."""

    # -- what a subclass implements -------------------------------------------------------------------

    @abstractmethod
    def _create(self, schema: Schema, keys: Keys) -> None:
        """Create empty columns."""

    @abstractmethod
    def _append(self, rows: Rows) -> None:
        """Append rows: call `_reserve` for their slots, write their values, then call `_commit`."""

    @abstractmethod
    def _change(
        self, ids: IntArray, places: Sequence[int], columns: Sequence[Array], *, replaces: bool
    ) -> None:
        """Change the values of rows, after `snapshot_pin.wait()` and inside `_note_changes`.

        Args:
            ids: Ids of the rows, each at most once. Shape `(n,)`.
            places: Positions of the columns, as in `views`.
            columns: The values. Shapes `(n, *row shape)`.
            replaces: Whether these are new rows, with values for all columns.
        """

    @abstractmethod
    def sync(self) -> None:
        """Sync everything that was written to the disk."""


# -- batches of rows, appended or by index ----------------------------------------------------------------


def put(storage: Storage, index: Any, data: Any, *, appends: bool = True) -> None:
    """Replace rows by index; rows right after the last one are appended.

    Args:
        storage: The storage with the rows.
        index: One integer, several, or a slice; steps of time if `ndim` is larger than 1.
        data: One row for a single integer, otherwise one row per index.
        appends: Whether rows right after the last one are appended; False: such an index is an error.

    Raises:
        NotFoundError: There is no such row, and it would not be the next row.
        SchemaError: The rows do not fit the schema.
    """
    from expstore.data.containers import take

    index = plain_index(index)
    single = not isinstance(index, (slice, tuple)) and np.ndim(index) == 0
    storage.writer()
    batch = take(data, layout_of(storage, 0), single=single)
    add_new_fields(storage, batch)
    with storage.lock:
        storage.writer()
        new = _next_rows(storage, index, batch) if appends else None
        if new is None:
            replace_rows(storage, find(storage, index)[0], batch)
        elif new.all():
            _append_batch(storage, batch)
        else:
            former = find(storage, np.asarray(index).reshape(-1)[~new])[0]
            replace_rows(storage, former, _part_of(batch, ~new))
            _append_batch(storage, _part_of(batch, new))


def _next_rows(storage: ReadView, index: Any, batch: Batch) -> Array | None:
    """Return which rows of a batch are appended after the last row; None: the index does not allow it.

    Shape `(n,)`, bool. If `ndim` is larger than 1, either all rows are appended or none.
    """
    if isinstance(index, (slice, tuple)) or np.asarray(index).dtype.kind not in "iu":
        return None
    lanes, numbers = math.prod(batch.dims), np.asarray(index).reshape(-1)
    have = end_of(storage) // lanes
    new: Array = numbers >= have
    count = int(np.count_nonzero(new))
    fits = storage.capacity is None or storage.window.size + count * lanes <= storage.capacity
    if not count or not fits or numbers.size * lanes != batch.count:
        return None
    if lanes > 1 and count < numbers.size:
        return None
    if not np.array_equal(numbers[new], np.arange(have, have + count)):
        return None
    return np.repeat(new, lanes)


def _part_of(batch: Batch, rows: Array) -> Batch:
    """Return some rows of a batch. Shape of `rows` `(n,)`, bool."""
    arrays = [pick(array, rows) for array in batch.arrays]
    return replace(batch.keep(rows), keys=batch.keys, dtypes=batch.dtypes, arrays=arrays)


def rows_along(data: Any, ndim: int) -> tuple[int, ...]:
    """Return how many rows a batch has along its first dims.

    Args:
        data: Any value that `extend` accepts: a TensorDict, a tensor, a tree of tensors.
        ndim: How many dims are rows.

    Raises:
        SchemaError: The batch has fewer dims, or cannot be stored.
    """
    from expstore.data.batch import Layout
    from expstore.data.containers import take

    batch = take(data, Layout(ndim=ndim))
    return (batch.count // math.prod(batch.dims), *batch.dims)


def append(storage: Storage, data: Any) -> None:
    """Append a batch without informing samplers; its first `ndim` dims are rows."""
    from expstore.data.containers import take

    with storage.lock:
        storage.writer()
        _append_batch(storage, take(data, layout_of(storage, 0)))


def _append_batch(storage: Storage, batch: Batch) -> None:
    """Append rows without informing samplers."""
    from expstore.data.batch import StepReader

    schema = prepare(storage, batch)
    columns = batch.columns(schema)
    steps = StepReader(schema, storage.keys).read(columns, batch)
    append_rows(storage, columns, steps)


def append_rows(
    storage: Storage,
    columns: Sequence[Array],
    steps: Steps,
    *,
    source: str | None = None,
    info: str = "",
    key: WriteKey | None = None,
) -> IntArray:
    """Write rows under the next ids; the storage's lock is held. Returns the ids. Shape `(n,)`."""
    if steps.session is not None:
        reopen_session(storage, steps.session)
    window, table, time = storage.state.stored, storage.state.episodes, now_us()
    first, observations = window.last + 1, observations_of(storage, columns, steps)
    assignment = table.assign(
        steps, source=source, observations=observations, low=window.low, first_id=first, time=time
    )
    if storage.keys.group is not None:
        info = add_groups(info, storage.keys, storage.require_schema(), columns, assignment.segments)
    if SPLIT in info:
        table.check_split(assignment.segments, info)
        storage.epochs.has_splits = True  # before the rows can be read
    rows = Rows(first, steps.count, columns, assignment, time, info, key)
    storage.write(rows)
    capacity = storage.geometry.capacity
    if capacity is not None and steps.count > capacity:
        warn_once(
            storage,
            f"a batch of {steps.count} rows was written to a store with capacity={capacity}: its first "
            f"{steps.count - capacity} rows are lost at once; use a larger capacity, or smaller batches",
            "long batch",
        )
    if assignment.sources or assignment.restarted:
        warn_of(storage, assignment, source, steps.session)
    ids: IntArray = assignment.numbers[0]
    return ids


def prepare(storage: Storage, batch: Batch) -> Schema:
    """Return the schema; the first batch of rows determines it.

    Raises:
        SchemaError: The batch has another container type than the rows in the storage.
    """
    from expstore.data.containers import check_form

    if storage.schema is None:
        schema = Schema.infer(batch.signature(), batch.form)
        storage.prepare(schema, keys_for(storage, schema), batch.dims, row_class=batch.kind)
        return storage.require_schema()
    check_form(batch, storage.schema)
    storage.geometry.check_dims(batch.dims)
    return storage.schema


def add_new_fields(storage: ReadView, batch: Batch) -> bool:
    """Add the fields of a batch that the storage lacks, if storages of this kind do so; return whether.

    Rows that exist get zeros, and so do later rows without the field. Nothing is changed unless the batch
    fits the storage with the fields. The caller holds no lock of the storage.

    Raises:
        SchemaError: The batch does not fit, or a field cannot be added.
        StateError: The storage cannot be written.
    """
    known = storage.schema
    if known is None or not storage.row_traits.grows or batch.arranged is not None:
        return False
    new = [place for place, key in enumerate(batch.keys) if key not in known]
    if not new or storage.settings.specs():
        return False
    from expstore.data.containers import check_form

    check_form(batch, known)
    fields, grown = storage.writer().fields, known
    found = Schema.infer(batch.signature(), batch.form)
    added = []
    for place in new:
        entry = found[batch.keys[place]]
        check_new_field(storage, entry)
        zero = np.zeros(entry.shape, entry.numpy_dtype)
        grown = grown.grow(entry, zero)
        added.append(NewField(entry=entry, default=zero, fill=zero))
    batch.select_columns(grown)
    if fields is None:
        return False
    for new_field in added:
        fields.add(new_field)
    return True


def replace_rows(storage: Storage, ids: IntArray, batch: Batch) -> None:
    """Replace rows by a batch. The caller holds the storage's lock.

    Args:
        storage: The storage with the rows.
        ids: Ids of the rows; if an id occurs twice, its last row is used. Shape `(n,)`.
        batch: One row for each id. A field that was added later and is not in the batch is not changed.

    Raises:
        SchemaError: The number of rows differs from the number of ids, or the rows do not fit the schema.
    """
    if batch.count != ids.size:
        raise SchemaError(f"cannot replace {ids.size} rows by {batch.count} rows")
    from expstore.data.containers import check_form

    schema = storage.require_schema()
    check_form(batch, schema)
    places, columns = batch.select_columns(schema)
    if ids.size > 1:
        count = ids.size
        ids, last = np.unique(ids[::-1], return_index=True)
        columns = [pick(column, count - 1 - last) for column in columns]
    storage.change(ids, places, columns)


# -- the sessions and episodes of a batch -----------------------------------------------------------------


def observations_of(storage: ReadView, columns: Sequence[Array], steps: Steps) -> Observations | None:
    """Return the observations by which a batch is compared with stored rows; None: it is not compared.

    Args:
        storage: The storage of the rows.
        columns: The batch, in the schema's order. Shapes `(n, *row shape)`.
        steps: Its episode fields.
    """
    pairs = storage.description.observations
    if not pairs or not (storage.state.episodes.heirs or (steps.linked and steps.count > 1)):
        return None
    return Observations(columns, pairs, partial(_read_next, storage))


def _read_next(storage: ReadView, numbers: Sequence[int]) -> dict[int, list[Array]]:
    """Return the next observations of those rows that are still in the store, by id."""
    window, places = storage.stored, [after for _, after in storage.description.observations]
    held = [number for number in numbers if number > window.low]
    if window.deleted:
        held = [number for number in held if window.deleted.upto(number) == window.deleted.upto(number - 1)]
    if not held:
        return {}
    columns = storage.state.read_recent(held, places)
    if columns is None:
        columns = storage.take(storage.geometry.slot_of(np.array(held)), places)
    return {row: [column[at] for column in columns] for at, row in enumerate(held)}


def warn_of(
    storage: ReadView, assignment: Assignment, source: str | None, session: SessionKey | None
) -> None:
    """Log, once for each source, mistakes in how it is written to.

    Args:
        storage: The storage.
        assignment: Episodes and steps of rows that were written.
        source: Name of their stream.
        session: The session that has written them; None: the storage's own.
    """
    if assignment.restarted:
        stream = "rows without a source" if source is None else f"source {source}"
        if storage.keys.trajectory is None:
            names = ", ".join(
                key_name(storage.require_schema().fields[place].key)
                for place, _ in storage.description.observations
            )
            text = (
                f"{stream} began another episode: {names} of its newest row does not equal the next "
                "observation of the row before, and no row has ended the episode, which is cut; set "
                "terminated or truncated in the last row of an episode, or call episodes.end() after it"
            )
        else:
            text = (
                f"{stream} began another episode under the trajectory id of its open one, which is cut: "
                "two collectors write under one name, or one has restarted; give each its own source=, "
                "or call episodes.end() when one restarts"
            )
        warn_once(storage, text, ("restart", source))
    if source is not None and assignment.sources:
        table = storage.episodes
        own = table.sources_named(source, session=session or storage.episodes.session)
        if len(table.sources_named(source)) > len(own):
            warn_once(
                storage,
                f"several sessions write to source {source} at the same time: each has episodes of its "
                "own; give each its own source= to tell them apart",
                ("sessions", source),
            )


def warn_once(storage: ReadView, text: str, once: Hashable) -> None:
    """Log a warning about how a storage is written to, unless it was logged before.

    Args:
        storage: The storage.
        text: The warning.
        once: Its name.
    """
    if once not in storage.warned:
        storage.warned.add(once)
        _logger.warning(text)


def reopen_session(storage: Storage, session: SessionKey) -> None:
    """Open an ended session again, with the episodes that its end has cut; the caller holds the lock."""
    known = storage.episodes.session_of(session)
    if known is not None and known.ended:
        cut = tuple(one.episode for one in known.cut.values())
        storage.annotate(Resume(now_us(), session, episodes=cut))
