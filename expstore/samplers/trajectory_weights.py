"""A sum tree over the trajectories of a storage, as runs of steps.

Used by samplers that draw trajectories. The caller computes the weights; the tree asks only for those of
changed runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from expstore.core.values import Array, IntArray
from expstore.samplers.window_sum_tree import new_sum_tree

if TYPE_CHECKING:
    from expstore.kernels.sum_tree import SumTree
    from expstore.storages.run_index import Runs


class RunWeights:
    """Keep the weights of runs, which depend on their numbers of steps.

    Weights are integers, so that sums are exact, and draws depend on the rows alone.

    Threads: the caller holds the lock of the runs. Crashes: it is rebuilt from the rows.
    """

    def __init__(self) -> None:
        self._tree: SumTree | None = None
        self._seen: tuple[Runs, int, int] | None = None

    def catch_up(self, runs: Runs, length: int, weigh: Callable[[IntArray], Array]) -> SumTree:
        """Weigh the runs that have changed; weigh all runs if the length of slices has changed.

        Args:
            runs: The runs, up to date.
            length: Number of steps of a slice, on which weights depend, too.
            weigh: Returns weights for numbers of steps. Shapes `(n,)` in, float64 `(n,)` out.
        """
        tree, seen = self._tree, self._seen
        known = seen is not None and seen[0] is runs and seen[1] == length
        changed = runs.find_changed(seen[2]) if seen is not None and known else None
        count = runs.table.count
        if tree is None or changed is None:
            tree = new_sum_tree(max(256, 2 * count))
            tree.fill(weigh(runs.stop - runs.first))
        elif changed.size:
            if count > tree.size:
                tree.grow(2 * count)
            tree.set(changed, weigh(runs.stop[changed] - runs.first[changed]))
        self._tree, self._seen = tree, (runs, length, runs.moves)
        return tree
