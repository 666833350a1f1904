"""Sampling slices: steps of one episode that follow one another.

Buffers take the sampler. It finds slices by episode and step, wherever their rows lie; it keeps a weight per
run of steps, and never reads rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from expstore.core.torchrl_keywords import SLICES, check_keywords
from expstore.core.values import Array, IntArray, Selection
from expstore.kernels.loader import compiling, load_in_background
from expstore.samplers.base import Sampler
from expstore.samplers.filter import Where
from expstore.samplers.keyed_trajectories import Trajectories
from expstore.samplers.slice_options import (
    NestedKey,
    Slicing,
    SlicingNames,
    Span,
    build_too_short_error,
    trajectory_fields,
)
from expstore.samplers.slices_without_replacement import SliceSamplerWithoutReplacement
from expstore.samplers.start_candidates import Candidates
from expstore.samplers.trajectory_weights import RunWeights

if TYPE_CHECKING:
    from expstore.storages.read_view import ReadView
    from expstore.storages.run_index import Runs

__all__ = ["SliceSampler", "Weighting"]

#: What has the same chance: every trajectory, or every place where a slice can begin.
Weighting = Literal["trajectory", "start"]


class SliceSampler(SlicingNames, Sampler):
    """Draw slices of episodes, with replacement: steps that follow one another, in one batch dim.

    A slice follows its episode wherever the rows lie: through interleaved workers and lanes, the end of the
    ring and restarts; what the store knows of an episode that is still open takes part. A draw costs the
    same however many rows there are, also while others write.

    `by="trajectory"` is TorchRL's law: a trajectory, each with the same chance, then one of the places in it
    where a slice can begin; steps of short trajectories come more often. With `by="start"` every such place
    in the store has the same chance.

    Batches say where slices end: `truncated_key` is True at the last step of each and False elsewhere,
    `done` beside it is so, too, and keeps what is stored. `init_key` is True at first steps if that field is
    stored. Buffers of TensorDicts write this into the batch, others tell it in the info of
    `sample(return_info=True)`.

    Threads: any number may sample while one writes. Crashes: a restart goes on with the next batch.

    Args:
        num_slices: How many slices make up a batch, whose size it divides; or else
        slice_len: how many steps a slice has.
        end_key: A field that ends trajectories; see `end_keys`.
        end_keys: Fields that end trajectories; those that are not stored are left out. The store's own
            (`done_keys` of `expstore.open`) do so anyway.
        traj_key: The field that names trajectories; None: as the store knows its episodes. For another one
            than the store's own a table is built when it is first needed, and kept current.
        trajectory_key: The same.
        truncated_key: Where the ends of slices are marked; None: nowhere.
        init_key: Where their beginnings are; None: nowhere.
        strict_length: Leave out trajectories that are shorter than a slice; otherwise they make short
            slices, and batches that are shorter than asked for.
        pad_output: Fill up short slices with their last row, while there are trajectories that are shorter
            than a slice, as torchrl does; `("collector", "mask")` is False there.
        span: How many steps a slice may lack at its left and at its right, because it reaches beyond the
            trajectory there: a number, False for none, True for all but one, or a pair of these.
        by: Which law.
        where: At which rows a slice may begin: a boolean SQL expression over a row and its `episode`; None:
            at all. By trajectory, every one in which a slice may begin has the same chance.
        weight: By what the chance of each place is multiplied, within its trajectory or in the store: a
            numeric one; None: 1.
        replacement: False makes a `SliceSamplerWithoutReplacement`, which takes its own arguments.
        torchrl: Keywords of TorchRL's class that have no effect here: accepted at their defaults, otherwise
            refused with the reason.

    Raises:
        TypeError: Not just one of `num_slices` and `slice_len` is given, or there is no such keyword.
        ValueError: An option does not fit the others, or is not supported.

    Example:
        >>> sampler = SliceSampler(slice_len=4)
        >>> rb = TensorDictReplayBuffer(storage=MemoryStorage(1000), sampler=sampler, batch_size=32)
    """

    counterpart = SliceSamplerWithoutReplacement
    windowed = True

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
        **torchrl: Any,
    ) -> None:
        check_keywords(self, torchrl, SLICES)
        super().__init__(where=where, weight=weight)
        if by not in ("trajectory", "start"):
            raise ValueError(f"by must be 'trajectory' or 'start', got {by!r}")
        self.slicing = Slicing.of(
            num_slices=num_slices,
            slice_len=slice_len,
            strict_length=strict_length,
            pad_output=pad_output,
            span=span,
            truncated_key=truncated_key,
            init_key=init_key,
        )
        self._trajectories = Trajectories(*trajectory_fields(end_key, end_keys, traj_key, trajectory_key))
        self.by = by
        self._begin()

    def _begin(self) -> None:
        self._weights = RunWeights()
        filter = self.filter
        self._candidates = None if filter is None else Candidates(filter, alike=self.by == "trajectory")

    def attach(self, storage: ReadView) -> None:
        """Follow the episodes of a storage."""
        super().attach(storage)
        load_in_background(_compile_loops)

    def select(self, storage: ReadView, batch_size: int, generator: np.random.Generator) -> Selection:
        """Choose slices of `batch_size` rows together.

        Raises:
            NotReadyError: No trajectory is long enough, or no row matches.
            StateError: The batch size cannot be cut into such slices.
            QueryError: The filter cannot be computed.
        """
        if self.filter is not None:
            return self._draw_filtered(storage, lambda: self._choose_filtered(storage, batch_size, generator))
        length, count = self.slicing.sizes(batch_size)
        ids, lengths, padded = self._choose_rows(storage, length, count, generator)
        return self.slicing.selection(ids, lengths, length=length, asked=batch_size, padded=padded)

    def _choose_rows(
        self, storage: ReadView, length: int, count: int, generator: np.random.Generator
    ) -> tuple[IntArray, IntArray, bool]:
        """Return the rows of slices, how many each has, and whether short ones are filled up."""
        slicing = self.slicing
        slicing.slack(length)
        runs = self._trajectories.of(storage)
        with runs.lock:
            runs.look()
            tree = self._weights.catch_up(runs, length, lambda have: self._weigh(have, length))
            total = int(tree.total)
            if not total:
                raise build_too_short_error(_lengths(runs), length)
            chosen, _ = tree.find(np.floor(generator.random(count) * total) + 0.5)
            first = runs.first[chosen]
            begins, lengths = slicing.place(runs.stop[chosen] - first, length, generator.random(count))
            ids = runs.rows(chosen, first + begins, lengths)
            padded = slicing.pad_output and bool((_lengths(runs) < length).any())
        return ids, lengths, padded

    def _choose_filtered(
        self, storage: ReadView, batch_size: int, generator: np.random.Generator
    ) -> Selection | None:
        """Choose slices as the filter has it; None: there is nowhere to begin."""
        slicing = self.slicing
        length, count = slicing.sizes(batch_size)
        slicing.slack(length)
        runs = self._trajectories.of(storage)
        candidates = self._candidates
        with runs.lock:
            runs.look()
            if candidates is None:
                return None
            tree = candidates.catch_up(storage, runs, slicing, length)
            if not tree.total > 0:
                return None
            chosen, _ = tree.find(generator.random(count) * tree.total)
            begins, lengths = candidates.place(
                storage, runs, slicing, length, chosen=chosen, shares=generator.random((2, count))
            )
            ids = runs.rows(chosen, runs.first[chosen] + begins, lengths)
            padded = slicing.pad_output and bool((_lengths(runs) < length).any())
        return slicing.selection(ids, lengths, length=length, asked=batch_size, padded=padded)

    def _weigh(self, have: IntArray, length: int) -> Array:
        starts = self.slicing.starts(have, length)
        weights: Array = (starts > 0 if self.by == "trajectory" else starts).astype(np.float64)
        return weights

    def sample_again(
        self, storage: ReadView, selection: Selection, generator: np.random.Generator
    ) -> Selection:
        """Choose slices in the place of some that were overwritten while they were read."""
        return self.select(storage, selection.asked, generator)

    def sampleable(self, storage: ReadView, batch_size: int) -> int:
        """Return in how many places a slice can begin, whatever `where` says."""
        return self.slicing.windows(self._trajectories.of(storage), batch_size) if len(storage) else 0

    def can_sample(self, storage: ReadView, batch_size: int) -> bool:
        """Return whether there is a slice to be drawn."""
        return self.sampleable(storage, batch_size) > 0

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs; it weighs runs by itself."""
        own = ("_weights", "_candidates")
        return {name: value for name, value in super().__getstate__().items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over what `__getstate__` returned."""
        self.__dict__.update(state)
        self._begin()

    def __repr__(self) -> str:
        slicing = self.slicing
        given = "" if self.filter is None else f", {self.filter}"
        return (
            f"SliceSampler({slicing.size_text}, strict_length={slicing.strict_length}, by={self.by!r}{given})"
        )


def _lengths(runs: Runs) -> IntArray:
    """Return how many steps the runs have that have any."""
    have = runs.stop - runs.first
    return have[have > 0]


def _compile_loops() -> None:
    with compiling:
        import expstore.kernels.step_runs
        import expstore.kernels.sum_tree  # noqa: F401
