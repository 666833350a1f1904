"""Changes of readable rows: in the columns at once, or by a checkpoint for rows that replace others.

Used by the store. Replaced rows are scattered over the columns, so writing each new row at once would cost
one write per column, after a sync of the journal: a checkpoint does both for many rows together. The caller
decides which rows are replaced.
"""

from __future__ import annotations

from collections.abc import Sequence

from expstore.core import tuning
from expstore.core.change_log import ChangeLog
from expstore.core.values import Array, IntArray
from expstore.storages.columns.memtable import RowBatch
from expstore.storages.engine.checkpointer import Pin
from expstore.storages.engine.engine import Engine
from expstore.storages.format.journal import Kind
from expstore.storages.format.paths import REDO
from expstore.storages.format.records import Redo, shelve_body


class Updates:
    """Change rows of a store.

    A change in place first syncs an update record, then changes the columns. A pin prevents checkpoints from
    covering the record before the columns have changed, because this would lose the change.

    Threads: the storage's lock is held. Crashes: the journal has every change when a call returns; an opening
    repeats the changes that the columns may lack.

    Args:
        engine: The engine of the store.
        changed: Records which slots are changed.
    """

    __slots__ = ("_changed", "_engine")

    def __init__(self, engine: Engine, changed: ChangeLog) -> None:
        self._engine, self._changed = engine, changed

    def change(
        self, ids: IntArray, places: Sequence[int], columns: Sequence[Array], *, replaces: bool
    ) -> None:
        """Change the values of rows.

        Args:
            ids: Ids of the rows, each once. Shape `(n,)`.
            places: Positions of the columns.
            columns: The values. Shapes `(n, *row shape)`.
            replaces: Whether these are new rows, with values for all columns.
        """
        size = sum(column.nbytes for column in columns)
        most = min(tuning.REPLACED_ROWS_BYTES, tuning.REPLACE_RECORD_BYTES)
        if replaces and self._engine.geometry.slots is not None and 2 * size <= most:
            self._keep(ids, places, columns, size)
        else:
            self.settle()
            if self._engine.is_behind:
                self._engine.checkpoint()  # otherwise a power failure could keep the change without its row
            with self._engine.health.noting:
                self._change_in_place(ids, places, columns, replaces=replaces)
        self._engine.background.note()

    def settle(self) -> None:
        """Write all rows that replace others to the columns."""
        if self._engine.rows.memtable.replaced:
            self._engine.checkpoint()

    def _change_in_place(
        self, ids: IntArray, places: Sequence[int], columns: Sequence[Array], *, replaces: bool
    ) -> None:
        engine = self._engine
        rows, record = engine.rows, Redo(ids, list(places), columns, replaces)
        number = rows.journal.sequence + 1
        body = shelve_body(engine.disk, engine.path / REDO, number, record.pack(), settle=engine.checkpoint)
        _, pin = engine.append_synced(Kind.REDO, body)
        slots = engine.geometry.slot_of(ids)
        self._changed.begin()
        engine.shared.begin_change(slots)
        try:
            touched = rows.overwrite(slots, places, columns)
            engine.shared.end_change()  # not after a failure: the values are then unknown
        except BaseException:
            rows.memtable.replaced.fail(slots, places, columns)
            raise
        finally:
            self._changed.end(slots)
        with engine.locks.episodes:
            rows.note_touched(touched, slots)
        engine.checkpointer.release(pin)

    def _keep(self, ids: IntArray, places: Sequence[int], columns: Sequence[Array], size: int) -> None:
        """Record rows that replace others, and keep them in memory until a checkpoint writes them."""
        engine, waiting = self._engine, self._engine.rows.memtable.replaced.waiting_bytes
        if engine.is_behind or (waiting and waiting + size > tuning.REPLACED_ROWS_BYTES):
            engine.checkpoint()  # a power failure must not bring back a row whose slot is replaced
        elif 2 * waiting > tuning.REPLACED_ROWS_BYTES:
            engine.background.hurry()
        with engine.health.noting:
            self._record_kept(ids, places, columns)

    def _record_kept(self, ids: IntArray, places: Sequence[int], columns: Sequence[Array]) -> None:
        engine = self._engine
        rows, slots = engine.rows, engine.geometry.slot_of(ids)
        body = Redo(ids, list(places), columns, True).pack()
        # No checkpoint may run between the record and the rows, also not after a failure between them.
        with engine.locks.episodes, engine.health.noting:
            sequence = engine.append_record(Kind.REDO, body)
            engine.sync_if_durable()
            rows.memtable.replaced.add(slots, columns, lambda: self._batch_behind(sequence - 1, places))
        with rows.priorities.lock:
            rows.priorities.values[slots] = columns[0]
        rows.priorities.note_changed(slots)
        self._changed.note(slots)

    def _batch_behind(self, lsn: int, places: Sequence[int]) -> RowBatch[Pin]:
        """Return an empty batch of replacing rows, pinned at the record `lsn`: their records follow it."""
        engine = self._engine
        pin = engine.checkpointer.pin(lsn, engine.rows.journal.sync_files()[-1])
        return RowBatch(engine.geometry.slots or 0, places, pin)
