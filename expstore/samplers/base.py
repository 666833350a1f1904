"""What every sampler does: choose ids out of the readable ones.

Buffers call it with a generator that belongs to this one draw; it never reads rows.
"""

from __future__ import annotations

import copy
import inspect
import json
import warnings
import weakref
from abc import ABCMeta, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, overload

import numpy as np
import torch

from expstore.core.draws import next_numbers
from expstore.core.id_set import NO_IDS
from expstore.core.values import Array, IntArray, Key, Selection, Window
from expstore.disk.files import Disk
from expstore.errors import NotReadyError, StateError
from expstore.samplers.filter import Filter, Where, split_where

if TYPE_CHECKING:
    from expstore.storages.read_view import ReadView

__all__ = ["Sampler", "readable", "refuse_weight"]

#: The file of `dumps`; TorchRL's name.
_FILE = "sampler_metadata.json"

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

    A sampler of your own implements `select`. It may also have TorchRL's hooks `add(index)`, `extend(index)`
    and `mark_update(index, storage=...)`: they are called after each write, under the storage's lock. A
    sampler written for torchrl, with `sample(storage, batch_size) -> (index, info)`, is taken as well: see
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
    #: Whether it must hear of new rows, because its class overrides `on_write` or a hook of TorchRL's.
    hears_writes: ClassVar[bool] = False
    #: None: every row may be drawn, and each counts the same.
    filter: Filter | None = None
    _attached: weakref.ref[ReadView] | None = None

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        cls.hears_writes |= not _WRITE_HOOKS.isdisjoint(vars(cls))
        if "sample" in vars(cls) and cls.select is Sampler.select:
            cls.select = _select_by_sample  # type: ignore[method-assign]

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
        self._attached = weakref.ref(storage)
        if self.filter is not None:
            self.filter.attach(storage)

    def _require_storage(self, storage: ReadView | None = None) -> ReadView:
        """Return the given storage, or the one that the sampler is attached to.

        Raises:
            StateError: Neither exists.
        """
        if storage is not None:
            return storage
        found = None if self._attached is None else self._attached()
        if found is None:
            raise StateError(
                f"this {type(self).__name__} is not attached to a storage",
                hint="give it to a buffer first, or pass storage=",
            )
        return found

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

    @overload
    def sample(
        self, storage: ReadView, batch_size: int, generator: None = None
    ) -> tuple[Any, dict[str | Key, Any]]: ...

    @overload
    def sample(self, storage: ReadView, batch_size: int, generator: np.random.Generator) -> Selection: ...

    def sample(
        self, storage: ReadView, batch_size: int, generator: np.random.Generator | None = None
    ) -> Selection | tuple[Any, dict[str | Key, Any]]:
        """Draw rows: TorchRL's `sample(storage, batch_size)`, which buffers call with a generator.

        Args:
            storage: What holds the rows; at least one is readable.
            batch_size: How many rows.
            generator: The random numbers of this draw. None: the storage's next draw, as if its buffer
                sampled a batch; the draw counts as returned.

        Returns:
            A `Selection`; without `generator` a pair of index and info. The index is a tensor of shape
            `(n,)`, int64, or a tuple of `ndim` of them; info has what the sampler says of each row.

        Raises:
            NotReadyError: No row can be drawn.

        Example:
            >>> index, info = PrioritizedSampler().sample(storage, 32)
            >>> info["priority_weight"].shape
            torch.Size([32])
        """
        if generator is not None:
            return self.select(storage, batch_size, generator)
        if self._attached is None or self._attached() is not storage:
            self.attach(storage)
        if not self.count_left(storage):
            raise self.build_no_rows_error(storage)
        selection = self.select(storage, batch_size, next_numbers(storage.seed, storage.draws))
        self.hand_out(storage, selection)
        return index_tensor(storage, selection.ids), info_of(storage, selection)

    @abstractmethod
    def select(self, storage: ReadView, batch_size: int, generator: np.random.Generator) -> Selection:
        """Choose `batch_size` readable rows.

        Args:
            storage: What holds the rows; at least one is readable.
            batch_size: How many.
            generator: The random numbers of this draw.
        """

    def _draw_filtered(self, storage: ReadView, draw: Callable[[], Selection | None]) -> Selection:
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
            raise self.build_no_rows_error(storage)
        return found

    def build_no_rows_error(self, storage: ReadView) -> NotReadyError:
        """Return the error of a draw for which there is no row."""
        if self.filter is None or not len(storage):
            return NotReadyError("Cannot sample from an empty storage", hint="extend() it first")
        return self.filter.build_no_rows_error(storage)

    @property
    def _filtering(self) -> str:
        """What the filter adds to a repr."""
        return "" if self.filter is None else f", {self.filter}"

    def count_left(self, storage: ReadView) -> int:
        """Return how many rows can still be drawn: the length of a buffer."""
        return len(storage)

    def can_sample(self, storage: ReadView, batch_size: int) -> bool:
        """Return whether a batch could be drawn now."""
        return self.count_left(storage) > 0

    def sampleable(self, storage: ReadView, batch_size: int) -> int:
        """Return how many rows, or slices, such a batch would be drawn from, whatever `where` says."""
        return self.count_left(storage)

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
        state = {name: value for name, value in self.__dict__.items() if name != "_attached"}
        return state if self.filter is None else state | {"filter": copy.copy(self.filter)}

    def dumps(self, path: str | Path) -> None:
        """Write `state_dict` to a folder; priorities and counts belong to the storage.

        Args:
            path: The folder; made if it is missing.

        Raises:
            StorageError: The disk failed.
        """
        folder, disk = Path(path), Disk()
        disk.make_dir(folder)
        disk.put(folder / _FILE, json.dumps(self.state_dict()).encode())

    def loads(self, path: str | Path) -> None:
        """Restore what `dumps` wrote.

        Raises:
            StorageError: There is no such file, or the disk failed.
        """
        self.load_state_dict(json.loads(Disk().read_whole(Path(path) / _FILE)))

    @property
    def ran_out(self) -> bool:
        """Whether every row has been drawn that is to be drawn: iteration ends here."""
        return False

    def on_write(self, ids: IntArray) -> None:
        """Follow rows that were published or took the places of others. Shape `(n,)`, int64."""
        if self.hears_writes:
            tell_write(self, self._require_storage(), ids)

    def add(self, index: Any) -> None:
        """Follow one row that was written; here there is nothing to do.

        Args:
            index: Its index, an integer; of a storage with several dims a tensor of shape `(ndim,)`.
        """

    def extend(self, index: Any) -> None:
        """Follow rows that were written; here there is nothing to do.

        Args:
            index: Their indices, a tensor of shape `(n,)`, or `(n, ndim)`.
        """

    @property
    def default_priority(self) -> float:
        """The priority of new rows: 1 where priorities do not count."""
        return 1.0

    def update_priority(self, index: Any, priority: Any, *, storage: ReadView | None = None) -> None:
        """Set priorities of rows by index; warns where priorities do not count, and does nothing.

        Args:
            index: Which rows, as `extend` returns it; -1 is ignored.
            priority: One number for all, or one for each row.
            storage: What holds them; None: the storage that the sampler is attached to.

        Raises:
            PriorityError: A value is negative, NaN or infinite; no priority was set.
            StateError: The sampler is attached to no storage.
        """
        if not self.prioritized:
            warnings.warn(
                f"update_priority() was called on a {type(self).__name__}, which does not draw by priority",
                stacklevel=2,
            )
            return
        kept = self._require_storage(storage)
        values = priority.detach().cpu().numpy() if isinstance(priority, torch.Tensor) else priority
        given = np.asarray(values, np.float64)
        with kept.lock:
            ids, counts = ids_of(kept, index)
            if given.size == 1:
                given = np.full(ids.size, given.reshape(())[()])
            else:
                given = self.reduce(given)
                if given.size != counts.size:
                    raise StateError(f"{counts.size} rows were given {given.size} priorities")
                given = given[counts]
            kept.writer().set_priorities(ids, given)

    def mark_update(self, index: Any, *, storage: ReadView | None = None) -> None:
        """Follow rows that the user has changed: where priorities count, theirs restart at the largest.

        Args:
            index: Which rows, as `extend` returns it; -1 is ignored.
            storage: What holds them; None: the storage that the sampler is attached to.
        """
        if self.prioritized:
            self.update_priority(index, self._require_storage(storage).priorities.largest, storage=storage)

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
    if window.low >= window.last or (window.deleted is not NO_IDS and not window.rows):
        raise NotReadyError("Cannot sample from an empty storage", hint="extend() it first")
    return window


