"""The priorities of rows, by slot: in RAM, and the pages of them that a column on disk lacks.

Used by storages; samplers read the values. This module decides nothing about rows.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, Protocol

import numpy as np

from expstore.core.geometry import RingGeometry
from expstore.core.lock_order import LockOrder
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

    Threads: a caller that sets values holds the storage's lock; any number read. Crashes: nothing survives
    the process; `StoredPriorities` tells what must be written to a column.

    Args:
        former: The priorities of the storage before it was opened again; its watchers are taken over.

    Example:
        >>> from expstore.storages.columns.priorities import Priorities
        >>> priorities = Priorities()
        >>> priorities.start([(0, 0, 3)], slots=None)
        >>> priorities.values[:3].tolist(), priorities.largest
        ([1.0, 1.0, 1.0], 1.0)
    """

    def __init__(self, former: Priorities | None = None) -> None:
        #: Priorities by slot. Shape `(slots,)`, float32.
        self.values: Array = np.ones(0, np.float32)
        #: The largest priority so far, or of the readable rows if `within` is set.
        self.largest: float = 1.0 if former is None else former.largest
        #: Whether new rows start at the largest priority of readable rows, not at the largest ever.
        self.within: bool = False if former is None else former.within
        #: Whether a priority was ever set; otherwise all are equal.
        self.were_set: bool = False if former is None else former.were_set
        self._largest_id: int = 0 if former is None else former._largest_id  # a row that has it; 0: unknown
        self._watchers: weakref.WeakSet[PriorityWatcher] = (
            weakref.WeakSet() if former is None else former._watchers
        )

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

    def start(self, runs: list[tuple[int, int, int]], slots: int | None) -> None:
        """Give new rows the largest priority.

        Args:
            runs: Slots of the rows: (first slot, offset, number of rows).
            slots: Number of slots of a ring; None: the array grows with the rows.
        """
        for slot, _, n in runs:
            if slot + n > self.values.size:
                self._grow(max(4096, 2 * (slot + n)) if slots is None else slots)
            self.values[slot : slot + n] = self.largest

    def set(self, ids: IntArray, slots: IntArray, values: Array) -> None:
        """Set the priorities of readable rows. Shapes `(n,)`, not empty."""
        self.values[slots] = values
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
        if self._largest_id > low or window.size == 0:
            return
        ids = window.ids()
        ids = ids[ids > low]
        values = self.values[ring.slot_of(ids)]
        at = ids.size - 1 - int(np.argmax(values[::-1]))  # the newest such row, which is evicted last
        self.largest, self._largest_id = float(values[at]), int(ids[at])

    def note_changed(self, slots: IntArray) -> None:
        """Record that a column on disk lacks the values of these slots. Shape `(n,)`."""

    def _grow(self, size: int) -> None:
        grown = np.ones(size, np.float32)
        grown[: self.values.size] = self.values
        self.values = grown


class StoredPriorities(Priorities):
    """Priorities that are written to a column on disk page by page.

    Invariant: a page that is not dirty has the same values in the column. Threads: as `Priorities`; `lock` is
    held while rows or pages are written to the column, so that older values of a page never overwrite
    newer ones. Crashes: values of dirty pages are lost with the process.

    Args:
        order: The lock order of the storage.
        former: The priorities of the storage before it was opened again, whose watchers are taken over.
    """

    def __init__(self, order: LockOrder, former: Priorities | None = None) -> None:
        super().__init__(former)
        known = former.lock if isinstance(former, StoredPriorities) else None
        self.lock: threading.Lock = known or order.rank_lock("priorities", threading.Lock())
        self._dirty = np.zeros(0, bool)

    def load(self, values: Array, *, dirty: bool) -> None:
        """Load the values of a column.

        Args:
            values: By slot. Shape `(slots,)`, float32.
            dirty: Whether the column may lack some of them.
        """
        self.values = values
        self._dirty = np.full(-(-values.size // PAGE_ROWS), dirty)

    def note_changed(self, slots: IntArray) -> None:
        """Record that the column lacks the values of these slots. Shape `(n,)`."""
        self._dirty[slots >> _PAGE_BITS] = True

    def write(self, column: FlatColumn) -> set[File]:
        """Write dirty pages to a column; return the files that were written to.

        Raises:
            StorageError: The disk failed; the pages stay dirty.
        """
        touched: set[File] = set()
        with self.lock:
            pages = np.flatnonzero(self._dirty)
            if not pages.size:
                return touched
            limit = min(column.ready, self.values.size)
            self._dirty[pages] = False
            try:
                for run in np.split(pages, np.flatnonzero(np.diff(pages) != 1) + 1):
                    start = int(run[0]) * PAGE_ROWS
                    stop = min((int(run[-1]) + 1) * PAGE_ROWS, limit)
                    for file, offset, row, n in column.spans(start, stop - start):
                        file.write(self.values[start + row : start + row + n].copy(), offset)
                        touched.add(file)
            except BaseException:
                self._dirty[pages] = True
                raise
        return touched

    def _grow(self, size: int) -> None:
        super()._grow(size)
        more = -(-size // PAGE_ROWS) - self._dirty.size
        if more > 0:
            self._dirty = np.append(self._dirty, np.zeros(more, bool))
