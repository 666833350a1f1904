"""Values of annotated fields as Arrow streams: a column `id`, and a column for each field.

Used by workers, clients and the server for `rb.annotate`. Values of any length are lists. Options are in the
metadata of the schema, as for rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from expstore.core.values import Array, IntArray, Key, key_name
from expstore.errors import SchemaError
from expstore.wire.codec import to_plain_array, wishes_of, with_wishes
from expstore.wire.stream import read_batches, read_table, write_stream


class FieldValues(NamedTuple):
    """The values of one field.

    Args:
        key: The field.
        values: Of a fixed size: shape `(n, ...)`. Of any length: the values of all rows, one after another.
        lengths: The length of each row; None: of a fixed size. Shape `(n,)`.
        is_loose: Whether they were Python numbers, which have no width.
    """

    key: Key
    values: Array
    lengths: IntArray | None
    is_loose: bool


class Annotations(NamedTuple):
    """The arguments of `rb.annotate`."""

    ids: IntArray
    values: dict[Key, Any]
    by: str | None
    like: Key | None


def write_annotations(
    ids: IntArray, fields: Sequence[FieldValues], by: str | None, like: Key | None
) -> bytes:
    """Return ids, and values of fields for each, as a stream."""
    columns = {"id": to_plain_array(np.ascontiguousarray(ids))} | {
        key_name(field.key): _to_arrow(field) for field in fields
    }
    loose = [key_name(field.key) for field in fields if field.is_loose]
    told = {"by": by, "like": None if like is None else key_name(like), "loose": loose}
    body: bytes = write_stream(with_wishes(pa.RecordBatch.from_pydict(columns), told)).to_pybytes()
    return body


def _to_arrow(field: FieldValues) -> Any:
    array = np.ascontiguousarray(field.values, field.values.dtype.newbyteorder("="))
    if field.lengths is not None:
        kind = pa.ListArray if array.size < 1 << 31 else pa.LargeListArray
        return kind.from_arrays(np.append(0, np.cumsum(field.lengths)), array)
    return to_plain_array(array) if array.ndim == 1 else pa.FixedShapeTensorArray.from_numpy_ndarray(array)


def read_annotations(body: Any, *, rows: int | None = None) -> Annotations:
    """Return what a stream holds.

    Args:
        body: The bytes.
        rows: The highest number of ids that is accepted, from anywhere; None: the stream is trusted.

    Raises:
        SchemaError: It holds no annotations, or too many.
    """
    if rows is None:
        table = read_table(body)
    else:
        schema, batches = read_batches(body, lambda _: None, rows=rows)
        table = pa.Table.from_batches(batches, schema)
    told, names = wishes_of(table.schema), table.column_names
    by, like, loose = told.get("by"), told.get("like"), told.get("loose", [])
    texts = all(isinstance(text, str | None) for text in (by, like)) and isinstance(loose, list)
    if not texts or "id" not in names or len(set(names)) != len(names):
        raise SchemaError(
            "the columns are no annotations",
            hint="send a column id, one for each field, and by and like as text",
        )
    values: dict[Key, Any] = {}
    for name, column in zip(names, table.columns, strict=True):
        array = column.combine_chunks()
        if array.null_count:
            raise SchemaError(f"column {name!r} has nulls", hint="leave out the ids of these rows")
        if name in loose:
            array = array.to_pylist()
        elif isinstance(array, pa.FixedShapeTensorArray):
            array = array.to_numpy_ndarray().copy()
        values[tuple(name.split("."))] = array
    ids = values.pop(("id",))
    if "id" in loose or not pa.types.is_int64(ids.type):
        raise SchemaError("the column 'id' does not hold ids", hint="send int64")
    return Annotations(ids.to_numpy(), values, by, None if like is None else tuple(like.split(".")))
