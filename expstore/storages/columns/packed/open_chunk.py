"""The rows of a packed column whose chunk is not full yet: uncompressed, in a file of four areas.

Used by packed columns. An area is written to while a chunk fills, and kept unchanged as long as a durable
checkpoint may depend on it. Every row has a checksum. Rows are not compressed here.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from expstore.core.values import Array
from expstore.disk.files import Disk, File
from expstore.errors import StateError

#: u64 stamp, u64 lap of the ring, u64 chunk, u32 crc32c of these, u32 zero; then for each row a u32: the
#: crc32c of stamp and row.
_HEADER = struct.Struct("<QQQII")
_AREAS = 4
_PAGE = 4096


class Area(NamedTuple):
    """The content of an area.

    Args:
        stamp: Newer areas have larger stamps.
        lap: Lap of the ring.
        chunk: Number of the chunk.
        number: Number of the area.
        rows: The rows as bytes. Shape `(chunk rows, row bytes)`.
        whole: Which rows match their checksums. Shape `(chunk rows,)`.
    """

    stamp: int
    lap: int
    chunk: int
    number: int
    rows: NDArray[np.uint8]
    whole: NDArray[np.bool_]


class PartialFile:
    """Store the uncompressed rows of the chunk that is being filled.

    Threads: one writes; the thread that syncs decides when. Crashes: the area of rows that were synced is
    kept, and only later rows are added to it, until another sync covers the rows elsewhere.

    Args:
        disk: Access to files.
        path: The file; created with the first rows.
        rows: Rows per chunk.
        row_bytes: Length of a row, bytes.
        write: Whether the file is written to.
    """

    def __init__(self, disk: Disk, path: Path, rows: int, row_bytes: int, *, write: bool = True) -> None:
        self.path = path
        self.file: File | None = None
        self._disk, self._write = disk, write
        self._rows, self._row_bytes = rows, row_bytes
        self._stride = _PAGE + -(-rows * row_bytes // _PAGE) * _PAGE
        self._stamp = self._written = 0  # newest stamp; stamp of the area that is being written
        self._area = -1
        #: The areas on which the last sync, and the running checkpoint, may depend.
        self._durable = self._pending = -1
        self._kept: list[int] = []
        if disk.exists(path):
            self.file = disk.open(path, write=write)
            self._stamp = max((area.stamp for area in self.areas()), default=0)

    def areas(self) -> list[Area]:
        """Return the content of the areas, the newest last."""
        found = []
        for number in range(_AREAS):
            data = b"" if self.file is None else self.file.read(number * self._stride, self._stride)
            if len(data) < _HEADER.size:
                continue
            stamp, lap, chunk, crc, _ = _HEADER.unpack_from(data)
            if google_crc32c.value(data[: _HEADER.size - 8]) == crc:
                found.append(self._area_of(stamp, lap, chunk, number, data.ljust(self._stride, b"\0")))
        return sorted(found, key=lambda area: area.stamp)

    def _area_of(self, stamp: int, lap: int, chunk: int, number: int, data: bytes) -> Area:
        table = np.frombuffer(data, "<u4", self._rows, _HEADER.size)
        rows = np.frombuffer(data, np.uint8, self._rows * self._row_bytes, _PAGE)
        rows = rows.reshape(self._rows, self._row_bytes)
        return Area(stamp, lap, chunk, number, rows, self._sums(stamp, rows) == table)

    def find(self, lap: int, chunk: int, rows: int) -> NDArray[np.uint8] | None:
        """Return the first rows of a chunk; None if no area has them.

        Args:
            lap: Lap of the ring.
            chunk: Number of the chunk.
            rows: Number of rows.
        """
        if self.file is None and self._disk.exists(self.path):
            self.file = self._disk.open(self.path, write=self._write)
        if self.file is None:
            return None
        heads = [self.file.read(number * self._stride, _HEADER.size) for number in range(_AREAS)]
        for number, head in enumerate(heads):
            if head[8:24] == struct.pack("<QQ", lap, chunk):
                data = self.file.read(number * self._stride, _PAGE + rows * self._row_bytes)
                area = self._area_of(
                    _HEADER.unpack(head)[0], lap, chunk, number, data.ljust(self._stride, b"\0")
                )
                if area.whole[:rows].all():
                    return area.rows[:rows]
        return None

    @staticmethod
    def _sums(stamp: int, rows: Array) -> NDArray[np.uint32]:
        seed = google_crc32c.value(struct.pack("<Q", stamp))
        return np.array([google_crc32c.extend(seed, row.reshape(-1).view(np.uint8)) for row in rows], "<u4")

    def adopt(self, lap: int, chunk: int, rows: int) -> None:
        """Keep, until the next checkpoint, the areas on which the last one may depend.

        Args:
            lap: Lap of the chunk that was not full at the checkpoint.
            chunk: Number of the chunk.
            rows: How many of its rows the checkpoint covers.
        """
        same = [area for area in self.areas() if (area.lap, area.chunk) == (lap, chunk)]
        # A recovery that was killed may have left a second copy; no checkpoint depends on a torn copy.
        self._kept = [area.number for area in same if area.whole[:rows].all()][-2:]

    def begin(self, lap: int, chunk: int) -> bool:
        """Choose a free area for a chunk; return whether the file was created."""
        made = self.file is None
        if self.file is None:
            self.file = self._disk.open(self.path, create=True)
        held = (self._durable, self._pending, *self._kept)
        self._area = next(number for number in range(_AREAS) if number not in held)
        self._stamp += 1
        self._written = self._stamp
        head = _HEADER.pack(self._stamp, lap, chunk, 0, 0)[:-8]
        self.file.write(head + google_crc32c.value(head).to_bytes(8, "little"), self._area * self._stride)
        return made

    def go_on(self, lap: int, chunk: int, rows: Array) -> bool:
        """Continue in the newest area of a chunk if it begins with these rows; return whether it does."""
        areas = [area for area in self.areas() if (area.lap, area.chunk) == (lap, chunk)]
        own = rows.reshape(len(rows), -1).view(np.uint8)
        if not areas or not (areas[-1].whole[: len(own)].all() and (areas[-1].rows[: len(own)] == own).all()):
            return False
        self._area, self._written = areas[-1].number, areas[-1].stamp
        self.write(0, rows)  # the same bytes again, because they may not be synced
        return True

    def write(self, first: int, rows: Array) -> None:
        """Write rows of the chunk, beginning with row number `first`. Shape `(n, *row shape)`."""
        if self.file is None:
            raise StateError("rows were written before `begin` was called for their chunk")
        start = self._area * self._stride
        self.file.write(rows, start + _PAGE + first * self._row_bytes)
        self.file.write(self._sums(self._written, rows), start + _HEADER.size + 4 * first)

    def end(self) -> None:
        """Record that the chunk is in a shard now."""
        self._area = -1

    def note_mark(self) -> None:
        """Begin a checkpoint, which covers the rows written so far."""
        self._pending = self._area

    def note_marked(self) -> None:
        """Record that the checkpoint record is synced."""
        self._durable, self._kept = self._pending, []

    def keep(self) -> None:
        """Keep the newest area until the next checkpoint, as its rows may be synced nowhere else."""
        if self._area not in self._kept:
            self._kept.append(self._area)

    def note_synced(self) -> None:
        """Record that all rows written so far are synced, without a checkpoint: in this area or in shards."""
        self._durable, self._kept = self._area, []

    def give_back(self) -> None:
        """Free the disk space of areas on which nothing depends, when the writer closes the store."""
        held = (self._area, self._durable, self._pending, *self._kept)
        for number in range(_AREAS):
            if self.file is not None and number not in held:
                self.file.release(number * self._stride, (number + 1) * self._stride)

    def rest(self) -> None:
        """Close the descriptor until the file is used again; no other thread may be using it."""
        if self.file is not None:
            self.file.rest()

    def close(self) -> None:
        """Close the file."""
        if self.file is not None:
            self.file.close()
            self.file = None
