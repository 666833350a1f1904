"""Sampling slices whose first rows are drawn in proportion to priorities.

Buffers take the sampler. It is a `PrioritizedSampler` over the rows at which a slice can begin; it never
reads rows.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from expstore.core.torchrl_keywords import PRIORITIZED_SLICES, check_keywords
from expstore.core.values import Array, IntArray, Selection
from expstore.errors import NotReadyError
from expstore.samplers.filter import Where
from expstore.samplers.keyed_trajectories import Trajectories
from expstore.samplers.prioritized import PrioritizedSampler, Reduction
from expstore.samplers.slice_options import (
    NestedKey,
    Slicing,
    SlicingNames,
    Span,
    build_too_short_error,
    trajectory_fields,
)

if TYPE_CHECKING:
    from expstore.kernels.sum_tree import SumTree
    from expstore.storages.read_view import ReadView
    from expstore.storages.run_index import Runs

__all__ = ["PrioritizedSliceSampler"]

_TRIES = 3


class PrioritizedSliceSampler(SlicingNames, PrioritizedSampler):
    """Draw slices, of which row i is the first with probability p_i^alpha / sum of p_j^alpha.

    The sum is over the rows at which a slice can begin; p is priority + eps. A slice is made of steps of one
    episode that follow one another, wherever their rows lie; see `SliceSampler`, also for what batches say
    of their ends. `priority_weight` is (P_i / min P)^-beta of a slice's first row, at each of its rows.

    Threads, crashes: as `PrioritizedSampler`.

    Args:
        max_capacity: As `PrioritizedSampler`, as are the next ones.
        alpha: See there.
        beta: See there.
        eps: See there.
        dtype: See there.
        reduction: See there.
        num_slices: As `SliceSampler`, as are the next ones.
        slice_len: See there.
        end_key: See there.
        end_keys: See there.
        traj_key: See there.
        truncated_key: See there.
        init_key: See there.
        strict_length: Let slices begin only where a whole one does; otherwise a shorter trajectory makes one
            slice, from its first row on.
        span: How many steps a slice may lack at its right. A left one is turned off with a warning.
        max_priority_within_buffer: As `PrioritizedSampler`.
        where: At which rows a slice may begin: a boolean SQL expression over a row and its `episode`; None:
            at all. A `Where` also says by what the chance of each row is multiplied.
        torchrl: Keywords of TorchRL's class that have no effect here: accepted at their defaults, otherwise
            refused with the reason.

    Example:
        >>> sampler = PrioritizedSliceSampler(1000, alpha=0.7, beta=0.5, slice_len=4)
        >>> rb = TensorDictReplayBuffer(storage=MemoryStorage(1000), sampler=sampler, batch_size=32)
    """

    windowed = True

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
            raise TypeError(
                "PrioritizedSliceSampler takes a weight with the condition: where=expstore.Where(condition, "
                "weight=...)"
            )
        check_keywords(self, torchrl, PRIORITIZED_SLICES)
        super().__init__(
            max_capacity, alpha, beta, eps, dtype, reduction, max_priority_within_buffer, where=where
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
        self._trajectories = Trajectories(*trajectory_fields(end_key, end_keys, traj_key))
        self._starts = _Starts()

    def attach(self, storage: ReadView) -> None:
        """Follow the priorities and the episodes of a storage."""
        self._starts = _Starts()
        super().attach(storage)

    def select(self, storage: ReadView, batch_size: int, generator: np.random.Generator) -> Selection:
        """Choose slices of `batch_size` rows together, with replacement.

        Raises:
            NotReadyError: No trajectory is long enough, all priorities are 0, and so is eps, or no row
                matches.
            QueryError: The filter cannot be computed.
            StateError: The batch size cannot be cut into such slices.
        """
        self.slicing.sizes(batch_size)
        if self.filter is not None:
            return self._draw_filtered(storage, lambda: self._slices(storage, batch_size, generator))
        found = self._slices(storage, batch_size, generator)
        if found is None:
            raise NotReadyError("non-positive p_sum: all priorities are 0", hint="set eps above 0")
        return found

    def _slices(self, storage: ReadView, batch_size: int, generator: np.random.Generator) -> Selection | None:
        slicing = self.slicing
        length, count = slicing.sizes(batch_size)
        runs = self._trajectories.of(storage)
        with runs.lock:
            with self._lock:
                for _ in range(_TRIES):
                    window = runs.look()
                    tree = self._follow(storage, runs, length - slicing.slack(length)[1])
                    smallest = tree.smallest
                    # The ring may have gone round since the look: loading compiled loops takes that long.
                    if math.isfinite(smallest) or self._weights.window.low < window.last:
                        break
                if not math.isfinite(smallest):
                    have = runs.stop - runs.first
                    if slicing.starts(have, length).any():
                        return None
                    raise build_too_short_error(have[have > 0], length)
                places, weights = tree.find(generator.random(count) * tree.total)
                numbers, steps = self._starts.at(places, runs)
                lengths = np.minimum(length, runs.stop[numbers] - steps)
                ids = runs.rows(numbers, steps, lengths)
        found = slicing.selection(ids, lengths, length=length, asked=batch_size)
        found.info[("priority_weight",)] = np.repeat(self._undo_bias(weights / smallest), lengths)
        return found

    def sample_again(
        self, storage: ReadView, selection: Selection, generator: np.random.Generator
    ) -> Selection:
        """Choose slices in the place of some that were overwritten while they were read."""
        return self.select(storage, selection.asked, generator)

    def _follow(self, storage: ReadView, runs: Runs, least: int) -> SumTree:
        """Return a tree in which rows at which a slice can begin have their weights, all others none."""
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

    def _weigh(self, storage: ReadView, places: IntArray) -> Array:
        held = self._starts.can_begin(places, storage.geometry.ids_in(places, storage.window.last))
        weights: Array = np.where(held, super()._weigh(storage, places), 0.0)
        return weights

    def sampleable(self, storage: ReadView, batch_size: int) -> int:
        """Return in how many places a slice can begin, whatever `where` says."""
        return self.slicing.windows(self._trajectories.of(storage), batch_size) if len(storage) else 0

    def can_sample(self, storage: ReadView, batch_size: int) -> bool:
        """Return whether there is a slice to be drawn."""
        return self.sampleable(storage, batch_size) > 0

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs; it finds rows by itself."""
        return {name: value for name, value in super().__getstate__().items() if name != "_starts"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over what `__getstate__` returned."""
        super().__setstate__(state)
        self._starts = _Starts()

    def __repr__(self) -> str:
        given = "" if self.filter is None else f", {self.filter}"
        return (
            f"PrioritizedSliceSampler({self.slicing.size_text}, alpha={self.alpha}, beta={self.beta}, "
            f"strict_length={self.slicing.strict_length}{given})"
        )


def _drop_left(span: Span) -> Span:
    """Turn off a span on the left, with a warning."""
    left, right = span if isinstance(span, tuple | list) and len(span) == 2 else (span, span)
    if left:
        warnings.warn(
            "Left spanning is disabled for PrioritizedSliceSampler and will be automatically turned off: "
            "priorities belong to first rows, and there are none before a trajectory",
            stacklevel=3,
        )
    return span if not isinstance(right, bool | int) else (False, right)


class _Starts:
    """Know at which rows a slice can begin, and what they are called in their runs.

    A row at which one can begin stays one until it leaves: what follows it is newer than it is.
    """

    def __init__(self) -> None:
        self._id = np.zeros(0, np.int64)  # by slot; 0: no slice begins here
        self._step = np.zeros(0, np.int64)
        self._name = np.zeros(0, np.int64)  # of the row's run
        self._done = np.zeros(0, np.int64)  # by run: the steps below are known
        self._seen: tuple[Runs, int, int] | None = None  # the runs, the least length, and when that was

    def can_begin(self, places: IntArray, ids: IntArray) -> Array:
        """Say at which rows in slots a slice can begin. Shapes `(n,)`."""
        size = self._id.size
        held: Array = places < size
        if not held.all():
            held[held] = self._id[places[held]] == ids[held]
        else:
            held = self._id[places] == ids
        return held

    def at(self, places: IntArray, runs: Runs) -> tuple[IntArray, IntArray]:
        """Return run and step of the rows in slots. Shapes `(n,)`."""
        steps = self._step[places]
        return runs.table.find(self._name[places], steps), steps

    def go_on(self, runs: Runs, least: int) -> bool:
        """Return whether it is known what has changed since rows were last looked for, in these runs."""
        seen = self._seen
        return seen is not None and seen[:2] == (runs, least) and runs.find_changed(seen[2]) is not None

    def find(self, storage: ReadView, runs: Runs, least: int, *, strict: bool) -> IntArray:
        """Find rows at which a slice can begin since they were last looked for.

        Args:
            storage: Where they lie.
            runs: As of a look just now.
            least: How many steps a slice must have.
            strict: Leave out runs that have fewer; otherwise a slice begins at their first row.

        Returns:
            Their ids. Shape `(n,)`.
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
            storage.geometry.slot_of(ids),
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
