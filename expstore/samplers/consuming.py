"""A sampler that draws each row a given number of times.

The storage counts how often each row was drawn; a storage on disk stores the counts. A consumer has counts of
its own, those of its recorded draws. The sampler finds the remaining rows with a sum tree. It never deletes a
row.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np

from expstore.core.values import Array, IntArray, Mass, Selection, Window
from expstore.errors import ArgumentError, NotReadyError
from expstore.samplers.base import Sampler, refuse_weight
from expstore.samplers.filter import Where
from expstore.samplers.random import RandomSampler
from expstore.samplers.window_sum_tree import WindowTree, warm
from expstore.storages.read_view import build_closed_error

if TYPE_CHECKING:
    from expstore.kernels.sum_tree import SumTree
    from expstore.storages.columns.sample_counts import ConsumerCounts, Sampled
    from expstore.storages.read_view import ReadView

_MOST = (1 << 32) - 1  # the column of counts is uint32
_NONE = np.empty(0, np.int64)


class _Taken(Exception):
    """Another thread has drawn one of these rows meanwhile."""


class ConsumingSampler(Sampler):
    """Draw every row at most `max_sample_count` times.

    No row is drawn twice in a batch, and all remaining rows have the same probability. If fewer rows remain
    than the batch size, the batch is shorter. The length of a buffer is the number of remaining rows. Unlike
    in TorchRL, a row that was drawn often enough is not overwritten before other rows: it can be read by
    index and with SQL until the ring overwrites it in order of age.

    Threads: any number may sample; no row is drawn too often. Crashes: a batch is counted on disk before it
    is returned. So the rows of a returned batch are counted after a kill, and after a power cut if they were
    synced. A kill during a draw may count a batch that was never returned. Processes: only the process that
    writes may sample; a reader cannot count. A consumer counts in its log instead: also in a reader, and
    exactly the draws that it has recorded.

    Args:
        max_sample_count: How often each row is drawn.
        where: Which rows are drawn: a boolean SQL expression over a row and its `episode`, or a `Where`; None
            for all rows. Other rows are not counted and do not add to the length of a buffer.
        weight: Not supported, because all rows are drawn equally often.
        split: The split whose rows are drawn; None for the rows of all splits.

    Raises:
        ArgumentError: `max_sample_count` is not an integer; `max_sample_count` is out of range, or a weight
            was given.

    Example:
        >>> from expstore import ConsumingSampler, MemoryStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=MemoryStorage(10), sampler=ConsumingSampler(), batch_size=3)
        >>> rb.extend(TensorDict({"observation": torch.zeros(4, 3)}, [4]))
        >>> [len(batch) for batch in rb]
        [3, 1]
    """

    keeps_to_split = True
    leases = True
    counts_draws = True
    fits_tokens = True
    _transient = frozenset({"_live", "_mirrored", "_ran_out", "_own"})
    #: The counts of a consumer; None: those of the storage.
    _own: ConsumerCounts | None = None

    def __init__(
        self,
        max_sample_count: int = 1,
        *,
        where: str | Where | None = None,
        weight: str | None = None,
        split: str | None = "train",
    ) -> None:
        refuse_weight(self, where, weight, "each row is handed out max_sample_count times")
        super().__init__(where=where, split=split)
        self._limit = check_count("max_sample_count", max_sample_count)
        self._begin()

    def _begin(self) -> None:
        self._ran_out = False
        self._live = WindowTree(self._filter)
        self._mirrored: tuple[Sampled | None, int] = (None, -1)  # the counts in the tree, and their `moves`

    @property
    def max_sample_count(self) -> int:
        """How often each row is drawn."""
        return self._limit

    @property
    def ran_out(self) -> bool:
        """Whether the last batch used up the remaining rows."""
        return self._ran_out

    def attach(self, storage: ReadView) -> None:
        """Attach the sampler to a storage, and make the storage count how often rows are drawn.

        Raises:
            StorageError: A disk operation failed.
            QueryError: The filter names a field that the storage does not have.
        """
        super().attach(storage)
        self._begin()
        if self._own is None and not storage.follows:
            storage.writer().settings.count_sampled()
        warm()

    def count_in(self, counts: ConsumerCounts | None) -> None:
        """Draw by the counts of a consumer, and count there; None: in the storage."""
        self._own = counts

    def count_left(self, storage: ReadView) -> int:
        """Return the number of rows that can still be drawn; for a reader, the number of readable rows."""
        if storage.closed or (self._own is None and storage.state.sampled is None):
            return len(storage)
        self.keep_to_split(storage)
        filter, left = self.filter, 0
        if filter is not None:
            filter.look(storage)
        for look in range(2):
            with storage.locks.sampled:
                left = int(self._catch_up(storage)[0].total)
            if left or look or filter is None or not filter.find_more(storage):
                break
        return left

    def mass(self, storage: ReadView, batch_size: int) -> Mass | None:
        """Return how many rows can still be drawn; None for a reader, which does not count.

        Args:
            storage: The storage with the rows.
            batch_size: Number of rows of the batch; it does not matter here.
        """
        return (
            None if self._own is None and storage.follows else _build_mass(storage, self.count_left(storage))
        )

    def select(self, storage: ReadView, batch_size: int, generator: np.random.Generator) -> Selection:
        """Choose and count `batch_size` rows, or all that remain if there are fewer.

        Raises:
            NotReadyError: No row remains.
            StateError: The storage cannot be written.
            StorageError: The rows could not be counted; no batch is returned.
        """
        return self._take(storage, _NONE, batch_size, generator)

    def build_no_rows_error(self, storage: ReadView) -> NotReadyError:
        """Return the error for a draw that finds no row, which usually means that all rows were drawn."""
        if not len(storage):
            return super().build_no_rows_error(storage)
        times = "once" if self._limit == 1 else f"{self._limit} times"
        which = "" if self.filter is None else " of its where="
        return NotReadyError(
            f"Cannot sample: {type(self).__name__} returns each row{which} {times}, and none is left",
            hint="extend() the buffer, or set a sampler with a larger max_sample_count",
        )

    def sample_again(
        self, storage: ReadView, selection: Selection, generator: np.random.Generator
    ) -> Selection:
        """Replace the rows of a selection that were overwritten; its other rows are already counted."""
        return self._take(storage, selection.ids, selection.ids.size, generator)

    def _take(self, storage: ReadView, had: IntArray, size: int, generator: np.random.Generator) -> Selection:
        """Keep the rows of `had` that are still readable; choose and count rows until there are `size`."""
        if self._own is None:
            storage.writer()  # only the writer counts in the storage
        filter = self.filter
        if filter is not None:
            filter.look(storage)
        ids, left = self._choose_fitting(storage, had, size, generator)
        if filter is not None and self._ran_out and filter.find_more(storage):
            ids, more = self._choose_fitting(
                storage, ids, size, generator
            )  # rows written meanwhile may match
            left += more
        if not ids.size:
            raise self.build_no_rows_error(storage)
        return Selection(ids, mass=_build_mass(storage, left))

    def _choose_fitting(
        self, storage: ReadView, had: IntArray, size: int, generator: np.random.Generator
    ) -> tuple[IntArray, int]:
        """Return the rows that fit, and how many could be drawn besides those of `had`.

        Lengths are read without the lock, because a read may wait for the storage's lock, which comes before
        it. So the rows are counted afterwards, unless another thread has drawn one of them.
        """
        if self._budget is None:
            return self._choose(storage, had, size, generator)
        while True:
            with storage.locks.sampled:
                if storage.closed:
                    raise build_closed_error()
                tree, _ = self._catch_up(storage)
                had = had[self._live.window.holds(had)]
                # Rows of `had` that may be drawn once more are not drawn again: there are at most so many.
                new = self._draw_new(storage, tree, min(size, int(tree.total)), generator)
            new = new[~np.isin(new, had)][: size - had.size]
            ids = np.concatenate([had, new])
            fits = self._budget.count_fitting(storage, ids) if ids.size else 0
            with contextlib.suppress(_Taken):
                return self._choose(storage, had, size, generator, new[: max(0, fits - had.size)])

    def _choose(
        self,
        storage: ReadView,
        had: IntArray,
        size: int,
        generator: np.random.Generator,
        new: IntArray | None = None,
    ) -> tuple[IntArray, int]:
        """Return the rows, and how many could be drawn besides those of `had`; `new`: the rows to add."""
        with storage.locks.sampled:
            if storage.closed:
                raise build_closed_error()
            tree, sampled = self._catch_up(storage)
            if new is not None and not self._can_draw(storage, sampled, new):
                raise _Taken
            self._mirrored = (None, -1)  # set again at the end: after an interruption the tree is rebuilt
            kept = had[self._live.window.holds(had)]
            if self.filter is not None and not self.filter.has_expressions:  # of another split: not returned
                kept = kept[self.filter.masses_of(storage, kept) > 0]
            held = storage.description.window_ring.slot_of(kept)
            tree.set(held, np.zeros(held.size))
            left = int(tree.total)
            if new is None:
                new = self._draw_new(storage, tree, min(size - kept.size, left), generator)
            if new.size and self._own is None:
                sampled.add(storage.geometry.slot_of(new))
            ids = np.concatenate([kept, new])
            slots = storage.geometry.slot_of(ids)
            self._live.change(storage, slots, lambda known: self._weigh(sampled, known))
            self._mirrored = sampled, sampled.moves
            self._ran_out = tree.total == 0 if self._own is None else left == new.size
        return ids, left

    def _draw_new(
        self, storage: ReadView, tree: SumTree, count: int, generator: np.random.Generator
    ) -> IntArray:
        """Return `count` rows of those in the tree."""
        if not count:
            return _NONE
        ranks = generator.choice(int(tree.total), count, replace=False)
        places, _ = tree.find(ranks.astype(np.float64) + 0.5)
        return self._live.ids_at(storage, places)

    def _can_draw(self, storage: ReadView, sampled: Sampled, ids: IntArray) -> bool:
        """Return whether all of these rows can still be drawn."""
        return bool(
            self._live.window.holds(ids).all() and self._weigh(sampled, storage.geometry.slot_of(ids)).all()
        )

    def hand_out(self, storage: ReadView, selection: Selection) -> None:
        """Count the rows for a consumer. For a storage, `select` has counted them."""
        if (counts := self._own) is None:
            return
        with storage.locks.sampled:
            tree, slots = self._live.tree, storage.geometry.slot_of(selection.ids)
            self._mirrored = (None, -1)  # as in `_choose`
            counts.add(slots)
            self._live.change(storage, slots, lambda known: self._weigh(counts, known))
            self._mirrored = counts, counts.moves
            self._ran_out = tree is None or tree.total == 0

    def _catch_up(self, storage: ReadView) -> tuple[SumTree, Sampled]:
        """Return a tree in which remaining rows weigh 1 and all others 0; the caller holds the lock."""
        own = self._own
        sampled = storage.state.sampled if own is None else own
        if sampled is None:  # no rows were written yet
            raise NotReadyError("Cannot sample from an empty storage", hint="extend() it first")
        now = sampled, sampled.moves
        if now != self._mirrored:
            self._live.drop()

        def follow(window: Window) -> Window:
            if own is not None:
                own.follow(storage.geometry, window.last)
            return window

        tree = self._live.catch_up(storage, lambda places: self._weigh(sampled, places), follow)
        self._mirrored = now
        return tree, sampled

    def on_write(self, ids: IntArray) -> None:
        """Handle new rows: there are rows to draw again. `ids`: their ids. Shape `(n,)`, int64."""
        self._ran_out = False

    def _weigh(self, sampled: Sampled, places: IntArray) -> Array:
        weights: Array = (sampled.values[places] < self._limit).astype(np.float64)
        return weights

    def state_dict(self) -> dict[str, Any]:
        """Return the state for `load_state_dict`. The counts are stored with the rows instead."""
        return {"max_sample_count": self._limit} | super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._limit = check_count("max_sample_count", state_dict["max_sample_count"])
        self._mirrored = (None, -1)

    def __repr__(self) -> str:
        return f"ConsumingSampler(max_sample_count={self._limit}{self._filtering})"


def _build_mass(storage: ReadView, left: int) -> Mass:
    return Mass(left, len(storage), left=left)


def check_count(name: str, value: int) -> int:
    """Check how often each row is to be drawn, and return it as an int.

    Args:
        name: Name of the argument, for error messages.
        value: The value that the user passed.

    Raises:
        ArgumentError: The value is not an integer; the value is below 1 or above 2^32 - 1.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ArgumentError(f"{name} must be a positive integer, not {type(value).__name__}")
    if not 1 <= value <= _MOST:
        raise ArgumentError(f"{name} must be a positive integer up to {_MOST}, got {value}")
    return int(value)


