"""The condition `selection('name')`: rewrite it for DuckDB, which knows no such function.

Used before a statement or an expression is executed. A macro of DuckDB cannot name a column of the relation
that it is used with.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial

from expstore.core.nearest import suggest
from expstore.errors import QueryError

NAME = "selection"
_TEXT = r"'(?:[^']|'')*'"
#: A call, or a text, a quoted name or a comment, in which a call means nothing.
_TOKENS = re.compile(
    rf"""\be'(?:[^'\\]|\\.|'')*'|{_TEXT}|"(?:[^"]|"")*"|--[^\n]*|/\*.*?\*/|\$(?P<tag>\w*)\$.*?\$(?P=tag)\$"""
    rf"""|(?<![\w.$]){NAME}\s*\(\s*(?P<name>{_TEXT})\s*\)""",
    re.IGNORECASE | re.DOTALL,
)


def expand_calls(sql: str, column: str, *, check: Callable[[set[str]], None] | None = None) -> str:
    """Return SQL in which each `selection('name')` is an expression over a column.

    Args:
        sql: A statement or an expression.
        column: The column with the names of an episode's selections.
        check: Called with the names in the calls, if there are calls.

    >>> from expstore.sql.selections import expand_calls
    >>> print(expand_calls("length > 3 AND selection('clean')", "selections"))
    length > 3 AND list_contains(selections, 'clean')
    """
    if NAME not in sql.lower():
        return sql
    names: set[str] = set()
    found = _TOKENS.sub(partial(_expand, column=column, names=names), sql)
    if names and check is not None:
        check(names)
    return found


def _expand(call: re.Match[str], column: str, names: set[str]) -> str:
    if (text := call["name"]) is None:
        return call[0]
    names.add(text[1:-1].replace("''", "'"))
    return f"list_contains({column}, {text})"


def check_names(names: Iterable[str], known: list[str]) -> None:
    """Raise QueryError if a name is not that of a selection.

    Args:
        names: The names.
        known: Names of the store's selections.
    """
    for name in sorted(set(names).difference(known)):
        hint = suggest(name, known, "the selections are") if known else "rb.selections.create() makes one"
        raise QueryError(f"there is no selection {name!r:.100}", hint=hint)


def explain_call(message: str, sql: str) -> QueryError | None:
    """Return the error for a query that DuckDB rejects because of a call, which was expanded; otherwise None.

    Args:
        message: DuckDB's message.
        sql: The query, with expanded calls.
    """
    if re.search(rf"with name {NAME} does not exist", message, re.IGNORECASE):
        return QueryError(f"{NAME}() takes one text", hint=f"write {NAME}('clean-v1')")
    if 'column "selections" not found' in message and "list_contains(selections, '" in sql:
        return QueryError(
            f"{NAME}() is a condition on episodes, and the query reads no episodes there",
            hint=f"for rows: _episode IN (SELECT episode_id FROM episodes WHERE {NAME}('clean-v1'))",
        )
    return None
