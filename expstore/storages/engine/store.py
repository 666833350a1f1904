"""A store on disk: append, change, delete and sync rows.

`Store._append` implements the crash rule. The order of its six steps makes a batch complete or absent after a
kill at any moment, and after a power failure once a checkpoint has run. `expstore.storages.engine.opening`
recovers a store. Values are never inspected here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from expstore.core import tuning
from expstore.core.draw_state import DrawState
from expstore.core.geometry import RingGeometry, round_up
from expstore.core.values import Array, IntArray
from expstore.disk.files import Disk
from expstore.disk.local_path import local_path
from expstore.episodes.log import LogEntry
from expstore.episodes.sessions import End, Resume
from expstore.errors import ExpStoreError, SchemaError, StateError, StorageError
from expstore.schema.field_roles import Keys
from expstore.schema.row_fields import ROW_BYTES, ROW_FIELDS
from expstore.schema.row_traits import RowTraits
from expstore.schema.schema import Schema
from expstore.storages.base import Storage
from expstore.storages.batch import Payload, Rows
from expstore.storages.columns.checksums import Checksums
from expstore.storages.columns.column_set_writer import WritableColumns
from expstore.storages.columns.payload import payload_parts
from expstore.storages.columns.priorities import StoredPriorities
from expstore.storages.columns.sample_counts_column import SampledColumn
from expstore.storages.description import Description
from expstore.storages.engine.alter import StoredFields
from expstore.storages.engine.delete import Deletion
from expstore.storages.engine.engine import Engine
from expstore.storages.engine.open_settings import Settings, enter
from expstore.storages.engine.open_store import OpenStore
from expstore.storages.engine.opening import Opening, explain_full_disk, make_columns
from expstore.storages.engine.process_exit import Departure, register, unregister
from expstore.storages.engine.replace import Updates
from expstore.storages.engine.row_appender import RowAppender
from expstore.storages.engine.store_settings import StoreSettings
from expstore.storages.engine.store_snapshots import StoreSnapshots
from expstore.storages.format.journal import SYNC_SEGMENT_BYTES, Kind
from expstore.storages.format.layout import ColumnLayout, refuse_objects
from expstore.storages.format.manifest import Manifest
from expstore.storages.format.paths import CHECKSUMS, COLUMNS, STATE, index_path
from expstore.storages.format.records import Publish
from expstore.storages.read_view import build_closed_error
from expstore.storages.sessions import end_sessions
from expstore.storages.snapshots.catalog import Version, find_version
from expstore.storages.snapshots.create import dump as make_snapshot

_logger = logging.getLogger("expstore")
#: Bytes of variable-length rows that may be unsynced before `extend` waits for the disk.
UNSYNCED_BYTES = 256 << 20
#: Bytes of flat columns of a ring: they are mapped as a whole, and a process has 128 TiB of addresses.
MOST_BYTES = 64 << 40


class Store(Storage):
    """Store rows in a folder.

    Invariants: a row is never overwritten while it can be read, or while a power failure may bring it back
    (rows in flight and rows that no checkpoint covers fit into the spare slots). A commit record is appended
    only after the payload of its rows is stored where the record says. A checkpoint covers a record only when
    everything in it is synced.

    Crashes: rows that `write` has committed survive the process at once, and a power failure after the next
    checkpoint (about one second later, or `sync`); with `durability="sync"` at once, too. A batch is stored
    completely or not at all. Threads: as `Storage`. Processes: one writer, the next one gets LockedError; a
    forked child cannot write.

    Args:
        path: The store's folder; created if it is missing.
        capacity: Most readable rows; None: as stored, unbounded for a new store.
        settings: All other options; see `expstore.open`. `storage` decides whether rows may have variable
            length.
        disk: The disk on which files are accessed.
        segment_bytes: Length of a journal segment, bytes; None: 4 MiB, or 64 MiB if records contain their
            rows.

    Raises:
        LockedError: Another buffer has the store open.
        StateError: A setting contradicts the store.
        CorruptionError: The store is damaged.
        SchemaError: There is no such layout, codec or option.
    """

    _state: OpenStore
    path: Path
    #: Whether to warn if the store is garbage-collected without having been closed.
    _warns_if_forgotten = True

    def __init__(
        self,
        path: str | Path,
        capacity: int | None = None,
        *,
        settings: Settings,
        disk: Disk | None = None,
        segment_bytes: int | None = None,
    ) -> None:
        disk = disk or Disk()
        path = disk.follow_link(local_path(path))
        self.kind = settings.storage or "zarr"
        self.row_traits = RowTraits(variable=self.kind == "arrow")
        durable = settings.durability == "sync"
        lock_file, manifest = enter(disk, path, capacity, settings, self.kind)
        super().__init__(
            description=Description.of(manifest), disk=disk, path=path, index_path=index_path(path)
        )
        #: The parts of the open store.
        self.engine = Engine(
            path,
            disk,
            manifest,
            lock_file,
            locks=self.locks,
            snapshot_pin=self.snapshot_pin,
            counters=self.counters,
            index=self.index,
            durable=durable,
            min_free_bytes=settings.min_free_bytes,
        )
        self._updates = Updates(self.engine, self.changes)
        self._segment_bytes = segment_bytes or (
            SYNC_SEGMENT_BYTES if durable else tuning.JOURNAL_SEGMENT_BYTES
        )
        try:
            shared = self.engine.shared
            draws = DrawState(order=self.locks.order, sink=shared)
            self._adopt(dataclasses.replace(self._state, draws=draws))
            shared.enter()
            shared.begin_change(None)  # recovery may change rows that other processes are reading
            with explain_full_disk(disk, path, manifest):
                self._open(first=True)
            if manifest.schema is not None and shared.is_new:
                _logger.warning("%s was missing or truncated and is created again", path / STATE)
        except BaseException:
            self._release()
            raise
        self.engine.background.start(self)
        flushes = settings.on_sigterm == "flush"
        register(self, Departure(path, flushes, self._leave, self._depart, self.drain))

    def _open(self, *, first: bool) -> None:
        """Open the files as they are now and switch to them; on failure, the former files stay open."""
        former, engine = self._state, self.engine
        opened = Opening(
            engine.disk,
            engine.path,
            engine.manifest,
            shared=engine.shared,
            order=self.locks.order,
            pool=engine.pool,
            segment_bytes=self._segment_bytes,
            counts=self._counting,
            may_tidy=engine.may_tidy(),
            counted=engine.background.note,
            former=former,
            first=first,
        ).run()
        description = Description.of(opened.manifest)
        with self._note_field_change(description.schema):
            engine.adopt(opened.store, opened.manifest)
            self._adopt(opened.store)
            self._describe(description)
        if opened.first:
            self.counters.recovered = opened.recovered
        else:
            self.priorities.note_largest(former.priorities.largest)  # the journal may not have it yet
        self.epochs.note_content()
        former.close()

    @contextlib.contextmanager
    def _note_field_change(self, schema: Schema | None) -> Iterator[None]:
        """Let concurrent readers know if the positions of fields change."""
        known = self.schema
        moves = known is not None and not (schema is not None and schema.same(known))
        with self.epochs.note_field_change(moves):
            yield
            if moves:
                self.epochs.note_deleted()

    # -- contents ----------------------------------------------------------------------------------

    @property
    def state(self) -> OpenStore:
        """The current state of the rows; a restore or a recovery replaces the object."""
        return self._state

    @property
    def manifest(self) -> Manifest:  # type: ignore[override]
        """The contents of expstore.json."""
        return self.engine.manifest

    @property
    def priorities(self) -> StoredPriorities:
        """The priorities of the rows, by slot."""
        return self._state.priorities

    @property
    def _layout(self) -> ColumnLayout:
        """The layout of the store's columns."""
        return ColumnLayout.of(self.manifest.layout, self.ranking)

    @property
    def fields(self) -> StoredFields:
        """Adds and drops fields."""
        return StoredFields(self, self._take_fields)

    @property
    def retention(self) -> Deletion:
        """Deletes episodes of a growing store."""
        return Deletion(self)

    @property
    def snapshots(self) -> StoreSnapshots:
        """Access to the content for snapshots, which read and replace it."""
        return StoreSnapshots(
            self,
            check=self._check_hooks,
            convert=self._hook_content,
            updates=self._updates,
            reopen=self._reopen,
        )

    # -- extend ------------------------------------------------------------------------------------

    def write(self, rows: Rows) -> None:
        """Append rows: all of them become readable, or none.

        Raises:
            StateError: The store is closed, not open for writing, or has failed.
            StorageError: The disk failed, or would have less than `min_free_bytes`; no row becomes readable.
        """
        engine, ring = self.engine, self.geometry
        self.writer()
        if ring.lanes > 1:
            ring.check_steps(rows.first_id, rows.count)
        if self.row_traits.variable:
            self._make_room_for_variable(rows)
        self._admit(rows)
        try:
            self._append(rows)
        except BaseException:
            engine.health.note_interruption()
            raise
        self.counters.extends += 1

    def _append(self, rows: Rows) -> None:
        """Append rows, for which there is room. This is the crash rule.

        If the process dies before step 4 the rows are lost: an opening stops at the newest commit record, and
        ignores bytes in free slots. (In this case, a batch longer than the spare slots has already evicted
        older rows.) From step 4 on the rows exist; recovery repeats step 5 from the record. After a power
        failure they exist if a checkpoint has run since, or if every call is synced. After an exception the
        next call of `writer` reads the journal again.
        """
        state, engine, ring = self._state, self.engine, self.geometry
        kernels = self.disk.kernels
        if kernels is None:
            self.disk.warm()
        if state.episodes.kernels is not kernels:
            state.episodes.use_kernels(kernels)
        # 1. Release the slots, in memory and for readers in other processes, before they change.
        skipped = self._reserve(rows)
        # 2. Write the payload to the columns; a few rows stay in the memtable and in their record.
        payload = state.put(rows, skipped, ring, engine.shared)
        # 3. If every call is synced, sync the payload before its record.
        if engine.durable and payload.in_columns:
            payload = self._make_durable(rows, skipped, payload)
        record = self._commit_record(rows, skipped, payload).parts()
        with self.locks.episodes:
            try:
                # 4. Append the commit record.
                sequence = engine.append_record(Kind.PUBLISH, *record)
                if engine.durable:
                    engine.checkpointer.sync_record(state.journal)
                # 5. Update episodes, window and key: readers in this process see the rows.
                state.commit_rows(rows, ring.capacity, (engine.manifest.generation, sequence))
            except BaseException:
                # Before the lock is released: no checkpoint may cover a record that memory lacks.
                engine.health.note_interruption()
                raise
        # 6. Update the control page: other processes see the rows; rows in the memtable after it is drained.
        engine.shared.publish(rows.last_id, sequence, drained=payload.in_columns)
        engine.background.note()
        if rows.count > ring.spare:
            self.sync()  # the batch has overwritten durable rows

    def _make_durable(self, rows: Rows, skipped: int, payload: Payload) -> Payload:
        """Put the rows into their record, or sync them if they are many."""
        state, spare = self._state, self.geometry.spare
        columns, numbers = state.require_columns(), rows.assignment.numbers
        if (
            not skipped
            and rows.count <= spare
            and columns.bytes_of(rows.columns, rows.count) <= tuning.INLINE_BATCH_BYTES
        ):
            return Payload(payload.crc, b"".join(payload_parts(columns, rows.columns, numbers)))
        runs = self.geometry.runs(rows.first_id + skipped, rows.count - skipped)
        self.engine.checkpointer.sync_rows(
            lambda: (columns.find_unsynced_files(runs), state.take_new_folders()), columns.put_back
        )
        columns.note_rows_synced()
        return payload

    def _commit_record(self, rows: Rows, skipped: int, payload: Payload) -> Publish:
        return Publish(
            first_id=rows.first_id,
            count=rows.count,
            skipped=skipped,
            draw=self._state.draws.number,
            time=rows.time,
            checksum=payload.crc,
            priority=self._state.priorities.largest,
            segments=rows.assignment.segments,
            sources=rows.assignment.sources,
            payload=payload.inline,
            info=rows.info,
            column_set=self.engine.manifest.column_set,
            key=rows.key,
        )

    def _admit(self, rows: Rows) -> None:
        """Wait until rows may be written: a snapshot then has the rows to be overwritten.

        Raises:
            StorageError: The disk is too full, or failed; nothing was written.
        """
        if self.snapshot_pin.first and self.geometry.slots is not None:
            self.snapshot_pin.wait(rows.last_id - self.geometry.slots)
        self._make_room(rows.count)
        if rows.key is not None:
            self._make_room_for_key()

    def _make_room(self, count: int) -> None:
        """Wait until rows in flight, and rows that no checkpoint covers, fit into the spare slots.

        A batch longer than the spare slots evicts the rows that it overwrites.
        """
        engine, ring = self.engine, self.geometry
        last = self._state.window.last
        if last + count > engine.space.last_id:
            self._check_space(count)
        if count > ring.spare:
            self.sync()
            if ring.depth is not None:
                through = min(last, last + count - ring.depth)
                if through > self._state.window.low:
                    self._retire(through)
        else:
            free = ring.spare - (last - engine.checkpointer.covered)
            if 2 * (free - count) < ring.spare:
                engine.background.hurry()
            if count > free:
                started = time.monotonic()
                engine.checkpoint(lambda: self._has_spare(count))
                self.counters.note_wait(started)

    def _has_spare(self, count: int) -> bool:
        """Return whether `count` rows, and the rows that no checkpoint covers, fit into the spare slots."""
        return self.last + count - self.engine.checkpointer.covered <= self.geometry.spare

    def _check_space(self, count: int) -> None:
        """Raise StorageError for rows that would leave the disk with less than `min_free_bytes`."""
        if self.last + count > self.engine.space.last_id:
            row_bytes = self.require_schema().row_bytes + ROW_BYTES
            self.engine.space.check(self.last, count, row_bytes, self.geometry)

    def _make_room_for_variable(self, rows: Rows) -> None:
        """Wait for the disk, or hurry the background thread, if many variable-length bytes are unsynced."""
        columns, engine = self._state.columns, self.engine
        if columns is None or not columns.variable_places:
            return
        size = columns.variable_bytes(rows.columns)
        engine.space.check_bytes(size, rows.count, -(-size // max(1, rows.count)))
        unsynced = columns.unsynced_bytes + size
        if unsynced > UNSYNCED_BYTES:
            started = time.monotonic()
            self.sync()
            self.counters.note_wait(started)
        elif 2 * unsynced > UNSYNCED_BYTES:
            engine.background.hurry()

    def _make_room_for_key(self) -> None:
        """Make room for one more idempotency key in the file of keys."""
        engine = self.engine
        if not engine.manifest.keyed:
            engine.save(engine.manifest.replace(keyed=True))  # from now on a missing file is damage
        keys = self._state.write_keys
        if 2 * keys.room < keys.spare:
            engine.background.hurry()
        if not keys.room:
            engine.checkpoint(lambda: self._state.write_keys.room > 0)

    def _note_horizon(self, horizon: int) -> None:
        self.engine.shared.reserve(horizon)

    # -- the first rows ------------------------------------------------------------------------------

    def prepare(
        self, schema: Schema, keys: Keys, dims: tuple[int, ...] = (), *, row_class: type | None = None
    ) -> None:
        """Set the fields, once, when the first rows are written; durable when this returns.

        Args:
            schema: The fields.
            keys: The fields that mark trajectories, ends and rewards.
            dims: Sizes of a batch's dims after the first, if they are rows too.
            row_class: The tensorclass of the rows; None: rows are not of a tensorclass.

        Raises:
            SchemaError: The fields do not match the specs, or this storage cannot store one of them.
            StorageError: The disk failed; nothing was changed.
        """
        engine = self.engine
        self.writer()
        refuse_objects(schema)
        engine.space.check_bytes(0, 1, schema.row_bytes + ROW_BYTES)
        with engine.health.guard():
            super().prepare(schema, keys, dims, row_class=row_class)
        self.row_traits = dataclasses.replace(self.row_traits, variable=self.kind == "arrow", undecided=False)

    def geometry_for(self, schema: Schema, ring: RingGeometry) -> RingGeometry:
        """Return a ring whose slots beyond the capacity are whole steps of time and whole chunks.

        Its reach is as far back as packed rows may refer to, plus one chunk, because a reader may find only
        the newer rows of a chunk that is being overwritten.

        Raises:
            SchemaError: A setting of a single field does not fit the field.
        """
        ColumnLayout(**self.manifest.layout).check(schema.fields, ring.capacity)
        ring = super().geometry_for(schema, ring)
        if ring.capacity is None or ring.depth is None:
            return ring
        layout, back = self._layout, self._layout.reach(schema.fields)
        chunk = layout.chunk_rows(schema.fields)
        step = math.lcm(ring.lanes, chunk)
        reach = round_up(back + chunk, step) if back or layout.packs(schema.fields) else 0
        ring = ring.with_slots(round_up(ring.depth, step) - ring.capacity, reach)
        packings = layout.packings(schema.fields, ring.slots, reach)
        flat = [entry for entry, packing in zip(schema.fields, packings, strict=True) if packing is None]
        size = sum(entry.row_bytes for entry in flat) * (ring.slots or 0)
        if size > MOST_BYTES:
            raise SchemaError(
                f"{ring.capacity} rows of this batch's fields take {size} bytes, but a process can map only "
                f"{MOST_BYTES}",
                hint="create the store with a smaller capacity",
            )
        return ring

    def _create(self, schema: Schema, keys: Keys) -> None:
        engine, ring, state = self.engine, self.geometry, self._state
        folder, fields = engine.path / COLUMNS, (*schema.fields, *ROW_FIELDS)
        attributes = {"expstore": {"capacity": ring.capacity, "slots": ring.slots}}
        packings = self._layout.packings(fields, ring.slots, ring.reach)
        WritableColumns.create(self.disk, folder, fields, ring.slots, engine.pool, attributes, packings)
        numbers = {"capacity": ring.capacity, "spare": ring.spare, "reach": ring.reach, "dims": ring.dims}
        kind = "arrow" if self.row_traits.undecided and schema.variable else self.kind
        manifest = engine.manifest.replace(schema=schema, storage=kind, **numbers)
        columns = make_columns(
            self.disk, engine.path, manifest, schema, generation=manifest.generation, packings=packings
        )
        columns.warm()
        if state.checksums is not None:
            state.checksums.close()
        self.disk.unlink(engine.path / CHECKSUMS)  # left over from a failed attempt
        state.replace_checksums(Checksums(self.disk, engine.path / CHECKSUMS, columns))
        manifest.save(self.disk, engine.path)
        engine.note_saved(manifest)
        self.kind = kind
        state.replace_columns(columns)
        engine.shared.note_layout()
        size = 4096 if ring.slots is None else ring.slots
        self.priorities.load(np.full(size, self.priorities.largest, np.float32), dirty=False)

    def _take_fields(self, manifest: Manifest, columns: WritableColumns) -> None:
        """Replace the fields. expstore.json already has them, and the caller holds the lock."""
        description = Description.of(manifest)
        with self.locks.episodes, self._note_field_change(description.schema):
            self.engine.note_saved(manifest)
            self._describe(description)
            self._state.replace_columns(columns)
            self.engine.shared.note_layout()

    def _begin_sampled(self) -> None:
        columns, slots = self._state.columns, self.geometry.slots
        if columns is None:
            return
        last = self.last if slots is None else min(self.last, slots)
        ready = max(columns.ready, last)  # the columns may lack rows that the memtable has
        with self.engine.health.guard():
            SampledColumn.make(self.disk, columns.folder, slots, ready=ready, pool=self.engine.pool)
            counts = SampledColumn(self.disk, columns.folder, slots, changed=self.engine.background.note)
            self._state.count_sampled(counts)

    # -- changing and deleting ---------------------------------------------------------------------

    def _change(
        self, ids: IntArray, places: Sequence[int], columns: Sequence[Array], *, replaces: bool
    ) -> None:
        if self._state.columns is not None:
            self._state.columns.check_changeable(places)
        self.snapshot_pin.wait()
        self._updates.change(ids, places, columns, replaces=replaces)

    def _annotate(self, change: LogEntry | End | Resume) -> None:
        engine, state = self.engine, self._state
        kinds = {LogEntry: Kind.ANNOTATE, End: Kind.END, Resume: Kind.RESUME}
        sequence = engine.append_record(kinds[type(change)], change.pack())
        engine.sync_if_durable()
        state.annotate(change, (engine.manifest.generation, sequence))
        engine.shared.note_record(sequence)
        engine.background.note()

    def _retire(self, through: int) -> None:
        """Remove the rows with ids <= `through` permanently and durably."""
        engine = self.engine
        with self.locks.episodes:
            sequence = engine.append_record(Kind.RETIRE, b'{"through": %d}' % through)
            self.epochs.note_deleted()
            self._state.retire(through)
            self._state.note_content((engine.manifest.generation, sequence))
        engine.shared.retire(self._state.retired)
        self.sync()

    def _forget(self, last: int) -> None:
        engine, state = self.engine, self._state
        self.sync()
        with self.locks.episodes:
            sequence = engine.append_record(Kind.DELETE, b'{"last": %d}' % last)
            self.epochs.note_deleted()
            state.clear(last, (engine.manifest.generation, sequence))
        engine.shared.clear(last)
        self.sync()

    @property
    def settings(self) -> StoreSettings:
        """Settings of the rows: their ranking, their specs, and whether samples are counted."""
        return StoreSettings(self, self._describe, self._count_sampled)

    def row_appender(self, schema: Schema, rows: int = 1) -> RowAppender | None:
        """Return an appender that writes a few rows faster than `write`; see `Storage.row_appender`."""
        return RowAppender(self, schema, rows) if RowAppender.suits(self, schema, rows) else None

    def _note_unsaved(self) -> None:
        """Record that priorities were set, so that a checkpoint follows soon."""
        self.engine.background.note()

    # -- reading -------------------------------------------------------------------------------------

    def take(self, slots: IntArray, places: Sequence[int] | None) -> list[Array]:
        """Copy rows out by slot, whichever rows are in the slots; see `ReadView.take`."""
        state = self._state
        columns = state.columns
        if columns is None:
            raise StateError("the store has no rows yet", hint="extend() it first")
        wanted = range(len(columns.columns) - len(ROW_FIELDS)) if places is None else places
        memtable = state.memtable
        if memtable.span[1] and memtable.holds(columns, slots):
            return self.engine.take(slots, wanted)
        return memtable.replaced.take(columns, slots, wanted)

    def sizes_of(self, ids: IntArray) -> IntArray:
        """Return the bytes of rows in variable-length fields. Shapes `(n,)`."""
        state, slots = self._state, self.geometry.slot_of(ids)
        if state.holds_back(slots):
            try:
                self.drain()
            except StorageError:
                return super().sizes_of(ids)
        return state.sizes_of(slots)

    def views(self, places: Sequence[int], first_id: int, count: int) -> list[list[Array]]:
        """View columns over a run of ids without copying: per field one or two arrays."""
        return self.engine.views(places, first_id, count)

    @property
    def unviewed_places(self) -> frozenset[int]:
        """Fields whose rows are unpacked or assembled when they are read, so that viewing them copies."""
        columns = self._state.columns
        return frozenset() if columns is None else columns.unviewed_places

    def drain(self) -> None:
        """Write rows that are only in the memtable and the journal to the columns."""
        self.engine.drain()

    # -- snapshots and restores ----------------------------------------------------------------------

    def dumps(self, path: str | Path, *, keep: int = 5) -> Version:
        """Make a snapshot of the current content in `path`/vNNNN; see `ReplayBuffer.dumps`.

        Other threads can read and add rows meanwhile. After a crash the snapshot is complete or does not
        exist.

        Args:
            path: A folder for snapshots; created if it is missing.
            keep: How many snapshots remain.

        Raises:
            SnapshotError: The folder has other content, or rows are objects, which snapshots cannot store.
            StateError: The storage is closed.
            StorageError: The disk failed or is full; existing snapshots are unchanged.

        Example:
            >>> storage.dumps("backup")
            >>> MemoryStorage(1000).loads("backup")
        """
        return make_snapshot(self, path, keep=keep)

    def loads(self, path: str | Path, version: int | str | None = None) -> None:
        """Replace the content by that of a snapshot; see `ReplayBuffer.loads`.

        After a crash the storage has its former content or the new one.

        Args:
            path: The folder that was passed to `dumps`.
            version: Number or tag of the snapshot; None: the newest.

        Raises:
            SnapshotError: There is no such snapshot.
            SchemaError: This storage has other fields.
            CorruptionError: The snapshot is damaged.
            StateError: The storage is closed.
        """
        self.snapshots.restore(find_version(self.disk, local_path(path), version))
        self.holders.tell(self)

    def dump(self, path: str | Path, *, keep: int = 5) -> Version:
        """Make a snapshot: an alias of `dumps`."""
        return self.dumps(path, keep=keep)

    def save(self, path: str | Path, *, keep: int = 5) -> Version:
        """Make a snapshot: an alias of `dumps`."""
        return self.dumps(path, keep=keep)

    def load(self, path: str | Path, version: int | str | None = None) -> None:
        """Restore a snapshot: an alias of `loads`."""
        self.loads(path, version)

    def _reopen(self, change: Callable[[], None]) -> None:
        """Open the store again after `change` has put other files in its folder."""
        engine = self.engine
        with engine.checkpointer.lock, self.locks.sampled, engine.health.noting, self._note_changes():
            change()
            with engine.health.guard():
                self._open(first=True)

    @contextlib.contextmanager
    def _note_changes(self, slots: IntArray | None = None) -> Iterator[None]:
        """Tell readers, also in other processes, that rows are being changed in place."""
        with super()._note_changes(slots):
            self.engine.shared.begin_change(slots)
            yield
            self.engine.shared.end_change()  # not after a failure, when the rows' contents are unknown

    # -- opening and closing -------------------------------------------------------------------------

    def sync(self) -> None:
        """Run a checkpoint: sync all committed rows, the priorities and the draws.

        Raises:
            StorageError: The disk failed; after a failed fsync the store must be opened again.
        """
        self.engine.checkpoint()

    def writer(self) -> Self:
        """Return the store itself; after an interruption, read its journal again first.

        Raises:
            StateError: The store is closed, has failed, or belongs to another process.
            StorageError: The disk failed; the next call retries.
        """
        engine = self.engine
        if self._closed:
            raise build_closed_error()
        if not engine.lock_file.held:
            raise StateError(
                f"{self.path} was opened by another process, of which this one is a fork",
                hint="open the store in the process that writes to it",
            )
        health = engine.health
        if health.failure is not None:
            health.check()
        if health.needs_recovery:
            # A sampler that counts samples must not use the counts that were open before.
            with self.lock, engine.checkpointer.lock, self.locks.sampled:
                if engine.health.needs_recovery:
                    with contextlib.suppress(ExpStoreError):
                        engine.write_values()
                    with self._note_changes(), engine.health.guard():
                        self._open(first=False)
                    engine.health.note_recovered()
        return self

    @property
    def can_write(self) -> bool:
        """Whether the store is open for writing and has not failed."""
        return not self._closed and self.engine.is_sound

    def _note_interruption(self) -> None:
        self.engine.health.note_interruption()

    def close(self) -> None:
        """Sync, record a clean close, and release the lock; a second call does nothing."""
        if self._closed:
            return
        closed, engine = 0, self.engine
        with self.lock:
            engine.background.stop()
            try:
                if self.can_write:
                    end_sessions(self, [self.episodes.session])
                    closed = engine.finish()
            finally:
                self._note_closed()
                engine.leave(closed)
                self._release()

    def _release(self) -> None:
        """Close all files that were opened, and release the lock."""
        unregister(self)
        self.engine.close()

    def _leave(self) -> None:
        """Close a store that is still open when the program ends, and update the index."""
        if self._closed or not self.engine.lock_file.held:
            return
        try:
            self.writer()
            end_sessions(self, [self.episodes.session])
            if (catalog := self.index.catalog) is not None:
                catalog.close()
        finally:
            self.close()

    def _depart(self) -> None:
        """Flush what can be flushed before the process dies of a signal; other threads still run."""
        self.sync()

    def __del__(self) -> None:
        opened = "engine" in vars(self) and self.engine.background.running
        if opened and not self._closed and self.engine.lock_file.held:
            # If the store is part of a reference cycle, the threads of its pool have already ended and take
            # no jobs. Also, this thread may be inside `submit` of another pool, where waiting would deadlock.
            self.engine.do_without_threads()
            with contextlib.suppress(ExpStoreError):
                self.close()
            if self._warns_if_forgotten:
                warnings.warn(f"{self.path} was forgotten without close()", ResourceWarning, 2, self)

    # -- facts -----------------------------------------------------------------------------------------

    def more_stats(self) -> dict[str, Any]:
        """Return path, generation, unsynced rows, the state of the disk, and compression ratios."""
        engine, counters, columns = self.engine, self.counters, self._state.columns
        return {
            "path": str(self.path),
            "durability": "sync" if engine.durable else "process",
            "generation": engine.manifest.generation,
            "unsynced_rows": self.last - engine.checkpointer.covered,
            "fsyncs": self.disk.syncs,
            "last_sync_seconds": counters.sync_seconds and round(counters.sync_seconds, 4),
            "last_sync_age": counters.synced_at and round(time.monotonic() - counters.synced_at, 3),
            "free_bytes": self.disk.free(self.path),
            "poisoned": None if engine.health.failure is None else str(engine.health.failure),
            "recovered": counters.recovered,
            "packed": {} if columns is None else columns.compression_ratios(),
        }


def forget_silently(store: Store) -> None:
    """Give no warning if a store is garbage-collected without having been closed: something else drops it."""
    store._warns_if_forgotten = False
