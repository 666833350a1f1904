"""Rows as Arrow tables, with nested names, dtypes and row shapes; exports to Arrow IPC and Parquet files.

Used by `expstore export`, by programs, by those that read a store in parallel, each a range of its episodes,
and by imports of these formats. Fields of one value are columns of that type, fields of several values are
lists of fixed size, variable-length fields have the type they have in stores, except that bfloat16 becomes
float32; nested keys are structs. The schema's metadata holds, under `expstore` as JSON, what Arrow's types do
not express. An export is a folder: rows ordered by id, and episodes. One record batch or row group is in
memory at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from expstore.core import tuning
from expstore.core.bfloat16 import narrow_to_bfloat16, widen_bfloat16
from expstore.core.values import Array, Key, key_name
from expstore.disk.files import Disk
from expstore.errors import SchemaError
from expstore.exchange.base import (
    DiskFile,
    Exported,
    Progress,
    no_progress,
    piece_rows,
)
from expstore.exchange.rows import Episodes, Exchanged, Rows, Tally, open_export, open_source, read_pieces
from expstore.schema.arrow_types import Ragged, ragged_of, ragged_type, to_type, type_text
from expstore.schema.casting import fit_arrow, fits
from expstore.schema.schema import DTYPES, Field
from expstore.sql.sync import Catalog

# -- variable-length columns --------------------------------------------------------------------------


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
    >>> from expstore.exchange.tables import plain_type
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


# -- tables -------------------------------------------------------------------------------------------

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
        about: The facts about them; see `Rows.about`.
    """
    own = [pa.field(name, kind, nullable=False) for name, kind in OWN.items()]
    tree = _Tree([entry.key for entry in fields])
    return pa.schema([*own, *_nest_fields(tree.names, fields)], metadata={ABOUT: json.dumps(about).encode()})


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


# -- tables without a file ----------------------------------------------------------------------------


def find_episode_ranges(source: Exchanged, rows: int) -> list[tuple[int, int]]:
    """Split the episodes of a store into ranges of about this many rows.

    Args:
        source: A buffer, or the path of a store or a snapshot.
        rows: Number of rows of a range. A longer episode is a range of its own.

    Returns:
        The first and the last episode of each range, ascending; empty if there are no rows.
    """
    with open_source(source) as storage:
        return Rows.choose(storage).episode_ranges(rows) if storage.schema is not None else []


def read_table(
    source: Exchanged,
    episodes: tuple[int, int],
    *,
    where: str | None = None,
    fields: Sequence[str] | None = None,
) -> pa.Table:
    """Return the rows of a range of episodes, ordered by id, with the columns of `export_arrow`.

    Args:
        source: A buffer, or the path of a store or a snapshot.
        episodes: The first and the last episode.
        where: SQL condition over the relation `transitions`; None: all rows.
        fields: Names of the fields to read; None: all.

    Raises:
        QueryError: `where` is not a valid condition.
        SchemaError: A field does not exist, holds objects, or has the name of one of the store's own columns.
        StateError: The store has no fields yet.
    """
    with open_source(source) as storage:
        rows = Rows.choose(storage, fields=fields)
        rows.refuse_objects("Arrow", any_length=True)
        check_names(rows.user_fields)
        ids = rows.of_episodes(*episodes)
        if where is not None:
            catalog = storage.index.catalog
            assert isinstance(catalog, Catalog), "open_source keeps one"
            query = f"SELECT _id FROM transitions WHERE _episode BETWEEN $first AND $last AND ({where}\n)"
            found = catalog.query(query, {"first": episodes[0], "last": episodes[1]}).arrow()
            ids = np.intersect1d(ids, found.column(0).to_numpy())
        size = piece_rows(rows.row_bytes)
        schema = rows_schema(rows.user_fields, rows.about())
        pieces = read_pieces(rows, (ids[start : start + size] for start in range(0, ids.size, size)))
        batches = [to_batch(schema, rows.user_fields, piece.columns) for piece in pieces if piece.ids.size]
        return pa.Table.from_batches(batches, schema)


# -- Arrow files --------------------------------------------------------------------------------------


