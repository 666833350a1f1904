"""What a sampled row stands for: itself, or a window of steps around it.

Buffers ask a unit after their sampler. It finds rows by episode and step; it never chooses any, and never
reads what they hold.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from expstore.core.values import Array, IntArray, Key, Selection, to_key
from expstore.errors import NotFoundError, SchemaError
from expstore.samplers.keyed_trajectories import Trajectories
from expstore.samplers.torchrl_adapter import to_selection

if TYPE_CHECKING:
    from expstore.samplers.base import Sampler
    from expstore.storages.read_view import ReadView
    from expstore.storages.run_index import Runs

__all__ = ["SampleUnit", "Sequence", "Transition", "check_unit", "reduce_to_anchors"]

_DONE: Key = ("next", "done")


class SampleUnit(ABC):
    """Make rows of the rows that a sampler has chosen (its anchors). Threads may ask at once.

    A unit of your own has `expand`, as one for torchrl; it finds rows by their index.

    Example:
        >>> class WithFirst(SampleUnit):
        ...     def expand(self, index, info, storage):
        ...         return torch.cat([index, torch.zeros(1, dtype=torch.int64)]), {}
        >>> rb = ReplayBuffer(storage=MemoryStorage(10), sample_unit=WithFirst(), batch_size=4)
    """

    #: What batches carry at their root because of it; `extend` leaves these keys out.
    root_keys: frozenset[str] = frozenset()
    #: Fields that it reads itself.
    reads: frozenset[Key] = frozenset()

    @abstractmethod
    def expand(self, index: Any, info: dict[Any, Any], storage: ReadView) -> tuple[Any, dict[Any, Any]]:
        """Return the rows of a batch, by index.

        Args:
            index: What the sampler has chosen. Shape `(n,)`, int64; one such tensor per dim, in a tuple,
                where the storage has several.
            info: What the sampler says of them: tensors with one row for each, by key.
            storage: What holds the rows.

        Returns:
            The index of other rows, and what is said of each of these.
        """

    def select(self, anchors: Selection, storage: ReadView) -> Selection | None:
        """Return the rows of a batch: what buffers ask for.

        Args:
            anchors: What the sampler has chosen.
            storage: What holds the rows.

        Returns:
            Other rows, with what is said of each in `info`, and `anchors` among its attributes. None: some
            anchors have left meanwhile, and others are to be chosen.

        Raises:
            NotFoundError: `expand` returned an index of which there is no row.
        """
        given = {key if len(key) > 1 else key[0]: values for key, values in anchors.info.items()}
        info = {name: torch.from_numpy(values) for name, values in given.items()} | anchors.notes
        rows = to_selection(storage, *self.expand(_index_of(storage, anchors.ids), info, storage))
        return replace(rows, progress=anchors.progress, anchors=anchors)


class Transition(SampleUnit):
    """Take the rows that were chosen, as without any unit.

    Example:
        >>> rb = ReplayBuffer(storage=MemoryStorage(10), sample_unit=Transition(), batch_size=4)
    """

    def expand(self, index: Any, info: dict[Any, Any], storage: ReadView) -> tuple[Any, dict[Any, Any]]:
        """Return what was given."""
        return index, info

    def select(self, anchors: Selection, storage: ReadView) -> Selection:
        """Return the anchors."""
        return anchors

    def __repr__(self) -> str:
        return "Transition()"


class Sequence(SampleUnit):
    """Take a window of steps of one episode around every row that was chosen.

    A window has `burn_in` steps before the anchor, `length` steps from it on, `bootstrap` steps after these:
    a batch of B anchors holds B * (burn_in + length + bootstrap) rows, one window behind another. Steps
    follow their episode, wherever its rows lie, and never leave it. With any sampler of single rows; those
    of slices make windows of their own.

    Each row says in `sequence_id` to which window it belongs, and in `step_in_sequence` where it stands
    there. `learning_mask` is True in the `length` steps. `validity_mask` is False where the episode has no
    such step (or not any more, or not yet): there stands its first or last one. `anchor_index` (and
    `anchor_id` where batches have ids) is the row that was chosen; `update_tensordict_priority` sets the
    priorities of these, each to the largest of its windows' valid rows.

    Threads: any number may ask. Crashes: it keeps nothing.

    Args:
        length: How many steps are learned from.
        episode_boundary: What becomes of windows that reach beyond an episode's end: "pad": the last step
            stands for those that are not there. "stop": the window begins so much earlier that it ends with
            the episode, if that is long enough.
        done_key: A field that ends sequences; those of the store do so anyway, and are meant by
            ("next", "done").
        burn_in: How many steps come before the anchor. They never move it.
        bootstrap: How many steps come after those that are learned from.
        dilation: Take every so many-th step.

    Raises:
        ValueError: A number is too small, or sequences were to leave their episodes.

    Example:
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
                raise TypeError(f"{name} must be a whole number, got {value!r}")
        if length <= 0:
            raise ValueError(f"length must be strictly positive, got {length}.")
        if episode_boundary not in ("pad", "stop"):
            raise ValueError(
                f"episode_boundary must be 'pad' or 'stop', got {episode_boundary!r}: a sequence never "
                "leaves its episode here"
            )
        if done_key is None:
            raise ValueError("done_key=None would let sequences leave their episodes; leave it out")
        if burn_in < 0:
            raise ValueError(f"burn_in must be non-negative, got {burn_in}.")
        if bootstrap < 0:
            raise ValueError(f"bootstrap must be non-negative, got {bootstrap}.")
        if dilation < 1:
            raise ValueError(f"dilation must be strictly positive, got {dilation}.")
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
        """How many rows a window has."""
        return self.burn_in + self.length + self.bootstrap

    def expand(self, index: Any, info: dict[Any, Any], storage: ReadView) -> tuple[Any, dict[Any, Any]]:
        """Return the rows of a window around each of some rows, by index.

        Args:
            index: Which rows. Shape `(n,)`, int64; or one such tensor per dim of the storage, in a tuple.
            info: What is said of each: tensors with one row for each, by key; it is repeated.
            storage: What holds the rows.

        Returns:
            The index of each row of the windows, and what is said of it.

        Raises:
            NotFoundError: There is no row of some index.
            SchemaError: `done_key` is no field with one value per row.
        """
        rows = self.select(to_selection(storage, index, info), storage)
        if rows is None:
            raise NotFoundError("rows have left while their windows were looked for")
        told = {key if len(key) > 1 else key[0]: values for key, values in rows.info.items()}
        told.pop("anchor_id")
        return _index_of(storage, rows.ids), {key: torch.from_numpy(values) for key, values in told.items()}

    def select(self, anchors: Selection, storage: ReadView) -> Selection | None:
        """Return the rows of a window around each anchor.

        Raises:
            SchemaError: `done_key` is no field with one value per row.
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
        """Return the steps of the windows around some, and which of them there are. Shapes `(n, rows)`.

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
    """Return the index of rows as code written for torchrl takes it."""
    numbers = storage.geometry.index_of(ids)
    if storage.ndim == 1:
        return torch.from_numpy(numbers)
    return tuple(torch.from_numpy(places.copy()) for places in storage.geometry.unravel(numbers).T)


