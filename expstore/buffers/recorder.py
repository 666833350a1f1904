"""Record the steps of an environment loop: one call per step, without building a TensorDict or batch.

`ReplayBuffer.record` creates it. Values are copied into preallocated arrays; a flush appends them as one
batch, in the same way as `extend`. It draws no batches.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
import torch

from expstore.core.bfloat16 import widen_bfloat16
from expstore.core.tables import elide
from expstore.core.values import Array, IntArray, Key, key_name
from expstore.data.batch import Batch
from expstore.data.row_cells import Cells, compile_put
from expstore.episodes.facts import merge_info, pack_info, source_of_split
from expstore.episodes.segmentation import RunReader
from expstore.episodes.sources import lane_names
from expstore.errors import (
    ArgumentError,
    ExpStoreError,
    NotReadyError,
    SchemaError,
    StateError,
    StorageError,
)
from expstore.schema.row_selection import concatenate, pick
from expstore.schema.schema import Field, Schema
from expstore.storages.capabilities import RowAppending

_NEXT = "next"
#: How environments reset, by gymnasium's names.
_MODES = ("NextStep", "SameStep", "Disabled")
_FLAGS = ("done", "terminated", "truncated")


class RecorderTarget(Protocol):
    """The methods of a buffer that a recorder uses."""

    def schema(self) -> Schema | None:
        """Return the schema; None before the first rows."""

    def fix_fields(self, row: Mapping[str, Any]) -> Schema:
        """Fix the schema by the fields of one row, without writing the row; return the schema."""

    def read_step(self, values: Mapping[str, Any], *, single: bool) -> Batch:
        """Convert a step to columns: one row, or one for each lane."""

    def append_columns(self, batch: Batch, source: str | None, info: str = "") -> None:
        """Append rows whose columns are in the schema's order, with facts about their episodes."""

    def row_appender(self, schema: Schema, rows: int) -> RowAppending | None:
        """Return an appender that is faster than `append_columns` while `is_plain`, or None."""

    def run_reader(self, schema: Schema, columns: Sequence[Array]) -> RunReader:
        """Return a reader of the episode fields of rows; for rows that `row_appender` appends."""

    def is_plain(self, schema: Schema) -> bool:
        """Return whether only the storage has to process rows."""

    def cut(self, source: str | None, lanes: Sequence[int] | None = None) -> None:
        """End the open episodes of a stream of this session, of some lanes or of all.

        Resumed episodes stay open until a row continues them.
        """


