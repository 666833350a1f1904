"""The episodes of a store that another process writes to, told from its journal as it grows.

Used by followers, which need it for SQL and for samplers that look at episodes. It never goes beyond the
rows that can be read, and writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from expstore.core.values import IntArray
from expstore.episodes.log import LogEntry, read_log
from expstore.episodes.table import EpisodeTable
from expstore.errors import CorruptionError
from expstore.storages.folder import FolderStorage
from expstore.storages.format.journal import Kind, Record
from expstore.storages.format.journal_tail import JournalTail
from expstore.storages.format.paths import JOURNAL, LOG
from expstore.storages.format.records import Mark, Publish, Redo
from expstore.storages.recovery.recover import TOLD, Past, read_past, retell, rows_written, tell, verify

__all__ = ["Chronicle"]

#: So many changed episodes that nobody asked for are dropped, to bound memory.
_MANY = 200_000


class Chronicle:
    """Tell what happened up to an id, and go on from there.

    Not locked: the storage calls it under its lock.

    Args:
        storage: Whose journal it is.
        limit: The newest id that can be read.
        rows: Returns episodes and steps of a run of rows: (first id, rows); None if it cannot.

    Raises:
        CorruptionError: The journal is damaged, or was written to while it was read.
        StorageError: A segment was removed while it was read.
    """

    def __init__(
        self, storage: FolderStorage, limit: int, rows: Callable[[int, int], tuple[IntArray, IntArray] | None]
    ) -> None:
        self._disk, self._log_path = storage.disk, storage.path / LOG
        self._tail = JournalTail(storage.disk, storage.path / JOURNAL)
        records = self._tail.records
        if not records:
            raise CorruptionError(f"{storage.path / JOURNAL} has no segment that can be read")
        ready = next((n for n, r in enumerate(records) if n and _last_of(r) > limit), len(records))
        self._waiting = records[ready:]
        past = read_past(records[:ready], storage.manifest.gaps)
        verify(past, lambda publish: True)
        self.generation = int(past.base["generation"])
        self.table = EpisodeTable(generation=self.generation)
        low = past.window_low(storage.capacity)
        self.write_count, entries = retell(past, self.table, low, rows)
        #: Log entries that no mark covers yet, with the record that they belong to.
        self._entries = [(past.sequence, entry) for entry in entries]
        self._take_numbers(past)

    def _take_numbers(self, past: Past) -> None:
        self.last, self.retired, self.max_priority = past.last, past.retired, past.max_priority
        self.content, self.floor = past.content, past.index_floor
        self._log_length = past.log_length

    def go_on(self, limit: int) -> bool:
        """Tell what has happened since, up to id `limit`; say whether it could, else begin anew."""
        new = self._tail.poll()
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
        publish, entries = tell(record, self.table)
        self._entries += [(record.sequence, entry) for entry in entries]
        self.write_count += rows_written(record)
        if publish is not None:
            self.last = publish.last_id
            self.max_priority = max(self.max_priority, publish.priority)
        elif record.kind is Kind.REDO:
            self.max_priority = max(self.max_priority, Redo.replaced(record.body)[1])
        elif record.kind is Kind.RETIRE:
            self.retired = max(self.retired, record.json()["through"])
        elif record.kind is Kind.DELETE:
            self.retired = self.last = record.json()["last"]
        elif record.kind is Kind.MARK:
            mark = Mark.unpack(record.body)
            self._log_length = mark.log_length
            self._entries = [noted for noted in self._entries if noted[0] > mark.sequence]
        if record.kind in TOLD:
            self.content = (self.generation, record.sequence)

    def log_entries(self) -> Iterator[LogEntry]:
        """Return everything that was noted about episodes that ended, in order."""
        yield from read_log(self._disk, self._log_path, self._log_length)
        for _, entry in self._entries:
            yield entry

    def close(self) -> None:
        """Let go of the journal."""
        self._tail.close()


def _last_of(record: Record) -> int:
    """Return the newest id after a record that brings some, else 0."""
    if record.kind is Kind.PUBLISH:
        return Publish.last_of(record.body)
    return int(record.json()["last"]) if record.kind is Kind.DELETE else 0
