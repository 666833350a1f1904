"""The leaves of batches, and their conversion to columns.

Used by `expstore.data.batch` and `expstore.data.containers`. It avoids copies if possible.
`expstore.data.variable_rows` handles variable-length rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDictBase, is_non_tensor, is_tensorclass

from expstore.core.values import Array, Key, key_name
from expstore.data.nested_tensors import NAMES
from expstore.errors import SchemaError


def leaves_of(
    data: TensorDictBase, path: Key, skip: frozenset[str], keys: list[Key], leaves: list[Any]
) -> None:
    """Collect the leaves of a TensorDict: tensors, and non-tensor entries.

    Args:
        data: The TensorDict.
        path: Its key in the batch.
        skip: Root keys to skip.
        keys: List to which the keys are appended.
        leaves: List to which the leaves are appended.

    Raises:
        SchemaError: An entry has another type, or rows of a lazy stack have different fields.
    """
    if isinstance(data, LazyStackedTensorDict):
        check_alike(data.tensordicts, path)
    for name, value in data.items():
        if not path and name in skip:
            continue
        if isinstance(value, torch.Tensor) or is_non_tensor(value):
            keys.append((*path, name))
            leaves.append(value)
        elif isinstance(value, TensorDictBase) or is_tensorclass(value):
            leaves_of(value, (*path, name), skip, keys, leaves)
        else:
            raise SchemaError(
                f"field {key_name((*path, name))!r} is a {type(value).__name__}, which cannot be stored",
                hint="convert it to a tensor, or to NonTensorData",
            )


def check_alike(rows: Sequence[TensorDictBase], path: Key) -> None:
    """Raise SchemaError if rows have different fields, of which a lazy stack only has the common ones."""
    names = [set(row.keys()) for row in rows]
    for number, found in enumerate(names):
        if found != names[0]:
            name = sorted(map(str, found ^ names[0]))[0]
            raise SchemaError(
                f"row {number} of the batch has {'a' if name in found else 'no'} field "
                f"{key_name((*path, name))!r}, row 0 has {'none' if name in found else 'one'}",
                hint="rows must have the same fields; a LazyStackStorage stores others",
            )


def check_unmasked(key: Key, value: Any) -> None:
    """Raise SchemaError if elements of a NumPy array, or of arrays in nested lists, are masked."""
    if isinstance(value, list | tuple):
        for item in value:
            check_unmasked(key, item)
    elif isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        where = f"field {key_name(key)!r}" if key else "the data"
        raise SchemaError(
            f"{where} has a NumPy array with masked elements, and a store keeps no masks",
            hint="fill them, array.filled(value), or store the mask, array.mask, as a field of its own",
        )


def as_tensor(value: Any) -> torch.Tensor:
    """Return numbers as a tensor; an array that torch cannot view is copied."""
    if isinstance(value, np.ndarray) and (min(value.strides, default=0) < 0 or not value.dtype.isnative):
        value = value.astype(value.dtype.newbyteorder("="), order="C")
    return torch.as_tensor(value)


def to_objects(items: Sequence[Any]) -> Array:
    """Return objects of any kind as an array of objects. Shape `(n,)`."""
    array = np.empty(len(items), object)
    for place, item in enumerate(items):  # assigning all at once would split tensors
        array[place] = item
    return array


def _non_tensor(data: Any, shape: tuple[int, ...]) -> Array:
    """Return the objects of a non-tensor entry. Shape that of the batch."""
    if isinstance(data, NonTensorStack):
        parts = [_non_tensor(part, shape[1:]) for part in data.unbind(0)]
        return np.stack(parts) if shape else parts[0]
    array = np.empty(shape, object)
    for place in np.ndindex(shape):
        array[place] = data.data
    return array


def to_numpy(tensor: torch.Tensor) -> Array:
    """Return a tensor on any device as an array; bfloat16 as uint16 bits."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if not tensor.is_cpu:
        tensor = tensor.cpu()
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    # NumPy has no lazy conjugates and negatives, such as `z.conj()` and `z.conj().imag`.
    tensor = tensor.resolve_conj().resolve_neg()
    array: Array = tensor.numpy() if tensor.dtype in NAMES else np.zeros(tensor.shape)
    return array


def to_columns(keys: list[Key], leaves: Sequence[Any]) -> tuple[list[Array], list[str]]:
    """Return leaves as arrays, and the names of their dtypes.

    Args:
        keys: Keys of the leaves, for messages.
        leaves: Tensors, or non-tensor entries of a TensorDict.

    Raises:
        SchemaError: A tensor is sparse, or has a dtype that cannot be stored.
    """
    try:
        return [tensor.numpy() for tensor in leaves], [NAMES[tensor.dtype] for tensor in leaves]
    except (RuntimeError, TypeError, AttributeError, KeyError):
        pass  # one requires gradients, is on a device, is a bfloat16 or not a tensor
    tensors = [isinstance(leaf, torch.Tensor) for leaf in leaves]
    try:
        dtypes = [
            NAMES[leaf.dtype] if tensor else "object" for leaf, tensor in zip(leaves, tensors, strict=True)
        ]
    except KeyError:
        raise _strange_dtype(keys, leaves) from None
    for key, leaf, tensor in zip(keys, leaves, tensors, strict=True):
        if tensor and leaf.layout is not torch.strided:
            raise SchemaError(
                f"field {key_name(key)!r} is a sparse tensor ({leaf.layout}), which cannot be stored",
                hint="convert it with to_dense()",
            )
    arrays = [
        to_numpy(leaf) if tensor else _non_tensor(leaf, tuple(leaf.batch_size))
        for leaf, tensor in zip(leaves, tensors, strict=True)
    ]
    return arrays, dtypes


def _strange_dtype(keys: list[Key], leaves: Sequence[Any]) -> SchemaError:
    found = zip(keys, leaves, strict=True)
    key, dtype = next((k, t.dtype) for k, t in found if isinstance(t, torch.Tensor) and t.dtype not in NAMES)
    return SchemaError(f"field {key_name(key)!r} has dtype {dtype}, which cannot be stored")
