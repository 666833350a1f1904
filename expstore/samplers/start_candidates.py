"""Where slices may begin under `where` and `weight`, and the weight of each position.

Used by samplers that draw trajectories first. It sums the masses that a `Filter` gives to rows over the
positions in each run of steps. It never evaluates expressions or reads rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from expstore.core.values import IntArray
from expstore.samplers.filter import Filter
from expstore.samplers.slice_options import Slicing
from expstore.samplers.window_sum_tree import new_sum_tree

if TYPE_CHECKING:
    from expstore.kernels.sum_tree import SumTree
    from expstore.storages.read_view import ReadView
    from expstore.storages.run_index import Runs

Floats = NDArray[np.float64]


class Candidates:
    """Keep the mass of each run of steps: the sum of the masses of all rows at which a slice can begin.

    The time of `catch_up` is proportional to the rows of changed runs, that of `place` to the rows of the
    chosen runs.

    Threads: the caller holds the lock of the runs. Crashes: it is rebuilt from the rows.

    Args:
        filter: The filter that computes the masses of rows.
        alike: Whether all runs with a mass above 0 weigh 1; otherwise a run weighs its mass.
    """

    def __init__(self, filter: Filter, *, alike: bool) -> None:
        self._filter = filter
        self._alike = alike
        self._tree: SumTree | None = None
        self._runs: Runs | None = None
        self._seen = (0, -1, 0)  # length, `runs.moves`, version of the filter

    def catch_up(self, storage: ReadView, runs: Runs, slicing: Slicing, length: int) -> SumTree:
        """Weigh the runs that have changed, or whose rows' masses have changed.

        Args:
            storage: The storage with the rows.
            runs: The runs, up to date.
            slicing: The settings of slices.
            length: Number of steps of a slice.
        """
        tree, seen, filter = self._tree, self._seen, self._filter
        with filter.lock:
            version, moved = filter.version, filter.find_moved(seen[2])
        changed = runs.find_changed(seen[1])
        count = runs.table.count
        if tree is None or self._runs is not runs or seen[0] != length or changed is None or moved is None:
            tree = new_sum_tree(max(256, 2 * count))
            changed = np.arange(count)
        elif moved.size:
            ids = np.unique(storage.description.window_ring.ids_in(moved, storage.window.last))
            numbers, _ = runs.locate(ids[storage.window.holds(ids)])
            changed = np.concatenate([changed, numbers[numbers >= 0]])
        changed = np.unique(changed)
        if changed.size:
            if count > tree.size:
                tree.grow(2 * count)
            tree.set(changed, self._weigh(storage, runs, slicing, length, changed))
        self._runs, self._tree, self._seen = runs, tree, (length, runs.moves, version)
        return tree

    def _weigh(
        self, storage: ReadView, runs: Runs, slicing: Slicing, length: int, numbers: IntArray
    ) -> Floats:
        masses, counts = self._masses(storage, runs, slicing, length, numbers)
        run = np.repeat(np.arange(numbers.size), counts)
        weights: Floats = np.bincount(run, weights=masses, minlength=numbers.size).astype(np.float64)
        return (weights > 0).astype(np.float64) if self._alike else weights

    def _masses(
        self, storage: ReadView, runs: Runs, slicing: Slicing, length: int, numbers: IntArray
    ) -> tuple[Floats, IntArray]:
        """Return the masses of the rows at which slices can begin, run after run, and their count per run."""
        first = runs.first[numbers]
        have = runs.stop[numbers] - first
        starts, before = slicing.starts(have, length), slicing.before(have, length)
        counts = np.where(starts > 0, starts - before, 0)
        ids = runs.rows(numbers, first, counts)
        masses = self._filter.masses_of(storage, ids)
        some = counts > 0
        # Slices that begin before a run count at its first row.
        masses[(np.cumsum(counts) - counts)[some]] *= 1.0 + before[some]
        return masses, counts

    def place(
        self,
        storage: ReadView,
        runs: Runs,
        slicing: Slicing,
        length: int,
        *,
        chosen: IntArray,
        shares: Floats,
    ) -> tuple[IntArray, IntArray]:
        """Place one slice in each of some runs, as `Slicing.place` does.

        Args:
            storage: The storage with the rows.
            runs: The runs, up to date.
            slicing: The settings of slices.
            length: Number of steps of a slice.
            chosen: The runs; each must have some mass. Shape `(n,)`.
            shares: Which share of the run's mass, and which of the positions before the run's first step if
                the slice begins there; each from 0 to less than 1. Shape `(2, n)`.
        """
        numbers, which = np.unique(chosen, return_inverse=True)
        masses, counts = self._masses(storage, runs, slicing, length, numbers)
        stops = np.cumsum(counts)
        starts = stops - counts
        # Normalize the masses of each run: in one running sum, large masses would absorb small ones.
        run = np.repeat(np.arange(counts.size), counts)
        masses = masses / np.bincount(run, weights=masses, minlength=counts.size)[run]
        reach = np.concatenate([[0.0], np.cumsum(masses)])
        mass = reach[stops] - reach[starts]
        at = np.searchsorted(reach[1:], reach[starts][which] + shares[0] * mass[which], side="right")
        some = np.flatnonzero(masses)
        # Rounding errors may lead past the last row of a run that has any mass.
        last = some[np.searchsorted(some, stops, side="left") - 1][which]
        begins = np.minimum(at, last) - starts[which]
        have = (runs.stop[numbers] - runs.first[numbers])[which]
        before = (shares[1] * (1 + slicing.before(have, length))).astype(np.int64)
        return slicing.cut(np.where(begins == 0, -before, begins), have, length)
