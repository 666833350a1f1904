"""Convert nested dicts of arrays to columns, for programs that use NumPy, JAX or plain Python.

Used by buffers whose rows are TensorDicts; it builds no TensorDict.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import is_non_tensor

from expstore.core.casts import find_rounded
from expstore.core.values import Array, Key, key_name
from expstore.data.batch import Batch, Layout, gather
from expstore.data.leaves import check_unmasked, value_of
from expstore.data.nested_tensors import NAMES
from expstore.errors import SchemaError
from expstore.schema.schema import DTYPES, Schema

#: Dtypes of Python numbers if no field has another dtype; `torch.as_tensor` chooses the same.
_PLAIN = {"b": "bool", "i": "int64", "f": "float32"}
#: Kinds of fields that accept Python numbers, by the kind of the number.
_TAKEN_BY = {"b": "b", "i": "iufc", "f": "fc"}


def take_mapping(
    data: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    layout: Layout,
    *,
    single: bool = False,
    skip: frozenset[str] = frozenset(),
    schema: Schema | None = None,
) -> Batch:
    """Convert a nested dict, or a list of rows that are dicts, to columns.

    Arrays, tensors and NumPy numbers keep their dtype. Python numbers, and lists of them, get the dtype of
    the field; in the first batch they become bool, int64 and float32, as with `torch.as_tensor`.

    Args:
        data: Values by field name, nested: a name with dots is the path of a field, as in SQL ("next.reward"
            is `("next", "reward")`). One value per row: an array or a tensor whose first dim is rows (the
            first `layout.ndim` dims are), or a list. Of a single row, and of each row in a list, its value.
        layout: Which dims make rows.
        single: Whether `data` is one row (one for each lane if `layout.ndim` is larger than 1).
        skip: Root names to skip.
        schema: The fields of the store; None: these rows determine them.

    Returns:
        Columns of shape `(n, *row shape)`, which may share memory with `data`.

    Raises:
        SchemaError: There are no fields, columns have different lengths, rows have different fields, or a
            value cannot be stored.
    """
    columns = data if isinstance(data, Mapping) else _stack(data, ())
    keys: list[Key] = []
    leaves: list[Any] = []
    for key, value in _walk(columns, (), skip, schema):
        keys.append(key)
        leaves.append(_read(key, value, single, schema))
    if not keys:
        raise SchemaError("the dict has no fields", hint="give at least one name with its values")
    if len(set(keys)) < len(keys):
        twice = next(key for place, key in enumerate(keys) if key in keys[:place])
        raise SchemaError(f"field {key_name(twice)!r} occurs twice: by its path, and in a dict")
    return gather(keys, leaves, layout, single=single)


def _walk(
    data: Mapping[str, Any], path: Key, skip: frozenset[str], schema: Schema | None
) -> Iterator[tuple[Key, Any]]:
    """Yield the key and the value of each field."""
    for name, value in data.items():
        if not isinstance(name, str):
            raise SchemaError(f"a field has the name {name!r}", hint="names of fields must be text")
        if not path and name in skip:
            continue
        key = (*path, name)
        if "." in name and (schema is None or key not in schema):
            key = (*path, *name.split("."))
        if is_non_tensor(value):
            yield key, value_of(value)
        elif isinstance(value, Mapping):
            yield from _walk(value, key, skip, schema)
        else:
            yield key, value


def _stack(rows: Sequence[Mapping[str, Any]], path: Key) -> dict[str, Any]:
    """Stack dicts of single values to a dict of columns."""
    names = rows[0].keys()
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise SchemaError(f"row {number} has type {type(row).__name__}, row 0 is a dict")
        if row.keys() != names:
            where = f" in {key_name(path)!r}" if path else ""
            raise SchemaError(f"row {number} has other fields{where} than row 0", hint=f"row 0: {[*names]}")
    columns: dict[str, Any] = {}
    for name in names:
        values = [row[name] for row in rows]
        if isinstance(values[0], Mapping):
            columns[name] = _stack(values, (*path, name))
        else:
            check_unmasked((*path, name), values)
            columns[name] = np.stack(values) if _are_alike(values) else values
    return columns


def _read(key: Key, leaf: Any, single: bool, schema: Schema | None) -> Any:
    """Return a leaf as a tensor, as an array of a supported dtype, or as a list of one value per row."""
    check_unmasked(key, leaf)
    if isinstance(leaf, (np.datetime64, np.timedelta64)):
        leaf = _read_times(key, np.asarray(leaf))
    field = schema[key] if schema is not None and key in schema else None
    if isinstance(leaf, torch.Tensor):
        return leaf
    if field is not None and field.variable and not isinstance(leaf, np.ndarray):
        return [leaf] if single else _values(key, leaf)
    if isinstance(leaf, (bool, int, float, list, tuple)):
        numbers = _read_numbers(key, leaf, None if field is None else field.dtype)
        if numbers is not None:
            return numbers
    elif hasattr(leaf, "__array__"):
        array = np.asarray(leaf)
        if array.dtype.kind in "biufc":
            return _to_native_order(key, array)
        leaf = _read_times(key, array) if array.dtype.kind in "mM" else array.tolist()
    return [leaf] if single else _values(key, leaf)


def _are_alike(values: Sequence[Any]) -> bool:
    """Return whether values are NumPy numbers or arrays of one dtype and shape."""
    if not all(issubclass(kind, (np.ndarray, np.generic)) for kind in set(map(type, values))):
        return False
    kinds = {(value.dtype, value.shape) for value in values}
    return len(kinds) == 1 and values[0].dtype.kind in "biufc"


def _read_times(key: Key, array: Array) -> Any:
    """Return datetime64 or timedelta64 values, one by one, as values that Arrow keeps.

    Raises:
        SchemaError: They are integers in Python: finer than nanoseconds, or too far away.
    """
    if np.datetime_data(array.dtype)[0] == "ns":  # Python's times have microseconds
        return list(array) if array.ndim else array[()]
    values = array.tolist()
    if any(type(value) is int for value in np.asarray(values, object).reshape(-1)):
        raise SchemaError(
            f"field {key_name(key)!r} has values of dtype {array.dtype} that Python has no times for",
            hint="convert them to datetime64[ns] or timedelta64[ns], or to integers",
        )
    return values


def _values(key: Key, leaf: Any) -> list[Any]:
    """Return a leaf as a list of one value per row."""
    if isinstance(leaf, (str, bytes)) or not isinstance(leaf, Sequence):
        raise SchemaError(
            f"field {key_name(key)!r} has type {type(leaf).__name__}: extend() takes one value per row",
            hint="give an array, a tensor or a list; add() takes a single row",
        )
    return list(leaf)


def _read_numbers(key: Key, leaf: Any, wanted: str | None) -> Array | None:
    """Convert a number, or nested lists of numbers, to an array.

    The result is None if there are other values or the lists are ragged. Python numbers get the dtype of the
    field, `wanted`, if it is of their kind.
    """
    try:
        array = np.asarray(leaf)
    except (ValueError, TypeError, RuntimeError):
        return None
    kind = array.dtype.kind
    if kind not in "biufc":
        return None
    if kind not in _PLAIN or not _is_plain(leaf):
        _check_rounded(key, leaf, array, array.dtype.name)
        return _to_native_order(key, array)
    if kind == "f" and (np.abs(array) >= 2.0**63).any() and _is_plain(leaf, int):
        raise SchemaError(
            f"field {key_name(key)!r} has integers that have no common dtype: {leaf!r:.80}",
            hint="the largest int64 is 2**63 - 1; uint64 has no negative numbers",
        )
    # bfloat16 is left out, as NumPy only has its bits.
    fits = wanted in DTYPES and wanted != "bfloat16" and DTYPES[wanted].kind in _TAKEN_BY[kind]
    dtype = wanted if fits and wanted is not None else _PLAIN[kind]
    with np.errstate(over="ignore", invalid="ignore"):
        cast = array.astype(DTYPES[dtype])
        if kind == "i":
            kept = cast.astype(np.int64) == array
            if DTYPES[dtype].kind == "u":  # a negative number comes back from uint64 as it was
                kept &= array >= 0
        else:
            kept = np.isfinite(cast) == np.isfinite(array)
    if not np.all(kept):
        raise SchemaError(f"field {key_name(key)!r} is {dtype}, and {leaf!r:.80} does not fit into it")
    _check_rounded(key, leaf, array, dtype)
    return cast


def _check_rounded(key: Key, leaf: Any, array: Array, dtype: str) -> None:
    """Raise SchemaError if NumPy has made floats of integers that a float type cannot hold."""
    if array.dtype.kind not in "fc":
        return
    lost = find_rounded(leaf, array, dtype)
    if lost is not None:
        raise SchemaError(
            f"field {key_name(key)!r} is {dtype}, and {lost}, among floats, does not fit into it",
            hint="give only integers, or convert them to floats yourself",
        )


def _is_plain(leaf: Any, kinds: type | tuple[type, ...] = (bool, int, float)) -> bool:
    """Return whether a number, or each number in nested lists, is a Python number of these kinds."""
    if not isinstance(leaf, (list, tuple)):
        return isinstance(leaf, kinds) and not isinstance(leaf, np.generic)
    found = set(map(type, leaf))
    if any(issubclass(kind, (list, tuple)) for kind in found):
        return all(_is_plain(part, kinds) for part in leaf)
    return all(issubclass(kind, kinds) and not issubclass(kind, np.generic) for kind in found)


def _to_native_order(key: Key, array: Array) -> Array:
    """Return an array in this machine's byte order.

    Raises:
        SchemaError: The dtype is not supported.
    """
    native = array.dtype.newbyteorder("=")
    if native not in NAMES:
        raise SchemaError(f"field {key_name(key)!r} has dtype {array.dtype}, which cannot be stored")
    return array.astype(native, copy=False)
