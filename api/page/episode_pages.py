"""Build the queries for pages of episodes: filters, order, and cursors from page to page.

Used by the route that lists episodes. A page begins after, or ends before, the row that its cursor names by
the value it is ordered by and the episode's id: pages neither repeat nor skip episodes while a writer adds
some. Values are parameters; the only text of a client in a query is `where`, and such a query must run in the
sandbox.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from typing import Any

from expstore.api.errors import Refusal

#: Columns of the relation `episodes`, and the expression that orders by each.
COLUMNS = {
    "episode_id": "episode_id",
    "source": "source",
    "length": "length",
    "return": '"return"',
    "status": "status",
    "start_time": "epoch_us(start_time)",
    "end_time": "epoch_us(end_time)",
    "split": "split",
    "selections": "array_to_string(selections, ', ')",
    "trajectory_id": "trajectory_id",
    "live_rows": "live_rows",
}
#: A column or a fact, after a minus in descending order.
ORDER_PATTERN = rf"^-?({'|'.join(COLUMNS)}|info\.[\s\S]{{1,200}})$"
_FACT = "info."
#: The column with the value by which a page is ordered.
_VALUE = "page_value"


def fact_expression(parameter: str, column: str = "info") -> str:
    """Return the SQL of a fact in a column as text; a parameter has its path, as `fact_path` returns it."""
    return f"json_extract_string({column}, ${parameter})"


def fact_path(name: str) -> str:
    """Return the JSON pointer of a fact (RFC 6901).

    >>> from expstore.api.page.episode_pages import fact_path
    >>> fact_path("a/b")
    '/a~1b'
    """
    return "/" + name.replace("~", "~0").replace("/", "~1")


def fact_number(parameter: str, column: str = "info") -> str:
    """Return the SQL of a fact as a number: true is 1, false is 0, other texts are NULL."""
    text = fact_expression(parameter, column)
    return f"CASE {text} WHEN 'true' THEN 1.0 WHEN 'false' THEN 0.0 ELSE TRY_CAST({text} AS DOUBLE) END"


@dataclass(frozen=True)
class Filters:
    """Which episodes are selected.

    Args:
        where: An SQL condition of a client; None: no condition.
        after: Only episodes with higher ids.
        source: Only episodes of this source; None: of all.
        status: Only episodes with this status; None: with any.
    """

    where: str | None = None
    after: int = 0
    source: str | None = None
    status: str | None = None

    def relation(self) -> str:
        """Return the relation with the episodes that meet the client's condition."""
        # The condition is on lines of its own, so that a comment at its end hides nothing.
        return "episodes" if self.where is None else f"(SELECT * FROM episodes WHERE (\n{self.where}\n))"

    def conditions(self) -> tuple[list[str], dict[str, Any]]:
        """Return the other conditions, and their parameters."""
        found = ["episode_id > $after"]
        params: dict[str, Any] = {"after": self.after}
        for name, value in (("source", self.source), ("status", self.status)):
            if value is not None:
                found.append(f"{name} = ${name}")
                params[name] = value
        return found, params

    def count(self) -> tuple[str, dict[str, Any]]:
        """Return the query that counts the episodes, and its parameters."""
        conditions, params = self.conditions()
        return f"SELECT count(*) FROM {self.relation()} WHERE {' AND '.join(conditions)}", params


@dataclass(frozen=True)
class _Cursor:
    """The row from which a page starts.

    Args:
        backward: Whether the page ends before the row; otherwise it begins after it.
        order: The order of the pages, as the client gave it.
        value: The row's value; None: NULL. Not used for sources, which never change and may be long.
        episode: The row's id.
    """

    backward: bool
    order: str
    value: Any
    episode: int

    def pack(self) -> str:
        data = json.dumps([self.backward, self.order, self.value, self.episode], separators=(",", ":"))
        return base64.urlsafe_b64encode(data.encode()).decode().rstrip("=")

    @classmethod
    def unpack(cls, text: str, order: str) -> _Cursor:
        """Parse the result of `pack`.

        Raises:
            Refusal: 422: it is no cursor, or of pages in another order.
        """
        hint = "send X-Next or X-Previous of an answer, with the same order"
        try:
            found = cls(*json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))))
        except (ValueError, TypeError, RecursionError):
            raise Refusal(422, f"page={text[:80]!r} is not a cursor", hint=hint) from None
        known = type(found.episode) is int and 0 <= found.episode < 1 << 63
        if not known or not isinstance(found.value, (int, float, str, type(None))):
            raise Refusal(422, f"page={text[:80]!r} is not a cursor", hint=hint)
        if isinstance(found.value, int) and not -(1 << 63) <= found.value < 1 << 63:
            raise Refusal(422, f"page={text[:80]!r} is not a cursor", hint=hint)
        if found.order != order:
            raise Refusal(422, f"page is a cursor of pages ordered by {str(found.order)[:80]!r}", hint=hint)
        return found


