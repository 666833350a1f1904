"""SQL expressions with which samplers filter and weight rows: parse, validate and evaluate them.

Used by the filters of samplers. Each is one expression over a transition and its episode, and its value
for a row depends on nothing else. This module never sees a store, only columns.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute
from numpy.typing import NDArray

from expstore.core.nearest import suggest
from expstore.core.values import Array, IntArray, key_name
from expstore.episodes.facts import split_of
from expstore.episodes.log import LogEntry
from expstore.episodes.segmentation import OPEN
from expstore.episodes.selections import selections_of
from expstore.episodes.table import STATUS
from expstore.errors import ArgumentError, ExpStoreError, QueryError
from expstore.schema.row_selection import no_rows
from expstore.schema.schema import Schema
from expstore.sql.arrow_values import find_present, nullable_text, to_nullable
from expstore.sql.index import CONFIG
from expstore.sql.selections import expand_calls
from expstore.sql.views import ROW_COLUMNS, Column, Relations, call_tops, quote
from expstore.storages.read_view import ReadView

#: Columns of the relation `episodes` that an expression may use.
FACTS = (
    "episode_id",
    "source",
    "trajectory_id",
    "start_time",
    "end_time",
    "length",
    "return",
    "status",
    "split",
    "selections",
    "info",
)
#: Columns that change while the row itself does not, without notification. Conditions may not use them.
_FLEETING = {
    ("_priority",): "priorities change with every batch; draw by them with PrioritizedSampler",
    ("_sampled",): "counts change with every batch; ConsumingSampler draws by them",
    ("episode", "live_rows"): "it changes with every row that is evicted or deleted",
}
#: Standard SQL treats these names as functions if no column has the name.
_MOMENT = {
    "current_catalog",
    "current_date",
    "current_role",
    "current_schema",
    "current_time",
    "current_timestamp",
    "current_user",
    "localtime",
    "localtimestamp",
    "session_user",
    "user",
}
#: The kinds of nodes that an expression may contain, as DuckDB's parser names them.
_PARTS = {
    "BETWEEN",
    "CASE",
    "CAST",
    "COLLATE",
    "COLUMN_REF",
    "COMPARISON",
    "CONJUNCTION",
    "CONSTANT",
    "FUNCTION",
    "LAMBDA",
    "LAMBDA_REF",
    "OPERATOR",
    "TYPE",
}
_REFUSED = {
    "DEFAULT": "DEFAULT",
    "PARAMETER": "a parameter",
    "POSITIONAL_REFERENCE": "the number of a column",
    "STAR": "a star",
    "SUBQUERY": "a subquery",
    "WINDOW": "a window function",
}
_NUMBERS = ("TINYINT", "SMALLINT", "INTEGER", "BIGINT", "HUGEINT", "FLOAT", "DOUBLE", "DECIMAL")
#: Largest weight: sums of weights up to this one remain finite.
_MOST = 1e150
_ROWS = ("_id", "_index", "_episode", "_step", "_time")

#: Assumed size of a row of a variable-length field, in bytes: a thousand tokens.
_LOOSE_BYTES = 4096
#: Interval at which a query past its deadline is interrupted: an interrupt before DuckDB starts is lost.
_INTERRUPT_SECONDS = 0.05

#: Columns that only the relation `groups` has.
_OF_GROUPS = {"mean_return", "std_return", "min_version", "max_version"}
#: A column of a group, which DuckDB does not parse: GROUP is a keyword.
_GROUP_COLUMN = re.compile(r"\bgroup\s*\.\s*(\w+)", re.IGNORECASE)

Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Needs:
    """The columns of a store's rows that an expression reads.

    Args:
        fields: Positions of the fields in the schema.
        rows: SQL names of the required row columns, without `_id`.
        schema: The fields.
        tops: SQL names of the first parts of the fields' keys.
    """

    fields: tuple[int, ...]
    rows: tuple[str, ...]
    schema: Schema
    tops: Mapping[str, str]

    @property
    def row_bytes(self) -> int:
        """Approximate number of bytes that are read per row."""
        fields = [self.schema.fields[place] for place in self.fields]
        return 24 + sum(_LOOSE_BYTES if entry.variable else entry.row_bytes for entry in fields)

    def mark_missing(self, storage: ReadView, ids: IntArray, columns: list[Any]) -> None:
        """Make values of annotated fields NULL in rows without a value.

        Args:
            storage: The storage of the rows.
            ids: Ids of the rows. Shape `(n,)`.
            columns: Their values, the fields first; the columns of annotated fields are replaced.
        """
        for number, place in enumerate(self.fields):
            if (entry := self.schema.fields[place]).annotated:
                columns[number] = to_nullable(entry, columns[number], find_present(storage, entry, ids))


@dataclass(frozen=True, slots=True)
class ConditionLimits:
    """Limit the resources of one query of an expression; one query reads up to 131,072 rows.

    Args:
        seconds: Time in seconds after which the query is interrupted.
        memory: Bytes that DuckDB may allocate for it.
    """

    seconds: float
    memory: int


class Conditions:
    """Evaluate which rows match `where`, and their `weight`.

    There is no lock: only one thread may call at a time. A forked child creates its own database. No rows are
    kept.

    Args:
        where: Boolean expression; None: every row matches.
        weight: Numeric expression; None: 1.

    Raises:
        QueryError: `where` or `weight` is not a single SQL expression over a row and its episode.

    Example:
        >>> from expstore.sql.expressions import Conditions
        >>> conditions = Conditions("reward > 0 AND episode.status = 'terminated'", None)
        >>> conditions.facts
        ('episode_id', 'status')
    """

    def __init__(self, where: str | None, weight: str | None) -> None:
        self.where, self.weight = where, weight
        self._limits: ConditionLimits | None = None
        self._operands: list[tuple[Path, int]] = []
        self._con: Any = None
        self._pid = 0
        self._parents: list[Any] = []
        self._paths: set[Path] = set()
        #: Names of the selections that the expressions use.
        self.selections: set[str] = set()
        self._sql: dict[str, str] = {}  # the expressions as DuckDB evaluates them
        with self._cursor() as cursor:
            for option, text in self._texts():
                self._sql[option] = expand_calls(text, "episode.selections", check=self.selections.update)
                self._paths |= _read(cursor, option, self._sql[option])
        facts = {path[1] for path in self._paths if path[0] == "episode"}
        #: The required columns of `episodes`; empty if no expression uses the episode.
        self.facts = ("episode_id", *sorted(facts - {"episode_id"})) if facts else ()

    def _texts(self) -> list[tuple[str, str]]:
        named = (("where", self.where), ("weight", self.weight))
        return [(option, text) for option, text in named if text is not None]

    def __str__(self) -> str:
        return " and ".join(f"{option}={text!r}" for option, text in self._texts())

    def limit(self, limits: ConditionLimits) -> None:
        """Limit every query from now on, for expressions that are not trusted."""
        self._limits = limits
        self._con, self._pid = None, 0  # the next query opens a database with the new limit
        trees = [parse_expression(text) for _, text in self._texts()]
        self._operands = sorted({operand for tree in trees for operand in _operands(tree)})

    # -- binding to a schema ---------------------------------------------------------------------

    def bind(self, schema: Schema) -> Needs:
        """Return the columns that the expressions need of rows with these fields.

        Raises:
            QueryError: An expression uses a field that does not exist, `where` is not boolean, or `weight` is
                not a number.
        """
        tops = call_tops(schema.keys, [*ROW_COLUMNS, "episode"])
        names = [tuple(part.lower() for part in (tops[key[0]], *key[1:])) for key in schema.keys]
        fields = tuple(place for place, name in enumerate(names) if any(_meet(name, p) for p in self._paths))
        rows = {path[0] for path in self._paths} & {"_step", "_time", "_episode"}
        if self.facts:
            rows.add("_episode")
        for path in self._paths:
            if len(path) == 1 and path[0] in _MOMENT and not any(_meet(name, path) for name in names):
                raise _refusal(str(self), f"{path[0]} changes by itself")
        needs = Needs(fields, tuple(sorted(rows)), schema, tops)
        known = [schema.fields[place] for place in fields]
        empty = [no_rows(entry) for entry in known]
        columns = [*empty, *(np.empty(0, np.int64) for _ in rows)]
        facts = pa.table({name: pa.array([], _FACT_KINDS[name]) for name in self.facts})
        with self._attach_rows(needs, np.empty(0, np.int64), columns, facts, None) as (cursor, source):
            for option, text in self._texts():
                found = cursor.sql(f"SELECT ({self._sql[option]}\n) FROM {source}")
                kind = str(found.types[0])
                if option not in ("where", "weight"):
                    continue
                wanted = "a boolean expression" if option == "where" else "a number"
                fits = kind == "BOOLEAN" if option == "where" else kind.removeprefix("U").startswith(_NUMBERS)
                if not fits or kind.endswith("]"):
                    raise QueryError(f"{option}= takes {wanted}, and {text!r} is of type {kind}")
                if len(found.to_arrow_table()):
                    raise _refusal(text, "it does not refer to single rows")
            self._check_operands(cursor, source)
        return needs

    def _check_operands(self, cursor: duckdb.DuckDBPyConnection, source: str) -> None:
        """Raise QueryError if arrays are added: DuckDB concatenates them, ignoring `memory_limit`."""
        for path, subscripts in self._operands:
            operand = ".".join(quote(part) for part in path) + "[1]" * subscripts
            if str(cursor.sql(f"SELECT {operand} FROM {source}").types[0]).endswith((")", "]")):
                raise QueryError(
                    f"{self} computes with {key_name(path)}, which has several values per row",
                    hint=f"name one of them: {key_name(path)}{'[1]' * (subscripts + 1)}",
                )

    # -- evaluation ------------------------------------------------------------------------------

    def ask(
        self, needs: Needs, ids: IntArray, columns: Sequence[Array], facts: Any, capacity: int | None
    ) -> NDArray[np.float64]:
        """Return the weight of each row, 0 where it does not match.

        Args:
            needs: What `bind` returned.
            ids: Ids of the rows, ascending. Shape `(n,)`.
            columns: The fields and row columns that `needs` names. Shapes `(n, *row shape)`.
            facts: An Arrow table of the rows' episodes with `self.facts`; None if `self.facts` is empty.
            capacity: Capacity of the ring; None for an unbounded store.

        Returns:
            Shape `(n,)`, float64. The weights are not validated: one may be NaN.

        Raises:
            QueryError: DuckDB cannot compute the weights.
        """
        where, weight = (
            f"({self._sql.get(name, one)}\n)" for name, one in (("where", "TRUE"), ("weight", "1"))
        )
        mass = f"CASE WHEN {where} THEN coalesce(CAST({weight} AS DOUBLE), 0) ELSE 0 END"
        with self._attach_rows(needs, ids, columns, facts, capacity) as (cursor, source):
            table = cursor.sql(f"SELECT _id, {mass} FROM {source}").to_arrow_table()
        found, masses = (table.column(n).to_numpy() for n in range(2))
        if not np.array_equal(found, ids):  # a join may change the order
            masses = masses[np.argsort(found, kind="stable")]
        kept: NDArray[np.float64] = masses
        return kept

    def check(self, ids: IntArray, masses: NDArray[np.float64]) -> None:
        """Raise QueryError if a weight is negative, NaN, infinite or beyond 1e150. Shapes `(n,)`."""
        wrong = ~((masses >= 0) & (masses <= _MOST))
        if wrong.any():
            at = int(np.argmax(wrong))
            raise QueryError(
                f"weight={self.weight!r} is {masses[at]} for the row with id {ids[at]}",
                kind="weight",
                hint=f"weights are numbers from 0 to {_MOST:g}; NULL counts as 0",
            )

    @contextlib.contextmanager
    def _attach_rows(
        self, needs: Needs, ids: IntArray, columns: Sequence[Array], facts: Any, capacity: int | None
    ) -> Iterator[tuple[duckdb.DuckDBPyConnection, str]]:
        """Open a cursor and return it with the text to put after FROM."""
        fields = [needs.schema.fields[place] for place in needs.fields]
        stored = [Column(("_id",), "int64", (), [ids])]
        stored += [
            Column((name,), "int64", (), [values])
            for name, values in zip(needs.rows, columns[len(fields) :], strict=True)
        ]
        stored += [
            Column(
                entry.key, entry.dtype, entry.shape, [values],
                arrow="" if isinstance(values, np.ndarray) else nullable_text(entry),
            )
            for entry, values in zip(fields, columns[: len(fields)], strict=True)
        ]  # fmt: skip
        with self._cursor(needs) as cursor:
            Relations(stored, None, capacity, needs.tops, ("_id", *needs.rows)).attach(cursor, "transitions")
            if self.facts:
                cursor.register("__facts", facts)
                yield cursor, _with_episodes(self.facts)
            else:
                yield cursor, "transitions"

    @contextlib.contextmanager
    def _cursor(self, needs: Needs | None = None) -> Iterator[duckdb.DuckDBPyConnection]:
        if self._pid != os.getpid():
            self._parents.append(self._con)  # kept alive: only the parent may free its memory
            self._pid, self._con = os.getpid(), _connect(self._limits)
        cursor = self._con.cursor()
        try:
            with contextlib.nullcontext() if self._limits is None else _deadline(cursor, self._limits):
                yield cursor
        except duckdb.Error as exc:
            raise self._explain(exc, needs) from exc
        except RuntimeError as exc:
            if isinstance(exc, ExpStoreError) or "Query interrupted" not in str(exc):
                raise
            raise KeyboardInterrupt from exc  # DuckDB consumed the Ctrl-C
        finally:
            cursor.close()

    def _explain(self, exc: duckdb.Error, needs: Needs | None) -> QueryError:
        hint = ""
        if isinstance(exc, duckdb.OutOfMemoryException):
            return QueryError(f"{self} needs more memory than is allowed", kind="memory")
        if needs is not None and isinstance(exc, duckdb.BinderException | duckdb.CatalogException):
            fields = [(needs.tops[key[0]], *key[1:]) for key in needs.schema.keys]
            known = [tuple(part.lower() for part in key) for key in fields] + [(name,) for name in _ROWS]
            unknown = sorted(
                path
                for path in self._paths
                if path[0] != "episode" and not any(_meet(k, path) for k in known)
            )
            if unknown:
                *head, last = unknown[0]
                if head in (["group"], ["groups"]) or (not head and last in _OF_GROUPS):
                    return _build_group_error(str(self), last)
                name, facts = key_name(unknown[0]), [f"episode.{fact}" for fact in FACTS]
                return QueryError(
                    f"{self}: there is no field {name}",
                    hint=suggest(name, [*map(key_name, fields), *_ROWS, *facts], "the fields are"),
                )
        return QueryError(f"{self}: {str(exc).strip().splitlines()[0]}", hint=hint)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy; the copy creates its own database."""
        return {**self.__dict__, "_con": None, "_pid": 0, "_parents": []}


