"""A storage whose rows are published by a journal: open, publish, sync, change, close.

The acts of PROTOCOL in their order, for any kind of columns; `zarr` supplies these. Opening's judgement
of the past is in `recovery`. It never looks at values.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from expstore.episodelog import EpisodeLog, LogEntry
from expstore.episodes import EpisodeTable
from expstore.errors import CorruptionError, ExpStoreError, StateError, StorageError
from expstore.files import Disk, File
from expstore.journal import SEGMENT_BYTES, Journal, Kind, read_journal, settle_journal
from expstore.state import StatePage
from expstore.storages.base import CatalogLike, Rows
from expstore.storages.folder import JOURNAL, LOG, REDO, STATE, FolderStorage
from expstore.storages.keeper import Keeper
from expstore.storages.records import Mark, Publish, Redo, shelve_body
from expstore.storages.recovery import Past, describe_past, read_past, take_over
from expstore.storages.settings import Settings, enter
from expstore.types import Array, IntArray, Window

__all__ = ["JournaledStorage"]

_logger = logging.getLogger("expstore")


class JournaledStorage(FolderStorage):
    """Publish rows in a journal.

    Crashes: what `write` published survives the process at once, and the machine after the next `sync`.
    A batch is there whole or not at all. Threads: as `Storage`. Processes: one writer, the next one gets
    LockedError; a forked child cannot write.

    Args:
        path: The store's folder; made if it is missing.
        capacity: Most readable rows; None: as stored, unbounded for a new store.
        settings: Everything else; see `expstore.open`.
        disk: Where files are touched.
        segment_bytes: Length of a journal segment.
    """

    def __init__(
        self,
        path: str | Path,
        capacity: int | None = None,
        *,
        settings: Settings | None = None,
        disk: Disk | None = None,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        path, disk = Path(path), disk or Disk()
        self._segment_bytes = segment_bytes
        self._lock_file, manifest = enter(disk, path, capacity, settings or Settings())
        super().__init__(path, manifest, disk)
        self.index_path = self.path / "index.duckdb"
        self._catalog: CatalogLike | None = None
        self._sync_lock = threading.Lock()
        self._failure: ExpStoreError | None = None
        self._payload = b""
        self._half: int | None = None  # the last record before a change whose bytes are not all written
        self._unsure = False
        self._begin()
        self._pool = ThreadPoolExecutor(8, thread_name_prefix="expstore-sync")
        self._uuid = bytes.fromhex(self.manifest.uuid)
        self._boot = self.disk.boot_id()
        try:
            self._state = StatePage(self.disk, self.path / STATE)
            self._open(first=True)
        except BaseException:
            self._pool.shutdown()
            self._lock_file.release()
            raise
        self._keeper = Keeper(self)

    # -- opening ---------------------------------------------------------------------------------

    def _open(self, *, first: bool) -> None:
        """Take over the last whole state, then start a journal segment of a new generation."""
        self._half = None
        manifest = self.manifest
        records = read_journal(self.disk, self.path / JOURNAL)
        past = read_past(records) if records else None
        if past is None and manifest.schema is not None:
            raise CorruptionError(
                f"{self.path / JOURNAL} has no segment that can be read, though rows were written"
            )
        if past is not None and not past.clean:
            settle_journal(self.disk, self.path / JOURNAL)
        generation = self.episodes.generation
        if first:  # an opening that was killed has raised it without writing anything
            generation = past.base["generation"] if past else manifest.generation
        self.episodes = EpisodeTable(generation=generation)
        self._open_columns()
        self._log = EpisodeLog(self.disk, self.path / LOG, length=past.log_length if past else 0)
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
            self.path / JOURNAL,
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

    def _adopt(self, past: Past) -> None:
        """Take over numbers, window and priorities."""
        self.retired, self.max_priority = past.retired, past.max_priority
        self.horizon = past.last
        self._window = Window(past.window_low(self.capacity), past.last)
        self._draw = max(self._draw, past.draw)
        same_boot = self._state.fits(self._uuid, self._boot, self.manifest.generation)
        if same_boot:
            self._draw = max(self._draw, self._state.get("draw"))
        if past.cut or not (same_boot or past.clean):
            # The index may hold what the journal has lost.
            for name in ("index.duckdb", "index.duckdb.wal"):
                self.disk.unlink(self.path / name)
        self._adopt_priorities(past, whole=same_boot or past.clean)

    def _settle(self, past: Past | None) -> None:
        """Bring what recovery accepted to the disk, before a new base says that it is there."""
        self._log.flush()
        if past is None or (past.clean and not self._log.dirty):
            return
        files, folders = self._settle_columns(past)
        self.disk.sync_all({self._log.file, *files}, sorted({self.path, *folders}), self._pool)

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

    # -- extend ----------------------------------------------------------------------------------

    def _make_room(self, count: int) -> None:
        """Wait until rows in flight and rows not yet synced fit into the spare slots."""
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
        with self.episode_lock:
            try:
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
            except BaseException:
                self.note_interruption()  # before the lock goes: no mark may cover what memory lacks
                raise
        self._state.set("last", publish.last_id)
        self._state.set("sequence", sequence)
        self._keeper.note()
        if rows.count > self.spare:
            self.sync()  # it has cost rows that were on the disk

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

    def _sync(self, enough: Callable[[], bool] | None) -> None:
        with self._sync_lock:
            if self._closed or (enough is not None and enough()):
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
            if self._unsure:
                return  # the journal may hold rows of which memory does not know
            self.drain()
            self._log.flush()
            journal = self._journal
            half = self._half
            mark = Mark(
                sequence=journal.sequence if half is None else half,
                last_id=self.last,
                log_length=self._log.length,
                draw=self._draw,
                write_count=self.write_count,
                max_priority=self.max_priority,
            )
            files, folders = self._unsynced_columns()
            if self._log.dirty:
                files.add(self._log.file)
                self._log.dirty = False
            segments = journal.sync_files()
            rotated = journal.rotated
        if not files and self._marked == (mark.sequence, mark.draw) and not rotated:
            return
        self._sum_columns(mark.sequence)
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
        if rotated and half is None:
            self._cut(segments[-1])

    def _cut(self, keep: File) -> None:
        """Remove the journal's segments before `keep`: all they say is on the disk, and in the index."""
        try:
            if self._catalog is not None:
                self._catalog.catch_up()
        except ExpStoreError as exc:
            # The index is derived: one that has missed segments is built anew when it is next asked.
            _logger.warning("the index is behind: %s", exc)
        with self.episode_lock:
            self._journal.cut(keep)

    # -- change, retire, forget ------------------------------------------------------------------

    def _record_change(self, ids: IntArray, places: Sequence[int], columns: Sequence[Array]) -> None:
        if self.last > self._synced:
            self.sync()  # else a power cut could bring the change without the row it changes
        redo = Redo(ids, list(places), columns)
        number = self._journal.sequence + 1
        body = shelve_body(self.disk, self.path / REDO, number, redo.pack(), settle=self.sync)
        with self._sync_lock:  # a cut would close segments under this sync
            with self.episode_lock:
                self._half = self._append(Kind.REDO, body) - 1
                segments = self._journal.sync_files()
            try:
                self.disk.sync_all(segments, [self._journal.folder] if len(segments) > 1 else [], None)
            except StorageError as exc:
                self._failure = exc
                raise

    def retire(self, through: int) -> None:
        """Give up the rows with ids <= `through`, for good; on the disk when this returns."""
        with self.episode_lock:
            sequence = self._append(Kind.RETIRE, b'{"through": %d}' % through)
            super().retire(through)
            self.content = (self.manifest.generation, sequence)
        self.sync()

    def _forget(self, last: int) -> None:
        self.sync()
        with self.episode_lock:
            sequence = self._append(Kind.DELETE, b'{"last": %d}' % last)
            super()._forget(last)
            self.content = (self.manifest.generation, sequence)
        self.sync()

    # -- facts -----------------------------------------------------------------------------------

    def log_entries(self) -> Iterator[LogEntry]:
        """Return every entry of episodes.log in order."""
        return self._log.read()

    def use_catalog(self, catalog: CatalogLike) -> None:
        """Hand changes to the index before they are forgotten."""
        self._catalog = catalog

    @property
    def can_write(self) -> bool:
        """Whether the storage is open for writing and sound."""
        sound = self._failure is None and not self._unsure
        return not self._closed and self._lock_file.held and sound

    def more_stats(self) -> dict[str, Any]:
        """Return path, generation, and what waits for the disk."""
        return {
            "path": str(self.path),
            "generation": self.manifest.generation,
            "unsynced_rows": self.last - self._synced,
            "fsyncs": self.disk.syncs,
            "recovered": self.counters.recovered,
        }

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
            with self.lock, self._sync_lock:
                if self._unsure:
                    with contextlib.suppress(ExpStoreError):
                        self.flush_priorities()
                    self._close_files()
                    with self.changing():
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
        if self._lock_file.held:  # a forked child shares the page
            self._state.set("draw", draw)

    def _note_horizon(self, horizon: int) -> None:
        self._state.set("horizon", horizon)

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
        self._close_columns()

    # -- what the columns supply -----------------------------------------------------------------

    @abstractmethod
    def _begin(self) -> None:
        """Set up what belongs to columns, before anything is opened."""

    @abstractmethod
    def _open_columns(self) -> None:
        """Open the columns, if there are fields yet."""

    @abstractmethod
    def _adopt_priorities(self, past: Past, *, whole: bool) -> None:
        """Load priorities; unless `whole`, those of rows after the mark come from their records."""

    @abstractmethod
    def _settle_columns(self, past: Past) -> tuple[set[File], set[Path]]:
        """Write rows after the mark again; return the files and folders to be synced."""

    @abstractmethod
    def _unsynced_columns(self) -> tuple[set[File], set[Path]]:
        """Return, once, what holds bytes that no mark covers; the episode lock is held."""

    @abstractmethod
    def _sum_columns(self, sequence: int) -> None:
        """Write checksums of what `_unsynced_columns` returned; `sequence` is that of the mark to come."""

    @abstractmethod
    def flush_priorities(self) -> None:
        """Write priorities that have changed, and rows that were kept back."""

    @abstractmethod
    def drain(self) -> None:
        """Write rows that were kept back to the columns."""

    @abstractmethod
    def _close_columns(self) -> None:
        """Close the files of the columns."""
