"""Rows on disk: Zarr v3 columns, published by a journal.

The storage behind `expstore.open`. The files' layout is in `expstore.storages.columns.flat`, the order of the
acts in `expstore.storages.engine.store`. It never runs zarr-python when rows are written or read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import google_crc32c
import numpy as np

from expstore.core import tuning
from expstore.core.geometry import RingGeometry, round_up
from expstore.core.values import Array, IntArray, Ranking, key_name
from expstore.errors import SchemaError, StateError, StorageError
from expstore.schema.row_fields import ROW_FIELDS
from expstore.schema.schema import Schema
from expstore.storages.base import Keys, Rows
from expstore.storages.batch import Payload
from expstore.storages.columns.checksums import BLOCK_ROWS, Checksums, blocks_of
from expstore.storages.columns.column_set_writer import WritableColumns
from expstore.storages.columns.memtable import TAIL_ROWS
from expstore.storages.columns.packed.column import PackedRows
from expstore.storages.columns.packed.writer import PackedColumn
from expstore.storages.columns.payload import payload_parts
from expstore.storages.columns.sample_counts_column import SampledColumn
from expstore.storages.engine.archive_before_evict import ArchivingStorage
from expstore.storages.engine.delete import RetainingStorage
from expstore.storages.engine.opening import make_columns
from expstore.storages.format.layout import ColumnLayout
from expstore.storages.format.paths import CHECKSUMS, COLUMNS
from expstore.storages.snapshots.resize import Progress, resized
from expstore.storages.snapshots.restore import Arrival, ContentLike, build_load, commit_load

if TYPE_CHECKING:
    from expstore.storages.columns.arrow.capture import Held

__all__ = ["ZarrStorage"]


class ZarrStorage(ArchivingStorage):
    """Keep rows in a folder, for as long as the experiment lives.

    Crashes: what `write` published survives the process at once, and the machine after the next `sync`
    (about one second later, or `flush`). A batch is there whole or not at all. Threads: as `Storage`.
    Processes: one writer, the next one gets LockedError; a forked child cannot write.

    Args:
        path: The store's folder; made if it is missing.
        capacity: Most readable rows; None: as stored, unbounded for a new store.
        settings: Everything else; see `expstore.open`.
        ndim: How many dims of a batch are rows, time being the first; None: as stored, 1 for a new store.
        layout: As of `expstore.open`; None: as stored, "flat" for a new store.
        fields: As of `expstore.open`.
        retain: As of `expstore.open`.
        share_next: As of `expstore.open`; None: as stored, True for a new store.
        disk: Where files are touched.
        segment_bytes: Length of a journal segment; None: 4 MiB, or 64 MiB where records carry their rows.

    Raises:
        LockedError: Another buffer has it open.
        StateError: A setting contradicts the store.
        CorruptionError: The store is damaged.
        SchemaError: There is no such layout, codec or option.

    Example:
        >>> rb = TensorDictReplayBuffer(storage=ZarrStorage("run.exp", 100_000), batch_size=256)
    """

    kind = "zarr"

    # -- how rows are kept ------------------------------------------------------------------------

    @property
    def layout(self) -> ColumnLayout:
        """How the columns of this store are made."""
        return ColumnLayout.of(self.manifest.layout, self.ranking)

    def _note_ranking(self, ranking: Ranking | None) -> None:
        if ranking is not None and self.columns is not None and self.columns.packed:
            raise _in_place(
                [column for _, column in self.columns.packed], "rows cannot give way to better ones"
            )
        if ranking is not None and ColumnLayout(**self.manifest.layout).asks_packed:
            raise StateError(
                "this store was made with packed fields, whose rows cannot give way to better ones",
                hint="make a store with layout='flat', or without a writer that keeps the best rows",
            )
        super()._note_ranking(ranking)

    def _change(
        self, ids: IntArray, places: Sequence[int], columns: Sequence[Array], *, replaces: bool
    ) -> None:
        group = self.columns
        packed = [column for place, column in ([] if group is None else group.packed) if place in places]
        if packed:
            raise _in_place(packed, "rows cannot be changed")
        super()._change(ids, places, columns, replaces=replaces)

    @property
    def unviewed_places(self) -> frozenset[int]:
        """Fields of which not all rows can be viewed."""
        return frozenset() if self.columns is None else self.columns.unviewed_places

    def geometry_for(self, schema: Schema, ring: RingGeometry) -> RingGeometry:
        """Return a ring whose slots beyond the capacity are whole steps of time and whole chunks.

        Its reach is as far back as packed rows may refer to, and one chunk: a reader may find only the newer
        rows of a chunk that is being overwritten.

        Raises:
            SchemaError: A setting of a single field does not fit the field.
        """
        ColumnLayout(**self.manifest.layout).check(schema.fields, ring.capacity)
        ring = super().geometry_for(schema, ring)
        if ring.capacity is None or ring.depth is None:
            return ring
        layout, back = self.layout, self.layout.reach(schema.fields)
        chunk = layout.chunk_rows(schema.fields)
        step = math.lcm(ring.lanes, chunk)
        reach = round_up(back + chunk, step) if back or layout.packs(schema.fields) else 0
        return ring.with_slots(round_up(ring.depth, step) - ring.capacity, reach)

    def packed_now(self) -> dict[int, PackedRows]:
        """Return the rows of packed fields as they are at this moment, by place."""
        if self.columns is None:
            return {}
        self.drain()
        return self.columns.packed_now()

    def segments_now(self, low: int) -> dict[tuple[int, ...], list[Held]]:
        """Return the segments that hold rows newer than `low`, and of which fields."""
        if self.columns is None or self.columns.segments is None:
            return {}
        from expstore.storages.columns.arrow.capture import segments_now

        self.drain()
        return {self.columns.segment_places: segments_now(self.columns.segments, low)}

    def more_stats(self) -> dict[str, Any]:
        """Return those of every storage on disk, and how much smaller packed fields are than their rows."""
        group = self.columns
        packed = (
            [] if group is None else [(column, group.packed_size(column)[0]) for _, column in group.packed]
        )
        return super().more_stats() | {"packed": {key_name(column.entry.key): n for column, n in packed}}

    # -- opening ---------------------------------------------------------------------------------

    def _open_archive_storage(self, path: Path, **options: Any) -> RetainingStorage:
        from expstore.storages.arrow import ArrowStorage  # late: an Arrow storage is a Zarr storage itself

        return ArrowStorage(path, **options)

    def _begin_sampled(self) -> None:
        group = self.columns
        if group is None:
            return
        with self.engine.health.guarding():
            SampledColumn.make(
                self.disk, group.folder, self.geometry.slots, ready=group.ready, pool=self.engine.pool
            )
            self._state.count_sampled(SampledColumn(self.disk, group.folder, self.geometry.slots))

    def note_sampled(self) -> None:
        """Note that rows were counted as handed out: a checkpoint follows before long."""
        self.engine.background.note()

    def _create(self, schema: Schema, keys: Keys) -> None:
        pool, folder = self.engine.pool, self.path / COLUMNS
        fields = (*schema.fields, *ROW_FIELDS)
        slots = self.geometry.slots
        attributes = {"expstore": {"capacity": self.capacity, "slots": slots}}
        packings = self.layout.packings(fields, slots, self.geometry.reach)
        WritableColumns.create(self.disk, folder, fields, slots, pool, attributes, packings)
        ring = self.geometry
        numbers = {"capacity": ring.capacity, "spare": ring.spare, "reach": ring.reach, "dims": ring.dims}
        manifest = self.manifest.replace(schema=schema, **numbers)
        columns = make_columns(self.disk, self.path, manifest, schema)
        columns.warm()
        if columns.segments is not None:
            columns.segments.generation = manifest.generation
        if self.checksums is not None:
            self.checksums.close()
        self.disk.unlink(self.path / CHECKSUMS)  # of rows that a failed attempt never got
        self._state.replace_checksums(Checksums(self.disk, self.path / CHECKSUMS, columns))
        manifest.save(self.disk, self.path)
        self.manifest = manifest
        self._state.replace_columns(columns)
        self.engine.shared.note_layout()
        size = 4096 if slots is None else slots
        self.priorities.load(np.full(size, self.priorities.largest, np.float32), dirty=False)

    # -- extend ----------------------------------------------------------------------------------

    def _put(self, rows: Rows, skipped: int) -> Payload:
        self.disk.warm()
        state = self._state
        state.episodes.kernels = self.disk.kernels
        columns, priorities = state.columns, state.priorities
        if columns is None:
            raise StateError("the store has no columns yet", hint="extend() it first")
        assignment = rows.assignment
        count = rows.count
        # The tail finds rows by their slots, so it cannot hold a batch that needs one slot twice.
        if count <= min(TAIL_ROWS, self.geometry.spare) and (
            columns.bytes_of(rows.columns, count) <= tuning.MEMTABLE_BATCH_BYTES
        ):
            return self._put_in_tail(columns, rows)
        self.drain()
        arrays, numbers = rows.columns, assignment.numbers
        if skipped:
            arrays = [array[skipped:] for array in arrays]
            numbers = np.ascontiguousarray(numbers[:, skipped:])
        first, written = rows.first_id + skipped, count - skipped
        runs = self.geometry.runs(first, written)
        with priorities.lock:  # a page of older priorities must not be written after these
            priorities.start(runs, self.geometry.slots)
            largest = np.full(written, priorities.largest, np.float32)
            crc = columns.write(runs, arrays, numbers, largest)
        inline = self._make_durable(columns, rows, arrays, numbers) if self.durable else b""
        return Payload(crc, inline)

    def _make_durable(
        self, group: WritableColumns, rows: Rows, arrays: Sequence[Array], numbers: IntArray
    ) -> bytes:
        """Return the bytes that the commit record carries, or sync the rows if they are many.

        The record is synced after them.
        """
        count = numbers.shape[1]
        if (
            count == rows.count <= self.geometry.spare
            and group.bytes_of(arrays, count) <= tuning.INLINE_BATCH_BYTES
        ):
            return b"".join(payload_parts(group, arrays, numbers))
        runs = self.geometry.runs(rows.first_id + rows.count - count, count)
        self.engine.checkpointer.sync_rows(
            lambda: (group.files_of(runs) | group.packed_files, self._state.take_new_folders())
        )
        return b""

    def _put_in_tail(self, columns: WritableColumns, rows: Rows) -> Payload:
        """Keep few rows back: their publish record will carry their bytes."""
        if self._state.memtable.full:
            self.drain()
        parts = payload_parts(columns, rows.columns, rows.assignment.numbers)
        inline = b"".join(parts)
        self.priorities.start(self.geometry.runs(rows.first_id, rows.count), self.geometry.slots)
        self._state.memtable.add(rows.first_id, rows.count, parts)
        return Payload(google_crc32c.value(inline), inline, in_columns=False)

    def drain(self) -> None:
        """Write rows that were kept back to the columns."""
        state = self._state
        tail, columns = state.memtable, state.columns
        if not tail.count or columns is None or not self.engine.lock_file.held:
            return  # a forked child must not write: the parent may have given their slots to other rows
        try:
            with tail.lock, state.priorities.lock:
                if tail.count:
                    pieces = self.geometry.runs(tail.first_id, tail.count)
                    values = state.priorities.values
                    priorities = np.concatenate([values[slot : slot + n] for slot, _, n in pieces])
                    tail.write(columns, pieces, priorities)
                    # Before others see an empty tail: they write newer rows then, and set this further.
                    self.engine.shared.drain(tail.first_id + tail.count - 1)
                    tail.drop()
        except StorageError as exc:
            self.engine.health.note_failure(exc)  # a new shard of a store that grows is synced at once
            if columns.packed or columns.segments is not None:
                self.note_interruption()  # how far they have come only the files can say
            raise

    # -- sync ------------------------------------------------------------------------------------

    def block_sums(self) -> Array | None:
        """Return an entry of checksums per block; zeros where the block has changed since the last sync."""
        if self.checksums is None:
            return None
        with self.engine.checkpointer.lock, self.episode_lock:
            entries = self.checksums.entries()
            covered = self.engine.checkpointer.covered
            newer = self.last - covered
            changed = self.checksums.changed | blocks_of(
                self.geometry.runs(covered + 1, newer) if newer else []
            )
            entries[[block for block in changed if block < entries.size]] = 0
        return entries

    def sum_again(self, blocks: set[int]) -> None:
        """Sum blocks as they are now, and sync: a repair has written to them or gives them up."""
        if self.columns is None or self.checksums is None:
            return
        with self.episode_lock:
            ready = self.columns.ready
            self.checksums.note_changed(block for block in blocks if (block + 1) * BLOCK_ROWS <= ready)
        self.sync()

    def flush_priorities(self) -> None:
        """Write the pages of priorities that have changed, and the rows that were kept back."""
        if self.columns is None:
            return
        self.drain()
        if self.sampled is not None and self.sampled.owes:
            with self.sampled_lock:
                self.sampled.settle()
        touched = self.priorities.write(self.columns.columns[-1])
        if touched:
            with self.episode_lock:
                self.columns.touched |= touched

    def _note_priorities(self) -> None:
        self.engine.background.note()

    def _take_content(self, content: ContentLike) -> None:
        """Put a content in the place of what there is.

        Crashes: the store has its former content until the new one is complete, and that one then.
        """
        self._take_arrival(lambda: Arrival(content, self), in_use=True)

    def resize(self, capacity: int | None, progress: Progress | None = None) -> None:
        """Have another capacity; rows that do not fit are given up, the oldest first, or the worst.

        Nobody may draw from it meanwhile, or hold numbers of rows afterwards: rows keep their ids, and get
        other indices. Crashes: as of a load.

        Args:
            capacity: Most readable rows; None: it grows without bound.
            progress: Is told bytes done and bytes in all.

        Raises:
            SchemaError: Fields were to be packed in chunks that do not fit.
        """
        self._take_arrival(lambda: resized(self, capacity, progress), in_use=False, keeps=capacity)

    def _take_arrival(self, find: Callable[[], Arrival], *, in_use: bool, keeps: int | None = None) -> None:
        """Put what `find` returns in the place of what there is.

        Args:
            find: It is called when all rows are in the columns.
            in_use: Whether others may read by former slots, for which there must be a place then.
            keeps: Otherwise: how many of the rows stay at most; None: all.
        """
        with self.lock:
            self.check_writable()
            self._wait_for_copy(None)
            self.settle_changes()
            self.flush_priorities()
            if self.write_keys.waiting:
                self.sync()  # the journal that has them goes
            self.archive_all_but(self.capacity if in_use else keeps)
            arrival = find()
            ready = 0 if self.columns is None or not in_use else self.columns.ready
            build_load(self, self.path, arrival, sequence=self.journal.sequence, ready=ready)
            recovered = self.counters.recovered
            with self.engine.checkpointer.lock, self.sampled_lock:
                try:
                    with self.changing():
                        commit_load(self.disk, self.path)
                        with self.engine.health.guarding():
                            self._open(first=True)
                except BaseException:
                    self.note_interruption()  # the next opening sees what is there
                    raise
            self.counters.recovered = recovered
            self.priorities.were_set = True

    # -- change and read -------------------------------------------------------------------------

    def _take(self, slots: IntArray, places: Sequence[int] | None) -> list[Array]:
        state = self._state
        group = state.columns
        if group is None:
            raise StateError("the store has no rows yet", hint="extend() it first")
        wanted = range(len(group.columns) - len(ROW_FIELDS)) if places is None else places
        if state.memtable.count and state.memtable.holds(slots, self.geometry.slots).any():
            try:
                self.drain()
            except StorageError:
                return state.memtable.take(group, slots, wanted, state.priorities.values)
        return state.replaced.take(group, slots, wanted)

    def _sizes_of(self, ids: IntArray) -> IntArray:
        group = self.columns
        if group is None or group.segments is None:
            return np.zeros(ids.size, np.int64)
        slots = self.geometry.slot_of(ids)
        if self._state.memtable.count and self._state.memtable.holds(slots, self.geometry.slots).any():
            try:
                self.drain()
            except StorageError:
                return super()._sizes_of(ids)
        return group.segments.sizes(group.segments.ids_of(slots))

    def views(self, places: Sequence[int], first_id: int, count: int) -> list[list[Array]]:
        """View columns over a run of ids without copying."""
        if self.columns is None:
            return [[] for _ in places]
        self.drain()
        runs = self.geometry.runs(first_id, count)
        columns = self.columns.columns
        found: list[list[Any]] = []
        over, segments = self._state.replaced.overlay(), self.columns.segments
        for place in places:
            if segments is not None and place in self.columns.segment_places:
                number = self.columns.segment_places.index(place)
                found.append(segments.views(number, first_id, count))
                continue
            if over is not None and place < len(columns) - 1:
                parts = [over.parts(place, columns[place], slot, n) for slot, _, n in runs]
                found.append([part[0] if len(part) == 1 else np.concatenate(part) for part in parts])
                continue
            if not columns[place].viewed:
                found.append([columns[place].part(slot, n) for slot, _, n in runs])
                continue
            is_priority = place == len(columns) - 1
            source = self.priorities.values if is_priority else columns[place].view
            found.append([source[slot : slot + n] for slot, _, n in runs])
        return found


def _in_place(columns: Sequence[PackedColumn], what: str) -> SchemaError:
    names = ", ".join(sorted(repr(key_name(column.entry.key)) for column in columns))
    return SchemaError(
        f"{'fields' if columns[1:] else 'field'} {names} {'are' if columns[1:] else 'is'} packed: {what}",
        hint="make the store with layout='flat', or with fields={name: {'layout': 'flat'}} for single ones",
    )
