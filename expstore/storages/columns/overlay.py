"""Rows as they should read where the columns do not have them yet.

Used by followers, which must not write to the columns what a stopped writer had only put into the
journal, and by the writer where the disk took half of a change. It holds few rows and touches no files.
"""

from __future__ import annotations

import numpy as np

from expstore.core.values import Array, IntArray
from expstore.storages.columns.flat import Column

__all__ = ["Overlay"]


class Overlay:
    """Hold rows by place (the column's number) and slot, over the columns.

    Threads: filled by one, before others read.
    """

    def __init__(self) -> None:
        self._slots: dict[int, IntArray] = {}  # sorted, each once
        self._rows: dict[int, Array] = {}

    def __bool__(self) -> bool:
        return bool(self._slots)

    def put(self, place: int, slots: IntArray, rows: Array) -> None:
        """Lay rows of a column over what it holds; of a slot given twice the last one counts.

        Args:
            place: The column's number.
            slots: Where. Shape `(n,)`.
            rows: What. Shape `(n, *row shape)`.
        """
        if place in self._slots:
            slots = np.concatenate([self._slots[place], slots])
            rows = np.concatenate([self._rows[place], rows])
        names, last = np.unique(slots[::-1], return_index=True)
        self._slots[place], self._rows[place] = names, rows[::-1][last]

    def take(self, place: int, column: Column, slots: IntArray) -> Array:
        """Copy rows of a column out, those that lie over it from here.

        Args:
            place: The column's number.
            column: What lies below.
            slots: Which rows. Shape `(n,)`.
        """
        known = self._slots.get(place)
        if known is None:
            return column.take(slots)
        at = np.minimum(np.searchsorted(known, slots), known.size - 1)
        here = known[at] == slots
        if not here.any():
            return column.take(slots)
        rows = self._rows[place]
        taken = np.empty((slots.size, *rows.shape[1:]), rows.dtype)
        taken[here] = rows[at[here]]
        taken[~here] = column.take(slots[~here])
        return taken

    def lay_onto(self, place: int, values: Array) -> None:
        """Write the rows that lie over a column into a copy of it, found by slot."""
        if place in self._slots:
            values[self._slots[place]] = self._rows[place]

    def parts(self, place: int, column: Column, slot: int, count: int) -> list[Array]:
        """View a run of slots of a column, cut where rows lie over it."""
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