def check_unit(unit: SampleUnit | None, sampler: Sampler | None) -> SampleUnit | None:
    """Return the unit of a buffer.

    Raises:
        TypeError: It is not a SampleUnit.
        ValueError: The sampler draws windows of its own.
    """
    if unit is not None and not isinstance(unit, SampleUnit):
        raise TypeError(f"sample_unit must be a SampleUnit, not {type(unit).__name__}")
    if isinstance(unit, Sequence) and sampler is not None and sampler.windowed:
        raise ValueError(
            f"{sampler!r} draws slices: there are no sequences around their rows; use one of both"
        )
    return unit


def reduce_to_anchors(
    anchors: IntArray, priorities: Array, valid: NDArray[np.bool_]
) -> tuple[IntArray, Array]:
    """Return each anchor once, with the largest priority of the valid rows of its windows.

    Args:
        anchors: Of each row. Shape `(n,)`.
        priorities: Of each row. Shape `(n,)`.
        valid: Which rows count. Shape `(n,)`.
    """
    if priorities.shape != anchors.shape:
        raise SchemaError(f"{anchors.size} rows are given {priorities.size} priorities")
    found, place = np.unique(anchors[valid], return_inverse=True)
    largest = np.full(found.size, -np.inf)
    np.maximum.at(largest, place, priorities[valid])
    return found, largest
