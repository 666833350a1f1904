"""A ring whose rows go to an archive before their slots are given to others.

Part of the Zarr storage. Rows that have left the window lie in spare slots until the writer needs these: so
long they can be brought to the archive, beside whoever writes, and nobody can change them. It never decides
what leaves.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from expstore.core.values import Array, IntArray, Key, Ranking, Window, key_name
from expstore.episodes.fragments import last_ids
from expstore.errors import ExpStoreError, StateError
from expstore.schema.row_fields import ROW_FIELDS
from expstore.schema.schema import Schema
from expstore.storages.base import Keys, Rows, Storage
from expstore.storages.engine.archive import Archive, Going, Left, archive_path, archived_schema, with_left
from expstore.storages.engine.delete import RetainingStorage
from expstore.storages.engine.opening import Opened
from expstore.storages.new_field import Coming
from expstore.storages.snapshots.restore import ContentLike

__all__ = ["ArchivingStorage"]

_logger = logging.getLogger("expstore")
#: So many bytes of rows go to the archive at a time.
PIECE_BYTES = 16 << 20


class ArchivingStorage(RetainingStorage):
    """Keep what leaves a ring.

    Threads: one brings rows to the archive at a time, beside who writes and reads; who extends waits only for
    rows whose slots it needs. Crashes: a slot is written to for another row when the one that was there is on
    the disk of the archive; rows come to the archive once. Locks: the archive's `turn` comes behind
    those of a sync and of the counts, under which a storage that was interrupted is opened anew.
    """

    archive: Archive | None = None

    # -- opening and closing -----------------------------------------------------------------------

    def _open(self, *, first: bool) -> None:
        if self.archive is None:
            self._open_archive()
        if self.archive is None:
            super()._open(first=first)
            return
        with self.archive.turn:  # who copies rows reads them in these columns, or in the next ones
            super()._open(first=first)

    def _check_opened(self, opened: Opened) -> None:
        """Raise an error if the archive cannot go on with what an opening has found."""
        archive, manifest = self.archive, opened.manifest
        if archive is None:
            return
        if manifest.schema is not None:
            archive.check_fields(manifest.schema)
        archive.meet(manifest, self.manifest.generation, opened.store.window, self.path)

    def _open_archive(self) -> None:
        asked, noted = self.asked_archive, self.manifest.archive
        if asked is False:
            if noted:
                self._note_manifest(self.manifest.replace(archive=""))
            return
        if asked is None and not noted:
            return
        place = archive_path(self.path, noted) if asked is None else Path(asked).resolve()
        self._check_place(place, known=bool(noted))
        self.archive = Archive.open(
            self.disk,
            place,
            self.manifest,
            order=self.lock_order,
            open_storage=self._open_archive_storage,
            segment_bytes=self.archive_segment_bytes,
        )
        seen = os.path.relpath(place, self.path.resolve())
        if seen != noted:
            self._note_manifest(self.manifest.replace(archive=seen))

    def _open_archive_storage(self, path: Path, **options: Any) -> RetainingStorage:
        """Open the storage of the archive, or make one."""
        raise NotImplementedError

    def _check_place(self, place: Path, *, known: bool) -> None:
        """Raise StateError where there can be no archive of this store."""
        manifest = self.manifest
        if manifest.capacity is None:
            raise StateError(
                f"{self.path} has no capacity: no row leaves it for an archive",
                kind="mismatch",
                hint="leave archive= out, or give a new store a capacity",
            )
        if manifest.ranking is not None:
            raise self._no_ranking()
        if known and not self.disk.exists(place / "expstore.json"):
            raise StateError(
                f"the archive of {self.path} is not at {place}",
                kind="mismatch",
                hint="give archive= its path; or False, and rows that leave are gone",
            )

    def _do_without_threads(self) -> None:
        """Write and sync on the calling thread alone from now on, the rows of the archive, too."""
        super()._do_without_threads()
        if self.archive is not None:
            self.archive.storage._do_without_threads()

    def _let_go(self) -> None:
        try:
            if self.archive is not None:
                self.archive.storage.close()
        finally:
            super()._let_go()

    def close(self) -> None:
        """Sync, bring what has left to the archive, note that all is well, and let others open the store."""
        if not self._closed and self.archive is not None:
            with self.lock:
                self.engine.background.stop()
                try:
                    if self.can_write:
                        self.sync()
                        self.archive_left()
                except ExpStoreError as exc:
                    # The rows are where they were: the next opening goes on with them.
                    _logger.warning("rows of %s have not come to its archive: %s", self.path, exc)
        super().close()

    def more_stats(self) -> dict[str, Any]:
        """Return what every store on disk says, and where rows go, and how far they have come."""
        archive = self.archive
        if archive is None:
            return super().more_stats()
        return super().more_stats() | {
            "archive": str(archive.storage.path),
            "archived_through": archive.through,
        }

    def archived(self) -> Storage | None:
        """Return where rows are that have left; None: nowhere."""
        return None if self.archive is None else self.archive.storage

    # -- rows go -----------------------------------------------------------------------------------

    def archive_left(self) -> None:
        """Bring all rows that have left, and that no power cut can undo, to the archive and its disk.

        Raises:
            StorageError: The disk failed; rows that have not come lie where they were.
            StateError: The archive cannot be written.
        """
        archive = self.archive
        if archive is None or self.schema is None or archive.storage.closed:
            return
        with archive.turn:
            through = min(self._state.window.low, self.engine.checkpointer.covered)
            if through > archive.through:
                self._copy(archive, through)
            before = self.episodes.next_episode
            archive.end(self._open_behind(archive.through), before=before)
            archive.settle()

    def _open_behind(self, through: int) -> set[int]:
        """Return the episodes that are open, or have rows behind this one."""
        with self.episode_lock:
            found = {entry.episode for entry in self.episodes.open_entries()}
            rows = self.episodes.fragments.rows
            found.update(rows[0, last_ids(rows) > through].tolist())
        return found

    def _copy(self, archive: Archive, through: int) -> None:
        """Bring rows up to an id to the archive, which marks cover; its `turn` is held."""
        window = self._state.window
        if through > window.low:  # they are to be given up for a long extend
            window = Window(through, max(window.last, through), window.gaps)
        wanted = with_left(self, window, archive.through)
        behind = self._newest_left(Window(wanted.low, max(through, self._state.window.low), wanted.gaps))
        for left in self._leaving(Window(wanted.low, through, wanted.gaps), archive):
            last, schema = int(left.ids[-1]), self.require_schema()
            sure = last <= self._state.window.low  # else it may go on with a batch under way
            archive.append(left, self.keys, schema, self._going_behind(last, behind), sure=sure)
        archive.pass_over(through)

    def _newest_left(self, window: Window) -> dict[int, int]:
        """Return the newest row of each episode among those that have left, of which nobody else knows."""
        ids = window.ids()
        if not ids.size:
            return {}
        (episodes,) = self._take(self.geometry.slot_of(ids), [len(self.require_schema().fields) + 1])
        return dict(zip(episodes.tolist(), ids.tolist(), strict=True))

    def _leaving(self, window: Window, archive: Archive) -> Iterator[Left]:
        schema = self.require_schema()
        fields = len(schema.fields)
        places = range(fields + len(ROW_FIELDS) - 1)
        group = self.columns
        row_bytes = schema.row_bytes
        if group is not None and group.segments is not None:
            row_bytes += int(group.segments.mean_bytes)
        for first, count in window.runs():
            at = 0
            while at < count:
                rows = max(1, min(archive.most, PIECE_BYTES // max(1, row_bytes), count - at))
                ids = np.arange(first + at, first + at + rows)
                columns = self._take(self.geometry.slot_of(ids), places)
                _, episodes, steps, times = columns[fields:]
                yield Left(ids, columns[:fields], episodes, steps, times)
                at += rows

    def _going_behind(self, through: int, behind: Mapping[int, int]) -> Going:
        """Return what says which episodes have rows behind this one, or get some.

        Args:
            through: The row.
            behind: The newest row of each episode among those that have left.
        """

        def going(episodes: IntArray) -> Array:
            known = self._open_behind(through)
            flags = [number in known or behind.get(number, 0) > through for number in episodes.tolist()]
            return np.array(flags, np.bool_)

        return going

    # -- extend ------------------------------------------------------------------------------------

    def prepare(self, schema: Schema, keys: Keys, dims: tuple[int, ...] = ()) -> None:
        """Fix the fields, once, when the first rows come; on the disk when this returns."""
        if self.archive is not None:
            archived_schema(schema)
            self.archive.check_fields(schema)
        super().prepare(schema, keys, dims)

    def write(self, rows: Rows) -> None:
        """Make rows readable, all of them or none.

        Of a batch longer than the ring those that never get a slot go to the archive first.

        Raises:
            StateError: The store is closed, not open for writing, or poisoned; or its archive is.
            StorageError: The disk failed; nothing is published.
        """
        archive, capacity = self.archive, self.geometry.capacity
        if archive is None or capacity is None or rows.count <= capacity:
            super().write(rows)
            return
        self.check_writable()
        if self.geometry.lanes > 1:
            self.geometry.check_steps(rows.first_id, rows.count)
        self.check_space(rows.count)
        self.sync()
        try:
            with archive.turn:
                self._copy(archive, self.last)
                archive.settle()
                archive.expect(rows.first_id)
                for left in _passing(rows, rows.count - capacity, archive.most):
                    archive.append(left, self.keys, self.require_schema(), _none, sure=False)
                archive.settle()
            super().write(rows)
            if self.engine.checkpointer.covered < self.last:
                # Else the power may take the batch back when the archive knows no more that it came early.
                self.sync()
            with archive.turn:
                archive.meet(self.manifest, self.manifest.generation, self._state.window, self.path)
        except BaseException:
            self.note_interruption()  # what has come too early is given up with what is read again
            raise

    def _make_room(self, count: int) -> None:
        archive = self.archive
        if archive is None or self.schema is None or (depth := self.geometry.depth) is None:
            super()._make_room(count)
            return
        if count > self.geometry.spare:
            self.check_space(count)
            self.sync()
            try:
                self._archive_for(archive, min(self.last, self.last + count - depth))
                super()._make_room(count)
            except BaseException:
                self.note_interruption()  # rows may have come too early: they are given up there
                raise
        else:
            super()._make_room(count)
        self._archive_for(archive, self.last + count - depth)

    def _archive_for(self, archive: Archive, through: int) -> None:
        """Wait until rows up to an id are on the disk of the archive, with others that are as far."""
        through = min(through, self.last)
        if through <= archive.settled:
            return
        started = time.monotonic()
        with archive.turn:
            if through > archive.settled:
                self._copy(
                    archive,
                    max(
                        through,
                        min(self._state.window.low, self.engine.checkpointer.covered),
                        archive.through,
                    ),
                )
                archive.settle()
        self.counters.waits += 1
        self.counters.wait_seconds += time.monotonic() - started

    def archive_all_but(self, capacity: int | None) -> None:
        """Bring all rows but the newest to the archive and its disk, before others take their places.

        Args:
            capacity: How many stay.

        Raises:
            StateError: None: all of them, in a store that grows and has an archive; or it cannot be written.
            StorageError: The disk failed.
        """
        archive = self.archive
        if archive is None or self.schema is None:
            return
        if capacity is None:
            raise StateError(
                f"{self.path} has an archive, and without a capacity no row would leave it",
                hint="open it with archive=False first",
            )
        with self.lock:
            self.sync()
            self._archive_for(archive, self.last - capacity)

    def load_content(self, content: ContentLike) -> None:
        """Put a content from elsewhere in the place of what there is; see `RetainingStorage`.

        Rows that it takes the place of do not go to the archive; those that had left before do.

        Raises:
            StateError: Its rows could not go to this store's archive.
        """
        if self.archive is not None:
            if content.manifest.ranking is not None:
                raise self._no_ranking()
            if content.manifest.schema is not None:
                self.archive.check_fields(content.manifest.schema)
        super().load_content(content)

    def _forget(self, last: int) -> None:
        archive = self.archive
        if archive is not None and self.schema is not None:
            self.sync()
            self._archive_for(archive, self._state.window.low)  # what had left before is not deleted
        super()._forget(last)

    # -- what is refused -----------------------------------------------------------------------------

    def _no_ranking(self) -> StateError:
        return StateError(
            f"{self.path} keeps the best rows: what gives way to better ones does not go to an archive",
            kind="mismatch",
            hint="leave archive= out, or use another writer",
        )

    def _note_ranking(self, ranking: Ranking | None) -> None:
        if ranking is not None and self.archive is not None:
            raise self._no_ranking()
        super()._note_ranking(ranking)

    def _refuse_other_fields(self, key: Key) -> None:
        if self.archive is not None:
            raise StateError(
                f"field {key_name(key)!r} would come or go, and rows of {self.path} have gone to an archive "
                "as they are",
                hint="open the store with archive=False first",
            )

    def add_field(self, coming: Coming) -> None:
        """Have one more field; see `ReshapableStorage`.

        Raises:
            StateError: The store has an archive, whose rows would lack it.
        """
        self._refuse_other_fields(coming.entry.key)
        super().add_field(coming)

    def drop_field(self, key: Key, specs: str) -> None:
        """Have one field less; see `ReshapableStorage`.

        Raises:
            StateError: The store has an archive, whose rows have it.
        """
        self._refuse_other_fields(key)
        super().drop_field(key, specs)


def _none(episodes: IntArray) -> Array:
    return np.zeros(episodes.size, np.bool_)


def _passing(rows: Rows, count: int, most: int) -> Iterator[Left]:
    """Yield the first rows of a batch, piece by piece."""
    ids, episodes, steps, times = rows.assignment.numbers
    for start in range(0, count, most):
        part = slice(start, min(start + most, count))
        columns = [column[part] for column in rows.columns]
        yield Left(ids[part], columns, episodes[part], steps[part], times[part])
