"""Rows as Arrow tables, and Arrow tables as rows: nested names, dtypes and row shapes included.

Used by the Parquet and Arrow formats. Fields of one value are columns of that type, others lists of fixed
size; nested keys are structs. What Arrow's types do not say stands in the schema's metadata, under
`expstore`, as JSON. It touches no files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from expstore.errors import SchemaError
from expstore.schema import DTYPES, Field, Schema
from expstore.types import Array, Key, key_name

__all__ = ["OWN", "Layout", "Table", "check_names", "read_layout", "rows_schema", "to_batch"]

#: The store's own columns, in the order of `ROW_FIELDS`.
OWN: dict[str, Any] = {
    "_id": pa.int64(),
    "_episode": pa.int64(),
    "_step": pa.int64(),
    "_time": pa.timestamp("us", tz="UTC"),
    "_priority": pa.float32(),
}
_ABOUT = b"expstore"
_FORMAT = 1
#: Arrow's type of one value; two of them make a complex64.
_ARROW: dict[str, Any] = {
    name: pa.from_numpy_dtype(dtype) for name, dtype in DTYPES.items() if dtype.kind in "biuf"
} | {"bfloat16": pa.float32(), "complex64": pa.float32()}
_NAMES = {kind: name for name, kind in _ARROW.items() if name not in ("bfloat16", "complex64")}


def _items(entry: Field) -> int:
    """Return how many of Arrow's values a row has."""
    return entry.row_items * (2 if entry.dtype == "complex64" else 1)


def _is_scalar(entry: Field) -> bool:
    return entry.shape in ((), (1,)) and entry.dtype != "complex64"


def arrow_type(entry: Field) -> Any:
    """Return Arrow's type of a field."""
    kind = _ARROW[entry.dtype]
    return kind if _is_scalar(entry) else pa.list_(kind, _items(entry))


def check_names(fields: Iterable[Field]) -> None:
    """Raise SchemaError if a field would bear the name of one of the store's own columns."""
    for entry in fields:
        if entry.key[0] in OWN:
            raise SchemaError(
                f"field {key_name(entry.key)!r} has the name of one of the store's own columns",
                hint="name the other fields",
            )


class _Tree:
    """Hold how columns hang below one another: names lead to places of fields, or to more of them."""

    def __init__(self, keys: Sequence[Key]) -> None:
        self.names: dict[str, Any] = {}
        for place, key in enumerate(keys):
            at = self.names
            for part in key[:-1]:
                at = at.setdefault(part, {})
            at[key[-1]] = place


def _nested_fields(names: Mapping[str, Any], fields: Sequence[Field]) -> list[Any]:
    found = []
    for name, below in names.items():
        if isinstance(below, dict):
            found.append(pa.field(name, pa.struct(_nested_fields(below, fields)), nullable=False))
        else:
            found.append(pa.field(name, arrow_type(fields[below]), nullable=False))
    return found


def rows_schema(fields: Sequence[Field], about: Mapping[str, Any]) -> Any:
    """Return the Arrow schema of rows: the store's own columns, then the fields.

    Args:
        fields: The fields.
        about: More facts to be kept with it; what JSON can keep.
    """
    own = [pa.field(name, kind, nullable=False) for name, kind in OWN.items()]
    kept = [{"key": list(f.key), "dtype": f.dtype, "shape": list(f.shape)} for f in fields]
    facts = json.dumps({"format": _FORMAT, "fields": kept, **about})
    tree = _Tree([entry.key for entry in fields])
    return pa.schema([*own, *_nested_fields(tree.names, fields)], metadata={_ABOUT: facts.encode()})


def _to_array(entry: Field, column: Array) -> Any:
    flat = np.ascontiguousarray(column).reshape(-1)
    if entry.dtype == "bfloat16":
        flat = (flat.astype(np.uint32) << np.uint32(16)).view(np.float32)
    elif entry.dtype == "complex64":
        flat = flat.view(np.float32)
    values = pa.array(flat)
    return values if _is_scalar(entry) else pa.FixedSizeListArray.from_arrays(values, _items(entry))


def _nested_array(names: Mapping[str, Any], arrays: Sequence[Any], kinds: Sequence[Any]) -> list[Any]:
    found = []
    for below, kind in zip(names.values(), kinds, strict=True):
        if isinstance(below, dict):
            parts = _nested_array(below, arrays, list(kind.type))
            found.append(pa.StructArray.from_arrays(parts, fields=list(kind.type)))
        else:
            found.append(arrays[below].cast(kind.type) if arrays[below].type != kind.type else arrays[below])
    return found


