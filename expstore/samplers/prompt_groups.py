"""A sampler that draws whole groups: rows that share a value, such as the answers to one prompt.

It reads the field that identifies groups, and rewards if the strategy needs them, after rows were written or
changed. It changes nothing.
"""

from __future__ import annotations

import bisect
import threading
import warnings
import weakref
from array import array
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from expstore.core.bfloat16 import widen_bfloat16
from expstore.core.values import Array, IntArray, Key, Selection, Window, key_name, to_key
from expstore.errors import ArgumentError, SchemaError
from expstore.samplers.base import Sampler, readable
from expstore.samplers.filter import Filter
from expstore.storages.read_view import read_present

if TYPE_CHECKING:
    from expstore.storages.read_view import ReadView

#: How the rows of a group are chosen.
Strategy = Literal["random", "recency", "reward", "variance"]
_STRATEGIES = ("random", "recency", "reward", "variance")


class _Group:
    """The rows of a group: ids, ascending, and rewards if they are needed."""

    __slots__ = ("first", "ids", "rewards")

    def __init__(self) -> None:
        self.ids, self.rewards = array("q"), array("d")
        self.first = 0  # place of the oldest row that can be read

    def add(self, ids: IntArray, rewards: Array | None) -> None:
        """Append newer rows."""
        self.ids.frombytes(ids.tobytes())
        if rewards is not None:
            self.rewards.frombytes(rewards.tobytes())

    def forget(self, low: int) -> int | None:
        """Forget the rows with ids up to `low`; return the oldest id, None without rows."""
        self.first = bisect.bisect_right(self.ids, low, self.first)
        if self.first > len(self.ids) // 2:
            del self.ids[: self.first], self.rewards[: self.first]
            self.first = 0
        return self.ids[self.first] if self.ids else None

    def read(self) -> tuple[IntArray, Array]:
        """Return copies of the ids and the rewards. Shapes `(n,)`, and `(n,)` or `(0,)`."""
        return np.array(self.ids[self.first :]), np.array(self.rewards[self.first :])


class _Groups:
    """The groups of a storage, as far as its rows were read.

    Args:
        storage: The storage; the reference is weak.
    """

    def __init__(self, storage: ReadView) -> None:
        self.of, self.version = weakref.ref(storage), storage.version
        self.last = 0  # the newest id that was looked for
        self.by_value: dict[Any, _Group] = {}
        #: The oldest id and the value of each group, ascending: an order that a restart does not change.
        self.ages: list[tuple[int, Any]] = []

    def add(self, ids: IntArray, values: Any, rewards: Array | None) -> None:
        """Add newer rows. Shapes `(n,)`, `(n, ...)` and `(n,)`."""
        names, numbers = _number(values)
        order = np.argsort(numbers, kind="stable")
        starts = np.flatnonzero(np.append(True, np.diff(numbers[order]) != 0))
        parts = np.split(order, starts[1:]) if ids.size else []
        for name, part in sorted(zip(names, parts, strict=True), key=lambda one: int(one[1][0])):
            group = self.by_value.get(name)
            if group is None:
                group = self.by_value[name] = _Group()
                self.ages.append((int(ids[part[0]]), name))
            group.add(ids[part], None if rewards is None else rewards[part])

    def forget(self, low: int) -> None:
        """Forget the rows with ids up to `low`."""
        while self.ages and self.ages[0][0] <= low:
            _, name = self.ages.pop(0)
            if (oldest := self.by_value[name].forget(low)) is None:
                del self.by_value[name]
            else:
                bisect.insort(self.ages, (oldest, name), key=lambda one: one[0])


