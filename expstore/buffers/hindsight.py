"""Hindsight experience replay: sample rows whose goals are replaced by goals that were achieved later.

Goals are drawn from the rows of an episode or of the store, in whatever order rows were written. Stored rows
are not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from tensordict import TensorDictBase

from expstore.buffers.tensordict import TensorDictReplayBuffer
from expstore.core.values import Array, IntArray, Key, Selection, check_key, key_name, to_key
from expstore.errors import ArgumentError, NotFoundError, SchemaError, StateError
from expstore.samplers.base import Sampler, readable
from expstore.samplers.keyed_trajectories import Trajectories
from expstore.samplers.names import SamplerName
from expstore.transforms import StepTransform, StepView

if TYPE_CHECKING:
    from expstore.schema.schema import Field, Schema
    from expstore.storages.read_view import ReadView
    from expstore.storages.run_index import Runs

_DONE: Key = ("next", "done")


class HindsightStrategy(StrEnum):
    """Where a row's new goal comes from. All rows that qualify have the same probability.

    Example:
        >>> from expstore import HindsightStrategy
        >>> HindsightStrategy("final") is HindsightStrategy.FINAL
        True
    """

    #: The goal achieved in this step or a later step of the row's episode.
    FUTURE = "future"
    #: The goal achieved in the last readable step of the row's episode.
    FINAL = "final"
    #: The goal achieved in any step of the row's episode.
    EPISODE = "episode"
    #: The goal achieved in any row of the store.
    RANDOM = "random"


def _setting(name: str, doc: str) -> Any:
    """Return a property for a setting of `HindsightGoals`; a new value applies to the next batch."""

    def read(buffer: HERReplayBuffer) -> Any:
        return getattr(buffer._goals, name)

    def write(buffer: HERReplayBuffer, value: Any) -> None:
        buffer._goals.change(name, value)

    return property(read, write, doc=doc)


class HERReplayBuffer(TensorDictReplayBuffer):
    """Sample rows, a part of them with goals that were actually achieved.

    The first `int(her_ratio * n)` rows of a batch get the `achieved_goal_key` of other rows as their goal, at
    the root and, if the goal is there too, below "next"; and the reward that `reward_fn` returns for them.
    Goals come from the row's own episode, also if its rows are interleaved with other workers and lanes, wrap
    around the end of the ring or were written before a restart, for storages of any `ndim`. Steps that were
    evicted or deleted give no goals.

    Like the rows of a batch, goals follow from the store's rows, its seed and the number of the draw. Rows
    are changed in samples only: `[]`, `trajectory`, `query` and `sql` return stored values, and priorities
    are set on the rows that were drawn. Transforms are applied after the new goals, except transforms that
    read other steps, which get stored values: after a `MultiStepTransform` a row covers n steps, and its
    reward is the result of `reward_fn` for the whole row, not a sum.

    Threads, processes and crashes: as `TensorDictReplayBuffer`. With `prefetch`, `reward_fn` is called in
    another thread, and must be thread-safe.

    Andrychowicz et al. 2017, "Hindsight Experience Replay", arXiv:1707.01495.

    Args:
        reward_fn: Function of the rows that have new goals, as a TensorDict; returns their rewards. Shape
            `(n,)` or `(n, 1)`.
        her_ratio: Fraction of the rows of a batch that get new goals. From 0 to 1.
        strategy: Where goals come from.
        goal_key: The field with the goal.
        achieved_goal_key: The field with the achieved goal.
        reward_key: The field with the reward.
        end_key: The field that ends episodes, or "terminated" in the same group. With the default ("next",
            "done") the store's own episodes are used.
        sampler: How the rows of a batch are chosen; uniform by default.
        keywords: As in `TensorDictReplayBuffer`.

    Raises:
        ArgumentError: `reward_fn` cannot be called, the ratio is not a number, or the name of a field is not
            a key; the ratio is out of bounds, or there is no such strategy.

    Example:
        >>> from expstore import HERReplayBuffer, MemoryStorage
        >>> def reached(rows):
        ...     return (rows["achieved_goal"] - rows["desired_goal"]).norm(dim=-1, keepdim=True) < 0.05
        >>> rb = HERReplayBuffer(reached, storage=MemoryStorage(100), batch_size=4)
        >>> goals = {"desired_goal": torch.zeros(3, 2), "achieved_goal": torch.rand(3, 2)}
        >>> next_ = {"reward": torch.zeros(3, 1), "done": torch.tensor([[False], [False], [True]])}
        >>> rb.extend(TensorDict({**goals, "next": next_}, [3]))
        tensor([0, 1, 2])
        >>> rb.sample()["next", "reward"].shape
        torch.Size([4, 1])
    """

    def __init__(
        self,
        reward_fn: Callable[[TensorDictBase], torch.Tensor],
        *,
        her_ratio: float = 0.8,
        strategy: HindsightStrategy | Literal["future", "final", "episode", "random"] = "future",
        goal_key: str | tuple[str, ...] = "desired_goal",
        achieved_goal_key: str | tuple[str, ...] = "achieved_goal",
        reward_key: str | tuple[str, ...] = ("next", "reward"),
        end_key: str | tuple[str, ...] = _DONE,
        sampler: Sampler | SamplerName | Callable[[], Sampler] | None = None,
        **keywords: Any,
    ) -> None:
        if not callable(reward_fn):
            raise ArgumentError(f"reward_fn must be a function of rows, got {reward_fn!r}")
        for argument, key in (
            ("goal_key", goal_key), ("achieved_goal_key", achieved_goal_key), ("reward_key", reward_key),
            ("end_key", end_key),
        ):  # fmt: skip
            check_key(argument, key)
        goals = HindsightGoals(reward_fn, goal_key, achieved_goal_key, reward_key, end_key)
        goals.set_ratio(her_ratio)
        goals.set_strategy(strategy)
        self._goals = goals
        super().__init__(sampler=sampler, **keywords)
        relabel(self, goals)

    reward_fn = _setting("reward_fn", "Function that returns the rewards of rows with new goals.")
    goal_key = _setting("goal_key", "The field with the goal.")
    achieved_goal_key = _setting("achieved_goal_key", "The field with the achieved goal.")
    reward_key = _setting("reward_key", "The field with the reward.")

    @property
    def end_key(self) -> str | tuple[str, ...]:
        """The field that ends episodes."""
        return self._goals.end_key

    @property
    def her_ratio(self) -> float:
        """The fraction of rows with new goals; a new value applies to the next batch."""
        return self._goals.ratio

    @her_ratio.setter
    def her_ratio(self, ratio: float) -> None:
        self._goals.set_ratio(ratio)

    @property
    def strategy(self) -> HindsightStrategy:
        """Where goals come from; a new value applies to the next batch."""
        return self._goals.strategy

    @strategy.setter
    def strategy(self, strategy: HindsightStrategy | str) -> None:
        self._goals.set_strategy(strategy)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for `load_state_dict`, including the settings of goals."""
        return super().state_dict() | {"_her": self._goals.settings()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`; see `ReplayBuffer.load_state_dict`.

        Raises:
            StateError: The state does not fit, or the buffer has other settings of goals; nothing was
                changed.
        """
        self._goals.check_settings(state_dict.get("_her"))
        super().load_state_dict(state_dict)

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in self._goals.settings().items())
        return f"{type(self).__name__}({settings}, storage={self.storage!r})"


def relabel(rb: TensorDictReplayBuffer, goals: HindsightGoals) -> None:
    """Replace goals in all batches of a buffer from now on, as a `HERReplayBuffer` does."""
    rb._sampling.relabel_by(goals)


class HindsightGoals:
    """Replace the goals of a part of each batch. The implementation of `HERReplayBuffer`.

    Args:
        reward_fn: As in `HERReplayBuffer`.
        goal_key: The field with the goal.
        achieved_goal_key: The field with the achieved goal.
        reward_key: The field with the reward.
        end_key: The field that ends episodes.
    """

    def __init__(
        self,
        reward_fn: Callable[[TensorDictBase], torch.Tensor],
        goal_key: str | tuple[str, ...],
        achieved_goal_key: str | tuple[str, ...],
        reward_key: str | tuple[str, ...],
        end_key: str | tuple[str, ...],
    ) -> None:
        self.reward_fn = reward_fn
        self.goal_key = goal_key
        self.achieved_goal_key = achieved_goal_key
        self.reward_key = reward_key
        self.end_key = end_key
        #: Fraction of the rows of a batch that get new goals.
        self.ratio = 0.0
        #: Where goals come from.
        self.strategy = HindsightStrategy.FUTURE
        end = to_key(end_key)
        self._ends = end, (*end[:-1], "terminated")
        self._trajectories = Trajectories(ends=self._ends)
        self._checked: Schema | None = None
        #: Counts changes of the settings; see `Relabeling`.
        self.changes = 0

    def change(self, name: str, value: Any) -> None:
        """Set `reward_fn`, or a key other than `end_key`."""
        setattr(self, name, value)
        self._checked = None
        self.changes += 1

    def set_ratio(self, ratio: float) -> None:
        """Set the fraction of the rows of a batch that get new goals."""
        try:
            inside = 0.0 <= ratio <= 1.0
        except TypeError:
            raise ArgumentError(
                f"her_ratio must be the fraction of rows that get new goals, from 0 to 1, got {ratio!r}"
            ) from None
        if not inside:
            raise ArgumentError(f"her_ratio must be in [0, 1], got {ratio}")
        self.ratio = ratio
        self.changes += 1

    def set_strategy(self, strategy: HindsightStrategy | str) -> None:
        """Set where goals come from."""
        self.strategy = HindsightStrategy(strategy)
        self.changes += 1

    def look(
        self, storage: ReadView, rows: Selection, generator: np.random.Generator, view: StepView | None
    ) -> StepView | None:
        """Return a view that has read the rows that give the goals; see `Relabeling.look`."""
        count = int(rows.ids.size * self.ratio)
        if not count:
            return view
        if view is None:
            view = StepView(storage, rows.ids, generator, newest=rows.newest)
        self._check_fields(storage)
        goals = _Goals(
            self.reward_fn,
            self.strategy,
            count,
            to_key(self.goal_key),
            to_key(self.achieved_goal_key),
            to_key(self.reward_key),
            self._runs_of(storage),
        )
        view.show_to(goals)
        return view

    def user_of(self, key: Key) -> str | None:
        """Return "the choice of goals" if it reads a field, otherwise None; see `Relabeling.user_of`."""
        own = {to_key(name) for name in (self.goal_key, self.achieved_goal_key, self.reward_key)}
        return "the choice of goals" if key in own or key in self._ends else None

    def settings(self) -> dict[str, Any]:
        """Return the settings, as values that JSON can store."""
        names = ("goal_key", "achieved_goal_key", "reward_key", "end_key")
        own = {name: getattr(self, name) for name in names}
        return own | {"her_ratio": self.ratio, "strategy": str(self.strategy)}

    def check_settings(self, settings: Any) -> None:
        """Raise StateError if a state was made with other settings."""
        if settings != self.settings():
            raise StateError(
                f"the state is of a buffer with goals by {settings}; this buffer has {self.settings()}",
                hint="load it into a buffer with the same settings",
            )

    def _check_fields(self, storage: ReadView) -> None:
        """Raise an error if the rows lack a field, or a goal cannot have the values of achieved goals."""
        schema = storage.require_schema()
        if schema is self._checked:
            return
        roles = {
            name: to_key(getattr(self, name)) for name in ("goal_key", "achieved_goal_key", "reward_key")
        }
        missing = [f"  {name}={getattr(self, name)!r}" for name, key in roles.items() if key not in schema]
        if missing:
            raise NotFoundError(
                "The following keys are not present in storage:\n"
                + "\n".join(missing)
                + "\nEnsure they are stored in every transition before sampling."
            )
        goal, achieved = schema[roles["goal_key"]], schema[roles["achieved_goal_key"]]
        if goal.shape != achieved.shape or not np.can_cast(_numbers(achieved), _numbers(goal), "same_kind"):
            raise SchemaError(
                f"{key_name(roles['goal_key'])!r} is {goal}, but the field that replaces it, "
                f"{key_name(roles['achieved_goal_key'])!r}, is {achieved}",
                hint="store achieved goals with the dtype and shape of goals",
            )
        self._checked = schema

    def _runs_of(self, storage: ReadView) -> Runs:
        """Return the runs of steps that are the episodes."""
        keys, schema = storage.keys, storage.require_schema()
        told = (keys.done, keys.terminated, keys.truncated, keys.trajectory)
        if self._ends[0] == _DONE and any(key is not None for key in told):
            return storage.runs
        if not any(key in schema for key in self._ends):
            raise NotFoundError(
                f"Neither {self._ends[0]!r} nor {self._ends[1]!r} were found in storage. Ensure episode "
                "boundaries are stored under one of these keys."
            )
        return self._trajectories.of(storage)


def _numbers(entry: Field) -> np.dtype[Any]:
    """Return NumPy's dtype of the values of a field; float32 for bfloat16, of which NumPy has the bits."""
    if entry.variable:
        return np.dtype(object)
    return np.dtype(np.float32) if entry.dtype == "bfloat16" else entry.numpy_dtype


@dataclass(frozen=True)
class _Goals(StepTransform):
    """Set the goals of the first rows of one batch.

    Args:
        reward_fn: Function that returns the rewards of rows that have new goals.
        strategy: Where goals come from.
        count: Number of rows that get a new goal.
        goal: The field with the goal.
        achieved: The field with the achieved goal.
        reward: The field with the reward.
        runs: The steps of episodes.
    """

    reward_fn: Callable[[TensorDictBase], torch.Tensor]
    strategy: HindsightStrategy
    count: int
    goal: Key
    achieved: Key
    reward: Key
    runs: Runs

    def look(self, view: StepView) -> torch.Tensor:
        """Return the goals achieved in the rows that give the goals. Shape `(count, *goal)`."""
        return view.tensor(self._rows(view), self.achieved)

    def _rows(self, view: StepView) -> IntArray:
        """Return ids of the rows that give the goals. Shape `(count,)`."""
        ids, generator = view.ids[: self.count], view.generator
        if generator is None:
            raise StateError("goals are drawn with a batch: rows that are read by index have no new goals")
        if self.strategy is HindsightStrategy.RANDOM:
            window = readable(view.storage).until(view.newest)
            return window.nth(generator.integers(0, window.rows, ids.size))
        before, after = view.reach(ids, self.runs)
        if self.strategy is HindsightStrategy.FINAL:
            offsets: Array = after
        elif self.strategy is HindsightStrategy.EPISODE:
            offsets = generator.integers(-before, after + 1)
        else:
            offsets = generator.integers(0, after + 1)
        return view.at(ids, offsets[:, None], self.runs)[0][:, 0]

    def apply(self, batch: TensorDictBase, seen: torch.Tensor) -> TensorDictBase:
        """Write goals and rewards into the first rows of the batch, whose memory no other batch shares."""
        rows = batch[: self.count]
        for key in (self.goal, ("next", *self.goal)):
            goal = rows.get(key, None)
            if goal is not None:
                goal.copy_(seen)
        stored = rows.get(self.reward)  # the batch's, as `reward_fn` may change the rows
        reward = self._rewards(rows)
        if reward.numel() != stored.numel() or reward.shape[:1] != stored.shape[:1]:
            raise SchemaError(
                f"reward_fn returned rewards of shape {[*reward.shape]} for {self.count} rows with "
                f"{key_name(self.reward)!r} of shape {[*stored.shape]}",
                hint="return one reward for each row",
            )
        stored.copy_(reward.reshape(stored.shape))
        return batch

    def _rewards(self, rows: TensorDictBase) -> torch.Tensor:
        """Return the rewards that `reward_fn` gives some rows."""
        made = self.reward_fn(rows)
        try:
            return torch.as_tensor(made).detach()
        except (TypeError, ValueError, RuntimeError):
            raise ArgumentError(
                f"reward_fn returned {made!r} for {self.count} rows; return their rewards, a tensor of shape "
                f"({self.count},) or ({self.count}, 1)"
            ) from None