def _select_by_sample(
    self: Sampler, storage: ReadView, batch_size: int, generator: np.random.Generator
) -> Selection:
    """Choose rows as the `sample` that a subclass wrote in the place of `select`."""
    return self.sample(storage, batch_size, generator)


#: Methods by which a sampler hears of new rows.
_WRITE_HOOKS = frozenset({"add", "extend", "mark_update", "on_write"})


def tell_write(sampler: Any, storage: ReadView, ids: IntArray) -> None:
    """Call the hooks that TorchRL's samplers have for new rows: `mark_update`, then `extend` or `add`.

    Args:
        sampler: Only the hooks that its author wrote are called.
        storage: What holds the rows.
        ids: The new rows. Shape `(n,)`.
    """
    index = storage.geometry.index_of(ids)
    index = index if storage.ndim == 1 else storage.geometry.unravel(index)
    if is_written(sampler, "mark_update"):
        call_with_storage(sampler.mark_update, torch.from_numpy(index), storage=storage)
    if is_written(sampler, "extend") and (len(index) > 1 or not is_written(sampler, "add")):
        sampler.extend(torch.from_numpy(index))
    elif is_written(sampler, "add"):
        for one in index.tolist() if storage.ndim == 1 else torch.from_numpy(index):
            sampler.add(one)


