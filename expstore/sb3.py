"""Stable-Baselines3's replay buffers over a store: `expstore.sb3`.

Built on the buffers; needs stable-baselines3. The classes have the constructors and methods of its own, so
that an algorithm takes them as `replay_buffer_class`. `convert` makes a store from a buffer of its own.
"""

from __future__ import annotations

import gc
import inspect
import math
import warnings
import weakref
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase

from expstore._open import check_options
from expstore._open import open as open_store
from expstore.buffers.hindsight import HindsightGoals, relabel
from expstore.buffers.tensordict import TensorDictReplayBuffer
from expstore.collectors.space_fields import SpaceField, check_spaces, describe_rows
from expstore.core.arguments import check_whole
from expstore.core.geometry import round_up
from expstore.core.values import Array, IntArray, Key
from expstore.disk.files import ReadingDisk
from expstore.episodes.facts import check_split
from expstore.errors import (
    ArgumentError,
    LockedError,
    MissingExtraError,
    NotFoundError,
    NotReadyError,
    SchemaError,
    StateError,
)
from expstore.exchange.base import Imported
from expstore.exchange.sb3_buffers import import_sb3, import_sb3_object
from expstore.samplers.prioritized import PrioritizedSampler
from expstore.specs import Categorical, MultiCategorical, TensorSpec
from expstore.storages.engine.store import Store, forget_silently
from expstore.storages.format.manifest import Manifest
from expstore.transforms import MultiStepTransform, StepView

try:
    from gymnasium import spaces
    from stable_baselines3.common import buffers, callbacks
    from stable_baselines3.common.preprocessing import get_action_dim, get_obs_shape
    from stable_baselines3.common.type_aliases import DictReplayBufferSamples, ReplayBufferSamples
    from stable_baselines3.common.utils import get_device
    from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper, VecNormalize
    from stable_baselines3.her import GoalSelectionStrategy
    from stable_baselines3.her import HerReplayBuffer as SB3HerReplayBuffer
    from stable_baselines3.her.goal_selection_strategy import KEY_TO_GOAL_STRATEGY
except ModuleNotFoundError as exc:
    raise MissingExtraError(
        "expstore.sb3 has replay buffers for stable-baselines3, which is not installed",
        hint="pip install 'expstore[sb3]'",
    ) from exc

__all__ = [
    "DictReplayBuffer",
    "EvalCallback",
    "HerReplayBuffer",
    "PrioritizedReplayBuffer",
    "PrioritizedReplayBufferSamples",
    "ReplayBuffer",
    "convert",
]

#: Entries of the observations of goal environments.
_GOAL_ENTRIES = ("observation", "achieved_goal", "desired_goal")
#: What `infos` call an end by a time limit.
_TIMEOUT = "TimeLimit.truncated"
#: Where attributes of stable-baselines3's buffers are found.
_ELSEWHERE = {
    "observations": 'buffer.rb[:]["observation"] has them',
    "next_observations": 'buffer.rb[:]["next", "observation"] has them',
    "actions": 'buffer.rb[:]["action"] has them',
    "rewards": 'buffer.rb[:]["next", "reward"] has them',
    "dones": 'buffer.rb[:]["next", "done"] has them',
    "timeouts": 'buffer.rb[:]["next", "truncated"] has them',
    "ep_start": 'buffer.rb.sql("SELECT _id FROM transitions WHERE _step = 0") has them',
    "ep_length": 'buffer.rb.sql("SELECT length FROM episodes") has them',
    "infos": "infos are not stored",
}
#: What to do with the buffer of a store that was moved.
_MOVED = (
    "if the store was moved, make a model over its new path instead of loading the buffer: "
    'replay_buffer_kwargs={"path": ...}'
)
#: How to load a model that needs no replay buffer.
_PREDICTS = (
    "a model that only predicts needs no store: load it with replay_buffer_class=None, "
    "replay_buffer_kwargs={}"
)
#: Field of a batch with the rewards of all its steps.
_REWARDS = "rewards_of_steps"
#: Stores that buffers of this process have open, by uuid.
_open_stores: weakref.WeakValueDictionary[str, Store] = weakref.WeakValueDictionary()


def convert(buffer: buffers.ReplayBuffer | str | Path, path: str | Path) -> Imported:
    """Create a store with the rows of a replay buffer of stable-baselines3, so that a model continues in it.

    The oldest row comes first. Episodes end where the buffer says so, by truncation where it recorded a time
    limit; the last episode of each environment is cut. The capacity of the store is the size of the buffer. A
    file is read without running code that it names.

    Args:
        buffer: `model.replay_buffer`, or the file that `model.save_replay_buffer` wrote.
        path: Folder of the store, which must not exist yet.

    Raises:
        ArgumentError: The buffer is over a store already, or is something else.
        SchemaError: The file holds something else, the buffer has no rows, or its arrays do not fit together.
        NotFoundError: The file, or the parent folder of the store, does not exist.
        StateError: There is something at the path.
        StorageError: The file cannot be read, or the disk failed. Nothing is left behind.

    Warns:
        UserWarning: The buffer lacks something, such as final observations; the message says what.

    Example:
        >>> from stable_baselines3 import DQN
        >>> from expstore.sb3 import ReplayBuffer, convert
        >>> convert("replay_buffer.pkl", "run.exp").rows
        100
        >>> keywords = {"replay_buffer_class": ReplayBuffer, "replay_buffer_kwargs": {"path": "run.exp"}}
        >>> model = DQN("MlpPolicy", "CartPole-v1", buffer_size=100, **keywords)
        >>> len(model.replay_buffer.rb)
        100
        >>> model.replay_buffer.close()
    """
    if isinstance(buffer, ReplayBuffer):
        raise ArgumentError(
            f"the rows of this buffer are in the store {buffer.path} already; open or copy it"
        )
    if isinstance(buffer, buffers.ReplayBuffer):
        done = import_sb3_object(f"the {type(buffer).__name__}", vars(buffer), path)
    elif isinstance(buffer, (str, Path)):
        done = import_sb3(buffer, path)
    else:
        raise ArgumentError(
            f"convert() got a {type(buffer).__name__}; pass model.replay_buffer, or the path of the file "
            "that model.save_replay_buffer wrote"
        )
    for note in done.notes:
        warnings.warn(note, stacklevel=2)
    return done


