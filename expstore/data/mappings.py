"""Rows in nested dicts of arrays, as columns: what a program has that uses NumPy, JAX or plain Python.

Used by buffers whose rows are TensorDicts; no TensorDict is built. It knows nothing of storages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorStack, is_non_tensor

from expstore.core.values import Array, Key, key_name
from expstore.data.batch import Batch
from expstore.data.containers import Layout
from expstore.data.leaves import to_columns
from expstore.data.variable_rows import column_of_rows
from expstore.errors import SchemaError
from expstore.schema.schema import DTYPES, OBJECT, Schema

__all__ = ["take_mapping", "take_mappings"]

#: The dtype of Python's own numbers where no field says another: those that `torch.as_tensor` chooses.
_PLAIN = {"b": "bool", "i": "int64", "f": "float32"}
#: Which kinds of field take Python's own numbers, by their kind.
_TAKEN_BY = {"b": "b", "i": "iufc", "f": "fc"}


def take_mapping(
    data: Mapping[str, Any],
    layout: Layout,
    *,
    single: bool = False,
    skip: frozenset[str] = frozenset(),
    schema: Schema | None = None,
) -> Batch:
    """Return a nested dict as columns.

    Arrays, tensors and NumPy's numbers keep their dtype. Python's own numbers, and lists of them, take the
    dtype of the field; in the first batch they become bool, int64 and float32, as `torch.as_tensor` does it.

    Args:
        data: Field name -> values, or -> a dict of the same kind; a name with dots is the path of a field, as
            in SQL: "next.reward" is `("next", "reward")`. One value per row: an array or a tensor
            whose first dim is rows (the first `layout.ndim` dims are), or a list. Of a single row its value.
        layout: Which dims make rows.
        single: It is one row (one for each lane where `layout.ndim` is larger than 1).
        skip: Names at the root to leave out.
        schema: The fields of the store; None: these rows decide.

    Returns:
        Columns of shape `(n, *row shape)`, which may share memory with `data`.

    Raises:
        SchemaError: There are no fields, columns have different lengths, or a value cannot be stored.
    """
    keys: list[Key] = []
    leaves: list[Any] = []
    _collect(data, (), skip, schema, keys, leaves)
    if not keys:
        raise SchemaError("the dict has no fields", hint="give at least one name with its values")
    if len(set(keys)) < len(keys):
        twice = next(key for place, key in enumerate(keys) if key in keys[:place])
        raise SchemaError(f"field {key_name(twice)!r} comes twice: by its path, and in a dict")
    dims = layout.ndim - single
    found = [_read(key, leaf, single, schema) for key, leaf in zip(keys, leaves, strict=True)]
    if layout.dim and not single:
        found = [_swapped(key, leaf, layout.dim) for key, leaf in zip(keys, found, strict=True)]
    shape = _row_dims(keys, found, dims)
    count = int(np.prod(shape, dtype=np.int64))
    arrays: list[Any] = []
    dtypes: list[str] = []
    for key, leaf in zip(keys, found, strict=True):
        if isinstance(leaf, tuple):
            array, dtype = leaf
            array = array.reshape(count, *array.shape[dims:])
        else:
            array, dtype = column_of_rows(key, leaf, typed=layout.typed)
        arrays.append(array)
        dtypes.append(dtype)
    batch = Batch(keys, dtypes, arrays, count)
    return batch.in_lanes(shape[1 - single :]) if layout.ndim > 1 else batch


def take_mappings(
    rows: Sequence[Mapping[str, Any]],
    layout: Layout,
    *,
    skip: frozenset[str] = frozenset(),
    schema: Schema | None = None,
) -> Batch:
    """Return rows, a dict each, as columns; see `take_mapping`.

    Raises:
        SchemaError: Rows have different fields, or cannot be stored.
    """
    return take_mapping(_stacked(rows, ()), layout, skip=skip, schema=schema)


def _collect(
    data: Mapping[str, Any],
    path: Key,
    skip: frozenset[str],
    schema: Schema | None,
    keys: list[Key],
    leaves: list[Any],
) -> None:
    for name, value in data.items():
        if not isinstance(name, str):
            raise SchemaError(f"a field has the name {name!r}", hint="names of fields are text")
        if not path and name in skip:
            continue
        key = (*path, name)
        if "." in name and (schema is None or key not in schema):
            key = (*path, *name.split("."))
        if is_non_tensor(value):
            keys.append(key)
            leaves.append(value.tolist() if isinstance(value, NonTensorStack) else value.data)
        elif isinstance(value, Mapping):
            _collect(value, key, skip, schema, keys, leaves)
        else:
            keys.append(key)
            leaves.append(value)


def _stacked(rows: Sequence[Mapping[str, Any]], path: Key) -> dict[str, Any]:
    """Return a dict of columns for dicts of single values."""
    names = rows[0].keys()
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise SchemaError(f"row {number} has type {type(row).__name__}, row 0 is a dict")
        if row.keys() != names:
            where = f" in {key_name(path)!r}" if path else ""
            raise SchemaError(f"row {number} has other fields{where} than row 0", hint=f"row 0: {[*names]}")
    stacked: dict[str, Any] = {}
    for name in names:
        values = [row[name] for row in rows]
        if isinstance(values[0], Mapping):
            stacked[name] = _stacked(values, (*path, name))
        elif len(
            {(type(value), getattr(value, "dtype", None), np.shape(value)) for value in values}
        ) == 1 and (isinstance(values[0], (np.ndarray, np.generic)) and values[0].dtype.kind in "biufc"):
            stacked[name] = np.stack(values)
        else:
            stacked[name] = values
    return stacked


def _read(key: Key, leaf: Any, single: bool, schema: Schema | None) -> Any:
    """Return a leaf as an array and the name of its dtype, or as a list of one value per row."""
    field = schema[key] if schema is not None and key in schema else None
    if field is not None and field.variable and not isinstance(leaf, (np.ndarray, torch.Tensor)):
        return [leaf] if single else _values(key, leaf)
    if isinstance(leaf, torch.Tensor):
        if leaf.is_nested:
            return leaf
        (array,), (dtype,) = to_columns([key], [leaf])
        return array, dtype
    if isinstance(leaf, (bool, int, float)) or (isinstance(leaf, list) and not single):
        read = _read_plain(key, leaf, None if field is None else field.dtype)
        return read if read is not None else leaf
    if isinstance(leaf, list):
        read = _read_plain(key, leaf, None if field is None else field.dtype)
        return read if read is not None else [leaf]
    if hasattr(leaf, "__array__") or isinstance(leaf, np.generic):
        array = np.asarray(leaf)
        if array.dtype.kind in "biufc":
            return array, _name_of(key, array)
        return [array.tolist()] if single else array.tolist()
    if single:
        return [leaf]
    raise SchemaError(
        f"field {key_name(key)!r} is a {type(leaf).__name__}, which has no value per row",
        hint="give an array, a tensor or a list; add() takes single rows",
    )


def _values(key: Key, leaf: Any) -> list[Any]:
    if isinstance(leaf, (str, bytes)) or not hasattr(leaf, "__iter__"):
        raise SchemaError(f"field {key_name(key)!r} is {leaf!r:.80}", hint="give a list of one value per row")
    return list(leaf)


def _read_plain(key: Key, leaf: Any, wanted: str | None) -> tuple[Array, str] | None:
    """Return Python's own numbers as an array; None: there are others, or rows differ in shape."""
    try:
        array = np.asarray(leaf)
    except (ValueError, TypeError, RuntimeError):
        return None
    kind = array.dtype.kind
    if kind not in "biufc":
        return None
    if kind not in _PLAIN or not _is_plain(leaf):
        return array, _name_of(key, array)
    takes = wanted is not None and wanted != OBJECT and wanted in DTYPES and wanted != "bfloat16"
    dtype = (
        wanted if takes and wanted is not None and DTYPES[wanted].kind in _TAKEN_BY[kind] else _PLAIN[kind]
    )
    cast = array.astype(DTYPES[dtype])
    if kind == "i" and not np.array_equal(cast, array):
        raise SchemaError(f"field {key_name(key)!r} is {dtype}, and {leaf!r:.80} does not fit into it")
    return cast, dtype


