"""A store on disk: append, change, delete and sync rows.

`Store._append_rows` implements the crash rule. The order of its steps makes a batch or a row complete or
absent after a kill at any moment, and after a power failure once a checkpoint has run.
`expstore.storages.engine.opening` recovers a store. Values are never inspected here.

A store owns its description, expstore.json, the writer's lock, and the objects that sync and watch its files.
What a recovery or a restore replaces is in one `OpenStore` (`Store.state`).
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
from typing import Any, Protocol, Self

import numpy as np

from expstore.core import tuning
from expstore.core.draw_state import DrawState
from expstore.core.geometry import RingGeometry, round_up
from expstore.core.values import Array, IntArray, cut_run
from expstore.disk.checkpointed import Pin
from expstore.disk.files import Disk
from expstore.disk.local_path import local_path
from expstore.disk.program import describe_checkout
from expstore.episodes.log import NewFacts
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
from expstore.storages.columns.memtable import RowBatch
from expstore.storages.columns.payload import payload_parts
from expstore.storages.columns.priorities import StoredPriorities
from expstore.storages.columns.sample_counts_column import SampledColumn
from expstore.storages.description import Description
from expstore.storages.engine.alter import StoredFields, StoreSettings
from expstore.storages.engine.background_checkpoints import Keeper
from expstore.storages.engine.checkpointer import Checkpointer
from expstore.storages.engine.delete import Deletion
from expstore.storages.engine.health import DiskSpace, Health
from expstore.storages.engine.open_settings import Settings, enter
from expstore.storages.engine.open_store import OpenStore
from expstore.storages.engine.opening import Opening, explain_full_disk, make_columns
from expstore.storages.engine.process_exit import Departure, register, unregister
from expstore.storages.engine.row_appender import RowAppender
from expstore.storages.engine.shared_state import SharedState
from expstore.storages.engine.store_snapshots import StoreSnapshots
from expstore.storages.format.journal import SYNC_SEGMENT_BYTES, Kind
from expstore.storages.format.layout import ColumnLayout, refuse_objects
from expstore.storages.format.manifest import Manifest
from expstore.storages.format.paths import CHECKSUMS, COLUMNS, REDO, STATE, index_path
from expstore.storages.format.records import Publish, Redo, shelve_body
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
    #: The contents of expstore.json.
    manifest: Manifest
    #: Appends records, and syncs the parts of the store.
    checkpoints: Checkpointer
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
        #: The writer's lock, which only this process holds.
        self.lock_file, manifest = enter(disk, path, capacity, settings, self.kind)
        try:
            super().__init__(
                description=Description.of(manifest), disk=disk, path=path, index_path=index_path(path)
            )
            self.manifest = manifest
            #: Records failures of the store.
            self.health = Health(path, self.lock_file)
            #: The control page STATE.
            self.shared = SharedState(disk, path, self.lock_file)
        except BaseException:
            self.lock_file.release()
            raise
        #: The free space of the disk.
        self.space = DiskSpace(disk, path, settings.min_free_bytes)
        self.checkpoints = Checkpointer(
            self.locks.order,
            self.health,
            disk,
            durable=durable,
            segment_bytes=segment_bytes or (SYNC_SEGMENT_BYTES if durable else tuning.JOURNAL_SEGMENT_BYTES),
        )
        #: Runs checkpoints some time after writes.
        self.background = Keeper(self)
        try:
            draws = DrawState(order=self.locks.order, sink=self.shared)
            self._adopt(dataclasses.replace(self._state, draws=draws))
            self.shared.enter()
            self.shared.begin_change(None)  # recovery may change rows that other processes are reading
            with explain_full_disk(disk, path, manifest):
                self._open(first=True)
            if manifest.schema is not None and self.shared.is_new:
                _logger.warning("%s was missing or truncated and is created again", path / STATE)
        except BaseException:
            self._release()
            raise
        self.background.start()
        flushes = settings.on_sigterm == "flush"
        register(self, Departure(path, flushes, self._leave, self._depart, self.drain))

    def _open(self, *, first: bool) -> None:
        """Open the files as they are now and switch to them; on failure, the former files stay open."""
        former = self._state
        opened = Opening(
            self.disk,
            self.path,
            self.manifest,
            shared=self.shared,
            order=self.locks.order,
            pool=self.checkpoints.pool,
            segment_bytes=self.checkpoints.segment_bytes,
            counts=self._counting,
            may_tidy=not self.snapshot_pin.first,
            counted=self.background.note,
            former=former,
            first=first,
        ).run()
        description = Description.of(opened.manifest)
        with self._note_field_change(description.schema):
            self.manifest = opened.manifest
            self._adopt(opened.store)
            self.changes.seen = opened.store.journal.sequence
            self.checkpoints.restart(opened.store)
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
        return Deletion(self, self._save)

    @property
    def snapshots(self) -> StoreSnapshots:
        """Access to the content for snapshots, which read and replace it."""
        return StoreSnapshots(
            self,
            check=self._check_hooks,
            convert=self._hook_content,
            reopen=self._reopen,
        )

    # -- extend ------------------------------------------------------------------------------------

    def _append(self, rows: Rows) -> None:
        kernels = self.disk.kernels
        if kernels is None:
            self.disk.warm()
        if self._state.episodes.kernels is not kernels:
            self._state.episodes.use_kernels(kernels)
        self._append_rows(_BatchWrite(self, rows))
        if rows.count > self.geometry.spare:
            self.sync()  # the batch has overwritten durable rows

    def _append_rows(self, write: Write) -> None:
        """Append rows, for which there is room. This is the crash rule, for batches and for single rows.

        If the process dies before step 3 the rows are lost: an opening stops at the newest commit record, and
        ignores bytes in free slots. (In this case, a batch longer than the spare slots has already evicted
        older rows.) From step 3 on the rows exist; recovery repeats step 4 from the record. After a power
        failure they exist if a checkpoint has run since, or if every call is synced. After an exception the
        next call of `writer` reads the journal again.
        """
        state, checkpoints = self._state, self.checkpoints
        try:
            # 1. Release the slots for readers in other processes, before they change.
            self.shared.reserve(write.last_id)
            # 2. Release them in memory, then write the payload to the columns; a few rows stay in the
            #    memtable and in their record. If every call is synced, sync the payload before its record.
            in_columns = write.put(state)
            with self.locks.episodes:
                try:
                    # 3. Append the commit record.
                    sequence = write.append_record(state)
                    if checkpoints.durable:
                        checkpoints.sync_record(state.journal)
                    # 4. Update episodes, window and key: readers in this process see the rows.
                    write.commit(state, (self.manifest.generation, sequence))
                except BaseException:
                    # Before the lock is released: no checkpoint may cover a record that memory lacks.
                    self.health.note_interruption()
                    raise
            # 5. Update the control page: other processes see the rows, if they are in the columns.
            if self.epochs.has_splits:
                self.shared.note_splits()
            self.shared.publish(write.last_id, sequence, drained=in_columns)
        except BaseException:
            self.health.note_interruption()
            raise
        self.background.note()

    def _admit(self, rows: Rows) -> None:
        """Wait until rows may be written: a snapshot then has the rows to be overwritten.

        Raises:
            StorageError: The disk is too full, or failed; nothing was written.
        """
        if self.snapshot_pin.first and self.geometry.slots is not None:
            self.snapshot_pin.wait(rows.last_id - self.geometry.slots)
        if self.row_traits.variable:
            self._make_room_for_variable(rows)
        self._make_room(rows.count)
        if rows.key is not None:
            self._make_room_for_key()

    def _make_room(self, count: int) -> None:
        """Wait until rows in flight, and rows that no checkpoint covers, fit into the spare slots.

        A batch longer than the spare slots evicts the rows that it overwrites.
        """
        ring = self.geometry
        last = self._state.stored.last
        if last + count > self.space.last_id:
            self._check_space(count)
        if count > ring.spare:
            self.sync()
            if ring.depth is not None:
                through = min(last, last + count - ring.depth)
                if through > self._state.stored.low:
                    self._retire(through)
        else:
            free = ring.spare - (last - self.checkpoints.covered)
            if 2 * (free - count) < ring.spare:
                self.background.hurry()
            if count > free:
                started = time.monotonic()
                self.checkpoints.run(self, lambda: self._has_spare(count))
                self.counters.note_wait(started)

    def _has_spare(self, count: int) -> bool:
        """Return whether `count` rows, and the rows that no checkpoint covers, fit into the spare slots."""
        return self.last + count - self.checkpoints.covered <= self.geometry.spare

    def _check_space(self, count: int) -> None:
        """Raise StorageError for rows that would leave the disk with less than `min_free_bytes`."""
        if self.last + count > self.space.last_id:
            row_bytes = self.require_schema().row_bytes + ROW_BYTES
            self.space.check(self.last, count, row_bytes, self.geometry)

    def _make_room_for_variable(self, rows: Rows) -> None:
        """Wait for the disk, or hurry the background thread, if many variable-length bytes are unsynced."""
        columns = self._state.columns
        if columns is None or not columns.variable_places:
            return
        size = columns.variable_bytes(rows.columns)
        self.space.check_bytes(size, rows.count, -(-size // max(1, rows.count)))
        unsynced = columns.unsynced_bytes + size
        if unsynced > UNSYNCED_BYTES:
            started = time.monotonic()
            self.sync()
            self.counters.note_wait(started)
        elif 2 * unsynced > UNSYNCED_BYTES:
            self.background.hurry()

    def _make_room_for_key(self) -> None:
        """Make room for one more idempotency key in the file of keys."""
        if not self.manifest.keyed:
            self._save(self.manifest.replace(keyed=True))  # from now on a missing file is damage
        keys = self._state.write_keys
        if 2 * keys.room < keys.spare:
            self.background.hurry()
        if not keys.room:
            self.checkpoints.run(self, lambda: self._state.write_keys.room > 0)

    def row_appender(self, schema: Schema, rows: int = 1) -> RowAppender | None:
        """Return an appender that writes a few rows faster than `write`; see `Storage.row_appender`."""
        suits = RowAppender.suits(self, schema, rows)
        return RowAppender(self, schema, rows, append=self._append_rows) if suits else None

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
        self.writer()
        refuse_objects(schema)
        self.space.check_bytes(0, 1, schema.row_bytes + ROW_BYTES)
        with self.health.guard():
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
        ring, state, path, pool = self.geometry, self._state, self.path, self.checkpoints.pool
        folder, fields = path / COLUMNS, (*schema.fields, *ROW_FIELDS)
        attributes = {"expstore": {"capacity": ring.capacity, "slots": ring.slots}}
        packings = self._layout.packings(fields, ring.slots, ring.reach)
        WritableColumns.create(self.disk, folder, fields, ring.slots, pool, attributes, packings)
        numbers = {"capacity": ring.capacity, "spare": ring.spare, "reach": ring.reach, "dims": ring.dims}
        kind = "arrow" if self.row_traits.undecided and schema.variable else self.kind
        manifest = self.manifest.replace(schema=schema, storage=kind, **numbers)
        columns = make_columns(
            self.disk, path, manifest, schema, generation=manifest.generation, packings=packings
        )
        columns.warm()
        if state.checksums is not None:
            state.checksums.close()
        self.disk.unlink(path / CHECKSUMS)  # left over from a failed attempt
        state.replace_checksums(Checksums(self.disk, path / CHECKSUMS, columns))
        manifest.save(self.disk, path)
        self.manifest, self.kind = manifest, kind
        state.replace_columns(columns)
        self.shared.note_layout()
        size = 4096 if ring.slots is None else ring.slots
        values, column = np.full(size, self.priorities.largest, np.float32), columns.row_fields[-1]
        self.priorities.load(values, dirty=False, column=column, window=self.description.window_rows)

    def _take_fields(self, manifest: Manifest, columns: WritableColumns) -> None:
        """Replace the fields. expstore.json already has them, and the caller holds the lock."""
        description = Description.of(manifest)
        with self.locks.episodes, self._note_field_change(description.schema):
            self.manifest = manifest
            self._describe(description)
            self._state.replace_columns(columns)
            self.shared.note_layout()

    def _begin_sampled(self) -> None:
        columns, slots = self._state.columns, self.geometry.slots
        if columns is None:
            return
        last = self.last if slots is None else min(self.last, slots)
        ready = max(columns.ready, last)  # the columns may lack rows that the memtable has
        with self.health.guard():
            SampledColumn.make(self.disk, columns.folder, slots, ready=ready, pool=self.checkpoints.pool)
            counts = SampledColumn(self.disk, columns.folder, slots, changed=self.background.note)
            self._state.count_sampled(counts)

    def _save(self, manifest: Manifest) -> None:
        """Write expstore.json.

        Raises:
            StorageError: The disk failed; nothing was changed.
        """
        self.health.check_in_place()
        with self.health.guard():
            manifest.save(self.disk, self.path)
        self.manifest = manifest

    def _complete_lineage(self) -> None:
        """Record what git has said about the program since the store was opened, if it has written rows."""
        former, facts = self.manifest.lineage, describe_checkout()
        lineage = former.complete(self.episodes.session.id, self.last, facts) if facts else former
        if lineage != former:
            manifest = self.manifest.replace(lineage=lineage)
            with contextlib.suppress(StorageError):  # the rows have to be closed all the same
                manifest.save(self.disk, self.path)
                self.manifest = manifest

    @property
    def settings(self) -> StoreSettings:
        """Settings of the rows: their ranking, their specs, and whether samples are counted."""
        return StoreSettings(self, self._describe, self._count_sampled, self._save)

    # -- changing rows -----------------------------------------------------------------------------

    # A change in place first syncs its record (`Kind.REDO`), then changes the columns. A pin prevents
    # checkpoints from covering the record before the columns have changed, because this would lose the
    # change. New rows that replace others are scattered over the columns, so writing each at once would cost
    # one write per column, after a sync of the journal: a checkpoint does both for many of them together. The
    # journal has every change when a call returns; an opening repeats those that the columns may lack.

    def _change(
        self, ids: IntArray, places: Sequence[int], columns: Sequence[Array], *, replaces: bool
    ) -> None:
        state = self._state
        if state.columns is not None:
            state.columns.check_changeable(places)
        self.snapshot_pin.wait()
        if state.row_changes.is_long:
            with self.checkpoints.lock, self.health.guard():
                state.row_changes.compact(state.stored)
        size = sum(column.nbytes for column in columns)
        most = min(tuning.REPLACED_ROWS_BYTES, tuning.REPLACE_RECORD_BYTES)
        if replaces and self.geometry.slots is not None and 2 * size <= most:
            waiting = state.memtable.replaced.waiting_bytes
            if self._is_behind or (waiting and waiting + size > tuning.REPLACED_ROWS_BYTES):
                self.sync()  # a power failure must not bring back a row whose slot is replaced
            elif 2 * waiting > tuning.REPLACED_ROWS_BYTES:
                self.background.hurry()
            with self.health.noting:
                self._change_later(ids, places, columns)
        else:
            if state.memtable.replaced or self._is_behind:
                self.sync()  # otherwise a power failure could keep the change without its row
            with self.health.noting:
                self._change_in_place(ids, places, columns, replaces=replaces)
        self.background.note()

    @property
    def _is_behind(self) -> bool:
        """Whether rows were appended after the newest checkpoint."""
        return self._state.last > self.checkpoints.covered

    def _change_in_place(
        self, ids: IntArray, places: Sequence[int], columns: Sequence[Array], *, replaces: bool
    ) -> None:
        state, shared, record = self._state, self.shared, Redo(ids, list(places), columns, replaces)
        number = state.journal.sequence + 1
        body = shelve_body(self.disk, self.path / REDO, number, record.pack(), settle=self.sync)
        replaced = ids.size if replaces else 0
        number, pin = self.checkpoints.append_synced(self, Kind.REDO, body, replaced=replaced)
        slots = self.geometry.slot_of(ids)
        with state.row_changes.record(number, ids):
            self.changes.begin()
            shared.begin_change(slots)
            try:
                touched = state.overwrite(slots, places, columns)
                shared.end_change()  # not after a failure: the values are then unknown
            except BaseException:
                state.memtable.replaced.fail(slots, places, columns)
                raise
            finally:
                self.changes.end(slots)
        self.changes.seen = number
        shared.note_changed(number)
        with self.locks.episodes:
            state.note_touched(touched, slots)
        self.checkpoints.release(pin)

    def _change_later(self, ids: IntArray, places: Sequence[int], columns: Sequence[Array]) -> None:
        """Record rows that replace others, and keep them in memory until a checkpoint writes them."""
        state, slots, checkpoints = self._state, self.geometry.slot_of(ids), self.checkpoints
        body = Redo(ids, list(places), columns, True).pack()

        def make_batch() -> RowBatch[Pin]:  # its records follow the pinned one
            pin = checkpoints.pin(sequence - 1, state.journal.sync_files()[-1])
            return RowBatch(self.geometry.slots or 0, places, pin)

        # No checkpoint may run between the record and the rows, also not after a failure between them.
        with self.locks.episodes, self.health.noting:
            sequence = checkpoints.append_record(self, Kind.REDO, body)
            state.note_replaced(ids.size)
            if checkpoints.durable:
                checkpoints.sync_record(state.journal)
            with state.row_changes.record(sequence, ids):
                state.memtable.replaced.add(slots, columns, make_batch)
            self.changes.seen = sequence
        with state.priorities.lock:
            state.priorities.values[slots] = columns[0]
        state.priorities.note_changed(slots)
        self.changes.note(slots)

    def _note_unsaved(self) -> None:
        """Record that priorities were set, so that a checkpoint follows soon."""
        self.background.note()

    @contextlib.contextmanager
    def _note_changes(self, slots: IntArray | None = None) -> Iterator[None]:
        """Tell readers, also in other processes, that rows are being changed in place."""
        with super()._note_changes(slots):
            self.shared.begin_change(slots)
            yield
            self.shared.end_change()  # not after a failure, when the rows' contents are unknown

    # -- episodes, and deleted rows ----------------------------------------------------------------

    def _annotate(self, change: NewFacts | End | Resume) -> None:
        kinds = {NewFacts: Kind.ANNOTATE, End: Kind.END, Resume: Kind.RESUME}
        # Before the lock is released: a checkpoint must not cover a record that memory lacks.
        with self.health.noting:
            sequence = self.checkpoints.append_record(self, kinds[type(change)], change.pack())
            if self.checkpoints.durable:
                self.checkpoints.sync_record(self._state.journal)
            self._state.annotate(change, (self.manifest.generation, sequence))
        self.shared.note_record(sequence)
        self.background.note()

    def _retire(self, through: int) -> None:
        """Remove the rows with ids <= `through` permanently and durably."""
        with self.locks.episodes:
            body = b'{"through": %d}' % through
            sequence = self.checkpoints.append_record(self, Kind.RETIRE, body)
            self.epochs.note_deleted()
            self._state.retire(through)
            self._state.note_content((self.manifest.generation, sequence))
        self.shared.retire(self._state.retired)
        self.sync()

    def _forget(self, last: int) -> None:
        with self.health.noting:
            self.sync()
            with self.locks.episodes:
                sequence = self.checkpoints.append_record(self, Kind.DELETE, b'{"last": %d}' % last)
                self.epochs.note_deleted()
                self._state.clear(last, (self.manifest.generation, sequence))
            self.shared.clear(last)
            self.sync()

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
            with contextlib.suppress(StorageError):  # if it fails, the rows are read from memory
                self.drain()
            return self._state.memtable.read_rows(self._state.require_columns(), slots, wanted)
        return memtable.replaced.read_rows(columns, slots, wanted)

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
        self.drain()
        state = self._state
        columns = state.columns
        if columns is None:
            return [[] for _ in places]
        newer = state.memtable.replaced.overlay()
        found: list[list[Array]] = []
        for place in places:
            if place == len(columns.columns) - 1:
                found.append(state.priorities.views(cut_run(first_id, count, columns.slots)))
            elif newer is None:
                found.append(columns.columns[place].views(first_id, count))
            else:
                found.append(newer.views(columns, place, first_id, count))
        return found

    @property
    def unviewed_places(self) -> frozenset[int]:
        """Fields whose rows are unpacked or assembled when they are read, so that viewing them copies."""
        columns = self._state.columns
        return frozenset() if columns is None else columns.unviewed_places

    def drain(self) -> None:
        """Write the rows in the memtable to the columns.

        Raises:
            StorageError: The disk failed, or an earlier attempt was interrupted and the columns may have some
                of the rows already; the journal has all of them, and the next write recovers them.
        """
        state = self._state
        if not state.memtable.count or state.columns is None or not self.shared.owned:
            return  # a forked child must not write: slots may have other rows
        if self.health.is_cut_off:
            raise StorageError(
                f"rows of {self.path} are not in the columns, as an earlier attempt was interrupted",
                hint="extend() or flush() recovers them",
            )
        try:
            state.memtable.drain(state.columns, self.shared.drain)
        except BaseException as exc:
            self.health.note_failure(exc)  # a new shard of an unbounded store is synced at once
            if state.is_append_only:
                self.health.note_interruption()  # only the files show how many rows were written
                # After a failure of the disk, they can be written again; not if a statement was skipped.
                self.health.is_cut_off = not isinstance(exc, StorageError)
            raise

    def write_values(self) -> None:
        """Write priorities and counts that have changed, and rows that the columns lack, to the columns."""
        self.health.check_in_place()
        state = self._state
        if state.columns is None:
            return
        self.drain()
        if state.sampled is not None and state.sampled.owes:
            with self.locks.sampled:
                state.sampled.settle()
        touched = state.priorities.write(state.columns.row_fields[-1])
        if touched:
            with self.locks.episodes:
                state.columns.touched |= touched

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
            >>> from expstore import MemoryStorage
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
        with self.checkpoints.lock, self.locks.sampled, self.health.noting, self._note_changes():
            change()
            with self.health.guard():
                self._open(first=True)

    # -- opening and closing -------------------------------------------------------------------------

    def sync(self) -> None:
        """Run a checkpoint: sync all committed rows, the priorities and the draws.

        Raises:
            StorageError: The disk failed; after a failed fsync the store must be opened again.
        """
        self.checkpoints.run(self)

    def writer(self) -> Self:
        """Return the store itself; after an interruption, read its journal again first.

        Raises:
            StateError: The store is closed, has failed, or belongs to another process.
            StorageError: The disk failed; the next call retries.
        """
        if self._closed:
            raise build_closed_error()
        if not self.lock_file.held:
            raise StateError(
                f"{self.path} was opened by another process, of which this one is a fork",
                hint="open the store in the process that writes to it",
            )
        health = self.health
        if health.fence is not None:
            health.check_fence()
        if health.failure is not None:
            health.check()
        if health.needs_recovery:
            # A sampler that counts samples must not use the counts that were open before.
            with self.lock, self.checkpoints.lock, self.locks.sampled:
                if health.needs_recovery:
                    with contextlib.suppress(ExpStoreError):
                        self.write_values()
                    with self._note_changes(), health.guard():
                        self._open(first=False)
                    health.note_recovered()
        return self

    @property
    def can_write(self) -> bool:
        """Whether the store is open for writing, has not failed, and is not fenced."""
        return self._is_usable and self.health.fence is None

    @property
    def _is_usable(self) -> bool:
        return not self._closed and self.lock_file.held and self.health.is_sound

    def close(self) -> None:
        """Sync, record a clean close, and release the lock; a second call does nothing."""
        if self._closed:
            return
        if self.holders.shipping is not None:
            self.holders.shipping.close()
        closed = 0
        with self.lock:
            self.background.stop()
            try:
                if self._is_usable:
                    self._complete_lineage()
                    if self.can_write:
                        end_sessions(self, [self.episodes.session])
                    closed = self._finish()
            finally:
                self._note_closed()
                self.shared.leave(closed)
                self._release()

    def _finish(self) -> int:
        """Run the last checkpoint and append the close record; return its LSN. The lock is held."""
        journal, checkpoints = self._state.journal, self.checkpoints
        with self.locks.episodes:
            # Do not keep a long journal of changes that will all be synced.
            if not self.health.needs_recovery and journal.length > tuning.CLOSED_JOURNAL_BYTES:
                with contextlib.suppress(StorageError):  # on a full disk, the journal is kept
                    checkpoints.start_segment(self)
        self.sync()
        with self.locks.episodes:
            sequence = checkpoints.append_record(self, Kind.CLOSE, b"{}")
            journal.end()
            if self._state.columns is not None:
                self._state.columns.give_back()
        checkpoints.sync_journal(journal.sync_files(), [])
        return sequence

    def _release(self) -> None:
        """Close all files that were opened, and release the lock."""
        unregister(self)
        self._note_closed()
        with self.locks.sampled:  # no descriptor may be reused for another file while counts are written
            self._state.close()
            self.shared.close()
        self.lock_file.release()

    def _leave(self) -> None:
        """Close a store that is still open when the program ends, and update the index."""
        if self._closed or not self.lock_file.held:
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
        if self.holders.shipping is not None:
            self.holders.shipping.wait(tuning.SIGTERM_SECONDS)

    def __del__(self) -> None:
        opened = "background" in vars(self) and self.background.running
        if opened and not self._closed and self.lock_file.held:
            # If the store is part of a reference cycle, the threads of its pool have already ended and take
            # no jobs. Also, this thread may be inside `submit` of another pool, where waiting would deadlock.
            self.checkpoints.pool.refuse()
            if self._state.columns is not None:
                self._state.columns.do_without_threads()
            with contextlib.suppress(ExpStoreError):
                self.close()
            if self._warns_if_forgotten:
                warnings.warn(f"{self.path} was forgotten without close()", ResourceWarning, 2, self)

    # -- facts -----------------------------------------------------------------------------------------

    def more_stats(self) -> dict[str, Any]:
        """Return path, generation, unsynced rows, the state of the disk, and compression ratios."""
        counters, columns, checkpoints = self.counters, self._state.columns, self.checkpoints
        return {
            "path": str(self.path),
            "durability": "sync" if checkpoints.durable else "process",
            "generation": self.manifest.generation,
            "unsynced_rows": self.last - checkpoints.covered,
            "fsyncs": self.disk.syncs,
            "last_sync_seconds": counters.sync_seconds and round(counters.sync_seconds, 4),
            "last_sync_age": counters.synced_at and round(time.monotonic() - counters.synced_at, 3),
            "free_bytes": self.disk.free(self.path),
            "poisoned": None if self.health.failure is None else str(self.health.failure),
            "recovered": counters.recovered,
            "shipped": None if self.holders.shipping is None else self.holders.shipping.stats(),
            "packed": {} if columns is None else columns.compression_ratios(),
        }


class Write(Protocol):
    """Rows to append: `_BatchWrite`, or a `RowAppender` for a few rows of one stream.

    Its methods are the steps of `Store._append_rows`, which calls them in their order here.
    """

    @property
    def last_id(self) -> int:
        """The id of the last row."""

    def put(self, state: OpenStore) -> bool:
        """Release the slots in memory; then write the rows to the columns, or add them to the memtable.

        Returns:
            Whether the columns have them.
        """

    def append_record(self, state: OpenStore) -> int:
        """Append the commit record; return its LSN. The lock of the episodes is held."""

    def commit(self, state: OpenStore, position: tuple[int, int]) -> None:
        """Make the rows readable.

        Args:
            state: The state of the store.
            position: Generation and LSN of the commit record.
        """


class _BatchWrite:
    """Append a batch.

    Args:
        store: The store.
        rows: The batch.
    """

    __slots__ = ("_payload", "_priority", "_rows", "_skipped", "_store", "last_id")

    _payload: Payload
    _priority: float
    _skipped: int

    def __init__(self, store: Store, rows: Rows) -> None:
        self._store, self._rows = store, rows
        self.last_id = rows.last_id

    def put(self, state: OpenStore) -> bool:
        """Write the rows to the columns, or add them to the memtable; see `Write.put`."""
        store, rows = self._store, self._rows
        # `require_columns` raises the error if there are none.
        ring, columns = store.geometry, state.columns or state.require_columns()
        skipped = self._skipped = store._reserve(rows)
        self._priority = state.priorities.largest  # may rise until the record is written
        if columns.annotations is not None:
            columns.annotations.last = rows.last_id
        # The memtable finds rows by their slots, so it cannot hold a batch that needs one slot twice.
        keeps = (
            not skipped
            and rows.count <= min(tuning.MEMTABLE_BATCH_ROWS, ring.spare)
            and columns.bytes_of(rows.columns, rows.count) <= tuning.MEMTABLE_BATCH_BYTES
        )
        if state.memtable.span[1] and (not keeps or state.memtable.full):
            store.drain()
        if keeps:
            self._payload = state.keep(columns, rows, ring, self._priority)
            return False
        self._payload = state.put(columns, rows, skipped, ring, self._priority)
        if store.checkpoints.durable:
            inline = columns.bytes_of(rows.columns, rows.count) <= tuning.INLINE_BATCH_BYTES
            if inline and not skipped and rows.count <= ring.spare:
                parts = payload_parts(columns, rows.columns, rows.assignment.numbers)
                self._payload = Payload(self._payload.crc, b"".join(parts))
            else:
                runs = ring.runs(rows.first_id + skipped, rows.count - skipped)
                store.checkpoints.sync_rows(
                    lambda: (columns.find_unsynced_files(runs), state.take_new_folders()), columns.put_back
                )
                columns.note_rows_synced()
        return True

    def append_record(self, state: OpenStore) -> int:
        """Append the commit record; see `Write.append_record`."""
        store, rows, payload = self._store, self._rows, self._payload
        record = Publish(
            first_id=rows.first_id,
            count=rows.count,
            skipped=self._skipped,
            draw=state.draws.number,
            time=rows.time,
            checksum=payload.crc,
            priority=self._priority,
            segments=rows.assignment.segments,
            sources=rows.assignment.sources,
            payload=payload.inline,
            info=rows.info,
            column_set=store.manifest.column_set,
            key=rows.key,
        )
        return store.checkpoints.append_record(store, Kind.PUBLISH, *record.parts())

    def commit(self, state: OpenStore, position: tuple[int, int]) -> None:
        """Make the rows readable; see `Write.commit`."""
        state.commit_rows(self._rows, self._store.geometry.capacity, position)


def forget_silently(store: Store) -> None:
    """Give no warning if a store is garbage-collected without having been closed: something else drops it."""
    store._warns_if_forgotten = False
