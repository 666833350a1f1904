"""Find rows and images that need not be stored, because an earlier next observation has the same bytes.

Used where columns are written. Bytes are compared, so lanes, workers and batches may be interleaved in any
way. Whole rows are compared many at a time, the images of stacks one by one.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from expstore.core.values import Array, IntArray

#: Number of distances that are tried first: those that matched last.
_RECENT = 4
#: libc's memcmp, which keeps the GIL: a call takes a microsecond.
_compare = ctypes.PyDLL(None).memcmp
_compare.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t
Bytes = NDArray[np.uint8]


class NextValues(Protocol):
    """The next observations of the last rows, and a search for equal ones among them.

    Used by one thread. It is only in memory: a new object knows no rows, and finds fewer matches.
    """

    def find(self, place: int, rows: Array, next_rows: Array) -> tuple[IntArray, IntArray]:
        """Return where the images of rows and of their next values are stored, if each is stored once.

        Args:
            place: Place of the first row. If it does not follow the rows of the last call, those are
                forgotten.
            rows: C-contiguous. Shape `(n, *row shape)`.
            next_rows: The next value of each row. C-contiguous, same shape and dtype.

        Returns:
            For each image of the rows and of their next values, how many images before it the same bytes are
            stored with a next value, at most as many rows before as are searched; 0: it is stored with its
            row. Shapes `(n, images of a row)`.
        """

    def copy_next(self, places: IntArray) -> Bytes | None:
        """Copy the next values of rows; None: not all of them are in memory.

        Args:
            places: Places of the rows. Shape `(n,)`.

        Returns:
            Shape `(n, row_bytes)`.
        """


class NextRows(NextValues):
    """`NextValues` of rows that are one image each. All next values are stored.

    Args:
        row_bytes: Length of a row.
        reach: Number of preceding rows that are searched.

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

    def __init__(self, row_bytes: int, reach: int) -> None:
        self._reach, self._row_bytes = reach, row_bytes
        # The unit of comparisons.
        self._word: type[np.uint64 | np.uint8] = np.uint64 if row_bytes % 8 == 0 else np.uint8
        self._rows: Bytes = np.empty((0, row_bytes), np.uint8)  # room for twice the reach
        self._next = -1  # place of the next row
        self._first = 0  # place of the first row in `_rows`
        self._held = 0  # number of rows in `_rows`
        self._recent: list[int] = []
        self._places: dict[int, int] = {}  # place of the newest row with a checksum
        self._summed = 0  # rows up to this place are in `_places`

    def find(self, place: int, rows: Array, next_rows: Array) -> tuple[IntArray, IntArray]:
        """Return where rows are stored; see `NextValues`."""
        mine = rows.reshape(-1).view(np.uint8).reshape(-1, self._row_bytes)
        theirs = next_rows.reshape(-1).view(np.uint8).reshape(-1, self._row_bytes)
        found = np.zeros(len(mine), np.int64)
        if place != self._next:
            self._begin(place)
        for start in range(0, len(mine), self._reach):
            part = slice(start, min(start + self._reach, len(mine)))
            self._add(theirs[part])
            self._find_some(mine[part], found[part])
            self._next += part.stop - start
        return found[:, None], np.zeros((len(mine), 1), np.int64)

    def copy_next(self, places: IntArray) -> Bytes | None:
        """Copy the next values of rows; see `NextValues`."""
        at = places - self._first
        if at.min() < 0 or at.max() >= self._held:
            return None
        return self._rows[at]

    def _begin(self, place: int) -> None:
        if not len(self._rows):
            self._rows = np.empty((2 * self._reach, self._row_bytes), np.uint8)
        self._next = self._first = self._summed = place
        self._held = 0
        self._places.clear()

    def _add(self, rows: Bytes) -> None:
        """Append rows to `_rows`, and drop the oldest ones if there is no room."""
        if self._held + len(rows) > len(self._rows):
            gone = self._held - min(self._held, self._reach)
            to, length = self._rows.ctypes.data, self._row_bytes
            ctypes.memmove(to, to + gone * length, (self._held - gone) * length)
            self._held, self._first = self._held - gone, self._first + gone
        self._rows[self._held : self._held + len(rows)] = rows
        self._held += len(rows)

    def _find_some(self, rows: Bytes, found: IntArray) -> None:
        """Fill in the distances of rows whose next values were added last."""
        left = np.arange(len(rows))
        for distance in list(self._recent):
            if not left.size:
                return
            left = self._try(distance, rows, left, found)
        while left.size:
            row = int(left[0])
            distance = self._look_up(self._next + row, rows[row])
            if distance:
                self._recent = [distance, *(one for one in self._recent if one != distance)][:_RECENT]
                left = self._try(distance, rows, left, found)
            else:
                left = left[1:]

    def _try(self, distance: int, rows: Bytes, left: IntArray, found: IntArray) -> IntArray:
        """Fill in a distance for the rows that it matches; return the other rows."""
        base = self._next - self._first - distance  # position of the first row's match in `_rows`
        tried = left[left >= -base]
        if not tried.size:
            return left
        first, stop = int(tried[0]), int(tried[-1]) + 1
        if stop - first == tried.size:
            mine, theirs = rows[first:stop], self._rows[base + first : base + stop]
        else:
            mine, theirs = rows[tried], self._rows[base + tried]
        same = (mine.view(self._word) == theirs.view(self._word)).all(1)
        found[tried[same]] = distance
        return left[found[left] == 0] if same.any() else left

    def _look_up(self, place: int, row: Bytes) -> int:
        """Return how many rows before it a row has the same bytes as its next value; 0: none was found."""
        for other in range(max(self._summed, self._first), place):
            self._places[google_crc32c.value(self._rows[other - self._first])] = other
        self._summed = max(self._summed, place)
        if len(self._places) > 4 * self._reach:
            self._places = {crc: other for crc, other in self._places.items() if other >= self._first}
        other = self._places.get(google_crc32c.value(row), -1)
        near = max(self._first, place - self._reach) <= other < place
        return place - other if near and (self._rows[other - self._first] == row).all() else 0


