"""The parts of a store that is open for writing, and their joint operations: records, checkpoints, closing.

`expstore.storages.engine.store` defines in which order rows become readable; the services around it (updates,
fields, deletion, restore) also get an `Engine`. The engine does not inspect values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

from expstore.core import tuning
from expstore.core.draw_state import DrawState
from expstore.core.values import Array, IntArray
from expstore.disk.checkpointed import Checkpoint, Checkpointed
from expstore.disk.files import Disk, build_deleted_error
from expstore.disk.threads import Threads
from expstore.disk.writer_lock import WriterLock
from expstore.errors import StateError, StorageError
from expstore.schema.field_roles import Keys
from expstore.schema.row_fields import ROW_BYTES
from expstore.schema.schema import Schema
from expstore.storages.columns.checksums import BLOCK_ROWS, blocks_of
from expstore.storages.engine.backfill import Reshaping
from expstore.storages.engine.background_checkpoints import Keeper
from expstore.storages.engine.checkpointer import Checkpointer, Pin
from expstore.storages.engine.disk_space import DiskSpace
from expstore.storages.engine.health import Health
from expstore.storages.engine.open_store import OpenStore
from expstore.storages.engine.shared_state import SharedState
from expstore.storages.format.journal import Journal, Kind
from expstore.storages.format.manifest import Manifest
from expstore.storages.index_protocol import CatalogLike, IndexLink
from expstore.storages.locks import Locks
from expstore.storages.snapshot_pin import SnapshotPin
from expstore.storages.stats import Counters


class Engine:
    """The parts of a writer, from the first opening of its store until it is closed.

    Invariants: `rows` is the result of one opening, and is replaced as a whole, while the checkpointer's lock
    is held; `manifest` is the content of expstore.json. A checkpoint covers only records that memory knows:
    the lock of the episodes is held from a record to the change of `rows` that it describes, or a pin
    prevents checkpoints from covering the record.

    Threads: the thread that holds the storage's lock appends records and saves the manifest; the background
    thread calls `tend` and `checkpoint` at any time. Crashes: every appended record survives the process, and
    a power failure after the next checkpoint; with `durable` at once.

    Args:
        path: The store's folder.
        disk: Access to files.
        manifest: The content of expstore.json.
        lock_file: The writer's lock, which is held; it is released if the constructor fails.
        locks: The locks of the storage.
        snapshot_pin: The rows that a snapshot still needs.
        counters: The counters that `stats` returns.
        index: The link to the SQL index.
        durable: Whether each record is synced before the call that appends it returns.
        min_free_bytes: Bytes of the disk that must stay free.

    Raises:
        StorageError: The control page could not be opened.
    """

    #: The result of the newest opening; not set before the first one.
    rows: OpenStore

    def __init__(
        self,
        path: Path,
        disk: Disk,
        manifest: Manifest,
        lock_file: WriterLock,
        *,
        locks: Locks,
        snapshot_pin: SnapshotPin,
        counters: Counters,
        index: IndexLink,
        durable: bool,
        min_free_bytes: int,
    ) -> None:
        self.path, self.disk, self.locks, self.snapshot_pin, self.counters = (
            path,
            disk,
            locks,
            snapshot_pin,
            counters,
        )
        self.durable, self._index = durable, index
        #: The writer's lock, which only this process holds.
        self.lock_file = lock_file
        #: Threads that sync files.
        self.pool = Threads()
        try:
            #: The control page STATE.
            self.shared = SharedState(disk, path, lock_file)
        except BaseException:
            lock_file.release()
            raise
        #: Records failures of the store.
        self.health = Health(path)
        self._is_cut_off = False  # whether the columns were left in the middle of a write
        #: The free space of the disk.
        self.space = DiskSpace(disk, path, min_free_bytes)
        #: Syncs the parts of the store.
        self.checkpointer = Checkpointer(locks.order, self.health, disk, self.pool)
        #: Runs checkpoints some time after writes.
        self.background = Keeper(self)
        #: Lets one field be added or dropped at a time.
        self.reshaping = Reshaping(locks.order)
        self.closed = False
        self.manifest, self.geometry = manifest, manifest.geometry

    # -- contents --------------------------------------------------------------------------------------

    def adopt(self, rows: OpenStore, manifest: Manifest) -> None:
        """Use the result of an opening from now on."""
        self.rows = rows
        self._set_manifest(manifest)
        self.checkpointer.restart(rows.journal.sequence, rows.last, rows.draws)

    def check_in_place(self) -> None:
        """Check that the store's folder is where it was, before files in it are opened by their paths.

        Raises:
            StorageError: It was deleted or moved, or another folder has its path; later writes are refused.
        """
        if self.lock_file.held and not self.lock_file.is_in_place:
            error = build_deleted_error(self.path)
            self.health.note_failure(error)
            raise error

    def save(self, manifest: Manifest) -> None:
        """Write expstore.json.

        Raises:
            StorageError: The disk failed; nothing was changed.
        """
        self.check_in_place()
        with self.health.guard():
            manifest.save(self.disk, self.path)
        self._set_manifest(manifest)

    def note_saved(self, manifest: Manifest) -> None:
        """Use a manifest that has already been written to expstore.json."""
        self._set_manifest(manifest)

    def _set_manifest(self, manifest: Manifest) -> None:
        self.manifest, self.geometry = manifest, manifest.geometry

    @property
    def schema(self) -> Schema | None:
        """The fields; None: no rows were written yet."""
        return self.manifest.schema

    def require_schema(self) -> Schema:
        """Return the fields.

        Raises:
            StateError: No rows were written yet.
        """
        if self.manifest.schema is None:
            raise StateError("the store has no fields yet", hint="extend() it first")
        return self.manifest.schema

    @property
    def keys(self) -> Keys:
        """The fields that mark trajectories, ends and rewards."""
        return self.manifest.find_keys(self.require_schema())

    def take(self, slots: IntArray, places: Sequence[int]) -> list[Array]:
        """Copy rows out of the columns, the memtable and the replaced rows.

        Args:
            slots: The slots of the rows. Shape `(n,)`.
            places: Positions of the columns.

        Returns:
            One array per column. Shapes `(n, *row shape)`.
        """
        rows = self.rows
        if rows.holds_back(slots):
            with contextlib.suppress(StorageError):  # if it fails, the rows are read from memory
                self.drain()
        return rows.memtable.take(rows.require_columns(), slots, places)

    def views(self, places: Sequence[int], first_id: int, count: int) -> list[list[Array]]:
        """View columns over a run of ids; see `ReadView.views`."""
        self.drain()
        return self.rows.views(places, first_id, count)

    @property
    def is_sound(self) -> bool:
        """Whether the store can be written to."""
        return not self.closed and self.lock_file.held and self.health.is_sound

    # -- records -----------------------------------------------------------------------------------

    def append_record(self, kind: Kind, *body: bytes) -> int:
        """Append a record, in a new segment if this one is full; return its LSN.

        The caller holds the lock of the episodes.
        """
        size, rows = sum(map(len, body)), self.rows
        if not rows.journal.fits(size):
            with self.health.guard():
                self._start_segment(room=size)
            self.background.hurry()
        return rows.journal.append(kind, *body)

    def sync_if_durable(self) -> None:
        """Sync the last record if `durable` is set; the caller holds the lock of the episodes."""
        if self.durable:
            self.checkpointer.sync_record(self.rows.journal)

    def append_synced(self, kind: Kind, body: bytes) -> tuple[int, Pin]:
        """Append and sync a record before its change is made in the columns; return its LSN, and a pin.

        The pin prevents checkpoints from covering the record. The caller releases it after the columns have
        changed.
        """
        with self.checkpointer.lock:  # truncating the journal would close segments under this sync
            with self.locks.episodes:
                journal = self.rows.journal
                pin = self.checkpointer.pin(journal.sequence)
                lsn = self.append_record(kind, body)
                files, folders = journal.find_unsettled()
            self.checkpointer.sync_journal(files, folders)
        return lsn, pin

    def _start_segment(self, room: int = 0) -> None:
        self.check_in_place()
        rows = self.rows
        rows.journal.start_segment(rows.base_record(self.manifest.generation, opening=False), room=room)

    # -- checkpoints -------------------------------------------------------------------------------

    def checkpoint(self, enough: Callable[[], bool] | None = None) -> None:
        """Sync everything that was committed, with priorities and draws.

        Args:
            enough: Returns whether another thread has freed enough space meanwhile; see `Checkpointer.run`.

        Raises:
            StorageError: The disk failed; after a failed fsync the store must be opened again.
        """
        self.check_in_place()
        self.checkpointer.run(self, enough)

    @property
    def is_behind(self) -> bool:
        """Whether rows were appended after the newest checkpoint."""
        return self.rows.last > self.checkpointer.covered

    def write_back(self) -> None:
        """Write changes in memory to the columns: replaced rows, counts, priorities."""
        if self.rows.memtable.replaced:
            self._write_replaced()
        self.write_values()

    def write_values(self) -> None:
        """Write priorities and counts that have changed, and rows that the columns lack, to the columns."""
        rows = self.rows
        if rows.columns is None:
            return
        self.drain()
        if rows.sampled is not None and rows.sampled.owes:
            with self.locks.sampled:
                rows.sampled.settle()
        touched = rows.priorities.write(rows.columns.row_fields[-1])
        if touched:
            with self.locks.episodes:
                rows.columns.touched |= touched

    def drain(self) -> None:
        """Write the rows in the memtable to the columns.

        Raises:
            StorageError: The disk failed, or an earlier attempt was interrupted and the columns may have some
                of the rows already; the journal has all of them, and the next write recovers them.
        """
        if self.health.needs_recovery and self._is_cut_off:
            raise StorageError(
                f"rows of {self.path} are not in the columns, as an earlier attempt was interrupted",
                hint="extend() or flush() recovers them",
            )
        try:
            self.rows.drain(self.shared)
        except BaseException as exc:
            self.health.note_failure(exc)  # a new shard of an unbounded store is synced at once
            if self.rows.is_append_only:
                self.health.note_interruption()  # only the files show how many rows were written
                # After a failure of the disk, they can be written again; not if a statement was skipped.
                self._is_cut_off = not isinstance(exc, StorageError)
            raise

    def _write_replaced(self) -> None:
        """Sync the journal, then write replaced rows to the columns; the checkpointer's lock is held."""
        with self.locks.episodes:
            rows = self.rows
            if self.health.needs_recovery or not self.lock_file.held:
                return
            batch = rows.memtable.replaced.begin()
            if batch is None:
                return
            segments, rotated = rows.journal.sync_files(), rows.journal.rotated
        self.checkpointer.sync_journal(segments, [rows.journal.folder] if rotated else [])
        slots, columns = batch.columns()
        self.shared.begin_change(slots)
        # The first column has the priorities, which may have been set again since.
        with rows.priorities.lock:
            values = rows.priorities.values[slots]
            touched = rows.write_column(batch.places[0], slots, values)
        touched |= rows.overwrite(slots, batch.places[1:], columns[1:])
        self.shared.end_change()
        with self.locks.episodes:
            rows.note_touched(touched, slots)
            rows.memtable.replaced.end()
            self.checkpointer.release(batch.pin)

    def block_sums(self) -> Array | None:
        """Return an entry of checksums per block, for a snapshot; None: there are no fields yet.

        Entries of blocks that have changed since the newest checkpoint are zeros.
        """
        rows = self.rows
        if rows.checksums is None:
            return None
        with self.checkpointer.lock, self.locks.episodes:
            entries, covered = rows.checksums.entries(), self.checkpointer.covered
            newer = rows.last - covered
            runs = self.geometry.runs(covered + 1, newer) if newer else []
            changed = rows.checksums.changed | blocks_of(runs)
            entries[[block for block in changed if block < entries.size]] = 0
        return entries

    def sum_again(self, blocks: set[int]) -> None:
        """Sum blocks again, which a repair has written to or gives up, and run a checkpoint."""
        rows = self.rows
        if rows.columns is None or rows.checksums is None:
            return
        ready = rows.columns.ready
        with self.locks.episodes:
            rows.checksums.note_changed(block for block in blocks if (block + 1) * BLOCK_ROWS <= ready)
        self.checkpoint()

    # The interface `Checkpointable`, in the order of its use.

    @property
    def journal(self) -> Journal:
        """The journal, to which commit records are appended."""
        return self.rows.journal

    @property
    def draws(self) -> DrawState:
        """The state of the draws."""
        return self.rows.draws

    @property
    def catalog(self) -> CatalogLike | None:
        """The index; None: there is no index."""
        return self._index.catalog

    def parts(self) -> list[Checkpointed]:
        """Return all parts that a checkpoint syncs."""
        return self.rows.parts()

    def checkpoint_of(self, lsn: int) -> Checkpoint:
        """Return what a checkpoint taken now covers."""
        rows, geometry = self.rows, self.geometry
        slots, last = geometry.slots, rows.last
        newer = min(last - max(self.checkpointer.covered, rows.retired), slots or last)
        runs = geometry.runs(last - newer + 1, newer) if newer > 0 else []
        return Checkpoint(lsn, self.manifest.generation, last, runs, *rows.tombstones(slots))

    def log_length(self) -> int:
        """Return the valid length of episodes.log, bytes."""
        return self.rows.log.length

    def write_totals(self) -> tuple[int, float]:
        """Return how many rows were ever written, and the largest priority."""
        return self.rows.write_count, self.rows.priorities.largest

    def may_tidy(self) -> bool:
        """Return whether files may be removed or replaced: no snapshot is being copied."""
        return not self.snapshot_pin.first

    def measure_space(self) -> None:
        """Measure the free space of the disk."""
        schema = self.manifest.schema
        if schema is not None:
            self.space.measure(self.rows.last, schema.row_bytes + ROW_BYTES, self.geometry)

    # -- the background thread ---------------------------------------------------------------------

    def beat(self) -> None:
        """Write a heartbeat for other processes."""
        self.shared.beat()

    def rest(self) -> bool:
        """Write a heartbeat, and close the descriptors of the columns until they are used again.

        Returns:
            Whether that is done, not if something is unsynced or another thread uses the store.
        """
        self.shared.beat()
        # `close` holds the first lock while it waits for this thread; under the others a sync may hang.
        locks = (self.locks.storage, self.checkpointer.lock, self.locks.sampled)
        with contextlib.ExitStack() as held:
            for lock in locks:
                if not lock.acquire(blocking=False):
                    return False
                held.callback(lock.release)
            return not self.is_sound or (not self.is_behind and self.rows.rest())

    def tend(self) -> None:
        """Write a heartbeat, and write changed values to the page cache."""
        self.check_in_place()
        self.shared.beat()
        self.write_values()

    # -- closing ---------------------------------------------------------------------------------------

    def finish(self) -> int:
        """Run the last checkpoint and append the close record; return its LSN. The storage's lock is held."""
        journal = self.rows.journal
        with self.locks.episodes:
            # Do not keep a long journal of changes that will all be synced.
            if not self.health.needs_recovery and journal.length > tuning.CLOSED_JOURNAL_BYTES:
                with contextlib.suppress(StorageError):  # on a full disk, the journal is kept
                    self._start_segment()
        self.checkpoint()
        with self.locks.episodes:
            sequence = self.append_record(Kind.CLOSE, b"{}")
            journal.end()
            if self.rows.columns is not None:
                self.rows.columns.give_back()
        self.checkpointer.sync_journal(journal.sync_files(), [])
        return sequence

    def do_without_threads(self) -> None:
        """Write and sync only on the calling thread from now on."""
        self.pool.refuse()
        if self.rows.columns is not None:
            self.rows.columns.do_without_threads()

    def leave(self, closed: int) -> None:
        """Show other processes that the writer has stopped.

        Args:
            closed: LSN of the synced close record; 0: the store was not closed cleanly.
        """
        self.closed = True
        self.shared.leave(closed)

    def close(self) -> None:
        """Close all files that were opened, and release the writer's lock."""
        self.closed = True
        with self.locks.sampled:  # no descriptor may be reused for another file while counts are written
            if "rows" in vars(self):
                self.rows.close()
            self.shared.close()
        self.lock_file.release()