class Recorder:
    """Record the steps of one environment, or of several that step together.

    An episode begins with the first step of the recorder, and with the first step after one that was
    `terminated` or `truncated` and after `reset`. `reset` and `close` cut open episodes.

    Threads: one thread uses a recorder; others may use the buffer, and recorders of other sources. Processes:
    a forked child cannot record. Crashes: with `flush_steps=1` a step survives the end of the process once
    `step` has returned; with n, up to n - 1 steps are lost, also if Ctrl-C interrupts a flush. A power
    failure loses the steps since the last sync of the store, about one second, or none with
    `durability="sync"`.

    Args:
        target: The buffer.
        source: Name of the stream; with several lanes each lane is a separate stream below it.
        lanes: Number of environments that step together; the first dim of every value has this size. None:
            one environment, and values have no such dim.
        flush_steps: Number of steps that are published together.
        autoreset_mode: How the environment resets, by gymnasium's names. "NextStep": the step after one that
            ended an episode only resets, and is not recorded. "SameStep", "Disabled" or None: every step is
            recorded.
        split: The split of the episodes; None for "train".

    Raises:
        ArgumentError: `lanes` or `flush_steps` is less than 1, or there is no such mode or split.

    Example:
        >>> import gymnasium
        >>> env = gymnasium.make("CartPole-v1")
        >>> with expstore.open("run.exp") as rb, rb.record(source="env-0") as episode:
        ...     observation, _ = env.reset(seed=0)
        ...     for _ in range(1000):
        ...         action = env.action_space.sample()
        ...         following, reward, terminated, truncated, _ = env.step(action)
        ...         episode.step(observation, action, reward, following, terminated, truncated)
        ...         observation = env.reset()[0] if terminated or truncated else following
    """

    def __init__(
        self,
        target: RecorderTarget,
        source: str | None = None,
        *,
        lanes: int | None = None,
        flush_steps: int = 1,
        autoreset_mode: Any = None,
        split: str | None = None,
    ) -> None:
        for name, number in (("lanes", lanes), ("flush_steps", flush_steps)):
            if number is not None and (not isinstance(number, int) or number < 1):
                raise ArgumentError(f"{name} must be an integer of at least 1, got {number!r}")
        mode = getattr(autoreset_mode, "value", autoreset_mode)
        if mode not in (None, *_MODES):
            modes = ", ".join(map(repr, _MODES))
            raise ArgumentError(f"autoreset_mode is {mode!r}; it is one of {modes}, or None")
        self._skips_resets = mode == "NextStep"
        #: Whether each lane's last step ended an episode. Shape `(lanes,)`, or `()`.
        self._ended: Array = np.zeros(() if lanes is None else lanes, np.bool_)
        if source is not None:
            lane_names(source, "", 1)  # raises if it is not a valid name
        #: Facts about all episodes, as JSON text.
        self._info = "" if split is None else pack_info(None, split)
        source = source_of_split(source, split)
        self._target, self._source = target, source
        self._lanes, self._flush_steps = lanes, flush_steps
        self._block: _Block | _VariableBlock | None = None
        #: Facts about the next episode of a lane, as JSON text; without lanes of lane 0.
        self._facts: dict[int, str] = {}
        self._appender: RowAppending | None = None
        self._filled = 0
        self._closed = False
        target.cut(source)

    def step(
        self,
        observation: Any,
        action: Any,
        reward: Any,
        next_observation: Any,
        terminated: Any,
        truncated: Any,
        *,
        valid: Any = None,
        **more: Any,
    ) -> None:
        """Record one step: a row, or one for each lane.

        The first step of a store without fields fixes them: `observation`, `action`, `next.observation`,
        `next.reward` (float32), and the flags `next.terminated`, `next.truncated` and `next.done`. Later
        steps must have the same fields. A number is cast to the dtype of its field if it loses no more than
        the precision of a float. If rows also have flags at the root, these are False.

        Args:
            observation: The observation before the action: an array, a number, or a dict of them.
            action: The action, in a form as `observation`.
            reward: A number; with lanes shape `(lanes,)`.
            next_observation: The observation after the action. At the end of an episode the last observation
                of that episode, not the first one of the next.
            terminated: Whether the environment ended the episode; with lanes shape `(lanes,)`.
            truncated: Whether the episode was stopped from outside, by a time limit for instance; shape as
                `terminated`.
            valid: Which lanes made a step. In a vector environment whose lanes reset in a separate step,
                False for the lanes that only reset. Shape `(lanes,)`; None: all.
            more: Other fields, by name; a name with dots is a path: `**{"next.value": value}`.

        Raises:
            SchemaError: A value does not fit its field, or a field is missing; nothing was recorded.
            StateError: The recorder or the store is closed.
            StorageError: The disk failed. The step is kept; the next call or `flush` writes it first.
            NotReadyError: The rate limiter refused the rows, which are kept, as above.
            ArgumentError: The rate limiter never permits so many rows at once; they are kept, as above.
        """
        if self._filled == self._flush_steps or (self._facts and self._filled):
            self.flush()  # the previous flush has failed
        if self._skips_resets:
            if self._lanes is None and self._ended:
                self._ended[()] = False
                return
            valid = self._find_steps(valid)
        block, row = self._block, self._filled
        if block is None or not block.put_plain(
            row, observation, action, reward, next_observation, terminated, truncated, more
        ):
            values = (observation, action, reward, next_observation, terminated, truncated)
            if block is None or more.keys() != block.names:
                block = self._find_block(values, more)
                row = self._filled
            block.put(row, values, more)
        if valid is not None or self._lanes is not None:
            block.mask.set(row, valid)
        if self._skips_resets:
            self._ended[...] = block.mask.only(row, block.find_ends(row))
        self._filled = row + 1
        if self._filled == self._flush_steps or self._facts:
            self.flush()

    def _find_steps(self, valid: Any) -> Any:
        """Return which lanes make a step that is not just a reset; None: there are no lanes."""
        if self._lanes is None:
            return valid
        return ~self._ended if valid is None else np.asarray(valid, np.bool_) & ~self._ended

    @property
    def pending(self) -> int:
        """Number of recorded steps that are not published yet."""
        return self._filled

    def flush(self) -> None:
        """Publish the steps that were recorded since the last flush.

        Raises:
            StateError: The store is closed, or open for reading only; the steps are kept.
            StorageError: The disk failed; the steps are kept, and the next flush writes them.
            NotReadyError: The rate limiter refused the rows (kind "rate_limited"); the steps are kept.
            ArgumentError: The rate limiter never permits so many rows at once; the steps are kept.
            SchemaError: The first step does not continue a resumed episode (`episodes.resume`); the steps are
                dropped.
        """
        block, filled = self._block, self._filled
        if not filled or block is None:
            return
        self._filled = 0  # first, so that no step is written twice after an interruption
        try:
            if self._facts and not self._append_first_steps(block):
                return
            if isinstance(block, _Block) and block.runs is not None and filled == self._flush_steps:
                runs, appender = block.runs, self._appender
                if appender is not None and not self._info and self._target.is_plain(block.schema):
                    block.set_done(filled)
                    if appender.append(self._source, runs.read()):
                        return
            batch = block.batch(filled)
            if batch.count:
                self._target.append_columns(batch, self._source, self._info)
        except (StateError, StorageError, NotReadyError, ArgumentError):  # nothing was written
            self._filled = filled
            raise

    def _append_first_steps(self, block: _Block | _VariableBlock) -> bool:
        """Append the first steps of the episodes that have facts; return whether the block has other rows."""
        for lane, facts in list(self._facts.items()):
            batch = block.batch(1, lane)
            if batch.count:
                self._target.append_columns(batch, self._source, merge_info(self._info, facts))
                del self._facts[lane]
                if self._lanes is None:
                    return False
                block.mask.exclude(lane)
        return True

    def reset(
        self,
        lanes: Sequence[int] | None = None,
        *,
        info: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None = None,
    ) -> None:
        """Cut the open episodes: the next step of each lane begins a new episode.

        Call it when an environment is reset during an episode.

        Args:
            lanes: Numbers of the lanes that are reset; None: all.
            info: Facts about the episodes that begin, as in `episodes.annotate`: one mapping, or with several
                lanes one for each lane of the recorder (None: no facts). They are stored with the first step
                of the episode; the first steps of several lanes are then stored one after another.

        Raises:
            SchemaError: JSON cannot represent a fact; nothing was cut.
            ArgumentError: There is no such lane, or `info` has another length; nothing was cut.
        """
        count = self._lanes or 1
        numbers = np.arange(count) if lanes is None else np.asarray(lanes)
        if numbers.size and (
            numbers.ndim != 1
            or numbers.dtype.kind not in "iu"
            or not np.isin(numbers, np.arange(count)).all()
        ):
            raise ArgumentError(
                f"lanes must be a list of numbers from 0 to {count - 1}, got {elide(repr(lanes), 60)}",
                hint="leave it out to reset all lanes; step() takes the first observation",
            )
        if isinstance(info, Sequence) and len(info) != count:
            raise ArgumentError(f"info must have one entry for each of {count} lanes, got {len(info)}")
        chosen = numbers.tolist()
        facts = {lane: pack_info(info[lane] if isinstance(info, Sequence) else info) for lane in chosen}
        self.flush()
        self._ended[... if lanes is None else chosen] = False
        self._target.cut(self._source, None if lanes is None else chosen)
        self._facts = {lane: text for lane, text in (self._facts | facts).items() if text}

    def close(self) -> None:
        """Publish the recorded steps and cut the open episodes; a second call does nothing."""
        if not self._closed:
            self.reset()
            self._closed = True
            self._block = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Raise the loop's own error rather than one that follows from it here.
        with contextlib.suppress(ExpStoreError) if error is not None else contextlib.nullcontext():
            self.close()

    def _find_block(self, values: tuple[Any, ...], more: Mapping[str, Any]) -> _Block | _VariableBlock:
        """Return the arrays for steps with these fields."""
        if self._closed:
            raise StateError("the recorder is closed", hint="make another one: rb.record()")
        self.flush()
        schema = self._target.schema()
        if schema is None:
            _refuse_missing(values, more)
            schema = self._target.fix_fields(_first_row(values, more, self._lanes))
        schema = schema.written
        if schema.variable:
            self._block = _VariableBlock(
                schema, more.keys(), self._lanes, self._flush_steps, self._target.read_step
            )
            self._appender = None
            return self._block
        appender = None if self._lanes is not None else self._target.row_appender(schema, self._flush_steps)
        memory = None if appender is None else appender.fields
        block = _Block(schema, values, more, self._lanes, self._flush_steps, memory)
        if appender is not None:
            block.runs = self._target.run_reader(schema, block.columns)
        self._block, self._appender = block, appender
        return block