def export_arrow(
    source: Exchanged,
    target: str | Path,
    *,
    fields: Sequence[str] | None = None,
    episodes: Episodes = None,
    version: int | str | None = None,
    progress: Progress = no_progress,
    disk: Disk | None = None,
) -> Exported:
    """Write the readable rows to an Arrow IPC file, with the columns of `export_parquet`.

    The file is not compressed, so programs can map it into memory and read the rows without a copy.

    Args:
        source: A buffer, or the path of a store, a snapshot or a folder of snapshots.
        target: Folder to create; it must not exist yet.
        fields: Names of the fields to export; None: all.
        episodes: Export only these episodes: ids, or an SQL condition over the relation `episodes`.
        version: Number or tag of a snapshot, if `source` is a path.
        progress: Called with the bytes done and the bytes in total.
        disk: Access to the file system.

    Raises:
        StateError: The target exists, or would be inside a store; or the store has no fields yet.
        NotFoundError: The target's parent folder does not exist; or no rows of these episodes are left.
        SchemaError: A field does not exist, holds objects, or has the name of one of the store's own columns.
        LockedError: Another export writes to this target.
        StorageError: The disk failed or is full; nothing of the export is left.

    Example:
        >>> import polars
        >>> from expstore.exchange import export_arrow
        >>> done = export_arrow(rb, "rows.arrow")
        >>> polars.read_ipc("rows.arrow/rows.arrow", columns=["_step", "next"])
    """
    with open_export(
        "arrow", source, target, fields=fields, episodes=episodes, version=version, disk=disk, any_length=True
    ) as export:
        check_names(export.rows.user_fields)
        with export.build_target() as temporary:
            written = _write_arrow(export.disk, temporary / "rows.arrow", export.rows, progress)
            facts = export.rows.facts
            with DiskFile(export.disk, temporary / "episodes.arrow", write=True) as file:
                with pa.ipc.new_file(file, facts.schema) as out:
                    out.write_table(facts)
    return export.summarize(written)


def _write_arrow(disk: Disk, path: Path, rows: Rows, progress: Progress) -> int:
    """Write all rows and return their number."""
    fields = rows.user_fields
    schema = rows_schema(fields, rows.about())
    tally = Tally(rows, progress)
    with DiskFile(disk, path, write=True) as file, pa.ipc.new_file(file, schema) as out:
        for piece in read_pieces(rows, rows.by_id(piece_rows(rows.row_bytes))):
            if piece.ids.size:
                out.write_batch(to_batch(schema, fields, piece.columns))
            tally.add(piece)
    return tally.written


# -- Parquet files ------------------------------------------------------------------------------------

#: Approximate size of a file's rows in bytes, before compression.
FILE_BYTES = 1 << 30
#: Memory factor while a row group is encoded: small numbers take 32 bits each, and list levels come on top.
_EXPANSION = 4


def export_parquet(
    source: Exchanged,
    target: str | Path,
    *,
    fields: Sequence[str] | None = None,
    episodes: Episodes = None,
    version: int | str | None = None,
    progress: Progress = no_progress,
    disk: Disk | None = None,
) -> Exported:
    """Write the readable rows to Parquet files.

    Every field is a column; nested fields are in structs (`next.reward`). A field of one value is a number, a
    field of several values a flat list of fixed size. Variable-length text, lists and structs keep their
    type; so do tensors, with `data` and `shape` if more than the first dim varies. bfloat16 is written as
    float32, complex64 as pairs of float32, both exactly. The first columns are `_id`, `_episode`, `_step`,
    `_time` and `_priority`. `import_parquet` restores the same fields. The folder is complete, or does not
    exist.

    Args:
        source: A buffer, or the path of a store, a snapshot or a folder of snapshots.
        target: Folder to create; it must not exist yet.
        fields: Names of the fields to export; None: all.
        episodes: Export only these episodes: ids, or an SQL condition over the relation `episodes`.
        version: Number or tag of a snapshot, if `source` is a path.
        progress: Called with the bytes done and the bytes in total.
        disk: Access to the file system.

    Raises:
        StateError: The target exists, or would be inside a store; or the store has no fields yet.
        NotFoundError: The target's parent folder does not exist; or no rows of these episodes are left.
        SchemaError: A field does not exist, holds objects, or has the name of one of the store's own columns.
        LockedError: Another export writes to this target.
        StorageError: The disk failed or is full; nothing of the export is left.

    Example:
        >>> import polars
        >>> from expstore.exchange import export_parquet
        >>> done = export_parquet(rb, "rows.parquet", episodes="status = 'terminated'")
        >>> polars.scan_parquet("rows.parquet/rows").select("_step", "action").collect()
    """
    with open_export(
        "parquet",
        source,
        target,
        fields=fields,
        episodes=episodes,
        version=version,
        disk=disk,
        any_length=True,
    ) as export:
        check_names(export.rows.user_fields)
        _check_types(export.rows.user_fields)
        with export.build_target() as temporary:
            export.disk.make_dir(temporary / "rows")
            written = _write_parquet(export.disk, temporary / "rows", export.rows, progress)
            with DiskFile(export.disk, temporary / "episodes.parquet", write=True) as file:
                pq.write_table(export.rows.facts, file, compression="zstd")
    return export.summarize(written)


