"""What every sampler does: choose ids out of the readable ones.

Buffers call it with a generator that belongs to this one draw; it never reads rows.
"""

from __future__ import annotations

import copy
import inspect
from abc import ABCMeta, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from expstore.core.id_set import NO_GAPS
from expstore.core.values import Array, IntArray, Key, Selection, Window
from expstore.errors import NotReadyError
from expstore.samplers.filter import Filter, Where, split_where

if TYPE_CHECKING:
    from expstore.storages.read_view import ReadView

__all__ = ["Sampler", "readable", "refuse_weight"]

#: Draws that may find nothing but rows which have left, before the writer is asked to wait.
_TRIES = 3


class SamplerKind(ABCMeta):
    """Let `replacement=False` make the sampler that draws without replacement, as in torchrl."""

    def __call__(cls, *args: Any, replacement: bool = True, **options: Any) -> Any:
        """Make a sampler.

        Args:
            args: The sampler's own, as are `options`.
            replacement: Whether rows may come again before all have come; what draws without replacement
                anyway takes both.
            options: See there.

        Raises:
            TypeError: There is no sampler of that kind without replacement.
        """
        if not replacement and not cls.__dict__.get("without_replacement", False):
            counterpart = cls.__dict__.get("counterpart")
            if counterpart is None:
                raise TypeError(
                    f"{cls.__name__} has no without-replacement variant; "
                    "cannot be instantiated with replacement=False."
                )
            return counterpart(*args, **options)
        return super().__call__(*args, **options)

    @property
    def __signature__(cls) -> inspect.Signature:
        """What the sampler is made with: that of its `__init__`."""
        whole = inspect.signature(cls.__init__)  # type: ignore[misc]
        return whole.replace(parameters=list(whole.parameters.values())[1:])


