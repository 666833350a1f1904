"""A flat field of which rows lie elsewhere, as it is at one moment: for versions and states.

Used where a storage is frozen, and by snapshots. Rows that lie with one that is not kept are whole. It
changes no file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from expstore.core.values import Array, IntArray, Window
from expstore.schema.schema import Field
from expstore.storages.columns.dedup import SharedColumn

__all__ = ["SharedNow"]


@dataclass(frozen=True, slots=True)
class SharedNow:
    """Hold the rows of a shared column at one moment; whoever writes must leave them as they are.

    Args:
        column: Which one.
        pieces: Where the rows lie: (first slot, offset in the run, rows).
        distances: How far before each row the one is with which it lies; 0: it is here. An array per piece.
        whole: Slots of rows that lie with one that is not kept, ascending.
        rows: These. Shape `(n, *row shape)`.
    """

    column: SharedColumn
    pieces: Sequence[tuple[int, int, int]]
    distances: Sequence[Array]
    whole: IntArray
    rows: Array

    @classmethod
    def of(cls, column: SharedColumn, pieces: Sequence[tuple[int, int, int]], window: Window) -> SharedNow:
        """Return the rows of a window as they are now."""
        distances, whole = [], [np.empty(0, np.int64)]
        for slot, offset, n in pieces:
            found = column.distances.copy(slot, n).copy()
            gone = np.flatnonzero(found > np.arange(offset, offset + n))  # before the first row that is kept
            found[gone] = 0
            distances.append(found)
            whole.append(slot + gone)
        slots = np.concatenate(whole)
        order = np.argsort(slots)
        rows = column.take(slots) if slots.size else column.raw(0, 0)
        return cls(column, pieces, distances, slots[order], rows[order])

    @property
    def entry(self) -> Field:
        """The field."""
        return self.column.entry

    def parts(self) -> list[Array]:
        """Return all rows: an array per piece."""
        found = []
        for slot, _, n in self.pieces:
            rows = self.column.part(slot, n)
            first, stop = np.searchsorted(self.whole, [slot, slot + n]).tolist()
            rows[self.whole[first:stop] - slot] = self.rows[first:stop]
            found.append(rows)
        return found

    def runs(self, slot: int, count: int) -> list[tuple[int, Array]]:
        """Return the rows of a run of slots that are kept in them: (offset in the run, rows)."""
        found: list[tuple[int, Array]] = []
        for (start, _, n), distances in zip(self.pieces, self.distances, strict=True):
            low, high = max(slot, start), min(slot + count, start + n)
            if low < high:
                own = np.concatenate([[False], distances[low - start : high - start] == 0, [False]])
                cuts = np.flatnonzero(own[1:] != own[:-1]) + low
                for first, stop in cuts.reshape(-1, 2).tolist():
                    found.append((first - slot, self._rows(first, stop - first)))
        return found

    def _rows(self, slot: int, count: int) -> Array:
        first, stop = np.searchsorted(self.whole, [slot, slot + count]).tolist()
        rows = self.column.raw(slot, count)
        if first == stop:
            return rows
        rows = rows.copy()
        rows[self.whole[first:stop] - slot] = self.rows[first:stop]
        return rows

    def shards(self, rows: int) -> IntArray:
        """Return which shards of so many rows have some that are whole here, and not in the store."""
        found: IntArray = np.unique(self.whole // rows)
        return found
