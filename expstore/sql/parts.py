"""Combine the results of one query over several stores, and query them together.

Used by buffers over several stores. The database is in memory and sees nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import duckdb
import pyarrow as pa

from expstore.errors import QueryError
from expstore.sql.index import CONFIG
from expstore.sql.result import Result, widen_unsigned

#: The column that names the store of a row.
SHARD = "_shard"


def join_parts(parts: Mapping[int, Result]) -> Result:
    """Return the rows of several results, with the number of the store of each as the column `_shard`.

    Args:
        parts: The result of each store, by the store's number. Types that differ are unified.

    Raises:
        QueryError: The results have different columns.
    """
    tables = []
    for number, part in parts.items():
        table = part.arrow()
        tables.append(table.append_column(SHARD, pa.array([number] * len(table), pa.int64())))
    try:
        return Result(pa.concat_tables(tables, promote_options="permissive"))
    except pa.ArrowException as exc:
        raise QueryError(
            f"the results of the stores cannot be combined: {exc}", hint="cast the columns to common types"
        ) from exc


def query_parts(
    query: str, parts: Result, params: Sequence[object] | Mapping[str, object] | None = None
) -> Result:
    """Run one SELECT over a result, which is the relation `parts`.

    Args:
        query: The statement.
        parts: The rows of the relation.
        params: Values for `?` (a sequence) or `$name` (a mapping).

    Raises:
        QueryError: DuckDB rejects the query, or it is not one SELECT.
    """
    with duckdb.connect(":memory:", config={**CONFIG, "lock_configuration": "true"}) as con:
        try:
            statements = con.extract_statements(query)
            if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
                raise QueryError("the query is not one SELECT", hint="read from the relation parts")
            con.register("parts", parts.arrow())
            values = dict(params) if isinstance(params, Mapping) else params and list(params)
            relation = con.sql(query, params=values or None)
            return Result(widen_unsigned(relation.to_arrow_table(), relation.types))
        except duckdb.Error as exc:
            raise QueryError(str(exc).strip(), hint="the only relation is parts") from exc
