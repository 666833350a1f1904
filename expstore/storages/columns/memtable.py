"""Rows in memory that readers must see instead of the rows in the columns.

Used by the storages on disk and by followers. Every such row is also in the journal. Files are touched only
when the rows are written to the columns.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from expstore.core import tuning
from expstore.core.lock_order import LockOrder
from expstore.core.values import Array, IntArray, cut_run
from expstore.storages.columns.column import Column
from expstore.storages.columns.payload import join_payload, split_payloads
from expstore.storages.columns.priorities import StoredPriorities

if TYPE_CHECKING:
    from expstore.storages.columns.column_set import ColumnSet
    from expstore.storages.columns.column_set_writer import WritableColumns

_Pin = TypeVar("_Pin")


class Overlay:
    """Rows by column position and slot.

    A follower puts rows here that a stopped writer had only written to the journal, because followers must
    not write to the columns. A writer puts rows here that it could write only partly to the disk.

    Threads: one thread fills it before others read.
    """

    def __init__(self) -> None:
        self._slots: dict[int, IntArray] = {}  # sorted and unique
        self._rows: dict[int, Array] = {}

    def __bool__(self) -> bool:
        return bool(self._slots)

    def put(self, place: int, slots: IntArray, rows: Array) -> None:
        """Put rows of a column over those that it has; if a slot occurs twice, its last row is used.

        Args:
            place: The column's position.
            slots: Slots of the rows. Shape `(n,)`.
            rows: The rows. Shape `(n, *row shape)`.
        """
        if place in self._slots:
            slots = np.concatenate([self._slots[place], slots])
            rows = np.concatenate([self._rows[place], rows])
        names, last = np.unique(slots[::-1], return_index=True)
        self._slots[place], self._rows[place] = names, rows[::-1][last]

    def read_rows(self, columns: ColumnSet, slots: IntArray, places: Sequence[int]) -> list[Any]:
        """Copy rows out of columns, and newer rows from memory.

        Args:
            columns: The columns.
            slots: Slots of the rows. Shape `(n,)`.
            places: Positions of the columns to read.

        Returns:
            One array per position. Shapes `(n, *row shape)`.

        Raises:
            CorruptionError: Rows of the columns are damaged.
        """
        if not self._slots:
            return columns.gather_rows(slots, places)
        return [self._read_column(place, columns.columns[place], slots) for place in places]

    def _read_column(self, place: int, column: Column, slots: IntArray) -> Any:
        known = self._slots.get(place)
        if known is None:
            return column.gather(slots)
        at = np.minimum(np.searchsorted(known, slots), known.size - 1)
        newer = np.where(known[at] == slots, at, -1)
        return column.mix(slots, newer, self._rows[place])

    def lay_onto(self, place: int, values: Array) -> None:
        """Write the newer rows of a column into a copy of the column, which is indexed by slot."""
        if place in self._slots:
            values[self._slots[place]] = self._rows[place]

    def views(self, columns: ColumnSet, place: int, first_id: int, count: int) -> list[Any]:
        """Return a run of rows of a column in pieces; rows are copied only where newer ones are in memory."""
        if place not in self._slots:
            return columns.columns[place].views(first_id, count)
        runs = cut_run(first_id, count, columns.slots)
        parts = [self.parts(place, columns.columns[place], slot, n) for slot, _, n in runs]
        return [part[0] if len(part) == 1 else np.concatenate(part) for part in parts]

    def parts(self, place: int, column: Column, slot: int, count: int) -> list[Any]:
        """Return a run of slots of a column, split where newer rows replace it."""
        known = self._slots.get(place)
        if known is None:
            return [column.part(slot, count)]
        first, stop = np.searchsorted(known, [slot, slot + count]).tolist()
        inside = known[first:stop]
        parts: list[Array] = []
        done = slot
        for run in np.split(np.arange(first, stop), np.flatnonzero(np.diff(inside) != 1) + 1):
            if run.size:
                start = int(known[run[0]])
                parts.append(column.part(done, start - done))
                parts.append(self._rows[place][run[0] : run[-1] + 1])
                done = start + run.size
        parts.append(column.part(done, slot + count - done))
        return [part for part in parts if part.shape[0]]


class RowBatch(Generic[_Pin]):
    """Rows by slot, column by column, which are written to the columns together.

    Threads: one thread adds rows, any number read; a row that is found is complete.

    Args:
        slots: Number of slots of the ring.
        places: Positions of the rows' columns; the first one is that of the priorities.
        pin: Keeps checkpoints from covering the records of the rows.
    """

    def __init__(self, slots: int, places: Sequence[int], pin: _Pin) -> None:
        self.pin, self.places = pin, list(places)
        self.bytes = self._count = 0
        self._at = np.full(slots, -1, np.int32)
        self._rows: list[Array] = []

    def add(self, slots: IntArray, columns: Sequence[Array]) -> None:
        """Add rows, each slot at most once."""
        end = self._count + slots.size
        if not self._rows or end > len(self._rows[0]):
            room = max(1024, 2 * end)
            grown = [np.empty((room, *column.shape[1:]), column.dtype) for column in columns]
            for new, old in zip(grown, self._rows, strict=False):
                new[: self._count] = old[: self._count]
            self._rows = grown
        for rows, column in zip(self._rows, columns, strict=True):
            rows[self._count : end] = column
        self.bytes += sum(column.nbytes for column in columns)
        self._at[slots] = np.arange(self._count, end)  # last, so that a row that is found is complete
        self._count = end

    def lay_over(self, slots: IntArray, places: Sequence[int], columns: Sequence[Array]) -> None:
        """Overwrite values read from the columns with the rows in this batch."""
        at = self._at[slots]
        here = at >= 0
        if here.any():
            rows = self._rows
            for place, values in zip(places, columns, strict=True):
                if place in self.places:
                    values[here] = rows[self.places.index(place)][at[here]]

    def columns(self) -> tuple[IntArray, list[Array]]:
        """Return the slots, ascending, and their rows, column by column."""
        slots = np.flatnonzero(self._at >= 0)
        return slots, [rows[self._at[slots]] for rows in self._rows]


class ReplacedRows(Generic[_Pin]):
    """Rows that replace other rows.

    Replaced rows are anywhere in the columns, and the journal must be synced before a column is changed.
    Therefore a checkpoint writes many of them together.

    Invariants: a row moves from the waiting batch to the batch that is being written, and from there to the
    columns. A reader looks in this order and misses no row. A change that failed half-way hides the columns
    (`fail`) until the journal is read again.

    Threads: writers hold the storage's lock, `begin` and `end` the checkpointer's; any number read. Crashes:
    the journal has every row.
    """

    def __init__(self) -> None:
        self._waiting: RowBatch[_Pin] | None = None
        self._writing: RowBatch[_Pin] | None = None
        self._failed: Overlay | None = None

    def __bool__(self) -> bool:
        return self._waiting is not None or self._writing is not None

    @property
    def waiting_bytes(self) -> int:
        """Size of the rows that wait for a checkpoint, bytes."""
        waiting = self._waiting
        return 0 if waiting is None else waiting.bytes

    def add(
        self, slots: IntArray, columns: Sequence[Array], make_batch: Callable[[], RowBatch[_Pin]]
    ) -> None:
        """Add rows. The caller holds the lock of the episodes.

        Args:
            slots: Slots of the rows, each at most once. Shape `(n,)`.
            columns: Their values, in the order of the batch's places.
            make_batch: Called if no batch waits; creates one, and pins the records of the rows.
        """
        waiting = self._waiting or make_batch()
        waiting.add(slots, columns)
        self._waiting = waiting

    def begin(self) -> RowBatch[_Pin] | None:
        """Return the rows to write now, first those of a failed attempt; None if no rows wait."""
        if self._writing is None:
            self._writing, self._waiting = self._waiting, None
        return self._writing

    def end(self) -> None:
        """Record that the columns have the rows that `begin` returned."""
        self._writing = None

    def fail(self, slots: IntArray, places: Sequence[int], columns: Sequence[Array]) -> None:
        """Show a change completely although the columns have only part of it; the journal has all of it."""
        failed = Overlay()
        for place, values in zip(places, columns, strict=True):
            failed.put(place, slots, values)
        self._failed = failed

    def read_rows(self, columns: ColumnSet, slots: IntArray, places: Sequence[int]) -> list[Any]:
        """Copy rows out of columns, and newer rows from memory; see `Overlay.read_rows`."""
        waiting = self._waiting  # in this order: see the class
        writing, failed = self._writing, self._failed
        if failed is not None:
            return failed.read_rows(columns, slots, places)
        rows = columns.gather_rows(slots, places)
        for batch in (writing, waiting):
            if batch is not None:
                batch.lay_over(slots, places, rows)
        return rows

    def overlay(self) -> Overlay | None:
        """Return the rows to read instead of the columns' rows; None if the memtable is empty."""
        waiting = self._waiting
        writing, failed = self._writing, self._failed
        if failed is not None or (waiting is None and writing is None):
            return failed
        over = Overlay()
        for batch in (writing, waiting):
            if batch is not None:
                slots, columns = batch.columns()
                for place, values in zip(batch.places, columns, strict=True):
                    over.put(place, slots, values)
        return over


