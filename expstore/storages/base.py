"""The base of every writable storage: assign ids, append, change and delete rows.

Buffers use this class. A storage of your own implements the abstract methods at its end, and
`expstore.testing.StorageSuite` tests what buffers rely on. A subclass's `_append` writes the values first,
then commits them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from expstore.core.arguments import check_whole
from expstore.core.change_log import ChangeLog
from expstore.core.geometry import RingGeometry, check_ndim, round_up
from expstore.core.spare_slots import spare_slots
from expstore.core.values import Array, IntArray
from expstore.disk.files import Disk
from expstore.episodes.log import LogEntry
from expstore.episodes.sessions import End, Resume
from expstore.errors import ArgumentError, NotFoundError, StateError
from expstore.schema.field_roles import Keys
from expstore.schema.row_fields import ROW_BYTES, priority_place
from expstore.schema.schema import Schema
from expstore.storages.batch import Rows, now_us
from expstore.storages.capabilities import FieldChanges, Retention, RowAppending
from expstore.storages.columns.priorities import check_priorities
from expstore.storages.columns.sample_counts import Sampled
from expstore.storages.description import Description
from expstore.storages.read_view import ReadView, build_closed_error
from expstore.storages.row_settings import RowSettings
from expstore.storages.snapshot_access import SnapshotAccess
from expstore.storages.snapshot_pin import SnapshotPin

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
            self._state.note_replaced(count)
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

    def annotate(self, change: LogEntry | End | Resume) -> None:
        """Store annotations of episodes.

        Args:
            change: An episode with its new info; or which episodes end, or are opened again.

        Raises:
            StateError: The store is closed, not open for writing, or has failed.
            StorageError: The disk failed; nothing was stored.
        """
        with self.lock:
            self.writer()
            with self.locks.episodes:
                self._annotate(change)

    def _annotate(self, change: LogEntry | End | Resume) -> None:
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
        for _ in range(3):
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
        from expstore.storages.indexing import put

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
