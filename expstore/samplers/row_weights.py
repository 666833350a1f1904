"""Sums of the masses that a filter gives to runs of rows.

Used by samplers that draw a run of rows first, then a row of it. The sums are computed again after the filter
has evaluated rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from expstore.core.values import IntArray
from expstore.samplers.filter import Filter

if TYPE_CHECKING:
    from expstore.storages.read_view import ReadView

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class RowMasses:
    """Running sums over the rows from id `low` + 1 on: of masses, and of the number of masses above 0.

    Shapes `(rows + 1,)`; the first sum is 0. Threads: it is immutable.
    """

    evaluation: int
    low: int
    sums: Floats
    counts: IntArray

    @classmethod
    def of(cls, filter: Filter, storage: ReadView) -> Self:
        """Sum the masses of all rows that a filter has evaluated."""
        with filter.lock:
            window, evaluation = filter.readable(storage), filter.evaluation
            masses = np.zeros(window.size + 1)
            ids = window.ids()
            masses[ids - window.low] = filter.masses[storage.description.window_ring.slot_of(ids)]
        return cls(evaluation, window.low, np.cumsum(masses), np.cumsum(masses > 0))

    def between(self, first: IntArray, last: IntArray) -> tuple[Floats, IntArray]:
        """Return the total mass of runs of rows, and how many of their rows have a mass. Shapes `(runs,)`.

        Args:
            first: First id of each run. Shape `(runs,)`.
            last: Last id of each run. Shape `(runs,)`.
        """
        start, stop = self._places(first, last)
        return self.sums[stop] - self.sums[start], self.counts[stop] - self.counts[start]

    def _places(self, first: IntArray, last: IntArray) -> tuple[IntArray, IntArray]:
        end = self.sums.size - 1
        start = np.clip(first - 1 - self.low, 0, end)
        return start, np.maximum(start, np.clip(last - self.low, 0, end))

    def pick(self, first: IntArray, last: IntArray, share: Floats) -> IntArray:
        """For each run of rows, pick a row by cumulative mass. Shapes `(n,)`.

        Args:
            first: First id of each run; every run must have some mass.
            last: Last id of each run.
            share: The share of the run's mass at which the row is picked, from 0 to 1.
        """
        start, stop = self._places(first, last)
        low, high = self.sums[start], self.sums[stop]
        under = np.minimum(low + share * (high - low), np.nextafter(high, 0.0))  # rounding errors
        ids: IntArray = np.searchsorted(self.sums, under, side="right") + self.low
        return ids

    def single(self, ids: IntArray) -> Floats:
        """Return the masses of rows. Shapes `(n,)`."""
        return self.between(ids, ids)[0]
