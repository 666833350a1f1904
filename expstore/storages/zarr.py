"""Rows on disk: Zarr v3 columns, published by a journal.

The storage behind `expstore.open`. Opening is in `recovery`, the files' layout in `columns`; here are
the acts of PROTOCOL in their order. It never runs zarr-python when rows are written or read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from expstore.episodelog import EpisodeLog, LogEntry
from expstore.episodes import EpisodeTable
from expstore.errors import CorruptionError, ExpStoreError, StateError, StorageError
from expstore.files import Disk, File
from expstore.journal import SEGMENT_BYTES, Journal, Kind, read_journal, settle_journal
from expstore.schema import Schema
from expstore.state import StatePage
from expstore.storages.base import ROW_FIELDS, CatalogLike, Keys, Rows, Storage, find_keys
from expstore.storages.columns import ColumnGroup
from expstore.storages.keeper import Keeper
from expstore.storages.records import Mark, Publish, Redo
from expstore.storages.recovery import Past, describe_past, read_past, take_over
from expstore.storages.settings import Settings, enter
from expstore.storages.tail import TAIL_BYTES, TAIL_ROWS, Tail
from expstore.types import Array, IntArray, Window

__all__ = ["ZarrStorage"]

#: Redo records keep up to this many bytes themselves; more go to a file of their own.
REDO_BYTES = 64 << 20
PAGE_ROWS = 1024  # priorities per 4 KiB page
_JOURNAL, _LOG, _COLUMNS, _REDO = "journal", "episodes.log", "columns", "redo"


class ZarrStorage(Storage):
    """Keep rows in a folder, for as long as the experiment lives.

    Crashes: what `write` published survives the process at once, and the machine after the next `sync`
    (about one second later, or `flush`). A batch is there whole or not at all. Threads: as `Storage`.
    Processes: one writer, the next one gets LockedError; a forked child cannot write.

    Args:
        path: The store's folder; made if it is missing.
        capacity: Most readable rows; None: as stored, unbounded for a new store.
        settings: Everything else; see `expstore.open`.
        disk: Where files are touched.

    Raises:
        LockedError: Another buffer has it open.
        StateError: A setting contradicts the store.
        CorruptionError: The store is damaged.
    """

    kind = "zarr"

    def __init__(
        self,
        path: str | Path,
        capacity: int | None = None,
        *,
        settings: Settings | None = None,
        disk: Disk | None = None,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self.path = Path(path)
        disk = disk or Disk()
        self._segment_bytes = segment_bytes
        self._lock_file, self.manifest = enter(disk, self.path, capacity, settings or Settings())
        super().__init__(self.manifest.capacity)
        self.disk = disk
        self.uuid = self.manifest.uuid
        self.index_path = self.path / "index.duckdb"
        self._catalog: CatalogLike | None = None
        self.seed = self.manifest.seed
        self.spare = self.manifest.spare
        self.flatten = self.manifest.flatten
        self._sync_lock = threading.Lock()
        self._priority_lock = threading.Lock()
        self._failure: ExpStoreError | None = None
        self._critical = _Critical(self)
        self._tail = Tail()
        self._payload = b""
        self._unsure = False
        self._touched: set[File] = set()
        self.columns: ColumnGroup | None = None
        self._pool = ThreadPoolExecutor(8, thread_name_prefix="expstore-sync")
        self._uuid = bytes.fromhex(self.manifest.uuid)
        self._boot = self.disk.boot_id()
        try:
            self._state = StatePage(self.disk, self.path / "STATE")
            self._open(first=True)
        except BaseException:
            self._pool.shutdown()
            self._lock_file.release()
            raise
        self._keeper = Keeper(self)

    # -- opening ---------------------------------------------------------------------------------

    def _open(self, *, first: bool) -> None:
        """Take over the last whole state, then start a journal segment of a new generation."""
        self._tail.drop()
        self._payload = b""
        manifest = self.manifest
        records = read_journal(self.disk, self.path / _JOURNAL)
        past = read_past(records) if records else None
        if past is None and manifest.schema is not None:
            raise CorruptionError(
                f"{self.path / _JOURNAL} has no segment that can be read, though rows were written"
            )
        if past is not None and not past.clean:
            settle_journal(self.disk, self.path / _JOURNAL)
        self.episodes = EpisodeTable(generation=manifest.generation)
        self._open_columns(past)
        self._log = EpisodeLog(self.disk, self.path / _LOG, length=past.log_length if past else 0)
        cut: list[LogEntry] = []
        if past is not None:
            self._log.append(take_over(past, self))
            self.content, self.index_floor = past.content, past.index_floor
            self._adopt(past)
            cut = self.episodes.cut_unnamed(past.sequence) if first else []
            self._log.append(cut)
        sequence = past.sequence if past else 0
        self.manifest = manifest.replace(generation=manifest.generation + 1)
        if cut:
            self.content = (self.manifest.generation, sequence + 1)  # the index has not heard of these ends
        if first:
            self.episodes.generation = self.manifest.generation
            self.counters.recovered = describe_past(past, len(cut)) if past else None
        self._settle(past)
        self.manifest.save(self.disk, self.path)
        self._journal = Journal(
            self.disk,
            self.path / _JOURNAL,
            uuid=manifest.uuid,
            generation=self.manifest.generation,
            sequence=sequence,
            segment_bytes=self._segment_bytes,
        )
        self._journal.start_segment(self._base(opening=True))
        self.disk.sync_all(self._journal.sync_files(), [], None)
        self.disk.sync_dir(self._journal.folder)
        self._journal.cut()
        self._claim_state()
        self._marked = (self._journal.sequence, self._draw)
        self._synced = self.last

    def _open_columns(self, past: Past | None) -> None:
        schema = self.manifest.schema
        if schema is None:
            return
        self.schema, self.keys = schema, self.resolve_keys(schema)
        if self.columns is not None:
            self.columns.close()
        slots = self.slots
        self.columns = ColumnGroup(self.disk, self.path / _COLUMNS, (*schema.fields, *ROW_FIELDS), slots)
        synced = past.synced if past else 0
        self.columns.open_shards(synced if slots is None else min(synced, slots))

    def _adopt(self, past: Past) -> None:
        """Take over numbers, window and priorities."""
        self.retired, self.max_priority = past.retired, past.max_priority
        self.horizon = past.last
        self._window = Window(past.window_low(self.capacity), past.last)
        self._draw = past.draw
        same_boot = self._state.fits(self._uuid, self._boot, self.manifest.generation)
        if same_boot:
            self._draw = max(self._draw, self._state.get("draw"))
        if past.cut or not (same_boot or past.clean):
            # The index may hold what the journal has lost.
            for name in ("index.duckdb", "index.duckdb.wal"):
                self.disk.unlink(self.path / name)
        same_boot = same_boot or past.clean
        if self.columns is None:
            return
        column = self.columns.columns[-1]
        size = self.slots if self.slots is not None else max(4096, 2 * past.last)
        self.priorities = np.ones(size, np.float32)
        known = min(size, column.ready)
        self.priorities[:known] = column.view[:known]
        if not same_boot:
            for publish in past.publishes:
                if publish.last_id > past.synced:
                    for slot, _, n in self.pieces(publish.first_id, publish.count):
                        self.priorities[slot : slot + n] = publish.priority
        # After a power cut the whole column is written again: which pages were lost is not known.
        self._dirty_pages = np.full(-(-size // PAGE_ROWS), not same_boot)

    def _settle(self, past: Past | None) -> None:
        """Bring what recovery accepted to the disk, before a new base says that it is there."""
        if past is None or (past.clean and not self._log.dirty):
            return
        files: set[File] = {self._log.file}
        if self.columns is not None:
            newer = self.last - past.synced
            if newer > 0:
                pieces = self.pieces(past.synced + 1, newer)
                pieces = [piece for piece in pieces if piece[0] + piece[2] <= self.columns.columns[0].ready]
                self.columns.rewrite(pieces)
            if not past.clean:
                files.update(file for column in self.columns.columns for file in column.files)
        folders = [self.path]
        if self.columns is not None and not past.clean:
            for column in self.columns.columns:
                for number in range(len(column.files)):
                    shard = column.shard_path(number)
                    folders += [p for p in shard.parents if p.is_relative_to(column.folder)]
        self.disk.sync_all(files, sorted(set(folders)), self._pool)

    def _claim_state(self) -> None:
        self._state.claim(
            self._uuid,
            self._boot,
            generation=self.manifest.generation,
            sequence=self._journal.sequence,
            horizon=self.horizon,
            last=self.last,
            draw=self._draw,
            change=0,
        )

    def _base(self, *, opening: bool) -> dict[str, object]:
        """Return what a base record keeps."""
        return {
            "opening": opening,
            "generation": self.manifest.generation,
            "content": self.content,
            "last": self.last,
            "retired": self.retired,
            "draw": self._draw,
            "max_priority": self.max_priority,
            "write_count": self.write_count,
            "log_length": self._log.length,
            "episodes": self.episodes.to_base(),
        }

    def _create(self, schema: Schema, keys: Keys) -> None:
        pool, folder = self._pool, self.path / _COLUMNS
        fields = (*schema.fields, *ROW_FIELDS)
        slots = self.slots
        attributes = {"expstore": {"capacity": self.capacity, "slots": slots}}
        ColumnGroup.create(self.disk, folder, fields, slots, pool, attributes)
        manifest = self.manifest.replace(schema=schema, spare=self.spare)
        manifest.save(self.disk, self.path)
        self.manifest = manifest
        self.columns = ColumnGroup(self.disk, folder, fields, slots)
        size = 4096 if slots is None else slots
        self.priorities = np.full(size, self.max_priority, np.float32)
        self._dirty_pages = np.zeros(-(-size // PAGE_ROWS), bool)

    # -- extend ----------------------------------------------------------------------------------

    def _make_room(self, count: int) -> None:
        """Wait until rows in flight and rows not yet synced fit into the spare slots."""
        self.disk.warm()
        if count > self.spare:
            self.sync()
            if self.slots is not None:
                through = min(self.last, self.last + count - self.slots)
                if through > self._window.low:
                    self.retire(through)
            return
        free = self.spare - (self.last - self._synced)
        if 2 * (free - count) < self.spare:
            self._keeper.hurry()
        if count > free:
            started = time.monotonic()
            self._sync(lambda: self.last + count - self._synced <= self.spare)
            self.counters.waits += 1
            self.counters.wait_seconds += time.monotonic() - started

    def _put(self, rows: Rows, skipped: int) -> int:
        columns = self.columns
        if columns is None:
            raise StateError("the store has no columns yet", hint="extend() it first")
        assignment = rows.assignment
        count = rows.count
        if count <= TAIL_ROWS and count * columns.row_bytes <= TAIL_BYTES:
            return self._put_in_tail(rows)
        extra = (
            rows.ids,
            assignment.episodes,
            assignment.steps,
            np.full(count, rows.time, np.int64),
            np.full(count, self.max_priority, np.float32),
        )
        arrays = [*rows.columns, *extra]
        self.drain()
        if skipped:
            arrays = [array[skipped:] for array in arrays]
        first, written = rows.first_id + skipped, count - skipped
        with self._priority_lock:  # a page of older priorities must not be written after these
            self._fill_priorities(first, written)
            self._grow_pages()
            return columns.write(self.pieces(first, written), arrays)

    def _put_in_tail(self, rows: Rows) -> int:
        """Keep few rows back: their publish record will carry their bytes."""
        if self._tail.full:
            self.drain()
        assignment = rows.assignment
        parts = [array.tobytes() for array in rows.columns]
        parts += [rows.ids.tobytes(), assignment.episodes.tobytes(), assignment.steps.tobytes()]
        parts.append(rows.time.to_bytes(8, "little") * rows.count)
        self._payload = b"".join(parts)
        self._fill_priorities(rows.first_id, rows.count)
        self._grow_pages()
        self._tail.add(rows.first_id, rows.count, parts)
        crc: int = google_crc32c.value(self._payload)
        return crc

    def drain(self) -> None:
        """Write to the columns what the tail has."""
        tail, columns = self._tail, self.columns
        if not tail.count or columns is None:
            return
        with tail.lock, self._priority_lock:
            if tail.count:
                pieces = self.pieces(tail.first_id, tail.count)
                priorities = np.concatenate([self.priorities[slot : slot + n] for slot, _, n in pieces])
                tail.drain(columns, pieces, priorities)

    def _publish(self, rows: Rows, skipped: int, checksum: int) -> None:
        payload, self._payload = self._payload, b""
        assignment = rows.assignment
        publish = Publish(
            first_id=rows.first_id,
            count=rows.count,
            skipped=skipped,
            draw=self._draw,
            time=rows.time,
            checksum=checksum,
            priority=self.max_priority,
            segments=assignment.segments,
            sources=assignment.sources,
            payload=payload,
        )
        body = publish.pack()
        with self._critical:
            sequence = self._append(Kind.PUBLISH, body)
            entries = self.episodes.commit(
                assignment.segments,
                assignment.sources,
                first_id=rows.first_id,
                time=rows.time,
                sequence=sequence,
            )
            self._log.append(entries)
            self._advance(publish.last_id, count=rows.count)
            self.content = (self.manifest.generation, sequence)
        self._state.set("last", publish.last_id)
        self._state.set("sequence", sequence)
        self._keeper.note()
        if rows.count > self.spare:
            self.sync()  # it has cost rows that were on the disk

    def _grow_pages(self) -> None:
        if self._dirty_pages.size * PAGE_ROWS < self.priorities.size:
            more = -(-self.priorities.size // PAGE_ROWS) - self._dirty_pages.size
            self._dirty_pages = np.append(self._dirty_pages, np.zeros(more, bool))

    def _append(self, kind: Kind, body: bytes) -> int:
        """Append a record, in a new segment if this one is full. The journal lock is held."""
        if not self._journal.fits(len(body)):
            self._journal.start_segment(self._base(opening=False), room=len(body))
            self._keeper.hurry()
        return self._journal.append(kind, body)

    # -- sync ------------------------------------------------------------------------------------

    def sync(self) -> None:
        """Bring everything that was published, and priorities and draws, to the disk.

        Raises:
            StorageError: The disk failed; the store must be opened again.
        """
        self._sync(None)

    def _sync(self, enough: object) -> None:
        with self._sync_lock:
            if self._closed or (callable(enough) and enough()):
                return
            if self._failure is not None:
                raise self._refusal()
            try:
                self._sync_now()
            except (StorageError, StateError) as exc:
                # After a failed fsync the page cache may call lost bytes clean: never try again.
                self._failure = exc
                raise
            self.counters.syncs += 1

    def _sync_now(self) -> None:
        """Run the sync of PROTOCOL: columns, journal, mark, journal."""
        self.flush_priorities()
        with self.episode_lock:
            self.drain()
            journal = self._journal
            mark = Mark(
                sequence=journal.sequence,
                last_id=self.last,
                log_length=self._log.length,
                draw=self._draw,
                write_count=self.write_count,
                max_priority=self.max_priority,
            )
            files, folders = self._unsynced_files()
            segments = journal.sync_files()
            rotated = journal.rotated
        if not files and self._marked == (mark.sequence, mark.draw) and not rotated:
            return
        self.disk.sync_all(files, folders, self._pool)
        self.disk.sync_all(segments, [journal.folder] if rotated else [], None)
        with self.episode_lock:
            self._append(Kind.MARK, mark.pack())
            sequence = journal.sequence
            after = journal.sync_files()
        # All of them: if the mark began a segment, the one before it must not lose its end.
        self.disk.sync_all(after, [journal.folder] if len(after) > 1 else [], None)
        self._synced = mark.last_id
        self._marked = (sequence, mark.draw) if sequence == mark.sequence + 1 else (-1, -1)
        if rotated:
            self._cut(segments[-1])

    def _unsynced_files(self) -> tuple[set[File], set[Path]]:
        """Return what holds bytes that no mark covers. The journal lock is held."""
        files = self._touched
        self._touched = set()
        if self._log.dirty:
            files.add(self._log.file)
            self._log.dirty = False
        folders: set[Path] = set()
        if self.columns is not None:
            newer = min(self.last - self._synced, self.slots or self.last)
            if newer > 0:
                files |= self.columns.files_of(self.pieces(self.last - newer + 1, newer))
            folders, self.columns.new_folders = self.columns.new_folders, set()
        return files, folders

    def _cut(self, keep: File) -> None:
        """Remove the journal's segments before `keep`: all they say is on the disk, and in the index."""
        if self._catalog is not None:
            self._catalog.catch_up()
        with self.episode_lock:
            self._journal.cut(keep)

    def flush_priorities(self) -> None:
        """Write the pages of priorities that have changed, and the rows that were kept back."""
        if self.columns is None:
            return
        self.drain()
        with self._priority_lock:
            pages = np.flatnonzero(self._dirty_pages)
            if not pages.size:
                return
            column = self.columns.columns[-1]
            limit = min(column.ready, self.priorities.size)
            self._dirty_pages[pages] = False
            touched: set[File] = set()
            for run in np.split(pages, np.flatnonzero(np.diff(pages) != 1) + 1):
                start = int(run[0]) * PAGE_ROWS
                stop = min((int(run[-1]) + 1) * PAGE_ROWS, limit)
                for file, offset, row, n in column.spans(start, stop - start):
                    file.write(self.priorities[start + row : start + row + n].copy(), offset)
                    touched.add(file)
        with self.episode_lock:
            self._touched |= touched

    # -- change, retire, forget ------------------------------------------------------------------

    def _record_change(self, ids: IntArray, places: Sequence[int], columns: Sequence[Array]) -> None:
        if self.last > self._synced:
            self.sync()  # else a power cut could bring the change without the row it changes
        redo = Redo(ids, list(places), columns)
        body = redo.pack()
        if len(body) > REDO_BYTES:
            body = self._redo_file(body)
        with self._critical:
            self._append(Kind.REDO, body)
            segments = self._journal.sync_files()
        self.disk.sync_all(segments, [self._journal.folder] if len(segments) > 1 else [], None)

    def _redo_file(self, body: bytes) -> bytes:
        folder = self.path / _REDO
        self.disk.make_dir(folder)
        for name in self.disk.names(folder):  # the sync before has made the former ones superfluous
            self.disk.unlink(folder / name)
        name = f"{self._journal.sequence + 1:012d}"
        self.disk.write_whole(folder / name, body)
        return b"file" + name.encode()

    def load_redo(self, body: bytes, schema: Schema) -> Redo:
        """Read a redo record, from its own file if it was too long for the journal."""
        if body[:4] == b"file":
            body = self.disk.read_whole(self.path / _REDO / body[4:].decode())
        return Redo.unpack(body, schema)

    def _overwrite(self, slots: IntArray, places: Sequence[int], columns: Sequence[Array]) -> None:
        group = self.columns
        if group is None:
            return
        touched: set[File] = set()
        for place, values in zip(places, columns, strict=True):
            touched.update(group.columns[place].write_rows(slots, values))
        with self.episode_lock:
            self._touched |= touched
        self._keeper.note()

    def retire(self, through: int) -> None:
        """Give up the rows with ids <= `through`, for good; on the disk when this returns."""
        with self._critical:
            sequence = self._append(Kind.RETIRE, b'{"through": %d}' % through)
            super().retire(through)
            self.content = (self.manifest.generation, sequence)
        self.sync()

    def _forget(self, last: int) -> None:
        self.sync()
        with self._critical:
            sequence = self._append(Kind.DELETE, b'{"last": %d}' % last)
            super()._forget(last)
            self.content = (self.manifest.generation, sequence)
        self.sync()

    # -- reading ---------------------------------------------------------------------------------

    def _take(self, slots: IntArray, places: Sequence[int] | None) -> list[Array]:
        if self.columns is None:
            raise StateError("the store has no rows yet", hint="extend() it first")
        self.drain()
        columns = self.columns.columns
        wanted = columns[: -len(ROW_FIELDS)] if places is None else [columns[place] for place in places]
        return [column.take(slots) for column in wanted]

    def views(self, places: Sequence[int], first_id: int, count: int) -> list[list[Array]]:
        """View columns over a run of ids without copying."""
        if self.columns is None:
            return [[] for _ in places]
        self.drain()
        runs = self.pieces(first_id, count)
        columns = self.columns.columns
        found: list[list[Array]] = []
        for place in places:
            source = self.priorities if place == len(columns) - 1 else columns[place].view
            found.append([source[slot : slot + n] for slot, _, n in runs])
        return found

    def log_entries(self) -> Iterator[LogEntry]:
        """Return every entry of episodes.log in order."""
        return self._log.read()

    def resolve_keys(self, schema: Schema) -> Keys:
        """Find the fields that say what a row is to its episode."""
        wanted = self.manifest
        return find_keys(schema, trajectory=wanted.traj_key, ends=wanted.done_keys, reward=wanted.reward_key)

    def use_catalog(self, catalog: CatalogLike) -> None:
        """Hand changes to the index before they are forgotten."""
        self._catalog = catalog

    @property
    def can_write(self) -> bool:
        """Whether the storage is open for writing and sound."""
        sound = self._failure is None and not self._unsure
        return not self._closed and self._lock_file.held and sound

    def meta(self) -> dict[str, Any]:
        """Return the user's own facts."""
        return dict(self.manifest.meta)

    def more_stats(self) -> dict[str, Any]:
        """Return path, generation, and what waits for the disk."""
        return {
            "path": str(self.path),
            "generation": self.manifest.generation,
            "unsynced_rows": self.last - self._synced,
            "fsyncs": self.disk.syncs,
            "recovered": self.counters.recovered,
        }

    def facts(self) -> dict[str, Any]:
        """Return what the relation `meta` shows."""
        manifest = self.manifest
        return super().facts() | {"uuid": manifest.uuid, "created": manifest.created, **manifest.meta}

    # -- life ------------------------------------------------------------------------------------

    def check_writable(self) -> None:
        """Raise StateError unless rows can be written; after an interruption read the journal again."""
        super().check_writable()
        if not self._lock_file.held:
            raise StateError(
                f"{self.path} was opened by another process, of which this one is a fork",
                hint="open the store in the process that writes to it",
            )
        if self._failure is not None:
            raise self._refusal()
        if self._unsure:
            with self._sync_lock:
                self._close_files()
                self._open(first=False)
                self._unsure = False

    def _refusal(self) -> StateError:
        return StateError(
            f"{self.path} can no longer be written: {self._failure}",
            kind="poisoned",
            hint="close it and open it again",
        )

    def note_interruption(self) -> None:
        """Note that memory may lag behind the journal."""
        self._unsure = True

    def _note_draw(self, draw: int) -> None:
        self._state.set("draw", draw)

    def _note_horizon(self, horizon: int) -> None:
        self._state.set("horizon", horizon)

    def _note_priorities(self, slots: IntArray) -> None:
        self._dirty_pages[slots // PAGE_ROWS] = True
        self._keeper.note()

    def close(self) -> None:
        """Sync, note that all is well, and let others open the store."""
        if self._closed:
            return
        with self.lock:
            self._keeper.stop()
            try:
                if self.can_write:
                    self.sync()
                    with self.episode_lock:
                        self._append(Kind.CLOSE, b"{}")
                        segments = self._journal.sync_files()
                    self.disk.sync_all(segments, [], None)
            finally:
                self._closed = True
                self._close_files()
                self._state.close()
                self._pool.shutdown()
                self._lock_file.release()

    def _close_files(self) -> None:
        self._journal.close()
        self._log.close()
        if self.columns is not None:
            self.columns.close()


class _Critical:
    """Hold the episode lock; an interruption inside makes the next act read the journal again."""

    __slots__ = ("_storage",)

    def __init__(self, storage: ZarrStorage) -> None:
        self._storage = storage

    def __enter__(self) -> None:
        self._storage.episode_lock.acquire()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._storage.note_interruption()
        self._storage.episode_lock.release()