def _connect(limits: ConditionLimits | None) -> duckdb.DuckDBPyConnection:
    config = {**CONFIG, "threads": "1"}
    if limits is not None:
        config["memory_limit"] = f"{limits.memory >> 20}MiB"
    con = duckdb.connect(":memory:", config=config)
    con.execute("SET TimeZone = 'UTC'")
    return con


@contextlib.contextmanager
def _deadline(cursor: duckdb.DuckDBPyConnection, limits: ConditionLimits) -> Iterator[None]:
    """Interrupt a cursor's query after `limits.seconds`.

    Raises:
        QueryError: The query was interrupted (kind "timeout").
    """
    done, late = threading.Event(), threading.Event()

    def watch() -> None:
        if not done.wait(limits.seconds):
            late.set()
            cursor.interrupt()
            while not done.wait(_INTERRUPT_SECONDS):
                cursor.interrupt()

    thread = threading.Thread(target=watch, name="expstore-deadline", daemon=True)
    thread.start()
    try:
        yield
    except (duckdb.Error, RuntimeError) as exc:
        if not late.is_set() or isinstance(exc, ExpStoreError):
            raise
        raise QueryError(
            f"the condition took more than {limits.seconds:g} s", kind="timeout", hint="use a simpler one"
        ) from exc
    finally:
        done.set()
        thread.join()