class PromptGroupSampler(Sampler):
    """Draw groups with equal probabilities, and the same number of rows from each.

    A group is all rows with the same value in a field. The rows of a batch are sorted by group. No group and
    no row is drawn twice in a batch, unless there are fewer than needed: then some are drawn again, and the
    sampler warns once. Sampling removes no rows. The field (and the rewards) of new rows are read once; after
    rows were changed or deleted, those of all rows are read again.

    The rows of a group are chosen as in RePO (Li et al. 2025, arXiv:2506.09340): at random, the newest, those
    with the highest rewards, or those whose rewards have the largest variance (if several choices have it,
    the one with the largest sum).

    Threads: any number may sample. Crashes: after a restart the next batch is the one that would have
    followed.

    Args:
        num_groups: Number of groups in a batch; the batch size must be a multiple of it. Pass either this or
            `samples_per_group`.
        samples_per_group: Number of rows from each group; the batch size must be a multiple of it. Pass
            either this or `num_groups`.
        group_key: The field that identifies groups: numbers or text.
        strategy: How the rows of a group are chosen: "random", "recency" (the newest), "reward" (the highest
            rewards) or "variance" (the largest variance of rewards).
        reward_key: The field with rewards, for "reward" and "variance"; several rewards of one row are
            averaged.
        cache_groups: Accepted for compatibility with TorchRL. Groups are always cached, and changes are
            always noticed.
        split: The split whose rows are drawn; None for the rows of all splits.

    Raises:
        ArgumentError: Both or neither of `num_groups` and `samples_per_group` are given, or the number is not
            an integer; the number is below 1, or `strategy` is unknown.

    Example:
        >>> from expstore import MemoryStorage, PromptGroupSampler, TensorDictReplayBuffer
        >>> sampler = PromptGroupSampler(num_groups=2, group_key="prompt")
        >>> rb = TensorDictReplayBuffer(storage=MemoryStorage(100), sampler=sampler, batch_size=8)
    """

    keeps_to_split = True
    _transient = frozenset({"_lock", "_known", "_filtered"})

    def __init__(
        self,
        *,
        num_groups: int | None = None,
        samples_per_group: int | None = None,
        group_key: str | Key = "query",
        strategy: Strategy = "random",
        reward_key: str | Key = ("next", "reward"),
        cache_groups: bool = True,
        split: str | None = "train",
    ) -> None:
        super().__init__(split=split)
        if (num_groups is None) == (samples_per_group is None):
            raise ArgumentError(
                "Exactly one of num_groups or samples_per_group must be provided, got "
                f"num_groups={num_groups} and samples_per_group={samples_per_group}."
            )
        name, value = ("num_groups", num_groups) if samples_per_group is None else (
            "samples_per_group", samples_per_group
        )  # fmt: skip
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise ArgumentError(f"{name} must be a positive integer, got {value!r}.")
        if value < 1:
            raise ArgumentError(f"{name} must be a positive integer, got {value!r}.")
        if strategy not in _STRATEGIES:
            raise ArgumentError(f"Unknown strategy={strategy!r}. Expected one of {', '.join(_STRATEGIES)}.")
        self.num_groups, self.samples_per_group = num_groups, samples_per_group
        self.group_key, self.reward_key, self.strategy = group_key, reward_key, strategy
        self.cache_groups = cache_groups
        self._warned = False
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._known: _Groups | None = None
        self._filtered: Filter | None = None

    def sizes(self, batch_size: int) -> tuple[int, int]:
        """Return the number of groups in a batch, and the number of rows from each.

        Raises:
            ArgumentError: The batch size is not a multiple of `num_groups` or `samples_per_group`.
        """
        number = self.num_groups or self.samples_per_group or 1
        if batch_size % number:
            word = "samples_per_group" if self.num_groups is None else "num_groups"
            raise ArgumentError(f"batch_size={batch_size} is not divisible by {word}={number}.")
        rest = batch_size // number
        return (rest, number) if self.num_groups is None else (number, rest)

    @property
    def reads(self) -> frozenset[Key]:
        """The fields that the sampler itself reads: the groups' field, and rewards if they are needed."""
        needs = self.strategy in ("reward", "variance")
        return frozenset(map(to_key, [self.group_key, *([self.reward_key] if needs else [])]))

    def select(self, storage: ReadView, batch_size: int, generator: np.random.Generator) -> Selection:
        """Choose groups, and rows of each group.

        Raises:
            NotReadyError: The storage is empty.
            SchemaError: A field does not exist.
            ArgumentError: The rewards are not numbers; the batch size is not a multiple of `num_groups` or
                `samples_per_group`, or the storage has several dims.
        """
        groups, rows = self.sizes(batch_size)
        readable(storage)
        if storage.ndim > 1:
            raise ArgumentError(
                f"{type(self).__name__} only supports single-dimensional storages, got ndim={storage.ndim}."
            )
        with self._lock:
            found = self._follow(storage)
            if not found.ages:
                raise self.build_no_rows_error(storage)
            chosen = self._fill_up(len(found.ages), groups, generator)
            parts = [found.by_value[found.ages[number][1]].read() for number in chosen]
        return Selection(np.concatenate([self._choose_rows(*part, rows, generator) for part in parts]))

    def _fill_up(self, items: int, count: int, generator: np.random.Generator) -> IntArray:
        """Return `count` numbers below `items` in random order; if there are fewer, some of them again."""
        if items >= count:
            return generator.choice(items, count, replace=False)
        if not self._warned:
            self._warned = True
            warnings.warn(
                "A group (or the set of groups) was smaller than the requested sample size; completing the "
                "draw with replacement. Add more data or lower num_groups/samples_per_group to avoid this.",
                UserWarning,
                stacklevel=2,
            )
        again = generator.integers(0, items, count - items)
        return np.concatenate([generator.permutation(items), again])

    def _choose_rows(
        self, ids: IntArray, rewards: Array, count: int, generator: np.random.Generator
    ) -> IntArray:
        """Return `count` rows of a group. Shapes `(n,)`."""
        if ids.size < count or self.strategy == "random":
            return ids[self._fill_up(ids.size, count, generator)]
        if self.strategy == "recency":
            return ids[-count:]
        order = np.argsort(rewards, kind="stable")
        if self.strategy == "reward":
            highest: IntArray = ids[order[::-1][:count]]
            return highest
        low = _most_varied(rewards[order], count)
        found: IntArray = ids[np.concatenate([order[:low], order[order.size - (count - low) :]])]
        return found

    def _follow(self, storage: ReadView) -> _Groups:
        """Return the groups of the rows that can be read now."""
        filter, groups = self.filter, self._known
        if filter is not None:
            filter.look(storage)
        window = storage.window if filter is None else filter.readable(storage)
        kept = (
            storage.version,
            filter,
        )  # rows of other splits may be in groups that were made without a filter
        if groups is None or groups.of() is not storage or (groups.version, self._filtered) != kept:
            groups = _Groups(storage)
        self._known = None  # after an interruption all rows are read again
        if window.last > groups.last:
            new = Window(max(window.low, groups.last), window.last, window.deleted).ids()
            if filter is not None:
                new = new[filter.masses_of(storage, new) > 0]
            if new.size:
                groups.add(*self._read(storage, new))
            groups.last = window.last
        groups.forget(window.low)
        self._known, self._filtered = groups, filter
        return groups

    def _read(self, storage: ReadView, ids: IntArray) -> tuple[IntArray, Any, Array | None]:
        """Return the ids of those rows that can be read, their values, and their rewards if needed."""
        needs = self.strategy in ("reward", "variance")
        keys = [to_key(self.group_key), *([to_key(self.reward_key)] if needs else [])]
        if storage.row_traits.whole:
            ids, (items,) = read_present(storage, ids, [0])
            columns = [_of_items(items, key) for key in keys]
        else:
            schema = storage.require_schema()
            ids, columns = read_present(storage, ids, [schema.place_of(key) for key in keys])
            if needs and schema[keys[1]].dtype == "bfloat16":
                columns[1] = widen_bfloat16(columns[1])
        if not needs:
            return ids, columns[0], None
        if not isinstance(columns[1], np.ndarray) or columns[1].dtype.kind not in "fiub":
            raise ArgumentError(
                f"The {self.strategy!r} strategy requires reward_key={self.reward_key} to hold numbers."
            )
        return ids, columns[0], columns[1].reshape(ids.size, -1).astype(np.float64).mean(1)

    def __repr__(self) -> str:
        number = (
            f"num_groups={self.num_groups}"
            if self.num_groups
            else f"samples_per_group={self.samples_per_group}"
        )
        return f"PromptGroupSampler({number}, group_key={self.group_key!r}, strategy={self.strategy!r})"