class _Image(NamedTuple):
    """An image of a next observation.

    Args:
        number: Its number in the column that stores it: the row's place times the images of a row, plus its
            position in the row.
        data: Its bytes.
    """

    number: int
    data: bytes


class NextStacks(NextValues):
    """`NextValues` of rows that are stacks of images.

    An image that a next value shares with an earlier one is stored with the first of them. If rows are passed
    again, because a write failed, nothing refers to them: it is unknown how they are stored.

    Args:
        row_bytes: Length of a row.
        reach: Number of preceding rows that are searched.
        parts: Number of images in a row.
    """

    def __init__(self, row_bytes: int, reach: int, parts: int) -> None:
        self._parts, self._width, self._reach = parts, row_bytes // parts, reach
        self._far = reach * parts  # how many images before an image it may be stored
        self._nothing: list[_Image | None] = [None] * parts
        self._rows: deque[list[_Image]] = deque(maxlen=reach)  # the next observations of the last rows
        self._images: dict[int, _Image] = {}  # the newest one with a checksum
        self._unlisted: deque[_Image] = deque()  # images that `_images` lacks, the oldest first
        self._back = 1  # how many rows before it the row was found that was found last
        self._next = -1  # place of the next row
        self._end = 0  # behind the last place of any call
        self._sound = 0  # rows from this place on are stored as this object said

    def find(self, place: int, rows: Array, next_rows: Array) -> tuple[IntArray, IntArray]:
        """Return where the images of rows and of their next values are stored; see `NextValues`."""
        if place != self._next:
            self._begin(place)
        parts, width = self._parts, self._width
        size, own, others = parts * width, list[int](), list[int]()
        mine, theirs = (memoryview(one.reshape(-1).view(np.uint8).data) for one in (rows, next_rows))
        at_mine, at_theirs = rows.ctypes.data, next_rows.ctypes.data
        for at in range(0, len(mine), size):
            number, before = self._next * parts, at - self._back * size
            least = max(number + parts - 1 - self._far, self._sound * parts)
            former = self._rows[-self._back] if len(self._rows) >= self._back else []
            images: Sequence[_Image | None] = former
            # Most rows are those that came next in a row of this call: two comparisons are enough for them.
            is_next = before >= 0 and min(former).number >= least
            if not is_next or _compare(at_mine + at, at_theirs + before, size):
                is_next = False
                images = self._match(mine[at : at + size], number, former or self._nothing)
            own += [number + part - image.number if image else 0 for part, image in enumerate(images)]
            if images[-1]:
                self._back = self._next - images[-1].number // parts
            shifted = [*images[1:], None]
            if is_next and not _compare(at_theirs + at, at_mine + at + width, size - width):
                images = shifted
            else:
                images = self._match(theirs[at : at + size], number, shifted)
            added = self._add(theirs[at : at + size], number, images)
            others += [number + part - image.number for part, image in enumerate(added)]
        self._end = max(self._end, self._next)
        return np.array(own, np.int64).reshape(-1, parts), np.array(others, np.int64).reshape(-1, parts)

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
                image = self._look_up(data, number)
                if image is not None and (image.number < least or image.data != data):
                    image = None
            found.append(image)
        return found

    def _look_up(self, data: bytes, number: int) -> _Image | None:
        """Return the newest image with the checksum of some bytes, which belong to an image with a number."""
        while self._unlisted:
            image = self._unlisted.popleft()
            self._images[google_crc32c.value(image.data)] = image
        if len(self._images) > 2 * self._far:
            near = self._images.items()
            self._images = {crc: image for crc, image in near if number - image.number <= self._far}
        return self._images.get(google_crc32c.value(data))

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
                image = _Image(number + part, data)
                self._unlisted.append(image)
                if number - self._unlisted[0].number > self._far:
                    self._unlisted.popleft()
            added.append(image)
        self._rows.append(added)
        self._next += 1
        return added

    def copy_next(self, places: IntArray) -> Bytes | None:
        """Copy the next values of rows; see `NextValues`."""
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
        self._unlisted.clear()
