"""What a sampled row is extended to: nothing, or a sequence of steps around it.

Buffers call a unit after their sampler. It finds rows by episode and step; it does not choose rows, and does
not read their values except flags that end episodes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from expstore.core.values import Array, IntArray, Key, Selection, to_key
from expstore.errors import ArgumentError, NotFoundError, SchemaError
from expstore.samplers.keyed_trajectories import Trajectories
from expstore.samplers.torchrl_adapter import to_selection

if TYPE_CHECKING:
    from expstore.samplers.base import Sampler
    from expstore.storages.read_view import ReadView
    from expstore.storages.run_index import Runs

_DONE: Key = ("next", "done")


class SampleUnit(ABC):
    """Extend the rows that a sampler has chosen (the anchors). Threads may call it at the same time.

    A subclass defines `expand` as in torchrl, in terms of indices.

    Example:
        >>> from expstore import MemoryStorage, ReplayBuffer
        >>> from expstore.buffers import SampleUnit
        >>> class WithFirst(SampleUnit):
        ...     def expand(self, index, info, storage):
        ...         return torch.cat([index, torch.zeros(1, dtype=torch.int64)]), {}
        >>> rb = ReplayBuffer(storage=MemoryStorage(10), sample_unit=WithFirst(), batch_size=4)
    """

    #: Root keys that it adds to batches; `extend` skips these keys.
    root_keys: frozenset[str] = frozenset()
    #: Fields that it reads.
    reads: frozenset[Key] = frozenset()

    @abstractmethod
    def expand(self, index: Any, info: dict[Any, Any], storage: ReadView) -> tuple[Any, dict[Any, Any]]:
        """Return the rows of a batch, by index.

        Args:
            index: The anchors. Shape `(n,)`, int64; a tuple of one such tensor per dim if the storage has
                several.
            info: The sampler's values about the anchors, by key: tensors with one row each.
            storage: Storage of the rows.

        Returns:
            The indices of the batch's rows, and values about each of them.
        """

    def select(self, anchors: Selection, storage: ReadView) -> Selection | None:
        """Return the rows of a batch. Buffers call this method.

        Args:
            anchors: The rows that the sampler has chosen.
            storage: Storage of the rows.

        Returns:
            The rows, with values about each in `info`, and with the attribute `anchors`. None: some anchors
            were removed meanwhile, and the sampler must choose others.

        Raises:
            NotFoundError: `expand` returned the index of a row that does not exist.
        """
        given = {key if len(key) > 1 else key[0]: values for key, values in anchors.info.items()}
        info = {name: torch.from_numpy(values) for name, values in given.items()} | anchors.notes
        rows = to_selection(storage, *self.expand(_index_of(storage, anchors.ids), info, storage))
        return replace(rows, progress=anchors.progress, anchors=anchors)


class Transition(SampleUnit):
    """Use the sampled rows alone, as without a unit.

    Example:
        >>> from expstore import MemoryStorage, ReplayBuffer
        >>> from expstore.buffers import Transition
        >>> rb = ReplayBuffer(storage=MemoryStorage(10), sample_unit=Transition(), batch_size=4)
    """

    def expand(self, index: Any, info: dict[Any, Any], storage: ReadView) -> tuple[Any, dict[Any, Any]]:
        """Return `index` and `info` unchanged."""
        return index, info

    def select(self, anchors: Selection, storage: ReadView) -> Selection:
        """Return the anchors."""
        return anchors

    def __repr__(self) -> str:
        return "Transition()"


class Sequence(SampleUnit):
    """Extend every sampled row to a window of steps of its episode.

    A window has `burn_in` steps before the anchor, `length` steps that begin with it, and `bootstrap` steps
    after these: a batch of B anchors has B * (burn_in + length + bootstrap) rows, one window after another.
    Steps follow the episode, wherever its rows are stored, and never cross its ends. It works with any
    sampler of single rows; slice samplers draw their own windows.

    `sequence_id` is the number of a row's window, and `step_in_sequence` its position there. `learning_mask`
    is True in the `length` steps. `validity_mask` is False if the episode does not have the step (or does not
    have it any more, or yet); such a position repeats the first or last step. `anchor_index` (and `anchor_id`
    if batches have ids) is the anchor. `update_tensordict_priority` sets the anchors' priorities, each to the
    largest of the valid rows of its windows.

    Threads: any number may call it. Crashes: it has no state.

    Args:
        length: Number of steps to learn from.
        episode_boundary: What happens if a window extends beyond an episode's end. "pad": the last step is
            repeated. "stop": the window begins earlier, so that it ends with the episode, if that is long
            enough.
        done_key: A field that ends sequences, besides the ends of the store's episodes. With the default
            ("next", "done") only these count.
        burn_in: Number of steps before the anchor. They do not move the anchor.
        bootstrap: Number of steps after the `length` steps.
        dilation: Distance between the steps of a window: 2 takes every second step.

    Raises:
        ArgumentError: A number is too small, or sequences would cross the ends of episodes.

    Example:
        >>> from expstore import MemoryStorage, TensorDictReplayBuffer
        >>> from expstore.buffers import Sequence
        >>> unit = Sequence(length=3, burn_in=1)
        >>> rb = TensorDictReplayBuffer(storage=MemoryStorage(10), sample_unit=unit, batch_size=2)
        >>> rb.extend(TensorDict({"observation": torch.zeros(10, 3)}, [10]))
        >>> rb.sample()["validity_mask"].shape
        torch.Size([8])
    """

    root_keys = frozenset(
        {"anchor_index", "anchor_id", "learning_mask", "sequence_id", "step_in_sequence", "validity_mask"}
    )

    def __init__(
        self,
        length: int,
        episode_boundary: Literal["pad", "stop"] = "pad",
        done_key: str | tuple[str, ...] | None = _DONE,
        burn_in: int = 0,
        bootstrap: int = 0,
        dilation: int = 1,
    ) -> None:
        for name, value in (
            ("length", length), ("burn_in", burn_in), ("bootstrap", bootstrap), ("dilation", dilation)
        ):  # fmt: skip
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                raise ArgumentError(f"{name} must be a whole number, got {value!r}")
        if length <= 0:
            raise ArgumentError(f"length must be strictly positive, got {length}.")
        if episode_boundary not in ("pad", "stop"):
            raise ArgumentError(
                f"episode_boundary must be 'pad' or 'stop', got {episode_boundary!r}: sequences never "
                "cross the end of an episode here"
            )
        if done_key is None:
            raise ArgumentError("done_key=None would let sequences cross the ends of episodes; leave it out")
        if burn_in < 0:
            raise ArgumentError(f"burn_in must be non-negative, got {burn_in}.")
        if bootstrap < 0:
            raise ArgumentError(f"bootstrap must be non-negative, got {bootstrap}.")
        if dilation < 1:
            raise ArgumentError(f"dilation must be strictly positive, got {dilation}.")
        self.length = length
        self.episode_boundary = episode_boundary
        self.done_key = to_key(done_key)
        self.burn_in = burn_in
        self.bootstrap = bootstrap
        self.dilation = dilation
        self._trajectories = Trajectories(ends=(self.done_key,))
        self.reads = self._trajectories.keys

    @property
    def rows(self) -> int:
        """The number of rows of a window."""
        return self.burn_in + self.length + self.bootstrap

    def expand(self, index: Any, info: dict[Any, Any], storage: ReadView) -> tuple[Any, dict[Any, Any]]:
        """Return the rows of the windows around anchors, by index.

        Args:
            index: The anchors. Shape `(n,)`, int64; or a tuple of one such tensor per dim of the storage.
            info: Values about the anchors, by key: tensors with one row each, which are repeated.
            storage: Storage of the rows.

        Returns:
            The index of each row of the windows, and the values about it.

        Raises:
            NotFoundError: There is no row at an index.
            SchemaError: `done_key` is not a field with one value per row.
        """
        rows = self.select(to_selection(storage, index, info), storage)
        if rows is None:
            raise NotFoundError("rows were removed while their windows were read")
        told = {key if len(key) > 1 else key[0]: values for key, values in rows.info.items()}
        told.pop("anchor_id")
        return _index_of(storage, rows.ids), {key: torch.from_numpy(values) for key, values in told.items()}

    def select(self, anchors: Selection, storage: ReadView) -> Selection | None:
        """Return the rows of the window around each anchor.

        Raises:
            SchemaError: `done_key` is not a field with one value per row.
        """
        count, total = anchors.ids.size, self.rows
        runs = self._runs_of(storage)
        with runs.lock:
            runs.look()
            numbers, steps = runs.locate(anchors.ids)
            if numbers.min(initial=0) < 0 or not storage.intact(anchors.ids):
                return None
            window, valid = self._window(steps, runs.first[numbers], runs.stop[numbers] - 1)
            ids = runs.ids(np.repeat(numbers, total).reshape(window.shape), window)
        index = storage.geometry.index_of(anchors.ids)
        if storage.ndim > 1:
            index = storage.geometry.unravel(index)
        place = np.arange(total)
        learning = (place >= self.burn_in) & (place < self.burn_in + self.length)
        info = {key: np.repeat(values, total, axis=0) for key, values in anchors.info.items()}
        info |= {
            ("anchor_index",): np.repeat(index, total, axis=0),
            ("anchor_id",): np.repeat(anchors.ids, total),
            ("sequence_id",): np.repeat(np.arange(count), total),
            ("step_in_sequence",): np.tile(place, count),
            ("learning_mask",): np.tile(learning, count),
            ("validity_mask",): valid.reshape(-1),
        }
        return Selection(ids.reshape(-1), info, anchors.progress, anchors=anchors)

    def _window(self, steps: IntArray, first: IntArray, last: IntArray) -> tuple[IntArray, NDArray[np.bool_]]:
        """Return the steps of the windows around anchors, and whether each exists. Shapes `(n, rows)`.

        The arithmetic is that of torchrl's `Sequence`.
        """
        offset = (np.arange(self.rows) - self.burn_in) * self.dilation
        if self.episode_boundary == "stop":
            missing = steps + self.dilation * (self.length + self.bootstrap - 1) - last
            steps = steps - np.clip(missing, 0, steps - first)
        wanted = steps[:, None] + offset
        found = np.clip(wanted, first[:, None], last[:, None])
        return found, found == wanted

    def _runs_of(self, storage: ReadView) -> Runs:
        if self.done_key == _DONE:
            return storage.runs
        return self._trajectories.of(storage)

    def __repr__(self) -> str:
        return (
            f"Sequence(length={self.length}, episode_boundary={self.episode_boundary!r}, "
            f"burn_in={self.burn_in}, bootstrap={self.bootstrap}, dilation={self.dilation})"
        )


def _index_of(storage: ReadView, ids: IntArray) -> Any:
    """Return the indices of rows in the form that torchrl's code expects."""
    numbers = storage.geometry.index_of(ids)
    if storage.ndim == 1:
        return torch.from_numpy(numbers)
    return tuple(torch.from_numpy(places.copy()) for places in storage.geometry.unravel(numbers).T)


