"""Columns out of a TensorDict, and a TensorDict out of columns.

Used by buffers. It converts without copying where it can and knows nothing of storages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from expstore.episodes import Steps
from expstore.errors import SchemaError
from expstore.schema import Schema
from expstore.storages.keys import Keys
from expstore.types import Array, IntArray, Key, key_name

__all__ = ["Batch", "Builder", "Intake", "StepReader", "flatten"]

_NAMES = {getattr(torch, name): name for name in (
    "bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64",
    "float16", "bfloat16", "float32", "float64", "complex64",
)}  # fmt: skip


@dataclass(slots=True)
class Batch:
    """Hold a batch as columns, in the order of the TensorDict.

    Args:
        keys: The fields' keys.
        dtypes: Their dtypes by name.
        arrays: Their values; bfloat16 as uint16 bits. Shapes `(n, *row shape)`.
        count: How many rows.
        lanes: Lane of each row; None: one lane.
        lane_count: How many lanes.
        arranged: The columns are those of the schema, checked; keys and dtypes are left out.
    """

    keys: list[Key]
    dtypes: list[str]
    arrays: list[Array]
    count: int
    lanes: IntArray | None = None
    lane_count: int = 1
    arranged: bool = False

    def signature(self) -> dict[Key, tuple[str, tuple[int, ...]]]:
        """Return key -> (dtype, row shape)."""
        return {
            key: (dtype, array.shape[1:])
            for key, dtype, array in zip(self.keys, self.dtypes, self.arrays, strict=True)
        }

    def columns(self, schema: Schema) -> list[Array]:
        """Return one array per field, in the schema's order.

        Raises:
            SchemaError: The batch does not fit.
        """
        return self.arrays if self.arranged else schema.arrange(self.keys, self.dtypes, self.arrays)

    def keep(self, rows: Array) -> Batch:
        """Return the batch without the rows where `rows` is False; its columns are left out."""
        lanes = None if self.lanes is None else self.lanes[rows]
        return replace(self, keys=[], dtypes=[], arrays=[], lanes=lanes, count=int(np.count_nonzero(rows)))


def _leaves(
    data: TensorDictBase, path: Key, skip: frozenset[str], keys: list[Key], leaves: list[torch.Tensor]
) -> None:
    for name, value in data.items():
        if isinstance(value, torch.Tensor):
            if path or name not in skip:
                keys.append((*path, name))
                leaves.append(value)
        elif isinstance(value, TensorDictBase):
            _leaves(value, (*path, name), skip, keys, leaves)
        else:
            raise SchemaError(
                f"field {key_name((*path, name))!r} is a {type(value).__name__}, not a tensor",
                hint="this storage keeps tensors only",
            )


def _to_numpy(tensor: torch.Tensor) -> Array:
    if tensor.requires_grad:
        tensor = tensor.detach()
    if not tensor.is_cpu:
        tensor = tensor.cpu()
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    array: Array = tensor.numpy() if tensor.dtype in _NAMES else np.zeros(tensor.shape)
    return array


def flatten(
    data: TensorDictBase, *, all_dims: bool, single: bool = False, skip: frozenset[str] = frozenset()
) -> Batch:
    """Return a TensorDict's leaves as columns.

    Args:
        data: The batch.
        all_dims: Make rows of all batch dims (time is the dim named "time", else the last; each place
            along the others is a lane), not of the first only.
        single: The TensorDict is one row.
        skip: Root keys to leave out.

    Raises:
        SchemaError: It is no TensorDict, has no batch dim, or a leaf is no tensor of a known dtype.
    """
    if not isinstance(data, TensorDictBase):
        raise SchemaError(f"expected a TensorDict, got {type(data).__name__}", hint="wrap it in TensorDict")
    shape = tuple(data.batch_size)
    if single:
        if all_dims and shape:
            raise SchemaError(
                f"add() takes one transition, got batch size {list(shape)}", hint="use extend()"
            )
        dims, count = 0, 1
    elif not shape:
        raise SchemaError("extend() takes a batch, got a TensorDict without batch dims", hint="use add()")
    else:
        dims = len(shape) if all_dims else 1
        count = int(np.prod(shape[:dims]))
    keys: list[Key] = []
    leaves: list[torch.Tensor] = []
    _leaves(data, (), skip, keys, leaves)
    try:
        arrays = [tensor.numpy() for tensor in leaves]
    except (RuntimeError, TypeError):  # one needs gradients, lies on a device, or is a bfloat16
        arrays = [_to_numpy(tensor) for tensor in leaves]
    if dims == 0:
        arrays = [array[None] for array in arrays]
    elif dims > 1:
        arrays = [array.reshape(count, *array.shape[dims:]) for array in arrays]
    try:
        dtypes = [_NAMES[tensor.dtype] for tensor in leaves]
    except KeyError:
        raise _strange_dtype(keys, leaves) from None
    lanes, lane_count = _lanes(data, shape) if dims > 1 else (None, 1)
    return Batch(keys, dtypes, arrays, count, lanes, lane_count)


def _strange_dtype(keys: list[Key], leaves: list[torch.Tensor]) -> SchemaError:
    key, dtype = next((k, t.dtype) for k, t in zip(keys, leaves, strict=True) if t.dtype not in _NAMES)
    return SchemaError(f"field {key_name(key)!r} has dtype {dtype}, which cannot be stored")


def _lanes(data: TensorDictBase, shape: tuple[int, ...]) -> tuple[IntArray, int]:
    names = data.names if data._has_names() else []
    time = names.index("time") if "time" in names else len(shape) - 1
    others = [1 if dim == time else size for dim, size in enumerate(shape)]
    count = int(np.prod(others))
    lanes = np.broadcast_to(np.arange(count).reshape(others), shape).reshape(-1)
    return lanes, count


class Intake:
    """Take TensorDicts whose keys, dtypes and shapes are just those of the schema, with few steps.

    That is nearly every batch of a run; `flatten` and `Schema.arrange` do the others.

    Args:
        schema: The fields.
    """

    def __init__(self, schema: Schema) -> None:
        tree = _Tree(schema)
        self._parents, self._sizes = tree.parents, [0] * (len(tree.parents) + 1)
        for parent, _ in tree.parents:
            self._sizes[parent] += 1
        for group, _ in tree.leaves:
            self._sizes[group] += 1
        self._leaves = tree.leaves
        self._fields = schema.fields
        self._wanted = self._wants(1)

    def _wants(self, count: int) -> tuple[int, list[tuple[np.dtype[Any], tuple[int, ...]]]]:
        return count, [(entry.numpy_dtype, (count, *entry.shape)) for entry in self._fields]

    def take(self, data: TensorDictBase, *, single: bool = False) -> Batch | None:
        """Return a batch of one lane as columns of the schema; None if it needs a closer look."""
        if type(data) is not TensorDict or len(data.batch_size) != (0 if single else 1):
            return None
        count = 1 if single else data.batch_size[0]
        tables: list[dict[str, Any]] = [data._tensordict]
        try:
            for parent, name in self._parents:
                tables.append(tables[parent][name]._tensordict)
            if [len(table) for table in tables] != self._sizes:
                return None
            arrays = [tables[group][name].numpy() for group, name in self._leaves]
            if single:
                arrays = [array[None] for array in arrays]
            known, wanted = self._wanted
            if known != count:
                _, wanted = self._wanted = self._wants(count)
            for array, (dtype, shape) in zip(arrays, wanted, strict=True):
                if array.shape != shape or array.dtype != dtype or not array.flags.c_contiguous:
                    return None
        except (KeyError, AttributeError, RuntimeError, TypeError):
            return None  # another key, a lazy stack, a tensor that needs gradients, a bfloat16
        return Batch([], [], arrays, count, arranged=True)


class StepReader:
    """Read out of columns what the rows are in the eyes of their collector.

    Args:
        schema: Of the store.
        keys: Which fields say it.
    """

    def __init__(self, schema: Schema, keys: Keys) -> None:
        def place(key: Key | None) -> int | None:
            return None if key is None else schema.place(key)

        self._terminated, self._truncated = place(keys.terminated), place(keys.truncated)
        self._done, self._start = place(keys.done), place(keys.start)
        self._trajectory, self._mask = place(keys.trajectory), place(keys.mask)
        self._reward = place(keys.reward)
        if self._reward is not None and schema.fields[self._reward].numpy_dtype.kind not in "fiub":
            self._reward = None
        self._reward_bits = self._reward is not None and schema.fields[self._reward].dtype == "bfloat16"
        self._counts_steps = keys.start == ("step_count",)

    def read(self, columns: Sequence[Array], batch: Batch) -> Steps:
        """Return what the rows are. `columns` are in the schema's order."""

        def column(place: int | None) -> Any:
            return None if place is None else columns[place].reshape(-1)

        def flags(place: int | None) -> Any:
            values = column(place)
            return values if values is None or values.dtype == np.bool_ else values.astype(bool)

        terminated, truncated, done = flags(self._terminated), flags(self._truncated), flags(self._done)
        if done is not None:
            # "done" alone does not say why; where it goes beyond the others the episode is over.
            rest = done if truncated is None else done & ~truncated
            terminated = rest if terminated is None else terminated | rest
        starts = column(self._start)
        if starts is not None:
            starts = starts == 0 if self._counts_steps else flags(self._start)
        trajectories, rewards = column(self._trajectory), column(self._reward)
        if self._reward_bits:
            rewards = (rewards.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return Steps(
            count=batch.count,
            lanes=batch.lanes,
            lane_count=batch.lane_count,
            trajectories=None if trajectories is None else trajectories.astype(np.int64, copy=False),
            terminated=terminated,
            truncated=truncated,
            starts=starts,
            rewards=rewards,
        )

    def transitions(self, columns: Sequence[Array]) -> Array | None:
        """Return which rows are transitions at all; None: all of them. Shape `(n,)`."""
        keep = None
        if self._trajectory is not None:
            strays = columns[self._trajectory].reshape(-1) == -1
            keep = ~strays if np.count_nonzero(strays) else None
        if self._mask is not None:
            mask = columns[self._mask].reshape(-1).astype(bool)
            if not mask.all():
                keep = mask if keep is None else keep & mask
        return keep


class _Tree:
    """Hold how a schema's fields hang below one another, groups numbered from the root (0)."""

    def __init__(self, schema: Schema) -> None:
        groups: dict[Key, int] = {(): 0}
        self.parents: list[tuple[int, str]] = []  # of each group but the root: its parent and name
        self.leaves: list[tuple[int, str]] = []  # of each field: its group and name
        for entry in schema.fields:
            for depth in range(1, len(entry.key)):
                path = entry.key[:depth]
                if path not in groups:
                    groups[path] = len(groups)
                    self.parents.append((groups[path[:-1]], path[-1]))
            self.leaves.append((groups[entry.key[:-1]], entry.key[-1]))


class Builder:
    """Make TensorDicts of one schema.

    Args:
        schema: The fields.
    """

    def __init__(self, schema: Schema) -> None:
        tree = _Tree(schema)
        self._parents = tree.parents
        self._leaves = [
            (group, name, entry.dtype == "bfloat16")
            for (group, name), entry in zip(tree.leaves, schema.fields, strict=True)
        ]

    def build(
        self,
        columns: Iterable[Array],
        size: torch.Size,
        root: dict[str, torch.Tensor],
        *,
        first_row: bool = False,
    ) -> TensorDict:
        """Return columns as a TensorDict that owns them.

        Args:
            columns: In the schema's order. Shapes `(n, *row shape)`.
            size: Its batch size.
            root: More tensors for its root.
            first_row: Take the first row only, without its dim.
        """
        groups: list[dict[str, Any]] = [{} for _ in range(len(self._parents) + 1)]
        for (group, name, bits), column in zip(self._leaves, columns, strict=True):
            tensor = torch.from_numpy(column)
            if bits:
                tensor = tensor.view(torch.bfloat16)
            groups[group][name] = tensor[0] if first_row else tensor
        groups[0].update(root)
        # Backwards: a group comes after its parent. Nothing is left to validate, which would cost more
        # than reading the rows.
        for number in range(len(self._parents), 0, -1):
            parent, name = self._parents[number - 1]
            groups[parent][name] = TensorDict._new_unsafe(groups[number], size, device=None)
        batch: TensorDict = TensorDict._new_unsafe(groups[0], size, device=None)
        return batch
