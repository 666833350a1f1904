"""A sampler that draws one slice of every trajectory before it draws any trajectory again.

It orders trajectories as `SamplerWithoutReplacement` orders rows, and finds slices as `SliceSampler` does. It
never reads rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from expstore.core.torchrl_keywords import SLICES_WITHOUT_REPLACEMENT, check_keywords
from expstore.core.values import IntArray, Mass, Selection
from expstore.samplers.filter import Where
from expstore.samplers.slice_options import (
    NestedKey,
    Slicing,
    SlicingMembers,
    build_too_short_error,
    choose_trajectories,
)
from expstore.samplers.start_candidates import Candidates
from expstore.samplers.trajectory_weights import RunWeights
from expstore.samplers.without_replacement import SamplerWithoutReplacement

if TYPE_CHECKING:
    from expstore.storages.read_view import ReadView
    from expstore.storages.run_index import Runs


class SliceSamplerWithoutReplacement(SlicingMembers, SamplerWithoutReplacement):
    """Draw one slice of every trajectory per pass, at a random position, in a new order in each pass.

    No trajectory is drawn twice in a batch; at the end of a pass a batch may have fewer slices. A pass covers
    the trajectories that are long enough for a slice; a new pass begins when their number changes.
    `SliceSampler` describes slices, and how batches mark their ends.

    Threads, crashes: as `SamplerWithoutReplacement`.

    Args:
        num_slices: Number of slices in a batch; the batch size must be a multiple of it. Pass either this or
            `slice_len`.
        slice_len: Number of steps in a slice; the batch size must be a multiple of it. Pass either this or
            `num_slices`.
        drop_last: Whether to leave out the trajectories at the end of a pass that do not fill a batch.
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
        shuffle: Whether to draw in random order; otherwise in the order of the episodes' ids.
        where: At which rows a slice may begin: a boolean SQL expression over a row and its `episode`, or a
            `Where`; None for all rows. A pass covers the trajectories in which a slice may begin, and a new
            pass begins when their number changes.
        weight: Not supported, because every trajectory is drawn once per pass.
        split: The split whose rows are drawn; None for the rows of all splits.
        torchrl: Keywords of TorchRL's class that have no effect here: accepted at their defaults, otherwise
            refused with the reason. `trajectories` (int, `(rows,)`) and `ends` (bool, `(rows,)`) are accepted
            if they say the same as the store's episodes, which the first draw checks.

    Raises:
        TypeError: Both or neither of `num_slices` and `slice_len` are given, or a keyword is unknown.
        ValueError: An argument is out of range, not supported, or does not fit another one.

    Example:
        >>> from expstore import MemoryStorage, SliceSamplerWithoutReplacement, TensorDictReplayBuffer
        >>> sampler = SliceSamplerWithoutReplacement(slice_len=4)
        >>> rb = TensorDictReplayBuffer(storage=MemoryStorage(1000), sampler=sampler, batch_size=32)
    """

    without_replacement = True
    windowed = True
    keeps_to_split = True
    _kind = 3
    _transient = SamplerWithoutReplacement._transient | {"_weights", "_candidates", "_tree"}

    def __init__(
        self,
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        drop_last: bool = False,
        end_key: NestedKey | None = None,
        end_keys: Sequence[NestedKey] | None = None,
        traj_key: NestedKey | None = None,
        trajectory_key: NestedKey | None = None,
        truncated_key: NestedKey | None = ("next", "truncated"),
        init_key: NestedKey | None = "is_init",
        strict_length: bool = True,
        shuffle: bool = True,
        where: str | Where | None = None,
        weight: str | None = None,
        split: str | None = "train",
        **torchrl: Any,
    ) -> None:
        check_keywords(self, torchrl, SLICES_WITHOUT_REPLACEMENT)
        super().__init__(drop_last, shuffle, where=where, weight=weight, split=split)
        self.slicing = Slicing.of(
            num_slices=num_slices,
            slice_len=slice_len,
            strict_length=strict_length,
            pad_output=False,
            span=False,
            truncated_key=truncated_key,
            init_key=init_key,
        )
        self._trajectories = choose_trajectories(end_key, end_keys, traj_key, trajectory_key, torchrl)

    def _begin(self) -> None:
        super()._begin()
        self._weights = RunWeights()
        self._candidates = Candidates(self._filter, alike=True)

    def select(self, storage: ReadView, batch_size: int, generator: np.random.Generator) -> Selection:
        """Choose a slice of each of the next trajectories of the pass.

        Raises:
            NotReadyError: No trajectory is long enough, or no row matches.
            QueryError: The filter cannot be evaluated.
            StateError: The batch size is not a multiple of `num_slices` or `slice_len`.
            ValueError: `drop_last` is True, and the trajectories do not fill a batch.
        """
        self.slicing.sizes(batch_size)
        if self.filter is not None:
            return self._find_rows(storage, lambda: self._next_slices(storage, batch_size, generator))
        found = self._next_slices(storage, batch_size, generator)
        if found is None:
            runs = self._trajectories.of(storage)
            with runs.lock:
                have = runs.stop - runs.first
                raise build_too_short_error(have[have > 0], self.slicing.sizes(batch_size)[0])
        return found

    def _build_mass(self, size: int) -> Mass | None:
        return None  # it draws trajectories once, and not rows

    def _next_slices(
        self, storage: ReadView, batch_size: int, generator: np.random.Generator
    ) -> Selection | None:
        length, count = self.slicing.sizes(batch_size)
        runs = self._trajectories.of(storage)
        with runs.lock, self._lock:
            size = self._count(storage, runs, length)
            if not size:
                return None
            step = self._step(size, count, generator)
            selection = self._slices(storage, runs, step.places, length, batch_size, generator)
            self._settle(step)
        progress = (self._kind, *step.after, step.number, step.begin, step.places.size)
        return replace(selection, progress=progress)

    def sample_again(
        self, storage: ReadView, selection: Selection, generator: np.random.Generator
    ) -> Selection:
        """Choose other slices of the same trajectories, because some of their rows were overwritten."""
        length, _ = self.slicing.sizes(selection.asked)
        size, number, begin, count = selection.progress[3:]
        runs = self._trajectories.of(storage)
        with runs.lock, self._lock:
            if self._count(storage, runs, length) == size and self._key is not None:
                places = self._place(self._key, number, size, np.arange(begin, begin + count))
                again = self._slices(storage, runs, places, length, selection.asked, generator)
                return replace(again, progress=selection.progress)
        return self.select(storage, selection.asked, generator)

    def _count(self, storage: ReadView, runs: Runs, length: int) -> int:
        """Return the number of trajectories in which a slice can begin now."""
        runs.look()
        slicing = self.slicing
        self._is_filtered = self.filter is not None  # also for the choice of slices
        if self._is_filtered:
            self._tree = self._candidates.catch_up(storage, runs, slicing, length)
            return int(self._tree.total)

        def weigh(have: IntArray) -> Any:
            return (slicing.starts(have, length) > 0).astype(np.float64)

        self._tree = self._weights.catch_up(runs, length, weigh)
        return int(self._tree.total)

    def _slices(
        self,
        storage: ReadView,
        runs: Runs,
        places: IntArray,
        length: int,
        asked: int,
        generator: np.random.Generator,
    ) -> Selection:
        slicing = self.slicing
        chosen, _ = self._tree.find(places.astype(np.float64) + 0.5)
        first = runs.first[chosen]
        if not self._is_filtered:
            begins, lengths = slicing.place(runs.stop[chosen] - first, length, generator.random(chosen.size))
        else:
            begins, lengths = self._candidates.place(
                storage, runs, slicing, length, chosen=chosen, shares=generator.random((2, chosen.size))
            )
        ids = runs.rows(chosen, first + begins, lengths)
        return slicing.selection(ids, lengths, length=length, asked=asked)

    def stands(self, storage: ReadView, selection: Selection) -> bool:
        """Return whether the pass of a selection is still valid: the number of trajectories is the same."""
        length, _ = self.slicing.sizes(selection.asked)
        runs = self._trajectories.of(storage)
        with runs.lock, self._lock:
            return selection.progress[3] == self._count(storage, runs, length)

    def __repr__(self) -> str:
        return (
            f"SliceSamplerWithoutReplacement({self.slicing.size_text}, drop_last={self.drop_last}, "
            f"shuffle={self.shuffle}, strict_length={self.slicing.strict_length}{self._filtering})"
        )
