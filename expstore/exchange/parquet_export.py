"""Export rows to Parquet files, which polars, DuckDB, pandas and many others read.

Used by `expstore export` and programs. The result is a folder: `rows/NNNNN.parquet`, each with the rows of a
range of episodes ordered by id, and `episodes.parquet`. One row group is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from expstore.core import tuning
from expstore.core.values import key_name
from expstore.disk.files import Disk
from expstore.errors import SchemaError
from expstore.exchange.base import (
    DiskFile,
    Exported,
    Progress,
    no_progress,
    piece_rows,
)
from expstore.exchange.export import Tally, open_export
from expstore.exchange.row_pieces import read_pieces
from expstore.exchange.rows import Episodes, Exchanged, Rows
from expstore.exchange.tables import arrow_type, check_names, rows_schema, to_batch
from expstore.schema.schema import Field

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
            written = _write_rows(export.disk, temporary / "rows", export.rows, progress)
            with DiskFile(export.disk, temporary / "episodes.parquet", write=True) as file:
                pq.write_table(export.rows.facts, file, compression="zstd")
    return export.summarize(written)


def _write_rows(disk: Disk, folder: Path, rows: Rows, progress: Progress) -> int:
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
