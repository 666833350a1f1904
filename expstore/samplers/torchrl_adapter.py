"""Samplers written for torchrl: they choose indices, and are told of what is written.

Buffers adapt whatever sampler they are given. The user's object keeps its state to itself; torchrl is never
imported.
"""

from __future__ import annotations

import inspect
import threading
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from expstore.core.values import Array, IntArray, Key, Mark, Selection, to_key
from expstore.errors import StateError
from expstore.samplers.base import Sampler, call_with_storage, is_written, readable, tell_write
from expstore.samplers.names import make_sampler

if TYPE_CHECKING:
    from expstore.storages.read_view import ReadView

__all__ = ["AdaptedSampler", "adapt", "to_selection", "unwrap"]


def adapt(sampler: Any) -> Sampler:
    """Return a sampler that buffers can draw by: the given one, one made by its name, or an adapter of it.

    Raises:
        ArgumentError: No sampler has this name, or the sampler has no defaults.
        TypeError: It has no method `sample`.
    """
    if isinstance(sampler, str):
        return make_sampler(sampler)
    if not callable(getattr(sampler, "sample", None)):
        raise TypeError(f"a buffer draws by a Sampler, not by {type(sampler).__name__}")
    if isinstance(sampler, Sampler) and _takes_generator(sampler):
        return sampler
    kind = type(sampler)
    if kind.__module__.partition(".")[0] == "torchrl":
        raise TypeError(
            f"torchrl's own {kind.__name__} reads torchrl's storages; expstore.samplers has its samplers "
            "under the same names"
        )
    return AdaptedSampler(sampler)


def unwrap(sampler: Sampler) -> Any:
    """Return what the user gave to the buffer."""
    return sampler.sampler if isinstance(sampler, AdaptedSampler) else sampler


def _takes_generator(sampler: Sampler) -> bool:
    """Return whether `sample` is called as here, not as in torchrl."""
    parameters = inspect.signature(sampler.sample).parameters
    return "generator" in parameters or len(parameters) > 2


