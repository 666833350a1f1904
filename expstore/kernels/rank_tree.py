"""A rank for every place, the lowest at hand, and a batch of newcomers that take the places of lower ones.

Used by the writer that keeps the best rows. A flat tree of fan-out 8 over float64 leaves, each node the
least of its children (a tournament). It knows nothing of rows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from expstore.core.values import IntArray
from expstore.kernels.file_loops import compiled

__all__ = ["RankTree"]

Floats = NDArray[np.float64]

#: Children of a node. Eight float64 are one cache line.
FAN = 8


@compiled("void(float64[::1], int64[::1], int64)")
def _raise(least: Floats, levels: IntArray, place: int) -> None:
    """Make the nodes above a leaf anew, as far as they change."""
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
    """Make every node above the leaves anew."""
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
    """Let newcomers in one after the other, each at the first of the lowest places."""
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
    """Keep ranks of places 0 to `size` - 1; a place without one is never taken.

    Threads: whoever calls holds the storage's lock. The state follows from the ranks alone, not from the
    order in which they came. Crashes: nothing is kept.

    Args:
        size: How many places.

    Example:
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
            places: Which ones. Shape `(n,)`, int64.
            ranks: No NaN among them. Shape `(n,)`, float64.
        """
        if FAN * places.size < self.size:
            _set(self._least, self._levels, places, ranks)
        else:
            self._least[self._levels[-2] + places] = ranks
            _raise_all(self._least, self._levels)

    def take(self, ranks: Floats) -> IntArray:
        """Let newcomers in, in their order: who ranks above the lowest takes its place.

        Of equal ranks the first place goes first; a newcomer may be displaced by a later one.

        Args:
            ranks: Theirs; no NaN among them. Shape `(n,)`, float64.

        Returns:
            The place of each, -1 where it was not let in. Shape `(n,)`, int64.
        """
        places = np.empty(ranks.size, np.int64)
        _take(self._least, self._levels, ranks, places)
        return places

    @property
    def lowest(self) -> float:
        """The rank that a newcomer must beat."""
        return float(self._least[:FAN].min())