class Sampler(metaclass=SamplerKind):
    """Choose ids. Threads may sample at once.

    A sampler written for torchrl, with `sample(storage, batch_size) -> (index, info)`, is taken as well: see
    `samplers/torchrl_adapter.py`.

    Args:
        where: Which rows may be drawn: an SQL expression over a row and its episode, or a `Where`; None: all.
        weight: By what the chance of each is multiplied: another one; None: 1.
    """

    #: Whether every row comes once before any comes again; the counterpart is a sampler that does it so.
    without_replacement: ClassVar[bool] = False
    counterpart: ClassVar[type[Sampler] | None] = None
    #: Whether priorities that come with new rows are to be taken in.
    prioritized = False
    #: Whether its rows are windows of steps already, around which there can be no others.
    windowed = False
    #: None: every row may be drawn, and each counts the same.
    filter: Filter | None = None

    @property
    def reads(self) -> frozenset[Key]:
        """Fields that it reads itself, beside those of `where` and `weight`."""
        trajectories = getattr(self, "_trajectories", None)
        return frozenset() if trajectories is None else trajectories.keys

    def __init__(self, *, where: str | Where | None = None, weight: str | None = None) -> None:
        where, weight = split_where(where, weight)
        if where is not None or weight is not None:
            self.filter = Filter(where, weight)

    def attach(self, storage: ReadView) -> None:
        """Be told which storage it will sample from; a buffer does it once.

        Raises:
            QueryError: Its rows have no such fields as `where` or `weight` name.
        """
        if self.filter is not None:
            self.filter.attach(storage)

    def detach(self) -> None:
        """Be told that the storage is about to be closed."""
        if self.filter is not None:
            self.filter.detach()

    def refresh(self, storage: ReadView) -> None:
        """Take in all rows and episodes as they are now.

        Raises:
            QueryError: `where` or `weight` cannot be computed; nothing is changed.
        """
        if self.filter is not None:
            self.filter.refresh(storage)

    def reduce(self, priorities: Array) -> Array:
        """Return one priority per row. Shapes `(n, ...)` in, `(n,)` out."""
        if priorities.ndim < 2:
            return priorities.reshape(-1)
        largest: Array = priorities.reshape(priorities.shape[0], -1).max(axis=1)
        return largest

    @abstractmethod
    def sample(self, storage: ReadView, batch_size: int, generator: np.random.Generator) -> Selection:
        """Choose `batch_size` readable rows.

        Args:
            storage: What holds the rows; at least one is readable.
            batch_size: How many.
            generator: The random numbers of this draw.
        """

    def _drawn(self, storage: ReadView, draw: Callable[[], Selection | None]) -> Selection:
        """Draw by the filter; None is a draw without a candidate: then what is new is evaluated at once.

        Raises:
            NotReadyError: There is no candidate.
        """
        filter = self.filter
        found = None
        if filter is not None:
            filter.look(storage)
            found = draw()
            for _ in range(_TRIES):
                if found is not None or not filter.find_more(storage):
                    break
                found = draw()
            if found is None and not storage.follows:
                # A fast writer may have overwritten all that was evaluated; it waits now.
                with storage.lock:
                    found = draw() if filter.find_more(storage) else None
        if found is None:
            raise self.nothing(storage)
        return found

    def nothing(self, storage: ReadView) -> NotReadyError:
        """Return the error of a draw for which there is no row."""
        if self.filter is None or not len(storage):
            return NotReadyError("Cannot sample from an empty storage", hint="extend() it first")
        return self.filter.nothing(storage)

    @property
    def _filtering(self) -> str:
        """What the filter adds to a repr."""
        return "" if self.filter is None else f", {self.filter}"

    def left(self, storage: ReadView) -> int:
        """Return how many rows can still be drawn: the length of a buffer."""
        return len(storage)

    def can_sample(self, storage: ReadView, batch_size: int) -> bool:
        """Return whether a batch could be drawn now."""
        return self.left(storage) > 0

    def sampleable(self, storage: ReadView, batch_size: int) -> int:
        """Return how many rows, or slices, such a batch would be drawn from, whatever `where` says."""
        return self.left(storage)

    def sample_again(
        self, storage: ReadView, selection: Selection, generator: np.random.Generator
    ) -> Selection:
        """Choose rows in the place of some that were overwritten while they were read."""
        return self.sample(storage, selection.ids.size, generator)

    def hand_out(self, storage: ReadView, selection: Selection) -> None:
        """Be told that a selection it made goes to the user now, in the order of the selections."""

    def stands(self, storage: ReadView, selection: Selection) -> bool:
        """Return whether a selection made some time ago would still be made; rows are looked at elsewhere."""
        return True

    def rewind(self, storage: ReadView) -> None:
        """Be told that selections made since the last one that was handed out will not be."""

    def settings(self) -> dict[str, Any]:
        """Return settings that a program changes while it runs, which versions keep; what JSON can keep."""
        return {}

    def set_settings(self, settings: Mapping[str, Any]) -> None:
        """Take over what `settings` returned, perhaps of a sampler of another kind."""

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` takes: settings, and what does not follow from the rows."""
        filter = self.filter
        return {} if filter is None else {"where": filter.where, "weight": filter.weight}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` returned.

        A state with another `where` or `weight` is refused by the buffer: these are what the program says.
        """

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs; its filter evaluates by itself."""
        return (
            {**self.__dict__} if self.filter is None else {**self.__dict__, "filter": copy.copy(self.filter)}
        )

    @property
    def ran_out(self) -> bool:
        """Whether every row has been drawn that is to be drawn: iteration ends here."""
        return False

    def on_write(self, ids: IntArray) -> None:
        """Be told which rows were just published, or took the places of others. Shape `(n,)`, int64."""

    def mark_update(self, index: Any, *, storage: ReadView) -> None:
        """Be told that the user has changed rows: where priorities count, theirs begin anew at the largest.

        Args:
            index: Which rows, as `extend` returns it; -1 stands for none.
            storage: What holds them.
        """
        if not self.prioritized:
            return
        if isinstance(index, tuple):
            index = np.stack([np.asarray(part) for part in index], axis=-1)
        numbers = np.asarray(index, np.int64).reshape(-1)
        if storage.ndim > 1:
            numbers = storage.geometry.ravel(numbers.reshape(-1, storage.ndim), storage.window)
        with storage.lock:
            ids = storage.geometry.ids_at(numbers[numbers != -1], storage.window)
            storage.writer().set_priorities(ids, np.full(ids.size, storage.priorities.largest, np.float32))

    def on_priority_update(self, storage: ReadView, ids: IntArray, priorities: Array) -> None:
        """Be told of priorities that the user has just set. Shapes `(n,)`."""

    def on_empty(self) -> None:
        """Be told that all rows were just given up."""


def refuse_weight(sampler: Sampler, where: str | Where | None, weight: str | None, reason: str) -> None:
    """Raise ValueError if a sampler in which chances mean nothing is given a weight."""
    _, weight = split_where(where, weight)
    if weight is not None:
        raise ValueError(
            f"weight={weight!r} has no meaning in {type(sampler).__name__}: {reason}; use where="
        )


def readable(storage: ReadView) -> Window:
    """Return the ids that can be read now, at least one.

    Raises:
        NotReadyError: There is none: a very long extend, or `empty`, has given up all rows at this moment.
    """
    window = storage.window
    if window.low >= window.last or (window.gaps is not NO_GAPS and not window.rows):
        raise NotReadyError("Cannot sample from an empty storage", hint="extend() it first")
    return window