def _refuse_missing(values: tuple[Any, ...], more: Mapping[str, Any]) -> None:
    """Raise SchemaError if the first step has None for a field: a field's type follows from its value."""
    observation, action, _, following, _, _ = values
    named = {"observation": observation, "action": action, "next_observation": following, **more}
    for name, value in named.items():
        if value is None:
            raise SchemaError(f"the first step has None for {name!r}", hint="pass an array or a number")


def _first_row(values: tuple[Any, ...], more: Mapping[str, Any], lanes: int | None) -> dict[str, Any]:
    """Return the first row as a nested dict, with the shapes and dtypes that its fields will have."""

    def one(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: one(part) for name, part in value.items()}
        return value if lanes is None else _lanes_of(value, lanes)[0]

    observation, action, reward, following, terminated, truncated = (one(value) for value in values)
    for name, value in (("reward", reward), ("terminated", terminated), ("truncated", truncated)):
        if math.prod(np.shape(value)) != 1 or isinstance(value, str):
            raise SchemaError(f"a step has one number for {name!r} in each lane, got {_name(value)}")
    flags = {"terminated": bool(terminated), "truncated": bool(truncated)}
    flags["done"] = flags["terminated"] or flags["truncated"]
    after = {
        "observation": following,
        "reward": np.array([reward], np.float32).reshape(1),
        **{name: np.array([flag]) for name, flag in flags.items()},
    }
    row = {"observation": observation, "action": action, _NEXT: after}
    for name, value in more.items():
        place = row
        *path, last = name.split(".")
        for part in path:
            place = place.setdefault(part, {})
        place[last] = one(value)
    return row