class Formula(Conditions):
    """Compute the values of a field by one SQL expression over a row and its episode.

    Args:
        text: The expression.

    Raises:
        QueryError: `text` is not a single SQL expression over a row and its episode.

    Example:
        >>> from expstore.sql.expressions import Formula
        >>> formula = Formula("2 * reward + episode.length")
    """

    def __init__(self, text: str) -> None:
        super().__init__(None, text)

    def _texts(self) -> list[tuple[str, str]]:
        return [("sql", str(self.weight))]

    def values(
        self, needs: Needs, ids: IntArray, columns: Sequence[Array], facts: Any, capacity: int | None
    ) -> Array:
        """Return the value of the expression for each row.

        Args:
            needs: What `bind` returned.
            ids: Ids of the rows, ascending. Shape `(n,)`.
            columns: The fields and row columns that `needs` names. Shapes `(n, *row shape)`.
            facts: An Arrow table of the rows' episodes with `self.facts`; None if `self.facts` is empty.
            capacity: Capacity of the ring; None for an unbounded store.

        Returns:
            Shape `(n,)`, or `(n, ...)` for arrays and lists, which must all have the same length.

        Raises:
            QueryError: DuckDB cannot compute the values, or a value is not a number or is missing.
        """
        with self._attach_rows(needs, ids, columns, facts, capacity) as (cursor, source):
            table = cursor.sql(f"SELECT _id, ({self._sql['sql']}\n) FROM {source}").to_arrow_table()
        found = table.column(0).to_numpy()
        values = _numbers(table.column(1), found, str(self.weight))
        return values if np.array_equal(found, ids) else values[np.argsort(found, kind="stable")]


