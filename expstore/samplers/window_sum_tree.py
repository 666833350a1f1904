"""A sum tree over the rows that a storage can read now.

Used by samplers whose rows keep their weights. It asks for the weights of new rows and removes those of
evicted rows; the caller computes the weights.
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

Weigh = Callable[[IntArray], Array]


def warm() -> None:
    """Compile the sum tree in the background when a buffer is created; its first batch needs the tree."""
    load_in_background(lambda: new_sum_tree(1))


def new_sum_tree(size: int) -> SumTree:
    """Return a sum tree with `size` weights of 0; the first call compiles it."""
    with compiling:
        from expstore.kernels.sum_tree import SumTree
    return SumTree(size)


class WindowTree:
    """Keep the weights of rows, by their places in the storage's `window_ring`.

    Threads: the caller holds the sampler's lock. Processes: each has its own. Crashes: it is rebuilt from the
    rows.

    Args:
        filter: If it is active, its masses are factors of the weights, and rows that it has not evaluated yet
            are left out.

    Example:
        >>> from expstore.samplers.window_sum_tree import WindowTree
        >>> tree = WindowTree().catch_up(storage, lambda places: np.ones(places.size))
        >>> tree.total == len(storage)
        True
    """

    def __init__(self, filter: Filter | None = None) -> None:
        self._given = filter
        #: None if it must be built.
        self.tree: SumTree | None = None
        #: The rows in the tree.
        self.window = Window(0, 0)
        self.deleted = -1
        self._version = 0

    @property
    def _filter(self) -> Filter | None:
        return self._given if self._given is not None and self._given.is_active else None

    def drop(self) -> None:
        """Forget all weights."""
        self.tree = None

    def ids_at(self, storage: ReadView, places: IntArray) -> IntArray:
        """Return the ids of the rows at places of the tree. Shapes `(n,)`."""
        return storage.description.window_ring.ids_in(places, self.window.last)

    def catch_up(
        self, storage: ReadView, weigh: Weigh, narrow: Callable[[Window], Window] | None = None
    ) -> SumTree:
        """Add the weights of new rows, and remove those of evicted rows.

        Args:
            storage: The storage with the rows.
            weigh: Returns the weights of slots. Shapes `(n,)` in, float64 `(n,)` out.
            narrow: Returns the part of a window that is drawn from. It calls `drop` if rows in the tree get
                other weights.
        """
        filter = self._filter
        if filter is None:
            window = storage.window
            return self._follow(storage, window if narrow is None else narrow(window), weigh, None)
        with filter.lock:
            moved, self._version = filter.find_moved(self._version), filter.version
            if moved is None:
                self.drop()
            readable = filter.readable(storage)
            window = readable if narrow is None else narrow(readable)
            return self._follow(storage, window, weigh, filter, moved)

    def _weigh(
        self, storage: ReadView, window: Window, places: IntArray, weigh: Weigh, filter: Filter | None
    ) -> Array:
        """Return the weights of places, which `window` gives to rows. Shapes `(n,)`."""
        slots = places
        if storage.description.window_rows is not None:
            slots = storage.geometry.slot_of(storage.description.window_ring.ids_in(places, window.last))
        weights = weigh(slots)
        return weights if filter is None else weights * filter.masses[places]

    def _follow(
        self,
        storage: ReadView,
        window: Window,
        weigh: Weigh,
        filter: Filter | None,
        moved: IntArray | None = None,
    ) -> SumTree:
        tree, readable, deleted = self.tree, self.window, storage.epochs.deleted
        changed = moved is not None and moved.size > 0
        if tree is not None and (deleted, window) == (self.deleted, readable) and not changed:
            return tree
        # The size decides how sums are rounded. So it must depend on the rows alone, not on their history.
        ring = storage.description.window_ring
        size = ring.slots or 1 << max(12, (window.last - 1).bit_length())
        followed = (
            readable.low <= window.low <= readable.last <= window.last and readable.deleted == window.deleted
        )
        if tree is None or deleted != self.deleted or not followed:
            tree = new_sum_tree(size)
            places = ring.slot_of(window.ids())
            weights = np.zeros(tree.size)
            weights[places] = self._weigh(storage, window, places, weigh, filter)
            tree.fill(weights)
        else:
            tree.grow(size)
            gone = np.arange(readable.low + 1, window.low + 1)
            places = ring.slot_of(np.concatenate([gone, np.arange(readable.last + 1, window.last + 1)]))
            if changed and moved is not None:
                places = np.concatenate([places, moved[window.holds(ring.ids_in(moved, window.last))]])
            weights = np.zeros(places.size)
            weights[gone.size :] = self._weigh(storage, window, places[gone.size :], weigh, filter)
            tree.set(places, weights)  # evicted rows first: new ones may have their places
        self.tree, self.deleted, self.window = tree, deleted, window
        return tree

    def change(self, storage: ReadView, slots: IntArray, weigh: Weigh) -> None:
        """Weigh slots again, if their rows are in the tree."""
        tree, window, filter, places = self.tree, self.window, self._filter, slots
        if tree is None or self.deleted != storage.epochs.deleted:
            return  # `catch_up` builds it from all weights
        # Since the caller chose the slots, rows may have been added and evicted, in store and tree.
        if storage.description.window_rows is not None:
            ids = storage.geometry.ids_in(slots, window.last)
            places = storage.description.window_ring.slot_of(ids[window.holds(ids)])
        else:
            places = places[places < tree.size]
            places = places[window.holds(storage.geometry.ids_in(places, window.last))]
        if filter is None:
            tree.set(places, self._weigh(storage, window, places, weigh, None))
            return
        with filter.lock:
            places = places[places < filter.masses.size]
            tree.set(places, self._weigh(storage, window, places, weigh, filter))