def to_batch(schema: Any, fields: Sequence[Field], columns: Sequence[Array]) -> Any:
    """Return rows as a record batch.

    Args:
        schema: As `rows_schema` has made it.
        fields: The fields.
        columns: Their values, then those of the store's own columns. Shapes `(n, *row shape)`.
    """
    count = len(fields)
    own = []
    for kind, values in zip(OWN.values(), columns[count:], strict=True):
        array = pa.array(np.ascontiguousarray(values).reshape(-1))
        own.append(array.cast(kind) if array.type != kind else array)
    arrays = [_to_array(entry, column) for entry, column in zip(fields, columns[:count], strict=True)]
    tree = _Tree([entry.key for entry in fields])
    nested = _nested_array(tree.names, arrays, list(schema)[len(OWN) :])
    return pa.RecordBatch.from_arrays([*own, *nested], schema=schema)


# -- reading --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """Say how rows lie in an Arrow schema.

    Args:
        schema: The fields.
        own: Which of the store's own columns are there.
        about: What stands in the metadata; {}: nothing of ours.
        lists: Fields whose lists have no fixed size: those of the first rows make it.
    """

    schema: Schema
    own: tuple[str, ...]
    about: Mapping[str, Any]
    lists: tuple[Key, ...] = ()


def read_layout(schema: Any, first: Any = None) -> Layout:
    """Find out which fields are in an Arrow schema.

    Args:
        schema: The schema.
        first: The first rows, where there are any: a record batch.

    Raises:
        SchemaError: There are none, or a column is of a type that no field has.
    """
    about = _about(schema)
    known = {tuple(f["key"]): f for f in about.get("fields", ())}
    fields, lists = [], []
    for key, kind, column in _leaves(schema, first):
        if key[0] in OWN and len(key) == 1:
            continue
        fields.append(_field(key, kind, known.get(key), column))
        if not pa.types.is_fixed_size_list(kind) and _is_list(kind):
            lists.append(key)
    if not fields:
        raise SchemaError("there are no columns that can be fields", hint="numbers and lists of them can")
    own = tuple(name for name in OWN if name in schema.names)
    form = about.get("form", "") if len(known) == len(fields) else ""
    return Layout(Schema(fields, form), own, about, tuple(lists))


def _about(schema: Any) -> dict[str, Any]:
    text = (schema.metadata or {}).get(_ABOUT)
    if text is None:
        return {}
    try:
        found = json.loads(text)
        if int(found["format"]) > _FORMAT:
            raise SchemaError(
                f"the rows are in format {found['format']}, this version reads format {_FORMAT}",
                hint="import them with a newer expstore",
            )
        for entry in found["fields"]:
            Field(tuple(map(str, entry["key"])), str(entry["dtype"]), tuple(map(int, entry["shape"])))
    except (ValueError, KeyError, TypeError) as exc:
        if isinstance(exc, SchemaError):
            raise
        raise SchemaError(f"what the metadata says of the fields cannot be read: {exc}") from exc
    return dict(found)


def _leaves(schema: Any, first: Any) -> Iterator[tuple[Key, Any, Any]]:
    """Yield key, type and first rows of every column that is no struct."""

    def below(key: Key, kind: Any, column: Any) -> Iterator[tuple[Key, Any, Any]]:
        if pa.types.is_struct(kind):
            if column is not None and column.null_count:
                raise _missing(key)
            for part in kind:
                inside = None if column is None else column.field(part.name)
                yield from below((*key, part.name), part.type, inside)
        else:
            yield key, kind, column

    for place, entry in enumerate(schema):
        yield from below((entry.name,), entry.type, None if first is None else first.column(place))


def _is_list(kind: Any) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _field(key: Key, kind: Any, known: Mapping[str, Any] | None, column: Any) -> Field:
    """Return the field that a column is, by what the metadata says of it or else by its type."""
    if known is not None:
        entry = Field(key, str(known["dtype"]), tuple(map(int, known["shape"])))
        if entry.dtype in _ARROW and _plain(kind) == arrow_type(entry):
            return entry
    shape: list[int] = []
    if isinstance(kind, pa.BaseExtensionType):
        column = None  # its lists have a fixed size
    kind = _plain(kind)
    while _is_list(kind):
        shape.append(kind.list_size if pa.types.is_fixed_size_list(kind) else _length(key, column))
        kind = _plain(kind.value_type)
        column = None if column is None else column.flatten()
    if kind not in _NAMES:
        raise SchemaError(
            f"column {key_name(key)!r} is of type {kind}, which no field has",
            hint="fields hold booleans and numbers; leave the column out, or turn it into numbers",
        )
    return Field(key, _NAMES[kind], tuple(shape))


def _plain(kind: Any) -> Any:
    """Return the type below names: of extensions what they are made of, of dictionaries their values."""
    if isinstance(kind, pa.BaseExtensionType):
        shape = getattr(kind, "shape", None)
        plain = kind.storage_type
        if shape is not None and len(shape) > 1:  # a fixed_shape_tensor: nested lists say the same
            plain = kind.value_type
            for size in reversed(shape):
                plain = pa.list_(plain, size)
        return plain
    if pa.types.is_dictionary(kind):
        return kind.value_type
    if pa.types.is_fixed_size_list(kind):  # others call the items otherwise
        return pa.list_(kind.value_type, kind.list_size)
    return kind


def _length(key: Key, column: Any) -> int:
    if column is None or not len(column):
        raise SchemaError(
            f"column {key_name(key)!r} has lists of any length, and there are no rows to tell it by",
            hint="write it as lists of a fixed size",
        )
    return int(column.value_lengths()[0].as_py() or 0)


class Table:
    """Take record batches apart into columns, which are copies or views of them.

    Args:
        layout: How rows lie in them.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def columns(self, batch: Any) -> list[Array]:
        """Return one array per field. Shapes `(n, *row shape)`.

        Raises:
            SchemaError: A value is missing, or lists are not all of one length.
        """
        found = {key: column for key, _, column in _leaves(batch.schema, batch)}
        missing = [entry.key for entry in self._layout.schema.fields if entry.key not in found]
        if missing:
            raise SchemaError(f"column {key_name(missing[0])!r} is missing in some of the files")
        return [_to_column(entry, found[entry.key], batch.num_rows) for entry in self._layout.schema.fields]

    def own(self, batch: Any, names: Sequence[str] | None = None) -> dict[str, Array]:
        """Return those of the store's own columns that are there, or some of them. Shapes `(n,)`."""
        found = {}
        for name in self._layout.own if names is None else names:
            column = batch.column(batch.schema.get_field_index(name))
            try:
                wanted = column.cast(OWN[name])
                wanted = wanted.cast(pa.int64()) if name == "_time" else wanted
            except pa.ArrowException as exc:
                raise SchemaError(f"column {name!r} is of type {column.type}, not {OWN[name]}") from exc
            found[name] = _to_numpy((name,), wanted)
        return found


