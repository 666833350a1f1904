"""Rows that the journal has and the columns do not have yet, because they take the places of other rows.

Used by the storages on disk. Each replaced row lies anywhere in the columns, and the journal must be on the
disk before: so many of them are written together, by a checkpoint. Nothing here touches a file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from expstore.core.values import Array, IntArray
from expstore.storages.columns.column_set import ColumnGroup
from expstore.storages.columns.overlay import Overlay
from expstore.storages.engine.checkpointer import Pin

__all__ = ["ReplacedRows", "RowBatch"]


class RowBatch:
    """Rows by slot, column by column, which are written to the columns together.

    Threads: one adds, any number read; a row that is found is whole.

    Args:
        slots: How many slots the ring has.
        places: Which columns the rows have; the first one is that of the priorities.
        pin: Keeps checkpoints from covering the records of the rows.
    """

    def __init__(self, slots: int, places: Sequence[int], pin: Pin) -> None:
        self.pin, self.places = pin, list(places)
        self.bytes = self._count = 0
        self._at = np.full(slots, -1, np.int32)
        self._rows: list[Array] = []

    def add(self, slots: IntArray, columns: Sequence[Array]) -> None:
        """Take rows, each slot once."""
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
        self._at[slots] = np.arange(self._count, end)  # last: a row that is found is whole
        self._count = end

    def lay_over(self, slots: IntArray, places: Sequence[int], columns: Sequence[Array]) -> None:
        """Write the rows that are here over what was read of the columns."""
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


class ReplacedRows:
    """What readers must see instead of what the columns hold.

    Invariants: a row goes from the batch that waits to the one that is being written, and from there to the
    columns, so a reader looks in this order and misses none. A change that failed half-way hides the columns
    (`fail`) until the journal is read again.

    Threads: writers hold the storage's lock, `begin` and `end` the checkpointer's; any number read. Crashes:
    the journal has every row.
    """

    __slots__ = ("_failed", "_waiting", "_writing")

    def __init__(self) -> None:
        self._waiting: RowBatch | None = None
        self._writing: RowBatch | None = None
        self._failed: Overlay | None = None

    def __bool__(self) -> bool:
        return self._waiting is not None or self._writing is not None

    @property
    def waiting_bytes(self) -> int:
        """How many bytes wait for a checkpoint."""
        waiting = self._waiting
        return 0 if waiting is None else waiting.bytes

    def add(self, slots: IntArray, columns: Sequence[Array], make_batch: Callable[[], RowBatch]) -> None:
        """Take rows; the lock of the episodes is held.

        Args:
            slots: Where the rows lie, each once. Shape `(n,)`.
            columns: Their values, in the order of the batch's places.
            make_batch: Called where no batch waits: it pins the records of the rows.
        """
        waiting = self._waiting or make_batch()
        waiting.add(slots, columns)
        self._waiting = waiting

    def begin(self) -> RowBatch | None:
        """Return the rows that are to be written now, those of an attempt that failed first; None: none."""
        if self._writing is None:
            self._writing, self._waiting = self._waiting, None
        return self._writing

    def end(self) -> None:
        """Note that the columns have the rows that `begin` returned."""
        self._writing = None

    def fail(self, slots: IntArray, places: Sequence[int], columns: Sequence[Array]) -> None:
        """Show a change whole that the columns have only half of; the journal has all of it."""
        failed = Overlay()
        for place, values in zip(places, columns, strict=True):
            failed.put(place, slots, values)
        self._failed = failed

    def take(self, group: ColumnGroup, slots: IntArray, places: Sequence[int]) -> list[Array]:
        """Copy rows out of the columns, and those that are newer from here. Shapes `(n, *row shape)`."""
        waiting = self._waiting  # in this order: see the class
        writing, failed = self._writing, self._failed
        if failed is not None:
            return [failed.take(place, group.columns[place], slots) for place in places]
        taken = group.take(slots, places)
        for batch in (writing, waiting):
            if batch is not None:
                batch.lay_over(slots, places, taken)
        return taken

    def overlay(self) -> Overlay | None:
        """Return what lies over the columns; None: nothing does."""
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