def _lanes_of(value: Any, lanes: int) -> Any:
    """Return the values of all lanes; raise an error if their number differs from `lanes`."""
    found = value if isinstance(value, torch.Tensor) else np.asarray(value)
    if not found.shape or found.shape[0] != lanes:
        raise SchemaError(
            f"a value has shape {[*found.shape]}, and {lanes} lanes step together",
            hint="the first dim of every value must be the lanes",
        )
    return found


class _Column:
    """The values of one field, step by step.

    Args:
        entry: The field.
        lanes: As in `Recorder`.
        steps: Number of steps.
        memory: Memory for the values. Shape `(bytes,)`, uint8.
    """

    __slots__ = ("_dtype", "_entry", "_lanes", "_shape", "cells", "rows", "values")

    def __init__(self, entry: Field, lanes: int | None, steps: int, memory: Array) -> None:
        self._entry, self._lanes, dtype = entry, lanes, entry.numpy_dtype
        #: One value per step and lane. Shape `(steps, *row shape)`, or `(steps, lanes, *row shape)`.
        self.values: Array = memory.view(dtype).reshape(
            steps, *(() if lanes is None else (lanes,)), *entry.shape
        )
        # Fields with one value per row are usually passed without their dim of size 1.
        own = () if entry.row_items == 1 else entry.shape
        self._shape: tuple[int, ...] = own if lanes is None else (lanes, *own)
        #: The same memory; shape `(steps, *_shape)`.
        self.rows: Array = self.values.reshape(steps, *self._shape)
        self._dtype = dtype
        #: The same memory, for values that need no conversion.
        has_one = self._shape == () and entry.dtype != "bfloat16"
        self.cells = Cells.of(self.rows, takes_numbers=has_one, any_shape=has_one)

    def put(self, at: int, value: Any) -> None:
        """Write the value of a step.

        Raises:
            SchemaError: The value does not fit.
        """
        self.rows[at] = self._convert(value)

    def _convert(self, value: Any) -> Array:
        """Convert a value to the dtype and shape of the field."""
        entry = self._entry
        cast = _cast(_as_array(value, entry.dtype == "bfloat16"), self._dtype)
        # The value of a field with one value per row may have or lack the dim of size 1.
        fits = cast is not None and (
            cast.shape in (self._shape, self.values.shape[1:])
            or (entry.row_items == 1 and cast.size == self.rows[0].size)
        )
        if cast is None or not fits:
            lanes = "" if self._lanes is None else f" in each of {self._lanes} lanes"
            raise SchemaError(
                f"{key_name(entry.key)!r} is {entry}{lanes}, and a step has {_name(value)} for it"
            )
        return cast.reshape(self._shape)