class AdaptedSampler(Sampler):
    """Draw by an object written for torchrl: `sample(storage, batch_size) -> (index, info)`.

    The object may have `add(index)`, `extend(index)`, `update_priority(index, priority, storage=...)`,
    `mark_update(index, storage=...)`, `_empty()`, `ran_out`, `can_sample(storage, batch_size)`,
    `state_dict()` and `load_state_dict(state)`. The storage that it is given has `len()`, `ndim`, `max_size`,
    `get(index)` and `[]`. Before each draw its `_rng` is a torch.Generator seeded for that draw: who draws by
    it draws the same after a restart; who draws by torch's global generator does not.

    Threads: it is asked by one at a time. Processes: a copy has a copy of the object. Crashes: what the
    object keeps is lost with the process; `state_dict` of the buffer has it. With `prefetch` it is asked
    ahead, and batches that are drawn again are not taken back from it.

    Args:
        sampler: The object.

    Example:
        >>> class Newest(Sampler):
        ...     def sample(self, storage, batch_size):
        ...         return torch.arange(len(storage))[-batch_size:], {}
        >>> rb = ReplayBuffer(storage=MemoryStorage(10), sampler=Newest(), batch_size=2)
    """

    def __init__(self, sampler: Any) -> None:
        super().__init__()
        self.sampler = sampler
        self._lock = threading.RLock()
        self._rng = torch.Generator()
        self._ran_out = False

    @property
    def windowed(self) -> bool:  # type: ignore[override]
        """Whether its rows are windows of steps already."""
        return bool(getattr(self.sampler, "windowed", False))

    @property
    def prioritized(self) -> bool:  # type: ignore[override]
        """Whether priorities that come with new rows are to be taken in."""
        return is_written(self.sampler, "update_priority")

    @property
    def ran_out(self) -> bool:
        """Whether the object had run out of rows with the last batch that was handed out."""
        return self._ran_out

    def select(self, storage: ReadView, batch_size: int, generator: np.random.Generator) -> Selection:
        """Choose rows by asking the object.

        Raises:
            NotFoundError: It chose an index of which there is no row.
            NotReadyError: The storage is empty.
            StateError: What it returned is no pair of index and info.
        """
        readable(storage)
        sampler = self.sampler
        with self._lock:
            self._rng.manual_seed(int(generator.integers(1 << 63)))
            with suppress(AttributeError):  # it has slots, or frozen fields: it has its own ways
                sampler._rng = self._rng
            if getattr(sampler, "ran_out", False):
                with suppress(AttributeError):  # a property of its own, which its next draw moves
                    sampler.ran_out = False
            drawn = sampler.sample(storage, batch_size)
            ran_out = bool(getattr(sampler, "ran_out", False))
        if not isinstance(drawn, tuple) or len(drawn) != 2 or not hasattr(drawn[1], "items"):
            raise StateError(
                f"{type(sampler).__name__}.sample returned {type(drawn).__name__}, not a pair of index and "
                "info",
                hint="return (index, {}); samplers of expstore itself also take a generator",
            )
        return replace(to_selection(storage, *drawn), progress=(int(ran_out),))

    def hand_out(self, storage: ReadView, selection: Selection) -> None:
        """Keep whether this was the last batch of a pass."""
        self._ran_out = bool(selection.progress[0])

    def can_sample(self, storage: ReadView, batch_size: int) -> bool:
        """Return whether the object could choose so many rows now."""
        if is_written(self.sampler, "can_sample"):
            return bool(self.sampler.can_sample(storage, batch_size))
        return len(storage) > 0

    def sampleable(self, storage: ReadView, batch_size: int) -> int:
        """Return how many rows the object draws from: all, if it can draw now."""
        return len(storage) if self.can_sample(storage, batch_size) else 0

    def reduce(self, priorities: Array) -> Array:
        """Return one priority per row, the largest. Shapes `(n, ...)` in, `(n,)` out."""
        if priorities.ndim > 1:
            priorities = priorities.reshape(len(priorities), -1).max(1)
        return priorities.reshape(-1)

    def on_write(self, ids: IntArray) -> None:
        """Call the object's hooks for new rows."""
        with self._lock:
            tell_write(self.sampler, self._require_storage(), ids)

    def on_priority_update(self, storage: ReadView, ids: IntArray, priorities: Array) -> None:
        """Tell the object priorities."""
        if is_written(self.sampler, "update_priority"):
            here = storage.window.holds(ids)
            index = torch.from_numpy(_index(storage, ids[here]))
            values = torch.from_numpy(np.array(np.broadcast_to(priorities, ids.shape)[here], np.float32))
            with self._lock:
                call_with_storage(self.sampler.update_priority, index, values, storage=storage)

    def mark_update(self, index: Any, *, storage: ReadView | None = None) -> None:
        """Tell the object that rows were changed in place."""
        if is_written(self.sampler, "mark_update"):
            with self._lock:
                call_with_storage(self.sampler.mark_update, index, storage=self._require_storage(storage))

    def on_empty(self) -> None:
        """Tell the object that there are no rows any more."""
        if is_written(self.sampler, "_empty"):
            with self._lock:
                self.sampler._empty()

    def state_dict(self) -> dict[str, Any]:
        """Return what the object keeps, if it says so."""
        return {"given": self.sampler.state_dict()} if is_written(self.sampler, "state_dict") else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Hand the object what `state_dict` returned."""
        if "given" in state_dict:
            with self._lock:
                self.sampler.load_state_dict(state_dict["given"])

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs."""
        own = ("_lock", "_rng")
        return {name: value for name, value in super().__getstate__().items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over what `__getstate__` returned."""
        self.__dict__.update(state, _lock=threading.RLock(), _rng=torch.Generator())

    def __repr__(self) -> str:
        return repr(self.sampler)


def to_selection(storage: ReadView, index: Any, info: Any) -> Selection:
    """Return what code written for torchrl has chosen: rows by index, and what is said of them.

    Args:
        storage: What holds the rows.
        index: Numbers, or one tensor of them per dim of the storage.
        info: What is said of each row, or beside them.

    Raises:
        NotFoundError: There is no row of some index.
        StateError: They are no integers.
    """
    ids = storage.geometry.ids_at(_numbers(storage, index), storage.window)
    columns, marks, notes = _sort_info(info, ids.size)
    return Selection(ids, columns, marks=marks, notes=notes)


def _numbers(storage: ReadView, index: Any) -> IntArray:
    """Return indices, of a tensor or a list, or of one per dim in a tuple, as one number per row: `(n,)`.

    Raises:
        StateError: They are no integers.
    """
    if isinstance(index, tuple):
        index = np.stack([_array(one) for one in index], axis=-1)
    numbers = _array(index)
    if numbers.dtype.kind not in "iu":
        raise StateError(f"rows are found by integers, not by {numbers.dtype}")
    if storage.ndim > 1 and numbers.ndim > 1:
        return storage.geometry.ravel(numbers.reshape(-1, storage.ndim), storage.window)
    flat: IntArray = numbers.reshape(-1).astype(np.int64)
    return np.where(flat < 0, flat + len(storage), flat)


def _index(storage: ReadView, ids: IntArray) -> IntArray:
    """Return the indices of rows as torchrl has them. Shape `(n,)`; `(n, ndim)` where ndim is above 1."""
    numbers = storage.geometry.index_of(ids)
    return numbers if storage.ndim == 1 else storage.geometry.unravel(numbers)


def _array(values: Any) -> Array:
    return values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)


def _sort_info(info: Any, count: int) -> tuple[dict[Key, Array], tuple[Mark, ...], dict[Any, Any]]:
    """Return what is said of every row, what of it are flags below the root, and what is said beside it."""
    columns: dict[Key, Array] = {}
    marks: list[Mark] = []
    notes: dict[Any, Any] = {}
    for name, value in info.items():
        array = _array(value) if isinstance(value, (torch.Tensor, np.ndarray)) else None
        if name in ("index", "id"):
            continue  # of the rows themselves the buffer tells
        if array is None or not array.ndim or len(array) != count or not isinstance(name, (str, tuple)):
            notes[name] = value
        elif len(key := to_key(name)) > 1 and array.dtype == np.bool_ and array.size == count:
            marks.append(Mark(key, array.reshape(-1), joins=False, flat=array.ndim == 1))
        else:
            columns[key] = array
    return columns, tuple(marks), notes