def consume_after(count: int | None, sampler: Sampler | None, *, prefetch: int | None) -> Sampler:
    """Return the sampler of a buffer that has the option `consume_after_n_samples`.

    Args:
        count: How often each row is drawn; None if the option is not set.
        sampler: The sampler that the user gave to the buffer; None for the default.
        prefetch: Number of batches that the buffer prefetches. Rows are counted when they are drawn, so it
            must be 0 for a sampler that counts.

    Raises:
        ArgumentError: `count` is not an integer; `count` is out of range, the sampler does not count rows up
            to `count`, or batches are prefetched.
    """
    if prefetch and (count is not None or (sampler is not None and sampler.counts_draws)):
        name = "ConsumingSampler" if sampler is None else type(sampler).__name__
        raise ArgumentError(f"Prefetching is not supported with {name} and consume_after_n_samples")
    if count is None:
        return RandomSampler() if sampler is None else sampler
    count = check_count("consume_after_n_samples", count)
    if sampler is None or type(sampler) is RandomSampler:
        if sampler is None:
            return ConsumingSampler(count)
        filter = sampler._filter
        return ConsumingSampler(count, where=filter.where, weight=filter.weight, split=filter.split)
    if not isinstance(sampler, ConsumingSampler):
        raise ArgumentError(
            "consume_after_n_samples only supports the default RandomSampler or an explicit "
            f"ConsumingSampler, not {sampler!r}"
        )
    if sampler.max_sample_count != count:
        raise ArgumentError(
            f"consume_after_n_samples={count} conflicts with the provided ConsumingSampler.max_sample_count="
            f"{sampler.max_sample_count}"
        )
    return sampler
