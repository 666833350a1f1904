"""Convert rows to Arrow tables, including nested names, dtypes and row shapes.

Used by the Parquet and Arrow formats. Fields of one value are columns of that type, fields of several values
are lists of fixed size, variable-length fields have the type they have in stores; nested keys are structs.
The schema's metadata holds, under `expstore` as JSON, what Arrow's types do not express. This module touches
no files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from expstore.core.bfloat16 import widen_bfloat16
from expstore.core.values import Array, Key, key_name
from expstore.errors import SchemaError
from expstore.exchange.variable_rows import file_type, to_file
from expstore.schema.schema import DTYPES, Field

#: The store's own columns, in the order of `ROW_FIELDS`.
OWN: dict[str, Any] = {
    "_id": pa.int64(),
    "_episode": pa.int64(),
    "_step": pa.int64(),
    "_time": pa.timestamp("us", tz="UTC"),
    "_priority": pa.float32(),
}
#: Metadata key under which the fields are described.
ABOUT = b"expstore"
#: Version of this description; files with a newer version are rejected.
FORMAT = 1
#: Arrow types of single values; a complex64 is two of them.
VALUES: dict[str, Any] = {
    name: pa.from_numpy_dtype(dtype) for name, dtype in DTYPES.items() if dtype.kind in "biuf"
} | {"bfloat16": pa.float32(), "complex64": pa.float32()}


def row_values(entry: Field) -> int:
    """Return the number of Arrow values per row."""
    return entry.row_items * (2 if entry.dtype == "complex64" else 1)


def _is_scalar(entry: Field) -> bool:
    return entry.shape in ((), (1,)) and entry.dtype != "complex64"


def arrow_type(entry: Field) -> Any:
    """Return the Arrow type of a field."""
    if entry.variable:
        return file_type(entry)
    kind = VALUES[entry.dtype]
    return kind if _is_scalar(entry) else pa.list_(kind, row_values(entry))


def check_names(fields: Iterable[Field]) -> None:
    """Raise SchemaError if a field has the name of one of the store's own columns."""
    for entry in fields:
        if entry.key[0] in OWN:
            raise SchemaError(
                f"field {key_name(entry.key)!r} has the name of one of the store's own columns",
                hint="choose the fields to export without it",
            )


class _Tree:
    """The nesting of columns: names lead to positions of fields, or to further names."""

    def __init__(self, keys: Sequence[Key]) -> None:
        self.names: dict[str, Any] = {}
        for place, key in enumerate(keys):
            at = self.names
            for part in key[:-1]:
                at = at.setdefault(part, {})
            at[key[-1]] = place


def _nest_fields(names: Mapping[str, Any], fields: Sequence[Field]) -> list[Any]:
    found = []
    for name, below in names.items():
        if isinstance(below, dict):
            found.append(pa.field(name, pa.struct(_nest_fields(below, fields)), nullable=False))
        else:
            entry = fields[below]
            found.append(pa.field(name, arrow_type(entry), nullable=entry.variable))
    return found


def rows_schema(fields: Sequence[Field], about: Mapping[str, Any]) -> Any:
    """Return the Arrow schema of rows: the store's own columns, then the fields.

    Args:
        fields: The fields.
        about: Further facts to store in the metadata; the values must be representable as JSON.
    """
    own = [pa.field(name, kind, nullable=False) for name, kind in OWN.items()]
    kept = [
        {"key": list(f.key), "dtype": f.dtype, "shape": list(f.shape)}
        | ({"arrow": f.arrow} if f.variable else {})
        for f in fields
    ]
    facts = json.dumps({"format": FORMAT, "fields": kept, **about})
    tree = _Tree([entry.key for entry in fields])
    return pa.schema([*own, *_nest_fields(tree.names, fields)], metadata={ABOUT: facts.encode()})


def _to_array(entry: Field, column: Any) -> Any:
    if entry.variable:
        return to_file(entry, column)
    flat = np.ascontiguousarray(column).reshape(-1)
    if entry.dtype == "bfloat16":
        flat = widen_bfloat16(flat)
    elif entry.dtype == "complex64":
        flat = flat.view(np.float32)
    values = pa.array(flat)
    return values if _is_scalar(entry) else pa.FixedSizeListArray.from_arrays(values, row_values(entry))


def _nest_arrays(names: Mapping[str, Any], arrays: Sequence[Any], kinds: Sequence[Any]) -> list[Any]:
    found = []
    for below, kind in zip(names.values(), kinds, strict=True):
        if isinstance(below, dict):
            parts = _nest_arrays(below, arrays, list(kind.type))
            found.append(pa.StructArray.from_arrays(parts, fields=list(kind.type)))
        else:
            found.append(arrays[below].cast(kind.type) if arrays[below].type != kind.type else arrays[below])
    return found


def to_batch(schema: Any, fields: Sequence[Field], columns: Sequence[Array]) -> Any:
    """Return rows as a record batch.

    Args:
        schema: The result of `rows_schema`.
        fields: The fields.
        columns: The values of the fields, then of the store's own columns. Shapes `(n, *row shape)`.
    """
    count = len(fields)
    own = []
    for kind, values in zip(OWN.values(), columns[count:], strict=True):
        array = pa.array(np.ascontiguousarray(values).reshape(-1))
        own.append(array.cast(kind) if array.type != kind else array)
    arrays = [_to_array(entry, column) for entry, column in zip(fields, columns[:count], strict=True)]
    tree = _Tree([entry.key for entry in fields])
    nested = _nest_arrays(tree.names, arrays, list(schema)[len(OWN) :])
    return pa.RecordBatch.from_arrays([*own, *nested], schema=schema)
