"""Rows that take the places of others: in the journal and in memory at once, in the columns at the next sync.

Base of the storage on disk. A row that is displaced lies anywhere, so that each newcomer costs a write per
column, and the journal must be on the disk before: both are done for many rows together, beside the caller.
It never chooses which rows go.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from expstore.core import tuning
from expstore.core.values import Array, IntArray
from expstore.disk.files import File
from expstore.storages.columns.checksums import BLOCK_ROWS
from expstore.storages.columns.column_set import ColumnGroup
from expstore.storages.columns.column_set_writer import WritableColumns
from expstore.storages.columns.overlay import Overlay
from expstore.storages.columns.priorities import StoredPriorities
from expstore.storages.engine.checkpointer import Pin
from expstore.storages.engine.store import JournaledStorage
from expstore.storages.format import records
from expstore.storages.format.journal import Kind

__all__ = ["DisplacingStorage"]


class Waiting:
    """Hold rows by slot, column by column.

    Threads: one adds, any number take; a row that was taken is whole. Crashes: the journal has them.

    Args:
        slots: How many slots there are.
        places: Which columns the rows have.
        pin: Keeps checkpoints from covering their records.
    """

    def __init__(self, slots: int, places: Sequence[int], pin: Pin) -> None:
        self.pin = pin
        self.places = list(places)
        self.count = self.bytes = 0
        self._at = np.full(slots, -1, np.int32)
        self._rows: list[Array] = []

    def add(self, slots: IntArray, columns: Sequence[Array]) -> None:
        """Take rows, each slot once."""
        end = self.count + slots.size
        if not self._rows or end > len(self._rows[0]):
            room = max(1024, 2 * end)
            grown = [np.empty((room, *column.shape[1:]), column.dtype) for column in columns]
            for new, old in zip(grown, self._rows, strict=False):
                new[: self.count] = old[: self.count]
            self._rows = grown
        for rows, column in zip(self._rows, columns, strict=True):
            rows[self.count : end] = column
        self.bytes += sum(column.nbytes for column in columns)
        self._at[slots] = np.arange(self.count, end)  # last: who finds a row finds all of it
        self.count = end

    def lay(self, slots: IntArray, wanted: Sequence[int], taken: Sequence[Array]) -> None:
        """Put the rows that are here over what was read of the columns."""
        at = self._at[slots]
        here = at >= 0
        if here.any():
            rows = self._rows
            for place, values in zip(wanted, taken, strict=True):
                if place in self.places:
                    values[here] = rows[self.places.index(place)][at[here]]

    def columns(self) -> tuple[IntArray, list[Array]]:
        """Return the slots, ascending, and their rows, column by column."""
        slots = np.flatnonzero(self._at >= 0)
        return slots, [rows[self._at[slots]] for rows in self._rows]


class DisplacingStorage(JournaledStorage):
    """Change rows in the columns; let those that displace others wait in memory for that.

    Threads: as `Storage`; one settles at a time, under the sync's lock. Crashes: the journal has every row
    when a call returns; the columns get them when that is on the disk, and no mark covers them before.
    """

    columns: WritableColumns | None
    priorities: StoredPriorities
    _half_written: Overlay | None = None  # rows of a change that failed after it was recorded
    _waiting: Waiting | None = None  # rows that the columns are to get
    _settling: Waiting | None = None  # rows that they are getting

    # -- in --------------------------------------------------------------------------------------

    def _change(
        self, ids: IntArray, places: Sequence[int], columns: Sequence[Array], *, replaces: bool
    ) -> None:
        size = sum(column.nbytes for column in columns)
        if (
            not replaces
            or self.geometry.slots is None
            or 2 * size > min(tuning.REPLACED_ROWS_BYTES, tuning.REPLACE_RECORD_BYTES)
        ):
            self.settle_changes()
            self._change_in_place(ids, places, columns, replaces=replaces)
            return
        if self.hold.first:
            self._wait_for_copy(None)
        waiting = self._waiting
        if self.last > self._checkpointer.covered or (
            waiting is not None and waiting.bytes + size > tuning.REPLACED_ROWS_BYTES
        ):
            self.sync()  # a power cut must not bring a row in the place of one that it takes away
        elif waiting is not None and 2 * waiting.bytes > tuning.REPLACED_ROWS_BYTES:
            self._keeper.hurry()
        try:
            self._wait(ids, places, columns)
        except BaseException:
            self.note_interruption()
            raise
        self._keeper.note()

    def _change_in_place(
        self, ids: IntArray, places: Sequence[int], columns: Sequence[Array], *, replaces: bool
    ) -> None:
        """Record new values of rows, then write them to the columns."""
        if self.hold.first:
            self._wait_for_copy(None)
        try:
            pin = self._record_change(ids, places, columns, replaces=replaces)
            slots = self.geometry.slot_of(ids)
            with self.changing(slots):
                self._overwrite(slots, places, columns)
            self._checkpointer.release(pin)
        except BaseException:
            self.note_interruption()
            raise

    def _wait(self, ids: IntArray, places: Sequence[int], columns: Sequence[Array]) -> None:
        """Record rows, and have them wait."""
        body, slots = records.Redo(ids, list(places), columns, True).pack(), self.geometry.slot_of(ids)
        with self.episode_lock:  # no mark comes between the record and the rows
            sequence = self.append_record(Kind.REDO, body)
            if self.durable:
                self._checkpointer.sync_record(self.journal)
            waiting = self._waiting
            if waiting is None:
                pin = self._checkpointer.pin(sequence - 1, self.journal.sync_files()[-1])
                waiting = Waiting(self.geometry.slots or 0, places, pin)
            waiting.add(slots, columns)
            self._waiting = waiting
        with self.priorities.lock:
            self.priorities.values[slots] = columns[0]
        self.priorities.note_changed(slots)
        self._keeper.note()
        self._changes += 2  # nothing is half changed meanwhile
        self._in_place.note(self._changes, slots)

    def _overwrite(self, slots: IntArray, places: Sequence[int], columns: Sequence[Array]) -> None:
        if self.columns is None:
            return
        try:
            touched = self._write_rows(self.columns, slots, places, columns)
        except BaseException:
            # The journal has the change; until it is read again nobody is to see half of one.
            left = Overlay()
            for place, values in zip(places, columns, strict=True):
                left.put(place, slots, values)
            self._half_written = left
            raise
        with self.episode_lock:
            self._note_touched(touched, slots)
        self._keeper.note()

    def _note_touched(self, files: set[File], slots: IntArray) -> None:
        """Have the next checkpoint bring files to the disk, and sum the blocks of slots."""
        if self.columns is not None and self.checksums is not None:
            self.columns.touched |= files
            self.checksums.note_changed((slots // BLOCK_ROWS).tolist())

    def _write_rows(
        self, group: WritableColumns, slots: IntArray, places: Sequence[int], columns: Sequence[Array]
    ) -> set[File]:
        touched: set[File] = set()
        for place, values in zip(places, columns, strict=True):
            if place == self.priority_place:
                with self.priorities.lock:  # a page of older priorities must not be written after these
                    self.priorities.values[slots] = values
                    touched.update(group.columns[place].write_rows(slots, values))
            else:
                touched.update(group.columns[place].write_rows(slots, values))
        return touched

    # -- to the columns --------------------------------------------------------------------------

    def settle_changes(self) -> None:
        """Have the columns hold all rows; the storage's lock is held, so that none come meanwhile."""
        if self._waiting is not None or self._settling is not None:
            self.sync()

    def write_back(self) -> None:
        """Write to the columns what waits in memory: replaced rows, counts, priorities."""
        if self._waiting is not None or self._settling is not None:
            self._settle_waiting()
        super().write_back()

    def _settle_waiting(self) -> None:
        """Bring the journal to the disk, then the rows that wait to the columns; the sync's lock is held."""
        with self.episode_lock:
            group = self.columns
            if self._health.needs_recovery or group is None or not self._lock_file.held:
                return
            if self._settling is None:  # else a failure has left it
                self._settling, self._waiting = self._waiting, None
            settling = self._settling
            if settling is None:
                return
            segments, rotated = self.journal.sync_files(), self.journal.rotated
        self._checkpointer.sync_journal(segments, [self.journal.folder] if rotated else [])
        slots, columns = settling.columns()
        self._shared.begin_change(slots)
        # The first column is that of priorities, which may have been set since.
        with self.priorities.lock:
            values = self.priorities.values[slots]
            touched = set(group.columns[settling.places[0]].write_rows(slots, values))
        touched |= self._write_rows(group, slots, settling.places[1:], columns[1:])
        self._shared.end_change()
        with self.episode_lock:
            self._note_touched(touched, slots)
            self._settling = None
            self._checkpointer.release(settling.pin)

    # -- out -------------------------------------------------------------------------------------

    def _taken(self, group: ColumnGroup, slots: IntArray, wanted: Sequence[int]) -> list[Array]:
        """Copy rows out, those that wait from memory."""
        waiting = (
            self._waiting
        )  # in this order: a row goes from the one to the other, and to the columns then
        settling, half = self._settling, self._half_written
        if half is not None:
            return [half.take(place, group.columns[place], slots) for place in wanted]
        taken = group.take(slots, wanted)
        for held in (settling, waiting):
            if held is not None:
                held.lay(slots, wanted, taken)
        return taken

    def _over(self) -> Overlay | None:
        """Return what lies over the columns; None: nothing does."""
        waiting = self._waiting
        settling, half = self._settling, self._half_written
        if half is not None or (waiting is None and settling is None):
            return half
        over = Overlay()
        for held in (settling, waiting):
            if held is not None:
                slots, columns = held.columns()
                for place, values in zip(held.places, columns, strict=True):
                    over.put(place, slots, values)
        return over
