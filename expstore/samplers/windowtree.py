"""A sum tree over the rows that a storage can read just now.

Used by samplers that draw by weights which rows keep while they are there. It asks for the weights of rows
that are new and takes away those of rows that have left; it never chooses weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from expstore.files import load_compiled
from expstore.types import Array, IntArray, Window

if TYPE_CHECKING:
    from expstore.storages.base import Storage
    from expstore.sumtree import SumTree

__all__ = ["TREES", "WindowTree"]

#: Loads numba: in the background when a buffer is made, at the latest with the first batch.
TREES = "expstore.sumtree"


class WindowTree:
    """Keep weights by slot.

    Threads: whoever calls holds the sampler's lock. Processes: each has its own. Crashes: it is made anew.

    Example:
        >>> tree = WindowTree().catch_up(storage, lambda places: np.ones(places.size))
        >>> tree.total == len(storage)
        True
    """

    def __init__(self) -> None:
        #: None: it is to be made anew.
        self.tree: SumTree | None = None
        #: What it shows.
        self.window = Window(0, 0)
        self.upheavals = -1

    def drop(self) -> None:
        """Forget all weights."""
        self.tree = None

    def catch_up(self, storage: Storage, weigh: Callable[[IntArray], Array]) -> SumTree:
        """Give new rows their weights, and take away those of rows that have left.

        Args:
            storage: What holds the rows.
            weigh: Returns the weights of slots. Shapes `(n,)` in, float64 `(n,)` out.
        """
        tree, shown = self.tree, self.window
        upheavals, window = storage.upheavals, storage.window
        if tree is not None and (upheavals, window) == (self.upheavals, shown):
            return tree
        # The shape decides how sums are rounded: it must follow from the rows alone, not from the past.
        size = storage.slots or 1 << max(12, (window.last - 1).bit_length())
        if tree is None or upheavals != self.upheavals or window.low > shown.last:
            tree = load_compiled(TREES).SumTree(size)
            places = storage.slot_of(window.ids())
            weights = np.zeros(tree.size)
            weights[places] = weigh(places)
            tree.fill(weights)
        else:
            tree.grow(size)
            gone = storage.slot_of(np.arange(shown.low + 1, window.low + 1))
            tree.set(gone, np.zeros(gone.size))
            new = storage.slot_of(np.arange(shown.last + 1, window.last + 1))
            tree.set(new, weigh(new))
        self.tree, self.upheavals, self.window = tree, upheavals, window
        return tree
