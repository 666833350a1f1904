"""Convert variable-length columns between stores and Arrow tables: text, lists, structs and tensors.

Used by the Parquet and Arrow formats. Files contain the same types as stores, except that bfloat16 becomes
float32. This module handles single columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa

from expstore.core.bfloat16 import narrow_to_bfloat16, widen_bfloat16
from expstore.core.values import Key, key_name
from expstore.errors import SchemaError
from expstore.schema.arrow_types import Ragged, ragged_of, ragged_type, to_type, type_text
from expstore.schema.casting import fit_arrow, fits
from expstore.schema.schema import Field


def file_type(entry: Field) -> Any:
    """Return the Arrow type that a variable-length field has in files."""
    found = ragged_of(entry.arrow)
    if found is not None and found.dtype == "bfloat16":
        return ragged_type(Ragged("float32", found.shape))
    return to_type(entry.arrow)


def to_file(entry: Field, column: Any) -> Any:
    """Convert a column of a store to its type in files."""
    kind = file_type(entry)
    return column if kind == to_type(entry.arrow) else _with_values(column, kind, _widen)


def from_file(entry: Field, array: Any) -> Any:
    """Convert a column of a file, possibly written by another program, to the type of its field.

    Raises:
        SchemaError: The column does not match the field.
    """
    array, kind = plain_array(array), file_type(entry)
    if kind != to_type(entry.arrow):
        try:
            array = _with_values(array.cast(kind), to_type(entry.arrow), _narrow)
        except (pa.ArrowException, ValueError) as exc:
            raise SchemaError(
                f"column {key_name(entry.key)!r} is {array.type}, which is not {entry}"
            ) from exc
    return fit_arrow(entry.key, entry.arrow, array)


def suits(entry: Field, kind: Any) -> bool:
    """Return whether a column of this type can be read as this variable-length field."""
    return fits(plain_type(kind), file_type(entry))


def text_of(key: Key, kind: Any) -> str:
    """Return the type of the field that a foreign Arrow column becomes, as text.

    Raises:
        SchemaError: No field can have the column's type.
    """
    try:
        return type_text(plain_type(kind))
    except SchemaError as exc:
        raise SchemaError(
            f"column {key_name(key)!r} is of type {kind}, which a field cannot have",
            hint="leave the column out, or convert it to text, numbers, lists or structs of these",
        ) from exc


def plain_array(array: Any) -> Any:
    """Convert a column to the type that `plain_type` returns."""
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    kind = plain_type(array.type)
    if pa.types.is_dictionary(array.type):  # dictionaries of string views cannot be cast as they are
        array = array.dictionary.cast(kind).take(array.indices)
    return array if array.type == kind else array.cast(kind)


def plain_type(kind: Any) -> Any:
    """Return the equivalent type that a field can have, without extension types, dictionaries and views.

    >>> import pyarrow as pa
    >>> from expstore.exchange.variable_rows import plain_type
    >>> str(plain_type(pa.list_(pa.dictionary(pa.int8(), pa.string_view()))))
    'list<item: string>'
    """
    is_a = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return plain_type(kind.storage_type)
    if is_a.is_dictionary(kind) or is_a.is_run_end_encoded(kind):
        return plain_type(kind.value_type)
    if is_a.is_string_view(kind):
        return pa.string()
    if is_a.is_binary_view(kind):
        return pa.binary()
    if is_a.is_fixed_size_list(kind):
        return pa.list_(plain_type(kind.value_type), kind.list_size)
    if is_a.is_list(kind) or is_a.is_list_view(kind):
        return pa.list_(plain_type(kind.value_type))
    if is_a.is_large_list(kind) or is_a.is_large_list_view(kind):
        return pa.large_list(plain_type(kind.value_type))
    if is_a.is_map(kind):
        return pa.map_(plain_type(kind.key_type), plain_type(kind.item_type))
    if is_a.is_struct(kind):
        return pa.struct([(part.name, plain_type(part.type)) for part in kind])
    return kind


def _with_values(array: Any, kind: Any, change: Callable[[Any], Any]) -> Any:
    """Return tensors with converted values.

    Args:
        array: Lists, or structs of `data` and `shape`; None where a row has no tensor.
        kind: The type of the result.
        change: Converts the values; it must not change their number.
    """
    is_a = pa.types
    if is_a.is_struct(kind):
        parts = [_with_values(array.field("data"), kind.field("data").type, change), array.field("shape")]
        mask = array.is_null() if array.null_count else None
        return pa.StructArray.from_arrays(parts, fields=list(kind), mask=mask)
    if is_a.is_list(kind) or is_a.is_fixed_size_list(kind):
        inner = _with_values(array.values, kind.value_type, change)
        own = array.buffers()[: 2 if is_a.is_list(kind) else 1]
        return pa.Array.from_buffers(kind, len(array), own, array.null_count, array.offset, children=[inner])
    return change(array)


def _widen(bits: Any) -> Any:
    return pa.array(widen_bfloat16(bits.to_numpy()))


def _narrow(values: Any) -> Any:
    if values.null_count:
        raise ValueError("a tensor has a missing value")
    return pa.array(narrow_to_bfloat16(values.to_numpy()))
