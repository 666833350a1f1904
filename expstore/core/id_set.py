"""Sets of ids, stored as sorted runs; used for deleted rows between readable rows.

Part of every window of rows: a repair deletes rows with lost bytes, retention deletes rows that are no longer
needed. Every look-up is a binary search, so 100,000 runs cost little more than a few. This module uses no
files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

_Ids = NDArray[np.int64]


class IdSet:
    """An immutable set of ids: ascending runs, which neither overlap nor adjoin.

    Args:
        first: First id of each run, ascending. Shape `(n,)`, int64.
        last: Last id of each run. Shape `(n,)`, int64.

    Example:
        >>> from expstore.core.id_set import IdSet
        >>> deleted = IdSet.of([(3, 5), (9, 9)])
        >>> deleted.holds(np.array([2, 3, 9])).tolist(), deleted.upto(4)
        ([False, True, True], 2)
    """

    __slots__ = ("_gone", "_left", "first", "last")

    def __init__(self, first: _Ids, last: _Ids) -> None:
        self.first, self.last = first, last
        self._gone = np.zeros(first.size + 1, np.int64)  # number of ids in all runs before each run
        np.cumsum(last + 1 - first, out=self._gone[1:])
        self._left = first - 1 - self._gone[:-1]  # number of ids outside the runs before each run

    @classmethod
    def of(cls, runs: Iterable[tuple[int, int]]) -> IdSet:
        """Return the set of the ids of runs, passed as (first, last) in any order."""
        if isinstance(runs, IdSet):
            return runs
        pairs = np.array(list(runs), np.int64).reshape(-1, 2)
        return cls.merge(pairs[:, 0], pairs[:, 1])

    @classmethod
    def merge(cls, first: _Ids, last: _Ids) -> IdSet:
        """Return the set of the ids of runs, which may overlap and have any order. Shapes `(n,)`."""
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
        """Return the set of these ids, which may have any order. Shape `(n,)`."""
        return cls.merge(ids, ids)

    def join(self, other: IdSet) -> IdSet:
        """Return the union of both sets."""
        if not other or not self:
            return self or other
        return IdSet.merge(np.append(self.first, other.first), np.append(self.last, other.last))

    def intersect(self, other: IdSet) -> IdSet:
        """Return the intersection of both sets."""
        points = np.unique(np.concatenate([self.first, self.last + 1, other.first, other.last + 1]))
        first, last = points[:-1], points[1:] - 1
        both = self.holds(first) & other.holds(first)
        return IdSet.merge(first[both], last[both])

    def widen(self, ids: int) -> IdSet:
        """Return the runs, each extended by this number of ids at both ends."""
        return IdSet.merge(self.first - ids, self.last + ids)

    def between(self, low: int, last: int) -> IdSet:
        """Return the runs that contain ids in (low, last]: cut off after `last`, but not at `low`."""
        kept = (self.last > low) & (self.first <= last)
        if kept.all() and (not self or self.last[-1] <= last):
            return self
        return IdSet(self.first[kept], np.minimum(self.last[kept], last))

    def shift(self, shift: int) -> IdSet:
        """Return the runs with all ids increased by `shift`."""
        return IdSet(self.first + shift, self.last + shift)

    def holds(self, ids: _Ids) -> NDArray[np.bool_]:
        """Return whether each id is in a run. Shapes `(n,)`."""
        if not self:
            return np.zeros(ids.shape, np.bool_)
        at = np.searchsorted(self.first, ids, side="right") - 1
        found: NDArray[np.bool_] = (at >= 0) & (ids <= self.last[at])
        return found

    def meets(self, first: _Ids, last: _Ids) -> NDArray[np.bool_]:
        """Return whether each range, from `first` to `last`, contains an id of a run. Shapes `(n,)`."""
        if not self:
            return np.zeros(first.shape, np.bool_)
        at = np.searchsorted(self.first, last, side="right") - 1
        found: NDArray[np.bool_] = (at >= 0) & (self.last[at] >= first)
        return found

    def upto(self, id: int) -> int:
        """Return the number of ids in runs up to this id, including it."""
        at = int(np.searchsorted(self.first, id, side="right"))
        return int(self._gone[at]) - (max(0, int(self.last[at - 1]) - id) if at else 0)

    def counts(self, ids: _Ids) -> _Ids:
        """Return, for each id, the number of ids in runs up to it, including it. Shapes `(n,)`."""
        at = np.searchsorted(self.first, ids, side="right")
        if not self:
            return np.zeros(ids.shape, np.int64)
        beyond = np.where(at > 0, np.maximum(0, self.last[at - 1] - ids), 0)
        found: _Ids = self._gone[at] - beyond
        return found

    def nth(self, numbers: _Ids) -> _Ids:
        """Return the ids outside the runs that have these numbers, counted from 0 at id 1. Shapes `(n,)`."""
        found: _Ids = numbers + 1 + self._gone[np.searchsorted(self._left, numbers, side="right")]
        return found

    def others(self, low: int, last: int) -> tuple[_Ids, _Ids]:
        """Return the runs of ids in (low, last] that are not in this set: first ids and last ids."""
        known = self.between(low, last)
        first = np.append(low + 1, known.last + 1)
        until = np.append(known.first - 1, last)
        some = first <= until
        return first[some], until[some]

    @property
    def ids(self) -> int:
        """The number of ids in all runs."""
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