def _as_array(value: Any, is_bfloat16: bool) -> Array:
    """Return a value as an array: for bfloat16 its bits, and an array of objects if it is no number.

    Numbers that become infinite as bfloat16, and masked ones, are no numbers of the field.
    """
    if np.ma.is_masked(value):
        return np.empty((), object)
    if not isinstance(value, torch.Tensor):
        try:
            array = np.asarray(value)
        except ValueError:  # ragged
            return np.empty((), object)
        if not is_bfloat16 or array.dtype.kind not in "biuf":
            return array
        value = torch.from_numpy(array.astype(np.float64))
    value = value.detach().cpu()
    if is_bfloat16:
        bits: Array = value.to(torch.bfloat16).view(torch.uint16).numpy()
        kept = np.isfinite(widen_bfloat16(bits)) == value.isfinite().numpy()
        return bits if kept.all() else np.empty((), object)
    elif value.dtype is torch.bfloat16:
        value = value.float()
    found: Array = value.numpy()
    return found


def _cast(array: Array, wanted: np.dtype[Any]) -> Array | None:
    """Cast an array to another dtype; None if more than the precision of a float would be lost."""
    if array.dtype.kind not in "biufc" or not np.can_cast(array.dtype, wanted, "same_kind"):
        return None
    if array.dtype == wanted:
        return array
    with np.errstate(over="ignore"):
        cast = array.astype(wanted)
    kept = cast == array if wanted.kind in "iu" else np.isfinite(cast) == np.isfinite(array)
    return cast if kept.all() else None


def _name(value: Any) -> str:
    """Describe a value in a message."""
    if np.ma.is_masked(value):
        return "an array with masked elements"
    if isinstance(value, (np.ndarray, np.generic, torch.Tensor)):
        return f"{value.dtype} of shape {[*value.shape]}"
    return f"{value!r:.60}"


