"""Append single rows of one stream in a fraction of the time that a batch takes.

A service of the store, for recorders. The acts of `RowAppender.append`, and their order, are those of
`Store._append`, which says what a kill between any two of them leaves; here they are made for the one case
that most steps of an environment are. All other cases are left to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from expstore.core.values import Array
from expstore.episodes.table import NO_REWARD, Segment
from expstore.schema.schema import Schema
from expstore.storages.batch import now_us
from expstore.storages.description import Description
from expstore.storages.engine.open_store import OpenStore
from expstore.storages.format.records import RowRecord

if TYPE_CHECKING:
    from expstore.storages.engine.store import Store

__all__ = ["RowAppender"]


class RowAppender:
    """Append rows one by one, each of which continues the open episode of its stream.

    The row lies in its commit record while its fields are written (`fields`), so that it is copied once.

    Invariant: a row that `append` does not take leaves nothing behind.

    Threads: one at a time uses it; it takes the locks that `Store.write` is called under. Crashes: as
    `Store.write`.

    Args:
        store: Where rows go.
        source: Name of the stream, in the session of the store; None: its unnamed stream.
        schema: The fields of the rows.

    Raises:
        StateError: The store cannot be written to.
    """

    def __init__(self, store: Store, source: str | None, schema: Schema) -> None:
        self._store, self._source, self._schema = store, source, schema
        self._record = RowRecord(sum(entry.row_bytes for entry in schema.fields))
        #: The fields of the next row, one behind another in the schema's order. Shape `(bytes,)`, uint8.
        self.fields: Array = np.frombuffer(self._record.fields, np.uint8)
        # Of these two `_find_source` has found what follows; others may be there by now.
        self._state: OpenStore | None = None
        self._description: Description | None = None
        self._number, self._flags, self._column_set = 0, 0, 0

    @staticmethod
    def suits(store: Store, schema: Schema) -> bool:
        """Return whether single rows can be appended by so few acts.

        Not where the fields say more of a row than its reward and end, where each call is synced, where rows
        go to an archive, and where the best rows stay.
        """
        keys, engine = store.keys, store.engine
        roles = {
            ("next", "terminated"): keys.terminated,
            ("next", "truncated"): keys.truncated,
            ("next", "done"): keys.done or ("next", "done"),
            ("next", "reward"): keys.reward or ("next", "reward"),
        }
        named = [key for key in (keys.terminated, keys.truncated, keys.done, keys.reward) if key is not None]
        return (
            store.schema is schema
            and not schema.variable
            and all(key == found for key, found in roles.items())
            and all(schema[key].row_items == 1 and schema[key].dtype != "bfloat16" for key in named)
            and keys.trajectory is keys.start is keys.mask is None
            and not engine.durable
            and engine.archive is None
            and store.geometry.lanes == 1
            and store.ranking is None
        )

    def append(self, reward: float, status: int) -> bool:
        """Append the row in `fields`; return whether it was taken: otherwise nothing was done.

        Args:
            reward: Of the row, in the precision of its field; 0.0 where rows have none.
            status: How the row leaves its episode: open, terminated or truncated.

        Raises:
            StateError: The store is closed, not open for writing, or poisoned.
            StorageError: The disk failed; nothing is published.
        """
        store = self._store
        with store.locks.extend, store.lock:
            store.writer()
            engine, state = store.engine, store.state
            known = state is self._state and store.description is self._description
            if not (known or self._find_source(state)):
                return False
            first_id = state.window.last + 1
            table, memtable, spare = state.episodes, state.memtable, store.geometry.spare
            episode = table.find_open(self._number)
            if (
                episode is None
                or store.hold.first
                or state.sampled is not None
                or state.priorities.within
                or table.joins.awaiting
                or memtable.full
                or first_id > engine.space.last_id
                or 2 * (first_id - engine.checkpointer.covered) > spare
                or not state.journal.fits(self._record.size)
            ):
                return False
            segment = Segment(
                episode.episode, 0, episode.length, self._number, 0, 1, 1, reward, status, self._flags
            )
            time = now_us()
            payload = self._record.fill(
                column_set=self._column_set,
                draw=state.draws.number,
                time=time,
                priority=state.priorities.largest,
                first_id=first_id,
                segment=segment,
            )
            try:
                state.reserve(first_id)
                engine.shared.reserve(first_id)
                state.priorities.start(store.geometry.runs(first_id, 1), store.geometry.slots)
                memtable.add(first_id, 1, payload)
                with store.locks.episodes:
                    sequence = self._record.append_to(state.journal)
                    entries = table.commit((segment,), (), first_id=first_id, time=time, sequence=sequence)
                    state.log.append(entries)
                    state.commit(first_id, 1, store.geometry.capacity, (engine.manifest.generation, sequence))
            except BaseException:
                engine.health.note_interruption()
                raise
            engine.shared.publish(first_id, sequence, drained=False)
            engine.background.note()
            store.counters.extends += 1
        return True

    def _find_source(self, state: OpenStore) -> bool:
        """Look at a store that was opened again, or is another one now; return whether rows fit."""
        store, table = self._store, state.episodes
        if not self.suits(store, self._schema):
            return False
        if self._source is None:
            numbers = table.unnamed_sources(table.session)
        else:
            numbers = table.sources_named(self._source, session=table.session)
        if len(numbers) != 1:
            return False
        self._number, self._flags = numbers[0], NO_REWARD if store.keys.reward is None else 0
        self._column_set = store.engine.manifest.column_set
        self._state, self._description = state, store.description
        return True
