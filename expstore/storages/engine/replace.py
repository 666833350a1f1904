"""Changes of rows that are readable: in the columns at once, or by a checkpoint for rows that replace others.

Base of the storage on disk. A row that is replaced lies anywhere, so that each new one costs a write per
column, and the journal must be on the disk before: a checkpoint does both for many rows together. It never
chooses which rows are replaced.
"""

from __future__ import annotations

from collections.abc import Sequence

from expstore.core import tuning
from expstore.core.values import Array, IntArray
from expstore.disk.files import File
from expstore.storages.columns.checksums import BLOCK_ROWS
from expstore.storages.columns.column_set_writer import WritableColumns
from expstore.storages.engine.replaced_rows import RowBatch
from expstore.storages.engine.store import JournaledStorage
from expstore.storages.format import records
from expstore.storages.format.journal import Kind

__all__ = ["DisplacingStorage"]


class DisplacingStorage(JournaledStorage):
    """Change rows in the columns; let those that displace others wait in memory for that.

    Threads: as `Storage`; one settles at a time, under the sync's lock. Crashes: the journal has every row
    when a call returns; the columns get them when that is on the disk, and no mark covers them before.
    """

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
        waiting = self._state.replaced.waiting_bytes
        if self.last > self.engine.checkpointer.covered or (
            waiting and waiting + size > tuning.REPLACED_ROWS_BYTES
        ):
            self.sync()  # a power cut must not bring a row in the place of one that it takes away
        elif 2 * waiting > tuning.REPLACED_ROWS_BYTES:
            self.engine.background.hurry()
        try:
            self._wait(ids, places, columns)
        except BaseException:
            self.note_interruption()
            raise
        self.engine.background.note()

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
            self.engine.checkpointer.release(pin)
        except BaseException:
            self.note_interruption()
            raise

    def _wait(self, ids: IntArray, places: Sequence[int], columns: Sequence[Array]) -> None:
        """Record rows, and have them wait."""
        body, slots = records.Redo(ids, list(places), columns, True).pack(), self.geometry.slot_of(ids)
        with self.episode_lock:  # no mark comes between the record and the rows
            sequence = self.append_record(Kind.REDO, body)
            if self.durable:
                self.engine.checkpointer.sync_record(self.journal)
            self._state.replaced.add(slots, columns, lambda: self._batch_behind(sequence - 1, places))
        with self.priorities.lock:
            self.priorities.values[slots] = columns[0]
        self.priorities.note_changed(slots)
        self.engine.background.note()
        self._changes += 2  # nothing is half changed meanwhile
        self._in_place.note(self._changes, slots)

    def _batch_behind(self, lsn: int, places: Sequence[int]) -> RowBatch:
        """Return an empty batch of rows whose records come after this one; they are pinned."""
        pin = self.engine.checkpointer.pin(lsn, self.journal.sync_files()[-1])
        return RowBatch(self.geometry.slots or 0, places, pin)

    def _overwrite(self, slots: IntArray, places: Sequence[int], columns: Sequence[Array]) -> None:
        if self.columns is None:
            return
        try:
            touched = self._write_rows(self.columns, slots, places, columns)
        except BaseException:
            self._state.replaced.fail(slots, places, columns)
            raise
        with self.episode_lock:
            self._note_touched(touched, slots)
        self.engine.background.note()

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
        if self._state.replaced:
            self.sync()

    def write_back(self) -> None:
        """Write to the columns what waits in memory: replaced rows, counts, priorities."""
        if self._state.replaced:
            self._write_replaced()
        super().write_back()

    def _write_replaced(self) -> None:
        """Sync the journal, then write the rows that wait to the columns; the checkpointer's lock is held."""
        with self.episode_lock:
            group = self.columns
            if self.engine.health.needs_recovery or group is None or not self.engine.lock_file.held:
                return
            batch = self._state.replaced.begin()
            if batch is None:
                return
            segments, rotated = self.journal.sync_files(), self.journal.rotated
        self.engine.checkpointer.sync_journal(segments, [self.journal.folder] if rotated else [])
        slots, columns = batch.columns()
        self.engine.shared.begin_change(slots)
        # The first column is that of priorities, which may have been set since.
        with self.priorities.lock:
            values = self.priorities.values[slots]
            touched = set(group.columns[batch.places[0]].write_rows(slots, values))
        touched |= self._write_rows(group, slots, batch.places[1:], columns[1:])
        self.engine.shared.end_change()
        with self.episode_lock:
            self._note_touched(touched, slots)
            self._state.replaced.end()
            self.engine.checkpointer.release(batch.pin)
