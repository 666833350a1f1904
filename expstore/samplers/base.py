"""The base class of samplers, which choose the ids of a batch among the readable rows.

A buffer calls its sampler with the random generator of one draw. The buffer reads the rows, not the sampler.
"""

from __future__ import annotations

import copy
import inspect
import json
import warnings
import weakref
from abc import ABCMeta, abstractmethod
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, overload

import numpy as np
import torch

from expstore.core.arguments import refuse_keywords
from expstore.core.draws import next_numbers
from expstore.core.id_set import NO_IDS
from expstore.core.parsing import parsing
from expstore.core.torchrl_members import find_member
from expstore.core.values import Array, IntArray, Key, Mass, Selection, Window
from expstore.data.to_arrays import to_array
from expstore.disk.files import Disk
from expstore.episodes.facts import TRAIN
from expstore.errors import ArgumentError, NotReadyError, StateError
from expstore.samplers.filter import Filter, Where, split_where
from expstore.samplers.token_budget import TokenBudget
from expstore.storages.columns.priorities import check_priorities
from expstore.storages.read_view import ids_to_weigh

if TYPE_CHECKING:
    from expstore.core.draw_state import DrawState
    from expstore.storages.columns.sample_counts import ConsumerCounts
    from expstore.storages.read_view import ReadView

#: The file of `dumps`; TorchRL's name.
_FILE = "sampler_metadata.json"

#: How often a draw that finds only evicted rows is repeated before the writer has to wait.
_TRIES = 3


class SamplerKind(ABCMeta):
    """Metaclass of samplers: with `replacement=False` a class constructs its counterpart without replacement.

    torchrl's samplers do the same.
    """

    def __call__(cls, *args: Any, replacement: bool = True, **options: Any) -> Any:
        """Construct a sampler.

        Args:
            args: Positional arguments of the sampler.
            replacement: Whether a row may be drawn again before all rows were drawn. False constructs the
                class's counterpart without replacement. A class that draws without replacement accepts both
                values.
            options: Keyword arguments of the sampler.

        Raises:
            ArgumentError: `replacement` is False, and the class has no counterpart without replacement; the
                class has no such keyword.
        """
        if not replacement and not cls.__dict__.get("without_replacement", False):
            counterpart = cls.__dict__.get("counterpart")
            if counterpart is None:
                raise ArgumentError(
                    f"{cls.__name__} has no without-replacement variant; "
                    "cannot be instantiated with replacement=False."
                )
            return counterpart(*args, **options)
        if options:
            parameters = cls.__signature__.parameters
            if not any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
                refuse_keywords(cls.__name__, options, list(parameters))
        return super().__call__(*args, **options)

    @property
    def __signature__(cls) -> inspect.Signature:
        """The signature of the class's `__init__`, without `self`."""
        whole = inspect.signature(cls.__init__)  # type: ignore[misc]
        return whole.replace(parameters=list(whole.parameters.values())[1:])


