"""A sampler that draws rows uniformly, with replacement.

It is the default sampler of every buffer. Without a filter it keeps no state.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

from expstore.core.id_set import NO_IDS
from expstore.core.values import Mass, Selection
from expstore.samplers.base import Sampler, readable
from expstore.samplers.filter import Where
from expstore.samplers.window_sum_tree import WindowTree, warm
from expstore.samplers.without_replacement import SamplerWithoutReplacement

if TYPE_CHECKING:
    from expstore.storages.read_view import ReadView


class RandomSampler(Sampler):
    """Draw every readable row with the same probability, with replacement.

    With `where` only rows that match are drawn. With `weight` rows are drawn in proportion to it. Batches
    have no weights to correct for this: `PrioritizedSampler(alpha=0, beta=1, weight=...)` draws with the same
    probabilities, and its batches have `priority_weight`.

    Threads: any number may sample. Crashes: after a restart the next batch is the one that would have
    followed.

    Args:
        where: Which rows are drawn: a boolean SQL expression over a row and its `episode`, or a `Where`; None
            for all rows.
        weight: Factor for the probability of each row: a numeric SQL expression, at least 0; None for 1.
        replacement: False constructs a `SamplerWithoutReplacement` with the other arguments.

    Example:
        >>> from expstore import MemoryStorage, RandomSampler, TensorDictReplayBuffer
        >>> rb = TensorDictReplayBuffer(storage=MemoryStorage(100), sampler=RandomSampler(), batch_size=8)
    """

    counterpart = SamplerWithoutReplacement
    _transient = frozenset({"_lock", "_masses"})

    def __init__(self, *, where: str | Where | None = None, weight: str | None = None) -> None:
        super().__init__(where=where, weight=weight)
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._masses = WindowTree(self.filter)

    def attach(self, storage: ReadView) -> None:
        """Start over with a storage.

        Raises:
            QueryError: The filter names a field that the storage does not have.
        """
        super().attach(storage)
        self._begin()
        if self.filter is not None:
            warm()

    def select(self, storage: ReadView, batch_size: int, generator: np.random.Generator) -> Selection:
        """Choose `batch_size` readable rows.

        Raises:
            NotReadyError: No row is readable, or no row matches.
            QueryError: The filter cannot be evaluated.
        """
        window = readable(storage)
        if self.filter is not None:
            return self._find_rows(storage, lambda: self._draw_by_mass(storage, batch_size, generator))
        rows = window.rows
        if window.deleted is not NO_IDS:
            return Selection(window.nth(generator.integers(0, rows, batch_size)), mass=Mass(rows, rows))
        return Selection(
            generator.integers(window.low + 1, window.last + 1, batch_size), mass=Mass(rows, rows)
        )

    def mass(self, storage: ReadView, batch_size: int) -> Mass:
        """Return the number of rows, or the sum of the weights of those that match.

        Args:
            storage: The storage with the rows.
            batch_size: Number of rows of the batch; it does not matter here.

        Raises:
            QueryError: The filter cannot be evaluated.
        """
        return self._weigh_filtered(storage, lambda: self._weigh_rows(storage))

    def _weigh_rows(self, storage: ReadView) -> Mass:
        if self.filter is None:
            return Mass(len(storage), len(storage))
        with self._lock:
            tree = self._masses.catch_up(storage, lambda places: np.ones(places.size))
            return Mass(tree.total, self._masses.window.rows)

    def _draw_by_mass(self, storage: ReadView, size: int, generator: np.random.Generator) -> Selection | None:
        with self._lock:
            tree = self._masses.catch_up(storage, lambda places: np.ones(places.size))
            total, rows = tree.total, self._masses.window.rows
            if not total > 0:
                return None
            places, _ = tree.find(generator.random(size) * total)
            return Selection(self._masses.ids_at(storage, places), mass=Mass(total, rows))

    def __repr__(self) -> str:
        return f"RandomSampler({'' if self.filter is None else self.filter})"