class _Group:
    """The values of fields that a step passes as a dict.

    Args:
        parts: The columns and groups below each name.
        key: Key of the dict.
    """

    __slots__ = ("_key", "_parts", "cells")

    def __init__(self, parts: dict[str, _Column | _Group], key: Key) -> None:
        self._parts, self._key = parts, key
        #: The cells of the values, by name.
        self.cells: dict[str, Any] = {name: part.cells for name, part in parts.items()}

    def put(self, at: int, value: Any) -> None:
        """Write the values of a step.

        Raises:
            SchemaError: The values do not fit.
        """
        if not isinstance(value, Mapping) or value.keys() != self._parts.keys():
            raise SchemaError(
                f"{key_name(self._key)!r} is a dict of {', '.join(self._parts)}; a step has {_name(value)}"
            )
        for name, part in self._parts.items():
            part.put(at, value[name])


class _Block:
    """The steps of a recorder between two flushes.

    Args:
        schema: The fields of the store.
        values: The arguments of the first `Recorder.step`.
        more: Its additional fields.
        lanes: As in `Recorder`.
        steps: Number of steps that fit.
        memory: Memory for the columns, one after another; None: it is allocated. Shape `(bytes,)`, uint8.

    Raises:
        SchemaError: The fields of the step differ from the store's.
    """

    def __init__(
        self,
        schema: Schema,
        values: tuple[Any, ...],
        more: Mapping[str, Any],
        lanes: int | None,
        steps: int,
        memory: Array | None,
    ) -> None:
        self.schema, self._lanes, self._steps = schema, lanes, steps
        sizes = [steps * (lanes or 1) * entry.row_bytes for entry in schema.fields]
        parts = np.split(np.zeros(sum(sizes), np.uint8) if memory is None else memory, np.cumsum(sizes)[:-1])
        self._columns = [
            _Column(entry, lanes, steps, part) for entry, part in zip(schema.fields, parts, strict=True)
        ]
        self._by_key = dict(zip(schema.keys, self._columns, strict=True))
        self._left = dict(self._by_key)
        observation, action, _, following, _, _ = values
        self._values = (
            self._take(("observation",), observation),
            self._take(("action",), action),
            self._take((_NEXT, "reward"), None),
            self._take((_NEXT, "observation"), following),
            self._take((_NEXT, "terminated"), None),
            self._take((_NEXT, "truncated"), None),
        )
        self._more = {name: self._take(tuple(name.split(".")), value) for name, value in more.items()}
        #: The names of the additional fields.
        self.names = more.keys() | set()
        #: Writes the values of a step, the last of which is the dict of additional fields, if none needs a
        #: conversion; see `compile_put`.
        self.put_plain = compile_put(
            [*(part.cells for part in self._values), {name: part.cells for name, part in self._more.items()}]
        )
        #: Reader of the episode fields of the steps; None: the storage reads them.
        self.runs: RunReader | None = None
        self._terminated, self._truncated = (
            self._by_key[_NEXT, name].rows for name in ("terminated", "truncated")
        )
        self._done = self._left.pop((_NEXT, "done"), None)
        for flag in _FLAGS:  # flags of the observation before the step, which did not end an episode
            self._left.pop((flag,), None)
        if self._left:
            names = ", ".join(map(key_name, self._left))
            raise SchemaError(
                f"the step lacks fields of this store: {names}",
                hint="pass them by name: step(..., **{'name.with.dots': value})",
            )
        #: Which lanes make a step.
        self.mask = _StepMask(lanes, steps)
        #: The columns of all steps. Shapes `(steps * lanes, *row shape)`.
        self.columns = self._flat(steps)

    def _take(self, key: Key, value: Any) -> _Column | _Group:
        """Return the column of a field, or the group of all fields below it."""
        if isinstance(value, Mapping):
            return _Group(
                {str(name): self._take((*key, str(name)), part) for name, part in value.items()}, key
            )
        if key not in self._left:
            raise SchemaError(
                f"rows of this store have no field {key_name(key)!r}",
                hint=f"they have {', '.join(map(key_name, self._by_key))}",
            )
        return self._left.pop(key)

    def put(self, at: int, values: tuple[Any, ...], more: Mapping[str, Any]) -> None:
        """Write the values of a step.

        Raises:
            SchemaError: A value does not fit.
        """
        for part, value in zip(self._values, values, strict=True):
            part.put(at, value)
        for name, value in more.items():
            self._more[name].put(at, value)

    def find_ends(self, step: int) -> Array:
        """Return in which lanes a step is terminated or truncated. Shape `(lanes,)`, or `()`."""
        ends: Array = self._terminated[step] | self._truncated[step]
        return ends

    def set_done(self, steps: int) -> None:
        """Compute the flag `done` of the first steps from the other flags."""
        if self._done is None:
            return
        done, terminated, truncated = self._done.rows, self._terminated, self._truncated
        if steps == 1 and self._lanes is None:
            done[0] = terminated.item(0) or truncated.item(0)
        else:
            np.logical_or(terminated[:steps], truncated[:steps], out=done[:steps])

    def _flat(self, steps: int) -> list[Array]:
        """Return the columns of the first steps. Shapes `(steps * lanes, *row shape)`."""
        rows = steps * (self._lanes or 1)
        return [
            column.values[:steps].reshape(rows, *entry.shape)
            for column, entry in zip(self._columns, self.schema.fields, strict=True)
        ]

    def batch(self, steps: int, lane: int | None = None) -> Batch:
        """Return the first steps as a batch, of one lane or of all."""
        self.set_done(steps)
        columns = self.columns if steps == self._steps else self._flat(steps)
        return self.mask.batch_of(self.schema, columns, steps, lane)


