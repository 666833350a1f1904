"""Replace jagged tensors in a batch by dense ones: padded, or packed one after another."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, is_non_tensor

from expstore.core.values import Key
from expstore.data.nested_tensors import is_packed
from expstore.errors import SchemaError
from expstore.schema.ragged_fields import ENTRIES, RaggedForm, build_taken_error


class _Lengths(NamedTuple):
    """Where rows begin in concatenated tensors, and the place of each element in its row."""

    offsets: np.ndarray[Any, np.dtype[np.int64]]
    lengths: np.ndarray[Any, np.dtype[np.int64]]
    positions: np.ndarray[Any, np.dtype[np.int64]]


def to_dense(batch: Any, form: RaggedForm) -> TensorDict:
    """Replace each jagged tensor, and add two entries with it, which are named by it.

    "padded": `x` has shape `(n, longest, ...)`, with zeros after the end of a row; `x_lengths` has the
    lengths, int64, shape `(n,)`; `x_mask` is True where `x` has values of a row, bool, shape `(n, longest)`.

    "packed": `x` has shape `(total, ...)`, row after row; `x_cu_seqlens` has the start of each row and the
    end of the last one, int32, shape `(n + 1,)`; `x_position_ids` has the place of each element in its row,
    int64, shape `(total,)`. The batch size of the result, and of the TensorDicts in it, is `[]`.

    Other entries stay as they are: texts, lists, and nested tensors that differ in several dims.

    Args:
        batch: The rows, a TensorDict with one batch dim.
        form: "padded" or "packed".

    Raises:
        SchemaError: The batch is not a TensorDict, or it has an entry of such a name already.
    """
    if not isinstance(batch, TensorDictBase):
        raise SchemaError(
            f"ragged={form!r} needs batches that are TensorDicts, and this one is a {type(batch).__name__}",
            hint="use ragged='jagged', or a batch without a collate function or tensorclass",
        )
    return _replace(batch, form, (), {})


def _replace(batch: TensorDictBase, form: RaggedForm, path: Key, known: dict[bytes, _Lengths]) -> TensorDict:
    entries: dict[str, Any] = {}
    for name in batch.keys():  # noqa: SIM118 - see TensorDict
        value = batch.get(name)
        if isinstance(value, TensorDictBase) and not is_non_tensor(value):
            entries[name] = _replace(value, form, (*path, name), known)
        elif not _is_jagged(value):
            entries[name] = value
        else:
            added = [name + ending for ending in ENTRIES[form]]
            for taken in added:
                if taken in batch.keys():  # noqa: SIM118 - see TensorDict
                    raise build_taken_error(form, (*path, taken))
            made = (_pad if form == "padded" else _pack)(value, _measure(value, known))
            entries |= zip((name, *added), made, strict=True)
    if form == "packed":
        return TensorDict(entries, [], device=batch.device)
    return TensorDict(entries, batch.batch_size, names=batch.names, device=batch.device)


def _is_jagged(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.jagged and is_packed(value)


def _measure(nested: Any, known: dict[bytes, _Lengths]) -> _Lengths:
    """Return the lengths of rows; computed once for all fields of a batch with the same lengths."""
    offsets = nested.offsets().cpu().numpy()
    offsets = offsets - offsets[0]
    if (found := known.get(named := offsets.tobytes())) is None:
        lengths = np.diff(offsets)
        positions = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
        found = known[named] = _Lengths(offsets, lengths, positions)
    return found


def _values(nested: Any, rows: _Lengths) -> torch.Tensor:
    begin = int(nested.offsets()[0])
    values: torch.Tensor = nested.values()[begin : begin + int(rows.offsets[-1])]
    return values


def _pad(nested: Any, rows: _Lengths) -> list[torch.Tensor]:
    values, count = _values(nested, rows), rows.lengths.size
    longest = int(rows.lengths.max(initial=0))
    places = rows.positions + np.repeat(np.arange(count) * longest, rows.lengths)
    flat = values.new_zeros(count * longest, *values.shape[1:])
    flat.index_copy_(0, torch.from_numpy(places).to(values.device), values)
    mask = np.arange(longest) < rows.lengths[:, None]
    return [flat.reshape(count, longest, *values.shape[1:]), *_tensors(values, rows.lengths.copy(), mask)]


def _pack(nested: Any, rows: _Lengths) -> list[torch.Tensor]:
    values = _values(nested, rows)
    return [values, *_tensors(values, rows.offsets.astype(np.int32), rows.positions.copy())]


def _tensors(like: torch.Tensor, *arrays: Any) -> list[torch.Tensor]:
    """Convert arrays to tensors on the device of another one; each field has memory of its own."""
    return [torch.from_numpy(array).to(like.device) for array in arrays]
