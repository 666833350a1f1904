"""Rows that stand in the journal with all their bytes, and not yet in the columns.

Used by the Zarr storage for rows that come one by one: one write to the journal instead of one per
column. Whoever reads columns drains it first; recovery applies what a killed writer had not.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from expstore.core.lock_order import LockOrder
from expstore.core.values import Array, IntArray
from expstore.storages.columns.payload import mix_rows

if TYPE_CHECKING:
    from expstore.storages.columns.column_set_writer import WritableColumns
    from expstore.storages.columns.flat import Column

__all__ = ["TAIL_ROWS", "Tail"]

#: Batches of up to this many rows and bytes go to the tail.
TAIL_ROWS = 8
#: So many rows are drained together.
_FULL = 128


class Tail:
    """Hold consecutive rows until they are written to the columns.

    Threads: the writer adds, anybody drains. Crashes: what is in here is in the journal too.

    Args:
        order: Of the storage's locks.
    """

    def __init__(self, order: LockOrder) -> None:
        self.lock = order.ranked("tail", threading.RLock())
        #: Id of its first row, and how many it has: one object, so that nobody sees half of a change.
        self.span = (0, 0)
        self._batches: list[list[bytes]] = []

    def add(self, first_id: int, count: int, parts: list[bytes]) -> None:
        """Take rows that follow those it has.

        Args:
            first_id: Of the first one.
            count: How many.
            parts: Their bytes, as `payload` has them: per column; priority is left out.
        """
        with self.lock:
            self._batches.append(parts)
            self.span = (self.first_id if self.count else first_id, self.count + count)

    @property
    def first_id(self) -> int:
        """Id of its first row."""
        return self.span[0]

    @property
    def count(self) -> int:
        """How many rows it has."""
        return self.span[1]

    @property
    def full(self) -> bool:
        """Whether it is time to drain it."""
        return self.count >= _FULL

    def _rows(self, place: int, column: Column) -> Array:
        """Return one column of fixed size of all rows. Shape `(count, *row shape)`; the lock is held."""
        data = b"".join([parts[place] for parts in self._batches])
        return np.frombuffer(data, column.entry.numpy_dtype).reshape(self.count, *column.entry.shape)

    def holds(self, slots: IntArray, ring: int | None) -> NDArray[np.bool_]:
        """Say which slots are of rows that stand here; those that come to it now are of later ones.

        Args:
            slots: Shape `(n,)`.
            ring: How many slots there are; None: the store grows.
        """
        first_id, count = self.span
        offsets = _offsets(slots, first_id, ring)
        return (offsets >= 0) & (offsets < count)

    def take(
        self, group: WritableColumns, slots: IntArray, wanted: Sequence[int], priorities: Array
    ) -> list[Array]:
        """Copy rows out where those that stand here cannot be written: they come from memory.

        Args:
            group: The columns.
            slots: Which rows. Shape `(n,)`.
            wanted: Places of the columns.
            priorities: By slot.

        Returns:
            One array per column. Shapes `(n, *row shape)`.
        """
        with self.lock:
            here = self.holds(slots, group.slots)
            offsets = _offsets(slots, self.first_id, group.slots)
            found: list[Any] = []
            for place in wanted:
                column = group.columns[place]
                if column.entry.variable:
                    data = b"".join([parts[-1] for parts in self._batches])
                    found.append(mix_rows(group, place, slots, here, offsets, data))
                    continue
                rows = np.empty((slots.size, *column.entry.shape), column.entry.numpy_dtype)
                rows[~here] = column.take(slots[~here])
                if place == len(group.columns) - 1:
                    rows[here] = priorities[slots[here]]
                elif here.any():
                    rows[here] = self._rows(place, column)[offsets[here]]
                found.append(rows)
            return found

    def drop(self) -> None:
        """Forget all rows; the journal has them, or the columns."""
        with self.lock:
            self._batches, self.span = [], (0, 0)

    def write(self, columns: WritableColumns, pieces: list[tuple[int, int, int]], priorities: Array) -> None:
        """Write all rows to the columns; the lock is held, and `drop` follows.

        Args:
            columns: Where to.
            pieces: Where the rows lie: (first slot, offset in the run, rows).
            priorities: Of the rows. Shape `(count,)`.
        """
        parts = [b"".join(batches) for batches in zip(*self._batches, strict=True)]
        columns.write_parts(pieces, parts, priorities)


def _offsets(slots: IntArray, first_id: int, ring: int | None) -> IntArray:
    """Return how far behind a row the slots lie. Shapes `(n,)`."""
    if ring is None:
        return slots - (first_id - 1)
    offsets: IntArray = slots - (first_id - 1) % ring
    offsets[offsets < 0] += ring
    return offsets
