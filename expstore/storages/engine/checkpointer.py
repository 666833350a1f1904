"""Checkpoints: sync appended rows to the disk, and record in the journal what was synced.

Used by the storages that have a journal. The checkpointer decides when an fsync runs and what a checkpoint
record may cover. It does not commit rows and does not read them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

from expstore.core.draw_state import DrawState
from expstore.core.lock_order import LockOrder
from expstore.disk.checkpointed import Checkpoint, Checkpointed
from expstore.disk.files import Disk, File
from expstore.disk.threads import Threads
from expstore.errors import ExpStoreError
from expstore.storages.engine.health import Health
from expstore.storages.format.journal import Journal, Kind
from expstore.storages.format.records import Mark
from expstore.storages.index_protocol import CatalogLike
from expstore.storages.locks import Locks
from expstore.storages.stats import Counters

_logger = logging.getLogger("expstore")


class Checkpointable(Protocol):
    """The parts of a store that a checkpoint uses."""

    @property
    def closed(self) -> bool:
        """Whether the store is closed."""

    @property
    def journal(self) -> Journal:
        """The journal that this opening of the store writes."""

    @property
    def locks(self) -> Locks:
        """The locks of the storage."""

    @property
    def draws(self) -> DrawState:
        """The state of the draws, which a checkpoint record stores."""

    @property
    def counters(self) -> Counters:
        """The counters that `stats` shows."""

    @property
    def catalog(self) -> CatalogLike | None:
        """The index writer, which must read journal segments before they are removed; None: no index."""

    def parts(self) -> Sequence[Checkpointed]:
        """Return every part that has files to sync."""

    def write_back(self) -> None:
        """Write pending rows to the columns, as far as possible without the lock of the episodes."""

    def drain(self) -> None:
        """Write rows that are only in the journal to the columns."""

    def checkpoint_of(self, lsn: int) -> Checkpoint:
        """Return what a checkpoint taken now covers, up to record `lsn`."""

    def log_length(self) -> int:
        """Return the valid length of episodes.log, bytes."""

    def write_totals(self) -> tuple[int, float]:
        """Return how many rows were ever written, and the largest priority."""

    def append_record(self, kind: Kind, *body: bytes) -> int:
        """Append a record, in a new segment if necessary, and return its LSN."""

    def may_tidy(self) -> bool:
        """Return whether files may be removed or replaced: no snapshot is being copied."""

    def measure_space(self) -> None:
        """Measure the free space of the disk."""


class Pin:
    """A record that checkpoints must not cover yet, because its change is not applied to the columns.

    Args:
        lsn: The number of the last record that a checkpoint may cover.
        segment: The segment of the journal with the pinned record, if the pin may be held for long; then the
            segments before it may be removed meanwhile.
    """

    __slots__ = ("lsn", "segment")

    def __init__(self, lsn: int, segment: File | None = None) -> None:
        self.lsn, self.segment = lsn, segment


class Checkpointer:
    """Run the checkpoints of one store.

    Invariants: a checkpoint record with LSN n is written only when the columns, checksums, counts,
    priorities, logs and keys on the disk contain everything in the records up to n. n is never above the
    lowest pin. A failed fsync is never retried (`Health`).

    Threads: any thread may call `run`; one checkpoint runs at a time. Crashes: a process that is killed at
    any point leaves the previous checkpoint or this one.

    Args:
        order: The lock order of the store.
        health: Records failures of the store.
        disk: The disk on which files are accessed.
        pool: Threads that fsync.
    """

    def __init__(self, order: LockOrder, health: Health, disk: Disk, pool: Threads) -> None:
        #: Held while a checkpoint runs, and by threads that must exclude checkpoints.
        self.lock = order.rank_lock("sync", threading.Lock())
        self._truncating = order.rank_lock("cut", threading.Lock())
        self._journal_lock = order.rank_lock("journal", threading.Lock())
        self._health, self._disk, self._pool = health, disk, pool
        self._pins: list[Pin] = []
        #: The newest row that a checkpoint covers.
        self.covered = 0
        self._last_said: tuple[object, ...] = ()  # the checkpoint record, if it is the newest record

    # -- pins --------------------------------------------------------------------------------------

    def pin(self, lsn: int, segment: File | None = None) -> Pin:
        """Prevent checkpoints from covering records after `lsn` until the pin is released.

        `Updates` pins a change until the columns have it, `Deletion` a record until freed blocks are summed.

        The caller holds the lock of the episodes, and appends the record to be pinned in the same block.
        """
        pin = Pin(lsn, segment)
        self._pins.append(pin)
        return pin

    def release(self, pin: Pin) -> None:
        """Release a pin; a pin that was already released is ignored."""
        if pin in self._pins:
            self._pins.remove(pin)

    @property
    def is_pinned(self) -> bool:
        """Whether a record is not applied to the columns yet."""
        return bool(self._pins)

    def restart(self, journal_lsn: int, last: int, draws: DrawState) -> None:
        """Reset after an opening, which has synced everything to the disk."""
        self._pins = []
        self.covered = last
        self._last_said = (journal_lsn, draws.number, draws.progress, draws.limits, False)

    # -- single syncs --------------------------------------------------------------------------------

    def sync_journal(self, files: Iterable[File], folders: Iterable[Path]) -> None:
        """Sync segments of the journal, one thread at a time: the system reports a failed fsync only once."""
        with self._journal_lock, self._health.guard():
            self._disk.sync_all(files, folders, None)

    def sync_record(self, journal: Journal) -> None:
        """Sync the journal up to the record that was just appended.

        The caller holds the lock of the episodes, so that no checkpoint covers a record that memory does not
        know.
        """
        files, folders = journal.find_unsettled()
        self.sync_journal(files, folders)
        journal.settle()

    def sync_rows(
        self, collect: Callable[[], tuple[set[File], set[Path]]], put_back: Callable[[set[Path]], None]
    ) -> None:
        """Sync files and folders with new rows, before the record that commits them is appended.

        Args:
            collect: Returns the files and folders.
            put_back: Called with the folders if the sync failed.

        Raises:
            StorageError: The disk failed.
        """
        with self.lock:  # if two threads sync a file at once, only one learns of a failure
            with self._health.guard():
                files, folders = collect()
                try:
                    self._disk.sync_all(files, folders, self._pool)
                except BaseException:
                    put_back(folders)
                    raise

    # -- checkpoints -----------------------------------------------------------------------------------

    def run(self, store: Checkpointable, enough: Callable[[], bool] | None = None) -> None:
        """Run a checkpoint.

        Args:
            store: The store whose files are synced.
            enough: Returns whether another thread has freed enough space meanwhile; then nothing is done. A
                caller that passes `enough` leaves truncating the journal to the background thread.

        Raises:
            StorageError: The disk failed; after a failed fsync the store must be opened again.
        """
        with self.lock:
            if store.closed or (enough is not None and enough()):
                return
            started = time.monotonic()
            with self._health.guard():
                keep = self._checkpoint(store)
            store.counters.note_sync(started)
            store.measure_space()
        if keep is not None and enough is None:
            self._truncate(store, keep)

    def _checkpoint(self, store: Checkpointable) -> File | None:
        """Sync columns, logs and the journal; append a record; return where the journal may be truncated."""
        store.write_back()
        draws, sets = store.draws, store.draws.sets
        with store.locks.episodes:
            if self._health.needs_recovery:
                return None  # the journal may contain rows that memory does not have
            store.drain()
            parts = store.parts()
            for part in parts:
                part.flush()
            journal, pins = store.journal, list(self._pins)
            checkpoint = store.checkpoint_of(min([pin.lsn for pin in pins], default=journal.sequence))
            write_count, max_priority = store.write_totals()
            mark = Mark(
                sequence=checkpoint.lsn,
                last_id=checkpoint.last,
                log_length=store.log_length(),
                draw=draws.number,
                progress=draws.progress,
                set_back=sets != draws.sets_kept,
                limits=draws.limits,
                write_count=write_count,
                max_priority=max_priority,
            )
            segments, rotated = journal.sync_files(), journal.rotated
            with self._health.noting:  # if this is interrupted, nobody knows any more what is to be synced
                dirty = [(part, part.begin(checkpoint)) for part in parts]
                files = {file for _, found in dirty for file in found.files}
                folders = {folder for _, found in dirty for folder in found.folders}
        said = (mark.draw, mark.progress, mark.limits)
        if not (files or folders or rotated) and self._last_said == (mark.sequence, *said, mark.set_back):
            return None
        try:
            for part in parts:
                part.prepare(checkpoint)
            self._disk.sync_all(files, folders, self._pool)
        except BaseException:
            with store.locks.episodes:
                for part, found in dirty:
                    part.abort(found)
            raise
        for part in parts:
            part.synced()
        self.sync_journal(segments, [journal.folder] if rotated else [])
        with store.locks.episodes:
            store.append_record(Kind.MARK, mark.pack())
            lsn, after = journal.sequence, journal.sync_files()
        # Sync all: if the record started a new segment, the end of the segment before must not be lost.
        self.sync_journal(after, [journal.folder] if len(after) > 1 else [])
        for part in parts:
            part.completed(tidy=store.may_tidy())
        self.covered, draws.sets_kept = mark.last_id, sets
        self._last_said = (lsn, *said, False) if lsn == mark.sequence + 1 else ()
        return segments[-1] if rotated and all(pin.segment is segments[-1] for pin in pins) else None

    # -- the journal's length ----------------------------------------------------------------------------

    def _truncate(self, store: Checkpointable, keep: File) -> None:
        """Remove the segments before `keep`: everything in them is synced, and in the index.

        The index is updated without holding `lock`, so that threads waiting for a checkpoint do not also wait
        for the index.
        """
        if not self._truncating.acquire(blocking=False):
            return  # another thread does it
        try:
            try:
                if (catalog := store.catalog) is not None:
                    catalog.keep_up()
            except ExpStoreError as exc:
                # The index is derived data: if it misses segments, it is rebuilt when it is next used.
                _logger.warning("the index is behind: %s", exc)
            with self.lock, self._health.guard(), store.locks.episodes:
                if not store.closed and keep in store.journal.sync_files()[1:]:
                    store.journal.cut(keep)
        finally:
            self._truncating.release()
