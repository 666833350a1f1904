"""Cut and join parts of batches, and the samplers' values about their rows.

Used by ensembles. It reads no store.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection
from torch.utils._pytree import tree_map

from expstore.buffers.ensemble_routing import check_members
from expstore.core.values import Array, IntArray
from expstore.data.nested_rows import join_rows, take_rows
from expstore.errors import ArgumentError


def cut(batch: Any, rows: slice) -> Any:
    """Return some rows of a batch."""
    if isinstance(batch, TensorDictBase) and batch.batch_dims == 1:
        return take_rows(batch, rows)
    if is_tensor_collection(batch) or isinstance(batch, list):
        return batch[rows]
    return tree_map(lambda leaf: leaf[rows], batch)


def join(batches: list[Any]) -> Any:
    """Concatenate the rows of batches."""
    if isinstance(batches[0], TensorDictBase) and batches[0].batch_dims == 1:
        return join_rows(batches)
    if is_tensor_collection(batches[0]):
        return torch.cat(batches)
    if isinstance(batches[0], list):
        return [row for batch in batches for row in batch]
    return tree_map(lambda *leaves: torch.cat(leaves), *batches)


def columns_of(info: dict[Any, Any], rows: int) -> dict[Any, torch.Tensor]:
    """Return the entries that have one value for each of `rows` rows."""
    return {
        key: value
        for key, value in info.items()
        if isinstance(value, torch.Tensor) and value.ndim and value.shape[0] == rows
    }


def describe_rows(told: dict[Any, torch.Tensor], rows: slice, member: int, size: int) -> TensorDict:
    """Return the samplers' values about the rows of a part; `"index"` has member and index of each row.

    Args:
        told: Values by key, of rows that were drawn together.
        rows: The part's rows among them.
        member: Number of the member.
        size: Number of rows of the part.
    """
    part = TensorDict({}, [size])
    for key, values in told.items():
        if key != "index":
            part.set(key, values[rows])
    index = told["index"][rows]
    members = torch.full((size,), member, dtype=torch.int64, device=index.device)
    part.set("index", TensorDict({"index": index, "buffer_ids": members}, [size]))
    return part


def pairs(index: Any, count: int) -> tuple[IntArray, Array]:
    """Return the members and indices that identify rows, as arrays. Shapes `(n,)` and `(n, ...)`.

    Args:
        index: A TensorDict with `buffer_ids` and `index`, from a sample or from `extend`.
        count: Number of members.

    Raises:
        ArgumentError: `index` is something else; there is no such member.
    """
    if not isinstance(index, TensorDictBase) or "buffer_ids" not in index or "index" not in index:
        raise ArgumentError("rows of an ensemble are identified by a TensorDict with buffer_ids and index")
    members, rows = index.get("buffer_ids"), index.get("index")
    if rows.shape[: members.ndim] != members.shape:
        raise ArgumentError(
            f"Member-local indices must start with the buffer-id shape, got {tuple(rows.shape)} and "
            f"{tuple(members.shape)}."
        )
    inner = rows.shape[members.ndim :]
    return check_members(members, count), rows.reshape(members.numel(), *inner).cpu().numpy()
