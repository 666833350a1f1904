"""The SQL view `history`: the rows of a ring together with the rows that were moved to its archive.

Passed to `expstore.sql.views` by stores that have an archive; `attach` creates the view on the cursor of one
query. It copies no column: a query reads only the columns it names, from the ring and from the archive.
"""

from __future__ import annotations

from dataclasses import dataclass

import duckdb

from expstore.errors import ExpStoreError
from expstore.sql.views import ROW_COLUMNS, Relations

__all__ = ["ARCHIVED", "HISTORY_COLUMNS", "History"]

#: The column that tells whether a row was evicted from the ring.
ARCHIVED = "_archived"
#: Column names of `history` that no field can have.
HISTORY_COLUMNS = (*ROW_COLUMNS, ARCHIVED)
# Values that a row has only while it is in the ring.
_OF_THE_RING = ("_index", "_priority", "_sampled")


@dataclass(frozen=True, slots=True)
class History:
    """The two parts of the view `history`; no row is in both.

    Args:
        held: The rows in the ring, including evicted rows that have not been moved to the archive yet.
        archived: The rows of the archive.
        low: The newest id that was evicted from the ring.
        last: The newest id of the store. The archive may hold newer rows, which the ring is about to get.
    """

    held: Relations
    archived: Relations
    low: int
    last: int

    def attach(self, cursor: duckdb.DuckDBPyConnection, sql: str, refused: list[ExpStoreError]) -> None:
        """Create the view on a query's cursor.

        Args:
            cursor: The query's cursor.
            sql: The statement.
            refused: A list to which errors of columns are appended while they are read.

        Raises:
            CorruptionError: No column of the ring, or of the archive, can be read.
        """
        held = self.held.show(cursor, sql, "__held", refused)
        archived = self.archived.show(cursor, sql, "__archived", refused)
        counted = any(column.key == ("_sampled",) for column in self.held.columns)
        own = [name for name in _OF_THE_RING if counted or name != "_sampled"]
        low = int(self.low)
        instead = ", ".join(f"CASE WHEN _id > {low} THEN {name} END AS {name}" for name in own)
        cursor.execute(
            f"CREATE TEMP VIEW history AS SELECT * REPLACE ({instead}), _id <= {low} AS {ARCHIVED} "
            f"FROM ((SELECT * FROM ({archived}) WHERE _id <= {int(self.last)}) UNION ALL BY NAME ({held}))"
        )
