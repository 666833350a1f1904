"""A sum tree: a weight for every place, from which places are drawn in proportion to their weights.

Used by prioritized samplers. A flat tree of fan-out 8 over float64 leaves (Schaul et al. 2016, appendix
B.2.1, use a binary one). Each node has the sum and the smallest of its weights. It does not know about rows.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba.core import types
from numpy.typing import NDArray

from expstore.core.values import IntArray
from expstore.kernels.file_loops import compiled
from expstore.kernels.prefetch_rows import prefetch_line

Floats = NDArray[np.float64]

#: Children of a node. Eight float64 are one cache line.
FAN = 8
_FAN_BITS = 3
#: From this fraction of the leaves on, all sums are recomputed instead of single ones.
_BULK = 1 / 16
#: Levels with up to this many nodes are assumed to be in the CPU cache.
_CACHED = 4096
#: Bytes of a number.
_ITEM = 8

_ARRAYS = "float64[::1], float64[::1], int64[::1]"


@compiled("UniTuple(float64, 2)(float64[::1], float64[::1], int64)")
def _gather(sums: Floats, smallest: Floats, first: int) -> tuple[float, float]:
    """Return sum and minimum of eight nodes; unrolled, because dependent additions are slow."""
    total = ((sums[first] + sums[first + 1]) + (sums[first + 2] + sums[first + 3])) + (
        (sums[first + 4] + sums[first + 5]) + (sums[first + 6] + sums[first + 7])
    )
    least = min(
        min(min(smallest[first], smallest[first + 1]), min(smallest[first + 2], smallest[first + 3])),
        min(min(smallest[first + 4], smallest[first + 5]), min(smallest[first + 6], smallest[first + 7])),
    )
    return total, least


@compiled(f"void({_ARRAYS}, int64[::1], float64[::1])")
def _set(sums: Floats, smallest: Floats, levels: IntArray, places: IntArray, weights: Floats) -> None:
    """Set leaves and recompute the nodes above them from their children, to keep rounding errors small.

    The nodes are recomputed level by level: additions then do not depend on the ones before, and the few
    nodes near the root, which are above many of the leaves, are computed once.
    """
    bottom = levels.size - 2
    for level in range(bottom, -1, -1):
        if levels[level + 1] - levels[level] > _CACHED:
            for i in range(places.size):
                at = (levels[level] + (places[i] >> (bottom - level) * _FAN_BITS)) * _ITEM
                prefetch_line(sums.ctypes.data + at)
                prefetch_line(smallest.ctypes.data + at)
    for i in range(places.size):
        leaf = levels[bottom] + places[i]
        sums[leaf] = weights[i]
        smallest[leaf] = weights[i] if weights[i] > 0 else np.inf
    for level in range(bottom, 0, -1):
        bits = (bottom - level + 1) * _FAN_BITS
        parents = (levels[level + 1] - levels[level]) // FAN
        whole = parents <= places.size
        for i in range(parents if whole else places.size):
            parent = i if whole else places[i] >> bits
            total, least = _gather(sums, smallest, levels[level] + parent * FAN)
            sums[levels[level - 1] + parent] = total
            smallest[levels[level - 1] + parent] = least


@compiled(f"void({_ARRAYS})")
def _sum_up(sums: Floats, smallest: Floats, levels: IntArray) -> None:
    """Recompute every node above the leaves."""
    for level in range(levels.size - 2, 0, -1):
        for parent in range((levels[level + 1] - levels[level]) // FAN):
            total, least = _gather(sums, smallest, levels[level] + parent * FAN)
            sums[levels[level - 1] + parent] = total
            smallest[levels[level - 1] + parent] = least


@compiled("void(float64[::1], int64[::1], float64[::1], int64[::1], float64[::1])")
def _find(sums: Floats, levels: IntArray, masses: Floats, places: IntArray, weights: Floats) -> None:
    """Descend from the root for each mass; a node without weight is never entered.

    All masses descend one level after the other: while one waits for memory, the next is computed.
    """
    bottom = levels.size - 2
    rest = masses.copy()
    places[:] = 0
    for level in range(bottom + 1):
        if levels[level + 1] - levels[level] > _CACHED:
            for i in range(rest.size):
                prefetch_line(sums.ctypes.data + (levels[level] + places[i] * FAN) * _ITEM)
        for i in range(rest.size):
            mass = rest[i]
            first = levels[level] + places[i] * FAN
            # No branch per child: the processor would often predict it wrong.
            passed, before, running = 0, 0.0, 0.0
            for child in range(FAN):
                running += sums[np.uint64(first + child)]  # unsigned: no check for negative indices
                more = mass >= running
                passed += more
                before = running if more else before
            if passed == FAN or sums[first + passed] <= 0.0:
                # Due to rounding, the mass exceeds the sum of the children: use the end of the last child
                # that has a weight.
                passed = FAN - 1
                while passed > 0 and sums[first + passed] <= 0.0:
                    passed -= 1
                rest[i] = sums[first + passed]
            else:
                rest[i] = mass - before
            places[i] = places[i] * FAN + passed
    for i in range(places.size):
        weights[i] = sums[levels[bottom] + places[i]]


@compiled(
    types.void(
        types.Array(types.float32, 1, "C", readonly=True),  # a follower's priorities are a read-only map
        types.int64[::1],
        types.float64,
        types.float64,
        types.float64[::1],
    )
)
def _raise(priorities: Any, places: IntArray, eps: float, alpha: float, weights: Floats) -> None:
    """Fill `weights` with (p + eps) ** alpha; the result for a place does not depend on the other places."""
    for i in range(places.size):
        weights[i] = (np.float64(priorities[places[i]]) + eps) ** alpha


@compiled(f"UniTuple(float64, 2)({_ARRAYS}, float64[::1], int64[::1], float64[::1])")
def _draw(
    sums: Floats, smallest: Floats, levels: IntArray, shares: Floats, places: IntArray, weights: Floats
) -> tuple[float, float]:
    """Find the places at shares of the sum, and their weights over the smallest; return sum and smallest."""
    total, least = _gather(sums, smallest, 0)
    if np.isfinite(least):
        _find(sums, levels, shares * total, places, weights)
        for i in range(weights.size):
            weights[i] /= least
    return total, least


def _allocate_aligned(count: int) -> Floats:
    """Return zeros, aligned so that each group of eight is one cache line instead of parts of two."""
    room = np.zeros(count + FAN)
    start = -(room.ctypes.data // room.itemsize) % FAN
    return room[start : start + count]


class SumTree:
    """Weights of the places 0 to `size` - 1.

    Threads: every method is atomic for other threads, because the compiled loops keep the GIL. The state
    depends on the weights only, not on the order in which they were set.

    Args:
        size: Number of places; `grow` adds more.

    Example:
        >>> from expstore.kernels.sum_tree import SumTree
        >>> tree = SumTree(4)
        >>> tree.set(np.array([1, 3]), np.array([1.0, 3.0]))
        >>> tree.total, tree.smallest
        (4.0, 1.0)
        >>> tree.find(np.array([0.5, 1.5, 3.5]))[0].tolist()
        [1, 3, 3]
    """

    def __init__(self, size: int) -> None:
        self._make(size)

    def _make(self, size: int) -> None:
        widths = [FAN]
        while widths[-1] < size:
            widths.append(widths[-1] * FAN)
        # Only as many leaves as needed, in groups of eight: the last level is incomplete.
        widths[-1] = -(-max(size, 1) // FAN) * FAN
        for level in range(len(widths) - 2, -1, -1):
            widths[level] = -(-(widths[level + 1] // FAN) // FAN) * FAN
        starts = np.concatenate([[0], np.cumsum(widths)])
        self.size = widths[-1]
        self._levels = starts.astype(np.int64)  # first node of each level, and the end of the last
        self._sums = _allocate_aligned(int(starts[-1]))
        self._smallest = _allocate_aligned(int(starts[-1]))
        self._smallest[:] = np.inf

    def grow(self, size: int) -> None:
        """Add places up to `size` - 1; existing weights are kept."""
        if size <= self.size:
            return
        weights = self.weights.copy()
        self._make(size)
        self.fill(weights)

    @property
    def weights(self) -> Floats:
        """The weight of every place. Shape `(size,)`, float64; a view."""
        weights: Floats = self._sums[self._levels[-2] :]
        return weights

    @property
    def total(self) -> float:
        """The sum of all weights."""
        return float(self._sums[:FAN].sum())

    @property
    def smallest(self) -> float:
        """The smallest weight above 0; infinite if all weights are 0."""
        return float(self._smallest[:FAN].min())

    def set(self, places: IntArray, weights: Floats) -> None:
        """Set the weights of places; if a place occurs twice, its last weight is used.

        Args:
            places: The places. Shape `(n,)`, int64.
            weights: Their weights, finite and not negative. Shape `(n,)`, float64.
        """
        if places.size < self.size * _BULK:
            _set(self._sums, self._smallest, self._levels, places, weights)
            return
        leaves = self.weights
        leaves[places] = weights
        self._finish()

    def fill(self, weights: Floats) -> None:
        """Set the weights of the places from 0 on; all other weights become 0."""
        leaves = self.weights
        leaves[: weights.size] = weights
        leaves[weights.size :] = 0.0
        self._finish()

    def _finish(self) -> None:
        leaves = self.weights
        self._smallest[self._levels[-2] :] = np.where(leaves > 0, leaves, np.inf)
        _sum_up(self._sums, self._smallest, self._levels)

    def find(self, masses: Floats) -> tuple[IntArray, Floats]:
        """Find the places where the running sum of weights passes each mass.

        Args:
            masses: At least 0, less than `total`. Shape `(n,)`, float64.

        Returns:
            Places, int64, and their weights, float64, all above 0 if any weight is. Shapes `(n,)`.
        """
        places, weights = np.empty(masses.size, np.int64), np.empty(masses.size)
        _find(self._sums, self._levels, masses, places, weights)
        return places, weights

    def draw(self, shares: Floats) -> tuple[IntArray, Floats, tuple[float, float]] | None:
        """Find the places at shares of the sum of all weights.

        Args:
            shares: At least 0, less than 1. Shape `(n,)`, float64.

        Returns:
            Places, int64, and their weights as multiples of the smallest, float64. Shapes `(n,)`. Then the
            sum of all weights, and the smallest. None: all weights are 0.
        """
        places, weights = np.empty(shares.size, np.int64), np.empty(shares.size)
        total, least = _draw(self._sums, self._smallest, self._levels, shares, places, weights)
        return (places, weights, (total, least)) if math.isfinite(least) else None


def raise_priorities(
    priorities: NDArray[np.float32], places: IntArray, *, eps: float, alpha: float
) -> Floats:
    """Return (p + eps) ** alpha of the priorities at these places. Shape `(n,)`, float64."""
    weights = np.empty(places.size)
    _raise(priorities, places, eps, alpha, weights)
    return weights