class EpisodePage:
    """One page of episodes.

    Args:
        filters: Which episodes.
        order: A name in `COLUMNS` or `info.` and the name of a fact; "-" before it: descending. Facts are
            ordered as numbers. NULL comes last in either direction; equal values are ordered by id.
        limit: Most episodes of the page.
        page: The cursor that an earlier page returned; None: the first page.

    Raises:
        Refusal: 422: `page` is not a cursor of these pages.
    """

    def __init__(self, filters: Filters, order: str, limit: int, page: str | None) -> None:
        self._filters, self._order, self.limit = filters, order, limit
        self._cursor = None if page is None else _Cursor.unpack(page, order)
        self._name = order.removeprefix("-")

    def query(self) -> tuple[str, dict[str, Any]]:
        """Return the query and its parameters; it returns one more row than the page has, if there is one."""
        conditions, params = self._filters.conditions()
        if self._name.startswith(_FACT):
            value = fact_number("fact")
            params["fact"] = fact_path(self._name.removeprefix(_FACT))
        else:
            value = COLUMNS[self._name]
        cursor, descends = self._cursor, self._order.startswith("-")
        if cursor is not None:
            conditions.append(self._after(cursor, value, descends, params))
        forward = f"ORDER BY {_VALUE} {_way(descends)} NULLS LAST, episode_id {_way(descends)}"
        first = forward
        if cursor is not None and cursor.backward:
            first = f"ORDER BY {_VALUE} {_way(not descends)} NULLS FIRST, episode_id {_way(not descends)}"
        rows = (
            f"SELECT *, {value} AS {_VALUE} FROM {self._filters.relation()}\n"
            f"WHERE {' AND '.join(conditions)}\n{first} LIMIT {self.limit + 1}"
        )
        return f"SELECT * FROM (\n{rows}\n) {forward}", params

    def _after(self, cursor: _Cursor, value: str, descends: bool, params: dict[str, Any]) -> str:
        """Return the condition for rows on the cursor's other side."""
        backward = cursor.backward
        sign = "<" if descends != backward else ">"
        params["edge"] = cursor.episode
        if self._name == "episode_id":
            return f"episode_id {sign} $edge"
        beyond = f"episode_id {sign} $edge"
        if self._name == "source":
            edge = "(SELECT e.source FROM episodes AS e WHERE e.episode_id = $edge)"
        elif cursor.value is None:  # NULL is behind all values
            return f"({value} IS NOT NULL OR {beyond})" if backward else f"({value} IS NULL AND {beyond})"
        else:
            edge, params["value"] = "$value", cursor.value
        others = "" if backward else f" OR {value} IS NULL"
        return f"({value} {sign} {edge} OR ({value} = {edge} AND {beyond}){others})"

    def cut(self, table: Any, *, truncated: bool = False) -> tuple[Any, dict[str, str]]:
        """Return the rows of the page, and headers with the cursors of the pages around it.

        Args:
            table: The result of the query, a pyarrow Table.
            truncated: Whether the result lacks its last rows.

        Raises:
            Refusal: 413: rows before the cursor are missing. 422: the condition is not one SQL expression, so
                that the result is no list of episodes.
        """
        if sorted(table.column_names) != sorted([*COLUMNS, "info", _VALUE]):
            raise Refusal(422, "where is not one SQL expression", kind="query",
                          hint="give a condition over the columns of episodes")  # fmt: skip
        backward = self._cursor is not None and self._cursor.backward
        if truncated and backward:  # the missing rows are those next to the cursor
            raise Refusal(413, "the episodes of this page take too many bytes", kind="too_large",
                          hint="ask for fewer with limit")  # fmt: skip
        more = truncated or table.num_rows > self.limit
        if table.num_rows > self.limit:
            table = table.slice(1 if backward else 0, self.limit)
        headers = {}
        if table.num_rows:
            if more or backward:
                headers["X-Next"] = self._cursor_at(table, table.num_rows - 1, backward=False)
            if more if backward else self._cursor is not None:
                headers["X-Previous"] = self._cursor_at(table, 0, backward=True)
        return table.drop_columns([_VALUE]), headers

    def _cursor_at(self, table: Any, row: int, *, backward: bool) -> str:
        value = None if self._name in ("source", "episode_id") else table[_VALUE][row].as_py()
        return _Cursor(backward, self._order, value, table["episode_id"][row].as_py()).pack()


def _way(descends: bool) -> str:
    return "DESC" if descends else "ASC"
