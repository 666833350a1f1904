"""Open a store for writing: recover the state that the last writer left, and begin a new generation.

Used when a store is opened, when memory may lag behind the journal, and after a restore. The steps of
`Opening.run` and their order are the second half of the crash rule (docs/format.md, "Recovery");
`expstore.storages.recovery.recover` decides which records count.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from expstore.core.draw_state import DrawState
from expstore.core.lock_order import LockOrder
from expstore.core.values import IntArray, Window
from expstore.disk.files import Disk, File
from expstore.disk.program import describe_program
from expstore.disk.threads import Threads
from expstore.episodes.log import EpisodeLog, LogEntry
from expstore.episodes.table import EpisodeTable
from expstore.errors import CorruptionError, StateError, StorageError
from expstore.schema.row_fields import ROW_FIELDS
from expstore.schema.schema import Schema
from expstore.storages.batch import now_us
from expstore.storages.columns.checksums import BLOCK_ROWS, Checksums, blocks_of
from expstore.storages.columns.column_set_writer import WritableColumns
from expstore.storages.columns.memtable import Memtable
from expstore.storages.columns.payload import split_payload
from expstore.storages.columns.priorities import StoredPriorities, find_base
from expstore.storages.columns.sample_counts_column import SampledColumn, has_sampled
from expstore.storages.description import Description
from expstore.storages.engine.open_store import OpenStore
from expstore.storages.engine.shared_state import SharedState
from expstore.storages.format.chunk_encoding import Packing
from expstore.storages.format.control_page import PAGE
from expstore.storages.format.draw_log import cut_logs
from expstore.storages.format.journal import Journal, no_records, read_journal, settle_journal
from expstore.storages.format.lineage import COLLECT, Step
from expstore.storages.format.manifest import MANIFEST, Manifest
from expstore.storages.format.paths import CHECKSUMS, COLUMNS, JOURNAL, LOG
from expstore.storages.format.records import Publish, Redo, load_redo
from expstore.storages.format.row_changes import RowChanges
from expstore.storages.format.swap import finish_swap
from expstore.storages.format.write_key_file import KEYS, KeyFile
from expstore.storages.recovery.recover import (
    Past,
    check_dims,
    describe_past,
    explain_lost_records,
    find_changed_ids,
    find_pending_changes,
    find_unsettled_blocks,
    read_past,
    rebuild_episodes,
    verify,
)
from expstore.storages.row_state import RowState


@dataclass(frozen=True)
class Opened:
    """The result of an opening.

    Args:
        store: The open store.
        manifest: The contents of expstore.json.
        first: Whether this process has not returned rows of this content before.
        recovered: A line about what was recovered; None: the last writer had closed the store.
    """

    store: OpenStore
    manifest: Manifest
    first: bool
    recovered: str | None


def make_columns(
    disk: Disk,
    path: Path,
    manifest: Manifest,
    schema: Schema,
    *,
    generation: int,
    packings: Sequence[Packing | None] | None = None,
) -> WritableColumns:
    """Return the columns of a store; no file is opened yet.

    Args:
        disk: The disk on which files are accessed.
        path: The store's folder.
        manifest: The contents of expstore.json.
        schema: The fields.
        generation: The number of the opening.
        packings: How each field is packed, where the columns were created just before.
    """
    return WritableColumns(
        disk,
        path / COLUMNS,
        (*schema.fields, *ROW_FIELDS),
        manifest.geometry.slots,
        reach=manifest.geometry.reach,
        compression=manifest.compression,
        generation=generation,
        packings=packings,
    )


class Opening:
    """One opening of a store for writing.

    It changes nothing that is in use: the storage adopts the result of `run` by one assignment. If `run`
    fails, everything that it has opened is closed again.

    Crashes: the process may die between any two steps; the next opening finds the same rows. What recovery
    accepts is synced before the new segment of the journal refers to it.

    Args:
        disk: The disk on which files are accessed.
        path: The store's folder.
        manifest: The contents of expstore.json.
        shared: The control page STATE.
        order: The lock order of the storage.
        pool: Threads that fsync.
        segment_bytes: The length of a segment of the journal, bytes.
        counts: Whether to count how often rows are sampled.
        may_tidy: Whether files may be removed or replaced: no snapshot is being copied.
        counted: Called after rows were counted as sampled.
        former: The rows before the opening, from which the new ones take the session, the episodes that it
            has adopted, the watchers of priorities, and the next draw of the same content.
        first: Whether this process has not returned rows of this content before.
    """

    def __init__(
        self,
        disk: Disk,
        path: Path,
        manifest: Manifest,
        *,
        shared: SharedState,
        order: LockOrder,
        pool: Threads,
        segment_bytes: int,
        counts: bool,
        may_tidy: bool,
        counted: Callable[[], None],
        former: RowState,
        first: bool,
    ) -> None:
        self._disk, self._path, self._manifest = disk, path, manifest
        self._shared, self._order, self._pool = shared, order, pool
        self._segment_bytes, self._counts, self._may_tidy = segment_bytes, counts, may_tidy
        self._counted = counted
        self._former, self._first = former, first
        self._same_boot = False

    def run(self) -> Opened:
        """Recover the store and open it.

        Raises:
            CorruptionError: The store is damaged.
            StorageError: The disk failed; the next opening finds the store in the same state.
        """
        first = self._finish_swap() or self._first
        former = self._manifest
        self._same_boot = self._shared.fits(former.uuid, former.generation)
        past = self._read_journal()
        if past is not None and not past.clean:
            settle_journal(self._disk, self._path / JOURNAL)
        with contextlib.ExitStack() as opened:
            priorities = StoredPriorities(self._order, self._former.priorities)
            rows = RowState(episodes=self._empty_episodes(past, first=first), priorities=priorities)
            checksums, sampled = None, None
            columns = self._open_columns()
            if columns is not None:
                opened.callback(columns.close)
                checksums = Checksums(self._disk, self._path / CHECKSUMS, columns)
                opened.callback(checksums.close)
                sampled = self._open_counts(columns)
                if sampled is not None:
                    opened.callback(sampled.close)
            log = EpisodeLog(self._disk, self._path / LOG, length=past.log_length if past else 0)
            opened.callback(log.close)
            cut: list[LogEntry] = []
            draws = self._former.draws
            if past is not None:
                log.append(self._recover_rows(past, rows, columns))
                if columns is not None and columns.annotations is not None:
                    is_sure = self._same_boot or past.clean
                    columns.annotations.recover(past.annotated, rows.last, is_sure=is_sure)
                self._drop_index(past)
                if columns is not None:
                    self._load_priorities(past, priorities, columns)
                if sampled is not None:
                    self._load_counts(past, rows, sampled)
                if first or draws.replaced:  # otherwise memory is newer than what was stored
                    draws = self._restore_draws(past)
                cut = rows.episodes.end_local(now_us(), past.state.sequence) if first else []
                log.append(cut)
            keys = self._open_keys(past)
            opened.callback(keys.close)
            sequence = past.state.sequence if past else 0
            row_changes = RowChanges(self._disk, self._path)
            opened.callback(row_changes.close)
            if past is not None:
                find = None if past.clean else partial(find_changed_ids, past, self._load_redo)
                row_changes.recover(sequence, find, rows.stored)
            session = rows.episodes.session.id
            step = Step(COLLECT, now_us(), store=former.uuid, session=session, facts=describe_program())
            manifest = former.replace(
                generation=former.generation + 1,
                deleted=rows.stored.deleted,
                lineage=former.lineage.begin(step, rows.last),
            )
            if cut:  # the index does not know that these episodes have ended
                rows.note_content((manifest.generation, sequence + 1))
            if first:
                rows.episodes.generation = manifest.generation
            journal = Journal(
                self._disk,
                self._path / JOURNAL,
                uuid=manifest.uuid,
                generation=manifest.generation,
                sequence=sequence,
                segment_bytes=self._segment_bytes,
            )
            opened.callback(journal.close)
            store = OpenStore(
                stored=rows.stored,
                horizon=rows.horizon,
                retired=rows.retired,
                write_count=rows.write_count,
                episodes=rows.episodes,
                priorities=priorities,
                write_keys=keys,
                sampled=sampled,
                content=rows.content,
                index_floor=rows.index_floor,
                journal=journal,
                log=log,
                columns=columns,
                checksums=checksums,
                memtable=Memtable(self._order, priorities),
                draws=draws,
                row_changes=row_changes,
                annotations=None if columns is None else columns.annotations,
            )
            self._make_durable(past, store)
            if past is not None and not past.clean:
                cut_logs(self._disk, self._path, store.last, sequence)  # before numbers are used again
            priorities.trim(rows.last, rows.last)
            self._begin_generation(store, manifest)
            opened.pop_all()
        recovered = describe_past(past, sum(entry.episode > 0 for entry in cut)) if past else None
        return Opened(store, manifest, first, recovered)

    # -- reading the files -----------------------------------------------------------------------------

    def _finish_swap(self) -> bool:
        """Finish a restore or a change of fields that was interrupted; return whether it was a restore."""
        change = finish_swap(self._disk, self._path)
        if change is None:
            return False
        self._manifest = Manifest.load(self._disk, self._path)
        restored = JOURNAL in change.replaced
        if restored:
            self._former.draws.note_replaced()
        return restored

    def _read_journal(self) -> Past | None:
        """Read the journal; return None if the store is new."""
        folder = self._path / JOURNAL
        records = read_journal(self._disk, folder)
        if not records:
            if self._manifest.schema is not None:
                raise no_records(self._disk, folder)
            return None
        past = read_past(records, self._manifest.deleted)
        lost = explain_lost_records(self._shared.page, past, fits=self._same_boot)
        if lost:
            raise CorruptionError(f"{folder} {lost}")
        return past

    def _empty_episodes(self, past: Past | None, *, first: bool) -> EpisodeTable:
        former = self._former.episodes
        generation = former.generation
        if first:  # an opening that was killed may have raised it without writing anything
            generation = past.base["generation"] if past else self._manifest.generation
        table = EpisodeTable(generation=generation, session=former.session.id)
        if not first:
            table.heirs = copy.deepcopy(former.heirs)
        return table

    def _open_columns(self) -> WritableColumns | None:
        """Open the columns; return None if there are no fields yet."""
        schema = self._manifest.schema
        if schema is None:
            return None
        generation = self._manifest.generation + 1
        columns = make_columns(self._disk, self._path, self._manifest, schema, generation=generation)
        columns.check_metadata()
        columns.open_shards()
        columns.warm()
        return columns

    def _open_counts(self, columns: WritableColumns) -> SampledColumn | None:
        """Open the column of sample counts; return None if rows are not counted."""
        slots = self._manifest.geometry.slots
        if not has_sampled(self._disk, columns.folder):
            if not self._counts:
                return None
            SampledColumn.make(self._disk, columns.folder, slots, ready=columns.ready, pool=self._pool)
        return SampledColumn(self._disk, columns.folder, slots, changed=self._counted)

    def _open_keys(self, past: Past | None) -> KeyFile:
        """Open the keys of existing rows: from the file if a checkpoint covers them, else from records."""
        covered = 0 if past is None else min(past.synced, past.state.last)
        keys = KeyFile(
            self._disk,
            self._path / KEYS,
            expected=self._manifest.keyed,
            covered=covered,
            known=past.base.get("write_keys", 0) if past else 0,
            now=now_us(),
        )
        for publish in past.publishes if past else []:
            if publish.key is not None and publish.last_id > covered:
                keys.note(publish.key, publish.first_id, publish.count, publish.time)
        return keys

    # -- recovering rows --------------------------------------------------------------------------------

    def _recover_rows(self, past: Past, rows: RowState, columns: WritableColumns | None) -> list[LogEntry]:
        """Bring rows and columns to the state that the records describe.

        Returns:
            Log entries of what was committed after the checkpoint, because episodes.log may have lost them.
        """
        manifest, capacity = self._manifest, self._manifest.geometry.capacity
        verify(past, lambda publish: self._is_whole(publish, columns, past.synced), manifest.column_set)
        check_dims(manifest.geometry, past)
        low, last = past.state.find_low(capacity), past.state.last
        if columns is not None:
            for first, count in Window(low, last, past.deleted).runs():
                columns.require_rows(first, count)
            self._redo(past, columns)

        def numbers(first_id: int, count: int) -> tuple[IntArray, IntArray] | None:
            return None if columns is None else self._read_numbers(past, columns, first_id, count)

        entries = rebuild_episodes(past, rows.episodes, low, numbers)
        rows.recover(past.state, past.find_stored(capacity))
        return entries

    def _is_whole(self, publish: Publish, columns: WritableColumns | None, synced: int) -> bool:
        """Return whether all rows of a record exist; rows that the record contains are written again."""
        if columns is None:
            return False
        if publish.payload:
            self._write_rows(publish, columns, synced)
            return True
        written = self._manifest.geometry.runs(*publish.written)
        if self._same_boot:
            columns.require(written)  # only a power failure can lose a shard whose rows were committed
        # A matching checksum alone is not enough: older rows in the same slots may be byte-identical.
        if columns.lacks(*publish.written) or columns.checksum(*publish.written) != publish.checksum:
            return False
        # The priorities have no checksum, and their shard may be lost: in this case they are taken from the
        # record.
        columns.ensure(max((slot + n for slot, _, n in written), default=0))
        return True

    def _write_rows(self, publish: Publish, columns: WritableColumns, synced: int) -> None:
        """Write the rows that a record contains to the columns."""
        runs = self._manifest.geometry.runs(publish.first_id, publish.count)
        parts = split_payload(columns, publish.payload, publish.count)
        # Priorities are written first, times last: if the times are there, the priorities are, too, perhaps
        # newer ones. Compare times as well as ids: after a power failure ids above the last durable row are
        # reused.
        ids, _, _, times, _ = columns.row_fields
        there = all(
            slot + n <= columns.ready
            and (ids.read(slot, n) == np.arange(n) + publish.first_id + offset).all()
            and (times.read(slot, n) == publish.time).all()
            for slot, offset, n in runs
        )
        priorities = None if there else np.full(publish.count, publish.priority, np.float32)
        columns.write_parts(runs, parts, priorities, synced=synced)

    def _redo(self, past: Past, columns: WritableColumns) -> None:
        """Reapply the updates after the checkpoint."""
        geometry = self._manifest.geometry

        def times(ids: IntArray) -> IntArray:
            return columns.row_fields[3].gather(geometry.slot_of(ids))

        known = times if self._same_boot or past.clean else None
        for redo in find_pending_changes(past, geometry.slots, self._load_redo, known):
            for place, values in zip(redo.places, redo.columns, strict=True):
                columns.columns[place].write_rows(geometry.slot_of(redo.ids), values)

    def _load_redo(self, body: bytes) -> Redo:
        """Read an update record, from its own file if it was too long for the journal."""
        schema = self._manifest.schema
        if schema is None:
            raise CorruptionError(f"{self._path / JOURNAL} changes rows of a store without fields")
        return load_redo(self._disk, self._path, body, schema)

    def _read_numbers(
        self, past: Past, columns: WritableColumns, first_id: int, count: int
    ) -> tuple[IntArray, IntArray]:
        """Read the episodes and steps of a run of rows."""
        runs = self._manifest.geometry.runs(first_id, count)
        # Not by the map: the pages of all stored rows would stay resident.
        episodes, steps = (
            np.concatenate([column.read(slot, n) for slot, _, n in runs])
            for column in columns.row_fields[1:3]
        )
        ids = np.arange(first_id, first_id + count)
        if ((episodes < 1) & ~past.deleted.holds(ids)).any():
            raise CorruptionError(f"{self._path}/columns/_row/episode has rows without an episode")
        return episodes, steps

    def _drop_index(self, past: Past) -> None:
        """Remove the index if it may contain records that the journal has lost."""
        if past.cut or not (self._same_boot or past.clean):
            for name in ("index.duckdb", "index.duckdb.wal"):
                self._disk.unlink(self._path / name)

    def _load_priorities(self, past: Past, priorities: StoredPriorities, columns: WritableColumns) -> None:
        """Load the priorities; after a power failure, those after the checkpoint come from records."""
        slots, whole = self._manifest.geometry.slots, self._same_boot or past.clean
        last, window = past.state.last, Description.of(self._manifest).window_rows
        base = find_base(last, window) if whole else 0  # otherwise all of them are written again
        values = np.ones(slots if slots is not None else max(4096, 2 * (last - base)), np.float32)
        column = columns.row_fields[-1]
        known = min(values.size, column.ready - base)
        values[:known] = column.read(base, known)
        if not whole:
            for publish in past.find_unsynced():
                for slot, _, n in self._manifest.geometry.runs(*publish.written):
                    values[slot : slot + n] = publish.priority
        # After a power failure the whole column is written again, because it is unknown which pages were
        # lost.
        priorities.load(values, dirty=not whole, column=column, base=base, window=window)

    def _load_counts(self, past: Past, rows: RowState, sampled: SampledColumn) -> None:
        """Load the sample counts; after a power failure, counts of rows after the checkpoint start at 0."""
        slots, whole = self._manifest.geometry.slots, self._same_boot or past.clean
        last = past.state.last
        newest = last if whole else min(last, past.synced)
        if newest > rows.stored.low:
            sampled.require(newest if slots is None else min(newest, slots))
        before = max(past.synced, rows.stored.low)
        if not whole and last > before:  # exactly the rows that are written again: others must not change
            sampled.forget(self._manifest.geometry.runs(before + 1, last - before))

    def _restore_draws(self, past: Past) -> DrawState:
        """Return the state of the draws in the journal and in STATE."""
        state = past.state
        numbers = state.draw, state.progress, state.limits, state.randomness
        draws = DrawState(*numbers, order=self._order, sink=self._shared)
        page = self._shared.page
        if self._same_boot and page.get("generation") >= past.base["generation"]:
            # Otherwise the page is from before a restore.
            draws.number = max(draws.number, page.get("draw"))
            draws.progress = page.get_progress() or draws.progress
            draws.limits = page.get("sampled"), page.get("limiter")
        return draws

    # -- syncing -----------------------------------------------------------------------------------------

    def _make_durable(self, past: Past | None, store: OpenStore) -> None:
        """Sync what recovery accepted, before a new segment refers to it."""
        columns = store.columns
        if columns is not None:
            columns.settle(store.last, store.last if past is None else past.synced)
            for segments in columns.shared:
                segments.note_left(*store.tombstones(self._manifest.geometry.slots))
        store.log.flush()
        store.write_keys.flush()
        if past is not None and not (past.clean and not store.log.dirty and not store.write_keys.unsynced):
            files, folders = self._rewrite(past, store)
            files |= {store.log.file, *store.write_keys.unsynced}
            self._disk.sync_all(files, sorted({self._path, *folders}), self._pool)
            store.write_keys.completed(tidy=True)
        if columns is not None and past is not None and not past.clean:
            columns.synced()
            columns.completed(tidy=self._may_tidy)
        if store.checksums is not None:  # missing checksums are added in several steps
            store.checksums.note_changed(store.checksums.find_missing(self._readable_blocks(store)))

    def _rewrite(self, past: Past, store: OpenStore) -> tuple[set[File], set[Path]]:
        """Write the rows after the checkpoint again; return the files and folders to be synced."""
        files: set[File] = set()
        folders: set[Path] = set()
        columns = store.columns
        if columns is None or past.clean:
            return files, folders
        geometry = self._manifest.geometry
        before = max(past.synced, store.stored.low)
        if store.last > before:
            newer = geometry.runs(before + 1, store.last - before)
            columns.rewrite(newer)
            if store.sampled is not None:
                store.sampled.rewrite(newer)
        if store.sampled is not None and store.sampled.owes:
            store.sampled.settle()
        columns.touched |= store.priorities.write(columns.row_fields[-1])
        files.add(self._sum_unsettled(past, store))
        files |= columns.begin_opening(*store.tombstones(geometry.slots))
        folders |= store.take_new_folders()
        for column in [*columns.flat.values(), *([] if store.sampled is None else [store.sampled.column])]:
            files.update(column.files)
            for number in range(len(column.files)):
                shard = column.shard_path(number)
                folders.update(p for p in shard.parents if p.is_relative_to(column.folder))
        return files, folders

    def _sum_unsettled(self, past: Past, store: OpenStore) -> File:
        """Sum again all blocks that the last writer may have changed after its last checkpoint.

        Only the entries of these blocks may be lost, or may describe bytes that were lost.
        """
        columns, checksums = store.columns, store.checksums
        if columns is None or checksums is None:
            raise StateError("the store has no columns yet", hint="extend() it first")
        geometry = self._manifest.geometry
        # The entries may describe shards that were lost.
        limit = max(checksums.blocks * BLOCK_ROWS, *[column.ready for column in columns.flat.values()])
        touched = find_unsettled_blocks(
            past,
            slots=geometry.slots,
            spare=geometry.spare,
            horizon=self._shared.page.get("horizon") if self._same_boot else None,
            limit=limit,
            load=self._load_redo,
        )
        readable = self._readable_blocks(store)
        generation = self._manifest.generation + 1
        checksums.update(touched & readable, generation=generation, sequence=past.state.sequence)
        blocks = {block for block in touched - readable if block * BLOCK_ROWS < limit}
        checksums.give_up(blocks, generation=generation)
        return checksums.file

    def _readable_blocks(self, store: OpenStore) -> set[int]:
        window = store.stored
        if not window.size:
            return set()
        return blocks_of(self._manifest.geometry.runs(window.low + 1, window.size))

    def _begin_generation(self, store: OpenStore, manifest: Manifest) -> None:
        """Start a durable segment of the journal, remove the former segments, then update STATE."""
        manifest.save(self._disk, self._path)
        journal = store.journal
        journal.start_segment(store.base_record(manifest.generation, opening=True))
        self._disk.sync_all(journal.sync_files(), [], None)
        self._disk.sync_dir(journal.folder)
        journal.cut()
        self._claim(store, manifest)

    def _claim(self, store: OpenStore, manifest: Manifest) -> None:
        """Initialize the control page, after everything else in the opening is done."""
        self._shared.claim(
            manifest.uuid,
            generation=manifest.generation,
            sequence=store.journal.sequence,
            horizon=store.horizon,
            retired=store.retired,
            last=store.last,
            draws=store.draws,
            splits=bool(store.episodes.split_names),
        )


@contextlib.contextmanager
def explain_full_disk(disk: Disk, path: Path, manifest: Manifest) -> Iterator[None]:
    """Add the space that an opening needs to the error of a full disk."""
    try:
        yield
    except StorageError as exc:
        if exc.kind == "disk_full":
            need = _opening_bytes(disk, path, manifest)
            exc.hint = f"opening the store takes about {need} bytes of free space"
        raise


def _opening_bytes(disk: Disk, path: Path, manifest: Manifest) -> int:
    """Return roughly how many bytes an opening needs: expstore.json, a segment, rows after the checkpoint."""
    need = 4 * PAGE + 2 * disk.size(path / MANIFEST)
    records = read_journal(disk, path / JOURNAL)
    past = read_past(records, manifest.deleted) if records else None
    if past is None or past.clean or manifest.schema is None:
        return need
    columns = len(manifest.schema.fields) + len(ROW_FIELDS)
    return need + sum(len(r.body) for r in past.records[past.settled :]) + 2 * PAGE * columns
