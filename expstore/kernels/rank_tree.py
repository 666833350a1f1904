"""A tree of ranks with constant-time access to the lowest one, in which batches replace the lowest ranks.

Used by the writer that keeps the best rows. A flat tree of fan-out 8 over float64 leaves; each node is the
minimum of its children (a tournament). It does not know about rows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from expstore.core.values import IntArray
from expstore.kernels.file_loops import compiled

Floats = NDArray[np.float64]

#: Children of a node. Eight float64 are one cache line.
FAN = 8


@compiled("void(float64[::1], int64[::1], int64)")
def _raise(least: Floats, levels: IntArray, place: int) -> None:
    """Recompute the nodes above a leaf, up to the first one that does not change."""
    for level in range(levels.size - 2, 0, -1):
        place //= FAN
        first = levels[level] + place * FAN
        lowest = least[first]
        for node in range(first + 1, first + FAN):
            lowest = least[node] if least[node] < lowest else lowest
        if least[levels[level - 1] + place] == lowest:
            return
        least[levels[level - 1] + place] = lowest


@compiled("void(float64[::1], int64[::1])")
def _raise_all(least: Floats, levels: IntArray) -> None:
    """Recompute every node above the leaves."""
    for level in range(levels.size - 2, 0, -1):
        for parent in range((levels[level + 1] - levels[level]) // FAN):
            first = levels[level] + parent * FAN
            lowest = least[first]
            for node in range(first + 1, first + FAN):
                lowest = least[node] if least[node] < lowest else lowest
            least[levels[level - 1] + parent] = lowest


@compiled("void(float64[::1], int64[::1], int64[::1], float64[::1])")
def _set(least: Floats, levels: IntArray, places: IntArray, ranks: Floats) -> None:
    for i in range(places.size):
        least[levels[levels.size - 2] + places[i]] = ranks[i]
        _raise(least, levels, places[i])


@compiled("void(float64[::1], int64[::1], float64[::1], int64[::1])")
def _take(least: Floats, levels: IntArray, ranks: Floats, places: IntArray) -> None:
    """Insert ranks one after the other, each at the first of the lowest places."""
    for i in range(ranks.size):
        lowest = least[0]
        for node in range(1, FAN):
            lowest = least[node] if least[node] < lowest else lowest
        if not ranks[i] > lowest:
            places[i] = -1
            continue
        place = 0
        for level in range(levels.size - 1):
            first = levels[level] + place * FAN
            child = 0
            while least[first + child] != lowest:
                child += 1
            place = place * FAN + child
        least[levels[levels.size - 2] + place] = ranks[i]
        _raise(least, levels, place)
        places[i] = place


class RankTree:
    """The ranks of places 0 to `size` - 1; a place without a rank is never replaced.

    Threads: the caller holds the storage's lock. The state depends on the ranks only, not on the order in
    which they were set. Crashes: nothing is stored.

    Args:
        size: Number of places.

    Example:
        >>> from expstore.kernels.rank_tree import RankTree
        >>> tree = RankTree(4)
        >>> tree.set(np.arange(4), np.array([3.0, 1.0, 2.0, 1.0]))
        >>> tree.take(np.array([0.5, 2.5, 1.0, 4.0])).tolist()
        [-1, 1, -1, 3]
    """

    def __init__(self, size: int) -> None:
        widths = [-(-max(size, 1) // FAN) * FAN]
        while widths[0] > FAN:
            widths.insert(0, -(-(widths[0] // FAN) // FAN) * FAN)
        self.size = size
        self._levels = np.concatenate([[0], np.cumsum(widths)]).astype(np.int64)
        self._least = np.full(int(self._levels[-1]), np.inf)

    def set(self, places: IntArray, ranks: Floats) -> None:
        """Set the ranks of places.

        Args:
            places: The places. Shape `(n,)`, int64.
            ranks: Their ranks, without NaN. Shape `(n,)`, float64.
        """
        if FAN * places.size < self.size:
            _set(self._least, self._levels, places, ranks)
        else:
            self._least[self._levels[-2] + places] = ranks
            _raise_all(self._least, self._levels)

    def take(self, ranks: Floats) -> IntArray:
        """Insert ranks in their order: a rank above the lowest one replaces it.

        Among equal lowest ranks the first place is replaced. A later rank may replace one inserted before.

        Args:
            ranks: The new ranks, without NaN. Shape `(n,)`, float64.

        Returns:
            The place of each new rank, -1 if it was not inserted. Shape `(n,)`, int64.
        """
        places = np.empty(ranks.size, np.int64)
        _take(self._least, self._levels, ranks, places)
        return places

    @property
    def lowest(self) -> float:
        """The lowest rank, which a new rank must exceed."""
        return float(self._least[:FAN].min())