class _StepMask:
    """Which lanes make the steps of a block.

    Args:
        lanes: As in `Recorder`.
        steps: Number of steps.
    """

    __slots__ = ("_lanes", "_numbers", "_valid")

    def __init__(self, lanes: int | None, steps: int) -> None:
        self._lanes = lanes
        self._valid = np.ones((steps, lanes or 1), np.bool_)
        self._numbers: IntArray = np.tile(np.arange(lanes or 1), steps)

    def set(self, step: int, valid: Any) -> None:
        """Set which lanes make a step; None: all.

        Raises:
            SchemaError: There are no lanes.
        """
        if self._lanes is None:
            raise SchemaError("valid= requires several lanes", hint="do not call step() for a reset")
        self._valid[step] = True if valid is None else valid

    def exclude(self, lane: int) -> None:
        """Remove a lane from the first step."""
        self._valid[0, lane] = False

    def only(self, step: int, flags: Array) -> Array:
        """Return flags, which are False for lanes that do not make a step. Shapes `(lanes,)`, or `()`."""
        return flags if self._lanes is None else flags & self._valid[step]

    def batch_of(self, schema: Schema, columns: Sequence[Any], steps: int, lane: int | None) -> Batch:
        """Return the rows of the lanes that make the first steps.

        Args:
            schema: The fields.
            columns: Their values, of all lanes. Shapes `(steps * lanes, *row shape)`.
            steps: Number of steps.
            lane: Number of the only lane; None: all lanes.
        """
        lanes, valid = self._numbers[: steps * (self._lanes or 1)], self._valid[:steps].reshape(-1)
        if lane is not None:
            valid = valid & (lanes == lane)
        if not valid.all():
            columns, lanes = [pick(column, valid) for column in columns], lanes[valid]
        return Batch(
            [],
            [],
            list(columns),
            lanes.size,
            lanes=None if self._lanes is None else lanes,
            lane_count=self._lanes or 1,
            arranged=schema,
            linked=False,
        )


