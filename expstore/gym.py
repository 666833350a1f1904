"""Wrappers that record the steps of gymnasium's environments into a store: `expstore.gym`.

Built on `rb.record`; needs gymnasium. They change nothing that an environment returns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from expstore._open import check_options
from expstore._open import open as open_store
from expstore.buffers.recorder import Recorder
from expstore.buffers.replay_buffer import ReplayBuffer
from expstore.collectors.space_fields import (
    autoreset_mode_of,
    check_spaces,
    describe_rows,
    fields_of,
    find_specs,
    put_final,
    read_values,
)
from expstore.core.values import Array, Key
from expstore.errors import ArgumentError, ExpStoreError, MissingExtraError, SchemaError, StateError

try:
    import gymnasium as gym
    from gymnasium.error import ResetNeeded
    from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
except ModuleNotFoundError as exc:
    raise MissingExtraError(
        "expstore.gym records environments of gymnasium, which is not installed",
        hint="pip install 'expstore[gym]'",
    ) from exc

__all__ = ["Record", "RecordVector"]

#: Options of the wrappers that are not arguments of `expstore.open`.
_OPTIONS = {
    "Record": ("source", "split", "flush_steps", "info", "render"),
    "RecordVector": ("source", "split", "flush_steps", "info", "render", "autoreset_mode"),
}
#: The mode in which environments render frames as arrays.
_FRAMES = "rgb_array"


class Record(gym.Wrapper[Any, Any, Any, Any], gym.utils.RecordConstructorArgs):
    """Record every step of an environment into a store.

    A row has the fields `observation`, `action`, `next.observation`, `next.reward` (float32) and the flags
    `next.terminated`, `next.truncated` and `next.done`. The parts of Dict and Tuple spaces are fields of
    their own, such as `observation.position` and `observation.0`. Values are copied. `reset` begins an
    episode; one that had not ended is cut. The seed of `reset(seed=...)` is a fact of the episode:
    `info->>'seed'` in SQL.

    If the store fails, `step` raises an error after the environment has made the step. `last_step` is what
    the environment returned, and the row is kept: the next `step`, `reset`, `flush` or `close` writes it
    before it does anything else, and raises again if it cannot. A step whose values cannot be stored raises
    SchemaError; the next step then begins another episode, and the one before it is cut.

    Threads: one at a time uses the wrapper, as the environment. Processes: a forked child cannot record.
    Crashes: a step survives the end of the process once `step` has returned; with `flush_steps=n`, up to
    n - 1 steps are lost. A power failure loses the steps since the last sync of the store, about one second.

    Args:
        env: The environment.
        store: Folder of a store, which is opened here and closed by `close`; or an open buffer of this
            process, which stays open.
        source: Name of the stream of steps; an open episode of the stream is cut.
        split: The split of the episodes, such as "eval" for an environment that evaluates. Give it a `source`
            of its own, if the store also records another environment. None for "train".
        flush_steps: Number of steps that are published together.
        info: Names of entries of the infos of steps, which become fields `info.<name>`. They are numbers or
            arrays of a fixed shape, and every step must have them.
        render: Whether the field `frame` is stored: the frame of the observation, as `env.render()` returns
            it before the step. Shape `(height, width, 3)`, uint8. The environment needs
            `render_mode="rgb_array"`.
        options: Arguments of `expstore.open` for a path, such as `capacity`, `layout` or `durability`. If a
            space has Text, the default of `layout` is "arrow", and recording a step takes longer.

    Raises:
        ArgumentError: A space has values without a fixed shape (Sequence, Graph, OneOf), frames are rendered
            in another mode, or `flush_steps` is less than 1; `store` is neither a path nor a buffer that
            records, or options are given for a buffer; there is no such option.
        LockedError: The store is open for writing elsewhere.
        StateError: The store has rows of another environment; nothing was changed.

    Example:
        >>> import gymnasium
        >>> from expstore.gym import Record
        >>> env = Record(gymnasium.make("CartPole-v1"), "run.exp", source="env-0")
        >>> observation, info = env.reset(seed=1)
        >>> observation, reward, terminated, truncated, info = env.step(env.action_space.sample())
        >>> len(env.rb)
        1
        >>> env.close()
    """

    def __init__(
        self,
        env: gym.Env[Any, Any],
        store: str | Path | ReplayBuffer,
        *,
        source: str | None = "env",
        split: str | None = None,
        flush_steps: int = 1,
        info: Sequence[str] = (),
        render: bool = False,
        **options: Any,
    ) -> None:
        _check_env(env, gym.Env)
        gym.utils.RecordConstructorArgs.__init__(
            self,
            _disable_deepcopy=True,
            store=_path_of(store),
            source=source,
            split=split,
            flush_steps=flush_steps,
            info=info,
            render=render,
            **options,
        )
        gym.Wrapper.__init__(self, env)
        if render:
            _check_render_mode(env.render_mode)
        self._fields = _Fields(env.observation_space, env.action_space)
        self._info, self._renders = _names_of(info), render
        self._stream = _Stream(
            store,
            options,
            self._fields,
            called="Record",
            source=source,
            split=split,
            flush_steps=flush_steps,
            autoreset_mode=AutoresetMode.NEXT_STEP if _resets_itself(env) else None,
        )
        self._observation: dict[Key, Array] | None = None
        #: What the environment returned for the newest step, also if `step` raised an error.
        self.last_step: tuple[Any, Any, bool, bool, dict[str, Any]] | None = None

    @property
    def rb(self) -> Any:
        """The buffer over the store."""
        return self._stream.rb

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset the environment; an episode that has not ended is cut.

        Raises:
            StateError: The store is closed; the environment was not reset.
            StorageError: The disk failed; the environment was not reset.
            SchemaError: The observation is not as its space says.
        """
        self._stream.reset(info=None if seed is None else {"seed": int(seed)})
        self._observation = None
        observation, info = self.env.reset(seed=seed, options=options)
        self._observation = self._fields.copy_observation(observation)
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the environment, and store the step.

        Raises:
            StateError: The store is closed.
            StorageError: The disk failed. A note of the error says whether the step was made and is kept.
            NotReadyError: The store's rate limiter refused the step; the note is as above.
            SchemaError: The action or a frame is not as its space says, and the step was not made; or a value
                that the environment returned is not, and the step is not stored.
            ResetNeeded: The environment was not reset.
        """
        self._stream.prepare()
        observation = self._observation
        if observation is None:
            raise ResetNeeded("Cannot call env.step() before calling env.reset()")
        taken = self._fields.copy_action(action)
        more = {"frame": _frame(self.env.render())} if self._renders else {}
        self._stream.begin()
        result = self.last_step = self.env.step(action)
        following, reward, terminated, truncated, info = result
        self._observation = None
        after = self._observation = self._fields.copy_observation(following)
        for name in self._info:
            more[f"info.{name}"] = _entry(info, name)
        self._stream.record(observation, taken, float(reward), after, bool(terminated), bool(truncated), more)
        return result

    def flush(self) -> None:
        """Publish the steps that were recorded.

        Raises:
            StateError: The store is closed; the steps are kept.
            StorageError: The disk failed; the steps are kept.
            NotReadyError: The store's rate limiter refused the steps, which are kept.
        """
        self._stream.flush()

    def close(self) -> None:
        """Publish the recorded steps, cut an open episode, close the environment, and the store of a path."""
        try:
            self._stream.close()
        finally:
            super().close()


class RecordVector(VectorWrapper[Any, Any, Any, Any, Any]):
    """Record every step of a vector environment into a store.

    As `Record`; each lane is a stream of its own: `source`, `source//1`, `source//2` and so on. All three
    autoreset modes give the same episodes: a step in which a lane only resets is not stored for that lane,
    and the last next observation of an episode is the final observation of that episode.
    `reset(options={"reset_mask": mask})` cuts and begins episodes of these lanes only. The seed of an episode
    is the one that its lane got: `seed + lane`, or its entry of a list.

    The steps of all lanes are stored together, or not at all; the first ones after a reset with seeds are
    stored one after another.

    Args:
        env: The vector environment.
        store: As `Record`, and so are the other arguments but this one.
        autoreset_mode: How lanes are reset, if `env.metadata` does not say it: "NextStep", "SameStep",
            "Disabled", or gymnasium's enum.

    Raises:
        ArgumentError: As `Record`; or the autoreset mode is unknown.

    Example:
        >>> import gymnasium
        >>> from expstore.gym import RecordVector
        >>> envs = RecordVector(gymnasium.make_vec("CartPole-v1", num_envs=4), "run.exp", source="envs")
        >>> observations, infos = envs.reset(seed=1)
        >>> step = envs.step(envs.action_space.sample())
        >>> len(envs.rb)
        4
        >>> envs.close()
    """

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        store: str | Path | ReplayBuffer,
        *,
        source: str | None = "env",
        split: str | None = None,
        flush_steps: int = 1,
        info: Sequence[str] = (),
        render: bool = False,
        autoreset_mode: str | AutoresetMode | None = None,
        **options: Any,
    ) -> None:
        _check_env(env, VectorEnv)
        super().__init__(env)
        if render:
            _check_render_mode(env.render_mode)
        self._mode = autoreset_mode_of(env, autoreset_mode)
        lanes = env.num_envs
        self._fields = _Fields(env.single_observation_space, env.single_action_space, lanes)
        self._info, self._renders = _names_of(info), render
        self._stream = _Stream(
            store,
            options,
            self._fields,
            called="RecordVector",
            source=source,
            split=split,
            flush_steps=flush_steps,
            lanes=lanes,
        )
        self._observation: dict[Key, Array] | None = None
        self._ended: Array = np.zeros(lanes, np.bool_)
        #: What the environments returned for the newest step, also if `step` raised an error.
        self.last_step: tuple[Any, Any, Any, Any, dict[str, Any]] | None = None

    @property
    def rb(self) -> Any:
        """The buffer over the store."""
        return self._stream.rb

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all lanes, or those of `options["reset_mask"]`; their episodes that have not ended are cut.

        Raises:
            StateError: The store is closed; nothing was reset.
            StorageError: The disk failed; nothing was reset.
            SchemaError: The observations are not as their space says.
        """
        before, mask = self._observation, _mask_of(options, self.num_envs)
        chosen = None if mask is None else np.flatnonzero(mask).tolist()
        self._stream.reset(chosen, info=_seeds_of(seed, self.num_envs))
        if mask is None:
            self._observation = before = None
        observation, info = self.env.reset(seed=seed, options=options)  # type: ignore[arg-type]
        columns = self._fields.copy_observation(observation)
        if before is not None and mask is not None:
            for key, column in before.items():
                columns[key][~mask] = column[~mask]
        self._observation = columns
        self._ended = np.zeros_like(self._ended) if mask is None else self._ended & ~mask
        return observation, info

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step all lanes, and store their steps.

        Args:
            actions: One action per lane, of the environment's action space.

        Returns:
            Observations, rewards, terminations, truncations and infos, as the environment returned them; one
            entry per lane.

        Raises:
            ResetNeeded: `reset` was not called yet.
            StateError: The store is closed; no lane made a step.
            StorageError: The disk failed. `last_step` is what the environment returned, and the next call
                stores it first.
            NotReadyError: The store's rate limiter refused the step; the next call stores it first.
            SchemaError: Values are not as their space says.
        """
        self._stream.prepare()
        observation = self._observation
        if observation is None:
            raise ResetNeeded("Cannot call envs.step() before calling envs.reset()")
        taken = self._fields.copy_action(actions)
        more = {"frame": _frames(self.env.render())} if self._renders else {}
        valid = ~(self._ended & (self._mode is AutoresetMode.NEXT_STEP))
        self._stream.begin()
        result = self.last_step = self.env.step(actions)
        following, reward, terminated, truncated, info = result
        ended = np.asarray(terminated, np.bool_) | np.asarray(truncated, np.bool_)
        self._observation = None
        after = self._observation = self._fields.copy_observation(following)
        self._ended = ended
        final: Mapping[str, Any] = {}
        if self._mode is AutoresetMode.SAME_STEP and ended.any():
            after = put_final(after, self._fields.observation, ended, info)
            final = info.get("final_info", {})
        if valid.any():
            for name in self._info:
                more[f"info.{name}"] = _entries(info, final, name, ended, valid)
            self._stream.record(
                observation, taken, reward, after, terminated, truncated, more, None if valid.all() else valid
            )
        else:
            self._stream.skip()
        return result

    def flush(self) -> None:
        """Publish the steps that were recorded; see `Record.flush`."""
        self._stream.flush()

    def close(self, **kwargs: Any) -> None:
        """Publish the recorded steps, cut open episodes, close the environments, and the store of a path."""
        try:
            self._stream.close()
        finally:
            super().close(**kwargs)


class _Fields:
    """The fields of observations and actions.

    Args:
        observation: Space of one environment's observations.
        action: Space of one environment's actions.
        lanes: Number of environments; None: a single one.

    Raises:
        ArgumentError: A space has values without a fixed shape.
    """

    def __init__(self, observation: Any, action: Any, lanes: int | None = None) -> None:
        self.observation = fields_of(observation, ("observation",), with_texts=True)
        self.action = fields_of(action, ("action",), with_texts=True)
        self._lanes = lanes

    @property
    def has_text(self) -> bool:
        """Whether a field holds texts."""
        return any(field.is_text for field in (*self.observation, *self.action))

    def copy_observation(self, value: Any) -> dict[Key, Array]:
        """Return a copy of observations by key."""
        found = read_values(value, self.observation, self._lanes, "the environment")
        return {key: array.copy() for key, array in found.items()}

    def copy_action(self, value: Any) -> dict[Key, Array]:
        """Return a copy of actions by key: the environment may change them."""
        found = read_values(value, self.action, self._lanes, "the caller")
        return {key: array.copy() for key, array in found.items()}


def _check_env(env: object, kind: type) -> None:
    """Raise ArgumentError unless an environment is of the kind that a wrapper records."""
    if isinstance(env, kind):
        return
    wanted = "gymnasium.vector.VectorEnv" if kind is VectorEnv else "gymnasium.Env"
    if isinstance(env, str):
        hint = f"make it: gymnasium.{'make_vec' if kind is VectorEnv else 'make'}({env!r})"
    else:
        hint = "expstore.gym has Record for one environment and RecordVector for vector environments"
    raise ArgumentError(f"env must be a {wanted}, got a {type(env).__name__}", hint=hint)


class _Stream:
    """The stream of steps into a store.

    Args:
        store: Path of the store, or an open buffer.
        options: Arguments of `expstore.open` for a path.
        fields: The fields of observations and actions.
        called: Name of the wrapper, for messages.
        source: Name of the stream.
        split: The split of the episodes.
        flush_steps: Number of steps that are published together.
        lanes: Number of environments; None: a single one.
        autoreset_mode: As `rb.record`.
    """

    def __init__(
        self,
        store: str | Path | ReplayBuffer,
        options: dict[str, Any],
        fields: _Fields,
        *,
        called: str,
        source: str | None,
        split: str | None,
        flush_steps: int,
        lanes: int | None = None,
        autoreset_mode: Any = None,
    ) -> None:
        self._fields, self._owns = fields, isinstance(store, str | Path)
        if self._owns:
            check_options(called, options, _OPTIONS[called])
        self.rb: Any = _open(store, options, has_text=fields.has_text)
        try:
            if not len(self.rb.transform):  # a transform may change what is stored
                check_spaces(self.rb, (*fields.observation, *fields.action), _path_of(store))
            self._recorder: Recorder = self.rb.record(
                source, lanes=lanes, flush_steps=flush_steps, autoreset_mode=autoreset_mode, split=split
            )
        except BaseException:
            if self._owns:
                self.rb.close()
            raise
        self._has_unwritten = False  # whether the store failed to take a step, which is kept
        self._is_torn = False  # whether a step was made that is not recorded
        self._is_described = False
        self._is_closed = False

    def prepare(self) -> None:
        """Write a step that the store failed to take, and cut an episode of which a step was lost.

        Raises:
            StateError: The stream or the store is closed.
            StorageError: The disk failed.
        """
        if self._is_closed:
            raise StateError("the environment is closed, and its steps are not recorded", hint="wrap another")
        if self._has_unwritten:
            self.flush()
        if self._is_torn:
            self._recorder.reset()
            self._is_torn = False

    def begin(self) -> None:
        """Note that a step is made, which is lost unless `record` or `skip` follows."""
        self._is_torn = True

    def skip(self) -> None:
        """Note that the step was only a reset of all lanes."""
        self._is_torn = False

    def record(
        self,
        observation: dict[Key, Array],
        action: dict[Key, Array],
        reward: Any,
        following: dict[Key, Array],
        terminated: Any,
        truncated: Any,
        more: dict[str, Any],
        valid: Array | None = None,
    ) -> None:
        """Record a step; see `Recorder.step`."""
        pending = self._recorder.pending
        try:
            self._recorder.step(
                _nest(observation),
                _nest(action),
                reward,
                _nest(following),
                terminated,
                truncated,
                valid=valid,
                **more,
            )
        except ExpStoreError as exc:
            if self._recorder.pending > pending:
                self._has_unwritten, self._is_torn = True, False
                exc.add_note("The environment has made the step (`last_step`), and the next call writes it.")
            else:
                exc.add_note("The environment has made the step (`last_step`), which is not stored.")
            raise
        self._is_torn = False
        if not self._is_described and not self._recorder.pending:
            self._describe()

    def _describe(self) -> None:
        """Store the specs of the fields, once the store has rows."""
        self._is_described = True
        describe_rows(self.rb, find_specs(self._fields.observation, self._fields.action))

    def reset(self, lanes: Sequence[int] | None = None, *, info: Any = None) -> None:
        """Cut the open episodes of lanes, and note facts about the next ones; see `Recorder.reset`."""
        self.prepare()
        self._recorder.reset(lanes, info=info)

    def flush(self) -> None:
        """Publish the recorded steps."""
        self._recorder.flush()
        self._has_unwritten = False

    def close(self) -> None:
        """Publish the recorded steps, cut the open episodes, and close a store that was opened here."""
        if self._is_closed:
            return
        # A buffer that its owner has closed has cut the episodes.
        with contextlib.nullcontext() if self._recorder.pending else contextlib.suppress(StateError):
            self._recorder.close()
        self._is_closed = True
        if self._owns:
            self.rb.close()


def _open(store: str | Path | ReplayBuffer, options: dict[str, Any], *, has_text: bool) -> Any:
    """Return the buffer of a store.

    Raises:
        ArgumentError: The store is neither a path nor a buffer that records, or options are given for a
            buffer.
    """
    if isinstance(store, str | Path):
        if has_text:
            options = {"layout": "arrow"} | options
        return open_store(store, **options)
    if not isinstance(store, ReplayBuffer):
        raise ArgumentError(
            f"store is a {type(store).__name__}; pass a path, or an open buffer of this process, such as "
            "expstore.open(path) returns"
        )
    if options:
        raise ArgumentError(
            f"{', '.join(options)}: options are for a store that is opened here; pass them to expstore.open"
        )
    return store


def _path_of(store: Any) -> str | None:
    """Return the path of a store, by which it can be opened again; None: it has none."""
    path = store if isinstance(store, str | Path) else getattr(getattr(store, "storage", None), "path", None)
    return None if path is None else str(path)


def _nest(columns: dict[Key, Array]) -> Any:
    """Return the values of fields as the recorder takes them: an array, or nested dicts by name."""
    nested: dict[str, Any] = {}
    for (_, *path), array in columns.items():
        if not path:
            return array
        place = nested
        for name in path[:-1]:
            place = place.setdefault(name, {})
        place[path[-1]] = array
    return nested


def _names_of(info: Sequence[str]) -> tuple[str, ...]:
    if isinstance(info, str):
        raise ArgumentError(f"info={info!r} is one text; pass a sequence of names, such as info=({info!r},)")
    return tuple(info)


def _check_render_mode(mode: str | None) -> None:
    if mode != _FRAMES:
        raise ArgumentError(
            f"render=True stores frames, and the environment has render_mode={mode!r}; create it with "
            f"render_mode={_FRAMES!r}"
        )


def _frame(frame: Any) -> Array:
    """Return a copy of a rendered frame. Shape `(height, width, 3)`, uint8.

    Raises:
        SchemaError: It is something else.
    """
    array = np.array(frame)
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[-1] != 3:
        raise SchemaError(
            f"the environment rendered {array.dtype} of shape {[*array.shape]}, and a frame is uint8 of "
            "shape [height, width, 3]",
            hint="the step was not made; leave render=True out",
        )
    return array


def _frames(frames: Any) -> Array:
    """Return a copy of the frames of all lanes. Shape `(lanes, height, width, 3)`, uint8."""
    return np.stack([_frame(frame) for frame in frames])


def _entry(info: Mapping[str, Any], name: str) -> Any:
    """Return an entry of the info of a step.

    Raises:
        SchemaError: The entry is missing, or is a dict.
    """
    if name not in info:
        raise _missing(name, "the step", info)
    if isinstance(info[name], Mapping):
        raise _refuse_dict(name)
    return info[name]


def _entries(
    info: Mapping[str, Any], final: Mapping[str, Any], name: str, ended: Array, valid: Array
) -> Array:
    """Return an entry of the infos of all lanes. Shape `(lanes, *shape)`.

    Args:
        info: The infos of the step.
        final: The infos of the ended episodes, whose lanes `info` describes after the reset; or empty.
        name: Name of the entry.
        ended: Which lanes ended an episode. Shape `(lanes,)`, bool.
        valid: Which lanes made a step. Shape `(lanes,)`, bool.

    Raises:
        SchemaError: A lane that made a step has none, or it is a dict.
    """
    found: Array | None = None
    lacking = valid.copy()
    for source, lanes in ((final, valid & ended), (info, valid if not final else valid & ~ended)):
        values = source.get(name)
        if isinstance(values, Mapping):
            raise _refuse_dict(name)
        if values is None or not lanes.any():
            continue
        column = np.asarray(values)
        has = lanes & np.asarray(source.get(f"_{name}", lanes), np.bool_)
        if found is None:
            found = column.copy()
        found[has] = column[has]
        lacking &= ~has
    if found is None or lacking.any():
        raise _missing(name, f"lanes {np.flatnonzero(lacking).tolist()}", info)
    return found


def _missing(name: str, where: str, info: Mapping[str, Any]) -> SchemaError:
    known = ", ".join(repr(key) for key in info if not key.startswith("_")) or "nothing"
    return SchemaError(
        f"the environment returned no info {name!r} for {where}, and info= names it; it returned {known}",
        hint="the step is not stored; name only entries that every step has",
    )


def _refuse_dict(name: str) -> SchemaError:
    return SchemaError(
        f"the info {name!r} is a dict, and a field holds numbers or arrays of a fixed shape",
        hint="the step is not stored; name another entry, or flatten it in a wrapper",
    )


def _resets_itself(env: gym.Env[Any, Any]) -> bool:
    """Return whether a wrapper resets the environment in the step after an episode ended."""
    while isinstance(env, gym.Wrapper):
        if isinstance(env, gym.wrappers.Autoreset):
            return True
        env = env.env
    return False


def _mask_of(options: dict[str, Any] | None, lanes: int) -> Array | None:
    """Return a copy of the mask of lanes that are reset; None: all are. gymnasium refuses other masks."""
    mask = (options or {}).get("reset_mask")
    if isinstance(mask, np.ndarray) and mask.dtype == np.bool_ and mask.shape == (lanes,):
        return mask.copy()
    return None


def _seeds_of(seed: int | Sequence[int | None] | None, lanes: int) -> list[dict[str, int] | None] | None:
    """Return the seed that each lane gets, as a fact."""
    if seed is None:
        return None
    seeds = [seed + lane for lane in range(lanes)] if isinstance(seed, int) else seed
    if len(seeds) != lanes:
        return None  # gymnasium raises the error
    return [None if one is None else {"seed": int(one)} for one in seeds]