def _is_plain(leaf: Any) -> bool:
    """Return whether a number, or each one in nested lists, is Python's own."""
    if isinstance(leaf, list):
        return all(map(_is_plain, leaf))
    return isinstance(leaf, (bool, int, float)) and not isinstance(leaf, np.generic)


def _name_of(key: Key, array: Array) -> str:
    name = array.dtype.newbyteorder("=").name
    if name not in DTYPES:
        raise SchemaError(f"field {key_name(key)!r} has dtype {array.dtype}, which cannot be stored")
    return name


def _swapped(key: Key, leaf: Any, dim: int) -> Any:
    if not isinstance(leaf, tuple):
        return leaf
    array, dtype = leaf
    if array.ndim <= dim:
        raise SchemaError(f"field {key_name(key)!r} has shape {[*array.shape]}, and dim {dim} is time")
    return array.swapaxes(dim, 0), dtype


def _row_dims(keys: Sequence[Key], found: Sequence[Any], dims: int) -> tuple[int, ...]:
    """Return the sizes of the dims that make rows.

    Raises:
        SchemaError: Columns differ in them, or one does not have them.
    """
    shape: tuple[int, ...] | None = None
    first: Key = keys[0]
    for key, leaf in zip(keys, found, strict=True):
        if isinstance(leaf, tuple):
            own = tuple(leaf[0].shape[:dims])
            if len(own) < dims:
                raise SchemaError(
                    f"field {key_name(key)!r} has shape {[*leaf[0].shape]}: extend() takes one value per row",
                    hint="add() takes a single row",
                )
        else:
            own = (leaf.size(0) if isinstance(leaf, torch.Tensor) else len(leaf),)[:dims]
        if shape is None:
            shape, first = own, key
        elif own != shape and not (not isinstance(leaf, tuple) and int(np.prod(shape)) == int(np.prod(own))):
            raise SchemaError(
                f"field {key_name(key)!r} has {_rows(own)}, {key_name(first)!r} has {_rows(shape)}",
                hint="all fields have one value per row",
            )
    return shape or ()


def _rows(shape: tuple[int, ...]) -> str:
    return f"{shape[0]} rows" if len(shape) == 1 else f"rows of shape {[*shape]}"
