"""A storage whose rows are published by a journal: open, publish, sync, change, close.

The acts of the crash rule (ARCHITECTURE.md) in their order, for any kind of columns; `expstore.storages.zarr`
supplies these. Opening's judgement of the past is in `expstore.storages.recovery.recover`. It never looks at
values.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
import warnings
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from expstore.core import tuning
from expstore.core.draw_state import DrawState
from expstore.core.retention_policy import Retain
from expstore.core.values import Array, IntArray, Ranking
from expstore.disk.checkpointed import Checkpoint, Checkpointed
from expstore.disk.files import Disk
from expstore.disk.local_path import local_path
from expstore.episodes.log import EpisodeLog, LogEntry
from expstore.episodes.sessions import End, Resume
from expstore.errors import ExpStoreError, StateError, StorageError
from expstore.schema.row_fields import ROW_BYTES
from expstore.schema.schema import Schema
from expstore.storages.base import Keys, Rows
from expstore.storages.batch import Payload
from expstore.storages.columns.checksums import Checksums
from expstore.storages.columns.column_set_writer import WritableColumns
from expstore.storages.columns.priorities import StoredPriorities
from expstore.storages.columns.sample_counts_column import SampledColumn
from expstore.storages.engine.checkpointer import Pin
from expstore.storages.engine.open_settings import Settings, enter
from expstore.storages.engine.open_store import OpenStore
from expstore.storages.engine.opening import Opened, Opening, explain_full_disk
from expstore.storages.engine.parts import EngineParts
from expstore.storages.engine.process_exit import register, unregister
from expstore.storages.folder import FolderStorage, refuse_objects
from expstore.storages.format.journal import (
    SYNC_SEGMENT_BYTES,
    Journal,
    Kind,
)
from expstore.storages.format.layout import LayoutName, ask_layout
from expstore.storages.format.manifest import Manifest
from expstore.storages.format.paths import REDO, STATE, index_path
from expstore.storages.format.records import Publish, Redo, shelve_body
from expstore.storages.format.write_key_file import KeyFile
from expstore.storages.sessions import end_sessions
from expstore.storages.snapshots.restore import ContentLike, read_content
from expstore.storages.snapshots.snapshot_methods import VersionedStorage

__all__ = ["JournaledStorage"]

_logger = logging.getLogger("expstore")


class JournaledStorage(FolderStorage, VersionedStorage):
    """Publish rows in a journal.

    Crashes: what `write` published survives the process at once, and the machine after the next `sync`.
    A batch is there whole or not at all. Threads: as `Storage`. Processes: one writer, the next one gets
    LockedError; a forked child cannot write.

    Args:
        path: The store's folder; made if it is missing.
        capacity: Most readable rows; None: as stored, unbounded for a new store.
        settings: Everything else; see `expstore.open`.
        ndim: How many dims of a batch are rows; None: as stored, 1 for a new store.
        layout: As of `expstore.open`; None: as stored, "flat" for a new store.
        fields: As of `expstore.open`.
        retain: As of `expstore.open`.
        share_next: As of `expstore.open`; None: as stored, True for a new store.
        disk: Where files are touched.
        segment_bytes: Length of a journal segment; None: 4 MiB, or 64 MiB where records carry their rows.
    """

    _state: OpenStore

    def __init__(
        self,
        path: str | Path,
        capacity: int | None = None,
        *,
        settings: Settings | None = None,
        ndim: int | None = None,
        layout: LayoutName | None = None,
        fields: Mapping[str, Mapping[str, Any]] | None = None,
        retain: Retain | Mapping[str, Any] | None = None,
        share_next: bool | None = None,
        disk: Disk | None = None,
        segment_bytes: int | None = None,
    ) -> None:
        disk, settings = disk or Disk(), (settings or Settings()).with_leaving(retain)
        path = disk.follow_link(local_path(path))
        asked: dict[str, Any] = {"ndim": ndim, "layout": ask_layout(layout, fields, share_next)}
        settings = dataclasses.replace(settings, **{name: v for name, v in asked.items() if v is not None})
        durable = settings.durability == "sync"
        self._segment_bytes = segment_bytes or (
            SYNC_SEGMENT_BYTES if durable else tuning.JOURNAL_SEGMENT_BYTES
        )
        lock_file, manifest = enter(disk, path, capacity, settings, self.kind)
        super().__init__(path, manifest, disk)
        self.durable = durable
        self.engine = EngineParts.of(self, lock_file, min_free_bytes=settings.min_free_bytes)
        self.index_path = index_path(self.path)
        self.asked_archive, self.archive_segment_bytes = settings.archive, segment_bytes
        self._begin()
        try:
            shared = self.engine.shared
            self.draws = DrawState(order=self.lock_order, sink=shared)
            shared.enter()
            shared.begin_change(None)  # recovery may change rows that others are reading
            with explain_full_disk(disk, path, manifest):
                self._open(first=True)
            if manifest.schema is not None and shared.is_new:
                _logger.warning("%s was missing or cut off and is made anew", self.path / STATE)
        except BaseException:
            self._let_go()
            raise
        self.flush_on_sigterm = settings.on_sigterm == "flush"
        self.engine.background.start()
        register(self)

    # -- opening ---------------------------------------------------------------------------------

    def _open(self, *, first: bool) -> None:
        """Open what is on the disk now, and take it over; if that fails, what was open stays so."""
        former = self._state
        opened = Opening(
            self.disk,
            self.path,
            self.manifest,
            shared=self.engine.shared,
            order=self.lock_order,
            pool=self.engine.pool,
            segment_bytes=self._segment_bytes,
            counts=self._counting,
            may_tidy=self.may_tidy(),
            former=former,
            draws=self.draws,
            first=first,
        ).run()
        try:
            self._check_opened(opened)
        except BaseException:
            opened.store.close()
            raise
        schema = opened.manifest.schema
        with self._other_fields(schema):
            self._state, self.draws = opened.store, opened.draws
            self.take_manifest(opened.manifest)
        if opened.first:
            self.counters.recovered = opened.recovered
        else:
            self.priorities.note_largest(former.priorities.largest)  # the journal may not have it yet
        self.upheavals += 1
        self.takeovers += 1
        self.engine.checkpointer.restart(self.journal.sequence, self.last, self.draws)
        former.close()

    def _check_opened(self, opened: Opened) -> None:
        """Raise an error if the store cannot go on with what an opening has found."""

    @contextlib.contextmanager
    def _other_fields(self, schema: Schema | None) -> Iterator[None]:
        """Have these fields; let who reads meanwhile know if their places are others than before."""
        moves = schema is not None and self.schema is not None and not schema.same(self.schema)
        with self.moving_places(moves):
            yield
            if schema is not None:
                self.schema, self.keys = schema, self.resolve_keys(schema)
            self.upheavals += moves

    @property
    def columns(self) -> WritableColumns | None:
        """The columns of the rows; None: there are no fields yet."""
        return self._state.columns

    @property
    def checksums(self) -> Checksums | None:
        """The checksums of blocks of the columns; None: there are no fields yet."""
        return self._state.checksums

    @property
    def sampled(self) -> SampledColumn | None:
        """How often each row was handed out; None: it is not counted."""
        return self._state.sampled

    @property
    def priorities(self) -> StoredPriorities:
        """The priorities of the rows, by slot."""
        return self._state.priorities

    @property
    def write_keys(self) -> KeyFile:
        """Under which idempotency keys rows were written."""
        return self._state.write_keys

    @property
    def journal(self) -> Journal:
        """Where commit records go."""
        return self._state.journal

    @property
    def _log(self) -> EpisodeLog:
        return self._state.log

    def beat(self) -> None:
        """Show other processes that this one is alive."""
        self.engine.shared.beat()

    def _note_horizon(self, horizon: int) -> None:
        self.engine.shared.reserve(horizon)

    def _note_change(self, slots: IntArray | None) -> None:
        self.engine.shared.begin_change(slots)

    def _note_changed(self) -> None:
        self.engine.shared.end_change()

    # -- extend ----------------------------------------------------------------------------------

    def prepare(self, schema: Schema, keys: Keys, dims: tuple[int, ...] = ()) -> None:
        """Fix the fields, once, when the first rows come; on the disk when this returns."""
        self.check_writable()
        refuse_objects(schema)
        self.engine.space.check_bytes(0, 1, schema.row_bytes + ROW_BYTES)
        with self.engine.health.guarding():
            super().prepare(schema, keys, dims)

    def _base(self) -> dict[str, Any]:
        """Return what the next segment of the journal begins with."""
        return self._state.base_record(self.draws, self.manifest.generation, opening=False)

    def append_record(self, kind: Kind, *body: bytes) -> int:
        """Append a record, in a new segment if this one is full; return its LSN.

        The lock of the episodes is held.
        """
        size, journal = sum(map(len, body)), self._state.journal
        if not journal.fits(size):
            with self.engine.health.guarding():
                journal.start_segment(self._base(), room=size)
            self.engine.background.hurry()
        return journal.append(kind, *body)

    def check_space(self, count: int) -> None:
        """Refuse rows that would leave the disk with less than `min_free_bytes`.

        Raises:
            StorageError: They would; nothing was written.
        """
        if not self.engine.space.has_room(self.last + count):
            row_bytes = self.require_schema().row_bytes + ROW_BYTES
            self.engine.space.check(self.last, count, row_bytes, self.geometry)

    def _expect_key(self, rows: Rows) -> None:
        """Have room for the key of rows in the file of keys."""
        if rows.key is None:
            return
        if not self.manifest.keyed:
            self._note_manifest(self.manifest.replace(keyed=True))  # from now on a lost file is damage
        keys = self.write_keys
        if 2 * keys.room < keys.spare:
            self.engine.background.hurry()
        if not keys.room:
            self.engine.checkpointer.run(self, lambda: self.write_keys.room > 0)

    def _has_spare(self, count: int) -> bool:
        """Return whether so many rows fit into the spare slots beside the rows that no checkpoint covers."""
        return self.last + count - self.engine.checkpointer.covered <= self.geometry.spare

    def _make_room(self, count: int) -> None:
        """Wait until rows in flight and rows not yet synced fit into the spare slots."""
        last = self._state.window.last
        if not self.engine.space.has_room(last + count):
            self.check_space(count)
        if count > self.geometry.spare:
            self.sync()
            if self.geometry.depth is not None:
                through = min(last, last + count - self.geometry.depth)
                if through > self._state.window.low:
                    self.retire(through)
            return
        free = self.geometry.spare - (last - self.engine.checkpointer.covered)
        if 2 * (free - count) < self.geometry.spare:
            self.engine.background.hurry()
        if count > free:
            started = time.monotonic()
            self.engine.checkpointer.run(self, lambda: self._has_spare(count))
            self.counters.waits += 1
            self.counters.wait_seconds += time.monotonic() - started

    def _publish(self, rows: Rows, skipped: int, payload: Payload) -> None:
        assignment, state = rows.assignment, self._state
        last = rows.first_id + rows.count - 1
        publish = Publish(
            first_id=rows.first_id,
            count=rows.count,
            skipped=skipped,
            draw=self.draws.number,
            time=rows.time,
            checksum=payload.crc,
            priority=state.priorities.largest,
            segments=assignment.segments,
            sources=assignment.sources,
            payload=payload.inline,
            info=rows.info,
            column_set=self.manifest.column_set,
            key=rows.key,
        )
        body = publish.parts()
        with self.episode_lock:
            try:
                sequence = self.append_record(Kind.PUBLISH, *body)
                if self.durable:
                    self.engine.checkpointer.sync_record(state.journal)
                entries = state.episodes.commit(
                    assignment.segments,
                    assignment.sources,
                    first_id=rows.first_id,
                    time=rows.time,
                    sequence=sequence,
                    info=rows.info,
                )
                state.log.append(entries)
                state.commit(last, rows.count, self.geometry.capacity, (self.manifest.generation, sequence))
                if rows.key is not None:
                    self._note_key(rows)
            except BaseException:
                self.note_interruption()  # before the lock goes: no mark may cover what memory lacks
                raise
        self.engine.shared.publish(last, sequence, drained=payload.in_columns)
        self.engine.background.note()
        if rows.count > self.geometry.spare:
            self.sync()  # it has cost rows that were on the disk

    def _note_content(self, sequence: int) -> None:
        """Keep the LSN of a record that says something of rows."""
        self._state.note_content((self.manifest.generation, sequence))

    def _annotate(self, entry: LogEntry) -> None:
        sequence = self.append_record(Kind.ANNOTATE, entry.pack())
        if self.durable:
            self.engine.checkpointer.sync_record(self.journal)
        self._log.append(self.episodes.annotate(entry, sequence))
        self._note_content(sequence)
        self.engine.shared.note_record(sequence)
        self.engine.background.note()

    def _record_episodes(self, change: End | Resume) -> None:
        kind = Kind.END if isinstance(change, End) else Kind.RESUME
        sequence = self.append_record(kind, change.pack())
        if self.durable:
            self.engine.checkpointer.sync_record(self.journal)
        self._log.append(self.episodes.apply(change, sequence))
        self._note_content(sequence)
        self.engine.shared.note_record(sequence)
        self.engine.background.note()

    # -- change, retire, forget ------------------------------------------------------------------

    def _record_change(
        self, ids: IntArray, places: Sequence[int], columns: Sequence[Array], *, replaces: bool
    ) -> Pin:
        """Append an update record and sync it, before the columns are changed; pin it until they are."""
        if self.last > self.engine.checkpointer.covered:
            self.sync()  # else a power cut could bring the change without the row it changes
        redo = Redo(ids, list(places), columns, replaces)
        number = self.journal.sequence + 1
        body = shelve_body(self.disk, self.path / REDO, number, redo.pack(), settle=self.sync)
        with self.engine.checkpointer.lock:  # truncating the journal would close segments under this sync
            with self.episode_lock:
                pin = self.engine.checkpointer.pin(self.journal.sequence)
                self.append_record(Kind.REDO, body)
                files, folders = self.journal.unsettled()
            self.engine.checkpointer.sync_journal(files, folders)
        return pin

    def retire(self, through: int) -> None:
        """Give up the rows with ids <= `through`, for good; on the disk when this returns."""
        with self.episode_lock:
            sequence = self.append_record(Kind.RETIRE, b'{"through": %d}' % through)
            super().retire(through)
            self._note_content(sequence)
        self.engine.shared.retire(self.retired)
        self.sync()

    def _forget(self, last: int) -> None:
        self.sync()
        with self.episode_lock:
            sequence = self.append_record(Kind.DELETE, b'{"last": %d}' % last)
            self._log.append(self.episodes.end_episodes(sequence))
            super()._forget(last)
            self._note_content(sequence)
        self.engine.shared.clear(last)
        self.sync()

    def _note_ranking(self, ranking: Ranking | None) -> None:
        self._note_manifest(self.manifest.replace(ranking=ranking))

    # -- checkpoints -----------------------------------------------------------------------------

    def sync(self) -> None:
        """Bring everything that was published, and priorities and draws, to the disk.

        Raises:
            StorageError: The disk failed; after a failed fsync the store must be opened again.
        """
        self.engine.checkpointer.run(self)

    def set_draws(self, draw: int, progress: Sequence[int]) -> None:
        """Continue with another draw, possibly an earlier one; on the disk when this returns."""
        super().set_draws(draw, progress)
        self.sync()

    def parts(self) -> list[Checkpointed]:
        """Return all that a checkpoint brings to the disk."""
        parts = [part for part in (self.columns, self.checksums, self.sampled) if part is not None]
        return [*parts, self._log, self.write_keys]

    def write_back(self) -> None:
        """Write to the columns what waits in memory: replaced rows, counts, priorities."""
        self.flush_priorities()

    def checkpoint_of(self, lsn: int) -> Checkpoint:
        """Return what a checkpoint covers that is taken now."""
        slots = self.geometry.slots
        newer = min(self.last - max(self.engine.checkpointer.covered, self.retired), slots or self.last)
        runs = self.geometry.runs(self.last - newer + 1, newer) if newer > 0 else []
        return Checkpoint(lsn, self.manifest.generation, self.last, runs, *self._state.tombstones(slots))

    def log_length(self) -> int:
        """Return how many bytes of episodes.log count."""
        return self._log.length

    def write_totals(self) -> tuple[int, float]:
        """Return how many rows were ever written, and the largest priority."""
        return self.write_count, self.priorities.largest

    def may_tidy(self) -> bool:
        """Return whether files may be removed or replaced: no snapshot is being copied."""
        return not self.hold.first

    def measure_space(self) -> None:
        """Look at the free space of the disk."""
        if self.schema is not None:
            self.engine.space.measure(self.last, self.schema.row_bytes + ROW_BYTES, self.geometry)

    def _checkpoint_for_good(self) -> None:
        """Run a checkpoint, and keep no long journal of what is on the disk then: the writer leaves."""
        with self.episode_lock:
            if not self.engine.health.needs_recovery and self.journal.length > tuning.CLOSED_JOURNAL_BYTES:
                with contextlib.suppress(StorageError):  # a full disk: then all of it is kept
                    self.journal.start_segment(self._base())
        self.sync()

    def note_interruption(self) -> None:
        """Note that memory may lag behind the journal, because of the exception that is being raised."""
        self.engine.health.note_interruption()

    # -- facts -----------------------------------------------------------------------------------

    def _note_specs(self, specs: str) -> None:
        self._note_manifest(self.manifest.replace(specs=specs))

    def _note_manifest(self, manifest: Manifest) -> None:
        with self.engine.health.guarding():
            manifest.save(self.disk, self.path)
        self.manifest = manifest

    def note_meta(self, meta: dict[str, Any]) -> None:
        """Keep other facts of the user's own; the lock is held."""
        self._note_manifest(self.manifest.replace(meta=meta))

    def archive_left(self) -> None:
        """Bring rows that have left to the archive, if there is one."""

    def log_entries(self) -> Iterator[LogEntry]:
        """Return every entry of episodes.log in order."""
        return self._log.read()

    def log_bytes(self) -> bytes:
        """Return all of episodes.log."""
        with self.episode_lock:
            self._log.flush()
            file, length = self._log.file, self._log.length
        return file.read(0, length)

    @property
    def can_write(self) -> bool:
        """Whether the storage is open for writing and sound."""
        return not self._closed and self.engine.lock_file.held and self.engine.health.is_sound

    def more_stats(self) -> dict[str, Any]:
        """Return path, generation, what waits for the disk, and how that is."""
        counters = self.counters
        return {
            "path": str(self.path),
            "durability": "sync" if self.durable else "process",
            "generation": self.manifest.generation,
            "unsynced_rows": self.last - self.engine.checkpointer.covered,
            "fsyncs": self.disk.syncs,
            "last_sync_seconds": counters.sync_seconds and round(counters.sync_seconds, 4),
            "last_sync_age": counters.synced_at and round(time.monotonic() - counters.synced_at, 3),
            "free_bytes": self.disk.free(self.path),
            "poisoned": None if self.engine.health.failure is None else str(self.engine.health.failure),
            "recovered": self.counters.recovered,
        }

    # -- life ------------------------------------------------------------------------------------

    def check_writable(self) -> None:
        """Raise StateError unless rows can be written; after an interruption read the journal again."""
        super().check_writable()
        if not self.engine.lock_file.held:
            raise StateError(
                f"{self.path} was opened by another process, of which this one is a fork",
                hint="open the store in the process that writes to it",
            )
        health = self.engine.health
        if health.failure is not None:
            health.check()
        if health.needs_recovery:
            # Who counts what they hand out must not go on with the counts that were open.
            with self.lock, self.engine.checkpointer.lock, self.sampled_lock:
                if self.engine.health.needs_recovery:
                    with contextlib.suppress(ExpStoreError):
                        self.flush_priorities()
                    with self.changing(), self.engine.health.guarding():
                        self._open(first=False)
                    self.engine.health.needs_recovery = False

    def close(self) -> None:
        """Sync, note that all is well, and let others open the store."""
        if self._closed:
            return
        closed = 0
        with self.lock:
            self.engine.background.stop()
            try:
                if self.can_write:
                    end_sessions(self, [self.episodes.session])
                    self._checkpoint_for_good()
                    with self.episode_lock:
                        sequence = self.append_record(Kind.CLOSE, b"{}")
                        self.journal.end()
                        if self.columns is not None:
                            self.columns.give_back()
                    self.engine.checkpointer.sync_journal(self.journal.sync_files(), [])
                    closed = sequence
            finally:
                self._closed = True
                self.engine.shared.leave(closed)
                self._let_go()

    def leave(self) -> None:
        """Close a store that was not closed, and bring the index up to date."""
        if self._closed or not self.engine.lock_file.held:
            return
        try:
            self.check_writable()
            end_sessions(self, [self.episodes.session])
            if (catalog := self.catalog) is not None:
                catalog.close()
        finally:
            self.close()

    def depart(self) -> None:
        """Do what can be done before the process dies of a signal, while other threads go on."""
        self.sync()

    #: Whether to warn if it is garbage without having been closed.
    warns_if_forgotten = True

    def __del__(self) -> None:
        opened = "engine" in vars(self) and self.engine.background.running
        if opened and not self._closed and self.engine.lock_file.held:
            # In a cycle the threads of the pool have been told already that it is gone: they take no jobs.
            # And this thread may be inside `submit` of another pool, where it would wait for itself.
            self._do_without_threads()
            with contextlib.suppress(ExpStoreError):
                self.close()
            if self.warns_if_forgotten:
                warnings.warn(f"{self.path} was forgotten without close()", ResourceWarning, 2, self)

    def _do_without_threads(self) -> None:
        """Write and sync on the calling thread alone from now on."""
        self.engine.pool.refuse()
        if self.columns is not None:
            self.columns.do_without_threads()

    def _let_go(self) -> None:
        """Close all files, as many as were opened, and let others write."""
        unregister(self)
        with self.sampled_lock:  # no descriptor may be reused for another file while counts are written
            self._state.close()
            self.engine.shared.close()
        self.engine.lock_file.release()
        with contextlib.suppress(RuntimeError):  # forgotten, and collected by a thread of the pool itself
            self.engine.pool.shutdown()

    def load_version(self, folder: Path) -> None:
        """Put the content of the version in a folder in the place of what there is.

        Crashes: the store has its former content until the new one is complete, and that one then.
        """
        self.load_content(read_content(self.disk, folder))

    def load_content(self, content: ContentLike) -> None:
        """Put a content from elsewhere in the place of what there is, as `load_version` does."""
        self._take_content(content)

    # -- what the columns supply -----------------------------------------------------------------

    @abstractmethod
    def flush_priorities(self) -> None:
        """Write priorities that have changed, and rows that were kept back."""

    @abstractmethod
    def _take_content(self, content: ContentLike) -> None:
        """Put a content in the place of what there is."""

    @abstractmethod
    def _begin(self) -> None:
        """Set up what belongs to columns, before anything is opened."""
