"""Keep a minimum of free space on the disk.

Used by the writer before it appends rows. Nothing is deleted here.
"""

from __future__ import annotations

import errno
import sys
from pathlib import Path

from expstore.core.geometry import RingGeometry
from expstore.disk.files import Disk
from expstore.errors import StorageError

_ENDLESS = sys.maxsize


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
