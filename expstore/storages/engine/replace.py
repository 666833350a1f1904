"""Changes of rows that are readable: in the columns at once, or by a checkpoint for rows that replace others.

Used by the store. A row that is replaced lies anywhere, so that each new one costs a write per column, and
the journal must be on the disk before: a checkpoint does both for many rows together. It never chooses which
rows are replaced.
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

__all__ = ["Updates"]


class Updates:
    """Change rows of a store.

    The order in place: an update record on the disk, then the columns. A checkpoint that covered the record
    before the columns are changed would lose the change; a pin keeps it from that.

    Threads: the storage's lock is held. Crashes: the journal has every change when a call returns; an opening
    repeats those that the columns may lack.

    Args:
        engine: Of the store.
        changed: Told which slots are changed.
    """

    __slots__ = ("_changed", "_engine")

    def __init__(self, engine: Engine, changed: ChangeLog) -> None:
        self._engine, self._changed = engine, changed

    def change(
        self, ids: IntArray, places: Sequence[int], columns: Sequence[Array], *, replaces: bool
    ) -> None:
        """Give rows other values.

        Args:
            ids: Which rows, each once. Shape `(n,)`.
            places: Of the columns.
            columns: The values. Shapes `(n, *row shape)`.
            replaces: Whether they are other rows, all columns of which are given.
        """
        size = sum(column.nbytes for column in columns)
        most = min(tuning.REPLACED_ROWS_BYTES, tuning.REPLACE_RECORD_BYTES)
        if replaces and self._engine.geometry.slots is not None and 2 * size <= most:
            self._keep(ids, places, columns, size)
        else:
            self.settle()
            if self._engine.is_behind:
                self._engine.checkpoint()  # else a power cut could bring the change without its row
            with self._engine.health.noting:
                self._change_in_place(ids, places, columns, replaces=replaces)
        self._engine.background.note()

    def settle(self) -> None:
        """Have the columns hold all rows that replace others."""
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
            engine.shared.end_change()  # after a failure it is not known what they hold
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
            engine.checkpoint()  # a power cut must not bring a row in the place of one that it takes away
        elif 2 * waiting > tuning.REPLACED_ROWS_BYTES:
            engine.background.hurry()
        with engine.health.noting:
            self._record_kept(ids, places, columns)

    def _record_kept(self, ids: IntArray, places: Sequence[int], columns: Sequence[Array]) -> None:
        engine = self._engine
        rows, slots = engine.rows, engine.geometry.slot_of(ids)
        body = Redo(ids, list(places), columns, True).pack()
        # No checkpoint comes between the record and the rows, nor after a failure between them.
        with engine.locks.episodes, engine.health.noting:
            sequence = engine.append_record(Kind.REDO, body)
            engine.sync_if_durable()
            rows.memtable.replaced.add(slots, columns, lambda: self._batch_behind(sequence - 1, places))
        with rows.priorities.lock:
            rows.priorities.values[slots] = columns[0]
        rows.priorities.note_changed(slots)
        self._changed.note(slots)

    def _batch_behind(self, lsn: int, places: Sequence[int]) -> RowBatch[Pin]:
        """Return an empty batch of rows whose records come after this one; they are pinned."""
        engine = self._engine
        pin = engine.checkpointer.pin(lsn, engine.rows.journal.sync_files()[-1])
        return RowBatch(engine.geometry.slots or 0, places, pin)
