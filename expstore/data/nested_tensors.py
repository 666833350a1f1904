"""Convert tensors of different shapes to Arrow columns, and Arrow columns to tensors.

A column of tensors that differ in their first dim becomes a jagged nested tensor of torch over the memory
that was read, without a second copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch.utils.dlpack import from_dlpack

from expstore.core.values import Array, IntArray, Key, key_name
from expstore.errors import SchemaError
from expstore.schema.arrow_types import Ragged, ragged_of
from expstore.schema.schema import DTYPES, OBJECT
from expstore.schema.variable_tensors import join, part, shape_of, shapes_in

#: Dtypes of tensors by name.
_DTYPES = {name: getattr(torch, name) for name in DTYPES if name != OBJECT}
#: Names by dtype of tensors and of arrays; of bfloat16 NumPy only has the bits.
NAMES: dict[Any, str] = {dtype: name for name, dtype in _DTYPES.items()} | {
    DTYPES[name]: name for name in _DTYPES if name != "bfloat16"
}
_NO_DIMS = torch.Size([])

# -- tensors to columns -------------------------------------------------------------------------------


def from_tensors(
    key: Key, rows: Sequence[torch.Tensor] | Sequence[Array], *, jagged: bool = False
) -> tuple[Ragged, pa.Array]:
    """Convert tensors, or arrays, one per row, to a column; return its type and the column.

    Args:
        key: Key of the field, for messages.
        rows: At least one; of one dtype and number of dims.
        jagged: Whether only the first dim may differ, even if it does not differ here.

    Raises:
        SchemaError: They differ in more than their sizes, or have an unsupported dtype.
    """
    dtypes, dims = {row.dtype for row in rows}, {row.ndim for row in rows}
    if len(dtypes) > 1 or len(dims) > 1 or dims == {0}:
        found = sorted({f"{row.dtype}{list(row.shape)}".removeprefix("torch.") for row in rows})
        raise SchemaError(
            f"field {key_name(key)!r} has tensors of different kinds in one batch: {', '.join(found[:4])}",
            hint="they may differ in their sizes, not in dtype or number of dims",
        )
    dtype = name_of(key, rows[0].dtype)
    shapes = np.array([tuple(row.shape) for row in rows], np.int64)
    return _column(dtype, shape_of(shapes, jagged=jagged), rows, shapes)


def from_nested(key: Key, nested: torch.Tensor) -> tuple[Ragged, pa.Array]:
    """Convert a nested tensor, whose first dim is rows, to a column; return its type and the column.

    Raises:
        SchemaError: Its dtype is not supported.
    """
    jagged = nested.layout is torch.jagged
    if jagged and is_packed(nested) and nested.size(0):
        return _from_packed(key, nested)
    rows = nested.detach().unbind(0)
    if rows:
        return from_tensors(key, rows, jagged=jagged)
    shape = (None, *(int(size) or None for size in nested.shape[2:])) if jagged else (None,)
    empty = torch.zeros(0, dtype=nested.dtype)
    return _column(name_of(key, nested.dtype), shape, [empty], np.zeros((0, len(shape)), np.int64))


def is_packed(nested: Any) -> bool:
    """Return whether the rows of a jagged tensor are contiguous, and differ in their first dim."""
    return nested.lengths() is None and nested._ragged_idx == 1


def _from_packed(key: Key, nested: Any) -> tuple[Ragged, pa.Array]:
    values, offsets = nested.values().detach(), nested.offsets().cpu().numpy()
    values = values[int(offsets[0]) : int(offsets[-1])]
    trailing = tuple(map(int, values.shape[1:]))
    lengths = np.diff(offsets)
    shapes = np.stack([lengths, *(np.full(lengths.size, size) for size in trailing)], 1)
    return _column(name_of(key, nested.dtype), shape_of(shapes, jagged=True), [values], shapes)


def name_of(key: Key, dtype: Any) -> str:
    """Return the name of a dtype; raise SchemaError if it cannot be stored."""
    try:
        return NAMES[dtype]
    except KeyError:
        raise SchemaError(f"field {key_name(key)!r} has dtype {dtype}, which cannot be stored") from None


def _column(
    dtype: str, shape: tuple[int | None, ...], rows: Sequence[Any], shapes: IntArray
) -> tuple[Ragged, pa.Array]:
    found = Ragged(dtype, shape)
    return found, join(found, _copy_values(rows), shapes)


def _copy_values(rows: Sequence[Any]) -> Array:
    """Return the values of tensors, or arrays; of bfloat16 the bits.

    It is a copy, so that later changes by the user do not reach the store. NumPy makes it: `torch.cat` may
    wait for threads that other work keeps busy.
    """
    if rows[0].ndim != 1:
        rows = [row.reshape(-1) for row in rows]
    if isinstance(rows[0], np.ndarray):
        return np.concatenate(rows)
    try:
        return np.concatenate([row.numpy() for row in rows])
    except (RuntimeError, TypeError):  # with gradients, on another device, of bfloat16
        flat = torch.cat([row.detach().cpu() for row in rows])
        bits: Array = (flat.view(torch.uint16) if flat.dtype is torch.bfloat16 else flat).numpy()
        return bits


# -- columns to tensors -------------------------------------------------------------------------------


def to_entry(column: pa.Array, text: str, size: Sequence[int], layouts: JaggedLayouts | None = None) -> Any:
    """Convert a column to an entry of a TensorDict.

    Args:
        column: The column; it owns its memory.
        text: Its type, as text.
        size: Batch size of the TensorDict: one dim, or none for one row.
        layouts: Those of the jagged tensors of the same TensorDict; None: it is the only one.

    Returns:
        For tensors a nested tensor: jagged if only the first dim differs, otherwise of torch's strided
        layout; for one row the tensor. For other values a NonTensorStack, or NonTensorData.
    """
    found = ragged_of(text)
    if found is None:
        values = column.to_pylist()
        return stack_values(values) if len(size) else _wrap(values[0])
    values = to_tensor(column, found, layouts)
    return values if len(size) else values.unbind(0)[0]


def to_values(column: pa.Array, text: str) -> Any:
    """Convert a column to a leaf of a tree: a nested tensor, or a list of Python values."""
    found = ragged_of(text)
    return column.to_pylist() if found is None else to_tensor(column, found)


def to_tensor(column: pa.Array, found: Ragged, layouts: JaggedLayouts | None = None) -> torch.Tensor:
    """Convert a column of tensors to one nested tensor over its memory.

    Args:
        column: The rows.
        found: Their dtype and shape.
        layouts: Those of the jagged tensors of the same batch; None: it is the only one.

    Returns:
        A jagged tensor of shape `(n, *, ...)` if only the first dim differs, or if there are no rows;
        otherwise torch's strided nested tensor, which has the same `unbind()` and `to_padded_tensor()`.
    """
    flat, offsets = part(column, found)
    values = tensor_of(flat, found.dtype)
    if found.is_list:
        values = values.reshape(-1, *(size or 0 for size in found.shape[1:]))
        return (layouts or JaggedLayouts()).view(values, offsets)
    return make_strided(values, shapes_in(column, found), offsets[:-1].copy())


class JaggedLayouts:
    """The offsets of the jagged tensors of one batch.

    Jagged tensors of equal lengths share one tensor of offsets: torch combines only those that do, as in
    `batch["logprobs"] * batch["loss_mask"]`.
    """

    def __init__(self) -> None:
        self._layouts: list[tuple[IntArray, torch.Tensor, dict[str, int]]] = []

    def view(self, values: torch.Tensor, offsets: IntArray) -> torch.Tensor:
        """Return a jagged tensor over the memory of concatenated tensors.

        Args:
            values: The concatenated tensors. Shape `(items, ...)`.
            offsets: Start of each tensor, and the end of the last; int64. Shape `(n + 1,)`.
        """
        for known, starts, extremes in self._layouts:
            if starts.device == values.device and np.array_equal(known, offsets):
                return _view_jagged(values, starts, extremes)
        lengths = np.diff(offsets)
        starts, extremes = torch.from_numpy(offsets).to(values.device), {}
        if lengths.size:
            # Without them `to_padded_tensor` pads to the number of all values.
            extremes = {"min_seqlen": int(lengths.min()), "max_seqlen": int(lengths.max())}
        self._layouts.append((offsets, starts, extremes))
        return _view_jagged(values, starts, extremes)


def make_jagged(values: torch.Tensor, offsets: IntArray) -> torch.Tensor:
    """Return a jagged tensor over the memory of concatenated tensors; see `JaggedLayouts.view`."""
    return JaggedLayouts().view(values, offsets)


def _view_jagged(values: torch.Tensor, offsets: torch.Tensor, extremes: Mapping[str, Any]) -> torch.Tensor:
    if values.requires_grad:
        found: torch.Tensor = torch.nested.nested_tensor_from_jagged(values, offsets, **extremes)
        return found
    # What torch's function returns after 65 us of dispatch; this takes 17.
    from torch.nested._internal.nested_tensor import NestedTensor

    # In torch's form: the size of a tensor without values.
    sizes = {name: torch.empty(length, 0) for name, length in extremes.items()}
    return NestedTensor(values, offsets, _metadata_cache=sizes)


def make_strided(values: torch.Tensor, sizes: IntArray, starts: IntArray) -> torch.Tensor:
    """Return a nested tensor over the memory of tensors of these sizes, each C-contiguous in `values`."""
    if not len(sizes):  # torch reads beyond a view of no rows, and its own constructor warns
        return make_jagged(values, np.zeros(1, np.int64))
    strides = np.ones_like(sizes)
    for dim in range(sizes.shape[1] - 2, -1, -1):
        strides[:, dim] = strides[:, dim + 1] * sizes[:, dim + 1]
    parts = map(torch.from_numpy, (sizes, strides, starts))
    view: torch.Tensor = torch._nested_view_from_buffer(values, *parts)
    return view


def tensor_of(flat: pa.Array, dtype: str) -> torch.Tensor:
    """Convert flat values to a tensor, over the same memory unless they are bits."""
    if dtype == "bool":
        return torch.from_numpy(flat.to_numpy(zero_copy_only=False).copy())
    tensor: torch.Tensor = from_dlpack(flat)
    return tensor if tensor.dtype is _DTYPES[dtype] else tensor.view(_DTYPES[dtype])


def stack_values(values: Sequence[Any]) -> NonTensorStack | NonTensorData:
    """Return values, one per row, as an entry of a TensorDict of one batch dim.

    The result equals `NonTensorStack(*values)`, which would check each value and take ten times as long.
    """
    if not values:
        return NonTensorData(None, batch_size=torch.Size([0]))
    entries = list(map(_wrap, values))
    stack: NonTensorStack = NonTensorStack._new_lazy_unsafe(entries[0], stack_dim=0)
    stack.tensordicts, stack._batch_size = entries, torch.Size([len(entries)])
    return stack


def _wrap(value: Any) -> NonTensorData:
    held = NonTensorData.__new__(NonTensorData)
    held.__dict__["_tensordict"] = TensorDict._new_unsafe({}, _NO_DIMS, device=None)
    held.__dict__["_non_tensordict"] = {"data": value, "_is_non_tensor": True, "_metadata": None}
    held.__dict__["_is_initialized"] = True
    return held
