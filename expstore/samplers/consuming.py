"""Sampling rows until they have been handed out so many times.

Buffers take the sampler. How often each row was handed out is counted by the storage, on disk where that is
on disk; a sum tree over the rows that are left finds the ones that are drawn. It never removes a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from expstore.core.values import Array, IntArray, Selection
from expstore.errors import NotReadyError
from expstore.samplers.base import Sampler, refuse_weight
from expstore.samplers.filter import Where
from expstore.samplers.random import RandomSampler
from expstore.samplers.window_sum_tree import WindowTree, warm
from expstore.storages.base import Storage
from expstore.storages.read_view import build_closed_error

if TYPE_CHECKING:
    from expstore.kernels.sum_tree import SumTree
    from expstore.storages.columns.sample_counts import Sampled
    from expstore.storages.read_view import ReadView

__all__ = ["ConsumingSampler", "consume_after"]

_MOST = (1 << 32) - 1  # what the column holds
_NONE = np.empty(0, np.int64)


class ConsumingSampler(Sampler):
    """Draw every row at most `max_sample_count` times.

    Within a batch no row comes twice, and every row that is left has the same chance. Fewer rows than a
    batch wants make a shorter batch. The length of a buffer is the number of rows that are left. Unlike in
    TorchRL a row that was handed out often enough is not overwritten before others: it stays, to be read by
    index and with SQL, until the ring takes its slot in order of age.

    Threads: any number may sample; none gets a row too often. Crashes: a batch is counted on disk before it
    is handed out, so a row that `sample` has returned counts after a kill, and after a power cut once it was
    synced; a kill in the middle may count a batch that nobody got. Processes: only the writer's; a follower
    cannot count.

    Args:
        max_sample_count: How often a row is handed out.
        where: Which rows are: a boolean SQL expression over a row and its `episode`; None: all. The others
            are not counted, and not part of the length of a buffer.
        weight: Not taken: a row is handed out as often as it is, whatever its chance.

    Raises:
        TypeError: It is no integer.
        ValueError: It is less than 1, or there is a weight.

    Example:
        >>> rb = ReplayBuffer(storage=MemoryStorage(10), sampler=ConsumingSampler(), batch_size=3)
        >>> rb.extend(TensorDict({"observation": torch.zeros(4, 3)}, [4]))
        >>> [len(batch) for batch in rb]
        [3, 1]
    """

    def __init__(
        self, max_sample_count: int = 1, *, where: str | Where | None = None, weight: str | None = None
    ) -> None:
        refuse_weight(self, where, weight, "each row is handed out max_sample_count times")
        super().__init__(where=where)
        self._limit = check_count("max_sample_count", max_sample_count)
        self._ran_out = False
        self._begin()

    def _begin(self) -> None:
        self._live = WindowTree(self.filter)
        self._mirrored: tuple[Sampled | None, int] = (None, -1)  # the counts, and their moves, that it shows

    @property
    def max_sample_count(self) -> int:
        """How often a row is handed out."""
        return self._limit

    @property
    def ran_out(self) -> bool:
        """Whether the last batch has taken the last rows that were left."""
        return self._ran_out

    def attach(self, storage: ReadView) -> None:
        """Have a storage count.

        Raises:
            StorageError: The disk failed.
            QueryError: Its rows have no such fields as the filter names.
        """
        super().attach(storage)
        self._begin()
        self._ran_out = False
        if not storage.follows:
            storage.writer().settings.count_sampled()
        warm()

    def count_left(self, storage: ReadView) -> int:
        """Return how many rows can still be drawn; for a follower, how many can be read."""
        if storage.closed or storage.state.sampled is None:
            return len(storage)
        filter, left = self.filter, 0
        if filter is not None:
            filter.look(storage)
        for look in range(2):
            with storage.locks.sampled:
                left = int(self._catch_up(storage)[0].total)
            if left or look or filter is None or not filter.find_more(storage):
                break
        return left

    def select(self, storage: ReadView, batch_size: int, generator: np.random.Generator) -> Selection:
        """Choose `batch_size` rows, or as many as are left, and count them.

        Raises:
            NotReadyError: None is left.
            StateError: The storage cannot be written to.
            StorageError: They could not be counted; nothing is handed out.
        """
        return self._take(storage, _NONE, batch_size, generator)

    def sample_again(
        self, storage: ReadView, selection: Selection, generator: np.random.Generator
    ) -> Selection:
        """Choose rows in the place of those that were overwritten; the others are counted already."""
        return self._take(storage, selection.ids, selection.ids.size, generator)

    def _take(self, storage: ReadView, had: IntArray, size: int, generator: np.random.Generator) -> Selection:
        """Choose and count rows for a batch beside those that it had, as far as these are still there."""
        writer = storage.writer()
        filter = self.filter
        if filter is not None:
            filter.look(storage)
        ids = self._choose(writer, had, size, generator)
        if filter is not None and self._ran_out and filter.find_more(storage):
            ids = self._choose(writer, ids, size, generator)  # what has come meanwhile may match
        if not ids.size:
            raise self.build_no_rows_error(storage)
        return Selection(ids)

    def _choose(self, storage: Storage, had: IntArray, size: int, generator: np.random.Generator) -> IntArray:
        with storage.locks.sampled:
            if storage.closed:
                raise build_closed_error()
            tree, sampled = self._catch_up(storage)
            self._mirrored = (None, -1)  # until all is done: an interruption has the tree made anew
            kept = had[self._live.window.holds(had)]
            held = storage.geometry.slot_of(kept)
            tree.set(held, np.zeros(held.size))
            left = int(tree.total)
            count = min(size - kept.size, left)
            places = _NONE
            if count:
                ranks = generator.choice(left, count, replace=False)
                places, _ = tree.find(ranks.astype(np.float64) + 0.5)
                sampled.add(places)
            beside = np.concatenate([held, places])
            self._live.change(storage, beside, lambda known: self._weigh(sampled, known))
            self._mirrored = sampled, sampled.moves
            ids = np.concatenate([kept, storage.geometry.ids_in(places, self._live.window.last)])
            self._ran_out = tree.total == 0
        return ids

    def _catch_up(self, storage: ReadView) -> tuple[SumTree, Sampled]:
        """Return a tree in which rows that are left weigh 1, all others nothing; the lock is held."""
        sampled = storage.state.sampled
        if sampled is None:  # no rows have come yet
            raise NotReadyError("Cannot sample from an empty storage", hint="extend() it first")
        now = sampled, sampled.moves
        if now != self._mirrored:
            self._live.drop()
        tree = self._live.catch_up(storage, lambda places: self._weigh(sampled, places))
        self._mirrored = now
        return tree, sampled

    def on_write(self, ids: IntArray) -> None:
        """Be told of rows that were just written: these are left."""
        self._ran_out = False

    def _weigh(self, sampled: Sampled, places: IntArray) -> Array:
        weights: Array = (sampled.values[places] < self._limit).astype(np.float64)
        return weights

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs."""
        return {"_limit": self._limit, "filter": super().__getstate__().get("filter")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over what `__getstate__` returned."""
        self.__dict__.update(state)
        self._ran_out = False
        self._begin()

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` takes; the counts belong to the storage."""
        return {"max_sample_count": self._limit} | super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self._limit = check_count("max_sample_count", state_dict["max_sample_count"])
        self._mirrored = (None, -1)

    def __repr__(self) -> str:
        return f"ConsumingSampler(max_sample_count={self._limit}{self._filtering})"


def check_count(name: str, value: int) -> int:
    """Return how often a row is to be handed out.

    Raises:
        TypeError: It is no integer.
        ValueError: It is less than 1, or more than a column can count.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name} must be a positive integer, not {type(value).__name__}")
    if not 1 <= value <= _MOST:
        raise ValueError(f"{name} must be a positive integer up to {_MOST}, got {value}")
    return int(value)


def consume_after(count: int | None, sampler: Sampler | None, *, prefetch: int | None) -> Sampler:
    """Return the sampler of a buffer that is given `consume_after_n_samples`, or None of it.

    Args:
        count: How often each row is handed out; None: as the sampler says.
        sampler: What the buffer was given; None: nothing.
        prefetch: How many batches it makes ahead: a row counts when it is drawn.

    Raises:
        TypeError: The count is no integer.
        ValueError: It is less than 1, the sampler is one that does not count so, or batches are to be made
            ahead.
    """
    if prefetch and (count is not None or isinstance(sampler, ConsumingSampler)):
        raise ValueError("Prefetching is not supported with ConsumingSampler and consume_after_n_samples")
    if count is None:
        return RandomSampler() if sampler is None else sampler
    count = check_count("consume_after_n_samples", count)
    if sampler is None or type(sampler) is RandomSampler:
        filter = None if sampler is None else sampler.filter
        if filter is None:
            return ConsumingSampler(count)
        return ConsumingSampler(count, where=filter.where, weight=filter.weight)
    if not isinstance(sampler, ConsumingSampler):
        raise ValueError(
            "consume_after_n_samples only supports the default RandomSampler or an explicit "
            f"ConsumingSampler, not {sampler!r}"
        )
    if sampler.max_sample_count != count:
        raise ValueError(
            f"consume_after_n_samples={count} conflicts with the provided ConsumingSampler.max_sample_count="
            f"{sampler.max_sample_count}"
        )
    return sampler
