"""Find rows and images that need not be stored, because an earlier next observation has the same bytes.

Used where columns are written. Bytes are compared, so lanes, workers and batches may be interleaved in any
way.
"""

from __future__ import annotations

import ctypes

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from expstore.core.values import Array, IntArray

#: Number of distances that are tried first: those that matched last.
_RECENT = 4
Bytes = NDArray[np.uint8]


class NextRows:
    """The next observations of the last rows, and a search for equal rows among them.

    Used by one thread. It is only in memory: a new object knows no rows, and finds fewer matches.

    Args:
        row_bytes: Length of a row.
        reach: Number of preceding rows that are searched.
        parts: Number of images in a row, if rows may be stacks of images; otherwise 1.

    Example:
        >>> from expstore.storages.columns.dedup_finder import NextRows
        >>> known = NextRows(4, 8)
        >>> frames = np.arange(10, dtype=np.int32)
        >>> known.find(100, frames[:3], frames[1:4])  # row 101 equals what comes next in row 100
        array([0, 1, 1])
        >>> known.find(103, frames[3:5], frames[4:6])
        array([1, 1])
        >>> known.find(205, frames[5:7], frames[6:8])  # other rows were written in between
        array([0, 1])
    """

    def __init__(self, row_bytes: int, reach: int, parts: int = 1) -> None:
        self._reach, self._row_bytes, self._parts = reach, row_bytes, parts
        # The unit of comparisons.
        self._word: type[np.uint64 | np.uint8] = np.uint64 if row_bytes % (8 * parts) == 0 else np.uint8
        self._rows: Bytes = np.empty((0, row_bytes), np.uint8)  # room for twice the reach
        self._next = -1  # place of the next row
        self._first = 0  # place of the first row in `_rows`
        self._held = 0  # number of rows in `_rows`
        self._recent: list[int] = []
        self._places: dict[int, int] = {}  # place of the newest row with a checksum
        self._summed = 0  # rows up to this place are in `_places`
        #: For each row in `_rows`: how many rows before it the stacks are that it continues; nearest first.
        self._chains: list[tuple[int, ...]] = []
        self._lines: dict[tuple[int, tuple[int, ...]], tuple[int, ...]] = {}  # results of `_locate`
        self._end = 0  # behind the last place of any call
        self._sound = 0  # rows from this place on are stored as this object said
        # Place and result of the last call of `find`, and the result of `find_parts`.
        self._told = -1, np.empty(0, np.int64), np.empty((2, 0, parts), np.int64)

    def find(self, place: int, rows: Array, next_rows: Array) -> IntArray:
        """Return how many rows before each row a row has the same bytes as its next value; 0: none has.

        Args:
            place: Place of the first row. If it does not follow the rows of the last call, those are
                forgotten; rows of the last call may be passed again, followed by new ones.
            rows: C-contiguous. Shape `(n, *row shape)`.
            next_rows: The next value of each row. C-contiguous, same shape and dtype.
        """
        mine = rows.reshape(-1).view(np.uint8).reshape(-1, self._row_bytes)
        theirs = next_rows.reshape(-1).view(np.uint8).reshape(-1, self._row_bytes)
        found, stored = np.zeros(len(mine), np.int64), np.zeros((2, len(mine), self._parts), np.int64)
        done = 0 if place == self._next else self._copy_told(place, mine, theirs, found, stored)
        if not done and place != self._next:
            self._begin(place)
        for start in range(done, len(mine), self._reach):
            part = slice(start, min(start + self._reach, len(mine)))
            self._add(theirs[part])
            self._find_some(mine[part], found[part])
            if self._parts > 1:
                self._find_stored(mine[part], theirs[part], found[part], stored[:, part])
            self._next += part.stop - start
        self._end = max(self._end, self._next)
        self._told = place, found, stored
        return found

    def find_parts(self, place: int, rows: Array, next_rows: Array) -> tuple[IntArray, IntArray]:
        """Return where the images of rows and of their next values are stored, if each is stored once.

        An image that a next value shares with the stack before it is stored with the first stack that has it.

        Args:
            place: As in `find`.
            rows: As in `find`.
            next_rows: As in `find`.

        Returns:
            For each image of the rows and of their next values, how many images before it the same bytes are
            stored with a next value, at most `reach` rows before; 0: it is stored with its row. Shapes
            `(n, parts)`.
        """
        found = self.find(place, rows, next_rows)
        mine, theirs = self._told[2]
        return (found[:, None] if self._parts == 1 else mine), theirs

    def _find_stored(self, rows: Bytes, next_rows: Bytes, found: IntArray, stored: IntArray) -> None:
        """Fill in where the images of the last rows are stored; see `find_parts`."""
        parts, width = self._parts, self._row_bytes // self._parts
        mine, theirs = rows[:, width:].view(self._word), next_rows[:, :-width].view(self._word)
        follows = (mine == theirs).all(1) & (found <= self._reach // parts)
        lines = []
        for place, distance, is_next in zip(
            range(self._held - found.size, self._held), found.tolist(), follows.tolist(), strict=True
        ):
            distance = distance if self._first + place - distance >= self._sound else 0
            before = self._chains[place - distance] if distance else ()
            chain: tuple[int, ...] = ()
            if distance and is_next:
                chain = (distance, *(distance + further for further in before[: parts - 2]))
            self._chains.append(chain)
            lines.append((*self._locate(distance, before), *self._locate(0, chain)))
        stored[:] = np.array(lines, np.int64).reshape(-1, 2, parts).swapaxes(0, 1)

    def _locate(self, distance: int, chain: tuple[int, ...]) -> tuple[int, ...]:
        """Return how many images before its own position each image of a row is stored; see `find_parts`.

        Args:
            distance: How many rows before it the stack with the same bytes is; 0: the row is a stack itself.
            chain: How many rows before that stack those are that it continues, the nearest first.
        """
        known = self._lines.get((distance, chain))
        if known is None:
            parts, back = self._parts, (0, *chain)
            steps = [min(parts - 1 - part, len(chain)) for part in range(parts)]
            known = tuple((distance + back[step]) * parts - step if distance or step else 0 for step in steps)
            known = tuple(number if number <= self._reach * parts else 0 for number in known)
            if len(self._lines) > self._reach:
                self._lines.clear()
            self._lines[distance, chain] = known
        return known

    def copy_next(self, places: IntArray) -> Bytes | None:
        """Copy the next values of rows; None: not all of them are in memory.

        Args:
            places: Places of the rows. Shape `(n,)`.

        Returns:
            Shape `(n, row_bytes)`.
        """
        at = places - self._first
        if at.min() < 0 or at.max() >= self._held:
            return None
        return self._rows[at]

    def _copy_told(self, place: int, rows: Bytes, next_rows: Bytes, found: IntArray, stored: IntArray) -> int:
        """Reuse the last result if the same rows are passed again; return how many rows it covers."""
        first, before, parts = self._told
        count = before.size
        base = self._held - count
        if place != first or place + count != self._next or count > len(rows) or base < 0:
            return 0
        at = np.flatnonzero(before)
        theirs = base + at - before[at]
        if (theirs < 0).any() or (rows[at] != self._rows[theirs]).any():
            return 0
        if (next_rows[:count] != self._rows[base : self._held]).any():
            return 0
        found[:count], stored[:, :count] = before, parts
        return count

    def _begin(self, place: int) -> None:
        if not len(self._rows):
            self._rows = np.empty((2 * self._reach, self._row_bytes), np.uint8)
        self._sound = self._end if place < self._end else place
        self._next = self._first = self._summed = place
        self._held = 0
        self._places.clear()
        self._chains.clear()

    def _add(self, rows: Bytes) -> None:
        """Append rows to `_rows`, and drop the oldest ones if there is no room."""
        if self._held + len(rows) > len(self._rows):
            gone = self._held - min(self._held, self._reach)
            to, length = self._rows.ctypes.data, self._row_bytes
            ctypes.memmove(to, to + gone * length, (self._held - gone) * length)
            del self._chains[:gone]
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
