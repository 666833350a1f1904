"""Copy rows of a ring to its archive before their slots are reused.

Used by the engine. Rows that have left the window stay in spare slots until the writer needs the slots. Until
then they cannot change, and can be copied while other threads write. The engine decides which rows leave.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from expstore.core.values import Array, IntArray, Window
from expstore.episodes.fragments import last_ids
from expstore.errors import ExpStoreError, StateError
from expstore.schema.row_fields import ROW_BYTES, ROW_FIELDS
from expstore.schema.schema import Schema
from expstore.storages.batch import Rows
from expstore.storages.engine.archive import Archive, Going, Left, archive_path, to_archive_schema, with_left
from expstore.storages.engine.engine import Engine
from expstore.storages.engine.opening import Opened
from expstore.storages.format.manifest import Manifest

if TYPE_CHECKING:
    from expstore.storages.engine.store import Store

__all__ = ["Archiver", "no_ranking"]

_logger = logging.getLogger("expstore")
#: Bytes of rows copied to the archive at a time.
PIECE_BYTES = 16 << 20


class Archiver:
    """Copy rows that leave a ring to its archive.

    Threads: one thread copies at a time while others write and read; a call of `extend` waits only for rows
    whose slots it needs. Crashes: a slot is reused only after its row is synced to the archive's disk, and
    each row is archived once. Locks: the archive's lock is taken after the locks of a checkpoint and of the
    sample counts, which are held while a store is opened again after a failure.

    Args:
        engine: The ring's engine.
        archive: The archive.
    """

    def __init__(self, engine: Engine, archive: Archive) -> None:
        self._held: Engine | None = engine
        self.archive = archive

    @property
    def _engine(self) -> Engine:
        assert self._held is not None, "the ring is closed"
        return self._held

    def forget(self) -> None:
        """Drop the reference to the ring's engine, which is closed, so that it can be freed."""
        self._held = None

    @classmethod
    def open(
        cls,
        engine: Engine,
        asked: str | Path | Literal[False] | None,
        *,
        open_storage: Callable[..., Store],
        segment_bytes: int | None,
    ) -> Archiver | None:
        """Open the archive of a ring, or create it; return None if the ring has no archive.

        Args:
            engine: The ring's engine; the ring's expstore.json records where the archive is.
            asked: The archive's path; None: the recorded path; False: no archive, leaving rows are lost from
                now on.
            open_storage: Opens the archive's storage.
            segment_bytes: Length of a segment of the archive's journal, bytes; None: the library's default.

        Raises:
            StateError: The store cannot have an archive, or the archive was moved.
            LockedError: Another process has the archive open.
            CorruptionError: The archive is damaged.
        """
        manifest, path = engine.manifest, engine.path
        noted = manifest.archive
        if asked is False:
            if noted:
                engine.save(manifest.replace(archive=""))
            return None
        if asked is None and not noted:
            return None
        place = archive_path(path, noted) if asked is None else Path(asked).resolve()
        _check_place(engine, place, known=bool(noted))
        archive = Archive.open(
            engine.disk,
            place,
            manifest,
            order=engine.locks.order,
            open_storage=open_storage,
            segment_bytes=segment_bytes,
        )
        seen = os.path.relpath(place, path.resolve())
        if seen != noted:
            engine.save(manifest.replace(archive=seen))
        return cls(engine, archive)

    @property
    def storage(self) -> Store:
        """The storage with the archived rows."""
        return self.archive.storage

    def stats(self) -> dict[str, Any]:
        """Return the archive's path and the newest id that was copied."""
        return {"archive": str(self.storage.path), "archived_through": self.archive.through}

    def check_opened(self, opened: Opened) -> None:
        """Raise StateError if the archive does not fit the store that was just opened."""
        archive, manifest = self.archive, opened.manifest
        if manifest.schema is not None:
            archive.check_fields(manifest.schema)
        archive.meet(manifest, self._engine.manifest.generation, opened.store.window, self._engine.path)

    def check_fields(self, schema: Schema) -> None:
        """Raise StateError or SchemaError if rows with these fields cannot be archived."""
        to_archive_schema(schema)
        self.archive.check_fields(schema)

    def check_content(self, manifest: Manifest) -> None:
        """Raise StateError if rows of a snapshot could not be archived."""
        if manifest.ranking is not None:
            raise no_ranking(self._engine.path)
        if manifest.schema is not None:
            self.archive.check_fields(manifest.schema)

    # -- copying -----------------------------------------------------------------------------------

    def copy_left(self) -> None:
        """Archive and sync all rows that have left the window and that a checkpoint covers.

        Raises:
            StorageError: The disk failed; rows that were not archived are still in the ring.
            StateError: The archive cannot be written.
        """
        archive, engine = self.archive, self._engine
        if engine.schema is None or archive.storage.closed:
            return
        with archive.lock:
            through = min(engine.rows.window.low, engine.checkpointer.covered)
            if through > archive.through:
                self._copy(through)
            before = engine.rows.episodes.next_episode
            archive.end(self._open_behind(archive.through), before=before)
            archive.settle()

    def copy_at_close(self) -> None:
        """Call `copy_left`; on failure, log a warning. The next opening copies the remaining rows."""
        try:
            if self._engine.is_sound:
                self._engine.checkpoint()
                self.copy_left()
        except ExpStoreError as exc:
            _logger.warning("rows of %s have not come to its archive: %s", self._engine.path, exc)

    def copy_through(self, through: int) -> None:
        """Wait until rows up to an id, and newer ones that can be archived, are synced to the archive."""
        engine, archive = self._engine, self.archive
        through = min(through, engine.rows.last)
        if through <= archive.settled:
            return
        started = time.monotonic()
        with archive.lock:
            if through > archive.settled:
                sure = min(engine.rows.window.low, engine.checkpointer.covered)
                self._copy(max(through, sure, archive.through))
                archive.settle()
        engine.counters.note_wait(started)

    def copy_all_but(self, capacity: int | None) -> None:
        """Archive and sync all rows except the newest, before their slots are reused by a smaller ring.

        Args:
            capacity: How many rows remain.

        Raises:
            StateError: `capacity` is None, and a store without a capacity cannot have an archive; or the
                archive cannot be written.
            StorageError: The disk failed.
        """
        engine = self._engine
        if engine.schema is None:
            return
        if capacity is None:
            raise StateError(
                f"{engine.path} has an archive, which requires a capacity: otherwise no row leaves the store",
                hint="open it with archive=False first",
            )
        engine.checkpoint()
        self.copy_through(engine.rows.last - capacity)

    def copy_early(self, rows: Rows, skipped: int) -> None:
        """Archive all rows of the ring, and the first rows of a batch that get no slot.

        Call `meet` afterwards, whether or not the batch was written.

        Args:
            rows: The batch, which is not written yet.
            skipped: How many of its first rows get no slot.
        """
        engine, archive = self._engine, self.archive
        keys, schema = engine.keys, engine.require_schema()
        with archive.lock:
            self._copy(engine.rows.last)
            archive.settle()
            archive.expect(rows.first_id)
            for left in _split_rows(rows, skipped, archive.most):
                archive.append(left, keys, schema, _build_no_flags, sure=False)
            archive.settle()

    def meet(self) -> None:
        """Reconcile the archive with the ring after `copy_early` and the write of the batch."""
        engine = self._engine
        with self.archive.lock:
            manifest = engine.manifest
            self.archive.meet(manifest, manifest.generation, engine.rows.window, engine.path)

    def _open_behind(self, through: int) -> set[int]:
        """Return the episodes that are open, or have rows with an id above `through`."""
        with self._engine.locks.episodes:
            episodes = self._engine.rows.episodes
            found = {entry.episode for entry in episodes.open_entries()}
            fragments = episodes.fragments.capture()
        rows = fragments.columns()
        found.update(rows[0, last_ids(rows) > through].tolist())
        return found

    def _copy(self, through: int) -> None:
        """Archive rows up to an id, which checkpoints cover. The caller holds the archive's lock."""
        engine, archive = self._engine, self.archive
        window = engine.rows.window
        if through > window.low:  # these rows are evicted to make room for a large batch
            window = Window(through, max(window.last, through), window.deleted)
        wanted = with_left(engine, window, archive.through)
        newest = max(through, engine.rows.window.low)
        behind = self._newest_left(Window(wanted.low, newest, wanted.deleted))
        keys, schema = engine.keys, engine.require_schema()
        for left in self._read_evicted(Window(wanted.low, through, wanted.deleted)):
            last = int(left.ids[-1])
            # Above that id, an episode may continue in a batch that is being written.
            sure = last <= engine.rows.window.low
            archive.append(left, keys, schema, self._make_going(last, behind), sure=sure)
        archive.pass_over(through)

    def _newest_left(self, window: Window) -> dict[int, int]:
        """Return the newest row of each episode among rows that have left the window.

        The episode table no longer has them.
        """
        ids, engine = window.ids(), self._engine
        if not ids.size:
            return {}
        place = len(engine.require_schema().fields) + 1
        (episodes,) = engine.take(engine.geometry.slot_of(ids), [place])
        return dict(zip(episodes.tolist(), ids.tolist(), strict=True))

    def _read_evicted(self, window: Window) -> Iterator[Left]:
        engine, schema = self._engine, self._engine.require_schema()
        fields = len(schema.fields)
        places = range(fields + len(ROW_FIELDS) - 1)
        row_bytes = engine.rows.require_columns().mean_bytes - ROW_BYTES
        for first, count in window.runs():
            at = 0
            while at < count:
                rows = max(1, min(self.archive.most, PIECE_BYTES // max(1, row_bytes), count - at))
                ids = np.arange(first + at, first + at + rows)
                columns = engine.take(engine.geometry.slot_of(ids), places)
                _, episodes, steps, times = columns[fields:]
                yield Left(ids, columns[:fields], episodes, steps, times)
                at += rows

    def _make_going(self, through: int, behind: Mapping[int, int]) -> Going:
        """Return a function: whether episodes have, or may still get, rows with an id above `through`.

        Args:
            through: The last row that is archived now.
            behind: The newest row of each episode among those that have left the window.
        """

        def find_going(episodes: IntArray) -> Array:
            known = self._open_behind(through)
            flags = [number in known or behind.get(number, 0) > through for number in episodes.tolist()]
            return np.array(flags, np.bool_)

        return find_going

    # -- closing -----------------------------------------------------------------------------------

    def do_without_threads(self) -> None:
        """Write and sync only on the calling thread from now on."""
        self.storage.engine.do_without_threads()

    def close(self) -> None:
        """Close the archive."""
        self.storage.close()


def no_ranking(path: Path) -> StateError:
    """Return the error for an archive of a store that keeps the best rows."""
    return StateError(
        f"{path} keeps the best rows: what gives way to better ones does not go to an archive",
        kind="mismatch",
        hint="leave archive= out, or use another writer",
    )


def _check_place(engine: Engine, place: Path, *, known: bool) -> None:
    """Raise StateError if this store cannot have an archive at this path."""
    manifest, path = engine.manifest, engine.path
    if manifest.capacity is None:
        raise StateError(
            f"{path} has no capacity, which an archive requires: no row leaves the store",
            kind="mismatch",
            hint="omit archive=, or create a new store with a capacity",
        )
    if manifest.ranking is not None:
        raise no_ranking(path)
    if known and not engine.disk.exists(place / "expstore.json"):
        raise StateError(
            f"the archive of {path} is not at {place}",
            kind="mismatch",
            hint="pass archive= its path; or False to lose the rows that leave from now on",
        )


def _build_no_flags(episodes: IntArray) -> Array:
    return np.zeros(episodes.size, np.bool_)


def _split_rows(rows: Rows, count: int, most: int) -> Iterator[Left]:
    """Yield the first `count` rows of a batch in pieces of at most `most` rows."""
    ids, episodes, steps, times = rows.assignment.numbers
    for start in range(0, count, most):
        part = slice(start, min(start + most, count))
        columns = [column[part] for column in rows.columns]
        yield Left(ids[part], columns, episodes[part], steps[part], times[part])