class _VariableBlock:
    """The steps of a recorder between two flushes, if fields are of variable length.

    Each step is converted to columns of its own, as a dict that `add` gets. This takes longer than `_Block`.

    Args:
        schema: The fields of the store.
        names: Names of the additional fields of each step.
        lanes: As in `Recorder`.
        steps: Number of steps that fit.
        read: Converts a step to columns; see `RecorderTarget.read_step`.
    """

    def __init__(
        self,
        schema: Schema,
        names: Iterable[str],
        lanes: int | None,
        steps: int,
        read: Callable[..., Batch],
    ) -> None:
        self.schema, self.mask = schema, _StepMask(lanes, steps)
        #: The names of the additional fields.
        self.names = {*names}
        self._lanes, self._read = lanes, read
        self._steps: list[list[Any]] = []
        self._ends: list[Array] = []

    def put_plain(self, *step: Any) -> bool:
        """Return False: every step needs a conversion."""
        return False

    def put(self, at: int, values: tuple[Any, ...], more: Mapping[str, Any]) -> None:
        """Keep the values of a step.

        Raises:
            SchemaError: A value does not fit.
        """
        observation, action, reward, following, terminated, truncated = values
        ends = np.asarray(terminated, np.bool_) | np.asarray(truncated, np.bool_)
        flags = {"terminated": _to_flags(terminated), "truncated": _to_flags(truncated), "done": ends}
        numbers: dict[Key, Any] = {
            (_NEXT, name): value for name, value in (flags | {"reward": reward}).items()
        }
        numbers |= {(name,): np.zeros_like(ends) for name in _FLAGS}  # see `_Block`
        row = {"observation": observation, "action": action, f"{_NEXT}.observation": following, **more}
        for key, value in numbers.items():
            if key in self.schema:
                entry = self.schema[key]
                lead = () if self._lanes is None else (self._lanes,)
                row[key_name(key)] = _convert(entry, value, (*lead, *entry.shape))
        batch = self._read(row, single=self._lanes is None)
        columns = batch.columns(self.schema)
        if batch.count != (self._lanes or 1):
            raise SchemaError(
                f"a step has values of {batch.count} lanes, and {self._lanes} lanes step together",
                hint="the first dim of every value must be the lanes",
            )
        del self._steps[at:], self._ends[at:]
        self._steps.append([np.array(part) if isinstance(part, np.ndarray) else part for part in columns])
        self._ends.append(ends)

    def find_ends(self, step: int) -> Array:
        """Return in which lanes a step is terminated or truncated. Shape `(lanes,)`, or `()`."""
        return self._ends[step]

    def batch(self, steps: int, lane: int | None = None) -> Batch:
        """Return the first steps as a batch, of one lane or of all."""
        columns = [concatenate(parts) for parts in zip(*self._steps[:steps], strict=True)]
        return self.mask.batch_of(self.schema, columns, steps, lane)


def _to_flags(value: Any) -> Any:
    """Convert the integers 0 and 1 to flags; other values are returned as they are."""
    array = np.asarray(value)
    return array != 0 if array.dtype.kind in "iu" and ((array == 0) | (array == 1)).all() else value


def _convert(entry: Field, value: Any, shape: tuple[int, ...]) -> Any:
    """Convert a number, or one for each lane, to the dtype of a field, as `_Column` does.

    Raises:
        SchemaError: It does not fit.
    """
    is_bfloat16 = entry.dtype == "bfloat16"
    cast = _cast(_as_array(value, is_bfloat16), entry.numpy_dtype)
    if cast is None:
        raise SchemaError(f"{key_name(entry.key)!r} is {entry}, and a step has {_name(value)} for it")
    if cast.size != math.prod(shape):
        raise SchemaError(
            f"{key_name(entry.key)!r} has shape {[*shape]}, and a step has {_name(value)} for it"
        )
    cast = cast.reshape(shape)
    return torch.from_numpy(cast).view(torch.bfloat16) if is_bfloat16 else cast