class PrioritizedReplayBufferSamples(NamedTuple):
    """A batch of `PrioritizedReplayBuffer`. The first six are as in stable-baselines3's samples.

    Args:
        observations: Shape `(n, *observation)`, or a dict of such tensors.
        actions: Shape `(n, action dim)`.
        next_observations: As `observations`.
        dones: 1 after a step that ended its episode, except by a time limit. Shape `(n, 1)`, float32.
        rewards: Shape `(n, 1)`, float32.
        discounts: Discounts of the next observations' values; None: the algorithm's `gamma`.
        weights: Importance weights by which the loss of each row is multiplied. Shape `(n, 1)`, float32.
        ids: The rows' ids in the store, for `update_priorities`. Shape `(n,)`, int64.
    """

    observations: Any
    actions: torch.Tensor
    next_observations: Any
    dones: torch.Tensor
    rewards: torch.Tensor
    discounts: torch.Tensor | None
    weights: torch.Tensor
    ids: torch.Tensor


class ReplayBuffer(buffers.ReplayBuffer):
    """A replay buffer of stable-baselines3 whose rows are in a store on disk.

    The rows, episodes and the seed of all draws outlive the process: a program that is started again with the
    same path continues with the rows that are there. `rb` is expstore's own buffer over the same store, for
    SQL, episodes and versions. A row is an episode's next step if its observation is the former next one;
    otherwise it begins another episode, as after `learn` has reset the environments.

    Pickling, as by `save_replay_buffer` and `load_replay_buffer`, keeps the absolute path and the uuid of the
    store, not its rows. Loading raises NotFoundError if there is no store at the path, and StateError if it
    is another store. The loaded buffer opens the store when it is first used. One buffer at a time can have a
    store open: `load_replay_buffer` closes the model's own buffer, and any other buffer of the store must be
    closed first, such as the buffer of another model. Do not load a file that was saved from a buffer of
    stable-baselines3: that buffer, in memory, would replace this one. Pass the file to `convert` instead.

    Threads: as expstore's buffers. Processes: one has the store open for writing. Crashes: what `add` has
    stored survives the process; with `flush_steps=n` the last n - 1 steps may be lost. Rows of the last
    second may be lost in a power cut.

    Args:
        buffer_size: The most rows. The capacity of a new store is the next lower multiple of `n_envs`; an
            existing store must have this capacity, or `buffer_size` itself.
        observation_space: A space of gymnasium.
        action_space: A space of gymnasium.
        device: Device of the samples.
        n_envs: How many environments step together. Each is a source of its own.
        optimize_memory_usage: Must be False.
        handle_timeout_termination: Whether `dones` of samples are 0 after a step that a time limit ended.
        path: Folder of the store, which is created if it does not exist. Required.
        flush_steps: So many calls of `add` are stored together; `sample` stores what was added before.
        source: Name of the stream of steps, as in SQL.
        n_steps: Number of steps that a sample covers: `rewards` are discounted sums, `next_observations` and
            `dones` those of the last step, and `discounts` are set. As `NStepReplayBuffer` of
            stable-baselines3, but a sum also stops where `learn` has reset the environment.
        gamma: The discount of these sums; pass that of the algorithm.
        options: Arguments of `expstore.open`, such as `seed`, `layout` or `durability`.

    Raises:
        ArgumentError: There is no `path`, or an option that neither this class nor `expstore.open` has; the
            observation space is a Dict; use `DictReplayBuffer`; `optimize_memory_usage` is set, `flush_steps`
            or `n_steps` is less than 1, or `gamma` is not between 0 and 1.
        LockedError: Another buffer or process has the store open for writing.
        StateError: The store has another capacity, or rows of another environment; nothing was changed.

    Warns:
        UserWarning: A model that has made steps was loaded, and there are no rows at its path. Or the buffer
            of the model was replaced by one of stable-baselines3; the warning may come later, when the former
            buffer is garbage.

    Example:
        >>> from stable_baselines3 import DQN
        >>> from expstore.sb3 import ReplayBuffer
        >>> keywords = {"replay_buffer_class": ReplayBuffer, "replay_buffer_kwargs": {"path": "run.exp"}}
        >>> model = DQN("MlpPolicy", "CartPole-v1", **keywords).learn(100)
        >>> model.replay_buffer.rb.sql("SELECT count(*) FROM transitions").fetchall()
        [(100,)]
        >>> model.replay_buffer.close()
    """

    obs_shape: Any  # a tuple; a dict of tuples where observations are dicts
    #: Options that are not arguments of `expstore.open`.
    _own_options: tuple[str, ...] = (
        "path", "flush_steps", "source", "n_steps", "gamma", "handle_timeout_termination",
    )  # fmt: skip
    _takes_dicts = False

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: torch.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        *,
        path: str | Path | None = None,
        flush_steps: int = 1,
        source: str = "env",
        n_steps: int = 1,
        gamma: float = 0.99,
        _goals: _Goals | None = None,
        **options: Any,
    ) -> None:
        folder = self._check_arguments(observation_space, path, options)
        buffer_size = check_whole("buffer_size", buffer_size)
        if optimize_memory_usage:
            raise ArgumentError(
                "optimize_memory_usage=True keeps next observations only once, which a store does by itself "
                "for packed images; leave it out"
            )
        self.observation_space, self.action_space = observation_space, action_space
        self.obs_shape, self.action_dim = get_obs_shape(observation_space), get_action_dim(action_space)
        # Of observations and actions that are stored as they come; dicts of observations are not.
        self._batch_shape = None if isinstance(self.obs_shape, dict) else (n_envs, *self.obs_shape)
        self._action_shape = n_envs, self.action_dim
        self.device, self.n_envs = get_device(device), n_envs
        self.optimize_memory_usage = False
        self.handle_timeout_termination = handle_timeout_termination
        fields = _Fields(observation_space, self.obs_shape, action_space, self.action_dim)
        self._n_steps = None if n_steps == 1 else _NSteps(n_steps, gamma)
        self._store = _Store(folder, buffer_size, n_envs, options, fields, _goals or self._n_steps)
        self._steps = _Steps(self._store, n_envs, flush_steps, source)
        try:
            self._steps.start()
        except BaseException:
            self._store.close()
            raise
        self.buffer_size = max(self._store.capacity // n_envs, 1)
        model = _find_model("_setup_model")
        self._warn_when_replaced(model)
        self._warn_if_rows_are_missing(model)

    def _warn_when_replaced(self, model: Any) -> None:
        """Warn when the model has dropped this buffer for one of stable-baselines3, as from a file."""
        if model is not None:
            weakref.finalize(self, _warn_if_replaced, weakref.ref(model), self.path).atexit = False

    def _warn_if_rows_are_missing(self, model: Any) -> None:
        """Warn if the store has no rows, although the model has made steps: it may be at another place.

        Loading a model makes its buffer anew from the saved arguments.
        """
        steps = 0 if self.rb.write_count else getattr(model, "num_timesteps", 0)
        if steps:
            warnings.warn(
                f"the model has made {steps} steps, and its store {self.path} has no rows; if they are in "
                'another folder, load the model with replay_buffer_kwargs={"path": ...}',
                stacklevel=2,
            )

    def _check_arguments(
        self, observation_space: spaces.Space[Any], path: str | Path | None, options: dict[str, Any]
    ) -> Path:
        """Return the absolute path of the store; refuse arguments that the class does not take."""
        name = type(self).__name__
        if "capacity" in options:
            raise ArgumentError(
                f"{name}() got capacity=, but the capacity of its store is the buffer_size of the model",
                hint=f"use buffer_size={options['capacity']!r}",
            )
        check_options(name, options, self._own_options)  # before the path, which may be misspelt
        if path is None:
            raise ArgumentError(
                f"{name}() got no path, the folder of its store",
                hint='pass replay_buffer_kwargs={"path": "my.exp"} to the model, or path= to the class',
            )
        if isinstance(observation_space, spaces.Dict) and not self._takes_dicts:
            raise ArgumentError(
                f"{name} is for observations that are arrays, got {observation_space}; use "
                "expstore.sb3.DictReplayBuffer"
            )
        return Path(path).expanduser().absolute()

    @property
    def rb(self) -> TensorDictReplayBuffer:
        """The open buffer of the store, which holds all steps that were added."""
        self._steps.flush()
        return self._store.buffer

    @property
    def path(self) -> Path:
        """Folder of the store."""
        return self._store.path

    @property
    def full(self) -> bool:  # type: ignore[override]  # an attribute there, which nothing else sets
        """Whether new rows replace the oldest ones."""
        return len(self.rb) >= self.buffer_size * self.n_envs

    @property
    def pos(self) -> int:  # type: ignore[override]
        """Number of steps while the buffer fills; then the number of all steps modulo `buffer_size`."""
        return (int(self.rb.write_count) // self.n_envs if self.full else self.size()) % self.buffer_size

    def size(self) -> int:
        """Return how many steps of all environments can be sampled."""
        return len(self.rb) // self.n_envs

    def reset(self) -> None:
        """Delete all rows; the store's ids continue."""
        self.rb.empty()

    def close(self) -> None:
        """Store what was added, and close the store; a second call does nothing. Open episodes are cut."""
        try:
            self._steps.close()
        finally:
            self._store.close()

    def add(
        self,
        obs: Any,
        next_obs: Any,
        action: Array,
        reward: Array,
        done: Array,
        infos: list[dict[str, Any]] | dict[str, Any],
    ) -> None:
        """Store one step of every environment.

        Args:
            obs: Observations, or a dict of them. Shape `(n_envs, *observation)`.
            next_obs: The observations that followed; after an end the last ones of the episode.
            action: Shape `(n_envs, action dim)`.
            reward: Shape `(n_envs,)`.
            done: Whether the episode ended. Shape `(n_envs,)`.
            infos: One dict per environment, of which "TimeLimit.truncated" is read; or, as gymnasium's vector
                environments return it, one dict whose values have shape `(n_envs,)`.

        Raises:
            StateError: These are not the steps of `n_envs` environments; nothing was stored.
            SchemaError: The values do not fit the fields of the store; nothing was stored.
            StorageError: The disk failed.
        """
        if len(done) != self.n_envs:
            raise StateError(
                f"the buffer of {self.path} was made for {self.n_envs} environments, and add() got steps of "
                f"{len(done)}",
                hint="make a model of these environments over the path instead of loading the buffer: "
                f'replay_buffer_kwargs={{"path": "{self.path}"}}',
            )
        shape = self._batch_shape  # of samples: observations of discrete spaces get a dim
        if type(obs) is not np.ndarray or obs.shape != shape:
            obs = _reshape_all(obs, self.obs_shape, self.n_envs)
        if type(next_obs) is not np.ndarray or next_obs.shape != shape:
            next_obs = _reshape_all(next_obs, self.obs_shape, self.n_envs)
        if type(action) is not np.ndarray or action.shape != self._action_shape:
            action = np.asarray(action).reshape(self._action_shape)
        self._steps.add(obs, action, reward, next_obs, done, infos)

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> Any:
        """Draw rows of all environments, with replacement.

        Args:
            batch_size: How many.
            env: Normalizes observations and rewards; None: they are as stored.

        Returns:
            `ReplayBufferSamples`, or `DictReplayBufferSamples` where observations are dicts, on `device`.

        Raises:
            NotReadyError: There are no rows.
        """
        return self._samples(self._draw(batch_size), env)

    def _draw(self, batch_size: int) -> dict[str, Any]:
        rb = self.rb
        if not len(rb):
            raise NotReadyError("there are no rows to sample", hint="add steps first")
        rows: dict[str, Any] = rb.sample(batch_size, as_numpy=True)
        return rows

    def _samples(self, rows: dict[str, Any], env: VecNormalize | None) -> Any:
        parts = self._parts(rows, env)
        return DictReplayBufferSamples(*parts) if isinstance(parts[0], dict) else ReplayBufferSamples(*parts)

    def _parts(self, rows: dict[str, Any], env: VecNormalize | None) -> tuple[Any, Any, Any, Any, Any, Any]:
        """Return observations, actions, next observations, dones, rewards and discounts, on the device."""
        following, actions = rows["next"], rows["action"]
        ended = following["terminated" if self.handle_timeout_termination else "done"]
        if self._n_steps is None:
            rewards, discounts = self._normalize_reward(following["reward"].reshape(-1, 1), env), None
        else:
            each = self._normalize_reward(rows[_REWARDS], env)
            rewards, discounts = self._n_steps.sum_rewards(each, rows["steps_to_next_obs"])
        return (
            self._to_device(self._normalize_obs(rows["observation"], env)),
            self._to_device(actions.astype(self._maybe_cast_dtype(actions.dtype), copy=False)),
            self._to_device(self._normalize_obs(following["observation"], env)),
            self._to_device(ended.reshape(-1, 1).astype(np.float32)),
            self._to_device(rewards),
            None if discounts is None else self._to_device(discounts),
        )

    def _to_device(self, values: Any) -> Any:
        """Return arrays as tensors; they are the batch's own, so none is copied on the CPU."""
        if isinstance(values, Mapping):
            return {key: self._to_device(part) for key, part in values.items()}
        return torch.as_tensor(values, device=self.device)

    def _get_samples(self, batch_inds: IntArray, env: VecNormalize | None = None) -> Any:
        """Return the rows of steps, of one environment each, which is drawn as stable-baselines3 does.

        Args:
            batch_inds: Numbers of steps, as `pos` counts them. Shape `(n,)`.
            env: As in `sample`.
        """
        lanes = np.random.randint(0, self.n_envs, len(batch_inds))
        rows = self.rb[torch.from_numpy(np.asarray(batch_inds) * self.n_envs + lanes)]
        return self._samples(_to_arrays(rows), env)

    def __getattr__(self, name: str) -> Any:
        """Say where an attribute of stable-baselines3's buffers is found.

        Raises:
            AttributeError: Always.
        """
        hint = f"; {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs to open the store when it is first used: path and uuid, not the rows."""
        self._steps.flush()
        return dict(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over what `__getstate__` returned.

        Raises:
            NotFoundError: There is no store at the path.
            StateError: It is another store than the one that was saved.
        """
        state["_store"].check_saved()
        self.__dict__.update(state)
        self._warn_when_replaced(_find_model("load_replay_buffer"))


def _find_model(method: str) -> Any:
    """Return the model of which a method is being called; None: of none.

    A model tells its buffer nothing about itself, so it is looked for in the frames of the callers.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != method:
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get("self")


def _warn_if_replaced(model: weakref.ref[Any], path: Path) -> None:
    """Warn if the replay buffer of a model, whose buffer over a store was dropped, is over no store."""
    found = getattr(model(), "replay_buffer", None)
    if isinstance(found, buffers.ReplayBuffer) and not isinstance(found, ReplayBuffer):
        warnings.warn(
            f"the model's buffer of {path} was replaced by a {type(found).__name__} of stable-baselines3, as "
            "load_replay_buffer does: the model's steps are not stored. To keep the rows of a saved buffer, "
            "make a store of the file with expstore.sb3.convert, and load the model with its path",
            stacklevel=4,  # the caller of load_replay_buffer
        )


class DictReplayBuffer(ReplayBuffer, buffers.DictReplayBuffer):
    """As `ReplayBuffer`, for observations that are dicts.

    Each entry of the space is a field of its own, such as `observation.position`.
    """

    _takes_dicts = True

    def __init__(self, buffer_size: int, observation_space: spaces.Dict, *given: Any, **options: Any) -> None:
        if not isinstance(observation_space, spaces.Dict):
            raise ArgumentError(
                f"DictReplayBuffer is for Dict observation spaces, got {observation_space}; use ReplayBuffer"
            )
        super().__init__(buffer_size, observation_space, *given, **options)


class HerReplayBuffer(DictReplayBuffer, SB3HerReplayBuffer):
    """As `DictReplayBuffer`; a part of each batch gets goals that its episodes reached later.

    Of n rows, the first `int(her_ratio * n)` get the goal that another step of their episode achieved, and
    the reward that the environment's `compute_reward` gives for it. Unlike stable-baselines3's buffer, rows
    of an episode that has not ended are sampled, too, with goals from its steps so far; and goals follow from
    the store's seed. Methods of a subclass that choose goals, such as `_sample_goals`, are not called. With
    `prefetch`, `compute_reward` is called in another thread.

    Andrychowicz et al. 2017, "Hindsight Experience Replay", arXiv:1707.01495.

    Args:
        buffer_size: As `ReplayBuffer`, and so are the other arguments but these.
        env: Its `compute_reward` gives the rewards of new goals; `set_env` after unpickling.
        n_sampled_goal: How many rows with new goals are sampled for each row with its own.
        goal_selection_strategy: "future", "final" or "episode": which steps give new goals.
        copy_info_dict: Must be False: infos are not stored.

    Raises:
        ArgumentError: The observation space lacks an entry for goals, or an argument is not allowed.
    """

    _own_options = (
        *ReplayBuffer._own_options, "n_sampled_goal", "goal_selection_strategy", "copy_info_dict",
    )  # fmt: skip

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Dict,
        action_space: spaces.Space[Any],
        env: VecEnv | None,
        device: torch.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        n_sampled_goal: int = 4,
        goal_selection_strategy: GoalSelectionStrategy | str = "future",
        copy_info_dict: bool = False,
        **options: Any,
    ) -> None:
        if copy_info_dict:
            raise ArgumentError(
                "copy_info_dict=True passes infos to compute_reward, and infos are not stored; leave it out"
            )
        if options.get("n_steps", 1) != 1:
            raise ArgumentError(
                f"HerReplayBuffer has no n-step samples, got n_steps={options['n_steps']!r}; leave it out"
            )
        strategy = goal_selection_strategy
        if isinstance(strategy, str):
            known = KEY_TO_GOAL_STRATEGY
            if strategy.lower() not in known:
                raise ArgumentError(
                    f"goal_selection_strategy is {strategy!r}; it is one of {', '.join(map(repr, known))}"
                )
            strategy = known[strategy.lower()]
        missing = [name for name in _GOAL_ENTRIES if name not in getattr(observation_space, "spaces", ())]
        if missing:
            raise ArgumentError(
                f"HerReplayBuffer needs the entries {', '.join(_GOAL_ENTRIES)} in the observation space; "
                f"{observation_space} has no {', '.join(missing)}"
            )
        self.copy_info_dict = False
        self.goal_selection_strategy = strategy
        self.n_sampled_goal = n_sampled_goal
        self.her_ratio = 1 - 1.0 / (n_sampled_goal + 1)
        self._goals = _Goals(env, self.her_ratio, strategy)
        super().__init__(
            buffer_size, observation_space, action_space, device, n_envs, optimize_memory_usage,
            handle_timeout_termination, _goals=self._goals, **options,
        )  # fmt: skip

    @property
    def env(self) -> VecEnv | None:  # type: ignore[override]
        """The environment that computes rewards; None: `set_env` was not called after unpickling."""
        return self._goals.env

    def set_env(self, env: VecEnv) -> None:
        """Set the environment that computes rewards, after unpickling.

        Raises:
            ArgumentError: There is one already.
        """
        if self._goals.env is not None:
            raise ArgumentError("Trying to set env of already initialized environment.")
        self._goals.env = env

    def truncate_last_trajectory(self) -> None:
        """Cut the episodes that are open, so that the next steps begin others.

        `dones` of their last steps stay 0, so that targets bootstrap.
        """
        self._steps.cut()

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs to open the store; the environment is left out."""
        return ReplayBuffer.__getstate__(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over what `__getstate__` returned; call `set_env` before sampling."""
        ReplayBuffer.__setstate__(self, state)


class PrioritizedReplayBuffer(ReplayBuffer):
    """As `ReplayBuffer`, sampled in proportion to priorities, which an algorithm of yours sets.

    Algorithms of stable-baselines3 set none: override `train` to multiply the loss by `weights` and to call
    `update_priorities`.

    Schaul et al. 2016, "Prioritized Experience Replay", arXiv:1511.05952.

    Args:
        given: As `ReplayBuffer`.
        alpha: How much priorities count.
        beta: How much of the bias the weights undo.
        options: As `ReplayBuffer`.

    Example:
        >>> from gymnasium import spaces
        >>> from expstore.sb3 import PrioritizedReplayBuffer
        >>> observations, actions = spaces.Box(-1, 1, (3,)), spaces.Discrete(2)
        >>> buffer = PrioritizedReplayBuffer(100, observations, actions, path="run.exp")
        >>> zeros, one = np.zeros((1, 3)), np.ones(1)
        >>> buffer.add(zeros, zeros, one, one, done=one, infos=[{}])
        >>> batch = buffer.sample(64)
        >>> error = batch.rewards.flatten()  # the TD error
        >>> loss = (batch.weights.flatten() * error**2).mean()
        >>> buffer.update_priorities(batch.ids, error.abs())
    """

    _own_options = (*ReplayBuffer._own_options, "alpha", "beta")
    _takes_dicts = True

    def __init__(self, *given: Any, alpha: float = 0.6, beta: float = 0.4, **options: Any) -> None:
        sampler = PrioritizedSampler(alpha=alpha, beta=beta)
        super().__init__(*given, sampler=sampler, **options)

    def _samples(self, rows: dict[str, Any], env: VecNormalize | None) -> Any:
        weights = self._to_device(rows["priority_weight"].reshape(-1, 1).astype(np.float32))
        ids = torch.from_numpy(rows["id"])
        return PrioritizedReplayBufferSamples(*self._parts(rows, env), weights, ids)

    def update_priorities(self, ids: torch.Tensor, priorities: torch.Tensor | Array) -> int:
        """Set the priorities of rows that are still in the store; return how many that were.

        Args:
            ids: As in a batch. Shape `(n,)`, int64.
            priorities: Not negative, such as absolute TD errors. Shape `(n,)` or `(n, 1)`.

        Raises:
            PriorityError: One is negative, NaN or infinite; none was set.
        """
        values = torch.as_tensor(priorities).detach().cpu().reshape(-1)
        return self._store.buffer.update_priority(priority=values, id=ids)


def _read_timeouts(infos: list[dict[str, Any]] | dict[str, Any], n_envs: int) -> list[bool]:
    """Return for each environment whether a time limit ended its episode."""
    if isinstance(infos, Mapping):
        return [bool(timeout) for timeout in infos.get(_TIMEOUT, [False] * n_envs)]
    return [bool(info.get(_TIMEOUT, False)) for info in infos]


def _to_arrays(rows: TensorDictBase) -> dict[str, Any]:
    """Return rows as a nested dict of arrays."""
    found: dict[str, Any] = rows.to_dict()
    return {key: _leaf(value) for key, value in found.items()}


def _leaf(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _leaf(part) for key, part in value.items()}
    return value.numpy()


class _Fields:
    """The fields of observations and actions.

    Args:
        observation: The space of observations.
        obs_shape: Their shape; a dict of shapes for a Dict space.
        action: The space of actions.
        action_dim: Number of values of an action.
    """

    def __init__(
        self, observation: spaces.Space[Any], obs_shape: Any, action: spaces.Space[Any], action_dim: int
    ) -> None:
        parts = observation.spaces if isinstance(observation, spaces.Dict) else {None: observation}
        self._observation = [
            SpaceField(
                (),
                ("observation",) if name is None else ("observation", name),
                space,
                obs_shape if name is None else obs_shape[name],
                np.dtype(space.dtype),
            )
            for name, space in parts.items()
        ]
        self._action = [SpaceField((), ("action",), action, (action_dim,), np.dtype(action.dtype))]

    def check(self, rb: TensorDictReplayBuffer, path: Path) -> None:
        """Raise StateError if a store has rows of another environment."""
        # An environment may return observations of another dtype than its space says, which are stored.
        check_spaces(rb, self._observation, path, dtypes=False)
        check_spaces(rb, self._action, path)

    def describe(self, rb: TensorDictReplayBuffer) -> bool:
        """Store the specs of discrete fields in a store that has rows; return whether it has.

        Fields of Box spaces get none: algorithms store actions that are scaled to [-1, 1].
        """
        if rb.schema is None:
            return False
        found: dict[Key, TensorSpec] = {}
        for field in (*self._observation, *self._action):
            spec = field.find_spec()
            if not isinstance(spec, Categorical):
                continue
            if not isinstance(spec, MultiCategorical):
                spec = Categorical(spec.n, shape=field.shape, dtype=spec.dtype)
            found[field.key] = spec
            if field.key[0] == "observation":
                found["next", *field.key] = spec
        describe_rows(rb, found)
        return True


def _reshape_all(observation: Any, shape: Any, n_envs: int) -> Any:
    """Return observations of environments with the shape of a space; a dict of shapes for a Dict space."""
    if isinstance(shape, dict):
        return {
            key: _reshape_rows(np.asarray(observation[key]), (n_envs, *one)) for key, one in shape.items()
        }
    return _reshape_rows(np.asarray(observation), (n_envs, *shape))


def _reshape_rows(observations: Array, shape: tuple[int, ...]) -> Array:
    """Return observations of all environments in another shape of the same size."""
    if observations.size != np.prod(shape, dtype=np.int64):
        raise SchemaError(
            f"observations have shape {list(observations.shape)}, expected {list(shape)}",
            hint="the first dim is the environments, the others are the shape of the observation space",
        )
    return observations.reshape(shape)


class _Store:
    """The store of a buffer: opened when it is first used.

    Args:
        path: The folder.
        buffer_size: The most rows.
        n_envs: How many environments step together: a new store has a multiple of it as its capacity.
        options: Arguments of `expstore.open`.
        fields: The fields of observations and actions.
        changes: What changes the rows of batches; None: nothing.
    """

    def __init__(
        self,
        path: Path,
        buffer_size: int,
        n_envs: int,
        options: dict[str, Any],
        fields: _Fields,
        changes: _Goals | _NSteps | None,
    ) -> None:
        self.path, self._fields = path, fields
        self._n_envs, self._options, self._changes = n_envs, options, changes
        #: The most rows: of the store once it was opened.
        self.capacity = max(buffer_size // n_envs, 1) * n_envs
        self._uuid: str | None = None  # of the store; None: it was not opened yet
        self._closed = False
        self._opened: TensorDictReplayBuffer | None = None
        self._buffer: TensorDictReplayBuffer | None = None

    @property
    def buffer(self) -> TensorDictReplayBuffer:
        """The buffer that draws.

        Raises:
            LockedError: The store is open for writing elsewhere, as by another buffer of this process.
            StateError: It is closed, or another store is in the folder than when it was pickled.
        """
        if self._buffer is None:
            self._buffer = self._open()
        return self._buffer

    def _open(self) -> TensorDictReplayBuffer:
        if self._closed:
            raise StateError(f"the buffer of {self.path} is closed", hint="make or load another buffer")
        opened = self._open_unlocked()
        uuid = str(opened.stats()["uuid"])
        try:
            self._check_uuid(uuid)
            self._fields.check(opened, self.path)
        except BaseException:
            opened.close()
            raise
        self._opened, self._uuid = opened, uuid
        if isinstance(opened.storage, Store):
            _open_stores[uuid] = opened.storage
        # "w" would replace the store, and "x" refuse it, when the buffer is loaded.
        self._options = {name: value for name, value in self._options.items() if name != "mode"}
        return opened if self._changes is None else self._changes.draw_from(opened)

    def _open_unlocked(self) -> TensorDictReplayBuffer:
        """Open the store, after the former buffer of a model was dropped."""
        self._take_capacity()
        try:
            return open_store(self.path, capacity=self.capacity, **self._options)
        except LockedError:
            # `learn` leaves references to the buffer in cycles: `load_replay_buffer` drops a buffer that only
            # the garbage collector closes.
            gc.collect()
        try:
            return open_store(self.path, capacity=self.capacity, **self._options)
        except LockedError as exc:
            raise LockedError(
                exc.message, hint=f"{exc.hint}; {_PREDICTS}" if exc.hint else _PREDICTS
            ) from None

    def describe(self) -> bool:
        """Store the specs of discrete fields; return whether the store has rows, and so has them."""
        return self._opened is not None and self._fields.describe(self._opened)

    def _take_capacity(self) -> None:
        """Take the capacity of the store if it differs only because it is no multiple of `n_envs`.

        Raises:
            StateError: The store has another capacity.
        """
        if self._options.get("mode", "a") != "a":
            return
        try:
            manifest = Manifest.load(ReadingDisk(), self.path)
        except NotFoundError:
            return
        stored, asked = manifest.capacity, self.capacity
        if stored is not None and stored // self._n_envs * self._n_envs == asked:
            self.capacity = stored
        elif stored is None or stored != round_up(asked, math.prod(manifest.dims)):
            with open_store(self.path, mode="r") as reader:
                self._fields.check(reader, self.path)  # no capacity helps where the rows do not fit either
            resize = f"run `expstore resize {self.path} --capacity {asked}`"
            raise StateError(
                f"{self.path} has {'no capacity' if stored is None else f'capacity {stored}'}, and "
                f"the buffer_size of the model asks for {asked} rows",
                kind="mismatch",
                hint=resize if stored is None else f"pass buffer_size={stored}, or {resize}",
            )

    def close(self) -> None:
        """Close the store; a second call does nothing."""
        self._closed = True
        if self._opened is not None:
            self._opened.close()
        self._buffer = None

    def check_saved(self) -> None:
        """Raise an error unless the store is still there that was open when this object was pickled.

        Raises:
            NotFoundError: There is no store at the path.
            StateError: It is another store.
        """
        try:
            found = Manifest.load(ReadingDisk(), self.path).uuid
        except NotFoundError as exc:
            raise NotFoundError(
                f"the buffer was saved over the store {self.path}, and there is no store any more",
                hint=_MOVED,
            ) from exc
        self._check_uuid(found)
        # The model drops its former buffer without closing it when it loads this one.
        if (former := _open_stores.get(found)) is not None:
            forget_silently(former)

    def _check_uuid(self, uuid: str) -> None:
        if self._uuid not in (None, uuid):
            raise StateError(
                f"{self.path} holds store {uuid}, and the buffer was saved over store {self._uuid}",
                hint=f"bring back the store that was in this folder; {_MOVED}",
            )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": None, "_buffer": None, "_closed": False}


class _NSteps:
    """Batches whose rows cover several steps.

    Args:
        n_steps: Number of steps.
        gamma: The discount.
    """

    def __init__(self, n_steps: int, gamma: float) -> None:
        self._transform = _RewardsOfSteps(n_steps, gamma, done_keys=[])

    def draw_from(self, opened: TensorDictReplayBuffer) -> TensorDictReplayBuffer:
        """Make the batches of an open store cover several steps; return its buffer."""
        return opened.append_transform(self._transform)

    def sum_rewards(self, rewards: Array, steps: IntArray) -> tuple[Array, Array]:
        """Return discounted sums of rewards, and the discounts of what follows. Shapes `(n, 1)`, float32.

        The same operations as in stable-baselines3, so that the results are equal to the last bit.

        Args:
            rewards: The rewards of the next steps; only the first `steps` of a row count. Shape
                `(n, n_steps)`, float32.
            steps: Number of steps that each row covers. Shape `(n,)`, int64.
        """
        gamma, numbers = self._transform.gamma, np.arange(self._transform.n_steps, dtype=np.float32)[None]
        counts = steps[:, None]
        sums = (rewards * gamma**numbers * (numbers < counts)).sum(axis=1, keepdims=True)
        return sums.astype(np.float32), (gamma ** counts.astype(np.float32)).astype(np.float32)


class _RewardsOfSteps(MultiStepTransform):
    """As `MultiStepTransform`; batches also have the reward of each step: normalizing clips each of them."""

    def look(self, view: StepView) -> Any:
        """Read the rewards of the steps, and choose the last one of each row."""
        seen = super().look(view)
        ids, _ = view.at(view.ids, np.arange(self.n_steps))
        return seen, view.floats(ids, ("next", "reward")).reshape(ids.shape)

    def apply(self, batch: Any, seen: Any) -> Any:
        """Write the rewards of the steps into the batch."""
        batch = super().apply(batch, seen[0])
        batch.set(_REWARDS, torch.from_numpy(seen[1]))
        return batch


class _Goals:
    """New goals of a part of the rows of each batch.

    It knows nothing of the buffer, so that a buffer that is dropped closes its store at once.

    Args:
        env: Computes rewards.
        ratio: Which part of a batch gets new goals.
        strategy: Where goals come from.
    """

    def __init__(self, env: VecEnv | None, ratio: float, strategy: GoalSelectionStrategy) -> None:
        self.env = env
        self._ratio, self._strategy = ratio, strategy

    def draw_from(self, opened: TensorDictReplayBuffer) -> TensorDictReplayBuffer:
        """Give the batches of an open store new goals; return its buffer."""
        goals = HindsightGoals(
            self._rewards,
            goal_key=("observation", "desired_goal"),
            achieved_goal_key=("next", "observation", "achieved_goal"),
            reward_key=("next", "reward"),
            end_key=("next", "done"),
        )
        goals.set_ratio(self._ratio)
        goals.set_strategy(self._strategy.name.lower())
        relabel(opened, goals)
        return opened

    def _rewards(self, rows: TensorDictBase) -> torch.Tensor:
        """Return the rewards of rows that have new goals. Shape `(n,)`, float32."""
        if self.env is None:
            raise StateError(
                "the environment that computes rewards is not known", hint="call set_env() after loading"
            )
        achieved = rows["next", "observation", "achieved_goal"].numpy()
        desired = rows["observation", "desired_goal"].numpy()
        (rewards,) = self.env.env_method("compute_reward", achieved, desired, [{}] * len(rows), indices=[0])
        return torch.from_numpy(np.asarray(rewards, np.float32))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"env": None}


class _Steps:
    """The stream of steps into a store.

    Args:
        store: The store.
        n_envs: How many environments step together.
        flush_steps: So many steps are stored together.
        source: Name of the stream.
        split: The split of its episodes; None: "train".
    """

    def __init__(
        self, store: _Store, n_envs: int, flush_steps: int, source: str, split: str | None = None
    ) -> None:
        if not isinstance(flush_steps, int) or flush_steps < 1:
            raise ArgumentError(f"flush_steps must be an integer of at least 1, got {flush_steps!r}")
        self._store, self._n_envs = store, n_envs
        self._flush_steps, self._source, self._split = flush_steps, source, split
        self._recorder: Any = None
        self._is_described = False
        self._following: bytes | None = None  # what the next observations must be to continue the episodes
        self._ended = np.zeros(n_envs, np.bool_)

    def start(self) -> None:
        """Open the store."""
        lanes = None if self._n_envs == 1 else self._n_envs
        self._recorder = self._store.buffer.record(
            self._source, lanes=lanes, flush_steps=self._flush_steps, split=self._split
        )

    def add(self, obs: Any, action: Array, reward: Array, next_obs: Any, done: Array, infos: Any) -> None:
        """Record a step of every environment; see `ReplayBuffer.add`."""
        if self._recorder is None:
            self.start()
        if self._n_envs != 1:
            self._add_lanes(obs, action, reward, next_obs, np.asarray(done, np.bool_), infos)
            return
        is_array, following = type(obs) is np.ndarray, self._following
        if following is not None and (obs.tobytes() if is_array else _bytes_of(obs)) != following:
            self._recorder.reset()
        ended = bool(done[0])
        truncated = ended and _read_timeouts(infos, 1)[0]
        self._following = None
        self._recorder.step(
            obs[0] if is_array else _first(obs),
            action[0],
            float(reward[0]),
            next_obs[0] if is_array else _first(next_obs),
            ended and not truncated,
            truncated,
        )
        if not ended:
            self._following = next_obs.tobytes() if is_array else _bytes_of(next_obs)

    def _add_lanes(
        self, obs: Any, action: Array, reward: Array, next_obs: Any, done: Array, infos: Any
    ) -> None:
        if self._following is not None and _bytes_of(_keep(obs, ~self._ended)) != self._following:
            self._recorder.reset()
        timed_out = np.asarray(_read_timeouts(infos, self._n_envs), np.bool_)
        self._following = None
        self._recorder.step(obs, action, reward, next_obs, done & ~timed_out, done & timed_out)
        self._ended = done
        self._following = _bytes_of(_keep(next_obs, ~done))

    def flush(self) -> None:
        """Store what was added."""
        if self._recorder is not None:
            self._recorder.flush()
            if not self._is_described:
                self._is_described = self._store.describe()

    def cut(self) -> None:
        """Cut the episodes that are open."""
        self._following = None
        if self._recorder is not None:
            self._recorder.reset()

    def close(self) -> None:
        """Store what was added, and cut the episodes that are open."""
        if self._recorder is not None:
            self.flush()
        recorder, self._recorder = self._recorder, None  # the next step asks the store, which is closed
        if recorder is not None:
            recorder.close()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_recorder": None, "_following": None}


class _RecordedEnv(VecEnvWrapper):
    """Pass the steps of an environment on to a function, with the last observations of episodes."""

    def __init__(self, venv: VecEnv, begin: Callable[[], None], record: Callable[..., None]) -> None:
        super().__init__(venv)
        self._begin, self._record = begin, record
        self._observation: Any = None
        self._action: Any = None

    def reset(self) -> Any:
        self._begin()
        found = self.venv.reset()
        self._observation = deepcopy(found)
        return found

    def step_async(self, actions: Array) -> None:
        self._action = np.array(actions)
        self.venv.step_async(actions)

    def step_wait(self) -> Any:
        former = self._observation
        observation, rewards, dones, infos = self.venv.step_wait()
        following: Any = deepcopy(observation)
        self._observation = following
        if dones.any():
            following = deepcopy(observation)
            for lane in np.flatnonzero(dones).tolist():
                last = infos[lane]["terminal_observation"]
                if isinstance(following, dict):
                    for key, values in following.items():
                        values[lane] = last[key]
                else:
                    following[lane] = last
        self._record(former, self._action, rewards, following, dones, infos)
        return observation, rewards, dones, infos


class EvalCallback(callbacks.EvalCallback):
    """Evaluate a model, and store the steps of its evaluations apart from those that it learns from.

    The steps are rows of the store of the model's replay buffer, which is of `expstore.sb3`. They are the
    split "eval": the model never samples them, and SQL and plots compare them with the others. They count for
    the capacity of the store, and for `size()` of the replay buffer. Observations are stored as the
    environment returns them, and actions scaled as the model stores its own.

    Processes: that of the model. Crashes: as for the replay buffer's own steps.

    Args:
        eval_env: The environment, wrapped like that of the model.
        given: Other arguments of stable-baselines3's `EvalCallback`, and `options`.
        split: The split of the episodes.
        source: Name of the stream of steps.

    Raises:
        StateError: At the beginning of `learn`: the model has another replay buffer, or other spaces than
            `eval_env`.

    Example:
        >>> import gymnasium
        >>> from expstore.sb3 import EvalCallback
        >>> evaluation = EvalCallback(gymnasium.make("CartPole-v1"), eval_freq=1000, n_eval_episodes=3)
    """

    def __init__(
        self,
        eval_env: Any,
        *given: Any,
        split: str = "eval",
        source: str = "eval",
        **options: Any,
    ) -> None:
        super().__init__(eval_env, *given, **options)
        self._split, self._source = check_split(split), source
        self._steps: _Steps | None = None

    def _init_callback(self) -> None:
        super()._init_callback()
        buffer = getattr(self.model, "replay_buffer", None)
        if not isinstance(buffer, ReplayBuffer):
            raise StateError(
                "the evaluation cannot be stored: the model has no replay buffer of expstore.sb3",
                hint="make the model with replay_buffer_class=expstore.sb3.ReplayBuffer",
            )
        if self.eval_env.observation_space != self.model.observation_space:
            raise StateError(
                f"eval_env has observations {self.eval_env.observation_space}, and the model "
                f"{self.model.observation_space}",
                hint="wrap eval_env like the environment of the model, for images by VecTransposeImage",
            )
        if self._steps is None or self._steps._store is not buffer._store:
            flush_steps = buffer._steps._flush_steps
            self._steps = _Steps(
                buffer._store, self.eval_env.num_envs, flush_steps, self._source, self._split
            )
        steps, n_envs = self._steps, self.eval_env.num_envs

        def record(obs: Any, action: Array, reward: Array, next_obs: Any, done: Array, infos: Any) -> None:
            if isinstance(self.model.action_space, spaces.Box):
                action = self.model.policy.scale_action(action)
            obs, next_obs = (_reshape_all(one, buffer.obs_shape, n_envs) for one in (obs, next_obs))
            steps.add(obs, action.reshape(n_envs, buffer.action_dim), reward, next_obs, done, infos)

        self._wrap(lambda venv: _RecordedEnv(venv, steps.cut, record))

    def _on_training_end(self) -> None:
        super()._on_training_end()
        self._wrap(lambda venv: venv)
        if self._steps is not None:
            self._steps.close()

    def _wrap(self, wrap: Callable[[VecEnv], VecEnv]) -> None:
        """Wrap the environment below its normalization, in place of an earlier wrapper."""
        normal = self.eval_env if isinstance(self.eval_env, VecNormalize) else None
        inner = self.eval_env if normal is None else normal.venv
        wrapped = wrap(inner.venv if isinstance(inner, _RecordedEnv) else inner)
        if normal is None:
            self.eval_env = wrapped
        else:
            normal.venv = wrapped


def _first(observation: Any) -> Any:
    """Return the observation of the first environment."""
    if isinstance(observation, dict):
        return {key: value[0] for key, value in observation.items()}
    return observation[0]


def _keep(observation: Any, lanes: Array) -> Any:
    """Return the observations of some environments. `lanes` has shape `(n_envs,)`, bool."""
    if isinstance(observation, dict):
        return {key: value[lanes] for key, value in observation.items()}
    return observation[lanes]


def _bytes_of(observation: Any) -> bytes:
    """Return the bytes of observations, which are equal for equal ones, also of NaN."""
    if isinstance(observation, dict):
        return b"".join(value.tobytes() for value in observation.values())
    found: bytes = observation.tobytes()
    return found
