"""The rows of a packed column whose chunk is not full yet: raw, in a file of four areas.

Used by packed columns. An area is written to while a chunk fills, and left alone as long as a durable mark
may depend on it. Every row has a checksum. It never packs a row.
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

__all__ = ["Area", "PartialFile"]

#: u64 stamp, u64 lap of the ring, u64 chunk, u32 crc32c of these, u32 zero; then a u32 per row: the crc32c
#: of stamp and row.
_HEADER = struct.Struct("<QQQII")
_AREAS = 4
_PAGE = 4096


class Area(NamedTuple):
    """Say what an area holds.

    Args:
        stamp: The larger, the newer.
        lap: Of the ring.
        chunk: Which one.
        number: Of the area.
        rows: As bytes. Shape `(chunk rows, row bytes)`.
        whole: Which of them are there. Shape `(chunk rows,)`.
    """

    stamp: int
    lap: int
    chunk: int
    number: int
    rows: NDArray[np.uint8]
    whole: NDArray[np.bool_]


class PartialFile:
    """Keep the raw rows of the chunk that is being filled.

    Threads: one writes; the one that syncs says when. Crashes: rows that a mark covers are in an area that
    is not written to again before another mark covers them elsewhere, but for rows that follow them.

    Args:
        disk: Where files are touched.
        path: The file; made with the first rows.
        rows: Per chunk.
        row_bytes: Length of a row.
        write: Whether it is written to.
    """

    def __init__(self, disk: Disk, path: Path, rows: int, row_bytes: int, *, write: bool = True) -> None:
        self.path = path
        self.file: File | None = None
        self._disk, self._write = disk, write
        self._rows, self._row_bytes = rows, row_bytes
        self._stride = _PAGE + -(-rows * row_bytes // _PAGE) * _PAGE
        self._stamp = self._written = 0  # the newest one, and that of the area that is written to
        self._area = -1
        #: What the last durable mark, and the one that is on its way, may depend on.
        self._durable = self._pending = -1
        self._kept: list[int] = []
        if disk.exists(path):
            self.file = disk.open(path, write=write)
            self._stamp = max((area.stamp for area in self.areas()), default=0)

    def areas(self) -> list[Area]:
        """Return what the areas hold, the newest last."""
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
        """Return the first rows of a chunk; None: they are not in any area, or not any more.

        Args:
            lap: Of the ring.
            chunk: Which one.
            rows: How many.
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
        """Keep until the next mark the areas on which the last one may depend.

        Args:
            lap: Of the chunk that was not full then.
            chunk: Which one.
            rows: How many of its rows it covers.
        """
        same = [area for area in self.areas() if (area.lap, area.chunk) == (lap, chunk)]
        # A recovery that was killed may have left a second copy; of one that is torn nothing depends.
        self._kept = [area.number for area in same if area.whole[:rows].all()][-2:]

    def begin(self, lap: int, chunk: int) -> bool:
        """Take an area for a chunk; say whether the file was made for it."""
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
        """Go on in the newest area of a chunk if it holds these rows, its first ones; say whether it does."""
        areas = [area for area in self.areas() if (area.lap, area.chunk) == (lap, chunk)]
        own = rows.reshape(len(rows), -1).view(np.uint8)
        if not areas or not (areas[-1].whole[: len(own)].all() and (areas[-1].rows[: len(own)] == own).all()):
            return False
        self._area, self._written = areas[-1].number, areas[-1].stamp
        self.write(0, rows)  # the very same bytes: they were not synced perhaps
        return True

    def write(self, first: int, rows: Array) -> None:
        """Write rows of the chunk, from number `first` of it on. Shape `(n, *row shape)`."""
        if self.file is None:
            raise StateError("rows are written before their chunk was begun")
        start = self._area * self._stride
        self.file.write(rows, start + _PAGE + first * self._row_bytes)
        self.file.write(self._sums(self._written, rows), start + _HEADER.size + 4 * first)

    def end(self) -> None:
        """Note that the chunk is in a shard now."""
        self._area = -1

    def note_mark(self) -> None:
        """Begin a checkpoint, which covers what has been written."""
        self._pending = self._area

    def note_marked(self) -> None:
        """Note that the checkpoint record is on the disk."""
        self._durable, self._kept = self._pending, []

    def give_back(self) -> None:
        """Give back the disk space of areas on which nothing depends: the writer ends."""
        held = (self._area, self._durable, self._pending, *self._kept)
        for number in range(_AREAS):
            if self.file is not None and number not in held:
                self.file.release(number * self._stride, (number + 1) * self._stride)

    def close(self) -> None:
        """Close the file."""
        if self.file is not None:
            self.file.close()
            self.file = None
