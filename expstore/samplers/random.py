"""A sampler that draws rows uniformly, with replacement.

It is the default sampler of every buffer. Without a filter it keeps no state.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from expstore.core.id_set import NO_IDS
from expstore.core.values import IntArray, Mass, Selection, Window
from expstore.samplers.base import Sampler, readable
from expstore.samplers.filter import Filter, Where
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
        split: The split whose rows are drawn; None for the rows of all splits.
        replacement: False constructs a `SamplerWithoutReplacement` with the other arguments.

    Example:
        >>> from expstore import MemoryStorage, RandomSampler, TensorDictReplayBuffer
        >>> rb = TensorDictReplayBuffer(storage=MemoryStorage(100), sampler=RandomSampler(), batch_size=8)
    """

    keeps_to_split = True
    counterpart = SamplerWithoutReplacement
    _transient = frozenset({"_lock", "_masses", "_split"})

    def __init__(
        self,
        *,
        where: str | Where | None = None,
        weight: str | None = None,
        split: str | None = "train",
    ) -> None:
        super().__init__(where=where, weight=weight, split=split)
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._masses, self._split = WindowTree(self._filter), _SplitRows()

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
        filter = self.filter
        if filter is not None and not filter.has_expressions:
            with self._lock:
                found = self._draw_in_split(storage, filter, batch_size, generator)
            if found is not None:
                return found
        window = readable(storage)
        if filter is not None:
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
        filter = self.filter
        if filter is None:
            return Mass(len(storage), len(storage))
        with self._lock:
            if not filter.has_expressions:
                return Mass(self._split.follow(storage, filter).size, self._split.rows)
            tree = self._masses.catch_up(storage, lambda places: np.ones(places.size))
            return Mass(tree.total, self._masses.window.rows)

    def _draw_by_mass(self, storage: ReadView, size: int, generator: np.random.Generator) -> Selection | None:
        with self._lock:
            if not self._filter.has_expressions:
                return self._draw_in_split(storage, self._filter, size, generator)
            tree = self._masses.catch_up(storage, lambda places: np.ones(places.size))
            total, rows = tree.total, self._masses.window.rows
            if not total > 0:
                return None
            places, _ = tree.find(generator.random(size) * total)
            return Selection(self._masses.ids_at(storage, places), mass=Mass(total, rows))

    def _draw_in_split(
        self, storage: ReadView, filter: Filter, size: int, generator: np.random.Generator
    ) -> Selection | None:
        """Draw rows of the split; return None if it has none. The caller holds the sampler's lock."""
        ids = self._split.follow(storage, filter)
        if not ids.size:
            return None
        chosen = ids[generator.integers(0, ids.size, size)]
        return Selection(chosen, mass=Mass(ids.size, self._split.rows))

    def __repr__(self) -> str:
        return f"RandomSampler({self._filter})"


class _SplitRows:
    """The ids of the rows in a split, which are drawn faster from a list than from a tree.

    Threads: the caller holds the sampler's lock. Crashes: it is computed again.
    """

    def __init__(self) -> None:
        self._list = np.empty(1024, np.int64)
        self._first = self._stop = 0  # the part of the list in use
        self._window = Window(0, 0)
        self._version = 0
        self._seen: tuple[Window, int, int] | None = None
        self._ids = self._list[:0]
        #: Number of the readable rows of all splits.
        self.rows = 0

    def follow(self, storage: ReadView, filter: Filter) -> IntArray:
        """Return the ids of the readable rows in the split of a filter without expressions. Shape `(n,)`."""
        seen = storage.window, storage.epochs.content, storage.changes.number
        if seen == self._seen:
            return self._ids
        self._seen = None  # until all is done
        filter.look(storage)
        moved, self._version = filter.find_moved(self._version), filter.version
        window, former = filter.readable(storage), self._window
        if moved is None or window.deleted != former.deleted or window.last < former.last:
            self._first = self._stop = 0
            former = Window(0, 0)
        new = replace(window, low=max(window.low, former.last)).ids()
        new = new[filter.masses_of(storage, new) > 0]
        first = self._first + int(np.searchsorted(self._list[self._first : self._stop], window.low, "right"))
        if self._stop + new.size > self._list.size:
            kept = self._list[first : self._stop]
            self._list = np.concatenate([kept, new, np.empty(kept.size + new.size, np.int64)])
            first, self._stop = 0, kept.size
        self._list[self._stop : self._stop + new.size] = new
        self._first, self._stop = first, self._stop + new.size
        self._window, self.rows, self._ids = window, window.rows, self._list[self._first : self._stop]
        if window.last >= seen[0].last:  # a reader may not know the episodes of the newest rows yet
            self._seen = seen
        return self._ids
