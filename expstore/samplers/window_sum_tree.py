"""A sum tree over the rows that a storage can read just now.

Used by samplers that draw by weights which rows keep while they are there. It asks for the weights of rows
that are new and takes away those of rows that have left; it never chooses weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from expstore.core.values import Array, IntArray, Window
from expstore.kernels.loader import compiling, load_in_background
from expstore.samplers.filter import Filter

if TYPE_CHECKING:
    from expstore.kernels.sum_tree import SumTree
    from expstore.storages.read_view import ReadView

__all__ = ["WindowTree", "new_sum_tree", "warm"]

Weigh = Callable[[IntArray], Array]


def warm() -> None:
    """Compile the sum tree in the background, when a buffer is made: the first batch needs it."""
    load_in_background(lambda: new_sum_tree(1))


def new_sum_tree(size: int) -> SumTree:
    """Return a sum tree of `size` weights, all 0; the first call compiles it."""
    with compiling:
        from expstore.kernels.sum_tree import SumTree
    return SumTree(size)


class WindowTree:
    """Keep weights by slot.

    Threads: whoever calls holds the sampler's lock. Processes: each has its own. Crashes: it is made anew.

    Args:
        filter: What weights are multiplied by; rows of which it knows nothing yet are left out.

    Example:
        >>> tree = WindowTree().catch_up(storage, lambda places: np.ones(places.size))
        >>> tree.total == len(storage)
        True
    """

    def __init__(self, filter: Filter | None = None) -> None:
        self._filter = filter
        #: None: it is to be made anew.
        self.tree: SumTree | None = None
        #: What it shows.
        self.window = Window(0, 0)
        self.deleted = -1
        self._version = 0

    def drop(self) -> None:
        """Forget all weights."""
        self.tree = None

    def catch_up(
        self, storage: ReadView, weigh: Weigh, narrow: Callable[[Window], Window] | None = None
    ) -> SumTree:
        """Give new rows their weights, and take away those of rows that have left.

        Args:
            storage: What holds the rows.
            weigh: Returns the weights of slots. Shapes `(n,)` in, float64 `(n,)` out.
            narrow: Returns which rows take part of those that are shown, after `drop` if others weigh
                otherwise than before.
        """
        filter = self._filter
        if filter is None:
            window = storage.window
            return self._follow(storage, window if narrow is None else narrow(window), weigh)
        with filter.lock:
            moved, self._version = filter.find_moved(self._version), filter.version
            if moved is None:
                self.drop()
            readable = filter.readable(storage)
            window = readable if narrow is None else narrow(readable)
            return self._follow(storage, window, self._times_mass(filter, weigh), moved)

    @staticmethod
    def _times_mass(filter: Filter, weigh: Weigh) -> Weigh:
        return lambda places: weigh(places) * filter.masses[places]

    def _follow(
        self, storage: ReadView, window: Window, weigh: Weigh, moved: IntArray | None = None
    ) -> SumTree:
        tree, readable, deleted = self.tree, self.window, storage.epochs.deleted
        changed = moved is not None and moved.size > 0
        if tree is not None and (deleted, window) == (self.deleted, readable) and not changed:
            return tree
        # The shape decides how sums are rounded: it must follow from the rows alone, not from the past.
        size = storage.geometry.slots or 1 << max(12, (window.last - 1).bit_length())
        followed = (
            readable.low <= window.low <= readable.last <= window.last and readable.deleted == window.deleted
        )
        if tree is None or deleted != self.deleted or not followed:
            tree = new_sum_tree(size)
            places = storage.geometry.slot_of(window.ids())
            weights = np.zeros(tree.size)
            weights[places] = weigh(places)
            tree.fill(weights)
        else:
            tree.grow(size)
            gone = storage.geometry.slot_of(np.arange(readable.low + 1, window.low + 1))
            tree.set(gone, np.zeros(gone.size))
            new = storage.geometry.slot_of(np.arange(readable.last + 1, window.last + 1))
            if changed and moved is not None:
                new = np.concatenate([new, moved[window.holds(storage.geometry.ids_in(moved, window.last))]])
            tree.set(new, weigh(new))
        self.tree, self.deleted, self.window = tree, deleted, window
        return tree

    def change(self, storage: ReadView, places: IntArray, weigh: Weigh) -> None:
        """Give slots other weights, as far as it shows the rows that lie there."""
        tree, window, filter = self.tree, self.window, self._filter
        if tree is None or self.deleted != storage.epochs.deleted:
            return  # it will be made of all weights
        if window != storage.window:  # rows have come of which the tree does not know
            places = places[places < tree.size]
            places = places[window.holds(storage.geometry.ids_in(places, window.last))]
        if filter is None:
            tree.set(places, weigh(places))
            return
        with filter.lock:
            places = places[places < filter.masses.size]
            tree.set(places, self._times_mass(filter, weigh)(places))
