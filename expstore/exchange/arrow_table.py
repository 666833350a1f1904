"""Read rows of some episodes as an Arrow table, without a file.

Used by programs that read a store in parallel, each a range of its episodes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from expstore.exchange.base import piece_rows
from expstore.exchange.row_pieces import read_pieces
from expstore.exchange.rows import Exchanged, Rows, open_source
from expstore.exchange.tables import check_names, rows_schema, to_batch
from expstore.sql.sync import Catalog


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
