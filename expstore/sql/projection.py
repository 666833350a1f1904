"""Find the members of nested fields that a statement names, because DuckDB reads all members of a struct.

Used by `expstore.sql.views` for members that are costly to read. It never runs a statement. If it cannot
tell which members are used, it returns all of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import duckdb

from expstore.core.values import Key

#: The relations that have rows.
_TABLES = {"transitions", "recent"}
#: FROM items whose only columns are those that they name themselves.
_OWN = {"SUBQUERY", "EMPTY", "EMPTY_FROM", "EXPRESSION_LIST"}
#: FROM items that refer to columns only in ways that this module recognizes.
_PLAIN = _OWN | {"BASE_TABLE", "JOIN", "TABLE_FUNCTION"}


def find_members(cursor: duckdb.DuckDBPyConnection, sql: str, members: Iterable[Key]) -> set[Key]:
    """Return the members of columns of `transitions` that a statement may need.

    Args:
        cursor: Used to parse the statement.
        sql: One SELECT.
        members: Paths of the members in SQL: the column's name, then the names inside the struct.

    Example:
        >>> import duckdb
        >>> from expstore.sql.projection import find_members
        >>> members = [("next", "pixels"), ("next", "state")]
        >>> find_members(duckdb.connect(), "SELECT next.reward, next.state FROM transitions", members)
        {('next', 'state')}
    """
    wanted = set(members)
    if not wanted:
        return wanted
    try:
        text = cursor.execute("SELECT json_serialize_sql(?::VARCHAR)", [sql]).fetchall()[0][0]
        tree = json.loads(text)
        tops = {member[0].lower() for member in wanted}
        if tree.get("error", True) or _is_wide(tree, tops, visible=True):
            return wanted
        tables = [one for one in _dicts(tree) if one.get("alias") and "class" not in one]
        aliases = {*_TABLES, *(str(one["alias"]).lower() for one in tables)}
        names = [[str(part).lower() for part in ref] for ref in _references(tree)]
    except (duckdb.Error, ValueError, KeyError, TypeError, AttributeError):
        return wanted
    if any(ref[-1] in aliases for ref in names if len(ref) == 1):
        return wanted  # a table's name alone stands for the whole row
    return {member for member in wanted if any(_reaches(ref, member) for ref in names)}


def _reaches(reference: list[str], member: Key) -> bool:
    """Return whether a reference may be to a member, to a struct that contains it, or to a part of it."""
    top, *inside = [part.lower() for part in member]
    for place, part in enumerate(reference):
        if part == top:
            following = reference[place + 1 :]
            if all(one == other for one, other in zip(following, inside, strict=False)):
                return True
    return False


def _is_wide(tree: Any, tops: set[str], *, visible: bool) -> bool:
    """Return whether a statement may use columns that it does not name.

    Args:
        tree: Part of a parsed statement.
        tops: Names of the columns of interest, lower case.
        visible: Whether a `*` in this part may include columns of rows.
    """
    if isinstance(tree, list):
        return any(_is_wide(one, tops, visible=visible) for one in tree)
    if not isinstance(tree, dict):
        text = tree.lower() if isinstance(tree, str) else ""
        return text not in _TABLES and any(table in text for table in _TABLES)
    if "from_table" in tree:
        visible = _reads_rows(tree["from_table"])
    if tree.get("class") == "POSITIONAL_REFERENCE":
        return True
    if visible and tree.get("class") == "STAR" and not _leaves_out(tree, tops):
        return True
    if tree.get("column_name_alias") or tree.get("ref_type") == "NATURAL":
        return True
    source = tree.get("from_table")
    if isinstance(source, dict) and any(one.get("type") not in _PLAIN for one in _tables(source)):
        return True
    return any(_is_wide(value, tops, visible=visible) for value in tree.values())


def _leaves_out(star: dict[str, Any], tops: set[str]) -> bool:
    """Return whether a `*` excludes all of these columns."""
    named = {str(name).lower() for name in star.get("exclude_list", ())}
    return tops <= named and star.get("expr") is None and not star.get("rename_list", True)


def _reads_rows(source: Any) -> bool:
    """Return whether a FROM clause reads rows directly, not only in a nested SELECT."""
    return any(str(one.get("table_name", "recent")).lower() in _TABLES for one in _tables(source))


def _tables(source: Any) -> Iterator[dict[str, Any]]:
    """Yield the items of a FROM clause, also those in joins, but no nested SELECTs."""
    if isinstance(source, dict) and source.get("type") not in _OWN:
        if source.get("type") != "JOIN":
            yield source
        for side in ("left", "right"):
            yield from _tables(source.get(side))


def _references(tree: Any) -> Iterator[list[str]]:
    """Yield the column references of a statement, each as a list of its parts."""
    for one in _dicts(tree):
        if one.get("class") == "COLUMN_REF":
            yield one["column_names"]
        for name in one.get("using_columns") or ():
            yield [name]


def _dicts(tree: Any) -> Iterator[dict[str, Any]]:
    if isinstance(tree, dict):
        yield tree
    for value in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield from _dicts(value)