def _most_varied(rewards: Array, count: int) -> int:
    """Return how many of the lowest rewards make the variance largest, the others being the highest.

    Args:
        rewards: Rewards of a group, in ascending order. Shape `(n,)`.
        count: Number of rewards to choose.
    """
    low = np.arange(count + 1)
    sums = np.append(0.0, np.cumsum(rewards))
    squares = np.append(0.0, np.cumsum(np.square(rewards)))
    high = rewards.size - (count - low)
    total = sums[low] + sums[-1] - sums[high]
    spread = (squares[low] + squares[-1] - squares[high]) / count - np.square(total / count)
    widest = np.isclose(spread, spread.max(), rtol=1e-12, atol=1e-12)
    return int(np.argmax(np.where(widest, total, -np.inf)))


def _number(column: Any) -> tuple[list[Any], IntArray]:
    """Return the values that occur, and the number of each row's value. Shape in `(n, ...)`, out `(n,)`."""
    if not isinstance(column, np.ndarray) or column.dtype.kind == "O":
        values = column.tolist() if isinstance(column, np.ndarray) else column.to_pylist()
        known: dict[Any, int] = {}
        numbers = np.array([known.setdefault(_hashable(value), len(known)) for value in values], np.int64)
        return list(known), numbers
    flat = column.reshape(len(column), -1)
    found, numbers = np.unique(flat if flat.shape[1] > 1 else flat[:, 0], axis=0, return_inverse=True)
    names = [_hashable(name) if name == name else None for name in found.tolist()]  # NaN equals NaN
    return names, numbers.reshape(-1)


def _hashable(value: Any) -> Any:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return tuple((name, _hashable(part)) for name, part in value.items())
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


def _of_items(items: Array, key: Key) -> Array:
    """Return an entry of rows that are TensorDicts, stored as one object each."""
    values = np.empty(items.size, object)
    for number, item in enumerate(items.tolist()):
        get = getattr(item, "get", None)
        found = None if get is None else get(key if len(key) > 1 else key[0])
        if found is None:
            raise SchemaError(f"a row has no {key_name(key)!r}: {type(item).__name__}")
        values[number] = _hashable(found)
    try:
        numbers = np.array(values.tolist())
    except ValueError:
        return values
    return numbers if numbers.dtype.kind in "fiub" else values
