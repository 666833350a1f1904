"""Convert variable-length rows to columns: Python values, and tensors of different lengths.

Used by `expstore.data.batch` and `expstore.data.containers`. The type of a field follows from its rows in
this batch alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDictBase,
    is_non_tensor,
    is_tensorclass,
)

from expstore.core.values import Key, key_name
from expstore.data.leaves import as_tensor, check_alike, check_unmasked, to_columns, to_objects
from expstore.data.nested_tensors import from_nested, from_tensors
from expstore.errors import SchemaError
from expstore.schema.arrow_types import Ragged, ragged_text, type_text
from expstore.schema.arrow_values import column_of
from expstore.schema.casting import fit_arrow
from expstore.schema.schema import OBJECT, Field, arrow_dtype

#: Dtype of a column whose values do not determine a type: nothing but None, or empty lists.
UNKNOWN = arrow_dtype("")


def has_lazy(data: TensorDictBase) -> bool:
    """Return whether a TensorDict is or contains a lazy stack, whose rows may differ in shape."""
    if isinstance(data, LazyStackedTensorDict):
        return True
    groups = (value for value in data.values() if isinstance(value, TensorDictBase))
    return any(has_lazy(group) for group in groups if not is_non_tensor(group))


def single_rows(data: TensorDictBase, dims: int) -> Sequence[TensorDictBase]:
    """Return the rows of a TensorDict one by one, in C order of its first `dims` dims."""
    rows: Sequence[TensorDictBase] = [data]
    for _ in range(dims):
        rows = [row for part in rows for row in part.unbind(0)]
    return rows


def leaves_of_rows(
    rows: Sequence[TensorDictBase], path: Key, skip: frozenset[str], keys: list[Key], leaves: list[Any]
) -> None:
    """Collect the leaves of rows that have the same fields, each as a list of one value per row."""
    check_alike(rows, path)
    for name in rows[0].keys():  # noqa: SIM118 - see TensorDict
        if not path and name in skip:
            continue
        key: Key = (*path, name)
        values = [row.get(name) for row in rows]
        if isinstance(values[0], torch.Tensor) or is_non_tensor(values[0]):
            keys.append(key)
            leaves.append([_value_of(key, value) for value in values])
        elif all(isinstance(value, TensorDictBase) or is_tensorclass(value) for value in values):
            inner = [value.to_tensordict() if is_tensorclass(value) else value for value in values]
            leaves_of_rows(inner, key, skip, keys, leaves)
        else:
            raise SchemaError(f"field {key_name(key)!r} is a group of fields in some rows only")


def _value_of(key: Key, entry: Any) -> Any:
    if isinstance(entry, torch.Tensor):
        return entry
    if is_non_tensor(entry):
        return entry.tolist() if isinstance(entry, NonTensorStack) else _data_of(entry)
    raise SchemaError(f"field {key_name(key)!r} is a group of fields in some rows only")


def _values_of(entry: Any, shape: Sequence[int]) -> list[Any]:
    """Return the values of a non-tensor entry of a TensorDict, one per row.

    Args:
        entry: The entry.
        shape: Sizes of its dims that make rows. A stack with more dims has a list in each row.
    """
    if isinstance(entry, NonTensorStack):
        if not shape:
            return [entry.tolist()]
        parts = entry.tensordicts if entry.stack_dim == 0 else entry.unbind(0)
        return [value for part in parts for value in _values_of(part, shape[1:])]
    return [_data_of(entry)] * math.prod(shape)


def _data_of(entry: Any) -> Any:
    """Return the value of NonTensorData; reading its property would take twenty times as long."""
    return entry.__dict__["_non_tensordict"].get("data") if type(entry) is NonTensorData else entry.data


def is_loose(leaf: Any) -> bool:
    """Return whether a leaf is a list of one value per row, or a nested tensor."""
    return isinstance(leaf, list) or (isinstance(leaf, torch.Tensor) and leaf.is_nested)


def column_of_rows(key: Key, leaf: Any, *, typed: bool) -> tuple[Any, str]:
    """Convert a leaf to a column; return it and the name of its dtype.

    Args:
        key: Key of the field, for messages.
        leaf: A list of one value per row, or a nested tensor whose first dim is rows. Tensors of one shape
            become a column of fixed size.
        typed: Whether Python values become an Arrow column; otherwise they stay objects.

    Raises:
        SchemaError: The values are of several kinds, or of an unsupported kind.
    """
    if isinstance(leaf, torch.Tensor):
        return _name_type(*from_nested(key, leaf))
    if typed:  # objects keep their masks
        check_unmasked(key, leaf)
    tensors = [isinstance(value, torch.Tensor) for value in leaf]
    if leaf and (all(tensors) or (typed and all(_is_tensor(value) for value in leaf))):
        return _of_tensors(key, [as_tensor(value) for value in leaf])
    if not typed:
        return to_objects(leaf), OBJECT
    if any(map(_is_tensor, leaf)):
        other = next(value for value in leaf if not _is_tensor(value))
        raise SchemaError(
            f"field {key_name(key)!r} has tensors in some rows and {type(other).__name__} in others",
            hint="use an empty tensor for a missing value",
        )
    column = column_of(key, leaf)
    return column, UNKNOWN if _is_open(column.type) else arrow_dtype(_text(key, column.type))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (
        isinstance(value, np.ndarray) and value.ndim > 0 and value.dtype.kind in "biufc"
    )


def _of_tensors(key: Key, rows: list[torch.Tensor]) -> tuple[Any, str]:
    first = rows[0]
    if any(row.shape != first.shape or row.dtype != first.dtype for row in rows):
        return _name_type(*from_tensors(key, rows))
    (array,), (dtype,) = to_columns([key], [torch.stack(rows)])
    return array, dtype


def _name_type(found: Ragged, column: Any) -> tuple[Any, str]:
    return column, arrow_dtype(ragged_text(found.dtype, found.shape))


def _is_open(kind: pa.DataType) -> bool:
    """Return whether a part of a type is undetermined, because it only has None."""
    if pa.types.is_null(kind):
        return True
    if pa.types.is_struct(kind):
        return any(_is_open(part.type) for part in kind)
    return pa.types.is_list(kind) and _is_open(kind.value_type)


def _text(key: Key, kind: pa.DataType) -> str:
    try:
        return type_text(kind)
    except SchemaError as exc:
        raise SchemaError(f"field {key_name(key)!r}: {exc.message}", hint=exc.hint) from exc


def columns_of(
    keys: Sequence[Key], leaves: Sequence[Any], shape: Sequence[int], *, typed: bool
) -> tuple[list[Any], list[str]]:
    """Convert leaves to columns with one row per position along some dims; also return their dtypes.

    Args:
        keys: Keys of the fields.
        leaves: Tensors and non-tensor entries with these dims first; or leaves for which `is_loose` is True.
        shape: Sizes of the dims.
        typed: As in `column_of_rows`.

    Raises:
        SchemaError: As in `column_of_rows`; or a single row has a nested tensor.
    """
    count = int(np.prod(shape, dtype=np.int64))
    arrays: list[Any] = []
    dtypes: list[str] = []
    for key, leaf in zip(keys, leaves, strict=True):
        if is_loose(leaf) or (typed and is_non_tensor(leaf)):
            if isinstance(leaf, torch.Tensor) and len(shape) != 1:
                raise SchemaError(
                    f"field {key_name(key)!r} is a nested tensor, whose first dim is rows, in a batch of "
                    f"shape {list(shape)}",
                    hint="use extend() with one batch dim",
                )
            rows = leaf if is_loose(leaf) else _values_of(leaf, shape)
            array, dtype = column_of_rows(key, rows, typed=typed)
        else:
            (array,), (dtype,) = to_columns([key], [leaf])
            array = array.reshape(count, *array.shape[len(shape) :])
        arrays.append(array)
        dtypes.append(dtype)
    return arrays, dtypes


def fit_values(entry: Field, value: Any, count: int, *, spread: bool) -> Any:
    """Convert values of a variable-length field to a column of `count` rows.

    Args:
        entry: The field.
        value: One value per row, as a list, a nested tensor or along the first dim; or an entry of a
            TensorDict.
        count: Number of rows.
        spread: Whether one value may be used for all rows.

    Raises:
        SchemaError: Their number differs from `count`, or they do not fit.
    """
    rows = value
    if is_non_tensor(value):
        rows = value.tolist() if len(value.batch_size) else [value.data]
    elif isinstance(value, torch.Tensor) and not value.is_nested:
        rows = list(value.unbind(0)) if value.ndim else [value]
    elif isinstance(value, (str, bytes)) or value is None:
        rows = [value]
    elif isinstance(value, np.ndarray):
        rows = list(value)
    if isinstance(rows, list) and len(rows) == 1 and spread:
        rows = rows * count
    if not isinstance(rows, (list, torch.Tensor)):
        raise SchemaError(
            f"field {key_name(entry.key)!r} takes {entry}, got {type(value).__name__}",
            hint="give a list of one value per row",
        )
    found = rows.size(0) if isinstance(rows, torch.Tensor) else len(rows)
    if found != count:
        raise SchemaError(
            f"shape mismatch for {key_name(entry.key)!r}: got {found} values for {count} rows",
            hint="give a list of one value per row",
        )
    column, dtype = column_of_rows(entry.key, rows, typed=True)
    return fit_arrow(entry.key, entry.arrow, column, dtype)
