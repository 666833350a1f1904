"""Convert TensorDicts and trees of tensors to nested dicts of NumPy arrays.

Used for batches that transforms or a collate function have changed; `expstore.data.containers.Form.arrays`
builds other batches without tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorStack, is_non_tensor, is_tensor_collection

from expstore.core.values import Array, Key
from expstore.data.leaves import to_objects
from expstore.data.nested_tensors import tensor_of
from expstore.schema.arrow_types import Ragged, ragged_of
from expstore.schema.variable_tensors import part, shapes_in


def to_array(values: Any) -> Array:
    """Return values as an array, also those of a tensor on another device; bfloat16 becomes float32."""
    if not isinstance(values, torch.Tensor):
        return np.asarray(values)
    # Both calls release the GIL, even where they do nothing.
    tensor = values if values.is_cpu and not values.requires_grad else values.detach().cpu()
    array: Array = (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()
    return array


def to_arrays(batch: Any) -> Any:
    """Convert tensors to arrays: TensorDicts to nested dicts; trees keep their containers.

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
        return to_array(batch)
    if isinstance(batch, Mapping):
        return {name: to_arrays(value) for name, value in batch.items()}
    if type(batch) in (list, tuple):
        return type(batch)(to_arrays(value) for value in batch)
    return batch


def to_ragged_rows(column: Any, arrow: str, size: Sequence[int]) -> Array:
    """Convert variable-length rows to an array of objects: arrays, text, bytes, lists, dicts, None.

    Args:
        column: A pyarrow Array. Shape `(n,)`.
        arrow: Its type, in the format of `expstore.schema.arrow_types`.
        size: Shape of the result, which has n entries.
    """
    found = ragged_of(arrow)
    rows = to_objects(column.to_pylist() if found is None else _split(column, found))
    shaped: Array = rows.reshape(tuple(size))
    return shaped


def _split(column: Any, found: Ragged) -> list[Array]:
    """Return the tensors of a column as arrays, which share its memory unless NumPy lacks the dtype."""
    flat, offsets = part(column, found)
    values = to_array(tensor_of(flat, found.dtype))
    runs = [slice(*run) for run in pairwise(offsets.tolist())]
    if found.is_list:
        values = values.reshape(-1, *(size or 0 for size in found.shape[1:]))
        return [values[run] for run in runs]
    return [values[run].reshape(shape) for run, shape in zip(runs, shapes_in(column, found), strict=True)]


def put_entry(batch: dict[str, Any], key: Key, values: Any) -> None:
    """Set an entry of nested dicts."""
    for name in key[:-1]:
        batch = batch.setdefault(name, {})
    batch[key[-1]] = values
