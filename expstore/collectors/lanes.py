"""Collect transitions from one gymnasium environment into a buffer, K steps of every lane at a time.

Used by `expstore.Collector` in this process and in each worker process; needs the extra `expstore[gym]`. It
does not close the environment or the buffer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Protocol, Self

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from numpy.typing import NDArray
from tensordict import TensorDict

from expstore.collectors.environments import AnyVectorEnv
from expstore.collectors.space_fields import (
    SpaceField,
    autoreset_mode_of,
    describe_rows,
    fields_of,
    find_specs,
    put_final,
    read_values,
)
from expstore.core.values import Array, IntArray, Key, key_name
from expstore.episodes.facts import source_of_split
from expstore.errors import ArgumentError, ExpStoreError, SchemaError, StateError
from expstore.specs import TensorSpec

BoolArray = NDArray[np.bool_]

_MODES = ", ".join(repr(mode.value) for mode in AutoresetMode)
_FLAGS = ("done", "terminated", "truncated")


class EpisodeActs(Protocol):
    """The methods of `rb.episodes` that a collector uses."""

    def end_stream(self, source: str | None) -> None:
        """End the open episodes of one stream."""


class TransitionSink(Protocol):
    """The methods of a replay buffer that a collector uses."""

    @property
    def write_count(self) -> int:
        """The number of transitions ever stored; it changes exactly when an extend has stored its rows."""

    @property
    def episodes(self) -> EpisodeActs:
        """The episodes, which the collector ends."""

    def extend(
        self,
        data: TensorDict,
        *,
        source: str | None = None,
        episode_info: Mapping[str, Any] | None = None,
        split: str | None = None,
    ) -> Any:
        """Store the rows of `data`, all or none; rows with trajectory id -1 are dropped.

        Args:
            data: The rows of one stream, in the order of steps. Batch shape `(n,)`.
            source: Name of the stream.
            episode_info: Facts about the episodes that begin in these rows.
            split: The split of these episodes; only passed if the collector has one.
        """


#: Returns trajectory ids for positions of rows in the stream of a collector. Shapes `(n,)`, int64.
Numbering = Callable[[IntArray], IntArray]


#: Is called with how many transitions a block stored, and the returns of the episodes that ended in it.
OnBlock = Callable[[int, list[float]], None]


def count_from(first: int, step: int) -> Numbering:
    """Return a numbering that leaves out the ids of others: `first + step * position`."""
    return lambda positions: first + step * positions


class LaneCollector:
    """Run a policy in a gymnasium environment and store the same episodes under every autoreset mode.

    Steps are gathered in memory and stored in blocks: one `extend` of batch shape `(lanes, steps_per_lane)`,
    time last, so the steps of a lane are adjacent. Calls that only reset a lane are not transitions: their
    rows have trajectory id -1, and the buffer drops them. The trajectory id of an episode is the number of
    transitions stored before its first one, so ids are unique in a store.

    Stored per transition: `observation`, `action` and `("next", "observation")`; with shape `(1,)` `("next",
    "reward")` (float32) and `done`, `terminated`, `truncated` (bool, under `next` and, always False, at the
    root); and `("collector", "traj_ids")` (int64). Dict and Tuple spaces become nested keys, with "0", "1"
    and so on for the parts of a Tuple. If the store has no specs of its fields yet, the specs of these spaces
    are stored with the first rows (`rb.specs`).

    After an error or Ctrl-C in the policy every earlier step is intact: `close` stores these steps, or
    collecting continues. An error inside the environment's step loses that step, and all lanes begin new
    episodes. Ctrl-C while a block is stored loses the block if something else wrote to the buffer meanwhile;
    all lanes then begin new episodes. A collector must not be used from several threads at once.

    Args:
        env: A gymnasium vector environment, or a single `gymnasium.Env`, which is one lane.
        policy: Function from a batch of observations (arrays with a leading lane dimension, nested like the
            observation space) to a batch of actions (arrays or tensors, nested like the action space). None:
            random actions.
        rb: The buffer, from `expstore.open` or a constructor.
        steps_per_lane: Steps of each lane in one `extend`.
        source: Name of this stream of writes, as in `extend`.
        autoreset_mode: How lanes are reset, if `env.metadata` does not say it: "NextStep", "SameStep",
            "Disabled", or gymnasium's enum.
        seed: Seed of the first reset (lane i gets seed + i) and of the random actions. None: a different one
            each time.
        facts: Facts that are attached to every episode (`info` in SQL).
        first_facts: Further facts, attached to the first episode of each lane only.
        split: The split of the episodes; None for "train".
        policy_version: Store this number with each row, as the field `policy_version` (int64). It may be set
            later, from the next block on. None: there is no such field.
        numbering: Returns trajectory ids. None: positions count from the rows stored so far, so ids are
            unique in a store that nothing else writes to.
        pass_specs: Is called with the specs of the fields after the first rows were stored; None: they are
            stored in the buffer.
        on_block: Is called after each block, also after one that had no transitions; None: nothing is.

    Raises:
        ArgumentError: `env` is not a gymnasium environment, or `policy` is not callable; the autoreset mode
            is unknown, or a space has no fixed numeric shape.

    Example:
        >>> import gymnasium
        >>> from expstore.collectors import LaneCollector
        >>> envs = gymnasium.make_vec("CartPole-v1", num_envs=4)
        >>> with expstore.open("run.exp") as rb, LaneCollector(envs, None, rb, seed=0) as collector:
        ...     collector.collect(500) >= 500
        True
    """

    def __init__(
        self,
        env: AnyVectorEnv | gym.Env[Any, Any],
        policy: Callable[[Any], Any] | None,
        rb: TransitionSink,
        *,
        steps_per_lane: int = 32,
        source: str | None = None,
        autoreset_mode: str | AutoresetMode | None = None,
        seed: int | None = None,
        facts: Mapping[str, Any] | None = None,
        first_facts: Mapping[str, Any] | None = None,
        split: str | None = None,
        policy_version: int | None = None,
        numbering: Numbering | None = None,
        pass_specs: Callable[[Mapping[Key, TensorSpec]], None] | None = None,
        on_block: OnBlock | None = None,
    ) -> None:
        check_steps(steps_per_lane)
        if policy is not None and not callable(policy):
            raise ArgumentError(f"policy is {policy!r}; pass a function of a batch of observations, or None")
        self._env = _as_vector(env)
        self._mode = autoreset_mode_of(self._env, autoreset_mode)
        self._rb = rb
        self._source, self._split = source_of_split(source, split), split
        self._seed = seed
        self._facts, self._first_facts = dict(facts or {}), dict(first_facts or {})
        #: The number stored with each row of the next block; None: none is.
        self.policy_version = policy_version
        self._number, self._pass_specs, self._on_block = numbering, pass_specs, on_block
        # Returns of the episodes that ended in the present block, in the order in which they ended.
        self._finished: list[float] = []
        self._observation_leaves = fields_of(self._env.single_observation_space, ("observation",))
        self._action_leaves = fields_of(self._env.single_action_space, ("action",))
        self._act = _RandomActions(self._env, seed) if policy is None else _ignore_resets(policy)
        self._steps_per_lane = steps_per_lane
        self._block = self._new_block()
        lanes = self._env.num_envs
        self._trajectory: IntArray = np.full(lanes, -1, dtype=np.int64)
        self._next_trajectory = 0
        self._observation: Any = None
        self._ended: BoolArray = np.zeros(lanes, dtype=np.bool_)
        self._fresh: BoolArray = np.ones(lanes, dtype=np.bool_)
        self._returns = np.zeros(lanes)
        # Whether the environment may be in another state than self._observation.
        self._adrift = True
        self._closed = False
        self._described = False

    @property
    def block_rows(self) -> int:
        """The most rows that one `extend` stores."""
        return self._env.num_envs * self._steps_per_lane

    def collect(self, steps: int) -> int:
        """Store at least `steps` transitions and return how many were stored.

        All lanes step at once, so up to one transition per lane may be added. Pending transitions of an
        interrupted call count too.

        Raises:
            SchemaError: The policy did not return a batch of actions. That step was not taken, and nothing of
                it is stored.
            StateError: The collector is closed.
        """
        self._check_open()
        stored = 0
        while stored + self._block.rows < steps:
            if self._block.full:
                stored += self._flush()
            else:
                self._step()
        return stored + self._flush()

    def __iter__(self) -> Iterator[int]:
        """Yield, without end, the number of transitions that each block of `steps_per_lane` steps stored."""
        while True:
            self._check_open()
            while not self._block.full:
                self._step()
            yield self._flush()

    def close(self) -> None:
        """Store the pending transitions; closing twice is allowed.

        Environment and buffer stay open. Rows that the buffer refuses stay pending, and `close` may be called
        again.
        """
        if not self._closed:
            self._flush()
            self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception as exc:
            if error is None:
                raise
            # Raise the first error, not this one.
            error.add_note(f"{self._block.rows} pending transitions could not be stored either: {exc}")

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self._block.rows} transitions pending"
        return f"LaneCollector({self._env!r}, {self._mode.name}, {state})"

    def _check_open(self) -> None:
        if self._closed:
            raise StateError("this collector is closed", hint="create a new one to continue collecting")

    def _new_block(self) -> _Block:
        return _Block(self._env.num_envs, self._steps_per_lane, self._observation_leaves, self._action_leaves)

    def _step(self) -> None:
        """Take one step in every lane and add it to the block."""
        lanes, block, leaves = self._env.num_envs, self._block, self._observation_leaves
        self._reset_lanes()
        # Stored before the policy gets it, as the policy may change the arrays in place.
        block.put(read_values(self._observation, leaves, lanes, "the environment"))
        resets = self._ended & (self._mode is AutoresetMode.NEXT_STEP)
        action = read_values(self._act(self._observation, resets), self._action_leaves, lanes, "the policy")
        _check_range(action, self._action_leaves)
        block.put(action)

        self._adrift = True
        nested = _nest(self._env.single_action_space, ("action",), action)
        observation, reward, terminated, truncated, info = self._env.step(nested)
        ended = np.asarray(terminated, dtype=np.bool_) | np.asarray(truncated, dtype=np.bool_)
        following = read_values(observation, leaves, lanes, "the environment")
        if self._mode is AutoresetMode.SAME_STEP and ended.any():
            following = put_final(following, leaves, ended, info)
        block.put(following, prefix=("next",))
        block.put_outcome(reward, done=ended, terminated=terminated, truncated=truncated)
        block.commit(~resets, self._fresh & ~resets)
        self._count_returns(np.asarray(reward, np.float64), ended, resets)
        self._fresh = ended | (self._fresh & resets)
        self._observation, self._ended = observation, ended
        self._adrift = False

    def _count_returns(self, reward: Array, ended: BoolArray, resets: BoolArray) -> None:
        """Add the rewards of one step, and note the returns of episodes that ended. Shapes `(lanes,)`."""
        self._returns[~resets] += reward[~resets]
        self._finished += self._returns[ended].tolist()
        self._returns[ended] = 0.0

    def _reset_lanes(self) -> None:
        """Reset lanes before the next step: all lanes at first, later those whose episodes ended."""
        if self._adrift:
            self._observation = self._env.reset(seed=self._seed)[0]
            self._rb.episodes.end_stream(self._source)  # its trajectory ids may be reused
            self._seed = None  # seeding again after an interruption would repeat the first episodes
            self._ended = np.zeros_like(self._ended)
            self._fresh = np.ones_like(self._fresh)
            self._returns[:] = 0.0
            self._adrift = False
        elif self._mode is AutoresetMode.DISABLED and self._ended.any():
            # A copy: gymnasium removes the mask from the dict and may keep it.
            fresh = self._env.reset(options={"reset_mask": self._ended.copy()})[0]
            self._observation = self._merge(fresh)
            self._ended = np.zeros_like(self._ended)

    def _merge(self, fresh: Any) -> Any:
        """Return the current observations, with those of the ended lanes replaced from `fresh`."""
        lanes, leaves = self._env.num_envs, self._observation_leaves
        merged = read_values(self._observation, leaves, lanes, "the environment")
        for key, column in read_values(fresh, leaves, lanes, "the environment").items():
            merged[key] = merged[key].copy()
            merged[key][self._ended] = column[self._ended]
        return _nest(self._env.single_observation_space, ("observation",), merged)

    def _flush(self) -> int:
        """Append the block to the buffer and return its number of transitions."""
        block = self._block
        if block.rows > 0:
            before = self._rb.write_count
            base = self._next_trajectory if self._number else max(before, self._next_trajectory)
            batch, trajectory = block.batch(base, self._trajectory, self._number)
            if self.policy_version is not None:
                batch["policy_version"] = torch.full(batch.batch_size, self.policy_version)
            facts = self._facts | ({} if self._described else self._first_facts)
            options: dict[str, Any] = {"episode_info": facts} if facts else {}
            if self._split is not None:
                options["split"] = self._split
            try:
                self._rb.extend(batch, source=self._source, **options)
            except ExpStoreError:
                raise  # nothing was stored: the rows stay pending
            except BaseException:
                # Ctrl-C may arrive after the rows were stored: do not store them again. If the buffer has
                # rows that others wrote meanwhile, the block may be lost: new episodes have no gap.
                if self._rb.write_count != before:
                    self._adrift = True
                    self._end_block(base, trajectory)
                raise
            self._end_block(base, trajectory)
            if not self._described:
                self._described = True
                specs = find_specs(self._observation_leaves, self._action_leaves)
                if self._pass_specs is not None:
                    self._pass_specs(specs)
                else:
                    describe_rows(self._rb, specs)
        elif block.full:
            self._begin_block(0)
        return block.rows

    def _end_block(self, base: int, trajectory: IntArray) -> None:
        """Begin the block after one that was stored.

        Args:
            base: Position of the stored block's first row in the stream.
            trajectory: Each lane's trajectory id at its end. Shape `(lanes,)`.
        """
        self._trajectory = trajectory
        self._next_trajectory = base + self._block.rows
        self._begin_block(self._block.rows)

    def _begin_block(self, stored: int) -> None:
        """Begin a new block; report what the previous one has stored."""
        self._block = self._new_block()
        finished, self._finished = self._finished, []
        if self._on_block is not None:
            self._on_block(stored, finished)


class _Block:
    """Up to K steps of every lane: columns of shape (lanes, K, ...), and flags of which are transitions."""

    def __init__(
        self, lanes: int, steps: int, observation: list[SpaceField], action: list[SpaceField]
    ) -> None:
        def column(*shape: int, dtype: Any = np.bool_) -> Array:
            return np.zeros((lanes, steps, *shape), dtype=dtype)

        self.columns: dict[Key, Array] = {leaf.key: column(*leaf.shape, dtype=leaf.dtype) for leaf in action}
        for leaf in observation:
            self.columns[leaf.key] = column(*leaf.shape, dtype=leaf.dtype)
            self.columns["next", *leaf.key] = column(*leaf.shape, dtype=leaf.dtype)
        self.columns["next", "reward"] = column(1, dtype=np.float32)
        for flag in _FLAGS:
            self.columns[(flag,)] = column(1)
            self.columns["next", flag] = column(1)
        self.valid: BoolArray = column()
        self.starts: BoolArray = column()
        self.steps, self.filled, self.rows = steps, 0, 0

    @property
    def full(self) -> bool:
        return self.filled == self.steps

    def put(self, columns: dict[Key, Array], prefix: Key = ()) -> None:
        """Write one step of several columns, each of shape (lanes, ...)."""
        for key, column in columns.items():
            self.columns[(*prefix, *key)][:, self.filled] = column

    def put_outcome(self, reward: Any, **flags: Any) -> None:
        """Write the reward and the flags of one step, each of shape (lanes,)."""
        self.columns["next", "reward"][:, self.filled, 0] = np.asarray(reward)
        for flag, value in flags.items():
            self.columns["next", flag][:, self.filled, 0] = np.asarray(value)

    def commit(self, valid: BoolArray, starts: BoolArray) -> None:
        """Complete the step: `valid` says which lanes made a transition, `starts` which a first one."""
        self.valid[:, self.filled] = valid
        self.starts[:, self.filled] = starts
        self.rows += int(valid.sum())
        self.filled += 1

    def batch(self, base: int, carried: IntArray, number: Numbering | None) -> tuple[TensorDict, IntArray]:
        """Return the filled part as a TensorDict, and each lane's trajectory id at its end.

        Args:
            base: Position of the block's first row in the stream.
            carried: Each lane's trajectory id at the block's beginning. Shape `(lanes,)`.
            number: Returns trajectory ids for positions; None: they are the positions.
        """
        valid, starts = self.valid[:, : self.filled], self.starts[:, : self.filled]
        # An episode's id is the position of its first row among all rows ever stored.
        position = base + np.cumsum(valid.ravel()).reshape(valid.shape) - 1
        ids = position if number is None else number(position)
        first = np.maximum.accumulate(np.where(starts, ids, -1), axis=1)
        ids = np.where(first >= 0, first, carried[:, None])
        names = [None, "time"]
        batch = TensorDict({}, batch_size=list(valid.shape), names=names)
        for key, column in self.columns.items():
            batch[key] = torch.from_numpy(column[:, : self.filled])
        batch["collector", "traj_ids"] = torch.from_numpy(np.where(valid, ids, -1))
        return batch, ids[:, -1].copy()


def _nest(space: spaces.Space[Any], key: Key, columns: dict[Key, Array]) -> Any:
    """Return `columns` nested as `space` nests them; the inverse of `_columns`."""
    if isinstance(space, spaces.Dict):
        return {name: _nest(part, (*key, str(name)), columns) for name, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_nest(part, (*key, str(i)), columns) for i, part in enumerate(space.spaces))
    return columns[key]


def _check_range(actions: dict[Key, Array], leaves: list[SpaceField]) -> None:
    """Refuse actions that do not exist. A Box is only checked for NaN, as many policies exceed its bounds."""
    for leaf in leaves:
        action, space = actions[leaf.key], leaf.space
        if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
            count = space.n if isinstance(space, spaces.Discrete) else space.nvec
            bad = (action < space.start) | (action >= space.start + count)
        elif isinstance(space, spaces.MultiBinary):
            bad = (action < 0) | (action > 1)
        else:
            bad = np.isnan(action)
        if bad.any():
            raise SchemaError(
                f"the policy returned {key_name(leaf.key)!r} = {action[bad][0]}, its space is {space}",
                hint="the step was not taken",
            )


class _RandomActions:
    """Random actions, one seeded stream per lane.

    A lane draws only if it makes a transition, so its actions do not depend on the autoreset mode.
    """

    def __init__(self, env: AnyVectorEnv, seed: int | None) -> None:
        self._space = env.single_action_space
        self._lanes = [copy.deepcopy(self._space) for _ in range(env.num_envs)]
        for lane, space in enumerate(self._lanes):
            # Hashed, since the environment of this lane is seeded with seed + lane itself.
            mixed = None if seed is None else np.random.SeedSequence([seed, lane]).generate_state(1)
            space.seed(None if mixed is None else int(mixed[0]))
        self._leaves = fields_of(self._space, ("action",))
        self._last = [space.sample() for space in self._lanes]

    def __call__(self, observation: Any, resets: BoolArray) -> Any:
        for lane in np.flatnonzero(~resets):
            self._last[lane] = self._lanes[lane].sample()
        columns = {leaf.key: np.stack([leaf.pick(action) for action in self._last]) for leaf in self._leaves}
        return _nest(self._space, ("action",), columns)


def _ignore_resets(policy: Callable[[Any], Any]) -> Callable[[Any, BoolArray], Any]:
    return lambda observation, resets: policy(observation)


def _as_vector(env: AnyVectorEnv | gym.Env[Any, Any]) -> AnyVectorEnv:
    if isinstance(env, VectorEnv):
        return env
    if isinstance(env, gym.Env):
        # DISABLED, so that no call is spent on a reset.
        return SyncVectorEnv([lambda: env], autoreset_mode=AutoresetMode.DISABLED)
    raise ArgumentError(
        f"env is a {type(env).__name__}; pass a gymnasium.Env, or a gymnasium.vector.VectorEnv "
        "as gymnasium.make_vec creates"
    )


def check_steps(steps_per_lane: int) -> None:
    """Raise ValueError if a block would have no steps."""
    if steps_per_lane < 1:
        raise ArgumentError(f"steps_per_lane is {steps_per_lane}; it must be at least 1")