def check_unit(unit: SampleUnit | None, sampler: Sampler | None) -> SampleUnit | None:
    """Check the sample unit of a buffer and return it.

    Raises:
        ArgumentError: The unit is not a SampleUnit; the sampler draws slices, which are windows already.
    """
    if unit is not None and not isinstance(unit, SampleUnit):
        raise ArgumentError(f"sample_unit must be a SampleUnit, not {type(unit).__name__}")
    if isinstance(unit, Sequence) and sampler is not None and sampler.windowed:
        raise ArgumentError(
            f"{sampler!r} draws slices, which a sample unit cannot extend; use either of them"
        )
    return unit


def reduce_to_anchors(
    anchors: IntArray, priorities: Array, valid: NDArray[np.bool_]
) -> tuple[IntArray, Array]:
    """Return each anchor once, with the largest priority of the valid rows of its windows.

    Args:
        anchors: Anchor of each row. Shape `(n,)`.
        priorities: Priority of each row. Shape `(n,)`.
        valid: Whether each row counts. Shape `(n,)`.
    """
    if priorities.shape != anchors.shape:
        raise SchemaError(f"got {priorities.size} priorities for {anchors.size} rows")
    found, place = np.unique(anchors[valid], return_inverse=True)
    largest = np.full(found.size, -np.inf)
    np.maximum.at(largest, place, priorities[valid])
    return found, largest
