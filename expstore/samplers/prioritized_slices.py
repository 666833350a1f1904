"""A sampler that draws slices by the priorities of their first rows.

It is a `PrioritizedSampler` over the rows at which a slice can begin. It never reads rows.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from expstore.core.torchrl_keywords import PRIORITIZED_SLICES, check_keywords
from expstore.core.values import Array, IntArray, Mass, Selection
from expstore.errors import ArgumentError
from expstore.samplers.filter import Where
from expstore.samplers.prioritized import PrioritizedSampler, Reduction
from expstore.samplers.slice_options import (
    NestedKey,
    Slicing,
    SlicingMembers,
    Span,
    build_too_short_error,
    choose_trajectories,
)

if TYPE_CHECKING:
    from expstore.kernels.sum_tree import SumTree
    from expstore.storages.read_view import ReadView
    from expstore.storages.run_index import Runs

_TRIES = 3


class PrioritizedSliceSampler(SlicingMembers, PrioritizedSampler):
    """Draw slices; row i is the first row of a slice with probability p_i^alpha / sum of p_j^alpha.

    The sum is over the rows at which a slice can begin; p is priority + eps. A slice has consecutive steps of
    one episode, wherever their rows are stored. `SliceSampler` describes slices, and how batches mark their
    ends. `priority_weight` is (P_i / min P)^-beta of a slice's first row, repeated for each of its rows.

    Threads, crashes: as `PrioritizedSampler`.

    Args:
        max_capacity: As in TorchRL, the expected number of rows; None for the largest number that the storage
            keeps. It does not limit anything: the tree grows with the storage.
        alpha: Exponent of the priorities; 0 gives every row the same probability.
        beta: Exponent of `priority_weight`; 0 corrects nothing, 1 corrects the bias fully.
        eps: Added to every priority, so that rows with priority 0 can be drawn.
        dtype: Dtype of `priority_weight`: torch.float32 or torch.float64. Probabilities are always float64.
        reduction: How several priorities of one row are reduced to one: "max", "min", "mean" or "median".
        num_slices: Number of slices in a batch; the batch size must be a multiple of it. Pass either this or
            `slice_len`.
        slice_len: Number of steps in a slice; the batch size must be a multiple of it. Pass either this or
            `num_slices`.
        end_key: A single field that ends trajectories; pass either this or `end_keys`.
        end_keys: The fields that end trajectories; fields that are not stored are ignored. None for the
            store's own (`done_keys` of `expstore.open`), which end its episodes in any case.
        traj_key: The field that identifies trajectories; None for the store's episodes. For a field that is
            not the store's own, a table is built when it is first needed, and kept current. If no field has
            this name, trajectories end by the end keys.
        truncated_key: The field that marks the last step of each slice; None to mark none.
        init_key: The field that marks the first step of each slice, if it is stored; None to mark none.
        strict_length: Whether to leave out trajectories that are shorter than a slice. If False, such a
            trajectory makes a shorter slice, and a batch may have fewer rows than its batch size. The shorter
            slice begins at the trajectory's first row.
        span: How many steps a slice may lack on its right, because it extends beyond its trajectory: a
            number, False for none, True for all but one, or a pair of these for left and right. A span on the
            left is turned off with a warning.
        max_priority_within_buffer: Whether new rows get the largest priority of the readable rows, instead of
            the largest priority ever set.
        where: At which rows a slice may begin: a boolean SQL expression over a row and its `episode`, or a
            `Where`; None for all rows. The weight of a `Where` is a factor for the probability of each row.
        split: The split whose rows are drawn; None for the rows of all splits.
        torchrl: Keywords of TorchRL's class that have no effect here: accepted at their defaults, otherwise
            refused with the reason. `trajectories` (int, `(rows,)`) and `ends` (bool, `(rows,)`) are accepted
            if they say the same as the store's episodes, which the first draw checks.

    Example:
        >>> from expstore import MemoryStorage, PrioritizedSliceSampler, TensorDictReplayBuffer
        >>> sampler = PrioritizedSliceSampler(1000, alpha=0.7, beta=0.5, slice_len=4)
        >>> rb = TensorDictReplayBuffer(storage=MemoryStorage(1000), sampler=sampler, batch_size=32)
    """

    keeps_to_split = True
    windowed = True
    _transient = PrioritizedSampler._transient | {"_starts"}

    def __init__(
        self,
        max_capacity: int | None = None,
        alpha: float = 0.6,
        beta: float = 0.4,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float32,
        reduction: Reduction = "max",
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        end_key: NestedKey | None = None,
        end_keys: Sequence[NestedKey] | None = None,
        traj_key: NestedKey | None = None,
        truncated_key: NestedKey | None = ("next", "truncated"),
        init_key: NestedKey | None = "is_init",
        strict_length: bool = True,
        span: Span = False,
        max_priority_within_buffer: bool = False,
        where: str | Where | None = None,
        **torchrl: Any,
    ) -> None:
        if "weight" in torchrl:
            raise ArgumentError(
                "PrioritizedSliceSampler takes a weight with the condition: where=expstore.Where(condition, "
                "weight=...)"
            )
        split = torchrl.pop("split", "train")
        check_keywords(self, torchrl, PRIORITIZED_SLICES)
        super().__init__(
            max_capacity,
            alpha,
            beta,
            eps,
            dtype,
            reduction,
            max_priority_within_buffer,
            where=where,
            split=split,
        )
        self.slicing = Slicing.of(
            num_slices=num_slices,
            slice_len=slice_len,
            strict_length=strict_length,
            pad_output=False,
            span=_drop_left(span),
            truncated_key=truncated_key,
            init_key=init_key,
        )
        self._trajectories = choose_trajectories(end_key, end_keys, traj_key, None, torchrl)

    def _begin(self) -> None:
        super()._begin()
        self._starts = _Starts()

    def attach(self, storage: ReadView) -> None:
        """Attach the sampler to a storage, and follow the storage's priorities and episodes.

        Raises:
            QueryError: The filter names a field that the storage does not have.
        """
        self._starts = _Starts()
        super().attach(storage)

    def select(self, storage: ReadView, batch_size: int, generator: np.random.Generator) -> Selection:
        """Choose slices with `batch_size` rows in all, with replacement.

        Raises:
            NotReadyError: No trajectory is long enough, all priorities and eps are 0, or no row matches.
            QueryError: The filter cannot be evaluated.
            StateError: The batch size is not a multiple of `num_slices` or `slice_len`.
        """
        self.slicing.sizes(batch_size)
        return self._find_rows(storage, lambda: self._slices(storage, batch_size, generator))

    def _slices(self, storage: ReadView, batch_size: int, generator: np.random.Generator) -> Selection | None:
        slicing = self.slicing
        length, count = slicing.sizes(batch_size)
        runs = self._trajectories.of(storage)
        with runs.lock:
            with self._lock:
                tree = self._find_starts(storage, runs, length)
                smallest, mass = tree.smallest, self._build_mass(tree, length)
                if not math.isfinite(smallest):
                    have = runs.stop - runs.first
                    if slicing.starts(have, length).any():
                        return None
                    raise build_too_short_error(have[have > 0], length)
                places, weights = tree.find(generator.random(count) * mass.total)
                numbers, steps = self._starts.at(places, runs)
                lengths = np.minimum(length, runs.stop[numbers] - steps)
                ids = runs.rows(numbers, steps, lengths)
        found = slicing.selection(ids, lengths, length=length, asked=batch_size, mass=mass)
        found.info[("priority_weight",)] = np.repeat(self._undo_bias(weights / smallest), lengths)
        return found

    def _find_starts(self, storage: ReadView, runs: Runs, length: int) -> SumTree:
        """Return the tree of the rows at which a slice can begin."""
        for _ in range(_TRIES):
            window = runs.look()
            tree = self._follow(storage, runs, length - self.slicing.slack(length)[1])
            # Loading compiled loops takes so long that all rows may have been overwritten meanwhile.
            if math.isfinite(tree.smallest) or self._weights.window.low < window.last:
                break
        return tree

    def mass(self, storage: ReadView, batch_size: int) -> Mass:
        """Return the sum of the weights of the rows at which a slice can begin, and the smallest of them.

        Args:
            storage: The storage with the rows.
            batch_size: Number of rows of the batch.

        Raises:
            QueryError: The filter cannot be evaluated.
            StateError: The batch size is not a multiple of `num_slices` or `slice_len`.
        """
        length, _ = self.slicing.sizes(batch_size)

        def weigh() -> Mass:
            runs = self._trajectories.of(storage)
            with runs.lock, self._lock:
                return self._build_mass(self._find_starts(storage, runs, length), length)

        return self._weigh_filtered(storage, weigh)

    def sample_again(
        self, storage: ReadView, selection: Selection, generator: np.random.Generator
    ) -> Selection:
        """Draw slices again because some of their rows were overwritten while they were read."""
        return self.select(storage, selection.asked, generator)

    def _follow(self, storage: ReadView, runs: Runs, least: int) -> SumTree:
        """Return a tree with the weights of the rows at which a slice can begin; other rows weigh 0."""
        weights = self._weights
        if not self._starts.go_on(runs, least):
            self._starts = _Starts()
            weights.drop()
        starts = self._starts
        tree = weights.catch_up(storage, lambda places: self._weigh(storage, places))
        ids = starts.find(storage, runs, least, strict=self.slicing.strict_length)
        here = storage.geometry.slot_of(ids[weights.window.holds(ids)])
        weights.change(storage, here, lambda places: self._weigh(storage, places))
        return tree

    def _weigh(self, storage: ReadView, slots: IntArray) -> Array:
        ids = storage.geometry.ids_in(slots, storage.window.last)
        held = self._starts.can_begin(storage.description.window_ring.slot_of(ids), ids)
        weights: Array = np.where(held, super()._weigh(storage, slots), 0.0)
        return weights

    def __repr__(self) -> str:
        return (
            f"PrioritizedSliceSampler({self.slicing.size_text}, alpha={self.alpha}, beta={self.beta}, "
            f"strict_length={self.slicing.strict_length}{self._filtering})"
        )


def _drop_left(span: Span) -> Span:
    """Return a span without its left side; warn if it had one."""
    left, right = span if isinstance(span, tuple | list) and len(span) == 2 else (span, span)
    if left:
        warnings.warn(
            "Left spanning is disabled for PrioritizedSliceSampler and will be automatically turned off: "
            "a slice is drawn by the priority of its first row, which must be in the trajectory",
            stacklevel=3,
        )
    return span if not isinstance(right, bool | int) else (False, right)


class _Starts:
    """The rows at which a slice can begin, with the run and the step of each.

    A row at which a slice can begin remains one until it is evicted: the rows after it are newer.
    """

    def __init__(self) -> None:
        self._id = np.zeros(0, np.int64)  # by place; 0: no slice can begin there
        self._step = np.zeros(0, np.int64)  # by place
        self._name = np.zeros(0, np.int64)  # by place: the trajectory of the row's run
        self._done = np.zeros(0, np.int64)  # by run: steps below this one were searched
        self._seen: tuple[Runs, int, int] | None = None  # runs, `least` and `runs.moves` of the last `find`

    def can_begin(self, places: IntArray, ids: IntArray) -> Array:
        """Return whether a slice can begin at each of some rows. Shapes `(n,)`.

        Args:
            places: Places of the rows in the window.
            ids: Ids of the rows.
        """
        size = self._id.size
        held: Array = places < size
        if not held.all():
            held[held] = self._id[places[held]] == ids[held]
        else:
            held = self._id[places] == ids
        return held

    def at(self, places: IntArray, runs: Runs) -> tuple[IntArray, IntArray]:
        """Return the run and the step of the rows at some places. Shapes `(n,)`."""
        steps = self._step[places]
        return runs.table.find(self._name[places], steps), steps

    def go_on(self, runs: Runs, least: int) -> bool:
        """Return whether `find` can continue: the runs and the length are the same, and changes are known."""
        seen = self._seen
        return seen is not None and seen[:2] == (runs, least) and runs.find_changed(seen[2]) is not None

    def find(self, storage: ReadView, runs: Runs, least: int, *, strict: bool) -> IntArray:
        """Find the rows at which a slice can begin since the last call.

        Args:
            storage: The storage with the rows.
            runs: The runs, up to date.
            least: The smallest number of steps in a slice.
            strict: Whether to leave out runs with fewer steps; otherwise a slice begins at their first row.

        Returns:
            Ids of the rows. Shape `(n,)`.
        """
        count = runs.table.count
        changed = runs.find_changed(self._seen[2]) if self._seen and self.go_on(runs, least) else None
        changed = np.arange(count) if changed is None else np.unique(changed)
        if count > self._done.size:
            self._done = np.append(self._done, np.zeros(2 * count - self._done.size, np.int64))
        self._seen = runs, least, runs.moves
        first, stop = runs.first[changed], runs.stop[changed]
        end = stop - least + 1
        if not strict:
            end = np.maximum(end, np.minimum(first + 1, stop))
        begin = np.maximum(first, self._done[changed])
        more = np.maximum(0, end - begin)
        self._done[changed] = np.maximum(self._done[changed], end)
        ids = runs.rows(changed, begin, more)
        self._note(
            storage.description.window_ring.slot_of(ids),
            ids,
            steps=np.arange(ids.size) + np.repeat(begin - (np.cumsum(more) - more), more),
            names=np.repeat(runs.episode[changed], more),
        )
        return ids

    def _note(self, places: IntArray, ids: IntArray, *, steps: IntArray, names: IntArray) -> None:
        size = int(places.max(initial=-1)) + 1
        if size > self._id.size:
            more = np.zeros(2 * size - self._id.size, np.int64)
            self._id, self._step, self._name = (
                np.append(column, more) for column in (self._id, self._step, self._name)
            )
        self._id[places], self._step[places], self._name[places] = ids, steps, names
