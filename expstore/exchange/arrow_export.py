"""Export rows to an Arrow IPC file, which can be read without a copy.

Used by `expstore export` and programs. The result is a folder: `rows.arrow` with the rows ordered by id, and
`episodes.arrow`. One record batch is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from expstore.disk.files import Disk
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
from expstore.exchange.tables import check_names, rows_schema, to_batch


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
            written = _write_rows(export.disk, temporary / "rows.arrow", export.rows, progress)
            facts = export.rows.facts
            with DiskFile(export.disk, temporary / "episodes.arrow", write=True) as file:
                with pa.ipc.new_file(file, facts.schema) as out:
                    out.write_table(facts)
    return export.summarize(written)


def _write_rows(disk: Disk, path: Path, rows: Rows, progress: Progress) -> int:
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
