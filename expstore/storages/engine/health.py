"""Whether a store can be written to, and the reason if not: failures of the disk, and its free space.

Used by everything in the engine that writes files. Nothing is deleted here.
"""

from __future__ import annotations

import contextlib
import errno
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from expstore.core.geometry import RingGeometry
from expstore.disk.files import Disk, build_deleted_error
from expstore.disk.writer_lock import WriterLock
from expstore.errors import LockedError, StateError, StorageError

_ENDLESS = sys.maxsize


class Health:
    """The effects of failures on a store.

    Invariants: after a failed fsync nothing is written any more, because the page cache may mark lost bytes
    as clean (`failure`). After an operation that was interrupted between its record and memory, memory may
    lag behind the journal (`needs_recovery`): the journal must be read again before the next write.

    Any thread may record a failure. Nothing is stored on disk: an opening starts without failures.

    Args:
        path: The store's folder.
        lock_file: The writer's lock on it.
    """

    __slots__ = ("_lock_file", "_path", "failure", "fence", "is_cut_off", "needs_recovery", "noting")

    def __init__(self, path: Path, lock_file: WriterLock) -> None:
        self._path, self._lock_file = path, lock_file
        #: A context manager: if its block raises, an interruption is recorded.
        self.noting = _Noting(self)
        #: The error of the failed fsync; None: no fsync has failed.
        self.failure: StorageError | None = None
        #: Why nothing is written any more although the disk is sound: another machine has taken over the
        #: address to which the store is shipped. None: none has.
        self.fence: LockedError | None = None
        #: Whether the journal may contain records that memory does not know.
        self.needs_recovery = False
        #: Whether the columns were left in the middle of a write.
        self.is_cut_off = False

    @property
    def is_sound(self) -> bool:
        """Whether memory and disk agree, as far as is known."""
        return self.failure is None and not self.needs_recovery

    def check_fence(self) -> None:
        """Raise LockedError if another machine has taken over the address to which the store is shipped."""
        if self.fence is not None:
            raise self.fence.at(f"{self._path} can no longer be written")

    def check(self) -> None:
        """Raise StateError if an fsync has failed before."""
        if self.failure is not None:
            deleted = self.failure.errno == errno.ENOENT
            raise StateError(
                f"{self._path} can no longer be written: {self.failure.message if deleted else self.failure}",
                kind="poisoned",
                hint="the folder was deleted or moved: close the store, and restore the folder or use another"
                if deleted
                else "close it and open it again",
            )

    def check_in_place(self) -> None:
        """Check that the store's folder is where it was, before files in it are opened by their paths.

        Raises:
            StorageError: It was deleted or moved, or another folder has its path; later writes are refused.
        """
        if self._lock_file.held and not self._lock_file.is_in_place:
            error = build_deleted_error(self._path)
            self.note_failure(error)
            raise error

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Refuse to run the block if an fsync has failed before; record a failure of an fsync in it.

        Other failures change nothing: the next attempt starts from the same state.
        """
        self.check()
        try:
            yield
        except StorageError as exc:
            self.note_failure(exc)
            raise

    def note_failure(self, exc: BaseException | None) -> None:
        """Refuse all writes from now on if the exception is a failed fsync."""
        if isinstance(exc, StorageError) and exc.lost and self.failure is None:
            self.failure = exc

    def note_interruption(self) -> None:
        """Record that memory may lag behind the journal, because of the exception that is being raised."""
        self.note_failure(sys.exception())
        self.needs_recovery = True

    def note_recovered(self) -> None:
        """Record that memory and the columns were updated to the journal."""
        self.needs_recovery = self.is_cut_off = False


class _Noting:
    """Record an interruption if an exception leaves the block. Blocks may be nested.

    Args:
        health: Records the interruption.
    """

    __slots__ = ("_health",)

    def __init__(self, health: Health) -> None:
        self._health = health

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if exc is not None:
            self._health.note_interruption()


class DiskSpace:
    """Refuse rows that would leave the disk with fewer than `min_free` bytes.

    The free space is measured after each checkpoint, and again only for rows for which there was no space
    then.

    Threads: the caller holds the storage's lock, or the checkpointer's. Nothing is stored on disk.

    Args:
        disk: Access to files.
        path: The store's folder.
        min_free: Bytes of the disk that must stay free; 0: rows are never refused.
    """

    __slots__ = ("_disk", "_path", "last_id", "min_free")

    def __init__(self, disk: Disk, path: Path, min_free: int) -> None:
        self._disk, self._path, self.min_free = disk, path, min_free
        #: The newest id for which there was space at the last measurement.
        self.last_id = 0 if min_free else _ENDLESS

    def measure(self, last: int, row_bytes: int, ring: RingGeometry) -> None:
        """Find the newest id for which there is space.

        Args:
            last: The newest id.
            row_bytes: Bytes of a row on the disk.
            ring: The geometry of the store: from one lap on, rows replace older ones.
        """
        if self.min_free:
            free = self._disk.free(self._path) - self.min_free
            newest = last + max(0, free) // row_bytes
            self.last_id = _ENDLESS if ring.slots is not None and newest >= ring.slots else newest

    def check(self, last: int, count: int, row_bytes: int, ring: RingGeometry) -> None:
        """Check that there is space for rows.

        Raises:
            StorageError: There is not enough space; nothing was written.
        """
        if last + count > self.last_id:
            self.measure(last, row_bytes, ring)
            if last + count > self.last_id:
                raise self._build_full_disk_error(count, row_bytes)

    def check_bytes(self, size: int, count: int, row_bytes: int) -> None:
        """Check that there is space for `size` bytes of `count` rows; measures the free space now.

        Raises:
            StorageError: There is not enough space; nothing was written.
        """
        if self.min_free and self._disk.free(self._path) - size < self.min_free:
            raise self._build_full_disk_error(count, row_bytes)

    def _build_full_disk_error(self, count: int, row_bytes: int) -> StorageError:
        error = StorageError(
            f"{count} rows take {count * row_bytes} bytes on the disk of {self._path}, where "
            f"{self._disk.free(self._path)} are free and {self.min_free} are to stay so (min_free_bytes)",
            kind="disk_full",
            hint="free space, or open the store with a smaller min_free_bytes",
        )
        error.errno = errno.ENOSPC
        return error