class Sampler(metaclass=SamplerKind):
    """Base class of samplers: choose the rows of a batch by their ids.

    Any number of threads may sample at once.

    A sampler of your own implements `select`. It may also define TorchRL's hooks `add(index)`,
    `extend(index)` and `mark_update(index, storage=...)`: they are called after each write, while the
    storage's lock is held. A sampler written for torchrl, with
    `sample(storage, batch_size) -> (index, info)`, works too: see `samplers/torchrl_adapter.py`.

    Args:
        where: Which rows are drawn: a boolean SQL expression over a row and its `episode`, or a `Where`; None
            for all rows.
        weight: Factor for the probability of each row: a numeric SQL expression, at least 0; None for 1.
        split: The split whose rows are drawn; None for the rows of all splits.
    """

    #: Whether every row is drawn once before any row is drawn again.
    without_replacement: ClassVar[bool] = False
    #: The class that `replacement=False` constructs instead, if any.
    counterpart: ClassVar[type[Sampler] | None] = None
    #: Whether it draws by priority. If so, priorities that are written with new rows are stored.
    prioritized = False
    #: Whether it draws whole slices of steps. If so, the sample unit `Sequence` cannot be used.
    windowed = False
    #: Whether a row that it drew does not come again soon, because it draws each row a fixed number of times.
    #: Retention then keeps the rows that a consumer has drawn and not committed.
    leases = False
    #: Whether it draws by counts of rows: those of the storage, or those that `count_in` gives it.
    counts_draws = False
    #: Whether it decides how many rows a batch has; a batch size is then refused.
    sizes_batches = False
    #: Whether it leaves rows that do not fit into a batch for the next draw, so that no row is lost.
    fits_tokens: ClassVar[bool] = False
    #: Whether it must be notified of new rows: its class overrides `on_write` or one of TorchRL's hooks.
    hears_writes: ClassVar[bool] = False
    #: Evaluates `where`, `weight` and the split; None if all rows may be drawn, with one probability. A
    #: store's first rows outside of the split "train" make it a filter: `keep_to_split` notices them.
    filter: Filter | None = None
    #: Whether it leaves out rows of other splits than its own, by `filter` or otherwise.
    keeps_to_split: ClassVar[bool] = False
    #: Whether new rows get the largest priority of the readable rows, instead of the largest ever set.
    max_priority_within_buffer = False
    #: Names of attributes that a copy does not get: the locks, trees and caches that `_begin` creates.
    _transient: ClassVar[frozenset[str]] = frozenset()
    _attached: weakref.ref[ReadView] | None = None
    #: Where its progress is stored; None: with the draws of its storage.
    _own_draws: DrawState | None = None
    #: The priorities that were set before the sampler had a storage.
    _early: EarlyPriorities | None = None
    #: How many tokens a batch may have; None: any number.
    _budget: TokenBudget | None = None

    if not TYPE_CHECKING:  # mypy would accept any attribute
        __getattr__ = find_member

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        cls.hears_writes |= not _WRITE_HOOKS.isdisjoint(vars(cls))
        if "sample" in vars(cls) and cls.select is Sampler.select:
            cls.select = _select_by_sample  # type: ignore[method-assign]
        if not {"select", "sample"}.isdisjoint(vars(cls)) and "mass" not in vars(cls):
            cls.mass = Sampler.mass  # type: ignore[method-assign]  # a class that draws otherwise
        if not {"select", "sample"}.isdisjoint(vars(cls)) and "fits_tokens" not in vars(cls):
            cls.fits_tokens = False
        if not {"select", "sample"}.isdisjoint(vars(cls)) and "keeps_to_split" not in vars(cls):
            cls.keeps_to_split = False

    @property
    def reads(self) -> frozenset[Key]:
        """The fields that the sampler itself reads, besides the fields in `where` and `weight`."""
        return frozenset()

    def __init__(
        self,
        *,
        where: str | Where | None = None,
        weight: str | None = None,
        split: str | None = "train",
    ) -> None:
        self._filter = Filter(*split_where(where, weight), split=split)
        if self._filter.is_active:
            self.filter = self._filter

    @cached_property
    def _filter(self) -> Filter:
        """Evaluates `where`, `weight` and the split. A class need not call the constructor of this one."""
        return Filter(None, None)

    def keep_to_split(self, storage: ReadView) -> None:
        """Leave out rows of other splits from now on, if the storage has any.

        Raises:
            StateError: The sampler does not look at its filter, and so it would draw rows of other splits.
        """
        filter = self._filter
        if filter.split is None or not (storage.epochs.has_splits or filter.split != TRAIN):
            return
        if not self.keeps_to_split:
            raise StateError(
                f"{self!r} cannot leave out the rows that are not in split {filter.split!r}",
                hint="make it a subclass of expstore.Sampler and pass split=None to draw from all splits, or "
                "use an expstore sampler",
            )
        if self.filter is None:
            filter.refresh(storage)
            self.filter = filter

    def choose(
        self, storage: ReadView, batch_size: int, former: Selection | None, generator: np.random.Generator
    ) -> Selection:
        """Choose rows of the sampler's split in a storage that has, or may get, rows of several splits.

        Args:
            storage: The storage with the rows.
            batch_size: Number of rows.
            former: The selection to replace, which may have rows of another split; None: a new one.
            generator: The random generator of this draw.
        """
        while True:
            knew = storage.epochs.has_splits
            self.keep_to_split(storage)
            if former is None:
                former = self.sample(storage, batch_size, generator)
            else:
                former = self.sample_again(storage, former, generator)
            if knew or not storage.epochs.has_splits:
                return former

    def _begin(self) -> None:
        """Create locks, trees and caches. Called by the constructor, and for a copy."""

    def attach(self, storage: ReadView) -> None:
        """Attach the sampler to the storage that it samples from. A buffer calls it for its storage.

        Priorities that were set before are moved to the storage, by index.

        Raises:
            QueryError: `where` or `weight` names a field that the storage does not have.
            StateError: Priorities were set before, and the storage cannot be written; or the sampler was made
                with a split, and does not look at it.
        """
        if not self.keeps_to_split and self._filter.split != TRAIN:
            self.keep_to_split(storage)
        if self._early is not None:
            self._early.move_to(storage)
            self._early = None
        self._attached = weakref.ref(storage)
        self._filter.attach(storage)
        self.filter = self._filter if self._filter.is_active else None

    def _find_storage(self, storage: ReadView | None = None) -> ReadView | None:
        """Return the given storage, or the storage that the sampler is attached to, if any."""
        return storage if storage is not None or self._attached is None else self._attached()

    def _require_storage(self, storage: ReadView | None = None) -> ReadView:
        """Return the given storage, or the storage that the sampler is attached to.

        Raises:
            StateError: No storage was given, and the sampler is not attached to one.
        """
        found = self._find_storage(storage)
        if found is None:
            raise StateError(
                f"this {type(self).__name__} is not attached to a storage",
                hint="give it to a buffer first, or pass storage=",
            )
        return found

    def keep_progress_in(self, draws: DrawState) -> None:
        """Store the progress there, not with the draws of the storage; a copy does not get this."""
        self._own_draws = draws

    def count_in(self, counts: ConsumerCounts | None) -> None:
        """Draw by the counts of a consumer, and count there; None: in the storage. Only if `counts_draws`."""

    def _draws_of(self, storage: ReadView) -> DrawState:
        return storage.draws if self._own_draws is None else self._own_draws

    def limit_tokens(self, budget: TokenBudget | None) -> None:
        """Draw as many rows of each batch as fit from now on; None: all that are asked for.

        Raises:
            ArgumentError: The sampler would lose the rows that do not fit.
        """
        if budget is not None and not self.fits_tokens:
            raise ArgumentError(
                f"batch_tokens={budget.tokens} cannot be used with {self!r}, which would lose the rows that "
                "do not fit into a batch, long ones most often",
                hint="use SamplerWithoutReplacement or ConsumingSampler, or leave batch_tokens out",
            )
        self._budget = budget

    def detach(self) -> None:
        """Stop evaluating the filter: the storage is about to close, or the buffer gets another sampler."""
        self._filter.detach()

    def refresh(self, storage: ReadView) -> None:
        """Evaluate `where` and `weight` for all rows and episodes as they are now.

        Raises:
            QueryError: `where` or `weight` cannot be computed. The sampler keeps the results that it had.
        """
        if self.filter is not None:
            self._filter.refresh(storage)

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
        """Draw rows. Buffers pass a generator; without it this is TorchRL's `sample(storage, batch_size)`.

        Args:
            storage: The storage with the rows; at least one row must be readable.
            batch_size: Number of rows.
            generator: The random generator of this draw. None for the storage's next draw, as if its buffer
                sampled a batch; the draw then counts as returned to the user.

        Returns:
            A `Selection`. Without `generator` a pair of index and info: the index is a tensor of shape
            `(n,)`, int64, or a tuple of `ndim` such tensors; info holds the values that the sampler adds to
            each row.

        Raises:
            NotReadyError: No row can be drawn.

        Example:
            >>> from expstore import PrioritizedSampler
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
        numbers = next_numbers(storage.seed, self._draws_of(storage))
        knew = storage.epochs.has_splits
        self.keep_to_split(storage)
        selection = self.select(storage, batch_size, numbers)  # not `sample`, which a subclass may define
        if not knew and storage.epochs.has_splits:
            self.keep_to_split(storage)
            selection = self.select(storage, batch_size, numbers)
        self.hand_out(storage, selection)
        return index_tensor(storage, selection.ids), info_of(storage, selection)

    @abstractmethod
    def select(self, storage: ReadView, batch_size: int, generator: np.random.Generator) -> Selection:
        """Choose `batch_size` readable rows.

        Args:
            storage: The storage with the rows; at least one row is readable.
            batch_size: Number of rows.
            generator: The random generator of this draw.
        """

    def _find_rows(self, storage: ReadView, draw: Callable[[], Selection | None]) -> Selection:
        """Call `draw`; with a filter, call it until it finds rows that match.

        If `draw` returns None, no row that is evaluated can be drawn: evaluate the new rows, then try again.

        Raises:
            NotReadyError: There is no row to draw.
        """
        filter = self.filter
        if filter is None:
            found = draw()
        else:
            filter.look(storage)
            found = draw()
            for _ in range(_TRIES):
                if found is not None or not filter.find_more(storage):
                    break
                found = draw()
            if found is None and not storage.follows:
                # A fast writer may have overwritten all evaluated rows. The lock makes it wait.
                with storage.lock:
                    found = draw() if filter.find_more(storage) else None
        if found is None:
            raise self.build_no_rows_error(storage)
        return found

    def build_no_rows_error(self, storage: ReadView) -> NotReadyError:
        """Return the error for a draw that finds no row."""
        if self.filter is None or not len(storage):
            return NotReadyError("Cannot sample from an empty storage", hint="extend() it first")
        return self.filter.build_no_rows_error(storage)

    @property
    def _filtering(self) -> str:
        """The text that the filter adds to a `repr`."""
        text = str(self._filter)
        return f", {text}" if text else ""

    def count_left(self, storage: ReadView) -> int:
        """Return the number of rows that can still be drawn. It is the length of a buffer."""
        return len(storage)

    def can_sample(self, storage: ReadView, batch_size: int) -> bool:
        """Return whether a batch of `batch_size` rows can be drawn from `storage` now."""
        return self.sampleable(storage, batch_size) > 0

    def sampleable(self, storage: ReadView, batch_size: int) -> int:
        """Return the number of rows, or of starts of slices, in `storage` that a batch is drawn from.

        Conditions (`where=`) are ignored while all rows are in one split. `batch_size`: rows of the batch,
        including all rows of its slices.
        """
        left = self.count_left(storage)
        if not left or not storage.epochs.has_splits or not self.keeps_to_split or self._filter.split is None:
            return left
        self.keep_to_split(storage)
        self._filter.look(storage)
        ids = self._filter.readable(storage).ids()
        return min(left, int(np.count_nonzero(self._filter.masses_of(storage, ids))))

    def _sampleable_count(self, storage: ReadView, batch_size: int) -> int:
        """Return what `sampleable` returns; TorchRL's ensembles call it under this name."""
        return self.sampleable(storage, batch_size)

    def mass(self, storage: ReadView, batch_size: int) -> Mass | None:
        """Return what a batch would be drawn from now; None if draws do not follow from weights alone.

        It is also None for samplers that remember which slices were drawn, or that draw none twice in a
        batch: draws from several stores cannot be combined to a draw from all of them.

        Args:
            storage: The storage with the rows.
            batch_size: Number of rows of the batch.
        """
        return None

    def _weigh_filtered(self, storage: ReadView, weigh: Callable[[], Mass]) -> Mass:
        """Call `weigh` after evaluating new rows in the background; evaluate them first if its total is 0."""
        if not len(storage):
            return Mass(0.0, 0)
        self.keep_to_split(storage)
        filter = self.filter
        if filter is None:
            return weigh()
        filter.look(storage)
        found = weigh()
        return weigh() if not found.total and filter.find_more(storage) else found

    def sample_again(
        self, storage: ReadView, selection: Selection, generator: np.random.Generator
    ) -> Selection:
        """Draw a selection again because some of its rows were overwritten while they were read.

        Args:
            storage: The storage with the rows.
            selection: The selection to replace.
            generator: Random numbers of the same draw, other than those that made the selection.

        Returns:
            A selection of as many rows.
        """
        return self.sample(storage, selection.ids.size, generator)

    def hand_out(self, storage: ReadView, selection: Selection) -> None:
        """Record that a selection was returned to the user; called in the order of the selections."""

    def stands(self, storage: ReadView, selection: Selection) -> bool:
        """Return whether a prefetched selection is still valid. Evicted rows are not checked here."""
        return True

    def rewind(self, storage: ReadView) -> None:
        """Discard the selections that were made after the last one that was returned to the user."""

    def settings(self) -> dict[str, Any]:
        """Return the settings that a program may change while it runs, as JSON values for snapshots."""
        return {}

    def set_settings(self, settings: Mapping[str, Any]) -> None:
        """Apply what `settings` returned, possibly for a sampler of another class."""

    def state_dict(self) -> dict[str, Any]:
        """Return the settings, and state that cannot be derived from the rows, for `load_state_dict`."""
        filter = self._filter
        if filter.where is filter.weight is None:
            return {}
        return {"where": filter.where, "weight": filter.weight}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned.

        The buffer refuses a state with another `where` or `weight`, because the program sets these.
        """

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy. The copy has a filter of its own."""
        left_out = self._transient | {"_attached", "_own_draws"}
        state = {name: value for name, value in self.__dict__.items() if name not in left_out}
        return state | {"_filter": copy.copy(self._filter)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore what `__getstate__` returned."""
        self.__dict__.update(state)
        self.filter = self._filter if self._filter.is_active else None
        self._begin()

    def dumps(self, path: str | Path) -> None:
        """Write `state_dict` to a folder. Priorities and sample counts are stored with the rows instead.

        Args:
            path: The folder; created if it does not exist.

        Raises:
            StorageError: A disk operation failed.
        """
        folder, disk = Path(path), Disk()
        disk.make_dir(folder)
        disk.put(folder / _FILE, json.dumps(self.state_dict()).encode())

    def loads(self, path: str | Path) -> None:
        """Restore what `dumps` wrote.

        Args:
            path: The folder.

        Raises:
            StorageError: The file does not exist, or a disk operation failed.
            CorruptionError: The file is damaged.
        """
        file = Path(path) / _FILE
        with parsing(file):
            state = json.loads(Disk().read_whole(file))
        self.load_state_dict(state)

    @property
    def ran_out(self) -> bool:
        """Whether iteration over the buffer ends: the last batch completed a pass or used up the rows."""
        return False

    def on_write(self, ids: IntArray) -> None:
        """Handle rows that were appended, or that replaced other rows; called if `hears_writes`.

        Args:
            ids: Ids of the rows. Shape `(n,)`, int64.
        """
        if (storage := self._find_storage()) is not None:
            tell_write(self, storage, ids)

    def add(self, index: Any) -> None:
        """Handle one row that was written. The base class drops a priority that was set before a storage.

        Args:
            index: Index of the row: an integer; if the storage has several dims, a tensor of shape `(ndim,)`.
        """
        self._forget_early(index)

    def extend(self, index: Any) -> None:
        """Handle rows that were written. The base class drops priorities that were set before a storage.

        Args:
            index: Indices of the rows: a tensor of shape `(n,)`; if the storage has several dims,
                `(n, ndim)`.
        """
        self._forget_early(index)

    def _forget_early(self, index: Any) -> None:
        if self._early is not None:
            self._early.forget(_flat_index(index))

    @property
    def default_priority(self) -> float:
        """The priority of new rows: the largest so far; 1 before any was set, or without priorities."""
        if not self.prioritized:
            return 1.0
        storage = self._find_storage()
        if storage is not None:
            return float(storage.priorities.largest)
        return 1.0 if self._early is None else self._early.largest

    def update_priority(self, index: Any, priority: Any, *, storage: ReadView | None = None) -> None:
        """Set the priorities of rows. A sampler that does not draw by priority warns and does nothing.

        A sampler without a storage keeps them for the rows that its first storage has at these indices.

        Args:
            index: Indices of the rows, as `extend` returns them; -1 is ignored.
            priority: One number for all rows, or one for each row; several numbers per row are reduced to
                one.
            storage: The storage with the rows; None for the storage that the sampler is attached to.

        Raises:
            PriorityError: A value is negative, NaN or infinite; no priority was set.
            StateError: The number of priorities does not match the number of rows; the indices have several
                dims, and the sampler has no storage.
        """
        if not self.prioritized:
            warnings.warn(
                f"update_priority() was called on a {type(self).__name__}, which does not draw by priority",
                stacklevel=2,
            )
            return
        kept = self._find_storage(storage)
        given = to_array(priority).astype(np.float64)
        if kept is None:
            numbers = _flat_index(index)
            counts = numbers != -1
            if self._early is None:
                self._early = EarlyPriorities(self.max_priority_within_buffer)
            self._early.set(numbers[counts], self._spread(given, counts))
            return
        with kept.lock:
            ids, counts = ids_of(kept, index)
            kept.writer().set_priorities(ids, self._spread(given, counts))

    def _spread(self, given: Array, counts: Array) -> Array:
        """Return one priority for each row that counts. Shape `(m,)`.

        Args:
            given: The priorities as passed: one, or one or several for each row.
            counts: Whether each row counts. Shape `(n,)`, bool.

        Raises:
            StateError: The numbers of priorities and rows differ.
        """
        if given.size == 1:
            return np.full(int(counts.sum()), given.reshape(())[()])
        given = self.reduce(given)
        if given.size != counts.size:
            raise StateError(
                f"update_priority() got {given.size} priorities for {counts.size} rows; pass one for "
                "each row, or one for all"
            )
        chosen: Array = given[counts]
        return chosen

    def mark_update(self, index: Any, *, storage: ReadView | None = None) -> None:
        """Handle rows that the user changed.

        A sampler that draws by priority sets their priorities to the largest one.

        Args:
            index: Indices of the rows, as `extend` returns them; -1 is ignored.
            storage: The storage with the rows; None for the storage that the sampler is attached to.
        """
        if self.prioritized:
            kept = self._find_storage(storage)
            largest = self.default_priority if kept is None else kept.priorities.largest
            self.update_priority(index, largest, storage=storage)

    def on_priority_update(self, storage: ReadView, ids: IntArray, priorities: Array) -> None:
        """Handle priorities that the user has just set.

        Args:
            storage: The storage with the rows.
            ids: Ids of the rows. Shape `(n,)`.
            priorities: The new priorities. Shape `(n,)`.
        """

    def on_empty(self) -> None:
        """Handle the removal of all rows by the buffer's `empty`."""


class EarlyPriorities:
    """Keep the priorities that a sampler gets before it has a storage, as TorchRL's samplers do.

    They are kept by index, and moved to the first storage that the sampler is attached to.

    Threads: one at a time. Processes: a copy is independent. Crashes: they are lost.

    Args:
        within: Whether new rows get the largest priority of the rows that have one, not the largest ever.

    Example:
        >>> from expstore.samplers.base import EarlyPriorities
        >>> early = EarlyPriorities()
        >>> early.set(np.array([3, 4]), np.array([0.5, 2.0]))
        >>> early.largest
        2.0
    """

    def __init__(self, within: bool = False) -> None:
        self._within = within
        self._values: dict[int, float] = {}
        self._largest: float | None = None

    @property
    def largest(self) -> float:
        """The priority of new rows: the largest so far; 1 before any was set."""
        if self._within:
            return max(self._values.values(), default=1.0)
        return 1.0 if self._largest is None else self._largest

    def set(self, index: IntArray, values: Array) -> None:
        """Set the priorities of rows. Shapes `(n,)`.

        Raises:
            PriorityError: A value is negative, NaN or infinite; no priority was set.
        """
        checked = check_priorities(values).tolist()
        self._values |= zip(index.tolist(), checked, strict=True)
        if checked:
            self._largest = max(checked) if self._largest is None else max(*checked, self._largest)

    def forget(self, index: IntArray) -> None:
        """Drop the priorities of rows that are overwritten. Shape `(n,)`."""
        for number in index.tolist():
            self._values.pop(number, None)

    def move_to(self, storage: ReadView) -> None:
        """Set the priorities of the storage's rows; new rows get at least the largest priority set so far.

        Raises:
            StateError: The storage cannot be written.
        """
        writable, geometry = storage.writer(), storage.geometry
        with writable.lock:
            ids = writable.window.ids()
            index = geometry.index_of(ids)
            early = np.array([number in self._values for number in index.tolist()], bool)
            values = np.array([self._values[number] for number in index[early].tolist()], np.float32)
            if values.size:
                writable.set_priorities(ids[early], values)
            if not self._within:
                writable.priorities.note_largest(max(self.largest, writable.priorities.largest))


def refuse_weight(sampler: Sampler, where: str | Where | None, weight: str | None, reason: str) -> None:
    """Raise ValueError if a weight is given to a sampler that does not draw by probabilities."""
    _, weight = split_where(where, weight)
    if weight is not None:
        raise ArgumentError(
            f"{type(sampler).__name__} does not support weight={weight!r}: {reason}; use where= instead"
        )


def readable(storage: ReadView) -> Window:
    """Return the window of readable ids, which has at least one row.

    Raises:
        NotReadyError: No row is readable: the storage is empty, or `empty` or a very long `extend` has just
            removed all rows.
    """
    window = storage.window
    if window.low >= window.last or (window.deleted is not NO_IDS and not window.rows):
        raise NotReadyError("Cannot sample from an empty storage", hint="extend() it first")
    return window


def _select_by_sample(
    self: Sampler, storage: ReadView, batch_size: int, generator: np.random.Generator
) -> Selection:
    """Choose rows with the `sample` method of a subclass that does not define `select`."""
    return self.sample(storage, batch_size, generator)


#: Methods that notify a sampler of new rows.
_WRITE_HOOKS = frozenset({"add", "extend", "mark_update", "on_write"})


def tell_write(sampler: Any, storage: ReadView, ids: IntArray) -> None:
    """Call TorchRL's hooks of a sampler for new rows: `mark_update`, then `extend` or `add`.

    Args:
        sampler: The sampler. Only hooks that its author defined are called.
        storage: The storage with the rows.
        ids: Ids of the new rows. Shape `(n,)`.
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
    """Return whether a sampler's author defined a method. Methods of classes named `Sampler` do not count."""
    for kind in type(sampler).__mro__:
        if name in vars(kind):
            return kind.__name__ != "Sampler"
    return callable(getattr(sampler, name, None))


def call_with_storage(hook: Callable[..., Any], *values: Any, storage: ReadView) -> None:
    """Call a hook; pass the storage if the hook has a parameter `storage`."""
    parameters = inspect.signature(hook).parameters
    if "storage" in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        hook(*values, storage=storage)
    else:
        hook(*values)


def ids_of(storage: ReadView, index: Any) -> tuple[IntArray, IntArray]:
    """Return the ids of the rows at indices, leaving out indices of -1.

    Args:
        storage: The storage with the rows; the caller holds its lock.
        index: An integer or several; if the storage has several dims, one number for each dim.

    Returns:
        The ids, shape `(m,)`, and whether each index is not -1, shape `(n,)`, bool.
    """
    if isinstance(index, tuple):
        index = np.stack([np.asarray(part) for part in index], axis=-1)
    numbers = np.asarray(index, np.int64)
    if storage.ndim > 1:
        numbers = storage.geometry.ravel(numbers.reshape(-1, storage.ndim), storage.window)
    numbers = numbers.reshape(-1)
    kept: IntArray = numbers != -1
    return ids_to_weigh(storage, numbers[kept]), kept


def _flat_index(index: Any) -> IntArray:
    """Return indices of rows of a storage with one dim. Shape `(n,)`.

    Raises:
        StateError: The indices are of a storage with several dims.
    """
    if isinstance(index, tuple) or to_array(index).ndim > 1:
        raise StateError(
            "the sampler has no storage, which tells what indices of several dims mean",
            hint="pass storage=, or give the sampler to a buffer first",
        )
    flat: IntArray = to_array(index).astype(np.int64).reshape(-1)
    return flat


def index_tensor(storage: ReadView, ids: IntArray) -> Any:
    """Return the indices of rows: a tensor of shape `(n,)`, or for several dims a tuple of such tensors."""
    index = storage.geometry.index_of(ids)
    if storage.ndim == 1:
        return torch.from_numpy(index)
    return torch.from_numpy(storage.geometry.unravel(index)).unbind(-1)


def info_of(storage: ReadView, selection: Selection) -> dict[str | Key, Any]:
    """Return what a sampler adds to the rows of a selection. Flags are merged with the stored fields."""
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
