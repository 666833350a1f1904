"""The class `Trajectory`, and conditions on trajectories: `traj.reward.sum() > 100`.

Used by `rb.query`, and by users on plain TensorDicts. It never reads a store.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorClass, TensorDictBase, is_non_tensor

from expstore.core.values import IntArray, Key, to_key
from expstore.errors import ArgumentError, NotFoundError

#: The fields that identify trajectories, and the flags that end them, by default.
NAMES: tuple[Key, ...] = (("collector", "traj_ids"), ("traj_ids",), ("episode",))
_ENDS = ("done", "terminated", "truncated")


class Trajectory(TensorClass["nocast"]):  # type: ignore[misc, name-defined]
    """The transitions of one trajectory, in the order of its steps.

    `trajectory.reward` is the entry `reward`, or else `("next", "reward")`; `trajectory["next", "reward"]` is
    that entry itself. Slices of a trajectory are trajectories. `tensordict.lazy_stack` makes one batch of
    trajectories of different lengths. Threads, processes and crashes: as the TensorDict in it.

    Args:
        data: The transitions. One batch dim.

    Raises:
        ArgumentError: `data` does not have exactly one batch dim.

    Example:
        >>> from expstore.trajectories import Trajectory
        >>> trajectory = Trajectory(TensorDict({"reward": torch.ones(3)}, [3]))
        >>> trajectory.length, trajectory.total_reward
        (3, tensor(3.))
    """

    data: TensorDictBase
    if TYPE_CHECKING:
        batch_size: torch.Size

    def __post_init__(self) -> None:
        """Set the batch size to that of the data."""
        if not self.batch_size and self.data is not None and self.data.batch_dims:
            if self.data.batch_dims != 1:
                raise ArgumentError(
                    "Trajectory expects data with a single batch dimension, got "
                    f"batch_size={self.data.batch_size}."
                )
            self.batch_size = self.data.batch_size

    @property
    def length(self) -> int:
        """The number of transitions."""
        return int(self.batch_size[0])

    @property
    def total_reward(self) -> torch.Tensor:
        """The sum of all rewards. Shape `()`."""
        return torch.as_tensor(self.reward).sum()

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the entry `key` of the root, or else of `next`; `default` if neither has it."""
        value = find_entry(self.data, key)
        return default if value is None else value

    def keys(self, *args: Any, **options: Any) -> Any:
        """Return the keys of the TensorDict, with the arguments of `TensorDict.keys`."""
        return self.data.keys(*args, **options)


def find_entry(data: TensorDictBase, key: Any) -> Any:
    """Return the entry `key` of the root, or else of `next`; None if neither has it."""
    for place in (key, ("next", key)) if isinstance(key, str) else (key,):
        value = data.get(place, None)
        if value is not None:
            return value
    return None


# `tensorclass` adds these methods when it creates the class, so they are extended afterwards.
_own_getattr, _own_getitem = Trajectory.__getattr__, Trajectory.__getitem__


def _getattr(self: Any, name: str) -> Any:
    try:
        return _own_getattr(self, name)
    except AttributeError:
        if name.startswith("_"):
            raise
        value = self.get(name)
        if value is None:
            there = sorted(map(str, self.data.keys(include_nested=True, leaves_only=True)))
            raise AttributeError(
                f"Trajectory has no entry {name!r} at its root or below 'next'; it has {there}"
            ) from None
        return value


def _getitem(self: Any, index: Any) -> Any:
    if isinstance(index, str) or (isinstance(index, tuple) and index and isinstance(index[0], str)):
        return self.data[index]
    return _own_getitem(self, index)


def _repr(self: Any) -> str:
    size = f"length={self.length}" if len(self.batch_size) == 1 else f"batch_size={tuple(self.batch_size)}"
    return f"Trajectory({size}, keys={sorted(map(str, self.data.keys()))})"


for _method in (_getattr, _getitem, _repr):
    setattr(Trajectory, f"_{_method.__name__}__", _method)

# -- conditions ---------------------------------------------------------------------------------------

#: The fields that an expression reads; None if they are unknown.
Keys = frozenset[str | Key] | None


def _join_keys(first: Keys, second: Keys) -> Keys:
    return None if first is None or second is None else first | second


