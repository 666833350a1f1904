"""`rb.annotate`: convert the values that a user passes for rows to the values of annotated fields.

The storage stores them. A field that does not exist yet is declared first, from its values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from expstore.buffers.store_handle import StoreHandle
from expstore.buffers.updates import as_field
from expstore.core.arguments import check_numbers
from expstore.core.values import Array, IntArray, Key, key_name, to_key
from expstore.data.to_arrays import to_array
from expstore.errors import ArgumentError, SchemaError, StateError
from expstore.schema.arrow_types import ragged_of, ragged_text
from expstore.schema.row_fields import check_no_sample_entry
from expstore.schema.schema import ARROW, Field, Schema
from expstore.storages.columns.annotated import item_dtype
from expstore.storages.format.annotation_log import Part
from expstore.storages.format.renumbering import Renumbering
from expstore.storages.new_field import NewField, check_new_field, check_present
from expstore.wire.annotations import FieldValues, write_annotations

if TYPE_CHECKING:
    from expstore.storages.base import Storage
    from expstore.storages.read_view import ReadView

#: The dtypes of annotated fields: those that SQL can compare.
_DTYPES = frozenset({
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32",
    "float64",
})  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class _Given:
    """The values of one field as they were passed.

    Args:
        values: Of a fixed size: shape `(n, ...)`. Ragged: the values of all rows, one after another.
        lengths: The length of each row of a ragged field; None: of a fixed size. Shape `(n,)`.
    """

    values: Any
    lengths: IntArray | None = None


def annotate(
    store: StoreHandle,
    ids: Any,
    values: Mapping[Any, Any],
    by: str | None,
    like: str | tuple[str, ...] | None,
) -> None:
    """Add values of annotated fields to rows; see `ReplayBuffer.annotate`."""
    if store.proxy is not None:
        store.proxy.annotate_rows(pack_annotations(ids, values, by, like))
        store.storage.follow()  # it may have a new field
        return
    storage = store.storage.writer()
    numbers = _check(ids, values, by)
    if storage.path is not None and storage.manifest is not None:
        numbers = Renumbering.load(storage.disk, storage.path).present(numbers)
    schema, parts, new = storage.require_schema(), [], []
    for name, passed in values.items():
        key = to_key(name)
        given = _read(key, passed, numbers.size)
        known = key in schema
        entry = schema[key] if known else _declare(storage, key, given, like)
        if not entry.annotated:
            raise SchemaError(
                f"field {key_name(key)!r} is written with its rows, and is not annotated",
                hint="change it by rb.update_if_present(id=..., patch=...), or use another name",
            )
        parts.append(_fit_rows(storage, entry, numbers, given))
        if not known:
            new.append(entry)
    check_present(storage, numbers)
    if not numbers.size:
        return
    if (fields := storage.fields) is None:
        raise StateError(f"a {type(storage).__name__} has no annotated fields", hint="use a store on disk")
    for entry in new:
        fields.add(NewField(entry=entry, specs=storage.settings.specs()))
    fields.annotate(by, numbers, parts)


def _check(ids: Any, values: Any, by: Any) -> IntArray:
    """Check what was passed; return the ids. Shape `(n,)`."""
    if not isinstance(values, Mapping) or not values:
        raise ArgumentError("annotate() takes a dict of values by field, with at least one field")
    if by is not None and not isinstance(by, str):
        raise ArgumentError(f"by is the name of what has computed the values, got {by!r}")
    numbers = to_array(ids)
    check_numbers("ids", numbers)
    found: IntArray = numbers.reshape(-1).astype(np.int64, copy=False)
    return found


def pack_annotations(
    ids: Any, values: Mapping[Any, Any], by: str | None, like: str | tuple[str, ...] | None
) -> bytes:
    """Return the arguments of `annotate` as an Arrow stream; see `read_annotations`.

    Raises:
        ArgumentError: The arguments are not those of `annotate`.
        SchemaError: Values are not numbers, or there is another number of values than of ids.
    """
    numbers, fields = _check(ids, values, by), []
    for name, passed in values.items():
        key = to_key(name)
        check_no_sample_entry([key])
        given = _read(key, passed, numbers.size)
        array = to_array(given.values)
        _check_dtype(key_name(key), str(array.dtype.newbyteorder("=")))
        is_loose = not isinstance(given.values, torch.Tensor | np.ndarray)
        fields.append(FieldValues(key, array, given.lengths, is_loose))
    return write_annotations(numbers, fields, by, None if like is None else to_key(like))


def fit_rows(storage: Storage, entry: Field, ids: IntArray, values: Any) -> Part:
    """Convert the values of rows to those of an annotated field.

    Raises:
        SchemaError: They do not fit.
    """
    return _fit_rows(storage, entry, ids, _read(entry.key, values, ids.size))


def _fit_rows(storage: Storage, entry: Field, ids: IntArray, given: _Given) -> Part:
    part = _fit(entry, given)
    _check_lengths(storage, entry, ids, part)
    return part


def make_entry(schema: Schema, key: Key, dtype: str, shape: tuple[int, ...] | None, like: Any) -> Field:
    """Return an annotated field.

    Args:
        schema: The fields of the rows.
        key: The new field.
        dtype: Dtype of its values.
        shape: Shape of a row's value; None: any number of values.
        like: The field with as many values in each row; None: any number.

    Raises:
        SchemaError: Fields cannot have this dtype, or there is no such other field.
    """
    name = key_name(key)
    check_no_sample_entry([key])
    _check_dtype(name, dtype)
    if like is not None:
        other = to_key(like)
        found = [entry for entry in schema.fields if entry.key == other and entry.variable]
        loose = ragged_of(found[0].arrow) if found else None
        if shape is not None or loose is None or not loose.is_list:
            raise SchemaError(
                f"like={key_name(other)!r} does not fit field {name!r}: both must be tensors of any length, "
                f"which list<...> is not; the store has {schema!r}",
                hint=f"declare such a field: schema={{{key_name(other)!r}: ('int32', (None,))}}",
            )
    if shape is not None:
        return Field(key, dtype, shape, annotated=True)
    return Field(key, ARROW, (), ragged_text(dtype, (None,)), True, () if like is None else to_key(like))


def _check_dtype(name: str, dtype: str) -> None:
    if dtype not in _DTYPES:
        raise SchemaError(
            f"field {name!r} would have dtype {dtype}, and annotated fields have numbers",
            hint="use float32 or another real number, an integer, or bool",
        )


def _declare(storage: ReadView, key: Key, given: _Given, like: Any) -> Field:
    """Return the field that values of an unknown field declare."""
    schema = storage.require_schema()
    values = given.values if isinstance(given.values, torch.Tensor) else np.asarray(given.values)
    dtype = str(values.dtype).removeprefix("torch.")
    if not isinstance(given.values, torch.Tensor | np.ndarray) and dtype == "float64":
        dtype = "float32"  # a Python number has no width
    shape = None if given.lengths is not None else tuple(values.shape[1:])
    entry = make_entry(schema, key, dtype, shape, like if shape is None else None)
    schema.grow(entry, None)
    check_new_field(storage, entry)
    return entry


def _read(key: Key, passed: Any, count: int) -> _Given:
    """Return the values that were passed for rows.

    A list of arrays or of lists is ragged, also if all have the same length; so is a nested tensor, and a
    pyarrow array of lists. An array is not.

    Raises:
        SchemaError: The number of values is not that of the rows.
    """
    given = _split(key, passed)
    found = len(given.values) if given.lengths is None else given.lengths.size
    if found != count:
        raise SchemaError(
            f"field {key_name(key)!r}: {found} rows of values for {count} ids",
            hint="give a value for each id",
        )
    return given


def _split(key: Key, passed: Any) -> _Given:
    name = key_name(key)
    if isinstance(passed, torch.Tensor) and passed.is_nested:
        passed = list(passed.detach().cpu().unbind())
    elif type(passed).__module__.startswith("pyarrow"):
        is_list = hasattr(passed.type, "value_type")
        if passed.null_count or (is_list and passed.flatten().null_count):
            raise SchemaError(f"field {name!r}: values are null", hint="leave out the ids of these rows")
        if is_list:
            passed = [row.values.to_numpy(zero_copy_only=False) for row in passed]
        else:
            passed = np.array(passed.to_numpy(zero_copy_only=False))  # torch warns of read-only memory
    if isinstance(passed, torch.Tensor | np.ndarray):
        if not passed.ndim:
            raise SchemaError(f"field {name!r}: got one number", hint="give a value for each id")
        return _Given(passed)
    if not isinstance(passed, Sequence) or isinstance(passed, str):
        raise SchemaError(
            f"field {name!r}: got a {type(passed).__name__}",
            hint="give an array, or a list with a value per id",
        )
    rows = [row.detach().cpu().numpy() if isinstance(row, torch.Tensor) else row for row in passed]
    if not any(_is_list(row) or getattr(row, "ndim", 0) for row in rows):
        return _Given([row.item() if isinstance(row, np.ndarray) else row for row in rows])
    try:
        arrays = [np.asarray(row) for row in rows]
    except ValueError as exc:  # lists of lists of different lengths
        raise SchemaError(
            f"field {name!r}: rows have lists of lists",
            hint="give a flat list or array of numbers for each id",
        ) from exc
    wrong = next((n for n, row in enumerate(arrays) if row.ndim != 1 or row.dtype.hasobject), None)
    if wrong is not None:
        raise SchemaError(
            f"field {name!r}: row {wrong} has shape {list(arrays[wrong].shape)}, and rows of any length have "
            "one dim",
            hint="give a flat list or array of numbers for each id",
        )
    lengths = np.array([row.size for row in arrays], np.int64)
    filled = [row for row in arrays if row.size] or arrays[:1]
    values = np.concatenate(filled) if all(isinstance(row, np.ndarray) for row in rows) else _join(rows)
    return _Given(values, lengths)


def _is_list(row: Any) -> bool:
    return isinstance(row, Sequence) and not isinstance(row, str)


def _join(rows: Sequence[Any]) -> Any:
    """Return the numbers of lists, one after another: a list, as Python numbers have no width."""
    return [value for row in rows for value in (row.tolist() if isinstance(row, np.ndarray) else row)]


def _fit(entry: Field, given: _Given) -> Part:
    """Convert values to the dtype and shape of a field.

    Raises:
        SchemaError: They do not fit.
    """
    name, lengths, values = key_name(entry.key), given.lengths, given.values
    item = Field(entry.key, item_dtype(entry), ())
    array: Array = np.ascontiguousarray(as_field(item, values), item.numpy_dtype)
    if entry.variable:
        if lengths is None:
            if array.ndim != 2:
                raise SchemaError(
                    f"field {name!r} is {entry}: got rows of shape {list(array.shape[1:])}",
                    hint="give a list with an array of any length for each id",
                )
            lengths = np.full(len(array), array.shape[1], np.int64)
        return Part(entry.key, item.dtype, None, array.reshape(-1), lengths)
    if lengths is not None:
        size = lengths[0] if lengths.size else 0
        wrong = np.flatnonzero(lengths != size)
        if wrong.size:
            raise SchemaError(
                f"field {name!r} is {entry}: row 0 has {size} values, and row {wrong[0]} has "
                f"{lengths[wrong[0]]}",
                hint="give rows of one shape, or use another name for values of any length",
            )
        array = array.reshape(lengths.size, size)
    if array.shape[1:] != entry.shape:
        raise SchemaError(
            f"field {name!r} is {entry}: got rows of shape {list(array.shape[1:])}",
            hint=f"give an array of shape {[len(array), *entry.shape]}",
        )
    return Part(entry.key, item.dtype, entry.shape, array)


def _check_lengths(storage: Storage, entry: Field, ids: IntArray, part: Part) -> None:
    """Raise SchemaError if a row has another number of values than the field that it is like."""
    if not entry.like or part.lengths is None:
        return
    check_present(storage, ids)
    column: Any = storage.read(ids, [storage.require_schema().place_of(entry.like)])[0]
    expected = column.value_lengths().fill_null(0).to_numpy()
    wrong = np.flatnonzero(expected != part.lengths)
    if wrong.size:
        at = int(wrong[0])
        raise SchemaError(
            f"field {key_name(entry.key)!r}: the row with the id {ids[at]} has {part.lengths[at]} values, "
            f"and {expected[at]} {key_name(entry.like)}",
            hint=f"give as many values as the row has {key_name(entry.like)}",
        )
