"""Build the error for a query that DuckDB rejects: name what is missing, and list the names that exist.

Used by the index, after DuckDB has raised an error.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import duckdb

from expstore.core.nearest import list_nearest_first, nearest
from expstore.errors import QueryError
from expstore.sql.selections import explain_call
from expstore.sql.views import quote

_MISSING_COLUMN = (
    re.compile(r'Referenced column "(?P<name>.+?)" not found'),
    re.compile(r'Could not find key "(?P<name>.+?)" in struct'),
    re.compile(r'(?:Values list|Table) "(?P<table>.+?)" does not have a column named "(?P<name>.+?)"'),
    re.compile(r'Referenced table "(?P<name>.+?)" not found'),
)
#: An element of a number: fields of shape [1] are numbers.
_INDEXED_NUMBER = re.compile(r"array_extract\((?:FLOAT|DOUBLE|BOOLEAN|\w*INT\w*), \w+\)'")
_SINGLE_VALUE = "a field with one value a row is a number: leave out the brackets after it"
_MISSING_RELATION = re.compile(r"Table with name (?P<name>.+?) does not exist")


def explain_refusal(
    exc: duckdb.Error,
    cursor: duckdb.DuckDBPyConnection,
    sql: str,
    columns: Mapping[str, Sequence[str]],
    relations: Sequence[str],
) -> QueryError:
    """Return the error for a query that DuckDB rejects.

    Args:
        exc: The error that DuckDB raised.
        cursor: The query's cursor; its transaction has ended.
        sql: The query.
        columns: For relations whose view has only the columns that the query names: all their columns.
        relations: Names of all relations.
    """
    text = str(exc).strip()
    if error := explain_call(text, sql):
        return error
    if found := _MISSING_RELATION.search(text):
        near = nearest(found["name"], relations)
        hint = f"did you mean {near}?" if near else f"the relations are {', '.join(relations)}"
        return QueryError(f"there is no relation {found['name']!r}", hint=hint)
    missing = next(filter(None, (pattern.search(text) for pattern in _MISSING_COLUMN)), None)
    if missing is None:
        return QueryError(text, hint=_SINGLE_VALUE if _INDEXED_NUMBER.search(text) else "")
    tree = _parse(cursor, sql)
    tables = {
        str(node["alias"] or node["table_name"]): str(node["table_name"])
        for node in _nodes(tree, "BASE_TABLE")
        if node["table_name"] in relations
    }
    alias = missing.groupdict().get("table")
    asked = {alias: tables[alias]} if alias in tables else tables
    known = {table: columns.get(table) or _columns_of(cursor, table) for table in asked.values()}
    if not known:
        return QueryError(text)
    name = _whole_name(tree, missing["name"], tables)
    near = nearest(name, [column for names in known.values() for column in names])
    lists = [f"{table} has {', '.join(list_nearest_first(name, names))}" for table, names in known.items()]
    hint = (f"did you mean {near}? " if near else "") + "; ".join(lists)
    if name == missing["name"] and any(name in names for names in known.values()):  # quoted, so one name
        quoted = ".".join(map(quote, name.split(".")))
        hint, name = f"write {name} without quotation marks, or {quoted}", quote(name)
    return QueryError(
        f"{' and '.join(known)} {'has' if len(known) == 1 else 'have'} no column {name}", hint=hint
    )


def _parse(cursor: duckdb.DuckDBPyConnection, sql: str) -> Any:
    with contextlib.suppress(duckdb.Error, ValueError, RecursionError):
        (answer,) = cursor.execute("SELECT json_serialize_sql(?)", [sql]).fetchall()[0]
        return json.loads(answer)
    return {}


def _nodes(tree: Any, kind: str) -> Iterator[dict[str, Any]]:
    """Yield all nodes of one type."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            if node.get("type") == kind:
                yield node
            waiting += reversed(node.values())
        elif isinstance(node, list):
            waiting += reversed(node)


def _whole_name(tree: Any, part: str, tables: Mapping[str, str]) -> str:
    """Return the full dotted name in a query, given the part that DuckDB names."""
    for node in _nodes(tree, "COLUMN_REF"):
        names = node["column_names"]
        if part in names:
            return ".".join(names[1:] if len(names) > 1 and names[0] in tables else names)
    return part


def _columns_of(cursor: duckdb.DuckDBPyConnection, table: str) -> list[str]:
    return list(cursor.sql(f'SELECT * FROM "{table}" LIMIT 0').columns)
