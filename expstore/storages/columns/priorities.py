"""The priorities of rows, by slot: in RAM, and the pages of them that a column on disk lacks.

Used by storages; samplers read the values. This module decides nothing about rows.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np

from expstore.core.geometry import RingGeometry, round_up
from expstore.core.lock_order import LockOrder
from expstore.core.touched import Touched
from expstore.core.values import Array, IntArray, Window
from expstore.disk.files import File
from expstore.errors import PriorityError
from expstore.storages.columns.flat import FlatColumn

#: Priorities in a page of 4 KiB.
PAGE_ROWS = 1024
_PAGE_BITS = PAGE_ROWS.bit_length() - 1

_LARGEST = float(np.finfo(np.float32).max)


def check_priorities(values: Array) -> Array:
    """Return priorities as float32. Shapes `(n,)`.

    Raises:
        PriorityError: A priority is negative, NaN or infinite.
    """
    # Both comparisons are false for NaN.
    if values.size and values.min() >= 0 and values.max() <= _LARGEST:
        return values.astype(np.float32, copy=False)
    with np.errstate(over="ignore"):
        values = np.asarray(values, np.float32)
    bad = ~np.isfinite(values) | (values < 0)
    if bad.any():
        at = int(np.argmax(bad))
        raise PriorityError(
            f"priority number {at} of {values.size} is {values[at]}", hint="use finite values >= 0"
        )
    return values


class PriorityWatcher(Protocol):
    """An object that is notified when priorities change."""

    def on_priorities(self, storage: Any, places: IntArray) -> None:
        """Handle a change of the priorities of slots. Shape `(n,)`."""


class Priorities:
    """The priority of every slot, and the largest priority, which new rows get.

    Threads: any number set and read; rows are added under the storage's lock. Crashes: nothing survives the
    process; `StoredPriorities` tells what must be written to a column.

    Args:
        former: The priorities of the storage before it was opened again; its watchers are taken over.

    Example:
        >>> from expstore.storages.columns.priorities import Priorities
        >>> priorities = Priorities()
        >>> priorities.start([(0, 0, 3)], None, priorities.largest)
        >>> priorities.values[:3].tolist(), priorities.largest
        ([1.0, 1.0, 1.0], 1.0)
    """

    def __init__(self, former: Priorities | None = None) -> None:
        #: Priorities by slot, and the slot of the first of them; replaced by one assignment. Before a window
        #: there are none. Shape `(slots,)`, float32.
        self.block: tuple[Array, int] = np.ones(0, np.float32), 0
        #: The largest priority so far, or of the readable rows if `within` is set.
        self.largest: float = 1.0 if former is None else former.largest
        #: Whether new rows start at the largest priority of readable rows, not at the largest ever.
        self.within: bool = False if former is None else former.within
        #: Whether a priority was ever set; otherwise all are equal.
        self.were_set: bool = False if former is None else former.were_set
        #: Held while values and the largest one change; a few microseconds, unlike the storage's lock. A row
        #: in a reused slot never gets a priority of the row before it: its first one is set under this lock.
        self.changing: threading.Lock = threading.Lock() if former is None else former.changing
        #: The slots whose priorities were set since a capture; None: nothing was captured.
        self.tracked: Touched | None = None
        self._largest_id: int = 0 if former is None else former._largest_id  # a row that has it; 0: unknown
        self._watchers: weakref.WeakSet[PriorityWatcher] = (
            weakref.WeakSet() if former is None else former._watchers
        )

    @property
    def values(self) -> Array:
        """The priorities in memory: by slot, unless the storage has a window. Shape `(slots,)`, float32."""
        return self.block[0]

    @values.setter
    def values(self, values: Array) -> None:
        self.block = values, 0

    def locate(self, slots: IntArray) -> tuple[Array, IntArray]:
        """Return the priorities in memory, and the places of slots in them. Shapes `(n,)`.

        A slot before the window gets the first place.
        """
        values, base = self.block
        return values, slots if not base else np.maximum(slots - base, 0)

    def run(self, slot: int, count: int) -> Array:
        """Return a view of a run of slots in memory. Shape `(count,)`."""
        values, base = self.block
        return values[slot - base : slot - base + count]

    def values_at(self, slots: IntArray) -> Array:
        """Copy the priorities of any rows. Shapes `(n,)`."""
        values, places = self.locate(slots)
        found: Array = values[places]
        return found

    def put(self, slots: IntArray, values: Array) -> None:
        """Set the values of slots in memory. Shapes `(n,)`."""
        held, places = self.locate(slots)
        held[places] = values

    def watch(self, watcher: PriorityWatcher) -> None:
        """Call a watcher for every priority that is set from now on, for as long as the watcher lives."""
        self._watchers.add(watcher)

    def tell(self, storage: Any, slots: IntArray) -> None:
        """Call the watchers after the priorities of slots were set."""
        for watcher in list(self._watchers):
            watcher.on_priorities(storage, slots)

    def note_largest(self, largest: float) -> None:
        """Give new rows this priority: the largest that other content has had so far."""
        self.largest = largest

    def restore(self, values: Array, largest: float) -> None:
        """Replace all priorities, by slot, and the largest. Shape `(slots,)`, float32."""
        self.values = values
        self.note_largest(largest)

    def start(self, runs: list[tuple[int, int, int]], slots: int | None, priority: float) -> None:
        """Give new rows their first priority.

        Args:
            runs: Slots of the rows: (first slot, offset, number of rows).
            slots: Number of slots of a ring; None: the array grows with the rows.
            priority: The priority.
        """
        for slot, _, n in runs:
            values, base = self.block
            if slot + n > base + len(values):
                self._grow(slot, slot + n, slots)
            with self.changing:
                values, base = self.block
                if n == 1:
                    values[slot - base] = priority
                else:
                    values[slot - base : slot - base + n] = priority

    def set(self, ids: IntArray, slots: IntArray, values: Array) -> None:
        """Set the priorities of readable rows; the caller holds `changing`. Shapes `(n,)`, not empty."""
        self.put(slots, values)
        self.were_set = True
        self.raise_largest(ids, values)
        self.note_changed(slots)

    def show(self, values: Array) -> None:
        """Use the priorities of another process, by slot. Shape `(slots,)`, float32."""
        self.values = values

    def note_set(self) -> None:
        """Record that the priorities may differ, because other content was restored."""
        self.were_set = True

    def raise_largest(self, ids: IntArray, values: Array) -> None:
        """Update the largest priority after values were set. Shapes `(n,)`, not empty."""
        at = int(np.argmax(values))
        if values[at] >= self.largest:
            self.largest, self._largest_id = float(values[at]), int(ids[at])
        elif self.within and self._largest_id in ids:
            self._largest_id = 0

    def lower_largest(self, low: int, window: Window, ring: RingGeometry) -> None:
        """Find the largest priority again if the row that had it has an id of at most `low`."""
        with self.changing:
            if self._largest_id > low or window.size == 0:
                return
            ids = window.ids()
            ids = ids[ids > low]
            held, places = self.locate(ring.slot_of(ids))
            values = held[places]
            at = ids.size - 1 - int(np.argmax(values[::-1]))  # the newest such row, which is evicted last
            self.largest, self._largest_id = float(values[at]), int(ids[at])

    def note_changed(self, slots: IntArray) -> None:
        """Record that a column on disk, and a capture, lack the values of these slots. Shape `(n,)`."""
        if self.tracked is not None:
            self.tracked.add(slots)

    def _grow(self, slot: int, stop: int, slots: int | None) -> None:
        """Make room for new rows in the slots from `slot` to `stop` - 1; `slots` as for `start`."""
        grown = np.ones(max(4096, 2 * stop) if slots is None else slots, np.float32)
        with self.changing:
            grown[: self.values.size] = self.values
            self._replace(grown)

    def _replace(self, grown: Array) -> None:
        """Use a longer array; `changing` is held."""
        self.values = grown


def find_base(last: int, window: int | None) -> int:
    """Return the first slot of a page with rows of the window, or with rows that the columns may lack.

    Args:
        last: The newest id.
        window: How many of the newest rows are in the window; None: all.
    """
    return 0 if window is None else max(0, last - window - PAGE_ROWS) // PAGE_ROWS * PAGE_ROWS


class StoredPriorities(Priorities):
    """Priorities that are written to a column on disk page by page.

    Invariant: a page that is not dirty has the same values in the column. Threads: as `Priorities`; `lock` is
    held while rows or pages are written to the column, so that older values of a page never overwrite
    newer ones. Crashes: values of dirty pages are lost with the process. In a storage with a window, memory
    has the values of its rows only: values of rows that leave it stay in the column.

    Args:
        order: The lock order of the storage.
        former: The priorities of the storage before it was opened again, whose watchers are taken over.
    """

    def __init__(self, order: LockOrder, former: Priorities | None = None) -> None:
        super().__init__(former)
        known = former.lock if isinstance(former, StoredPriorities) else None
        self.lock: threading.RLock = known or order.rank_lock("priorities", threading.RLock())
        if known is None:
            self.changing = order.rank_lock("values", self.changing)
        self._dirty = np.zeros(0, bool)  # by page of the values in memory
        self._window: int | None = None
        self._column: FlatColumn | None = None
        self._owed: set[File] = set()  # files that were written to since the last `write`

    def load(
        self,
        values: Array,
        *,
        dirty: bool,
        column: FlatColumn | None = None,
        base: int = 0,
        window: int | None = None,
    ) -> None:
        """Load the values of a column.

        Args:
            values: By slot, from `base` on. Shape `(slots,)`, float32.
            dirty: Whether the column may lack some of them.
            column: The column; only needed with a window.
            base: The slot of the first value: the result of `find_base`, or 0.
            window: How many of the newest rows need values in memory; None: all.
        """
        self.block = values, base
        self._dirty = np.full(-(-values.size // PAGE_ROWS), dirty)
        self._column, self._window = column, window

    def views(self, pieces: Iterable[tuple[int, int, int]]) -> list[Array]:
        """View runs of slots without copying, of the column where memory has no values. Shapes `(m,)`.

        Args:
            pieces: Runs of slots: (first slot, offset in the run, number of rows).
        """
        values, base = self.block
        found: list[Array] = []
        for slot, _, count in pieces:
            older = 0
            if self._column is not None and slot < base:
                older = min(base - slot, count)
                found.append(self._column.part(slot, older))
            found.append(values[slot + older - base : slot + count - base])
        return found

    def note_changed(self, slots: IntArray) -> None:
        """Record that the column, and a capture, lack the values of these slots. Shape `(n,)`."""
        super().note_changed(slots)
        base = self.block[1]
        self._dirty[(slots - base if base else slots) >> _PAGE_BITS] = True

    def values_at(self, slots: IntArray) -> Array:
        """Copy the priorities of any rows, from the column where memory has none. Shapes `(n,)`."""
        with self.lock:
            values = super().values_at(slots)
            older = slots < self.block[1]
            if self._column is not None and older.any():
                values[older] = self._column.gather(slots[older])
        return values

    def write(self, column: FlatColumn) -> set[File]:
        """Write dirty pages to a column; return the files that were written to.

        Raises:
            StorageError: The disk failed; the pages stay dirty.
        """
        with self.lock:
            self._owed |= self._write_pages(column, np.flatnonzero(self._dirty))
            touched, self._owed = self._owed, set()
        return touched

    def _write_pages(self, column: FlatColumn, pages: IntArray) -> set[File]:
        touched: set[File] = set()
        if not pages.size:
            return touched
        values, base = self.block
        limit = min(column.ready - base, values.size)
        self._dirty[pages] = False
        try:
            for run in np.split(pages, np.flatnonzero(np.diff(pages) != 1) + 1):
                start = int(run[0]) * PAGE_ROWS
                stop = min((int(run[-1]) + 1) * PAGE_ROWS, limit)
                for file, offset, row, n in column.spans(base + start, stop - start):
                    file.write(values[start + row : start + row + n].copy(), offset)
                    touched.add(file)
        except BaseException:
            self._dirty[pages] = True
            raise
        return touched

    def _grow(self, slot: int, stop: int, slots: int | None) -> None:
        if self._window is not None:
            self.trim(slot, stop)
            return
        super()._grow(slot, stop, slots)

    def _replace(self, grown: Array) -> None:
        """Use a longer array, none of whose new pages is dirty."""
        more = -(-grown.size // PAGE_ROWS) - self._dirty.size
        if more > 0:
            self._dirty = np.append(self._dirty, np.zeros(more, bool))
        super()._replace(grown)

    def trim(self, last: int, stop: int) -> None:
        """Keep only the values that the window needs, and make room; the column gets the others.

        Does nothing without a window.

        Args:
            last: The newest id.
            stop: The number of slots for which there must be room.

        Raises:
            StorageError: The disk failed; nothing was changed.
        """
        window, column = self._window, self._column
        if window is None or column is None:
            return
        with self.lock:
            values, former = self.block
            base = max(former, find_base(last, window))
            gone = (base - former) >> _PAGE_BITS
            self._owed |= self._write_pages(column, np.flatnonzero(self._dirty[:gone]))
            room = round_up(stop - base + max(4096, window // 2), PAGE_ROWS)
            grown, dirty = np.ones(room, np.float32), np.zeros(room >> _PAGE_BITS, bool)
            with self.changing:
                kept = values[base - former :][:room]
                grown[: kept.size] = kept
                pages = self._dirty[gone:][: dirty.size]
                dirty[: pages.size] = pages
                self.block, self._dirty = (grown, base), dirty