def _to_column(entry: Field, array: Any, rows: int) -> Array:
    depth = 0
    while True:
        if isinstance(array, pa.ExtensionArray):
            array = array.storage
        elif pa.types.is_dictionary(array.type):
            array = array.dictionary_decode()
        elif _is_list(array.type):
            if array.null_count:
                raise _missing(entry.key)
            if not pa.types.is_fixed_size_list(array.type):
                _check_lengths(entry, array, depth)
            array, depth = array.flatten(), depth + 1
        else:
            break
    values = _to_numpy(entry.key, array)
    wanted = _ARROW[entry.dtype].to_pandas_dtype()
    if values.dtype != wanted:
        raise SchemaError(
            f"column {key_name(entry.key)!r} is {values.dtype} in some rows, and {entry} in others"
        )
    if values.size != rows * _items(entry):
        raise SchemaError(f"column {key_name(entry.key)!r} has rows that are not {entry}")
    if entry.dtype == "bfloat16":
        values = (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    elif entry.dtype == "complex64":
        values = values.view(np.complex64)
    return np.ascontiguousarray(values, entry.numpy_dtype).reshape(rows, *entry.shape)


def _check_lengths(entry: Field, array: Any, depth: int) -> None:
    lengths = array.value_lengths().to_numpy(zero_copy_only=False)
    wanted = entry.shape[depth] if depth < len(entry.shape) else -1
    if (lengths != wanted).any():
        raise SchemaError(
            f"column {key_name(entry.key)!r} has lists of {int(lengths[lengths != wanted][0])} items, and of "
            f"{wanted} in the first row",
            hint="pad them to one length",
        )


def _to_numpy(key: Key, array: Any) -> Array:
    if array.null_count:
        raise _missing(key)
    values: Array = array.to_numpy(zero_copy_only=False)
    return values


def _missing(key: Key) -> SchemaError:
    return SchemaError(
        f"column {key_name(key)!r} has rows without a value", hint="fill them in, or leave it out"
    )