class TrajectoryPredicate:
    """A condition on trajectories; combine conditions with `&`, `|` and `~`.

    Threads: any number may call it. Crashes: it stores nothing.

    Args:
        fn: Returns whether a trajectory meets the condition.
        description: Text for its `repr`.
        keys: The fields that it reads; None if they are unknown.

    Example:
        >>> from expstore.trajectories import Trajectory, traj
        >>> condition = (traj.reward.sum() > 2) & (traj.length < 200)
        >>> condition(Trajectory(TensorDict({"reward": torch.ones(3)}, [3])))
        True
    """

    def __init__(self, fn: Callable[[Any], Any], description: str = "predicate", keys: Keys = None) -> None:
        self._fn, self._text, self._keys = fn, description, keys

    def required_keys(self) -> Keys:
        """Return the fields that the condition reads; None if they are unknown."""
        return self._keys

    def __call__(self, trajectory: Any) -> bool:
        """Return whether a trajectory meets the condition."""
        return bool(self._fn(trajectory))

    def __and__(self, other: TrajectoryPredicate) -> TrajectoryPredicate:
        return self._with(other, "&", lambda t: self(t) and other(t))

    def __or__(self, other: TrajectoryPredicate) -> TrajectoryPredicate:
        return self._with(other, "|", lambda t: self(t) or other(t))

    def _with(self, other: Any, sign: str, fn: Callable[[Any], bool]) -> TrajectoryPredicate:
        if not isinstance(other, TrajectoryPredicate):
            if isinstance(other, _PerStep):
                other()
            raise ArgumentError(f"{self!r} {sign} {other!r}: both must be conditions made of traj")
        kind = _kind_of(self, other)
        return kind(fn, f"({self._text} {sign} {other._text})", _join_keys(self._keys, other._keys))

    def __invert__(self) -> TrajectoryPredicate:
        return _kind_of(self)(lambda t: not self(t), f"~{self._text}", self._keys)

    def __bool__(self) -> bool:
        raise ArgumentError(f"{self._text} has no truth value by itself: combine conditions with &, | and ~")

    def __repr__(self) -> str:
        return f"TrajectoryPredicate({self._text})"


class Condition(TrajectoryPredicate):
    """A condition built from `traj` only.

    It uses no attributes of a trajectory but `get`, `length`, `total_reward` and, if there is one, `reduced`.
    """


def _kind_of(*parts: TrajectoryPredicate) -> type[TrajectoryPredicate]:
    """Return the class of a condition that is built from these conditions."""
    return Condition if all(isinstance(part, Condition) for part in parts) else TrajectoryPredicate


