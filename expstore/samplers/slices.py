"""A sampler that draws slices: consecutive steps of one episode.

It finds slices by episode and step, wherever their rows are stored. It keeps a weight per run of steps, and
never reads rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from expstore.core.torchrl_keywords import SLICES, check_keywords
from expstore.core.values import Array, IntArray, Mass, Selection
from expstore.errors import ArgumentError
from expstore.kernels.loader import compiling, load_in_background
from expstore.samplers.base import Sampler
from expstore.samplers.filter import Where
from expstore.samplers.prioritized_slices import PrioritizedSliceSampler
from expstore.samplers.slice_options import (
    NestedKey,
    Slicing,
    SlicingMembers,
    Span,
    build_too_short_error,
    choose_trajectories,
)
from expstore.samplers.slices_without_replacement import SliceSamplerWithoutReplacement
from expstore.samplers.start_candidates import Candidates
from expstore.samplers.trajectory_weights import RunWeights

if TYPE_CHECKING:
    from expstore.kernels.sum_tree import SumTree
    from expstore.storages.read_view import ReadView
    from expstore.storages.run_index import Runs

#: What has the same probability: every trajectory, or every position at which a slice can begin.
Weighting = Literal["trajectory", "start"]


class SliceSampler(SlicingMembers, Sampler):
    """Draw slices of episodes with replacement: consecutive steps, concatenated along one batch dim.

    A slice follows its episode wherever the rows are stored: across interleaved workers and lanes, the end of
    the ring and restarts. An open episode takes part with the steps that it has so far. A draw takes the same
    time for any number of rows, also while others write.

    With `by="trajectory"`, as in TorchRL, a trajectory is drawn first, all with the same probability, then
    one of its positions at which a slice can begin. So steps of short trajectories are drawn more often. With
    `by="start"` every such position in the store has the same probability.

    Batches mark where slices end: `truncated_key` is True at the last step of each slice and False elsewhere.
    The field `done` next to it is True there, too, and keeps its stored values elsewhere. `init_key` is True
    at first steps, if that field is stored. Buffers of TensorDicts write these fields into the batch; other
    buffers return them in the info of `sample(return_info=True)`.

    Threads: any number may sample while one writes. Crashes: after a restart the next batch is the one that
    would have followed.

    Args:
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
        trajectory_key: Another name for `traj_key`; pass one of them.
        truncated_key: The field that marks the last step of each slice; None to mark none.
        init_key: The field that marks the first step of each slice, if it is stored; None to mark none.
        strict_length: Whether to leave out trajectories that are shorter than a slice. If False, such a
            trajectory makes a shorter slice, and a batch may have fewer rows than its batch size.
        pad_output: Whether to pad short slices with copies of their last row, at which
            `("collector", "mask")` is False. As in torchrl, slices are only padded while some trajectory is
            shorter than a slice. Requires `strict_length=False`.
        span: How many steps a slice may lack on its left and on its right, because it extends beyond its
            trajectory: a number, False for none, True for all but one, or a pair of these.
        by: What has the same probability: "trajectory" for every trajectory, "start" for every position at
            which a slice can begin.
        where: At which rows a slice may begin: a boolean SQL expression over a row and its `episode`, or a
            `Where`; None for all rows. With `by="trajectory"`, all trajectories in which a slice may begin
            have the same probability.
        weight: Factor for the probability of each start of a slice, within its trajectory or in the store: a
            numeric SQL expression, at least 0; None for 1.
        split: The split whose rows are drawn; None for the rows of all splits.
        replacement: False constructs a `SliceSamplerWithoutReplacement` with the other arguments.
        torchrl: Keywords of TorchRL's class that have no effect here: accepted at their defaults, otherwise
            refused with the reason. `trajectories` (int, `(rows,)`) and `ends` (bool, `(rows,)`) are accepted
            if they say the same as the store's episodes, which the first draw checks.

    Raises:
        ArgumentError: Both or neither of `num_slices` and `slice_len` are given, or a keyword is unknown; an
            argument is out of range, not supported, or does not fit another one.

    Example:
        >>> from expstore import MemoryStorage, SliceSampler, TensorDictReplayBuffer
        >>> sampler = SliceSampler(slice_len=4)
        >>> rb = TensorDictReplayBuffer(storage=MemoryStorage(1000), sampler=sampler, batch_size=32)
    """

    keeps_to_split = True
    counterpart = SliceSamplerWithoutReplacement
    windowed = True
    _transient = frozenset({"_weights", "_candidates"})

    def __init__(
        self,
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        end_key: NestedKey | None = None,
        end_keys: Sequence[NestedKey] | None = None,
        traj_key: NestedKey | None = None,
        trajectory_key: NestedKey | None = None,
        truncated_key: NestedKey | None = ("next", "truncated"),
        init_key: NestedKey | None = "is_init",
        strict_length: bool = True,
        pad_output: bool = False,
        span: Span = False,
        by: Weighting = "trajectory",
        where: str | Where | None = None,
        weight: str | None = None,
        split: str | None = "train",
        **torchrl: Any,
    ) -> None:
        check_keywords(self, torchrl, SLICES)
        super().__init__(where=where, weight=weight, split=split)
        if by not in ("trajectory", "start"):
            raise ArgumentError(f"by must be 'trajectory' or 'start', got {by!r}")
        self.slicing = Slicing.of(
            num_slices=num_slices,
            slice_len=slice_len,
            strict_length=strict_length,
            pad_output=pad_output,
            span=span,
            truncated_key=truncated_key,
            init_key=init_key,
        )
        self._trajectories = choose_trajectories(end_key, end_keys, traj_key, trajectory_key, torchrl)
        self.by = by
        self._begin()

    def _begin(self) -> None:
        self._weights = RunWeights()
        self._candidates = Candidates(self._filter, alike=self.by == "trajectory")

    def attach(self, storage: ReadView) -> None:
        """Attach the sampler to a storage, and follow the storage's episodes.

        Raises:
            QueryError: The filter names a field that the storage does not have.
        """
        super().attach(storage)
        load_in_background(_compile_loops)

    def select(self, storage: ReadView, batch_size: int, generator: np.random.Generator) -> Selection:
        """Choose slices with `batch_size` rows in all.

        Raises:
            NotReadyError: No trajectory is long enough, or no row matches.
            StateError: The batch size is not a multiple of `num_slices` or `slice_len`.
            QueryError: The filter cannot be evaluated.
        """
        if self.filter is not None:
            return self._find_rows(storage, lambda: self._choose_filtered(storage, batch_size, generator))
        length, count = self.slicing.sizes(batch_size)
        ids, lengths, padded, total = self._choose_rows(storage, length, count, generator)
        mass = Mass(total, len(storage), unit=length)
        return self.slicing.selection(ids, lengths, length=length, asked=batch_size, padded=padded, mass=mass)

    def _choose_rows(
        self, storage: ReadView, length: int, count: int, generator: np.random.Generator
    ) -> tuple[IntArray, IntArray, bool, float]:
        """Choose slices.

        Returns:
            The ids of their rows, the rows of each slice, whether to pad short slices, and the sum of the
            weights of all trajectories.
        """
        slicing = self.slicing
        runs = self._trajectories.of(storage)
        with runs.lock:
            tree = self._find_runs(runs, length)
            total = int(tree.total)
            if not total:
                raise build_too_short_error(_lengths(runs), length)
            chosen, _ = tree.find(np.floor(generator.random(count) * total) + 0.5)
            first = runs.first[chosen]
            begins, lengths = slicing.place(runs.stop[chosen] - first, length, generator.random(count))
            ids = runs.rows(chosen, first + begins, lengths)
            padded = slicing.pad_output and bool((_lengths(runs) < length).any())
        return ids, lengths, padded, total

    def _find_runs(self, runs: Runs, length: int) -> SumTree:
        """Return the tree of the trajectories, up to date."""
        self.slicing.slack(length)
        runs.look()
        return self._weights.catch_up(runs, length, lambda have: self._weigh(have, length))

    def _choose_filtered(
        self, storage: ReadView, batch_size: int, generator: np.random.Generator
    ) -> Selection | None:
        """Choose slices whose first rows match the filter; return None if there is no such row."""
        slicing = self.slicing
        length, count = slicing.sizes(batch_size)
        found = self._choose_matching(storage, length, count, generator)
        if found is None:
            return None
        ids, lengths, padded, total = found
        mass = Mass(total, len(storage), unit=length)
        return slicing.selection(ids, lengths, length=length, asked=batch_size, padded=padded, mass=mass)

    def _choose_matching(
        self, storage: ReadView, length: int, count: int, generator: np.random.Generator
    ) -> tuple[IntArray, IntArray, bool, float] | None:
        """Choose slices whose first rows match, as `_choose_rows` does; None without such rows."""
        slicing = self.slicing
        slicing.slack(length)
        runs = self._trajectories.of(storage)
        candidates = self._candidates
        with runs.lock:
            runs.look()
            tree = candidates.catch_up(storage, runs, slicing, length)
            total = tree.total
            if not total > 0:
                return None
            chosen, _ = tree.find(generator.random(count) * total)
            begins, lengths = candidates.place(
                storage, runs, slicing, length, chosen=chosen, shares=generator.random((2, count))
            )
            ids = runs.rows(chosen, runs.first[chosen] + begins, lengths)
            padded = slicing.pad_output and bool((_lengths(runs) < length).any())
        return ids, lengths, padded, total

    def mass(self, storage: ReadView, batch_size: int) -> Mass:
        """Return the number of trajectories, or of starts of slices, or the sum of the weights of starts.

        Args:
            storage: The storage with the rows.
            batch_size: Number of rows of the batch.

        Raises:
            QueryError: The filter cannot be evaluated.
            StateError: The batch size is not a multiple of `num_slices` or `slice_len`.
        """
        length, _ = self.slicing.sizes(batch_size)

        def weigh() -> Mass:
            runs, candidates = self._trajectories.of(storage), self._candidates
            with runs.lock:
                if self.filter is None:
                    return Mass(int(self._find_runs(runs, length).total), len(storage), unit=length)
                runs.look()
                tree = candidates.catch_up(storage, runs, self.slicing, length)
                return Mass(tree.total, len(storage), unit=length)

        return self._weigh_filtered(storage, weigh)

    def _weigh(self, have: IntArray, length: int) -> Array:
        starts = self.slicing.starts(have, length)
        weights: Array = (starts > 0 if self.by == "trajectory" else starts).astype(np.float64)
        return weights

    def sample_again(
        self, storage: ReadView, selection: Selection, generator: np.random.Generator
    ) -> Selection:
        """Draw slices again because some of their rows were overwritten while they were read."""
        return self.select(storage, selection.asked, generator)

    def __repr__(self) -> str:
        slicing = self.slicing
        return (
            f"SliceSampler({slicing.size_text}, strict_length={slicing.strict_length}, by={self.by!r}"
            f"{self._filtering})"
        )


# As in TorchRL, all of these are SliceSamplers; `SliceSampler(replacement=False)` constructs the first.
SliceSampler.register(SliceSamplerWithoutReplacement)
SliceSampler.register(PrioritizedSliceSampler)


def _lengths(runs: Runs) -> IntArray:
    """Return the number of steps of every run that has any."""
    have = runs.stop - runs.first
    return have[have > 0]


def _compile_loops() -> None:
    with compiling:
        import expstore.kernels.step_runs
        import expstore.kernels.sum_tree  # noqa: F401
