"""What transforms see of the steps before and after the rows of a batch.

Buffers make a `StepView` of the rows that they read, for transforms that are `StepTransform`s. It finds rows
by episode and step, as the storage knows them; it chooses no rows of a batch, and keeps nothing.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from expstore.core.bfloat16 import widen_bfloat16
from expstore.core.values import Array, IntArray, Key, given_key, key_name, to_key
from expstore.episodes.segmentation import find_ends
from expstore.errors import SchemaError, StateError
from expstore.schema.row_selection import in_shape
from expstore.schema.schema import ARROW, OBJECT

if TYPE_CHECKING:
    from expstore.storages.read_view import ReadView
    from expstore.storages.run_index import Runs


__all__ = [
    "Overtaken",
    "StepTransform",
    "StepView",
    "below_next",
    "check_fill",
    "given_discount",
    "given_fill",
    "given_keys",
    "keys_of",
    "refuse_given",
]

NestedKey = str | tuple[str, ...]

_DONE: Key = ("next", "done")


class Overtaken(Exception):
    """Rows have left while other steps were looked for: `show_to` takes it in, and they are read again."""


class StepView:
    """Find and read other steps of the episodes of a batch's rows.

    Steps follow their episode wherever its rows lie: across batches, workers, the end of a ring. Those are
    seen that can be read now; rows that were given up part an episode in two. Every row that was shown is
    remembered: what was seen of it counts only if all of them are `intact` in the end.

    Threads: one uses it, while others write. Processes: as the storage. Crashes: it keeps nothing.

    Args:
        storage: What holds the rows.
        ids: Those of the batch. Shape `(n,)`.
        generator: The numbers of this draw, as the sampler has left them; None: nothing is drawn, rows are
            read by index.

    Raises:
        SchemaError: Rows are no single steps of TensorDicts.
        StateError: Better rows take the places of others: rows next to one another are no steps.

    Example:
        >>> view = StepView(rb.storage, np.array([3, 9]))
        >>> ids, valid = view.at(view.ids, [-1, 0, 1])
        >>> (rewards,) = view.read(ids, [("next", "reward")])
        >>> rewards.shape, view.intact
        ((2, 3, 1), True)
    """

    def __init__(
        self, storage: ReadView, ids: IntArray, generator: np.random.Generator | None = None
    ) -> None:
        _check_rows(storage)
        self.storage = storage
        #: The rows of the batch. Shape `(n,)`.
        self.ids = ids
        #: The rows of which the batch has the fields that are in `moved`. Shape `(n,)`.
        self.next_ids = ids
        #: Positions in the schema of the fields that are taken from `next_ids`.
        self.moved: frozenset[int] = frozenset()
        self.generator = generator
        #: The transforms and what they have seen, in their order.
        self.seen: list[tuple[StepTransform, Any]] = []
        self._oldest = int(ids.min()) if ids.size else 0
        self._lost = False
        self._changes = storage.changes.number
        self._located: tuple[Runs, IntArray, int, tuple[IntArray, IntArray]] | None = None

    def show_to(self, step: StepTransform) -> None:
        """Have a transform look, and keep what it has seen, unless rows have left meanwhile."""
        if not self._lost:
            with suppress(Overtaken):
                self.seen.append((step, step.look(self)))

    def at(self, ids: IntArray, offsets: Any, runs: Runs | None = None) -> tuple[IntArray, NDArray[np.bool_]]:
        """Return the rows so many steps before or after some.

        Args:
            ids: Of rows of the batch, or such as were found here. Shape `(n,)`.
            offsets: How many steps later, negative: earlier. Shape `(k,)`, or `(n, k)`.
            runs: Which steps follow one another; None: those of the store's episodes.

        Returns:
            Ids, of the first or the last step that can be read where there is none so far away; and where
            there is one. Shapes `(n, k)`.
        """
        offsets = np.ascontiguousarray(np.atleast_2d(offsets), np.int64)
        runs = self.storage.runs if runs is None else runs
        with runs.lock:
            there, valid = runs.near(*self._locate(runs, ids), offsets)
        self._show(there)
        return there, valid

    def reach(self, ids: IntArray, runs: Runs | None = None) -> tuple[IntArray, IntArray]:
        """Return how many steps before each row can be read, and how many after it. Shapes `(n,)`.

        Args:
            ids: Of rows. Shape `(n,)`.
            runs: As `at`.
        """
        runs = self.storage.runs if runs is None else runs
        with runs.lock:
            numbers, steps = self._locate(runs, ids)
            return steps - runs.first[numbers], runs.stop[numbers] - 1 - steps

    def ahead(self, ids: IntArray, most: int | None = None) -> tuple[IntArray, IntArray]:
        """Return the rows from each one on, to the last step that can be read.

        Args:
            ids: Of which rows. Shape `(n,)`.
            most: So many of each at most; None: all.

        Returns:
            Their ids, one row's behind another's; and how many each has. Shapes `(total,)` and `(n,)`.
        """
        runs = self.storage.runs
        with runs.lock:
            numbers, steps = self._locate(runs, ids)
            lengths = runs.stop[numbers] - steps
            if most is not None:
                lengths = np.minimum(lengths, most)
            there = runs.rows(numbers, steps, lengths)
        self._show(there)
        return there, lengths

    def read(self, ids: IntArray, keys: Sequence[Key]) -> list[Array]:
        """Return fields of rows; bfloat16 as uint16 bits.

        Args:
            ids: Which rows. Any shape.
            keys: Of the fields.

        Returns:
            One array per field. Shapes `(*ids.shape, *row shape)`; of rows without a fixed size pyarrow
            Arrays, flat.

        Raises:
            SchemaError: There is no such field.
        """
        flat = np.ascontiguousarray(ids).reshape(-1)
        self._show(flat)
        columns = self.storage.read(flat, [self.storage.require_schema().place_of(key) for key in keys])
        return in_shape(columns, ids.shape)

    def tensor(self, ids: IntArray, key: Key) -> torch.Tensor:
        """Return a field of rows as a tensor, which owns its memory.

        Args:
            ids: Which rows. Any shape.
            key: Of the field.

        Returns:
            Shape `(*ids.shape, *row shape)`.

        Raises:
            SchemaError: There is no such field, or it is none of tensors.
        """
        (column,) = self.read(ids, [key])
        dtype = self.storage.require_schema()[key].dtype
        if dtype in (OBJECT, ARROW):
            raise SchemaError(f"{key_name(key)!r} must be a field of tensors of one size, but it is {dtype}")
        values = torch.from_numpy(column)
        return values.view(torch.bfloat16) if dtype == "bfloat16" else values

    def floats(self, ids: IntArray, key: Key) -> Array:
        """Return a field of numbers as float64, or as float32 if it has less.

        Args:
            ids: Which rows. Any shape.
            key: Of the field.

        Returns:
            Shape `(*ids.shape, *row shape)`.

        Raises:
            SchemaError: There is no such field, or it is none of numbers.
        """
        (column,) = self.read(ids, [key])
        dtype = self.storage.require_schema()[key].dtype
        if dtype == "bfloat16":
            return widen_bfloat16(column)
        if dtype in (OBJECT, ARROW, "complex64"):
            raise SchemaError(f"{key_name(key)!r} must be a field of numbers, but it has dtype {dtype}")
        return column if column.dtype == np.float32 else column.astype(np.float64)

    def ends(self, ids: IntArray, key: Key = _DONE) -> NDArray[np.bool_]:
        """Say which rows end something, as they say themselves: done, terminated, truncated.

        Args:
            ids: Which rows. Any shape.
            key: The one field that says so, if it is not ("next", "done").

        Returns:
            Shape that of `ids`. Where rows do not say it, only the last step that can be read is an end.

        Raises:
            SchemaError: There is no such field, it has more than one value per row, or it is no flag.
        """
        own = self.storage.keys
        schema = self.storage.require_schema()
        if key != _DONE and key in schema and schema[key].dtype not in ("bool", "uint8", "int8"):
            raise SchemaError(
                f"{key_name(key)!r} must be one flag per row, but it has dtype {schema[key].dtype}",
                hint="give another done_key, or store it as bool",
            )
        flags = np.zeros(ids.shape, np.bool_)
        if key != _DONE:
            (column,) = self.read(ids, [key])
            if column.size != flags.size:
                raise SchemaError(f"{key_name(key)!r} must be one flag per row", hint="give another done_key")
            return flags | column.reshape(ids.shape).astype(np.bool_, copy=False)
        ends = (own.terminated, own.truncated, own.done)
        named = [end for end in ends if end is not None]
        found = {
            end: column.reshape(ids.size, *schema[end].shape)
            for end, column in zip(named, self.read(ids, named), strict=True)
        }
        terminated, truncated, done = (None if end is None else found[end] for end in ends)
        for over in find_ends(terminated, truncated, done, own.done_reduce):
            if over is not None:
                flags |= over.reshape(ids.shape)
        return flags

    def columns(self, places: Sequence[int] | None = None) -> list[Array]:
        """Return the fields of the batch, in the schema's order, those that have moved from `next_ids`.

        Args:
            places: Positions of the fields wanted; None: all.
        """
        moved = self.moved if places is None else self.moved.intersection(places)
        if not moved:
            return self.storage.read(self.ids, places)
        wanted = range(len(self.storage.require_schema().fields)) if places is None else places
        own = [place for place in wanted if place not in moved]
        other = [place for place in wanted if place in moved]
        found = dict(zip(own, self.storage.read(self.ids, own), strict=True))
        found |= zip(other, self.storage.read(self.next_ids, other), strict=True)
        return [found[place] for place in wanted]

    @property
    def oldest(self) -> int:
        """The smallest id of all rows that were shown, those of the batch included; 0: there are none."""
        return self._oldest

    @property
    def intact(self) -> bool:
        """Whether no row that was shown has been overwritten, and none at all changed, since."""
        if self._lost or self._changes & 1 or self._changes != self.storage.changes.number:
            return False
        # The oldest row is the first whose place is taken.
        return not self._oldest or self.storage.intact(np.array([self._oldest]))

    def _show(self, ids: IntArray) -> None:
        if ids.size:
            self._oldest = min(self._oldest or int(ids.flat[0]), int(ids.min()))

    def _locate(self, runs: Runs, ids: IntArray) -> tuple[IntArray, IntArray]:
        """Return run and step of rows; the runs' lock is held.

        Raises:
            Overtaken: Some have left: the batch is to be drawn again.
        """
        runs.look()
        known = self._located
        if known is None or known[0] is not runs or known[1] is not ids or known[2] != runs.moves:
            known = self._located = runs, ids, runs.moves, runs.locate(np.ascontiguousarray(ids))
        numbers = known[3][0]
        if numbers.size and int(numbers.min()) < 0:
            self._lost = True
            raise Overtaken
        return known[3]


def _check_rows(storage: ReadView) -> None:
    """Raise an error where rows are no steps that can be told from one another."""
    schema = storage.require_schema()
    if storage.ranking is not None:
        raise StateError(
            "rows of this store give way to better ones, which stand next to steps of other episodes",
            hint="look at other steps where all rows stay: with another writer",
        )
    if not schema.form:
        return
    form = json.loads(schema.form)
    if form.keys() & {"tree", "objects"}:
        raise SchemaError(
            "transforms that look at other steps need fields with names, the rows of this store have none",
            hint="store TensorDicts in columns",
        )
    if form.get("batch_size"):
        raise SchemaError(
            f"a row of this store has steps of its own (batch size {form['batch_size']}): transforms look at "
            "other rows as other steps",
            hint="store steps as rows: flatten what you extend with, or give the storage ndim=2",
        )


class StepTransform(ABC):
    """Make something of a batch's rows and of other steps of their episodes.

    Given to a buffer as any other transform, it acts right after the rows were read, before all others that
    are not of this kind, and after those that are and stand before it. It sees rows as they are stored.

    Threads: any number may sample at once: `look` hands what it finds to `apply`, and keeps nothing.
    Processes: a copy is one of its own. Crashes: it keeps nothing.

    Example:
        >>> class Remaining(StepTransform):
        ...     def look(self, view):
        ...         return view.reach(view.ids)[1]
        ...     def apply(self, batch, seen):
        ...         return batch.set("remaining", torch.from_numpy(seen))
        >>> rb.append_transform(Remaining())
    """

    #: It sets the view's `next_ids`, as no second one in a buffer may.
    moves: ClassVar[bool] = False

    @property
    def settings(self) -> object:
        """What it goes by, if that can change: batches made ahead (`prefetch`) by others are made anew."""
        return None

    @abstractmethod
    def look(self, view: StepView) -> Any:
        """Return what `apply` needs; called while the rows are read, again where a writer was faster.

        Args:
            view: What it may see. It may set `next_ids` and `moved`.
        """

    @abstractmethod
    def apply(self, batch: Any, seen: Any) -> Any:
        """Return what becomes of the batch.

        Args:
            batch: A TensorDict. Batch size `[n]`, one row for each of the view's.
            seen: What `look` returned.
        """

    def forward(self, batch: Any) -> NoReturn:
        """Refuse to act on a batch alone.

        Raises:
            StateError: Always: without a store there are no other steps.
        """
        raise StateError(
            f"{type(self).__name__} looks at other steps of a batch's episodes: it acts inside a buffer only",
            hint="give it to a buffer (transform=, or append_transform), of an ensemble to the members",
        )

    def __call__(self, batch: Any) -> NoReturn:
        """Do as `forward`."""
        self.forward(batch)


def below_next(key: NestedKey) -> Key:
    """Return a key below "next".

    >>> below_next(("agents", "reward"))
    ('next', 'agents', 'reward')
    """
    return ("next", *to_key(key))


def keys_of(
    in_keys: Sequence[NestedKey] | None, out_keys: Sequence[NestedKey] | None, default: Sequence[NestedKey]
) -> tuple[list[NestedKey], list[NestedKey]]:
    """Return what a transform reads and what it writes: by default the same.

    A name, and a tuple of names, is one key, as everywhere in TorchRL where keys are `in_keys`.

    Raises:
        TypeError: Something is no key.
        ValueError: They are not as many.
    """
    found = list(default) if in_keys is None else given_keys("in_keys", in_keys, nested=True)
    others = list(found) if out_keys is None else given_keys("out_keys", out_keys, nested=True)
    if len(found) != len(others):
        raise ValueError(f"in_keys and out_keys must be as many, got {len(found)} and {len(others)}")
    return found, others


def given_keys(argument: str, keys: Any, *, nested: bool = False) -> list[NestedKey]:
    """Return keys that somebody has given, as a list; a name alone is one.

    Args:
        argument: What they are called where they were given.
        keys: What was given.
        nested: A tuple of names is one key, too, and not several.

    Raises:
        TypeError: Something is no key.
    """
    names = isinstance(keys, tuple) and bool(keys) and all(isinstance(part, str) for part in keys)
    if isinstance(keys, str) or (nested and names):
        return [keys]
    if not isinstance(keys, Iterable):
        raise TypeError(f"{argument} are the keys of fields, got {keys!r}; give a list of names")
    found = list(keys)
    for key in found:
        given_key(f"each of {argument}", key)
    return found


def given_discount(transform: str, gamma: Any) -> float:
    """Return a discount that somebody has given: from 0 to 1.

    Raises:
        TypeError: It is no number.
        ValueError: It is out of its bounds.
    """
    try:
        value = float(gamma)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{transform}: gamma is a discount, a number from 0 to 1, got {gamma!r}") from None
    if not 0 <= value <= 1:
        raise ValueError(f"{transform}: got out-of-bounds gamma decay: gamma={value}; give one from 0 to 1")
    return value


def given_fill(argument: str, value: Any) -> Any:
    """Return a number that somebody has given to stand where there is nothing.

    Raises:
        TypeError: It is none.
    """
    number = value.item() if isinstance(value, torch.Tensor | np.generic) and value.ndim == 0 else value
    if not isinstance(number, int | float | complex):
        raise TypeError(f"{argument} is the number that stands where there is no step, got {value!r}")
    return number


def check_fill(argument: str, value: Any, key: NestedKey, dtype: torch.dtype) -> None:
    """Raise ValueError if a field cannot hold a number."""
    if dtype.is_complex:
        return
    if dtype.is_floating_point:
        fits = not isinstance(value, complex) and (
            not math.isfinite(value) or abs(value) <= torch.finfo(dtype).max
        )
    elif dtype == torch.bool:
        fits = value in (0, 1)
    else:
        whole = not isinstance(value, complex) and math.isfinite(value) and value == int(value)
        fits = whole and torch.iinfo(dtype).min <= value <= torch.iinfo(dtype).max
    if not fits:
        raise ValueError(
            f"{argument}={value!r} is no value of {key_name(to_key(key))!r}, of {dtype}; "
            "give one that it can hold"
        )


def refuse_given(transform: str, reason: str, **given: tuple[Any, Any]) -> None:
    """Raise ValueError if arguments that mean nothing here are not as by default.

    Args:
        transform: Whose arguments they are.
        reason: Why they mean nothing.
        given: Of each its value, and the default.
    """
    for name, (value, default) in given.items():
        if value != default:
            raise ValueError(f"{transform}: {name}={value!r} means nothing here: {reason}; leave it out")
