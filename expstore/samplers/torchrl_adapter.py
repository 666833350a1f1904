"""Samplers written for torchrl, which choose indices and are notified of writes.

Buffers adapt the sampler that they are given. The user's object keeps its own state. torchrl is never
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
from expstore.data.to_arrays import to_array
from expstore.errors import ArgumentError, StateError
from expstore.samplers.base import Sampler, call_with_storage, is_written, readable, tell_write
from expstore.samplers.names import make_sampler

if TYPE_CHECKING:
    from expstore.storages.read_view import ReadView


def adapt(sampler: Any) -> Sampler:
    """Return a buffer's sampler: the given one, a new one by its name, or an adapter of the given object.

    Raises:
        ArgumentError: There is no sampler of this name, or it has required arguments; the object has no
            method `sample`, or is a sampler of torchrl itself.
    """
    if isinstance(sampler, str):
        return make_sampler(sampler)
    if not callable(getattr(sampler, "sample", None)):
        raise ArgumentError(
            f"sampler must be a name, or an object with a method sample; got {type(sampler).__name__}"
        )
    if isinstance(sampler, Sampler) and _takes_generator(sampler):
        return sampler
    kind = type(sampler)
    if kind.__module__.partition(".")[0] == "torchrl":
        raise ArgumentError(
            f"torchrl's {kind.__name__} reads torchrl's storages only; use the sampler of the same name in "
            "expstore.samplers"
        )
    return AdaptedSampler(sampler)


def unwrap(sampler: Sampler) -> Any:
    """Return the object that the user gave to the buffer."""
    return sampler.sampler if isinstance(sampler, AdaptedSampler) else sampler


def _takes_generator(sampler: Sampler) -> bool:
    """Return whether `sample` takes a generator, unlike in torchrl. `*args` and `**keywords` do not count."""
    parameters = inspect.signature(sampler.sample).parameters
    kinds = [one.kind for one in parameters.values()]
    return (
        "generator" in parameters
        or sum(
            kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD) for kind in kinds
        )
        > 2
    )


class AdaptedSampler(Sampler):
    """Draw with an object written for torchrl: `sample(storage, batch_size) -> (index, info)`.

    The object may have `add(index)`, `extend(index)`, `update_priority(index, priority, storage=...)`,
    `mark_update(index, storage=...)`, `_empty()`, `ran_out`, `can_sample(storage, batch_size)`,
    `state_dict()` and `load_state_dict(state)`. The storage that it gets has `len()`, `ndim`, `max_size`,
    `get(index)` and `[]`. Before each draw its attribute `_rng` is set to a torch.Generator seeded for that
    draw: an object that uses it draws the same batches after a restart; one that uses torch's global
    generator does not.

    Threads: one thread at a time calls the object. Processes: a copy has a copy of the object. Crashes: the
    object's state is lost with the process; a buffer's `state_dict` contains it. With `prefetch` the object
    is asked for batches in advance, and its state is not rolled back when a batch is drawn again.

    Args:
        sampler: The object.

    Example:
        >>> from expstore import MemoryStorage, ReplayBuffer, Sampler
        >>> class Newest(Sampler):
        ...     def sample(self, storage, batch_size):
        ...         return torch.arange(len(storage))[-batch_size:], {}
        >>> rb = ReplayBuffer(storage=MemoryStorage(10), sampler=Newest(), batch_size=2)
    """

    _transient = frozenset({"_lock", "_rng"})

    def __init__(self, sampler: Any) -> None:
        super().__init__()
        if isinstance(sampler, Sampler):
            self._filter.split = sampler._filter.split
        self.sampler = sampler
        self._ran_out = False
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.RLock()
        self._rng = torch.Generator()

    @property
    def windowed(self) -> bool:  # type: ignore[override]
        """Whether the object draws whole slices of steps."""
        return bool(getattr(self.sampler, "windowed", False))

    def attach(self, storage: ReadView) -> None:
        """Attach the sampler to a storage, and an object that is a `Sampler`, too.

        Raises:
            QueryError: The object's filter names a field that the storage does not have.
        """
        super().attach(storage)
        if isinstance(self.sampler, Sampler):
            self.sampler.attach(storage)

    def detach(self) -> None:
        """Stop evaluating the filter of an object that is a `Sampler`."""
        super().detach()
        if isinstance(self.sampler, Sampler):
            self.sampler.detach()

    @property
    def prioritized(self) -> bool:  # type: ignore[override]
        """Whether the object draws by priority: it says so, or it has `update_priority`."""
        return bool(getattr(self.sampler, "prioritized", False)) or is_written(
            self.sampler, "update_priority"
        )

    @property
    def ran_out(self) -> bool:
        """Whether the object had run out of rows after the last batch that was returned to the user."""
        return self._ran_out

    def select(self, storage: ReadView, batch_size: int, generator: np.random.Generator) -> Selection:
        """Choose rows by calling the object.

        Raises:
            NotFoundError: The object chose an index without a row.
            NotReadyError: The storage is empty.
            StateError: The object did not return a pair of index and info.
        """
        readable(storage)
        sampler = self.sampler
        with self._lock:
            self._rng.manual_seed(int(generator.integers(1 << 63)))
            with suppress(AttributeError):  # slots or frozen fields: such an object does not use it
                sampler._rng = self._rng
            if getattr(sampler, "ran_out", False):
                with suppress(AttributeError):  # a property without a setter: the next draw updates it
                    sampler.ran_out = False
            drawn = sampler.sample(storage, batch_size)
            ran_out = bool(getattr(sampler, "ran_out", False))
        if not isinstance(drawn, tuple) or len(drawn) != 2 or not hasattr(drawn[1], "items"):
            raise StateError(
                f"{type(sampler).__name__}.sample returned {type(drawn).__name__}, not a pair of index and "
                "info",
                hint="return (index, {}); a subclass of expstore's Sampler may implement select() instead",
            )
        return replace(to_selection(storage, *drawn), progress=(int(ran_out),))

    def hand_out(self, storage: ReadView, selection: Selection) -> None:
        """Record whether this batch was the last one of a pass."""
        self._ran_out = bool(selection.progress[0])

    def can_sample(self, storage: ReadView, batch_size: int) -> bool:
        """Return whether the object can draw a batch now."""
        if is_written(self.sampler, "can_sample"):
            return bool(self.sampler.can_sample(storage, batch_size))
        return len(storage) > 0

    def sampleable(self, storage: ReadView, batch_size: int) -> int:
        """Return the number of rows that the object draws from: all of them if it can draw now."""
        return len(storage) if self.can_sample(storage, batch_size) else 0

    def reduce(self, priorities: Array) -> Array:
        """Return one priority per row, the largest. Shapes `(n, ...)` in, `(n,)` out."""
        if isinstance(self.sampler, Sampler):
            return self.sampler.reduce(priorities)
        if priorities.ndim > 1:
            priorities = priorities.reshape(len(priorities), -1).max(1)
        return priorities.reshape(-1)

    def on_write(self, ids: IntArray) -> None:
        """Call the object's hooks for new rows."""
        with self._lock:
            tell_write(self.sampler, self._require_storage(), ids)

    def on_priority_update(self, storage: ReadView, ids: IntArray, priorities: Array) -> None:
        """Pass new priorities to the object.

        Args:
            storage: The storage with the rows.
            ids: Ids of the rows. Shape `(n,)`.
            priorities: The new priorities. Shape `(n,)`, or one for all.
        """
        if is_written(self.sampler, "update_priority"):
            here = storage.window.holds(ids)
            index = torch.from_numpy(_index(storage, ids[here]))
            values = torch.from_numpy(np.array(np.broadcast_to(priorities, ids.shape)[here], np.float32))
            with self._lock:
                call_with_storage(self.sampler.update_priority, index, values, storage=storage)

    def mark_update(self, index: Any, *, storage: ReadView | None = None) -> None:
        """Notify the object of rows that the user changed.

        Args:
            index: Indices of the rows.
            storage: The storage with the rows; None for the storage that the sampler is attached to.
        """
        if is_written(self.sampler, "mark_update"):
            with self._lock:
                call_with_storage(self.sampler.mark_update, index, storage=self._require_storage(storage))

    def on_empty(self) -> None:
        """Notify the object that all rows were removed."""
        if is_written(self.sampler, "_empty"):
            with self._lock:
                self.sampler._empty()

    def state_dict(self) -> dict[str, Any]:
        """Return the object's state, if it has a `state_dict`."""
        return {"given": self.sampler.state_dict()} if is_written(self.sampler, "state_dict") else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Pass the object what `state_dict` returned."""
        if "given" in state_dict:
            with self._lock:
                self.sampler.load_state_dict(state_dict["given"])

    def __repr__(self) -> str:
        return repr(self.sampler)


def to_selection(storage: ReadView, index: Any, info: Any) -> Selection:
    """Return rows that code written for torchrl has chosen as a selection.

    Args:
        storage: The storage with the rows.
        index: Indices of the rows: integers, or a tensor of integers for each dim of the storage.
        info: Values for each row, and other values.

    Raises:
        NotFoundError: There is no row at an index.
        StateError: The indices are not integers.
    """
    ids = storage.geometry.ids_at(_numbers(storage, index), storage.window)
    columns, marks, notes = _sort_info(info, ids.size)
    return Selection(ids, columns, marks=marks, notes=notes)


def _numbers(storage: ReadView, index: Any) -> IntArray:
    """Return indices as one integer per row. Shape `(n,)`.

    Args:
        storage: The storage with the rows.
        index: A tensor or a list; a tuple with one of these for each dim of the storage.

    Raises:
        StateError: The indices are not integers.
    """
    if isinstance(index, tuple):
        index = np.stack([to_array(one) for one in index], axis=-1)
    numbers = to_array(index)
    if numbers.dtype.kind not in "iu":
        raise StateError(f"indices of rows must be integers, got dtype {numbers.dtype}")
    if storage.ndim > 1 and numbers.ndim > 1:
        return storage.geometry.ravel(numbers.reshape(-1, storage.ndim), storage.window)
    flat: IntArray = numbers.reshape(-1).astype(np.int64)
    return np.where(flat < 0, flat + len(storage), flat)


def _index(storage: ReadView, ids: IntArray) -> IntArray:
    """Return the indices of rows as torchrl has them. Shape `(n,)`; `(n, ndim)` if ndim is above 1."""
    numbers = storage.geometry.index_of(ids)
    return numbers if storage.ndim == 1 else storage.geometry.unravel(numbers)


def _sort_info(info: Any, count: int) -> tuple[dict[Key, Array], tuple[Mark, ...], dict[Any, Any]]:
    """Split info into columns (a value per row), marks (flags in nested fields) and all other values."""
    columns: dict[Key, Array] = {}
    marks: list[Mark] = []
    notes: dict[Any, Any] = {}
    for name, value in info.items():
        array = to_array(value) if isinstance(value, (torch.Tensor, np.ndarray)) else None
        if name in ("index", "id"):
            continue  # the buffer adds these itself
        if array is None or not array.ndim or len(array) != count or not isinstance(name, (str, tuple)):
            notes[name] = value
        elif len(key := to_key(name)) > 1 and array.dtype == np.bool_ and array.size == count:
            marks.append(Mark(key, array.reshape(-1), joins=False, flat=array.ndim == 1))
        else:
            columns[key] = array
    return columns, tuple(marks), notes