class Memtable(Generic[_Pin]):
    """The rows that a store's columns lack: recent rows, added one by one, and replacements of other rows.

    A recent row costs one write to the journal instead of one write per column. Readers of columns drain
    recent rows first; after a writer was killed, recovery does.

    Threads: the writer adds rows, any thread drains and reads. Crashes: all rows in here are also in the
    journal.

    Args:
        order: The lock order of the storage.
        priorities: The priorities of all rows.
    """

    def __init__(self, order: LockOrder, priorities: StoredPriorities) -> None:
        self.replaced: ReplacedRows[_Pin] = ReplacedRows()
        #: Id of the first recent row, and their number. One tuple, so that readers never see half an update.
        self.span = (0, 0)
        self._lock = order.rank_lock("tail", threading.RLock())
        self._priorities = priorities
        self._batches: list[tuple[int, bytes]] = []
        self._bytes = 0

    def add(self, first_id: int, count: int, payload: bytes) -> None:
        """Add recent rows, which follow the existing ones.

        Args:
            first_id: Id of the first row.
            count: Number of rows.
            payload: Their bytes, as in their commit record.
        """
        with self._lock:
            first, known = self.span
            self._batches.append((count, payload))
            self._bytes += len(payload)
            self.span = (first if known else first_id, known + count)

    @property
    def count(self) -> int:
        """Number of recent rows."""
        return self.span[1]

    @property
    def full(self) -> bool:
        """Whether it should be drained."""
        return self.count >= tuning.MEMTABLE_ROWS or self._bytes >= tuning.MEMTABLE_BYTES

    def holds(self, columns: ColumnSet, slots: IntArray) -> bool:
        """Return whether one of these slots belongs to a recent row. Rows added meanwhile have newer ids."""
        first_id, count = self.span
        start = first_id - 1
        if columns.slots is not None:
            start %= columns.slots
            if start + count > columns.slots:  # they are at both ends of the ring
                return bool((self._numbers(columns, slots) >= 0).any())
        # A slot before the first becomes a very large unsigned number: one comparison checks both ends.
        return bool(((slots - start).view(np.uint64) < count).any())

    def _numbers(self, columns: ColumnSet, slots: IntArray) -> IntArray:
        """Return the position of each slot among the recent rows; -1: none. Shapes `(n,)`."""
        first_id, count = self.span
        numbers = slots - (first_id - 1)
        if columns.slots is not None:
            numbers %= columns.slots
        return np.where((numbers >= 0) & (numbers < count), numbers, -1)

    def _parts(self, columns: ColumnSet) -> list[bytes]:
        """Return the bytes of the recent rows, column by column. The caller holds the lock."""
        return split_payloads(columns, self._batches)

    def drain(self, columns: WritableColumns, note: Callable[[int], None]) -> None:
        """Write the recent rows to the columns.

        Args:
            columns: The columns.
            note: Called with the id of the last row, before other threads see that the memtable is empty and
                write newer rows.

        Raises:
            StorageError: The disk failed; the rows stay here.
        """
        with self._lock, self._priorities.lock:
            first_id, count = self.span
            if count:
                pieces = cut_run(first_id, count, columns.slots)
                priorities = np.concatenate([self._priorities.run(slot, n) for slot, _, n in pieces])
                columns.write_parts(pieces, self._parts(columns), priorities)
                note(first_id + count - 1)
                self._batches, self._bytes, self.span = [], 0, (0, 0)

    def read_rows(self, columns: ColumnSet, slots: IntArray, places: Sequence[int]) -> list[Any]:
        """Copy rows out of columns, and newer rows from memory; see `Overlay.read_rows`."""
        if not self.span[1] or not self.holds(columns, slots):
            return self.replaced.read_rows(columns, slots, places)
        with self._lock:
            newer, (first_id, count) = self._numbers(columns, slots), self.span
            if not count:  # drained just now
                return self.replaced.read_rows(columns, slots, places)
            pieces = cut_run(first_id, count, columns.slots)
            rows = join_payload(columns, self._parts(columns), pieces).values
            priorities = np.concatenate([self._priorities.run(slot, n) for slot, _, n in pieces])
            rows = [*rows, priorities]
            return [columns.columns[place].mix(slots, newer, rows[place]) for place in places]

    def copy_recent(
        self, columns: ColumnSet, ids: Sequence[int], places: Sequence[int]
    ) -> list[Array] | None:
        """Copy a few recent rows out of their payloads; None: not all of the rows are recent.

        Args:
            columns: The columns.
            ids: Ids of the rows.
            places: Positions of columns of fixed size, without the priorities.
        """
        with self._lock:
            first_id, count = self.span
            if min(ids) < first_id or max(ids) >= first_id + count:
                return None
            sizes = [column.row_bytes for column in columns.columns]
            entries = [columns.columns[place].entry for place in places]
            taken = [np.empty((len(ids), *entry.shape), entry.numpy_dtype) for entry in entries]
            for at, number in enumerate(ids):
                count, payload, row = self._find(number - first_id)
                for rows, place in zip(taken, places, strict=True):
                    start = count * sum(sizes[:place]) + row * sizes[place]
                    values = np.frombuffer(payload, rows.dtype, rows[at].size, start)
                    rows[at] = values.reshape(rows.shape[1:])
            return taken

    def _find(self, number: int) -> tuple[int, bytes, int]:
        """Return number of rows and payload of a recent row's batch, and the row's number in the batch."""
        first = self.span[1]
        for count, payload in reversed(self._batches):
            first -= count
            if number >= first:
                return count, payload, number - first
        raise AssertionError("unreachable")