def is_written(sampler: Any, name: str) -> bool:
    """Return whether the author of a sampler wrote a method: those of classes called Sampler do nothing."""
    for kind in type(sampler).__mro__:
        if name in vars(kind):
            return kind.__name__ != "Sampler"
    return callable(getattr(sampler, name, None))


def call_with_storage(hook: Callable[..., Any], *values: Any, storage: ReadView) -> None:
    """Call a hook that may have a parameter `storage`."""
    parameters = inspect.signature(hook).parameters
    if "storage" in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        hook(*values, storage=storage)
    else:
        hook(*values)


def ids_of(storage: ReadView, index: Any) -> tuple[IntArray, IntArray]:
    """Return the ids of rows by index, and their positions in the index, without those that are -1.

    Args:
        storage: What holds the rows; its lock is held.
        index: An integer or several; of a storage with several dims one number for each dim.

    Returns:
        Shapes `(m,)` and `(n,)`: the second selects m of n values, one for each row of the index.
    """
    if isinstance(index, tuple):
        index = np.stack([np.asarray(part) for part in index], axis=-1)
    numbers = np.asarray(index, np.int64)
    if storage.ndim > 1:
        numbers = storage.geometry.ravel(numbers.reshape(-1, storage.ndim), storage.window)
    numbers = numbers.reshape(-1)
    kept: IntArray = numbers != -1
    return storage.geometry.ids_at(numbers[kept], storage.window), kept


def index_tensor(storage: ReadView, ids: IntArray) -> Any:
    """Return indices of rows: a tensor of shape `(n,)`, or a tuple of them where there are several dims."""
    index = storage.geometry.index_of(ids)
    if storage.ndim == 1:
        return torch.from_numpy(index)
    return torch.from_numpy(storage.geometry.unravel(index)).unbind(-1)


def info_of(storage: ReadView, selection: Selection) -> dict[str | Key, Any]:
    """Return what a sampler says of the rows that it chose, flags joined with those that are stored."""
    schema = storage.require_schema()
    columns = dict(selection.info)
    for mark in selection.marks:
        place = schema.place(mark.key)
        if place >= 0:
            columns[mark.key] = mark.on(storage.read(selection.ids, [place])[0])
        elif mark.new:
            columns[mark.key] = mark.alone()
    named = {key if len(key) > 1 else key[0]: torch.from_numpy(values) for key, values in columns.items()}
    return {**named, **selection.notes}
