"""Records and checkpoints: append to the journal, sync what was written, and record what was synced.

Used by the storages that have a journal. The checkpointer decides when an fsync runs and what a checkpoint
record may cover. It does not commit rows and does not read them.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from expstore.core.change_log import Changes
from expstore.core.counters import Counters
from expstore.core.geometry import RingGeometry
from expstore.core.lock_order import LockOrder
from expstore.disk.checkpointed import Checkpoint, Pin
from expstore.disk.files import Disk, File
from expstore.disk.threads import Threads
from expstore.errors import ExpStoreError
from expstore.schema.row_fields import ROW_BYTES
from expstore.storages.engine.health import DiskSpace, Health
from expstore.storages.engine.open_store import OpenStore
from expstore.storages.engine.shared_state import SharedState
from expstore.storages.format.journal import Journal, Kind
from expstore.storages.format.manifest import Manifest
from expstore.storages.format.records import Mark
from expstore.storages.index_protocol import IndexLink
from expstore.storages.read_view import Locks
from expstore.storages.snapshot_access import SnapshotPin

_logger = logging.getLogger("expstore")


class Hurried(Protocol):
    """The background work, which `Keeper` does."""

    def hurry(self) -> None:
        """Run a checkpoint at once."""


class Checkpointable(Protocol):
    """What records and checkpoints use of a store; implemented by `Store`, which creates a `Checkpointer`."""

    #: Locks and counters of the storage, the rows that a snapshot still needs, and the link to the index.
    locks: Locks
    counters: Counters
    snapshot_pin: SnapshotPin
    index: IndexLink
    #: The control page, and the free space of the disk.
    shared: SharedState
    space: DiskSpace
    #: How ids and slots correspond.
    geometry: RingGeometry

    @property
    def background(self) -> Hurried:
        """The background work."""

    @property
    def changes(self) -> Changes:
        """The record of rows that were changed in place."""

    @property
    def manifest(self) -> Manifest:
        """The contents of expstore.json."""

    @property
    def state(self) -> OpenStore:
        """The rows and their files; a recovery replaces the object."""

    @property
    def closed(self) -> bool:
        """Whether the store is closed."""

    @property
    def can_write(self) -> bool:
        """Whether the store is open for writing and has not failed."""

    def write_values(self) -> None:
        """Write priorities and counts that have changed, and rows that the columns lack, to the columns."""

    def drain(self) -> None:
        """Write rows that are only in the journal to the columns."""


class Checkpointer:
    """Append the records of one store, and run its checkpoints.

    Invariants: a checkpoint record with LSN n is written only when the columns, checksums, counts,
    priorities, logs and keys on the disk contain everything in the records up to n. n is never above the
    lowest pin. A failed fsync is never retried (`Health`).

    Threads: any thread may call `run`; one checkpoint runs at a time. Crashes: a process that is killed at
    any point leaves the previous checkpoint or this one.

    Args:
        order: The lock order of the store.
        health: Records failures of the store.
        disk: The disk on which files are accessed.
        durable: Whether each record is synced before the call that appends it returns.
        segment_bytes: Length of a segment of the journal, bytes.
    """

    def __init__(
        self, order: LockOrder, health: Health, disk: Disk, *, durable: bool, segment_bytes: int
    ) -> None:
        self.durable, self.segment_bytes = durable, segment_bytes
        #: Threads that sync files.
        self.pool = Threads()
        #: Held while a checkpoint runs, and by threads that must exclude checkpoints.
        self.lock = order.rank_lock("sync", threading.Lock())
        self._truncating = order.rank_lock("cut", threading.Lock())
        self._journal_lock = order.rank_lock("journal", threading.Lock())
        self._health, self._disk = health, disk
        self._pins: list[Pin] = []
        #: The newest row that a checkpoint covers.
        self.covered = 0
        self._last_said: tuple[object, ...] = ()  # the checkpoint record, if it is the newest record

    # -- pins --------------------------------------------------------------------------------------

    def pin(self, lsn: int, segment: File | None = None) -> Pin:
        """Prevent checkpoints from covering records after `lsn` until the pin is released.

        A change is pinned until the columns have it, a deletion until the blocks that it freed are summed.

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

    def restart(self, state: OpenStore) -> None:
        """Reset after an opening, which has synced everything to the disk."""
        self._pins = []
        self.covered = state.last
        draws = state.draws
        self._last_said = (state.journal.sequence, draws.number, draws.progress, draws.limits, False)

    # -- records -----------------------------------------------------------------------------------

    def append_record(self, store: Checkpointable, kind: Kind, *body: bytes) -> int:
        """Append a record, in a new segment if this one is full; return its LSN.

        The caller holds the lock of the episodes.
        """
        size, journal = sum(map(len, body)), store.state.journal
        if not journal.fits(size):
            with self._health.guard():
                self.start_segment(store, room=size)
            store.background.hurry()
        return journal.append(kind, *body)

    def start_segment(self, store: Checkpointable, room: int = 0) -> None:
        """Start a segment of the journal, with room for a record of this size; the caller holds the lock."""
        self._health.check_in_place()
        state = store.state
        state.journal.start_segment(state.base_record(store.manifest.generation, opening=False), room=room)

    def append_synced(
        self, store: Checkpointable, kind: Kind, body: bytes, *, replaced: int = 0
    ) -> tuple[int, Pin]:
        """Append and sync a record before its change is made in the columns; return its LSN, and a pin.

        The pin prevents checkpoints from covering the record. The caller releases it after the columns have
        changed.

        Args:
            store: The store.
            kind: Kind of the record.
            body: Its body.
            replaced: How many rows it replaces. They count at once: the next segment of the journal begins
                with the count.
        """
        with self.lock:  # truncating the journal would close segments under this sync
            with store.locks.episodes:
                journal = store.state.journal
                pin = self.pin(journal.sequence)
                lsn = self.append_record(store, kind, body)
                if replaced:
                    store.state.note_replaced(replaced)
                files, folders = journal.find_unsettled()
            self.sync_journal(files, folders)
        return lsn, pin

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
                    self._disk.sync_all(files, folders, self.pool)
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
        self._health.check_in_place()
        with self.lock:
            if store.closed or (enough is not None and enough()):
                return
            started = time.monotonic()
            with self._health.guard():
                keep = self._checkpoint(store)
            store.counters.note_sync(started)
            if (schema := store.manifest.schema) is not None:
                store.space.measure(store.state.last, schema.row_bytes + ROW_BYTES, store.geometry)
        if keep is not None and enough is None:
            self._truncate(store, keep)

    def _checkpoint(self, store: Checkpointable) -> File | None:
        """Sync columns, logs and the journal; append a record; return where the journal may be truncated."""
        if store.state.memtable.replaced:
            self._write_replaced(store)
        store.write_values()
        state = store.state
        draws, sets = state.draws, state.draws.sets
        with store.locks.episodes:
            if self._health.needs_recovery:
                return None  # the journal may contain rows that memory does not have
            store.drain()
            parts = state.parts()
            for part in parts:
                part.flush()
            journal, pins = state.journal, list(self._pins)
            lsn = min([pin.lsn for pin in pins], default=journal.sequence)
            checkpoint = self._describe_checkpoint(store, lsn)
            mark = Mark(
                sequence=checkpoint.lsn,
                last_id=checkpoint.last,
                log_length=state.log.length,
                draw=draws.number,
                progress=draws.progress,
                set_back=sets != draws.sets_kept,
                limits=draws.limits,
                write_count=state.write_count,
                max_priority=state.priorities.largest,
                annotated=state.annotated,
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
            self._disk.sync_all(files, folders, self.pool)
        except BaseException:
            with store.locks.episodes:
                for part, found in dirty:
                    part.abort(found)
            raise
        for part in parts:
            part.synced()
        self.sync_journal(segments, [journal.folder] if rotated else [])
        with store.locks.episodes:
            self.append_record(store, Kind.MARK, mark.pack())
            lsn, after = journal.sequence, journal.sync_files()
        # Sync all: if the record started a new segment, the end of the segment before must not be lost.
        self.sync_journal(after, [journal.folder] if len(after) > 1 else [])
        for part in parts:
            part.completed(tidy=not store.snapshot_pin.first)
        self.covered, draws.sets_kept = mark.last_id, sets
        self._last_said = (lsn, *said, False) if lsn == mark.sequence + 1 else ()
        return segments[-1] if rotated and all(pin.segment is segments[-1] for pin in pins) else None

    def _describe_checkpoint(self, store: Checkpointable, lsn: int) -> Checkpoint:
        """Return what a checkpoint taken now covers, up to record `lsn`."""
        state, geometry = store.state, store.geometry
        slots, last = geometry.slots, state.last
        newer = min(last - max(self.covered, state.retired), slots or last)
        runs = geometry.runs(last - newer + 1, newer) if newer > 0 else []
        return Checkpoint(lsn, store.manifest.generation, last, runs, *state.tombstones(slots))

    def _write_replaced(self, store: Checkpointable) -> None:
        """Sync the journal, then write replaced rows to the columns; the checkpointer's lock is held."""
        with store.locks.episodes:
            state, shared = store.state, store.shared
            if self._health.needs_recovery or not shared.owned:
                return
            batch = state.memtable.replaced.begin()
            if batch is None:
                return
            has_all, last_change = not state.memtable.replaced.waiting_bytes, store.changes.seen
            segments, rotated = state.journal.sync_files(), state.journal.rotated
        self.sync_journal(segments, [state.journal.folder] if rotated else [])
        slots, columns = batch.columns()
        shared.begin_change(slots)
        # The first column has the priorities, which may have been set again since.
        with state.priorities.lock:
            values = state.priorities.values[slots]
            touched = state.write_column(batch.places[0], slots, values)
        touched |= state.overwrite(slots, batch.places[1:], columns[1:])
        shared.end_change()
        if has_all:  # not after a failed attempt: newer rows wait for the next one
            shared.note_changed(last_change)
        with store.locks.episodes:
            state.note_touched(touched, slots)
            state.memtable.replaced.end()
            self.release(batch.pin)

    def rest(self, store: Checkpointable) -> bool:
        """Close the descriptors of the columns until they are used again; return whether that is done.

        It is not if something is unsynced, or another thread uses the store.
        """
        # `close` holds the first lock while it waits for this thread; under the others a sync may hang.
        with contextlib.ExitStack() as held:
            for lock in (store.locks.storage, self.lock, store.locks.sampled):
                if not lock.acquire(blocking=False):
                    return False
                held.callback(lock.release)
            state = store.state
            return not store.can_write or (state.last <= self.covered and state.rest())

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
                if (catalog := store.index.catalog) is not None:
                    catalog.keep_up()
            except ExpStoreError as exc:
                # The index is derived data: if it misses segments, it is rebuilt when it is next used.
                _logger.warning("the index is behind: %s", exc)
            with self.lock, self._health.guard(), store.locks.episodes:
                journal = store.state.journal
                if not store.closed and keep in journal.sync_files()[1:]:
                    journal.cut(keep)
        finally:
            self._truncating.release()
