"""Import replay buffers of Stable-Baselines3: pickles that `model.save_replay_buffer` wrote, or objects.

Used by the command line, by programs, and by `expstore.sb3`. It does not need stable-baselines3, and runs no
code that a pickle names. The new store has the fields of `expstore.sb3.ReplayBuffer`, so that a model can
continue in it.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from expstore.core.values import Array, IntArray, Key
from expstore.disk.files import Disk
from expstore.disk.local_path import local_path
from expstore.episodes.segmentation import OPEN
from expstore.episodes.sources import lane_names
from expstore.errors import ExpStoreError, SchemaError
from expstore.exchange.base import (
    Imported,
    Progress,
    Tell,
    ignore_notes,
    no_progress,
    open_to_read,
    piece_rows,
)
from expstore.exchange.fill import Facts, NumberedRows, RowSource, Target, fill_store
from expstore.exchange.foreign_rows import Column, from_stored, rows_differ, to_field
from expstore.exchange.numpy_unpickler import PickledObject, load_object
from expstore.schema.schema import Field, Schema
from expstore.storages.format.manifest import check_target

#: Packages that the pickles of buffers call: of spaces, their random generators, devices and paths.
_PACKAGES = ("gym", "gymnasium", "numpy", "pathlib", "sb3_contrib", "stable_baselines3", "torch")
#: Attributes that every replay buffer has.
_REQUIRED = ("observations", "actions", "rewards", "dones", "pos", "full")
#: Attributes that are not rows, or can be computed from the rows.
_KNOWN = {
    *_REQUIRED,
    "next_observations", "timeouts", "buffer_size", "n_envs", "observation_space", "action_space",
    "obs_shape", "action_dim", "device", "optimize_memory_usage", "handle_timeout_termination", "n_steps",
    "gamma", "env", "ep_start", "ep_length", "_current_ep_start", "n_sampled_goal",
    "goal_selection_strategy", "her_ratio", "copy_info_dict",
}  # fmt: skip
_SOURCE = "env"


def import_sb3(
    source: str | Path,
    target: str | Path,
    *,
    capacity: int | None = None,
    progress: Progress = no_progress,
    tell: Tell = ignore_notes,
    disk: Disk | None = None,
) -> Imported:
    """Create a store from a replay buffer that `model.save_replay_buffer` of Stable-Baselines3 has written.

    The oldest row comes first, also of a buffer that was full. Each environment is a source of its own:
    `env`, `env//1`, ... An episode ends where `dones` is set, by truncation where `timeouts` is set too. It
    is cut where the next observation is not the observation of the next row, and at the newest row. Box
    actions are scaled to [-1, 1], as algorithms store them. The store is complete, or does not exist.

    The pickle is read without running code that it names. Its arrays are held in memory.

    Args:
        source: The file.
        target: The store's folder, which must not exist yet.
        capacity: Maximum number of readable rows; None: that of the buffer, so that
            `expstore.sb3.ReplayBuffer` can continue in the store.
        progress: Called with the rows done and the rows in total.
        tell: Called with descriptions of what is left out or changed, before any row is written.
        disk: Access to the file system.

    Raises:
        NotFoundError: The file, or the parent folder of the store, does not exist.
        SchemaError: The file is a pickle of something else, or the buffer has no rows, or its arrays do not
            fit together.
        StorageError: The file cannot be read; or the disk failed or is full. Nothing is left behind.
        StateError: The target exists, or would be inside a store.
        LockedError: Another process creates the store at the same time.

    Example:
        >>> from expstore.exchange import import_sb3
        >>> import_sb3("replay_buffer.pkl", "run.exp").rows
        100
    """
    path, target, disk = local_path(source), local_path(target), disk or Disk()
    check_target(disk, target)  # before a large file is read
    with open_to_read(path) as file:
        try:
            size = file.seek(0, io.SEEK_END)
            file.seek(0)
            found = load_object(io.BufferedReader(file), _PACKAGES)
        except ExpStoreError as exc:
            advice = "of pickles, only replay buffers of stable-baselines3 can be imported"
            hint = f"{exc.hint}; {advice}" if exc.hint else advice
            raise exc.at(path).with_hint(hint) from exc
    if not isinstance(found, PickledObject):
        raise SchemaError(
            f"{path} is a pickle of a {type(found).__name__}, not of a replay buffer of stable-baselines3",
            hint="save arrays with numpy.savez, and import the .npz file",
        )
    if found.module.startswith("expstore."):
        raise SchemaError(
            f"{path} was saved from expstore.sb3.{found.name}, and has the path of its store, not its rows",
            hint="open or copy that store",
        )
    name = f"{path}, a {found.module}.{found.name},"
    if (held := _count_bytes(found.attributes)) > size:
        raise SchemaError(f"{name} has {held} bytes of arrays in a file of {size} bytes")
    return import_sb3_object(
        name,
        found.attributes,
        target,
        files=[path],
        capacity=capacity,
        progress=progress,
        tell=tell,
        disk=disk,
    )


def import_sb3_object(
    name: str,
    attributes: Mapping[str, Any],
    target: str | Path,
    *,
    files: Sequence[Path] = (),
    capacity: int | None = None,
    progress: Progress = no_progress,
    tell: Tell = ignore_notes,
    disk: Disk | None = None,
) -> Imported:
    """Create a store from the attributes of a replay buffer; see `import_sb3`.

    Args:
        name: What the attributes belong to, for messages.
        attributes: `vars(buffer)`, or the attributes in a pickle.
        target: As in `import_sb3`.
        files: The file of the attributes, for the lineage; () for a buffer in memory.
        capacity: As in `import_sb3`.
        progress: As in `import_sb3`.
        tell: As in `import_sb3`.
        disk: As in `import_sb3`.

    Raises:
        SchemaError, StateError, StorageError, LockedError: As in `import_sb3`.
    """
    source = files[0] if files else name
    to = Target(local_path(target), capacity, progress, tell, disk or Disk(), source, files)
    return fill_store(_SavedBuffer(name, attributes), to)


def _count_bytes(attributes: Mapping[str, Any]) -> int:
    """Return the size of all arrays. Arrays that share bytes, which buffers never have, count each."""
    count = 0
    for value in attributes.values():
        parts = value.values() if isinstance(value, dict) else (value,)
        count += sum(part.nbytes for part in parts if isinstance(part, np.ndarray))
    return count


@dataclass(frozen=True, slots=True)
class _Values:
    """The array of a field: the values before or after each step. Shape `(steps, lanes, *row shape)`."""

    field: Field
    array: Array


class _SavedBuffer(RowSource):
    """The rows of a buffer, oldest first, with one lane per environment.

    Args:
        name: What the attributes belong to, for messages.
        attributes: The attributes of the buffer.

    Raises:
        SchemaError: It is no replay buffer, or its arrays do not fit together.
    """

    def __init__(self, name: str, attributes: Mapping[str, Any]) -> None:
        self._name, self._attributes = name, attributes
        missing = [attribute for attribute in _REQUIRED if attribute not in attributes]
        if missing:
            raise SchemaError(
                f"{name} is not a replay buffer of stable-baselines3: it has no {', '.join(missing)}",
                hint="save arrays with numpy.savez, and import the .npz file",
            )
        rewards = self._array("rewards", attributes["rewards"], None)
        if rewards.ndim != 2 or not rewards.size:
            raise SchemaError(f"{name} has rewards of shape {list(rewards.shape)}; expected (steps, envs)")
        self._steps, self.lanes = rewards.shape
        self.capacity = self._steps * self.lanes
        self._is_shared = attributes.get("next_observations") is None  # `optimize_memory_usage`
        self.order = self._order()
        if not self.order.size:
            raise SchemaError(f"{name} has no rows")
        self._ended = self._array("dones", attributes["dones"], ()) != 0
        timeouts = attributes.get("timeouts")
        self._timeouts = (
            np.zeros_like(self._ended) if timeouts is None else self._array("timeouts", timeouts, ()) != 0
        )
        self._actions = _Values(*self._values(("action",), "actions", "action_space", attributes["actions"]))
        self._rewards = _Values(Field(("next", "reward"), "float32", (1,)), rewards[..., None])
        self._observations = self._read_observations("observations", ())
        self._following = (
            [_Values(_shift_to_next(seen.field), seen.array) for seen in self._observations]
            if self._is_shared
            else self._read_observations("next_observations", ("next",))
        )
        if not self._observations:
            raise SchemaError(f"{name} has no observations: its dict of them is empty")
        if [_shift_to_next(value.field) for value in self._observations] != [
            v.field for v in self._following
        ]:
            raise SchemaError(f"{name} has next_observations that differ in shape from its observations")
        flags = [Field(("next", flag), "bool", (1,)) for flag in ("terminated", "truncated", "done")]
        values = [*self._observations, self._actions, *self._following, self._rewards]
        self.schema = Schema([*(value.field for value in values), *flags])
        self.total = self.order.size * self.lanes
        self.notes = self._find_notes()

    def _order(self) -> IntArray:
        """Return the steps, oldest first. Shape `(n,)`, int64."""
        position, is_full = self._attributes["pos"], self._attributes["full"]
        if not isinstance(position, (int, np.integer)):
            raise SchemaError(f"{self._name} has a position of type {type(position).__name__}; expected int")
        if not 0 <= position <= self._steps:
            raise SchemaError(f"{self._name} has the position {position}; expected 0 to {self._steps}")
        if not is_full:
            return np.arange(position)
        order: IntArray = (np.arange(self._steps) + int(position)) % self._steps
        # The next observation of the newest step has overwritten the observation of the oldest one.
        return order[1:] if self._is_shared else order

    def _array(self, name: str, value: Any, shape: tuple[int, ...] | None) -> Array:
        """Return an attribute as an array with one row per step and lane; `shape` is that of a row."""
        if not isinstance(value, np.ndarray):
            raise SchemaError(f"{self._name} has {name} of type {type(value).__name__}; expected an array")
        if shape is not None and value.shape != (self._steps, self.lanes, *shape):
            expected = [self._steps, self.lanes, *shape]
            raise SchemaError(
                f"{self._name} has {name} of shape {list(value.shape)}; expected {expected}, as its rewards"
            )
        return value

    def _values(self, key: Key, name: str, space: str, value: Any) -> tuple[Field, Array]:
        array = self._array(name, value, None)
        if array.ndim < 2 or array.shape[:2] != (self._steps, self.lanes):
            expected = f"({self._steps}, {self.lanes}, ...), as its rewards"
            raise SchemaError(f"{self._name} has {name} of shape {list(array.shape)}; expected {expected}")
        column = Column((name,), array.dtype, array.shape[2:])
        # Buffers keep float64 actions as float32; `expstore.sb3` stores the dtype of the space.
        wanted = _dtype_of(self._attributes.get(space))
        if wanted is not None and wanted.kind == array.dtype.kind == "f":
            column = Column((name,), wanted, array.shape[2:])
        return to_field(key, column, None), array

    def _read_observations(self, name: str, group: Key) -> list[_Values]:
        found = self._attributes[name]
        if not isinstance(found, dict):
            array = self._array(name, found, None)
            return [_Values(*self._values((*group, "observation"), name, "", array))]
        return [
            _Values(*self._values((*group, "observation", str(entry)), f"{name}[{entry!r}]", "", array))
            for entry, array in found.items()
        ]

    def _find_notes(self) -> list[str]:
        notes = []
        if self._is_shared:
            notes.append(
                "the buffer was made with optimize_memory_usage=True and has no final observations: they are "
                "zeros, except after the newest step"
            )
        ended = self._ended[self.order]
        if ended.any() and self._attributes.get("handle_timeout_termination", False) is False:
            notes.append(
                "the buffer was made with handle_timeout_termination=False: all ends of episodes count as "
                "terminated, also those by a time limit"
            )
        left_out = [
            name
            for name, value in self._attributes.items()
            if name not in _KNOWN and isinstance(value, (np.ndarray, list, tuple, dict, PickledObject))
        ]
        if left_out == ["infos"] and not self._attributes.get("copy_info_dict"):
            left_out = []
        if left_out:
            notes.append(f"attributes of the buffer that are left out: {', '.join(left_out)}")
        return notes

    def find_begins(self, size: int) -> Array:
        """Return whether each step begins an episode. Shape `(steps, lanes)`, bool.

        Args:
            size: Number of steps that are compared at a time.
        """
        begins = np.zeros((self.order.size, self.lanes), bool)
        begins[:1] = True
        begins[1:] = self._ended[self.order[:-1]]
        if self._is_shared:
            return begins
        for before, now in zip(self._following, self._observations, strict=True):
            for start in range(1, self.order.size, size):
                here = self.order[start : start + size]
                there = self.order[start - 1 : start - 1 + here.size]
                shape = here.size * self.lanes, *now.array.shape[2:]
                differ = rows_differ(before.array[there].reshape(shape), now.array[here].reshape(shape))
                begins[start : start + size] |= differ.reshape(-1, self.lanes)
        return begins

    def pieces(self) -> Iterator[NumberedRows]:
        """Yield the rows. A row is a step of one lane; the rows of a step follow one another."""
        size = max(1, piece_rows(self.schema.row_bytes) // self.lanes)
        sources = lane_names(_SOURCE, "", self.lanes)
        episodes, steps, last = _number_episodes(self.find_begins(size))

        def facts(episode: int) -> Facts:
            return Facts(-1, OPEN, source=sources[episode % self.lanes], named=True)

        for start in range(0, self.order.size, size):
            columns = self._columns(start, size)
            part = slice(start * self.lanes, start * self.lanes + len(columns[0]))
            yield NumberedRows(
                columns=columns,
                episodes=episodes[part],
                steps=steps[part],
                done=part.stop,
                facts=facts,
                last=last[part],
            )

    def _columns(self, start: int, size: int) -> list[Array]:
        """Return the values of `size` steps. Shapes `(n, *row shape)`."""
        steps = self.order[start : start + size]
        count = steps.size * self.lanes
        ended, timeouts = (flags[steps].reshape(-1, 1) for flags in (self._ended, self._timeouts))
        columns = [_take(value, steps) for value in (*self._observations, self._actions)]
        for value in self._following:
            following = _take(value, (steps + 1) % self._steps if self._is_shared else steps)
            if self._is_shared:
                is_lost = ended[:, 0].copy()
                if start + size >= self.order.size:
                    is_lost[-self.lanes :] = False  # no later step has overwritten it
                following[is_lost] = 0
            columns.append(following)
        columns.append(_take(self._rewards, steps))
        columns += [ended & ~timeouts, ended & timeouts, ended]
        return [np.ascontiguousarray(column.reshape(count, *column.shape[1:])) for column in columns]


def _take(value: _Values, steps: IntArray) -> Array:
    """Return the rows of some steps. Shape `(steps * lanes, *row shape)`."""
    rows = value.array[steps]
    count = rows.shape[0] * rows.shape[1]
    found: Array = from_stored(value.field, rows.reshape(count, *rows.shape[2:]), count)
    return found


def _shift_to_next(field: Field) -> Field:
    """Return the field of the next values."""
    return Field(("next", *field.key), field.dtype, field.shape)


def _dtype_of(space: Any) -> np.dtype[Any] | None:
    """Return the dtype of a space, or of the attributes of a space in a pickle; None: unknown."""
    found = (
        space.attributes.get("dtype") if isinstance(space, PickledObject) else getattr(space, "dtype", None)
    )
    return found if isinstance(found, np.dtype) else None


def _number_episodes(begins: Array) -> tuple[IntArray, IntArray, Array]:
    """Return for each row its episode, its step, and whether it is the last of its episode. Shapes `(n,)`.

    Args:
        begins: Whether each step begins an episode. Shape `(steps, lanes)`, bool.
    """
    count, lanes = begins.shape
    numbers = np.arange(count)[:, None]
    steps = numbers - np.maximum.accumulate(np.where(begins, numbers, 0), axis=0)
    episodes = (np.cumsum(begins, axis=0) - 1) * lanes + np.arange(lanes)
    last = np.ones((count, lanes), bool)
    last[:-1] = begins[1:]
    return episodes.reshape(-1), steps.reshape(-1), last.reshape(-1)