class _Expression:
    """A value that is computed from a trajectory."""

    def __init__(self, value: Callable[[Any], Any], text: str, keys: Keys) -> None:
        self._value, self._text, self._keys = value, text, keys

    def _compare(self, compare: Callable[[Any, Any], Any], sign: str, other: Any) -> Any:
        value, keys = self._value, self._keys
        text = f"({self._text} {sign} {other!r})"
        if isinstance(other, _Expression):
            given, keys = other._value, _join_keys(keys, other._keys)
            text = f"({self._text} {sign} {other._text})"
            return self._result(lambda t: compare(value(t), given(t)), text, keys)
        return self._result(lambda t: compare(value(t), other), text, keys)

    def _result(self, fn: Callable[[Any], Any], text: str, keys: Keys) -> Any:
        return Condition(fn, text, keys)

    def __gt__(self, other: Any) -> Any:
        return self._compare(operator.gt, ">", other)

    def __ge__(self, other: Any) -> Any:
        return self._compare(operator.ge, ">=", other)

    def __lt__(self, other: Any) -> Any:
        return self._compare(operator.lt, "<", other)

    def __le__(self, other: Any) -> Any:
        return self._compare(operator.le, "<=", other)

    def __eq__(self, other: object) -> Any:
        return self._compare(operator.eq, "==", other)

    def __ne__(self, other: object) -> Any:
        return self._compare(operator.ne, "!=", other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return self._text


class _PerStep(_Expression):
    """An expression with one value per step: a field, or a comparison with a field."""

    def any(self) -> TrajectoryPredicate:
        """Return a condition that is met if the values are true at any step."""
        return Condition(lambda t: self._value(t).any(), f"{self._text}.any()", self._keys)

    def all(self) -> TrajectoryPredicate:
        """Return a condition that is met if the values are true at every step."""
        return Condition(lambda t: self._value(t).all(), f"{self._text}.all()", self._keys)

    def _result(self, fn: Callable[[Any], Any], text: str, keys: Keys) -> Any:
        return _PerStep(fn, text, keys)

    def __call__(self, trajectory: Any = None) -> bool:
        """Raise an error: values per step are not a condition.

        Raises:
            ArgumentError: Always.
        """
        raise ArgumentError(
            f"{self._text} compares per-transition values and is ambiguous as a trajectory filter. Call "
            ".any() or .all() to reduce it to a single boolean."
        )


class _Field(_PerStep):
    """A field of a trajectory."""

    def __init__(self, key: Any, text: str) -> None:
        path = to_key(key)
        key = path if len(path) > 1 else path[0]
        self._key = key

        def value(trajectory: Any) -> Any:
            found = trajectory.get(key)
            if found is None:
                raise NotFoundError(f"Key {key!r} not found in trajectory (at its root, or below 'next').")
            return found

        super().__init__(value, text, frozenset({key}))

    def _reduce(self, reduce: Callable[[Any], Any], word: str) -> _Expression:
        key = self._key

        def reduce_field(trajectory: Any) -> Any:
            known = trajectory.reduce_field(key, word) if hasattr(trajectory, "reduce_field") else None
            return reduce(self._value(trajectory)) if known is None else known

        return _Expression(reduce_field, f"{self._text}.{word}()", self._keys)

    def sum(self) -> _Expression:
        """Return the sum of all its values, as an expression."""
        return self._reduce(torch.sum, "sum")

    def mean(self) -> _Expression:
        """Return the mean of all its values, as an expression."""
        return self._reduce(lambda values: values.double().mean(), "mean")

    def max(self) -> _Expression:
        """Return the largest of all its values, as an expression."""
        return self._reduce(torch.max, "max")

    def min(self) -> _Expression:
        """Return the smallest of all its values, as an expression."""
        return self._reduce(torch.min, "min")

    def first(self) -> _Expression:
        """Return its value at the first step, as an expression."""
        return self._reduce(lambda values: _plain(values[0]), "first")

    def last(self) -> _Expression:
        """Return its value at the last step, as an expression."""
        return self._reduce(lambda values: _plain(values[-1]), "last")


def _plain(value: Any) -> Any:
    """Return the text that tensordict wraps, because its wrapper cannot be compared."""
    return value.data if is_non_tensor(value) else value


class _Trajectories:
    """Build expressions: `traj.reward` is a field of every trajectory, `traj["next", "reward"]` a nested one.

    Fields have the methods `sum`, `mean`, `max`, `min`, `first` and `last`. A comparison with a field has one
    value per step; `any` or `all` makes it a condition. `traj.length` and `traj.total_reward` are numbers.
    """

    @property
    def length(self) -> _Expression:
        """The number of transitions."""
        return _Expression(lambda t: t.length, "traj.length", frozenset())

    @property
    def total_reward(self) -> _Expression:
        """The sum of all rewards. Shape `()`."""
        return _Expression(lambda t: t.total_reward, "traj.total_reward", frozenset({"reward"}))

    def __getattr__(self, name: str) -> _Field:
        if name.startswith("_"):
            raise AttributeError(name)
        return _Field(name, f"traj.{name}")

    def __getitem__(self, key: str | tuple[str, ...]) -> _Field:
        """Return a field by its key."""
        return _Field(key, f"traj[{key!r}]")

    def __repr__(self) -> str:
        return "traj"


traj = _Trajectories()


def check_predicate(predicate: Any) -> None:
    """Check that a value is a condition on trajectories.

    Raises:
        ArgumentError: It has a value per step instead of one per trajectory, or it is not a condition.
    """
    if isinstance(predicate, _PerStep):
        predicate()
    if predicate is not None and not callable(predicate):
        raise ArgumentError(
            f"a condition must be built from traj or be a function of a trajectory; got {predicate!r}",
            hint="write traj.length > 10; rb.episodes and rb.sql take conditions in SQL",
        )


# -- plain data ---------------------------------------------------------------------------------------


def split(data: TensorDictBase, trajectory_key: str | Key | None = None) -> tuple[IntArray, IntArray]:
    """Find the trajectories in consecutive rows.

    Args:
        data: The rows. One batch dim.
        trajectory_key: The field that identifies trajectories; None for the first of `NAMES` that exists, or
            else for the flags that end trajectories, with a warning.

    Returns:
        The first row of each trajectory, and the row after its last one. Shapes `(trajectories,)`.

    Raises:
        NotFoundError: The field does not exist, or no field identifies or ends trajectories.
    """
    rows = data.batch_size[0]
    names = NAMES if trajectory_key is None else (to_key(trajectory_key),)
    found = next((ids for ids in (_flat(data, key) for key in names) if ids is not None), None)
    if found is None and trajectory_key is not None:
        raise NotFoundError(f"trajectory_key {trajectory_key!r} not found in data.")
    cuts = _ends(data)[:-1] if found is None else found[1:] != found[:-1]
    starts = np.concatenate([np.zeros(min(rows, 1), np.int64), np.flatnonzero(cuts) + 1])
    return starts, np.append(starts[1:], rows)[: starts.size]


def _flat(data: TensorDictBase, key: Key) -> Any:
    values = data.get(key if len(key) > 1 else key[0], None)
    return None if values is None else values.reshape(data.batch_size[0]).cpu().numpy()


def _ends(data: TensorDictBase) -> Any:
    """Return which rows end a trajectory, by the flags below `next`, or else by those at the root."""
    for group in (("next",), ()):
        keys = [(*group, name) for name in _ENDS]
        flags = {key: flag for key in keys if (flag := _flat(data, key)) is not None}
        if flags:
            warnings.warn(
                "No field identifies trajectories: they are split at the end-of-episode flags "
                f"{list(flags)}. A trajectory whose last row has no flag is joined with the next one; pass "
                "trajectory_key, or store trajectory ids.",
                UserWarning,
                stacklevel=4,
            )
            return np.logical_or.reduce([flag.astype(np.bool_) for flag in flags.values()])
    raise NotFoundError(
        "Cannot split data into trajectories: there is no field that identifies them "
        f"{[*NAMES]} or ends them {[*_ENDS]}",
        hint="pass trajectory_key",
    )


def iter_trajectories(data: Any, trajectory_key: str | Key | None = None) -> Iterator[Any]:
    """Yield the trajectories in a batch of consecutive rows.

    Args:
        data: A TensorDict with one batch dim.
        trajectory_key: The field that identifies trajectories; None for `("collector", "traj_ids")`,
            `traj_ids` or `episode`, or else for the flags that end trajectories, with a warning.

    Raises:
        NotFoundError: The field does not exist, or no field identifies or ends trajectories.
        ArgumentError: `data` is not a TensorDict; `data` does not have exactly one batch dim.

    Example:
        >>> from expstore.trajectories import iter_trajectories
        >>> data = TensorDict({"episode": torch.tensor([0, 0, 1]), "reward": torch.ones(3)}, [3])
        >>> [trajectory.length for trajectory in iter_trajectories(data)]
        [2, 1]
    """
    if not isinstance(data, TensorDictBase):
        raise ArgumentError(
            f"iter_trajectories expects a TensorDictBase, got {type(data)}; other data has no fields"
        )
    if data.batch_dims != 1:
        raise ArgumentError(
            "iter_trajectories expects data with a single batch dimension (flat transitions), got "
            f"batch_size={data.batch_size}."
        )
    if data.batch_size[0]:
        starts, stops = split(data, trajectory_key)
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            yield Trajectory(data[start:stop])


def filter_trajectories(
    data: Any, predicate: Callable[[Any], Any] | None = None, *, trajectory_key: str | Key | None = None
) -> list[Any]:
    """Return the trajectories in a batch that meet a condition.

    Args:
        data: A TensorDict with one batch dim, whose rows are consecutive.
        predicate: A condition built from `traj`, or a function of a trajectory; None for all trajectories.
        trajectory_key: The field that identifies trajectories; None for `("collector", "traj_ids")`,
            `traj_ids` or `episode`, or else for the flags that end trajectories, with a warning.

    Raises:
        NotFoundError: The field does not exist, or no field identifies or ends trajectories.
        ArgumentError: `data` is not a TensorDict, or the condition has a value per step; `data` does not have
            exactly one batch dim.

    Example:
        >>> from expstore.trajectories import filter_trajectories, traj
        >>> data = TensorDict({"episode": torch.tensor([0, 0, 1]), "reward": torch.ones(3)}, [3])
        >>> len(filter_trajectories(data, traj.reward.sum() > 1))
        1
    """
    check_predicate(predicate)
    every: Sequence[Any] = list(iter_trajectories(data, trajectory_key))
    return [one for one in every if predicate is None or predicate(one)]
