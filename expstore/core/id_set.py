"""Runs of deleted ids between ids that can be read.

Part of every window of rows: a repair deletes rows whose bytes are lost, retention deletes rows that are no
longer wanted. 100,000 runs cost no more than a few: every look-up is a binary search. It touches no files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["NO_IDS", "IdSet"]

_Ids = NDArray[np.int64]


class IdSet:
    """Immutable, ascending runs of ids that do not touch one another.

    Args:
        first: First id of each run, ascending. Shape `(n,)`, int64.
        last: Last id of each. Shape `(n,)`, int64.

    Example:
        >>> deleted = IdSet.of([(3, 5), (9, 9)])
        >>> deleted.holds(np.array([2, 3, 9])).tolist(), deleted.upto(4)
        ([False, True, True], 2)
    """

    __slots__ = ("_gone", "_left", "first", "last")

    def __init__(self, first: _Ids, last: _Ids) -> None:
        self.first, self.last = first, last
        self._gone = np.zeros(first.size + 1, np.int64)  # ids in the runs before each
        np.cumsum(last + 1 - first, out=self._gone[1:])
        self._left = first - 1 - self._gone[:-1]  # other ids before each

    @classmethod
    def of(cls, runs: Iterable[tuple[int, int]]) -> IdSet:
        """Return the ids of runs, given as (first, last) in any order."""
        if isinstance(runs, IdSet):
            return runs
        pairs = np.array(list(runs), np.int64).reshape(-1, 2)
        return cls.merge(pairs[:, 0], pairs[:, 1])

    @classmethod
    def merge(cls, first: _Ids, last: _Ids) -> IdSet:
        """Return the ids of runs in any order, which may overlap. Shapes `(n,)`."""
        if not first.size:
            return NO_IDS
        order = np.argsort(first, kind="stable")
        first, last = first[order], np.maximum.accumulate(last[order])
        begins = np.ones(first.size, bool)
        begins[1:] = first[1:] > last[:-1] + 1
        starts = np.flatnonzero(begins)
        return cls(first[starts], last[np.append(starts[1:], first.size) - 1])

    @classmethod
    def of_ids(cls, ids: _Ids) -> IdSet:
        """Return what holds these ids, given in any order. Shape `(n,)`."""
        return cls.merge(ids, ids)

    def join(self, other: IdSet) -> IdSet:
        """Return what holds the ids of both."""
        if not other or not self:
            return self or other
        return IdSet.merge(np.append(self.first, other.first), np.append(self.last, other.last))

    def intersect(self, other: IdSet) -> IdSet:
        """Return what holds the ids that both do."""
        points = np.unique(np.concatenate([self.first, self.last + 1, other.first, other.last + 1]))
        first, last = points[:-1], points[1:] - 1
        both = self.holds(first) & other.holds(first)
        return IdSet.merge(first[both], last[both])

    def widen(self, ids: int) -> IdSet:
        """Return the same runs, each so many ids longer at both ends."""
        return IdSet.merge(self.first - ids, self.last + ids)

    def between(self, low: int, last: int) -> IdSet:
        """Return the runs that have ids above `low`, as they are, cut off behind `last`."""
        kept = (self.last > low) & (self.first <= last)
        if kept.all() and (not self or self.last[-1] <= last):
            return self
        return IdSet(self.first[kept], np.minimum(self.last[kept], last))

    def shift(self, shift: int) -> IdSet:
        """Return the same runs, so many ids further on."""
        return IdSet(self.first + shift, self.last + shift)

    def holds(self, ids: _Ids) -> NDArray[np.bool_]:
        """Say which ids lie in a run. Shapes `(n,)`."""
        if not self:
            return np.zeros(ids.shape, np.bool_)
        at = np.searchsorted(self.first, ids, side="right") - 1
        found: NDArray[np.bool_] = (at >= 0) & (ids <= self.last[at])
        return found

    def meets(self, first: _Ids, last: _Ids) -> NDArray[np.bool_]:
        """Say which ranges, from `first` to `last`, have an id in a run. Shapes `(n,)`."""
        if not self:
            return np.zeros(first.shape, np.bool_)
        at = np.searchsorted(self.first, last, side="right") - 1
        found: NDArray[np.bool_] = (at >= 0) & (self.last[at] >= first)
        return found

    def upto(self, id: int) -> int:
        """Return how many ids up to this one lie in runs."""
        at = int(np.searchsorted(self.first, id, side="right"))
        return int(self._gone[at]) - (max(0, int(self.last[at - 1]) - id) if at else 0)

    def counts(self, ids: _Ids) -> _Ids:
        """Return the same for each of some ids. Shapes `(n,)`."""
        at = np.searchsorted(self.first, ids, side="right")
        if not self:
            return np.zeros(ids.shape, np.int64)
        beyond = np.where(at > 0, np.maximum(0, self.last[at - 1] - ids), 0)
        found: _Ids = self._gone[at] - beyond
        return found

    def nth(self, numbers: _Ids) -> _Ids:
        """Return the ids that lie in no run with these numbers, counted from 0 at id 1. Shapes `(n,)`."""
        found: _Ids = numbers + 1 + self._gone[np.searchsorted(self._left, numbers, side="right")]
        return found

    def others(self, low: int, last: int) -> tuple[_Ids, _Ids]:
        """Return the runs of ids above `low`, up to `last`, that lie in none: first ids and last ids."""
        known = self.between(low, last)
        first = np.append(low + 1, known.last + 1)
        until = np.append(known.first - 1, last)
        some = first <= until
        return first[some], until[some]

    @property
    def ids(self) -> int:
        """How many ids lie in runs."""
        return int(self._gone[-1])

    def __len__(self) -> int:
        return int(self.first.size)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self.first.tolist(), self.last.tolist(), strict=True)

    def __eq__(self, other: Any) -> bool:
        if not isinstance(other, IdSet):
            return NotImplemented
        return self is other or (
            np.array_equal(self.first, other.first) and np.array_equal(self.last, other.last)
        )

    def __hash__(self) -> int:
        return hash((len(self), self.ids))

    def __repr__(self) -> str:
        return f"IdSet.of({list(self)})" if len(self) <= 8 else f"<{len(self)} runs of {self.ids} ids>"


NO_IDS = IdSet(np.zeros(0, np.int64), np.zeros(0, np.int64))
