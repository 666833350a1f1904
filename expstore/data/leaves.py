"""The leaves of batches, and their conversion to columns.

A batch of any kind becomes keys and leaves, which `to_columns` converts, without copies if possible:
`leaves_of` finds the leaves of TensorDicts, `expstore.data.containers` those of trees,
`expstore.data.mappings` those of dicts. The type of a variable-length field follows from its rows in this
batch alone.
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
    TensorDict,
    TensorDictBase,
    is_non_tensor,
    is_tensorclass,
)

from expstore.core.values import Array, Key, key_name
from expstore.data.nested_tensors import NAMES, from_nested, from_tensors, name_of
from expstore.errors import SchemaError
from expstore.schema.arrow_types import Ragged, ragged_text, type_text
from expstore.schema.arrow_values import column_of
from expstore.schema.casting import fit_arrow
from expstore.schema.schema import OBJECT, Field, arrow_dtype

#: Dtype of a column whose values do not determine a type: nothing but None, or empty lists.
UNKNOWN = arrow_dtype("")

# -- leaves ---------------------------------------------------------------------------------------------


def leaves_of(data: TensorDictBase, skip: frozenset[str] = frozenset()) -> tuple[list[Key], list[Any]]:
    """Return the keys and leaves of a TensorDict: tensors, and non-tensor entries.

    Args:
        data: The TensorDict.
        skip: Root keys to skip.

    Raises:
        SchemaError: An entry has another type, or rows of a lazy stack have different fields.
        RuntimeError: Rows of a lazy stack differ in shape; `leaves_of_rows` accepts them.
    """
    keys: list[Key] = []
    leaves: list[list[Any]] = []
    _walk([data], (), skip, keys, leaves)
    return keys, [leaf for (leaf,) in leaves]


def leaves_of_rows(
    data: TensorDictBase, dims: int, skip: frozenset[str] = frozenset()
) -> tuple[list[Key], list[Any]]:
    """Return the keys and leaves of rows that may differ in shape, each leaf as a list of one value per row.

    Args:
        data: The rows, in C order of its first `dims` dims.
        dims: Number of dims that make rows.
        skip: Root keys to skip.
    """
    rows: Sequence[TensorDictBase] = [data]
    for _ in range(dims):
        rows = [row for part in rows for row in part.unbind(0)]
    keys: list[Key] = []
    leaves: list[list[Any]] = []
    _walk(rows, (), skip, keys, leaves)
    return keys, [
        [entry if isinstance(entry, torch.Tensor) else value_of(entry) for entry in leaf] for leaf in leaves
    ]


def leaves_of_plain(
    rows: Sequence[Any], skip: frozenset[str] = frozenset()
) -> tuple[list[Key], list[Any]] | None:
    """Return the keys and leaves of single rows as `leaves_of_rows` does, in a fraction of its time.

    The result is None if a row is not a TensorDict without batch dims, rows have different names, or a field
    has values of several kinds.

    Args:
        rows: At least one row.
        skip: Root keys to skip.
    """
    keys: list[Key] = []
    leaves: list[Any] = []
    return (keys, leaves) if _collect(rows, (), skip, keys, leaves) and keys else None


def _collect(
    rows: Sequence[Any], path: Key, skip: frozenset[str], keys: list[Key], leaves: list[list[Any]]
) -> bool:
    """Append the key of each leaf, and the list of its values; return False if rows are not plain."""
    if set(map(type, rows)) != {TensorDict} or any(row._batch_size for row in rows):
        return False
    tables = [row._tensordict for row in rows]
    names = tables[0].keys()
    if any(table.keys() != names for table in tables):
        return False
    for name in names:
        if not path and name in skip:
            continue
        values = [table[name] for table in tables]
        kinds = set(map(type, values))
        if kinds == {TensorDict}:
            if not _collect(values, (*path, name), skip, keys, leaves):
                return False
            continue
        if kinds == {NonTensorData}:
            values = list(map(value_of, values))
        elif kinds != {torch.Tensor} or (
            {(value.dtype, value.is_nested) for value in values} != {(values[0].dtype, False)}
        ):
            return False
        keys.append((*path, name))
        leaves.append(values)
    return True


def _walk(
    rows: Sequence[TensorDictBase], path: Key, skip: frozenset[str], keys: list[Key], leaves: list[list[Any]]
) -> None:
    """Append the key of each leaf of TensorDicts with the same fields, and the list of their entries."""
    for row in rows:
        if isinstance(row, LazyStackedTensorDict):
            _check_alike(row.tensordicts, path)
    _check_alike(rows, path)
    others = [dict(row.items()) for row in rows[1:]]
    for name, first in rows[0].items():
        if not path and name in skip:
            continue
        key = (*path, name)
        if not others and isinstance(first, torch.Tensor):  # nearly always: one TensorDict, and a tensor
            keys.append(key)
            leaves.append([first])
            continue
        entries = [first, *(other[name] for other in others)]
        are_leaves = [isinstance(entry, torch.Tensor) or is_non_tensor(entry) for entry in entries]
        if all(are_leaves):
            keys.append(key)
            leaves.append(entries)
        elif any(are_leaves):
            raise SchemaError(f"field {key_name(key)!r} is a group of fields in some rows only")
        elif all(isinstance(entry, TensorDictBase) or is_tensorclass(entry) for entry in entries):
            _walk(entries, key, skip, keys, leaves)
        else:
            raise SchemaError(
                f"field {key_name(key)!r} is a {type(first).__name__}, which cannot be stored",
                hint="convert it to a tensor, or to NonTensorData",
            )


def _check_alike(rows: Sequence[TensorDictBase], path: Key) -> None:
    """Raise SchemaError if rows have different fields, of which a lazy stack only has the common ones."""
    names = [set(row.keys()) for row in rows] if len(rows) > 1 else []
    for number, found in enumerate(names):
        if found != names[0]:
            name = sorted(map(str, found ^ names[0]))[0]
            raise SchemaError(
                f"row {number} of the batch has {'a' if name in found else 'no'} field "
                f"{key_name((*path, name))!r}, row 0 has {'none' if name in found else 'one'}",
                hint="rows must have the same fields; a LazyStackStorage stores others",
            )


def has_lazy(data: TensorDictBase) -> bool:
    """Return whether a TensorDict is or contains a lazy stack, whose rows may differ in shape."""
    if isinstance(data, LazyStackedTensorDict):
        return True
    groups = (value for value in data.values() if isinstance(value, TensorDictBase))
    return any(has_lazy(group) for group in groups if not is_non_tensor(group))


def is_loose(leaf: Any) -> bool:
    """Return whether a leaf is a list of one value per row, or a nested tensor."""
    return isinstance(leaf, list) or (isinstance(leaf, torch.Tensor) and leaf.is_nested)


def value_of(entry: Any) -> Any:
    """Return the value of a non-tensor entry of a TensorDict; of a stack the list of its values.

    Reading the property of NonTensorData would take twenty times as long.
    """
    if isinstance(entry, NonTensorStack):
        return entry.tolist()
    return entry.__dict__["_non_tensordict"].get("data") if type(entry) is NonTensorData else entry.data


def _values_of(entry: Any, shape: Sequence[int]) -> list[Any]:
    """Return the values of a non-tensor entry of a TensorDict, one per row.

    Args:
        entry: The entry.
        shape: Sizes of its dims that make rows. A stack with more dims has a list in each row.
    """
    if isinstance(entry, NonTensorStack):
        if not shape:
            return [value_of(entry)]
        parts = entry.tensordicts if entry.stack_dim == 0 else entry.unbind(0)
        return [value for part in parts for value in _values_of(part, shape[1:])]
    return [value_of(entry)] * math.prod(shape)


def check_unmasked(key: Key, value: Any) -> None:
    """Raise SchemaError if elements of a NumPy array, or of arrays in nested lists, are masked."""
    if isinstance(value, list | tuple):
        if any(issubclass(kind, (list, tuple, np.ma.MaskedArray)) for kind in set(map(type, value))):
            for item in value:
                check_unmasked(key, item)
    elif isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        where = f"field {key_name(key)!r}" if key else "the data"
        raise SchemaError(
            f"{where} has a NumPy array with masked elements, and a store keeps no masks",
            hint="fill them, array.filled(value), or store the mask, array.mask, as a field of its own",
        )


# -- columns --------------------------------------------------------------------------------------------


def to_columns(
    keys: Sequence[Key], leaves: Sequence[Any], shape: Sequence[int], *, typed: bool = False
) -> tuple[list[Any], list[str]]:
    """Convert leaves to columns with one row per position along some dims; also return their dtypes.

    Args:
        keys: Keys of the fields.
        leaves: Tensors, arrays of a supported dtype and non-tensor entries of a TensorDict, with these dims
            first; or leaves for which `is_loose` is True, with one value per row.
        shape: Sizes of the dims.
        typed: Whether Python values become Arrow columns; otherwise they stay objects.

    Returns:
        Columns of shape `(n, *row shape)`, which may share memory with the leaves, or pyarrow Arrays; and the
        names of their dtypes.

    Raises:
        SchemaError: The values of a field are of several kinds, or of an unsupported kind; a tensor is
            sparse; or several dims make rows, or none, and a leaf is a nested tensor.
    """
    count, dims = math.prod(shape), len(shape)
    try:  # nearly always: all leaves are tensors that NumPy can view
        dtypes = [NAMES[leaf.dtype] for leaf in leaves]
        views = [leaf.numpy() for leaf in leaves]
        return views if dims == 1 else [view.reshape(count, *view.shape[dims:]) for view in views], dtypes
    except (AttributeError, KeyError, RuntimeError, TypeError):
        dtypes = []
    arrays: list[Any] = []
    for key, leaf in zip(keys, leaves, strict=True):
        if is_loose(leaf):
            if dims != 1 and not isinstance(leaf, list):
                raise SchemaError(
                    f"field {key_name(key)!r} is a nested tensor, whose first dim is rows, in a batch of "
                    f"shape {list(shape)}",
                    hint="use extend() with one batch dim",
                )
            array, dtype = column_of_rows(key, leaf, typed=typed)
        elif typed and is_non_tensor(leaf):
            array, dtype = column_of_rows(key, _values_of(leaf, shape), typed=True)
        else:
            array, dtype = _to_array(key, leaf)
            if dims != 1:
                array = array.reshape(count, *array.shape[dims:])
        arrays.append(array)
        dtypes.append(dtype)
    return arrays, dtypes


def _to_array(key: Key, leaf: Any) -> tuple[Array, str]:
    """Return a leaf as an array, and the name of its dtype.

    Args:
        key: Key of the leaf, for messages.
        leaf: A tensor on any device, an array, or a non-tensor entry of a TensorDict.

    Returns:
        The array: of bfloat16 uint16 bits, of a non-tensor entry objects.

    Raises:
        SchemaError: A tensor is sparse, or has a dtype that cannot be stored.
    """
    if isinstance(leaf, np.ndarray):
        return leaf, NAMES[leaf.dtype]
    if not isinstance(leaf, torch.Tensor):
        return _non_tensor(leaf, tuple(leaf.batch_size)), OBJECT
    dtype = name_of(key, leaf.dtype)
    if leaf.layout is not torch.strided:
        raise SchemaError(
            f"field {key_name(key)!r} is a sparse tensor ({leaf.layout}), which cannot be stored",
            hint="convert it with to_dense()",
        )
    tensor = leaf.detach().cpu()
    if dtype == "bfloat16":
        tensor = tensor.view(torch.uint16)
    # NumPy has no lazy conjugates and negatives, such as `z.conj()` and `z.conj().imag`.
    array: Array = tensor.resolve_conj().resolve_neg().numpy()
    return array, dtype


def _non_tensor(data: Any, shape: tuple[int, ...]) -> Array:
    """Return the objects of a non-tensor entry. Shape that of the batch."""
    if isinstance(data, NonTensorStack):
        parts = [_non_tensor(part, shape[1:]) for part in data.unbind(0)]
        return np.stack(parts) if shape else parts[0]
    array = np.empty(shape, object)
    for place in np.ndindex(shape):
        array[place] = data.data
    return array


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
    kinds = set(map(type, leaf))
    if leaf and (
        all(issubclass(kind, torch.Tensor) for kind in kinds) or (typed and all(map(_is_tensor, leaf)))
    ):
        is_uniform = kinds == {torch.Tensor} or (
            kinds == {np.ndarray} and {value.dtype for value in leaf} <= NAMES.keys()
        )
        return _of_tensors(key, leaf if is_uniform else list(map(as_tensor, leaf)))
    if not typed:
        return to_objects(leaf), OBJECT
    if any(map(_is_tensor, leaf)):
        other = next(value for value in leaf if not _is_tensor(value))
        raise SchemaError(
            f"field {key_name(key)!r} has tensors in some rows and {type(other).__name__} in others",
            hint="use an empty tensor for a missing value",
        )
    column = column_of(key, leaf)
    return column, UNKNOWN if _is_open(column.type) else arrow_dtype(type_text(column.type, key))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (
        isinstance(value, np.ndarray) and value.ndim > 0 and value.dtype.kind in "biufc"
    )


def _of_tensors(key: Key, rows: list[Any]) -> tuple[Any, str]:
    first = rows[0]
    if any(row.shape != first.shape or row.dtype != first.dtype for row in rows):
        return _name_type(*from_tensors(key, rows))
    return _to_array(key, np.stack(rows) if isinstance(first, np.ndarray) else torch.stack(rows))


def _name_type(found: Ragged, column: Any) -> tuple[Any, str]:
    return column, arrow_dtype(ragged_text(found.dtype, found.shape))


def _is_open(kind: pa.DataType) -> bool:
    """Return whether a part of a type is undetermined, because it only has None."""
    if pa.types.is_null(kind):
        return True
    if pa.types.is_struct(kind):
        return any(_is_open(part.type) for part in kind)
    return pa.types.is_list(kind) and _is_open(kind.value_type)


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