def _numbers(column: Any, ids: IntArray, text: str) -> Array:
    """Convert an Arrow column of numbers, or of arrays of numbers, to a NumPy array."""
    kind, shape = column.type, []
    chunk = column.combine_chunks()
    if isinstance(chunk, pa.ChunkedArray):
        chunk = pa.concat_arrays(chunk.chunks) if chunk.num_chunks else pa.array([], kind)
    count = len(chunk)
    while pa.types.is_nested(kind):
        if not (pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind)):
            raise QueryError(f"{text!r} is of type {kind}, which a field cannot have")
        _check_there(chunk, ids, text)
        lengths = np.unique(pa.compute.list_value_length(chunk).to_numpy(zero_copy_only=False))
        if lengths.size > 1:
            raise QueryError(f"{text!r} has lists of {lengths.size} lengths", hint="use lists of one length")
        shape.append(int(lengths[0]) if lengths.size else 0)
        chunk, kind = chunk.flatten(), kind.value_type
    _check_there(chunk, ids, text)
    if pa.types.is_decimal(kind):
        chunk = chunk.cast(pa.float64())
    elif not (pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        raise QueryError(f"{text!r} is of type {kind}, which a field cannot have", hint="cast it to a number")
    values: Array = chunk.to_numpy(zero_copy_only=False)
    return values.reshape(count, *shape)


def _check_there(chunk: Any, ids: IntArray, text: str) -> None:
    if chunk.null_count:
        at = int(np.argmax(chunk.is_null().to_numpy(zero_copy_only=False))) * ids.size // max(1, len(chunk))
        raise QueryError(
            f"{text!r} is NULL for the row with id {ids[at]}", hint="write coalesce(..., a value)"
        )


_FACT_KINDS = {
    "episode_id": pa.int64(),
    "source": pa.string(),
    "trajectory_id": pa.int64(),
    "start_time": pa.timestamp("us"),
    "end_time": pa.timestamp("us"),
    "length": pa.int64(),
    "return": pa.float64(),
    "status": pa.string(),
    "split": pa.string(),
    "selections": pa.list_(pa.string()),
    "info": pa.string(),
}


def table_of_facts(names: Sequence[str], entries: Sequence[LogEntry], more: Any) -> Any:
    """Return columns of the relation `episodes` for some episodes, as an Arrow table.

    Args:
        names: Names of the columns; `source` is not one of them.
        entries: The current log entries of episodes.
        more: The same columns for further episodes as an Arrow table, or None.
    """
    read: dict[str, Callable[[LogEntry], Any]] = {
        "episode_id": lambda entry: entry.episode,
        "trajectory_id": lambda entry: entry.trajectory,
        "start_time": lambda entry: entry.start,
        "end_time": lambda entry: None if entry.status == OPEN else entry.end,
        "length": lambda entry: entry.length,
        "return": lambda entry: entry.ret,
        "status": lambda entry: STATUS[entry.status],
        "split": lambda entry: split_of(entry.text),
        "selections": lambda entry: selections_of(entry.text),
        "info": lambda entry: entry.text or None,
    }
    table = pa.table({name: pa.array(map(read[name], entries), _FACT_KINDS[name]) for name in names})
    return table if more is None else pa.concat_tables([table, more.cast(table.schema)])


def _with_episodes(facts: Sequence[str]) -> str:
    members = ", ".join(
        f"{quote(name)} := __facts.{quote(name)}{'::JSON' if name == 'info' else ''}" for name in facts
    )
    return (
        f"(SELECT t.*, struct_pack({members}) AS episode FROM transitions AS t "
        "LEFT JOIN __facts ON __facts.episode_id = t._episode) AS transitions"
    )


def _operands(tree: dict[str, Any]) -> Iterator[tuple[Path, int]]:
    """Yield each column that is an argument of a function or operator, and its number of subscripts."""
    for node in _nodes(tree):
        for operand in node["children"] if node["class"] == "FUNCTION" else ():
            subscripts = 0
            while operand["type"] == "ARRAY_EXTRACT":
                operand, subscripts = operand["children"][0], subscripts + 1
            if operand["class"] == "COLUMN_REF":
                yield tuple(operand["column_names"]), subscripts


def _meet(name: Path, path: Path) -> bool:
    """Return whether one of two paths is a prefix of the other."""
    return all(a == b for a, b in zip(name, path, strict=False))


def _build_group_error(text: str, name: str) -> QueryError:
    return QueryError(
        f"{text} names {name} of a group, and only GroupSampler knows groups",
        hint=f'use expstore.GroupSampler(where="{name} ..."), or a column of episode',
    )


def _refusal(text: str, reason: str) -> QueryError:
    return QueryError(
        f"{text!r} cannot select rows: {reason}",
        hint="use one expression over a row's fields and its episode, without subqueries or aggregates",
    )


# -- parsing with DuckDB's own parser --------------------------------------------------------------


def _read(cursor: duckdb.DuckDBPyConnection, option: str, text: str) -> set[Path]:
    """Return the columns that an expression names, lower case.

    Raises:
        QueryError: The text is not a single expression over a row and its episode.
    """
    if not isinstance(text, str):
        raise ArgumentError(f"{option} must be a string of SQL, got {text!r}")
    bare = _parse_only_expression(cursor, text)
    paths: set[Path] = set()
    called: set[str] = set()
    for node in _nodes(bare):
        kind = node["class"]
        if kind not in _PARTS:
            raise _refusal(text, f"{_REFUSED.get(kind, kind.lower())} is not allowed")
        if kind == "COLUMN_REF":
            path = tuple(part.lower() for part in node["column_names"])
            paths.add(path[1:] if path[0] == "transitions" and len(path) > 1 else path)
        elif kind == "FUNCTION":
            called.add(node["function_name"].lower())
    _check_functions(cursor, text, called)
    for path in paths:
        _check_path(text, path)
    return paths


def parse_expression(text: str) -> dict[str, Any]:
    """Return the tree of one SQL expression as DuckDB's `json_serialize_sql` writes it; nothing is executed.

    Raises:
        QueryError: The text is not a single expression, or is nested too deeply.
    """
    with duckdb.connect(":memory:", config={**CONFIG, "threads": "1"}) as con:
        return _parse_only_expression(con, text)


def _parse_only_expression(cursor: duckdb.DuckDBPyConnection, text: str) -> dict[str, Any]:
    """Return the tree of a text that is one expression both alone and within brackets, as queries use it."""
    if "\0" in text:
        raise _refusal(text, "it contains a NUL character")
    bare, _ = _parse(cursor, text, f"SELECT {text}\n"), _parse(cursor, text, f"SELECT ({text}\n)")
    return bare


def _parse(cursor: duckdb.DuckDBPyConnection, text: str, sql: str) -> dict[str, Any]:
    """Return the tree of the only expression in a SELECT without any other clause."""
    try:
        (answer,) = cursor.execute("SELECT json_serialize_sql(?)", [sql]).fetchall()[0]
        tree = json.loads(answer)
    except RecursionError as exc:
        raise QueryError("the expression is nested too deeply") from exc
    except ValueError as exc:  # DuckDB writes integers beyond its largest type as invalid JSON
        raise QueryError(f"{text!r} has a number that DuckDB cannot read") from exc
    if tree["error"]:
        why = tree["error_message"]
        if tree["error_type"] == "not implemented" or why.startswith("SELECT clause"):
            # DuckDB explains the SELECT around the text, not the text.
            raise _refusal(text, "it is not one SQL expression")
        if named := _GROUP_COLUMN.search(text):
            raise _build_group_error(repr(text), named[1])
        raise QueryError(f"{text!r} is not an SQL expression: {why}")
    statements = tree["statements"]
    if len(statements) != 1:
        raise _refusal(text, f"it contains {len(statements)} statements")
    found: dict[str, Any] = statements[0]["node"]
    more = ("modifiers", "where_clause", "group_expressions", "having", "qualify", "sample")
    nothing_else = (
        found["type"] == "SELECT_NODE"
        and not any(found[name] for name in more)
        and not found["cte_map"]["map"]
        and found["from_table"]["type"] == "EMPTY"
    )
    selected = found.get("select_list", [])
    if not nothing_else or len(selected) != 1 or selected[0]["alias"]:
        raise _refusal(text, "it is more than one expression")
    only: dict[str, Any] = selected[0]
    return only


def _nodes(tree: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield all nodes of an expression, starting with the expression itself."""
    waiting: list[Any] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            if "class" in node:
                yield node
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node


def _check_functions(cursor: duckdb.DuckDBPyConnection, text: str, called: set[str]) -> None:
    """Raise QueryError unless all functions are deterministic and use only their arguments."""
    waiting, seen = set(called), set(called)
    while waiting:
        known = cursor.execute(
            "SELECT function_name, function_type, stability, macro_definition FROM duckdb_functions() "
            "WHERE list_contains(?, function_name)",
            [sorted(waiting)],
        ).fetchall()
        waiting = set()
        for name, kind, stability, body in known:
            if kind not in ("scalar", "macro"):
                what = {"aggregate": "an aggregate", "window": "a window function"}.get(kind, "a table")
                raise _refusal(text, f"{name}() is {what}")
            if kind == "scalar" and stability != "CONSISTENT":
                raise _refusal(text, f"{name}() can return different values for the same row")
            if kind == "macro":
                for node in _nodes(_parse(cursor, text, f"SELECT {body}")):
                    if node["class"] not in _PARTS:
                        raise _refusal(text, f"{name}() uses more than its arguments")
                    if node["class"] == "COLUMN_REF" and node["column_names"][-1].lower() in _MOMENT:
                        raise _refusal(text, f"{name}() can return different values for the same row")
                    if node["class"] == "FUNCTION":
                        waiting.add(node["function_name"].lower())
        waiting -= seen
        seen |= waiting


def _check_path(text: str, path: Path) -> None:
    for name, reason in _FLEETING.items():
        if path[: len(name)] == name:
            raise QueryError(f"{text!r} cannot use {key_name(name)}: {reason}")
    if path[0] == "episode" and (len(path) == 1 or path[1] not in FACTS):
        facts = ", ".join(f"episode.{name}" for name in FACTS)
        raise QueryError(
            f"{text!r} names {key_name(path)}, which is not a column of episodes", hint=f"there are {facts}"
        )
