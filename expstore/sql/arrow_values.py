"""Convert variable-length fields to types that DuckDB supports.

Used by `expstore.sql.views`. DuckDB does not support 16-bit floats, or decimals of more than 38 digits:
these become 32-bit floats and text, at any depth of nested values. Other columns are not copied.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from expstore.core.values import IntArray
from expstore.schema.arrow_types import ragged_of, to_type
from expstore.schema.schema import Field
from expstore.storages.read_view import ReadView


class SqlValues:
    """Convert columns of one type to a type that DuckDB supports.

    Args:
        text: The text of the Arrow type, as in `Field.arrow`.

    Example:
        >>> from expstore.schema.arrow_types import ragged_text
        >>> from expstore.sql.arrow_values import SqlValues
        >>> SqlValues(ragged_text("float16", (None,))).kind
        ListType(list<item: float>)
    """

    def __init__(self, text: str) -> None:
        found = ragged_of(text)
        self._bits = found is not None and found.dtype == "bfloat16"
        self._raw = to_type(text)
        #: The type of the converted column.
        self.kind: pa.DataType = _sql_type(self._raw, bits=self._bits)

    def of(self, column: pa.Array) -> pa.Array:
        """Return a column converted to `kind`: itself if it has this type, otherwise a copy."""
        return column if self.kind.equals(self._raw) else _map(column, self.kind)


def nullable_text(entry: Field) -> str:
    """Return the text of the Arrow type of an annotated field in SQL, where rows without a value are NULL."""
    if entry.variable:
        return entry.arrow
    kind: Any = entry.dtype
    for size in reversed(() if entry.shape == (1,) else entry.shape):
        kind = {"fixed": [kind, size]}
    return json.dumps(kind)


def find_present(storage: ReadView, entry: Field, ids: IntArray) -> NDArray[np.bool_]:
    """Return which rows have a value of an annotated field. Shapes `(n,)`."""
    annotations = storage.state.annotations
    if annotations is None:
        return np.zeros(ids.size, bool)
    return annotations.find(entry.key, storage.geometry.slot_of(ids))[0] > 0


def to_nullable(entry: Field, values: Any, present: Any) -> pa.Array:
    """Return values of an annotated field with NULL for rows without a value.

    Args:
        entry: The field.
        values: As storages return them. Shape `(n, *row shape)`.
        present: Which rows have a value. Shape `(n,)`, bool.
    """
    if entry.variable:
        return values
    kind = to_type(nullable_text(entry))
    array = pa.array(values.reshape(-1), entry.dtype)
    if not pa.types.is_fixed_size_list(kind):
        return pa.array(array.to_numpy(zero_copy_only=False), kind, mask=~present)
    for size in reversed(entry.shape[1:]):
        array = pa.FixedSizeListArray.from_arrays(array, size)
    return pa.FixedSizeListArray.from_arrays(array, entry.shape[0], mask=pa.array(~present))


def _sql_type(kind: pa.DataType, *, bits: bool) -> pa.DataType:
    if pa.types.is_float16(kind) or (bits and kind == pa.uint16()):
        return pa.float32()
    if pa.types.is_decimal256(kind):
        return pa.string()
    if pa.types.is_struct(kind):
        return pa.struct([(part.name, _sql_type(part.type, bits=bits)) for part in kind])
    if pa.types.is_map(kind):
        return pa.map_(_sql_type(kind.key_type, bits=bits), _sql_type(kind.item_type, bits=bits))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_sql_type(kind.value_type, bits=bits), kind.list_size)
    if pa.types.is_list(kind):
        return pa.list_(_sql_type(kind.value_type, bits=bits))
    return pa.large_list(_sql_type(kind.value_type, bits=bits)) if pa.types.is_large_list(kind) else kind


def _map(column: Any, kind: pa.DataType) -> Any:
    """Convert a column to a type. Done here because Arrow cannot cast bits of bfloat16."""
    if column.type.equals(kind):
        return column
    nulls = column.is_null() if column.null_count else None
    if pa.types.is_struct(kind):
        parts = [_map(part, of.type) for part, of in zip(column.flatten(), kind, strict=True)]
        return pa.StructArray.from_arrays(parts, [part.name for part in kind], mask=nulls)
    if pa.types.is_list(kind):
        starts = column.offsets.to_numpy()
        missing = None if nulls is None else np.append(nulls.to_numpy(zero_copy_only=False), False)
        offsets = pa.array(
            starts, mask=missing
        )  # Arrow cannot combine a mask with the offsets of a sliced array
        return pa.ListArray.from_arrays(offsets, _map(column.values, kind.value_type))
    if pa.types.is_fixed_size_list(kind):
        size = kind.list_size
        values = column.values.slice(column.offset * size, len(column) * size)
        return pa.FixedSizeListArray.from_arrays(_map(values, kind.value_type), size, mask=nulls)
    if column.type != pa.uint16():
        return column.cast(kind)
    bits = column.fill_null(0).to_numpy().astype("<u4") << np.uint32(16)
    return pa.array(bits.view("<f4"))
