"""The episodes of a store that another process writes to, read from its journal as it grows.

Used by followers, for SQL and for samplers that need episodes. It reads only up to the newest readable row,
and writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from expstore.core.values import IntArray
from expstore.episodes.log import read_bytes
from expstore.episodes.table import EpisodeTable
from expstore.errors import CorruptionError
from expstore.storages.format.journal import Kind, Record
from expstore.storages.format.journal_tail import JournalTail
from expstore.storages.format.paths import JOURNAL, LOG
from expstore.storages.format.records import Mark, Publish
from expstore.storages.recovery.cold_reader import StoreFolder
from expstore.storages.recovery.log_state import apply_to_episodes
from expstore.storages.recovery.recover import read_past, rebuild_episodes, verify

#: More changed episodes than this, which no query has read, are dropped to bound memory.
_MANY = 200_000


class LiveTail:
    """The episodes of the rows up to a readable id; `go_on` follows the writer.

    Threads: the storage calls it under its lock.

    Args:
        storage: The storage that follows the store.
        limit: The newest id that can be read.
        rows: Returns episodes and steps of a run of rows: (first id, rows); None if they cannot be read.

    Raises:
        CorruptionError: The journal is damaged, or was written to while it was read.
        StorageError: A segment was removed while it was read.
    """

    def __init__(
        self, storage: StoreFolder, limit: int, rows: Callable[[int, int], tuple[IntArray, IntArray] | None]
    ) -> None:
        self._disk, self._log_path = storage.disk, storage.path / LOG
        self._journal = JournalTail(storage.disk, storage.path / JOURNAL)
        records = self._journal.records
        if not records:
            raise CorruptionError(f"{storage.path / JOURNAL} has no segment that can be read")
        ready = next((n for n, r in enumerate(records) if n and _last_of(r) > limit), len(records))
        self._waiting = records[ready:]
        past = read_past(records[:ready], storage.manifest.deleted)
        verify(past, lambda publish: True)
        #: The state that the records describe so far.
        self.state = past.state
        #: The episodes of the rows that they commit.
        self.table = EpisodeTable(generation=self.state.generation)
        entries = rebuild_episodes(past, self.table, self.state.find_low(storage.capacity), rows)
        #: Log entries that no checkpoint covers yet, with the records that they belong to.
        self._entries = [(self.state.sequence, entry) for entry in entries]
        self._log_length = past.log_length

    def go_on(self, limit: int) -> bool:
        """Follow the writer up to id `limit`; return False if another tail must be created instead."""
        new = self._journal.poll()
        if new is None or self.table.waiting > _MANY:
            self.close()
            return False
        self._waiting += new
        done = 0
        for record in self._waiting:
            if _last_of(record) > limit:
                break
            self._apply(record)
            done += 1
        del self._waiting[:done]
        return True

    def _apply(self, record: Record) -> None:
        publish = Publish.unpack(record.body) if record.kind is Kind.PUBLISH else None
        entries = apply_to_episodes(record, self.table, publish)
        self._entries += [(record.sequence, entry) for entry in entries]
        self.state.apply(record, publish)
        if record.kind is Kind.MARK:
            mark = Mark.unpack(record.body)
            self._log_length = mark.log_length
            self._entries = [noted for noted in self._entries if noted[0] > mark.sequence]

    def log_bytes(self) -> bytes:
        """Return the bytes of all entries of ended episodes in order, in the format of episodes.log."""
        done = read_bytes(self._disk, self._log_path, self._log_length)
        return done + b"".join([entry.pack() for _, entry in self._entries])

    def close(self) -> None:
        """Close the journal."""
        self._journal.close()


def _last_of(record: Record) -> int:
    """Return the newest id after a record that adds rows, otherwise 0."""
    if record.kind is Kind.PUBLISH:
        return Publish.last_of(record.body)
    return int(record.json()["last"]) if record.kind is Kind.DELETE else 0
