"""Append a few rows of one stream in a fraction of the time that a batch takes.

A service of the store, for recorders and `add`. A `RowAppender` has the steps of `Store._append_rows` for the
one case that covers most steps of an environment. All other cases are left to `Store.write`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from expstore.core import tuning
from expstore.core.values import Array, cut_run
from expstore.episodes.segmentation import NO_REWARD, Run
from expstore.episodes.table import Segment
from expstore.schema.row_fields import ROW_BYTES
from expstore.schema.schema import Schema
from expstore.storages.batch import now_us
from expstore.storages.description import Description
from expstore.storages.engine.open_store import OpenStore
from expstore.storages.format.records import LONGEST_COMPRESSED, RowRecord

if TYPE_CHECKING:
    from expstore.storages.engine.store import Store, Write


class RowAppender:
    """Append a fixed number of rows at a time, from sources that have written before.

    The rows are written in place into their commit record (`fields`), so that they are copied only once.

    Invariant: if `append` returns 0, nothing has changed.

    Threads: one at a time uses it; it takes the locks that `Store.write` is called under. Crashes: as
    `Store.write`.

    Args:
        store: The store.
        schema: The fields of the rows.
        rows: How many rows a call of `append` appends.
        append: Appends rows, for which there is room, by the crash rule.
    """

    def __init__(
        self, store: Store, schema: Schema, rows: int = 1, *, append: Callable[[Write], None]
    ) -> None:
        self._append = append
        self._store, self._schema, self._rows = store, schema, rows
        size = schema.row_bytes + ROW_BYTES
        compress = rows == 1 and tuning.MEMTABLE_BATCH_BYTES < size <= LONGEST_COMPRESSED
        self._record = RowRecord(sum(entry.row_bytes for entry in schema.fields), rows, compress=compress)
        #: The rows, field by field in the schema's order. Shape `(bytes,)`, uint8.
        self.fields: Array = np.frombuffer(self._record.fields, np.uint8)
        # The description for which `_adopt` set the attributes after it; the store may have another by now.
        self._description: Description | None = None
        self._sources: dict[str | None, int] = {}
        self._flags, self._column_set = 0, 0
        # The rows of the current call.
        #: The id of the last row.
        self.last_id = 0
        self._time, self._priority, self._payload = 0, 0.0, b""
        self._segments: Sequence[Segment] = ()

    @staticmethod
    def suits(store: Store, schema: Schema, rows: int) -> bool:
        """Return whether rows can be appended in this way.

        They cannot if fields mark that a row starts an episode or is masked, if episodes have groups, if
        several rows have trajectory ids or are too long for the memtable, if each call is synced, or if the
        best rows are kept.
        """
        keys = store.keys
        roles = keys.terminated, keys.truncated, keys.done, keys.reward, keys.trajectory
        named = [key for key in roles if key is not None]
        return (
            store.schema is schema
            and not schema.variable
            and not schema.annotated
            and all(schema[key].row_items == 1 and schema[key].dtype != "bfloat16" for key in named)
            and keys.start is keys.mask is keys.group is None
            and (keys.trajectory is None or rows == 1)
            and not store.checkpoints.durable
            and store.geometry.lanes == 1
            and store.ranking is None
            and rows <= tuning.MEMTABLE_BATCH_ROWS
            and (rows == 1 or rows * (schema.row_bytes + ROW_BYTES) <= tuning.MEMTABLE_BATCH_BYTES)
        )

    def append(self, source: str | None, runs: Sequence[Run]) -> int:
        """Append the rows in `fields`; return the id of the first row, or 0 if they were not appended.

        Args:
            source: Name of the stream, in the session of the store; None: its unnamed stream.
            runs: The rows' episodes and steps, with rewards in the precision of their field; see
                `EpisodeTable.assign_runs`.

        Raises:
            StateError: The store is closed, not open for writing, or poisoned.
            StorageError: The disk failed; no row becomes readable.
        """
        store = self._store
        with store.locks.extend, store.lock:
            store.writer()
            state, rows = store.state, self._rows
            # Content that is read again comes with a new description.
            if store.description is not self._description and not self._adopt():
                return 0
            number = self._sources.get(source) or self._find_source(state, source)
            window = state.stored
            first_id = window.last + 1
            last_id = first_id + rows - 1
            table, spare = state.episodes, store.geometry.spare
            segments = table.assign_runs(number, runs, self._flags, window.low) if number else None
            unsynced = last_id - store.checkpoints.covered
            if (
                segments is None
                or store.snapshot_pin.first
                or state.sampled is not None
                or state.priorities.within
                or table.heirs
                or last_id > store.space.last_id
                or unsynced > spare
                or not state.journal.fits(self._record.largest_size)
            ):
                return 0
            if 2 * unsynced > spare:
                store.background.hurry()
            self.last_id, self._segments, self._time = last_id, segments, now_us()
            self._priority = state.priorities.largest
            self._payload = self._record.fill(
                column_set=self._column_set,
                draw=state.draws.number,
                time=self._time,
                priority=self._priority,
                first_id=first_id,
                segments=segments,
            )
            self._append(self)
            store.counters.extends += 1
        return first_id

    # The steps of `Store._append_rows`; see `Write`.

    def put(self, state: OpenStore) -> bool:
        """Add the rows to the memtable."""
        rows, slots, memtable = self._rows, self._store.geometry.slots, state.memtable
        first_id = self.last_id - rows + 1
        state.horizon = self.last_id
        if memtable.full:
            self._store.drain()
        state.priorities.start(cut_run(first_id, rows, slots), slots, self._priority)
        memtable.add(first_id, rows, self._payload)
        return False

    def append_record(self, state: OpenStore) -> int:
        """Append the commit record; return its LSN."""
        return self._record.append_to(state.journal)

    def commit(self, state: OpenStore, position: tuple[int, int]) -> None:
        """Make the rows readable."""
        rows, last_id = self._rows, self.last_id
        entries = state.episodes.commit(
            self._segments, (), first_id=last_id - rows + 1, time=self._time, sequence=position[1]
        )
        if entries:
            state.log.append(entries)
        state.commit(last_id, rows, self._store.geometry.capacity, position)

    def _adopt(self) -> bool:
        """Adapt to a store that was opened again, or whose content was replaced; return whether rows fit."""
        store = self._store
        if not self.suits(store, self._schema, self._rows):
            return False
        self._sources = {}
        self._flags = NO_REWARD if store.keys.reward is None else 0
        self._column_set = store.manifest.column_set
        self._description = store.description
        return True

    def _find_source(self, state: OpenStore, source: str | None) -> int:
        """Return the number of a source without lanes; 0 if there is no source yet, or more than one."""
        table = state.episodes
        if source is None:
            numbers = table.find_unnamed_sources(table.session)
        else:
            numbers = table.sources_named(source, session=table.session)
        if len(numbers) != 1:
            return 0
        self._sources[source] = numbers[0]
        return numbers[0]
