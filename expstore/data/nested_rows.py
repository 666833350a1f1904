"""Split, select and join rows of TensorDicts with nested tensors.

Stores with variable-length fields return such TensorDicts. torch has no indexing by rows, `split`, `cat` or
`stack` of nested tensors; other entries are handled by tensordict. Used by users, and by code here that
splits batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from tensordict import TensorDictBase, is_non_tensor

from expstore.core.values import IntArray, key_name, to_key
from expstore.data.nested_tensors import is_packed, make_jagged, make_strided, stack_values
from expstore.errors import SchemaError

_Batch = TypeVar("_Batch", bound=TensorDictBase)


def split_rows(batch: _Batch, lengths: Sequence[int]) -> list[_Batch]:
    """Split a TensorDict into consecutive runs of rows: `batch.split(lengths)`, but also for nested tensors.

    Args:
        batch: A TensorDict with one batch dim.
        lengths: Number of rows of each run; their sum is the number of rows.

    Raises:
        SchemaError: Their sum differs from the number of rows, or one is negative; a RuntimeError of torch
            if there are no nested tensors.
    """
    if not _find_nested(batch):
        return list(batch.split(list(lengths)))
    if sum(lengths) != batch.batch_size[0] or min(lengths, default=0) < 0:  # as `split` of tensors does
        raise SchemaError(
            f"{batch.batch_size[0]} rows cannot be split into runs of {list(lengths)[:20]} rows"
        )
    stops = itertools.accumulate(lengths)
    return [take_rows(batch, slice(stop - rows, stop)) for rows, stop in zip(lengths, stops, strict=True)]


def take_rows(batch: _Batch, rows: Any) -> _Batch:
    """Return some rows of a TensorDict: `batch[rows]`, but also for nested tensors.

    Args:
        batch: A TensorDict with one batch dim.
        rows: A slice, integers or a mask, as a tensor, an array or a list.

    Raises:
        IndexError: There is no such row.

    Example:
        >>> from expstore.data.nested_rows import take_rows
        >>> halves = take_rows(batch, slice(0, 32)), take_rows(batch, slice(32, 64))
        >>> shuffled = take_rows(batch, torch.randperm(64))
    """
    nested = _find_nested(batch)
    if not nested:
        found: _Batch = batch[rows]
        return found
    if isinstance(rows, slice):
        numbers = np.arange(batch.batch_size[0])[rows]
    else:
        given = rows.detach().cpu().numpy() if isinstance(rows, torch.Tensor) else np.asarray(rows)
        numbers = np.arange(batch.batch_size[0])[given if given.size else given.astype(np.int64)]
    index = rows if isinstance(rows, slice) else torch.from_numpy(numbers)
    texts = [] if numbers.size else _non_tensors(batch)  # tensordict cannot stack zero rows
    part: _Batch = batch.exclude(*nested, *texts)[index]
    for key in texts:
        part.set(key, stack_values([]))
    for key in nested:
        part.set(key, _take(batch.get(key), numbers))
    return part


def join_rows(batches: Sequence[_Batch]) -> _Batch:
    """Concatenate the rows of several TensorDicts: `torch.cat`, but also for nested tensors.

    Args:
        batches: At least one TensorDict, with the same fields and one batch dim each.

    Raises:
        SchemaError: A field is a nested tensor in some of them only, or their kinds differ.

    Example:
        >>> from expstore.data.nested_rows import join_rows
        >>> both = join_rows([rb.sample(), rb.sample()])
    """
    nested = [_find_nested(batch) for batch in batches]
    if not any(nested):
        whole: Any = torch.cat(list(batches))
        return whole  # type: ignore[no-any-return]
    if other := set().union(*nested) - set(nested[0]).intersection(*nested):
        name = key_name(to_key(next(iter(other))))
        raise SchemaError(f"field {name!r} is a nested tensor in some batches only")
    joined: Any = torch.cat([batch.exclude(*nested[0]) for batch in batches])
    for key in nested[0]:
        joined.set(key, _join(key_name(to_key(key)), [batch.get(key) for batch in batches]))
    return joined  # type: ignore[no-any-return]


def _find_nested(batch: TensorDictBase) -> list[Any]:
    items = batch.items(include_nested=True, leaves_only=True)
    return [key for key, leaf in items if isinstance(leaf, torch.Tensor) and leaf.is_nested]


def _non_tensors(batch: TensorDictBase, path: tuple[str, ...] = ()) -> list[Any]:
    found: list[Any] = []
    for name, entry in batch.items():
        if is_non_tensor(entry):
            found.append((*path, name))
        elif isinstance(entry, TensorDictBase):
            found += _non_tensors(entry, (*path, name))
    return found


def _take(nested: Any, numbers: IntArray) -> torch.Tensor:
    """Return a copy of some rows of a nested tensor."""
    if nested.layout is not torch.jagged or not is_packed(nested):
        rows = nested.unbind(0)
        return _of_rows([rows[number] for number in numbers.tolist()], nested)
    starts = nested.offsets().cpu().numpy()
    lengths = np.diff(starts)[numbers]
    ends = np.cumsum(lengths)
    places = np.repeat(starts[:-1][numbers] - (ends - lengths), lengths) + np.arange(lengths.sum())
    values = nested.values().index_select(0, torch.from_numpy(places).to(nested.device))
    return make_jagged(values, np.concatenate([np.zeros(1, np.int64), ends]))


def _join(name: str, parts: Sequence[Any]) -> torch.Tensor:
    parts = [part for part in parts if part.size(0)] or parts[:1]
    first = parts[0]
    if any(part.layout != first.layout or part.dtype != first.dtype for part in parts):
        raise SchemaError(f"field {name!r} has nested tensors of different kinds")
    if first.layout is not torch.jagged or not all(map(is_packed, parts)):
        return _of_rows([row for part in parts for row in part.unbind(0)], first)
    starts = [part.offsets().cpu().numpy() for part in parts]
    ends = np.cumsum(np.concatenate([np.diff(ends) for ends in starts]))
    values = [part.values()[ends[0] : ends[-1]] for part, ends in zip(parts, starts, strict=True)]
    return make_jagged(torch.cat(values), np.concatenate([np.zeros(1, np.int64), ends]))


def _of_rows(rows: list[torch.Tensor], like: Any) -> torch.Tensor:
    """Combine rows in a nested tensor of the same layout, which owns its memory."""
    if like.layout is torch.jagged:
        found: torch.Tensor = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        return found
    sizes = np.array([tuple(row.shape) for row in rows], np.int64).reshape(len(rows), like.dim() - 1)
    items = sizes.prod(1)
    none = torch.zeros(0, dtype=like.dtype, device=like.device)
    flat = torch.cat([none, *(row.reshape(-1) for row in rows)])
    return make_strided(flat, sizes, np.cumsum(items) - items)
