"""How records and rows get to the disk: append, sync, mark, cut, and what a failed sync leaves.

The part of a storage on disk that counts fsyncs: `expstore.storages.engine.store` appends through it and
opens and closes what it syncs. It never decides what is published, and never reads a row.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import sys
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from expstore.core import tuning
from expstore.disk.files import Disk, File
from expstore.episodes.log import EpisodeLog
from expstore.errors import ExpStoreError, StateError, StorageError
from expstore.schema.row_fields import ROW_BYTES
from expstore.schema.schema import Schema
from expstore.storages.base import Keys
from expstore.storages.engine.background_checkpoints import Keeper
from expstore.storages.engine.shared_state import SharedState
from expstore.storages.folder import FolderStorage, refuse_objects
from expstore.storages.format.journal import Journal, Kind
from expstore.storages.format.manifest import Manifest
from expstore.storages.format.records import Mark
from expstore.storages.format.write_key_file import KeyFile

__all__ = ["SyncedStorage"]

_logger = logging.getLogger("expstore")
_ENDLESS = sys.maxsize


class SyncedStorage(FolderStorage):
    """Append records and bring them to the disk, and the columns with them.

    Threads: as `Storage`; any thread may sync. Crashes: what a mark covers is on the disk. A failed
    fsync poisons the handle: the page cache may call lost bytes clean, so it is never tried again.

    Args:
        path: The store's folder.
        manifest: What its expstore.json says.
        disk: Where files are touched.
        durable: Whether a publish record is on the disk before its rows can be read.
        min_free: So many bytes of the disk are to stay free.
    """

    _journal: Journal
    _log: EpisodeLog
    write_keys: KeyFile
    _keeper: Keeper
    _shared: SharedState
    _pool: ThreadPoolExecutor

    def __init__(self, path: Path, manifest: Manifest, disk: Disk, *, durable: bool, min_free: int) -> None:
        super().__init__(path, manifest, disk)
        self.durable = durable
        self._min_free = min_free
        self._room_id = 0 if min_free else _ENDLESS  # up to this id there was space when last looked
        self._sync_lock = self.lock_order.ranked("sync", threading.Lock())
        self._cutting = self.lock_order.ranked("cut", threading.Lock())
        self._journal_lock = self.lock_order.ranked("journal", threading.Lock())
        self._failure: ExpStoreError | None = None
        self._half: int | None = None  # the last record before a change whose bytes are not all written
        self._half_in: File | None = None  # the segment of that change, if it may be the newest for long
        self._unsure = False
        self._synced = 0
        self._marked: tuple[object, ...] = ()  # what the last mark said, if nothing came after it

    def prepare(self, schema: Schema, keys: Keys, dims: tuple[int, ...] = ()) -> None:
        """Fix the fields, once, when the first rows come; on the disk when this returns."""
        self.check_writable()
        refuse_objects(schema)
        if self._min_free and self.disk.free(self.path) < self._min_free:
            raise self._too_full(1, schema.row_bytes + ROW_BYTES)
        with self.poisoning():
            super().prepare(schema, keys, dims)

    def _note_specs(self, specs: str) -> None:
        self._note_manifest(self.manifest.replace(specs=specs))

    def _note_manifest(self, manifest: Manifest) -> None:
        with self.poisoning():
            manifest.save(self.disk, self.path)
        self.manifest = manifest

    def note_meta(self, meta: dict[str, Any]) -> None:
        """Keep other facts of the user's own; the lock is held."""
        self._note_manifest(self.manifest.replace(meta=meta))

    def _append(self, kind: Kind, *body: bytes) -> int:
        """Append a record, in a new segment if this one is full. The episode lock is held."""
        size = sum(map(len, body))
        if not self._journal.fits(size):
            with self.poisoning():
                self._journal.start_segment(self._base(opening=False), room=size)
            self._keeper.hurry()
        return self._journal.append(kind, *body)

    def archive_left(self) -> None:
        """Bring rows that have left to the archive, if there is one."""

    # -- one act at a time -----------------------------------------------------------------------

    def _settle_record(self) -> None:
        """Bring the journal to the disk up to the record just appended; the episode lock is held.

        It stays held meanwhile, so that no mark covers a record of which memory does not know.
        """
        files, folders = self._journal.unsettled()
        self._sync_journal(files, folders)
        self._journal.settle()

    def _settle_rows(self, collect: Callable[[], tuple[Iterable[File], Iterable[Path]]]) -> None:
        """Bring files and folders with new rows to the disk, before the record that publishes them."""
        with self._sync_lock:  # of two threads that sync a file at once only one is told of a failure
            with self.poisoning():
                self.disk.sync_all(*collect(), self._pool)

    def _sync_journal(self, files: Iterable[File], folders: Iterable[Path]) -> None:
        """Sync segments, one thread at a time: only one would be told of a failure."""
        with self._journal_lock, self.poisoning():
            self.disk.sync_all(files, folders, None)

    # -- sync ------------------------------------------------------------------------------------

    def sync(self) -> None:
        """Bring everything that was published, and priorities and draws, to the disk.

        Raises:
            StorageError: The disk failed; the store must be opened again.
        """
        self._sync(None)

    def set_draws(self, draw: int, progress: Sequence[int]) -> None:
        """Continue with another draw, possibly an earlier one; on the disk when this returns."""
        super().set_draws(draw, progress)
        self.sync()

    def _sync(self, enough: Callable[[], bool] | None) -> None:
        with self._sync_lock:
            if self._closed or (enough is not None and enough()):
                return
            started = time.monotonic()
            with self.poisoning():
                keep = self._sync_now()
            counters = self.counters
            counters.syncs += 1
            counters.synced_at = time.monotonic()
            counters.sync_seconds = counters.synced_at - started
            self._measure()
        if keep is not None and enough is None:  # who only waits for room leaves it to the keeper
            self._cut(keep)

    def _sync_now(self) -> File | None:
        """Run a sync: columns, journal, mark, journal; return where to cut the journal."""
        self.flush_priorities()
        draws, sets = self.draws, self.draws.sets
        randomness = draws.note_randomness()
        with self.episode_lock:
            if self._unsure:
                return None  # the journal may hold rows of which memory does not know
            self.drain()
            self._flush_logs()
            journal = self._journal
            half, half_in = self._half, self._half_in
            mark = Mark(
                sequence=journal.sequence if half is None else half,
                last_id=self.last,
                log_length=self._log.length,
                draw=draws.number,
                progress=draws.progress,
                set_back=sets != draws.sets_kept,
                randomness=randomness,
                limits=draws.limits,
                write_count=self.write_count,
                max_priority=self.max_priority,
            )
            files, folders = self._unsynced_columns()
            files |= self._unsynced_logs()
            segments = journal.sync_files()
            rotated = journal.rotated
        said = (mark.draw, mark.progress, mark.limits, False)
        if not (files or folders or rotated) and self._marked == (mark.sequence, *said[:-1], mark.set_back):
            return None
        try:
            self._sum_columns(mark.sequence)
            self.disk.sync_all(files, folders, self._pool)
        except BaseException:
            self._put_back(files, folders)
            raise
        self._name_columns()
        self._sync_journal(segments, [journal.folder] if rotated else [])
        with self.episode_lock:
            self._append(Kind.MARK, mark.pack())
            sequence = journal.sequence
            after = journal.sync_files()
        # All of them: if the mark began a segment, the one before it must not lose its end.
        self._sync_journal(after, [journal.folder] if len(after) > 1 else [])
        self._note_marked()
        self.write_keys.settle()
        self._synced = mark.last_id
        draws.sets_kept = sets
        self._marked = (sequence, *said) if sequence == mark.sequence + 1 else ()
        return segments[-1] if rotated and (half is None or half_in is segments[-1]) else None

    def _flush_logs(self) -> None:
        """Write what waits for episodes.log, and new idempotency keys."""
        self._log.flush()
        self.write_keys.flush()

    def _unsynced_logs(self) -> set[File]:
        """Return, once, which of both files has bytes that no mark covers."""
        files = self.write_keys.unsynced
        if self._log.dirty:
            files.add(self._log.file)
            self._log.dirty = False
        return files

    def _sync_for_good(self) -> None:
        """Sync, and keep no long journal of what is on the disk then: nobody writes any more."""
        with self.episode_lock:
            if not self._unsure and self._journal.length > tuning.CLOSED_JOURNAL_BYTES:
                with contextlib.suppress(StorageError):  # a full disk: then all of it is kept
                    self._journal.start_segment(self._base(opening=False))
        self.sync()

    def _give_back(self) -> None:
        """Give back disk space that only somebody who goes on writing needs."""
        self._journal.end()

    def _cut(self, keep: File) -> None:
        """Remove the journal's segments before `keep`: all they say is on the disk, and in the index.

        The index is brought up to date without a lock, so that nobody who waits for a sync waits for it, too.
        """
        if not self._cutting.acquire(blocking=False):
            return  # another thread is at it
        try:
            self._cut_now(keep)
        finally:
            self._cutting.release()

    def _cut_now(self, keep: File) -> None:
        try:
            if (catalog := self.catalog) is not None:
                catalog.keep_up()
        except ExpStoreError as exc:
            # The index is derived: one that has missed segments is built anew when it is next asked.
            _logger.warning("the index is behind: %s", exc)
        with self._sync_lock, self.poisoning(), self.episode_lock:
            if not self._closed and keep in self._journal.sync_files()[1:]:
                self._journal.cut(keep)

    # -- space -----------------------------------------------------------------------------------

    def _measure(self) -> None:
        """Look at the free space, and note up to which id rows may be written without another look."""
        if not self._min_free or self.schema is None:
            return
        spare = self.disk.free(self.path) - self._min_free
        newest = self.last + max(0, spare) // (self.schema.row_bytes + ROW_BYTES)
        # From then on rows take the places of older ones.
        self._room_id = (
            _ENDLESS if self.geometry.slots is not None and newest >= self.geometry.slots else newest
        )

    def check_space(self, count: int) -> None:
        """Refuse rows that would leave the disk with less than `min_free_bytes`.

        Raises:
            StorageError: They would; nothing was written.
        """
        if self.last + count > self._room_id:
            self._measure()
            if self.last + count > self._room_id:
                row_bytes = self.require_schema().row_bytes + ROW_BYTES
                raise self._too_full(count, row_bytes)

    def _too_full(self, count: int, row_bytes: int) -> StorageError:
        error = StorageError(
            f"{count} rows take {count * row_bytes} bytes on the disk of {self.path}, where "
            f"{self.disk.free(self.path)} are free and {self._min_free} are to stay so (min_free_bytes)",
            kind="disk_full",
            hint="free space, or open the store with a smaller min_free_bytes",
        )
        error.errno = errno.ENOSPC
        return error

    # -- what a failure leaves -------------------------------------------------------------------

    @contextlib.contextmanager
    def poisoning(self) -> Iterator[None]:
        """Refuse if a sync has failed before; note if one fails now.

        Other failures leave everything as it was: whoever asks again finds the same to do.
        """
        if self._failure is not None:
            raise self._refusal()
        try:
            yield
        except StorageError as exc:
            self.note_failure(exc)
            raise

    def note_failure(self, exc: BaseException | None) -> None:
        """Be poisoned if this is a sync that failed: the page cache may call lost bytes clean now."""
        if isinstance(exc, StorageError) and exc.lost and self._failure is None:
            self._failure = exc

    def _refusal(self) -> StateError:
        return StateError(
            f"{self.path} can no longer be written: {self._failure}",
            kind="poisoned",
            hint="close it and open it again",
        )

    def note_interruption(self) -> None:
        """Note that memory may lag behind the journal, because of what is being raised."""
        self.note_failure(sys.exception())
        self._unsure = True

    # -- what the columns and the journal's owner supply -------------------------------------------

    @abstractmethod
    def _base(self, *, opening: bool) -> dict[str, object]:
        """Return what a base record keeps."""

    @abstractmethod
    def _unsynced_columns(self) -> tuple[set[File], set[Path]]:
        """Return, once, what holds bytes that no mark covers; the episode lock is held."""

    @abstractmethod
    def _put_back(self, files: set[File], folders: set[Path]) -> None:
        """Take back what `_unsynced_columns` returned: it was not synced."""

    @abstractmethod
    def _name_columns(self) -> None:
        """Be told that what `_unsynced_columns` returned is on the disk."""

    @abstractmethod
    def _note_marked(self) -> None:
        """Be told that the mark of this sync is."""

    @abstractmethod
    def _sum_columns(self, sequence: int) -> None:
        """Write checksums of what `_unsynced_columns` returned; `sequence` is that of the mark to come."""

    @abstractmethod
    def flush_priorities(self) -> None:
        """Write priorities that have changed, and rows that were kept back."""

    @abstractmethod
    def drain(self) -> None:
        """Write rows that were kept back to the columns."""
