"""The base class of transforms that read other steps of a batch's episodes, and their access to these steps.

A buffer makes a `StepView` of the rows of a batch and passes it to its `StepTransform`s. The view finds rows
by episode and step. It does not choose the rows of a batch, and it caches nothing between batches.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from expstore.core.bfloat16 import widen_bfloat16
from expstore.core.values import Array, IntArray, Key, check_key, key_name, to_key
from expstore.episodes.segmentation import find_ends
from expstore.errors import ArgumentError, SchemaError, StateError
from expstore.schema.row_selection import in_shape
from expstore.schema.schema import ARROW, OBJECT

if TYPE_CHECKING:
    from expstore.storages.read_view import ReadView
    from expstore.storages.run_index import Runs


NestedKey = str | tuple[str, ...]

_DONE: Key = ("next", "done")


class Overtaken(Exception):
    """Raised when a row of the batch left the store during a lookup; `show_to` catches it."""


class StepView:
    """Find and read other steps of the episodes of a batch's rows.

    An episode's steps are found wherever its rows are stored: across batches, workers and the end of a ring.
    Only rows that can be read now are found; deleted rows split an episode in two. The view remembers the
    oldest row that it returned: what was read is valid only if `intact` is True afterwards.

    Threads: used by one thread, while others write. Processes: as the storage. Crashes: it stores nothing.

    Args:
        storage: The storage with the rows.
        ids: Ids of the batch's rows. Shape `(n,)`.
        generator: The random generator of this draw, in the state in which the sampler left it; None if the
            rows are read by index.
        neighbours: Whether other rows than those of the batch are read.
        newest: The largest id of other rows: newer rows are as if they were not there; None: no limit.

    Raises:
        SchemaError: The store's rows are not single steps of TensorDicts, and `neighbours` is True.
        StateError: The store replaces rows by better ones, so neighbouring rows are not consecutive steps.

    Example:
        >>> from expstore.transforms import StepView
        >>> view = StepView(rb.storage, np.array([3, 9]))
        >>> ids, valid = view.at(view.ids, [-1, 0, 1])
        >>> (rewards,) = view.read(ids, [("next", "reward")])
        >>> rewards.shape, view.intact
        ((2, 3, 1), True)
    """

    def __init__(
        self,
        storage: ReadView,
        ids: IntArray,
        generator: np.random.Generator | None = None,
        *,
        neighbours: bool = True,
        newest: int | None = None,
    ) -> None:
        if neighbours:
            _check_rows(storage)
        self.storage = storage
        #: The rows of the batch. Shape `(n,)`.
        self.ids = ids
        #: Ids of the rows from which the batch gets the fields in `moved`. Shape `(n,)`.
        self.next_ids = ids
        #: Positions in the schema of the fields that are read from `next_ids`.
        self.moved: frozenset[int] = frozenset()
        self.generator = generator
        #: The largest id of other rows; None: no limit.
        self.newest = newest
        #: The transforms and what their `look` returned, in their order.
        self.seen: list[tuple[StepTransform, Any]] = []
        self._oldest = int(ids.min()) if ids.size else 0
        #: Ids of all rows that this view returned, in any shapes; some more than once.
        self.others: list[IntArray] = []
        self._lost = False
        self._changes = storage.changes.number
        self._located: tuple[Runs, IntArray, int, tuple[IntArray, IntArray]] | None = None

    def show_to(self, step: StepTransform) -> None:
        """Call a transform's `look` and keep its result, unless rows of the batch have left the store."""
        if not self._lost:
            with suppress(Overtaken):
                self.seen.append((step, step.look(self)))

    def at(self, ids: IntArray, offsets: Any, runs: Runs | None = None) -> tuple[IntArray, NDArray[np.bool_]]:
        """Return the ids of the rows at given step offsets from rows.

        Args:
            ids: Ids of rows of the batch, or ids that a method of this view returned. Shape `(n,)`.
            offsets: Number of steps after each row; negative for earlier steps. Shape `(k,)`, or `(n, k)`.
            runs: Which steps follow one another; None for the steps of the store's episodes.

        Returns:
            The ids, int64, and whether there is a readable step at each offset, bool. Shapes `(n, k)`. Where
            there is no such step, the id is that of the episode's first or last readable step.
        """
        offsets = np.ascontiguousarray(np.atleast_2d(offsets), np.int64)
        runs = self._runs_around(ids, back=bool((offsets < 0).any())) if runs is None else runs
        with runs.lock:
            numbers, steps = self._locate(runs, ids)
            if self.newest is None:
                there, valid = runs.near(numbers, steps, offsets)
            else:
                after = self._count_after(runs, numbers, steps)[:, None]
                there, valid = runs.near(numbers, steps, np.minimum(offsets, after))
                valid &= offsets <= after
        self._show(there)
        return there, valid

    def _count_after(self, runs: Runs, numbers: IntArray, steps: IntArray) -> IntArray:
        """Return how many steps after each row can be read, up to the newest row. Shapes `(n,)`."""
        after: IntArray = runs.stop[numbers] - 1 - steps
        if self.newest is None or not after.size:
            return after
        newest, one = self.newest, np.ones(1, np.int64)
        late = np.flatnonzero(runs.rows(numbers, steps + after, one.repeat(after.size)) > newest)
        # In an episode, later steps have larger ids.
        low, high = np.zeros(late.size, np.int64), after[late]
        while (low + 1 < high).any():
            middle = (low + high) // 2
            seen = runs.rows(numbers[late], steps[late] + middle, one.repeat(late.size)) <= newest
            low, high = np.where(seen, middle, low), np.where(seen, high, middle)
        after[late] = low
        return after

    def reach(self, ids: IntArray, runs: Runs | None = None) -> tuple[IntArray, IntArray]:
        """Return how many steps before each row can be read, and how many after it. Shapes `(n,)`.

        Args:
            ids: Ids of rows. Shape `(n,)`.
            runs: Which steps follow one another; None for the steps of the store's episodes.
        """
        runs = self._runs_around(ids, back=True) if runs is None else runs
        with runs.lock:
            numbers, steps = self._locate(runs, ids)
            return steps - runs.first[numbers], self._count_after(runs, numbers, steps)

    def ahead(self, ids: IntArray, most: int | None = None) -> tuple[IntArray, IntArray]:
        """Return, for each row, the ids from that row to the last readable step of its episode.

        Args:
            ids: Ids of rows. Shape `(n,)`.
            most: The most ids to return for each row; None for all.

        Returns:
            The ids of all rows, concatenated, and the number of ids of each row. Shapes `(total,)`, `(n,)`.
        """
        runs = self._runs_around(ids, back=False)
        with runs.lock:
            numbers, steps = self._locate(runs, ids)
            lengths = self._count_after(runs, numbers, steps) + 1
            if most is not None:
                lengths = np.minimum(lengths, most)
            there = runs.rows(numbers, steps, lengths)
        self._show(there)
        return there, lengths

    def read(self, ids: IntArray, keys: Sequence[Key]) -> list[Array]:
        """Return fields of rows; bfloat16 as uint16 bits.

        Args:
            ids: Ids of the rows. Any shape.
            keys: Keys of the fields.

        Returns:
            One array per field. Shapes `(*ids.shape, *row shape)`; a variable-length field is a flat pyarrow
            Array.

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
            ids: Ids of the rows. Any shape.
            key: Key of the field.

        Returns:
            Shape `(*ids.shape, *row shape)`.

        Raises:
            SchemaError: There is no such field, or its rows are not tensors of one size.
        """
        (column,) = self.read(ids, [key])
        dtype = self.storage.require_schema()[key].dtype
        if dtype in (OBJECT, ARROW):
            raise SchemaError(f"{key_name(key)!r} must be a field of tensors of one size, but it is {dtype}")
        values = torch.from_numpy(column)
        return values.view(torch.bfloat16) if dtype == "bfloat16" else values

    def floats(self, ids: IntArray, key: Key) -> Array:
        """Return a numeric field: float32 and bfloat16 as float32, every other dtype as float64.

        Args:
            ids: Ids of the rows. Any shape.
            key: Key of the field.

        Returns:
            Shape `(*ids.shape, *row shape)`.

        Raises:
            SchemaError: There is no such field, or its values are not real numbers.
        """
        (column,) = self.read(ids, [key])
        dtype = self.storage.require_schema()[key].dtype
        if dtype == "bfloat16":
            return widen_bfloat16(column)
        if dtype in (OBJECT, ARROW, "complex64"):
            raise SchemaError(f"{key_name(key)!r} must be a field of numbers, but it has dtype {dtype}")
        return column if column.dtype == np.float32 else column.astype(np.float64)

    def ends(self, ids: IntArray, key: Key = _DONE) -> NDArray[np.bool_]:
        """Return which rows are marked as ends.

        Args:
            ids: Ids of the rows. Any shape.
            key: The field that marks ends. ("next", "done") means the store's own fields: done, terminated
                and truncated.

        Returns:
            Bool, shape of `ids`. All False if the store has no such fields: then only the last readable step
            of an episode is an end.

        Raises:
            SchemaError: There is no such field, it has more than one value per row, or it is not a flag.
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
        """Return the fields of the batch, in the schema's order; fields in `moved` are read from `next_ids`.

        Args:
            places: Positions of the fields to return; None for all.

        Returns:
            One array per field, with a row for each row of the batch. Shape `(n, *field)`, the stored dtype.
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
        """The smallest id of the batch's rows and all rows that this view returned; 0 for no rows."""
        return self._oldest

    @property
    def intact(self) -> bool:
        """Whether no row that this view returned was overwritten, and no row of the store was changed."""
        if self._lost or self._changes & 1 or self._changes != self.storage.changes.number:
            return False
        # The oldest row is overwritten first.
        return not self._oldest or self.storage.intact(np.array([self._oldest]))

    def _show(self, ids: IntArray) -> None:
        if ids.size:
            self.others.append(ids)
            self._oldest = min(self._oldest or int(ids.flat[0]), int(ids.min()))

    def _runs_around(self, ids: IntArray, *, back: bool) -> Runs:
        """Return the runs in which to find steps: those of all stored rows for steps before the window."""
        storage = self.storage
        if storage.description.window_rows is None or not (back or (ids <= storage.window.low).any()):
            return storage.runs
        return storage.runs.with_stored()

    def _locate(self, runs: Runs, ids: IntArray) -> tuple[IntArray, IntArray]:
        """Return the run and the step of rows; the caller holds the lock of the runs.

        Raises:
            Overtaken: A row has left the store: the batch must be drawn again.
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
    """Raise an error if the rows of a store are not the single steps of episodes."""
    schema = storage.require_schema()
    if storage.ranking is not None:
        raise StateError(
            "this store replaces rows by better ones, so neighbouring rows are not consecutive steps",
            hint="use a store with another writer",
        )
    if not schema.form:
        return
    form = json.loads(schema.form)
    if form.keys() & {"tree", "objects"}:
        raise SchemaError(
            "transforms that read other steps need named fields, which the rows of this store do not have",
            hint="store TensorDicts in columns",
        )
    if form.get("batch_size"):
        raise SchemaError(
            f"a row of this store has several steps (batch size {form['batch_size']}), but transforms that "
            "read other steps need one step per row",
            hint="flatten the batches that you extend with, or create the storage with ndim=2",
        )


class StepTransform(ABC):
    """Base class of transforms that read other steps of the episodes of a batch's rows.

    Give it to a buffer like any other transform. The buffer's step transforms run first, in their order,
    right after the rows were read; all other transforms follow. A step transform sees rows as they are
    stored.

    Threads: any number may sample at once: `look` returns what `apply` needs, and neither keeps state.
    Processes: a copy is independent. Crashes: it stores nothing.

    Example:
        >>> from expstore import StepTransform
        >>> class Remaining(StepTransform):
        ...     def look(self, view):
        ...         return view.reach(view.ids)[1]
        ...     def apply(self, batch, seen):
        ...         return batch.set("remaining", torch.from_numpy(seen))
        >>> rb.append_transform(Remaining())
    """

    #: Whether it sets the view's `next_ids`. A buffer accepts only one such transform.
    moves: ClassVar[bool] = False
    #: The fields that it reads from a batch; None if it does not list them.
    in_keys: Any = None
    #: The fields that it writes into a batch; None if it does not list them.
    out_keys: Any = None

    def stays_within(self, storage: ReadView) -> bool:
        """Return whether it reads no other rows, because each row of the storage is a whole trajectory."""
        return False

    @property
    def settings(self) -> object:
        """Its mutable settings, if any: batches prefetched under other settings are built again."""
        return None

    @abstractmethod
    def look(self, view: StepView) -> Any:
        """Return what `apply` needs. Called while the rows are read, and again if a writer overwrote one.

        Args:
            view: Access to the rows. The transform may set its `next_ids` and `moved`.
        """

    @abstractmethod
    def apply(self, batch: Any, seen: Any) -> Any:
        """Return the transformed batch.

        Args:
            batch: A TensorDict. Batch size `[n]`, one row for each row of the view.
            seen: What `look` returned.
        """

    def forward(self, batch: Any) -> Any:
        """Refuse to transform a batch without a store.

        Raises:
            StateError: Always: without a store there are no other steps.
        """
        raise StateError(
            f"{type(self).__name__} reads other steps of a batch's episodes: it works inside a buffer only",
            hint="give it to a buffer (transform=, or append_transform), or to the members of an ensemble",
        )

    def __call__(self, batch: Any) -> Any:
        """Refuse to transform a batch without a store, as `forward` does."""
        return self.forward(batch)


def below_next(key: NestedKey) -> Key:
    """Return a key below "next".

    >>> from expstore.transforms.base import below_next
    >>> below_next(("agents", "reward"))
    ('next', 'agents', 'reward')
    """
    return ("next", *to_key(key))


def keys_of(
    in_keys: Sequence[NestedKey] | None, out_keys: Sequence[NestedKey] | None, default: Sequence[NestedKey]
) -> tuple[list[NestedKey], list[NestedKey]]:
    """Return the keys that a transform reads and the keys that it writes, by default the same.

    A name is one key, and a tuple of names too, as in every `in_keys` of TorchRL.

    Args:
        in_keys: The keys to read; None for `default`.
        out_keys: The keys to write; None for the keys that are read.
        default: The default of `in_keys`.

    Raises:
        ArgumentError: A value is not a key; the numbers of keys differ.
    """
    found = list(default) if in_keys is None else check_keys("in_keys", in_keys, nested=True)
    others = list(found) if out_keys is None else check_keys("out_keys", out_keys, nested=True)
    if len(found) != len(others):
        raise ArgumentError(
            f"in_keys and out_keys must have the same length, got {len(found)} and {len(others)}"
        )
    return found, others


def check_keys(argument: str, keys: Any, *, nested: bool = False) -> list[NestedKey]:
    """Return keys passed by a user as a list; a single name is one key.

    Args:
        argument: Name of the argument, for error messages.
        keys: The value that the user passed.
        nested: Whether a tuple of names is one nested key instead of several keys.

    Raises:
        ArgumentError: A value is not a key.
    """
    names = isinstance(keys, tuple) and bool(keys) and all(isinstance(part, str) for part in keys)
    if isinstance(keys, str) or (nested and names):
        return [keys]
    if not isinstance(keys, Iterable):
        raise ArgumentError(f"{argument} are the keys of fields, got {keys!r}; give a list of names")
    found = list(keys)
    for key in found:
        check_key(f"each of {argument}", key)
    return found


def check_discount(transform: str, gamma: Any) -> float:
    """Check a discount passed by a user and return it as a float from 0 to 1.

    Raises:
        ArgumentError: It is not a number; it is below 0 or above 1.
    """
    try:
        value = float(gamma)
    except (TypeError, ValueError, RuntimeError):
        raise ArgumentError(
            f"{transform}: gamma is a discount, a number from 0 to 1, got {gamma!r}"
        ) from None
    if not 0 <= value <= 1:
        raise ArgumentError(
            f"{transform}: got out-of-bounds gamma decay: gamma={value}; give one from 0 to 1"
        )
    return value


def convert_fill(argument: str, value: Any) -> Any:
    """Check a fill value passed by a user (for steps that do not exist) and return it as a number.

    Raises:
        ArgumentError: It is not a number.
    """
    number = value.item() if isinstance(value, torch.Tensor | np.generic) and value.ndim == 0 else value
    if not isinstance(number, int | float | complex):
        raise ArgumentError(f"{argument} must be a number: the value where there is no step; got {value!r}")
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
        raise ArgumentError(
            f"{argument}={value!r} cannot be a value of {key_name(to_key(key))!r}, which has dtype {dtype}; "
            "pass one that this dtype can hold"
        )


def refuse_given(transform: str, reason: str, **given: tuple[Any, Any]) -> None:
    """Raise ValueError if an unsupported argument (there for TorchRL's signature) is not at its default.

    Args:
        transform: Name of the transform.
        reason: Why the arguments are not supported.
        given: The value and the default of each argument.
    """
    for name, (value, default) in given.items():
        if value != default:
            raise ArgumentError(f"{transform}: {name}={value!r} is not supported: {reason}; leave it out")
