"""The ids of the rows of episodes, as fragments: arithmetic runs of ids.

Used by `expstore.episodes.table`. It does not know about sources or trajectories, and touches no files.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from expstore.core.id_set import IdSet
from expstore.core.values import IntArray

__all__ = ["Fragments", "all_ids", "clip", "cut_out", "cut_uneven", "find_fragments", "last_ids"]

#: With more changed fragments, `take_touched` returns None: the caller reads all fragments instead.
_MANY_TOUCHED = 65_536
#: Number of fragments from which, and from twice the last number of live ones, dead ones are removed.
_MANY_DEAD = 16_384


class Fragments:
    """Fragments (arithmetic runs of one episode's rows) in the order in which they were written.

    Columns are `episode, first_step, length, first_id, stride`, int64.
    """

    COLUMNS = ("episode", "first_step", "length", "first_id", "stride")

    def __init__(self) -> None:
        self._data = np.zeros((5, 256), np.int64)
        self._head = 0
        self._tail = 0
        self._popped = 0  # added to positions, so that numbers stay valid when the head is removed
        #: Numbers of the fragments that were added or lengthened since the last `take_touched`. None if it
        #: was never called, or if they are too many.
        self._touched: set[int] | None = None
        self._bearable = _MANY_DEAD

    @property
    def rows(self) -> IntArray:
        """The live columns. Shape `(5, fragments)`; a view."""
        return self._data[:, self._head : self._tail]

    def number_of(self, place: int) -> int:
        """Return the number, for `add`, of the fragment in a column of `rows`."""
        return self._popped + self._head + place

    def step_after(self, number: int) -> int:
        """Return the step after the last one of fragment `number`; -1 if the fragment was removed."""
        place = number - self._popped
        return int(self._data[1, place] + self._data[2, place]) if place >= self._head else -1

    def add(self, number: int, values: tuple[int, int, int, int, int]) -> int:
        """Append a run, or lengthen fragment `number` if the run continues it; return the fragment's number.

        `number` is -1 if the run continues no fragment.
        """
        _, _, count, first, stride = values
        place = number - self._popped
        if number >= 0 and place >= self._head:
            length, start, step = self._data[2:, place].tolist()
            if length == 1:
                step = first - start
            if first == start + length * step and (count == 1 or stride == step):
                self._data[2, place] = length + count
                self._data[4, place] = step
                if self._touched is not None:
                    self._touch(number)
                return number
        if self._tail == self._data.shape[1]:
            self._grow()
        self._data[:, self._tail] = values
        self._tail += 1
        number = self._popped + self._tail - 1
        if self._touched is not None:
            self._touch(number)
        return number

    def _touch(self, number: int) -> None:
        if self._touched is not None:
            self._touched.add(number)
            if len(self._touched) > _MANY_TOUCHED:
                self._touched = None

    @property
    def quiet(self) -> bool:
        """Whether no fragment was added or lengthened since `take_touched`."""
        return self._touched is not None and not self._touched

    def take_touched(self) -> IntArray | None:
        """Return the fragments that were added or lengthened since the last call, as columns in their order.

        Returns:
            A copy. Shape `(5, n)`. None at the first call, or if they are too many: then read all fragments.
        """
        touched, self._touched = self._touched, set()
        if touched is None:
            return None
        if len(touched) == 1:
            place = touched.pop() - self._popped
            return self._data[:, place : place + (place >= self._head)].copy()
        places = np.fromiter(touched, np.int64, len(touched)) - self._popped
        places.sort()
        return self._data.take(places[places >= self._head], axis=1)

    def fill(self, columns: IntArray) -> None:
        """Replace all fragments by new columns."""
        size = columns.shape[1]
        self._touched = None
        self._popped += self._tail
        self._data = np.zeros((5, max(256, 2 * size)), np.int64)
        self._data[:, :size] = columns
        self._head, self._tail = 0, size

    @property
    def crowded(self) -> bool:
        """Whether there are so many fragments that `evict` should be called."""
        return self._tail - self._head > self._bearable

    def evict(self, low: int) -> IntArray:
        """Remove fragments whose rows all have ids <= `low`: at least those at the head.

        Returns:
            The episodes of the removed fragments.
        """
        rows = self.rows
        alive = last_ids(rows) > low
        dead = int(np.argmax(alive)) if alive.any() else alive.size
        self._bearable = max(_MANY_DEAD, 2 * (alive.size - dead))
        if 2 * np.count_nonzero(alive) < alive.size - dead:
            # An episode without an end keeps the head alive, and most fragments after it are dead.
            gone: IntArray = rows[0, ~alive]
            self.fill(rows[:, alive])
            return gone
        gone = rows[0, :dead].copy()
        self._head += dead
        return gone

    def _grow(self) -> None:
        live = self.rows
        size = live.shape[1]
        data = np.zeros((5, max(256, 2 * size)), np.int64)
        data[:, :size] = live
        self._popped += self._head
        self._data, self._head, self._tail = data, 0, size


def last_ids(fragments: IntArray) -> IntArray:
    """Return the last id of each fragment. `fragments` has shape `(5, n)`."""
    ids: IntArray = fragments[3] + (fragments[2] - 1) * fragments[4]
    return ids


def all_ids(fragments: IntArray) -> IntArray:
    """Return the ids of all rows of fragments, concatenated. Shape `(rows,)`."""
    _, _, count, first, stride = fragments
    number = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
    ids: IntArray = np.repeat(first, count) + number * np.repeat(stride, count)
    return ids


def clip(fragments: IntArray, low: int) -> IntArray:
    """Return fragments without the rows with ids <= `low`; fragments without other rows are left out."""
    gone = np.maximum(0, -(-(low + 1 - fragments[3]) // np.maximum(1, fragments[4])))
    kept = fragments.copy()
    kept[1] += gone
    kept[2] -= gone
    kept[3] += gone * fragments[4]
    return kept[:, kept[2] > 0]


def cut_out(fragments: IntArray, deleted: IdSet) -> IntArray:
    """Return fragments without the deleted rows, which may split them; sorted by first id."""
    touched = deleted.meets(fragments[3], last_ids(fragments))
    if touched.any():
        cut = fragments[:, touched]
        ids, owner = all_ids(cut), np.repeat(np.arange(cut.shape[1]), cut[2])
        number = np.arange(ids.size) - np.repeat(np.cumsum(cut[2]) - cut[2], cut[2])
        alive = ~deleted.holds(ids)
        ids, owner, number = ids[alive], owner[alive], number[alive]
        begins = np.ones(ids.size, bool)
        begins[1:] = (owner[1:] != owner[:-1]) | (number[1:] != number[:-1] + 1)
        first = np.flatnonzero(begins)
        of, counts = owner[first], np.diff(np.append(first, ids.size))
        parts = np.stack([cut[0, of], cut[1, of] + number[first], counts, ids[first], cut[4, of]])
        fragments = np.concatenate([fragments[:, ~touched], parts], axis=1)
    fragments = fragments[:, fragments[2] > 0]
    return fragments[:, np.argsort(fragments[3], kind="stable")]


def find_fragments(episodes: IntArray, steps: IntArray, ids: IntArray) -> IntArray:
    """Find the fragments of rows.

    Args:
        episodes: Episode id of each row. Shape `(n,)`.
        steps: Step of each row. Shape `(n,)`.
        ids: Id of each row, ascending. Shape `(n,)`.

    Returns:
        The columns of `Fragments`, sorted by first id. Shape `(5, fragments)`.
    """
    n = episodes.size
    if n == 0:
        return np.zeros((5, 0), np.int64)
    cut = np.ones(n, bool)
    cut[1:] = (episodes[1:] != episodes[:-1]) | (steps[1:] != steps[:-1] + 1) | (ids[1:] != ids[:-1] + 1)
    if np.count_nonzero(cut) > n // 4:  # interleaved lanes: search along each episode instead
        order = np.lexsort((steps, episodes))
        episodes, steps, ids = episodes[order], steps[order], ids[order]
        cut[1:] = (episodes[1:] != episodes[:-1]) | (steps[1:] != steps[:-1] + 1)
        deleted = np.diff(ids)
        cut[2:] |= ~cut[1:-1] & (deleted[1:] != deleted[:-1])
    first = np.flatnonzero(cut)
    counts = np.diff(np.append(first, n))
    stride = np.ones(first.size, np.int64)
    many = counts > 1
    stride[many] = ids[first[many] + 1] - ids[first[many]]
    found = np.stack([episodes[first], steps[first], counts, ids[first], stride])
    return found[:, np.argsort(found[3], kind="stable")]


def cut_uneven(cut: NDArray[np.bool_], order: IntArray) -> None:
    """Cut runs whose rows are not evenly spaced in the batch, as rows between them were dropped."""
    deleted = np.diff(order)
    uneven = np.flatnonzero(~cut[1:-1] & ~cut[2:] & (deleted[1:] != deleted[:-1])) + 2
    for place in uneven.tolist():
        # Unless the previous cut has already begun a new run here.
        if not cut[place - 1]:
            cut[place] = True