def _write_parquet(disk: Disk, folder: Path, rows: Rows, progress: Progress) -> int:
    """Write all rows, file by file, and return their number."""
    fields = rows.user_fields
    schema = rows_schema(fields, rows.about())
    tally = Tally(rows, progress)
    size = piece_rows(_EXPANSION * rows.row_bytes)
    ranges = rows.episode_ranges(min(tuning.PARQUET_FILE_ROWS, max(1, FILE_BYTES // tally.row_bytes)))
    for number, (first, last) in enumerate(ranges or [(0, 0)]):  # a file without rows still has the schema
        ids = rows.of_episodes(first, last)
        with DiskFile(disk, folder / f"{number:05}.parquet", write=True) as file:
            with pq.ParquetWriter(
                file, schema, compression="zstd", use_dictionary=_repetitive(schema)
            ) as out:
                wanted = (ids[start : start + size] for start in range(0, ids.size, size))
                for piece in read_pieces(rows, wanted, tuning.EXCHANGE_BYTES // _EXPANSION):
                    if piece.ids.size:
                        out.write_batch(
                            to_batch(schema, fields, piece.columns), row_group_size=piece.ids.size
                        )
                    tally.add(piece)
    return tally.written


def _check_types(fields: Sequence[Field]) -> None:
    """Raise SchemaError if Parquet cannot store a field's type: Arrow has more types."""
    for entry in fields:
        if entry.variable:
            try:
                schema = pa.schema([pa.field("it", arrow_type(entry))])
                pq.ParquetWriter(pa.BufferOutputStream(), schema).close()
            except (pa.ArrowException, OSError) as exc:
                raise SchemaError(
                    f"field {key_name(entry.key)!r} is {entry}, which Parquet cannot store: {exc}",
                    hint="choose the fields to export without it, or export to Arrow",
                ) from exc


def _repetitive(schema: Any) -> list[str]:
    """Return the paths of the columns to encode with a dictionary: texts and 8-bit integers.

    Without a dictionary, Parquet stores 8-bit integers as 32 bits. Floats are never encoded this way, because
    a dictionary treats all NaNs as the same value.
    """
    is_a = pa.types

    def below(path: str, kind: Any) -> list[str]:
        if pa.types.is_struct(kind):
            return [found for part in kind for found in below(f"{path}.{part.name}", part.type)]
        if is_a.is_map(kind):
            inside = f"{path}.key_value."
            return [*below(inside + "key", kind.key_type), *below(inside + "value", kind.item_type)]
        if is_a.is_fixed_size_list(kind) or is_a.is_list(kind) or is_a.is_large_list(kind):
            return below(f"{path}.list.element", kind.value_type)
        texts = is_a.is_string(kind) or is_a.is_large_string(kind)
        return [path] if texts or kind in (pa.uint8(), pa.int8()) else []

    return [found for entry in schema for found in below(entry.name, entry.type)]
