"""The parts of a store that is open for writing, and what they do together: records, checkpoints, the end.

`expstore.storages.engine.store` says in which order rows become readable; the services around it (updates,
fields, deletion, archive, restore) are given an `Engine`, too. It never looks at values, and knows nothing of
buffers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from expstore.core import tuning
from expstore.core.draw_state import DrawState
from expstore.core.values import Array, IntArray
from expstore.disk.checkpointed import Checkpoint, Checkpointed
from expstore.disk.files import Disk
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

if TYPE_CHECKING:
    from expstore.storages.engine.archive_before_evict import Archiver

__all__ = ["Engine"]


class Engine:
    """Hold the parts of a writer, from its first opening to its end.

    Invariants: `rows` is what one opening opened, and is replaced as a whole, while the checkpointer's lock
    is held; `manifest` is what expstore.json says. A checkpoint covers no record that memory does not know:
    the lock of the episodes is held from a record to the change of `rows` that it describes, or a pin keeps
    checkpoints from covering the record.

    Threads: the thread that holds the storage's lock appends and saves; the background thread tends and
    settles at any time. Crashes: every record that was appended survives the process, and the machine after
    the next checkpoint; with `durable` at once.

    Args:
        path: The store's folder.
        disk: Where files are touched.
        manifest: What expstore.json says.
        lock_file: The writer's lock, which is held; it is released if this fails.
        locks: Of the storage.
        snapshot_pin: Which rows a snapshot still needs.
        counters: What `stats` shows.
        index: Who keeps the index.
        durable: Whether each record is synced before the call that appends it returns.
        min_free_bytes: So much of the disk stays free.

    Raises:
        StorageError: The control page could not be opened.
    """

    #: What the newest opening opened; there is nothing before the first.
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
        #: Held by this process, and by no other.
        self.lock_file = lock_file
        #: Threads that sync files.
        self.pool = Threads(8, "expstore-sync")
        try:
            #: The control page STATE.
            self.shared = SharedState(disk, path, lock_file)
        except BaseException:
            lock_file.release()
            self.pool.shutdown()
            raise
        #: What failures have left.
        self.health = Health(path)
        #: The free space of the disk.
        self.space = DiskSpace(disk, path, min_free_bytes)
        #: Brings everything to the disk.
        self.checkpointer = Checkpointer(locks.order, self.health, disk, self.pool)
        #: Runs checkpoints a while after writes.
        self.background = Keeper(self)
        #: Lets one field be added or dropped at a time.
        self.reshaping = Reshaping(locks.order)
        #: Where rows go that leave a ring; None: they are gone.
        self.archive: Archiver | None = None
        self.closed = False
        self.manifest, self.geometry = manifest, manifest.geometry

    # -- what there is -----------------------------------------------------------------------------

    def adopt(self, rows: OpenStore, manifest: Manifest) -> None:
        """Adopt the result of an opening."""
        self.rows = rows
        self._set_manifest(manifest)
        self.checkpointer.restart(rows.journal.sequence, rows.last, rows.draws)

    def save(self, manifest: Manifest) -> None:
        """Write expstore.json.

        Raises:
            StorageError: The disk failed; nothing was changed.
        """
        with self.health.guard():
            manifest.save(self.disk, self.path)
        self._set_manifest(manifest)

    def note_saved(self, manifest: Manifest) -> None:
        """Go on with what expstore.json says by now."""
        self._set_manifest(manifest)

    def _set_manifest(self, manifest: Manifest) -> None:
        self.manifest, self.geometry = manifest, manifest.geometry

    @property
    def schema(self) -> Schema | None:
        """The fields; None: no rows have come yet."""
        return self.manifest.schema

    def require_schema(self) -> Schema:
        """Return the fields.

        Raises:
            StateError: No rows have come yet.
        """
        if self.manifest.schema is None:
            raise StateError("the store has no fields yet", hint="extend() it first")
        return self.manifest.schema

    @property
    def keys(self) -> Keys:
        """Which fields say what a row is to its episode."""
        return self.manifest.find_keys(self.require_schema())

    @property
    def given_up(self) -> int:
        """The newest id that was given up for other reasons than age."""
        return self.rows.retired

    def take(self, slots: IntArray, places: Sequence[int]) -> list[Array]:
        """Copy rows out of the columns, the memtable and the replaced rows.

        Args:
            slots: Which rows. Shape `(n,)`.
            places: Of the columns.

        Returns:
            One array per column. Shapes `(n, *row shape)`.
        """
        rows = self.rows
        if rows.holds_back(slots):
            with contextlib.suppress(StorageError):  # then they come from memory
                self.drain()
        return rows.memtable.take(rows.require_columns(), slots, places)

    def views(self, places: Sequence[int], first_id: int, count: int) -> list[list[Array]]:
        """View columns over a run of ids; see `ReadView.views`."""
        self.drain()
        return self.rows.views(places, first_id, count)

    def use_archive(self, archive: Archiver | None) -> None:
        """Have rows that leave go to an archive from now on; None: they are gone."""
        self.archive = archive

    @property
    def is_sound(self) -> bool:
        """Whether the store can be written to."""
        return not self.closed and self.lock_file.held and self.health.is_sound

    # -- records -----------------------------------------------------------------------------------

    def append_record(self, kind: Kind, *body: bytes) -> int:
        """Append a record, in a new segment if this one is full; return its LSN.

        The lock of the episodes is held.
        """
        size, rows = sum(map(len, body)), self.rows
        if not rows.journal.fits(size):
            with self.health.guard():
                self._start_segment(room=size)
            self.background.hurry()
        return rows.journal.append(kind, *body)

    def sync_if_durable(self) -> None:
        """Sync the record that was just appended, if every call does; the lock of the episodes is held."""
        if self.durable:
            self.checkpointer.sync_record(self.rows.journal)

    def append_synced(self, kind: Kind, body: bytes) -> tuple[int, Pin]:
        """Append a record and sync it, before the columns become what it says; return its LSN, and a pin.

        The pin keeps checkpoints from covering the record until it is released: the columns are changed by
        then.
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
        rows = self.rows
        rows.journal.start_segment(rows.base_record(self.manifest.generation, opening=False), room=room)

    # -- checkpoints -------------------------------------------------------------------------------

    def checkpoint(self, enough: Callable[[], bool] | None = None) -> None:
        """Bring everything to the disk that was committed, with priorities and draws.

        Args:
            enough: As of `Checkpointer.run`.

        Raises:
            StorageError: The disk failed; after a failed fsync the store must be opened again.
        """
        self.checkpointer.run(self, enough)

    @property
    def is_behind(self) -> bool:
        """Whether rows have come after the newest checkpoint."""
        return self.rows.last > self.checkpointer.covered

    def write_back(self) -> None:
        """Write to the columns what is in memory: replaced rows, counts, priorities."""
        if self.rows.memtable.replaced:
            self._write_replaced()
        self.write_values()

    def write_values(self) -> None:
        """Write priorities and counts that have changed, and the rows that the columns lack."""
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
        """Write to the columns the rows that the memtable holds.

        Raises:
            StorageError: The disk failed; the journal has the rows.
        """
        try:
            self.rows.drain(self.shared)
        except StorageError as exc:
            self.health.note_failure(exc)  # a new shard of a store that grows is synced at once
            if self.rows.is_append_only:
                self.health.note_interruption()  # how far they have come only the files can say
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
        # The first column is that of priorities, which may have been set since.
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
        """Sum blocks as they are now, and run a checkpoint: a repair has written to them or gives them up."""
        rows = self.rows
        if rows.columns is None or rows.checksums is None:
            return
        ready = rows.columns.ready
        with self.locks.episodes:
            rows.checksums.note_changed(block for block in blocks if (block + 1) * BLOCK_ROWS <= ready)
        self.checkpoint()

    # What the checkpointer asks of a store, in the order in which it does.

    @property
    def journal(self) -> Journal:
        """Where commit records go."""
        return self.rows.journal

    @property
    def draws(self) -> DrawState:
        """The next draw."""
        return self.rows.draws

    @property
    def catalog(self) -> CatalogLike | None:
        """Who keeps the index; None: there is no index."""
        return self._index.catalog

    def parts(self) -> list[Checkpointed]:
        """Return all that a checkpoint brings to the disk."""
        return self.rows.parts()

    def checkpoint_of(self, lsn: int) -> Checkpoint:
        """Return what a checkpoint covers that is taken now."""
        rows, geometry = self.rows, self.geometry
        slots, last = geometry.slots, rows.last
        newer = min(last - max(self.checkpointer.covered, rows.retired), slots or last)
        runs = geometry.runs(last - newer + 1, newer) if newer > 0 else []
        return Checkpoint(lsn, self.manifest.generation, last, runs, *rows.tombstones(slots))

    def log_length(self) -> int:
        """Return how many bytes of episodes.log count."""
        return self.rows.log.length

    def write_totals(self) -> tuple[int, float]:
        """Return how many rows were ever written, and the largest priority."""
        return self.rows.write_count, self.rows.priorities.largest

    def may_tidy(self) -> bool:
        """Return whether files may be removed or replaced: no snapshot is being copied."""
        return not self.snapshot_pin.first

    def measure_space(self) -> None:
        """Look at the free space of the disk."""
        schema = self.manifest.schema
        if schema is not None:
            self.space.measure(self.rows.last, schema.row_bytes + ROW_BYTES, self.geometry)

    # -- the background thread ---------------------------------------------------------------------

    def beat(self) -> None:
        """Show other processes that this one is alive."""
        self.shared.beat()

    def tend(self) -> None:
        """Show that this process is alive, and write what has changed to the page cache."""
        self.shared.beat()
        self.write_values()

    def settle(self) -> None:
        """Run a checkpoint, and bring rows that have left to the archive."""
        self.checkpoint()
        self.archive_left()

    def archive_left(self) -> None:
        """Bring all rows that have left, and that no power cut can undo, to the archive, if there is one."""
        if self.archive is not None:
            self.archive.copy_left()

    # -- the end -------------------------------------------------------------------------------------

    def finish(self) -> int:
        """Run the last checkpoint and append the close record; return its LSN. The storage's lock is held."""
        journal = self.rows.journal
        with self.locks.episodes:
            # No long journal is kept of what is on the disk then.
            if not self.health.needs_recovery and journal.length > tuning.CLOSED_JOURNAL_BYTES:
                with contextlib.suppress(StorageError):  # a full disk: then all of it is kept
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
        """Write and sync on the calling thread alone from now on."""
        self.pool.refuse()
        if self.rows.columns is not None:
            self.rows.columns.do_without_threads()
        if self.archive is not None:
            self.archive.do_without_threads()

    def leave(self, closed: int) -> None:
        """Show other processes that the writer is gone.

        Args:
            closed: LSN of the synced close record; 0: the store was not closed cleanly.
        """
        self.closed = True
        self.shared.leave(closed)

    def close(self) -> None:
        """Close all files, as many as were opened, and let others open the store."""
        self.closed = True
        try:
            if self.archive is not None:
                self.archive.close()
        finally:
            with self.locks.sampled:  # no descriptor may be reused for another file while counts are written
                if "rows" in vars(self):
                    self.rows.close()
                self.shared.close()
            self.lock_file.release()
            with contextlib.suppress(RuntimeError):  # collected by a thread of the pool itself
                self.pool.shutdown()
            if self.archive is not None:
                self.archive.forget()
