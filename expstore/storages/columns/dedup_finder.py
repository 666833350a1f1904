"""Find rows and images that need not be stored, because an earlier next observation has the same bytes.

Used where columns are written. Bytes are compared, so lanes, workers and batches may be interleaved in any
way.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from expstore.core.values import Array, IntArray

#: libc's memcmp, which keeps the GIL: a call takes a microsecond.
_compare = ctypes.PyDLL(None).memcmp
_compare.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t


class _Image(NamedTuple):
    """An image of a next observation.

    Args:
        number: Its number in the column that stores it: the row's place times the images of a row, plus its
            position in the row.
        crc: The crc32c of its bytes.
        data: Its bytes.
    """

    number: int
    crc: int
    data: bytes


class NextRows:
    """The next observations of the last rows, and a search for equal images among them.

    Used by one thread. It is only in memory: a new object knows no rows, and finds fewer matches.

    Args:
        row_bytes: Length of a row.
        reach: Number of preceding rows that are searched.
        parts: Number of images in a row, if rows may be stacks of images; otherwise 1.

    Example:
        >>> from expstore.storages.columns.dedup_finder import NextRows
        >>> known = NextRows(4, 8)
        >>> frames = np.arange(10, dtype=np.int32)
        >>> own, _ = known.find(100, frames[:3], frames[1:4])
        >>> own.tolist()  # row 101 equals what comes next in row 100
        [[0], [1], [1]]
        >>> own, _ = known.find(205, frames[3:5], frames[4:6])  # other rows were written in between
        >>> own.tolist()
        [[0], [1]]
    """

    def __init__(self, row_bytes: int, reach: int, parts: int = 1) -> None:
        self._parts, self._width, self._reach = parts, row_bytes // parts, reach
        self._far = reach * parts  # how many images before an image it may be stored
        self._nothing: list[_Image | None] = [None] * parts
        self._rows: deque[list[_Image]] = deque()  # the next observations of the last rows
        self._images: dict[int, _Image] = {}  # the newest one with a checksum
        self._back = 1  # how many rows before it the row was found that was found last
        self._next = -1  # place of the next row
        self._end = 0  # behind the last place of any call
        self._sound = 0  # rows from this place on are stored as this object said

    def find(self, place: int, rows: Array, next_rows: Array) -> tuple[IntArray, IntArray]:
        """Return where the images of rows and of their next values are stored, if each is stored once.

        An image that a next value shares with an earlier one is stored with the first of them.

        Args:
            place: Place of the first row. If it does not follow the rows of the last call, those are
                forgotten. Rows that come again are stored nobody knows how, so nothing refers to them.
            rows: C-contiguous. Shape `(n, *row shape)`.
            next_rows: The next value of each row. C-contiguous, same shape and dtype.

        Returns:
            For each image of the rows and of their next values, how many images before it the same bytes are
            stored with a next value, at most `reach` rows before; 0: it is stored with its row. If a row is
            one image, its next value is always stored. Shapes `(n, parts)`.
        """
        if place != self._next:
            self._begin(place)
        parts, width = self._parts, self._width
        size, own, others = parts * width, list[int](), list[int]()
        mine, theirs = (memoryview(values.reshape(-1).view(np.uint8)) for values in (rows, next_rows))
        at_mine, at_theirs = rows.ctypes.data, next_rows.ctypes.data
        for at in range(0, len(mine), size):
            number, before = self._next * parts, at - self._back * size
            least = max(number + parts - 1 - self._far, self._sound * parts)
            likely = self._rows[-self._back] if len(self._rows) >= self._back else self._nothing
            # Most rows are those that came next in a row of this call: two comparisons are enough for them.
            is_next = (
                before >= 0
                and min(likely)[0] >= least
                and not _compare(at_mine + at, at_theirs + before, size)
            )
            images = likely if is_next else self._match(mine[at : at + size], number, likely)
            own += [number + part - image.number if image else 0 for part, image in enumerate(images)]
            if images[-1]:
                self._back = self._next - images[-1].number // parts
            shifted = [*images[1:], None]
            if parts == 1 or (is_next and not _compare(at_theirs + at, at_mine + at + width, size - width)):
                images = shifted
            else:
                images = self._match(theirs[at : at + size], number, shifted)
            added = self._add(theirs[at : at + size], number, images)
            others += [number + part - image.number for part, image in enumerate(added)]
        self._end = max(self._end, self._next)
        return np.array(own).reshape(-1, parts), np.array(others).reshape(-1, parts)

    def _match(self, row: memoryview, number: int, likely: Sequence[_Image | None]) -> list[_Image | None]:
        """Return the images with the bytes of a row's images; None where none is near enough.

        Args:
            row: The bytes of the row.
            number: The number of its first image.
            likely: The images that are compared first.
        """
        found, sound = list[_Image | None](), self._sound * self._parts
        for part, image in enumerate(likely):
            data = row[part * self._width : (part + 1) * self._width].tobytes()
            least = max(number + part - self._far, sound)
            if image is None or image.number < least or image.data != data:
                image = self._images.get(google_crc32c.value(data))
                if image is not None and (image.number < least or image.data != data):
                    image = None
            found.append(image)
        return found

    def _add(self, row: memoryview, number: int, images: Sequence[_Image | None]) -> list[_Image]:
        """Append a next observation; return its images.

        Args:
            row: Its bytes.
            number: The number of its first image.
            images: Its images; None for those that are stored with it.
        """
        added = list[_Image]()
        for part, image in enumerate(images):
            if image is None:
                data = row[part * self._width : (part + 1) * self._width].tobytes()
                image = _Image(number + part, google_crc32c.value(data), data)
                self._images[image.crc] = image
            added.append(image)
        self._rows.append(added)
        self._next += 1
        if len(self._rows) > self._reach:
            for image in self._rows.popleft():
                if self._images.get(image.crc) is image:
                    del self._images[image.crc]
        return added

    def copy_next(self, places: IntArray) -> NDArray[np.uint8] | None:
        """Copy the next values of rows; None: not all of them are in memory.

        Args:
            places: Places of the rows. Shape `(n,)`.

        Returns:
            Shape `(n, row_bytes)`.
        """
        at = places - (self._next - len(self._rows))
        if at.min() < 0 or at.max() >= len(self._rows):
            return None
        images = [image.data for row in at.tolist() for image in self._rows[row]]
        return np.frombuffer(b"".join(images), np.uint8).reshape(len(at), -1)

    def _begin(self, place: int) -> None:
        self._sound = self._end if place < self._end else place
        self._next = place
        self._rows.clear()
        self._images.clear()
