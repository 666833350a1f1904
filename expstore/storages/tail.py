"""Rows that stand in the journal with all their bytes, and not yet in the columns.

Used by the Zarr storage for rows that come one by one: one write to the journal instead of one per
column. Whoever reads columns drains it first; recovery applies what a killed writer had not.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

from expstore.types import Array

if TYPE_CHECKING:
    from expstore.storages.columns import Column
    from expstore.storages.columnwriter import WritableColumns

__all__ = ["TAIL_BYTES", "TAIL_ROWS", "Tail"]

#: Batches of up to this many rows and bytes go to the tail.
TAIL_ROWS = 8
TAIL_BYTES = 16 * 1024
#: So many rows are drained together.
_FULL = 128


class Tail:
    """Hold consecutive rows until they are written to the columns.

    Threads: the writer adds, anybody drains. Crashes: what is in here is in the journal too.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        #: Id of its first row, and how many it has: one object, so that nobody sees half of a change.
        self.span = (0, 0)
        self._batches: list[list[bytes]] = []

    def add(self, first_id: int, count: int, parts: list[bytes]) -> None:
        """Take rows that follow those it has.

        Args:
            first_id: Of the first one.
            count: How many.
            parts: Their bytes, per column; priority is left out.
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

    def rows(self, place: int, column: Column) -> Array:
        """Return one column of all rows. Shape `(count, *row shape)`; the lock is held."""
        data = b"".join([parts[place] for parts in self._batches])
        return np.frombuffer(data, column.entry.numpy_dtype).reshape(self.count, *column.entry.shape)

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
