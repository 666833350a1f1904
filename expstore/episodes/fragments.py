"""The ids of the rows of episodes, as fragments: arithmetic runs of ids.

Used by `expstore.episodes.table`. It does not know about sources or trajectories, and touches no files.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from expstore.core.id_set import IdSet
from expstore.core.values import IntArray

#: With more changed fragments, `take_touched` returns None: the caller reads all fragments instead.
_MANY_TOUCHED = 65_536
#: Number of fragments in a block.
_BLOCK = 256


class CapturedFragments:
    """The fragments at one moment. They do not change, and can be read without a lock.

    Args:
        blocks: The fragments in their order. Shapes `(5, n)`.
    """

    __slots__ = ("_blocks", "_columns")

    def __init__(self, blocks: Sequence[IntArray]) -> None:
        self._blocks = blocks
        self._columns: IntArray | None = None

    def columns(self) -> IntArray:
        """Return the columns of all fragments. Shape `(5, fragments)`, C-contiguous. Do not change them."""
        if self._columns is None:
            self._columns = np.concatenate([np.zeros((5, 0), np.int64), *self._blocks], axis=1)
        return self._columns

    def of(self, episodes: IntArray) -> IntArray:
        """Return the columns of the fragments of some episodes, in the order of `columns`."""
        columns = self.columns()
        return columns[:, np.isin(columns[0], episodes)]


class Fragments:
    """Fragments (arithmetic runs of one episode's rows) in the order in which they were written.

    Columns are `episode, first_step, length, first_id, stride`, int64, stored in blocks. A block that was
    captured is copied before it changes, so that `capture` copies no fragments.
    """

    COLUMNS = ("episode", "first_step", "length", "first_id", "stride")

    def __init__(self) -> None:
        #: By number, ascending. Fragment n is column n % _BLOCK of block n // _BLOCK.
        self._blocks: dict[int, IntArray] = {}
        self._head = 0  # number of the oldest fragment
        self._tail = 0  # number of the next fragment
        self._owned: set[int] = set()  # blocks that no capture refers to
        self._unexamined: list[int] = []  # blocks that `evict` examines next, the next one last
        self._examined = 0  # the newest block when `evict` was last called
        #: Numbers of the fragments that were added or lengthened since the last `take_touched`. None if it
        #: was never called, or if they are too many.
        self._touched: set[int] | None = None

    def __len__(self) -> int:
        """Return the number of fragments; with gaps between blocks, an upper bound."""
        return min(self._tail - self._head, len(self._blocks) * _BLOCK)

    @property
    def rows(self) -> IntArray:
        """The columns. Shape `(5, fragments)`; a copy."""
        return CapturedFragments(self._parts()).columns()

    def capture(self) -> CapturedFragments:
        """Return the present fragments, to be read without the lock under which this is called."""
        self._owned.clear()
        return CapturedFragments(self._parts())

    def _parts(self) -> list[IntArray]:
        parts = list(self._blocks.values())
        if parts:
            first, last = next(iter(self._blocks)), next(reversed(self._blocks))
            parts[-1] = parts[-1][:, : self._tail - last * _BLOCK]
            parts[0] = parts[0][:, max(0, self._head - first * _BLOCK) :]
        return parts

    def step_after(self, number: int) -> int:
        """Return the step after the last one of fragment `number`; -1 if the fragment was removed."""
        block = self._blocks.get(number // _BLOCK)
        if block is None or number < self._head:
            return -1
        return int(block[1, number % _BLOCK] + block[2, number % _BLOCK])

    def add(self, number: int, values: tuple[int, int, int, int, int]) -> int:
        """Append a run, or lengthen fragment `number` if the run continues it; return the fragment's number.

        `number` is -1 if the run continues no fragment.
        """
        if number >= self._head and (block := self._blocks.get(number // _BLOCK)) is not None:
            _, _, count, first, stride = values
            place = number % _BLOCK
            length, start, step = block[2:, place].tolist()
            if length == 1:
                step = first - start
            if first == start + length * step and (count == 1 or stride == step):
                if number // _BLOCK not in self._owned:
                    block = self._blocks[number // _BLOCK] = block.copy()
                    self._owned.add(number // _BLOCK)
                block[2, place] = length + count
                block[4, place] = step
                if self._touched is not None:
                    self._touch(number)
                return number
        number = self._tail
        if number % _BLOCK == 0:
            self._blocks[number // _BLOCK] = np.zeros((5, _BLOCK), np.int64)
            self._owned.add(number // _BLOCK)
        self._blocks[number // _BLOCK][:, number % _BLOCK] = values
        self._tail = number + 1
        if self._touched is not None:
            self._touch(number)
        return number

    def append(self, columns: IntArray) -> None:
        """Append runs that continue no fragment. Shape `(5, n)`."""
        first, size = self._tail, columns.shape[1]
        while self._tail < first + size:
            number, place = divmod(self._tail, _BLOCK)
            if not place:
                self._blocks[number] = np.zeros((5, _BLOCK), np.int64)
                self._owned.add(number)
            done = self._tail - first
            part = columns[:, done : done + _BLOCK - place]
            self._blocks[number][:, place : place + part.shape[1]] = part
            self._tail += part.shape[1]
        if self._touched is not None:
            self._touch(*range(first, self._tail))

    def _touch(self, *numbers: int) -> None:
        if self._touched is not None:
            self._touched.update(numbers)
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
            place = touched.pop()
            block = self._blocks.get(place // _BLOCK)
            if block is None or place < self._head:
                return np.zeros((5, 0), np.int64)
            return block[:, place % _BLOCK : place % _BLOCK + 1].copy()
        numbers = np.fromiter(touched, np.int64, len(touched))
        numbers.sort()
        numbers = numbers[np.searchsorted(numbers, self._head) :]
        blocks, places = np.divmod(numbers, _BLOCK)
        cuts = [0, *(np.flatnonzero(blocks[1:] != blocks[:-1]) + 1).tolist(), numbers.size]
        found = [
            block.take(places[start:stop], axis=1)
            for start, stop in pairwise(cuts)
            if start < stop and (block := self._blocks.get(int(blocks[start]))) is not None
        ]
        return np.concatenate(found, axis=1) if found else np.zeros((5, 0), np.int64)

    def fill(self, columns: IntArray) -> int:
        """Replace all fragments by new columns; return the number of the first one."""
        size = columns.shape[1]
        self._touched = None
        self._blocks.clear()
        self._owned.clear()
        first = -(-self._tail // _BLOCK)
        for start in range(0, size, _BLOCK):
            block = np.zeros((5, _BLOCK), np.int64)
            part = columns[:, start : start + _BLOCK]
            block[:, : part.shape[1]] = part
            self._blocks[first + start // _BLOCK] = block
        self._owned.update(self._blocks)
        self._head = first * _BLOCK
        self._tail = self._head + size
        return self._head

    @property
    def crowded(self) -> bool:
        """Whether blocks were added since `evict` was last called."""
        return self._tail // _BLOCK > self._examined

    def evict(self, low: int) -> IntArray:
        """Remove fragments whose rows all have ids <= `low`: at least those at the head.

        An episode without an end may keep the head alive: other fragments are removed with their whole block.
        Each call examines twice as many blocks as were added since the last call, which bounds their number.

        Returns:
            The episodes of the removed fragments.
        """
        gone: list[IntArray] = [np.empty(0, np.int64)]
        added = self._tail // _BLOCK - self._examined
        while self._blocks and self._evict_block(next(iter(self._blocks)), low, gone):
            pass
        for _ in range(min(1 + 2 * added, len(self._blocks))):
            if not self._unexamined:
                self._unexamined = list(reversed(self._blocks))
            self._evict_block(self._unexamined.pop(), low, gone)
        self._examined = self._tail // _BLOCK
        parts = self._parts()
        if parts:
            dead = int(np.argmax(last_ids(parts[0]) > low))
            gone.append(parts[0][0, :dead].copy())
            self._head = max(self._head, next(iter(self._blocks)) * _BLOCK) + dead
        return np.concatenate(gone)

    def _evict_block(self, number: int, low: int, gone: list[IntArray]) -> bool:
        """Remove a block if all of its rows have ids <= `low`; return whether it was removed."""
        block = self._blocks.get(number)
        if block is None:
            return False
        used = block[:, : self._tail - number * _BLOCK]
        if (last_ids(used) > low).any():
            return False
        gone.append(used[0, max(0, self._head - number * _BLOCK) :])
        del self._blocks[number]
        self._owned.discard(number)
        if number == self._tail // _BLOCK:
            self._tail = (number + 1) * _BLOCK
        return True


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


def count_live(fragments: IntArray, episodes: IntArray, low: int) -> IntArray:
    """Count the rows of episodes with ids above `low`. Shapes `(5, fragments)`, `(n,)`; result `(n,)`."""
    kept = clip(fragments, low)
    names, places = np.unique(kept[0], return_inverse=True)
    if not names.size:
        return np.zeros(episodes.size, np.int64)
    counts = np.bincount(places, weights=kept[2]).astype(np.int64)
    at = np.minimum(np.searchsorted(names, episodes), names.size - 1)
    return np.where(names[at] == episodes, counts[at], 0)
