"""Batches as nested dicts of NumPy arrays, out of TensorDicts and trees of tensors.

Used where transforms or collation have made a batch of tensors; a batch without them is put together without
any tensor, by `expstore.data.containers.Form.arrays`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import NonTensorStack, is_non_tensor, is_tensor_collection

from expstore.core.values import Array, Key
from expstore.data.leaves import to_objects
from expstore.data.nested_tensors import to_values

__all__ = ["put_entry", "to_arrays", "to_ragged_rows"]


def to_arrays(batch: Any) -> Any:
    """Return tensors as arrays: nested dicts of them for TensorDicts, trees as they are.

    Arrays share the memory of tensors in host memory. bfloat16, which NumPy does not have, becomes float32; a
    nested tensor becomes an array of objects, which are the arrays of its rows.
    """
    if is_non_tensor(batch):
        found = batch.tolist() if isinstance(batch, NonTensorStack) else batch.data
        return to_objects(found) if isinstance(found, list) and len(batch.batch_size) == 1 else found
    if is_tensor_collection(batch):
        return {name: to_arrays(batch.get(name)) for name in batch.keys()}  # noqa: SIM118 - see TensorDict
    if isinstance(batch, torch.Tensor):
        if batch.is_nested:
            return to_objects([to_arrays(row) for row in batch.unbind()])
        tensor = batch.detach().cpu()
        return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()
    if isinstance(batch, Mapping):
        return {name: to_arrays(value) for name, value in batch.items()}
    if type(batch) in (list, tuple):
        return type(batch)(to_arrays(value) for value in batch)
    return batch


def to_ragged_rows(column: Any, arrow: str, size: Sequence[int]) -> Array:
    """Return rows without a fixed size as an array of objects: arrays, text, bytes, lists, dicts, None.

    Args:
        column: A pyarrow Array. Shape `(n,)`.
        arrow: Its type, as `expstore.schema.arrow_types` writes it.
        size: The shape of what is returned, with n entries.
    """
    values = to_values(column, arrow)
    rows = to_arrays(values) if isinstance(values, torch.Tensor) else to_objects(values)
    shaped: Array = rows.reshape(tuple(size))
    return shaped


def put_entry(batch: dict[str, Any], key: Key, values: Any) -> None:
    """Set an entry of nested dicts."""
    for name in key[:-1]:
        batch = batch.setdefault(name, {})
    batch[key[-1]] = values
