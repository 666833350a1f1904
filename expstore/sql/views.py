"""The relations that SQL sees of a running store: columns in memory under the names of the fields.

Passed by storages to the index, which creates these views on the cursor of one query. Nothing is copied,
and no file is read.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import duckdb
import numpy as np
import pyarrow as pa

from expstore.core.arguments import check_whole
from expstore.core.values import Array, IntArray, Key, Window
from expstore.errors import ArgumentError, CorruptionError, ExpStoreError, QueryError
from expstore.schema.schema import OBJECT
from expstore.sql.arrow_values import SqlValues
from expstore.sql.projection import find_members

if TYPE_CHECKING:
    from expstore.sql.arrow_dataset import Packed

#: The row columns of `transitions`, in their order, with their Arrow types.
ROW_COLUMNS: dict[str, pa.DataType] = {
    "_id": pa.int64(),
    "_index": pa.int64(),
    "_episode": pa.int64(),
    "_step": pa.int64(),
    "_time": pa.timestamp("us"),
    "_priority": pa.float32(),
    "_sampled": pa.uint32(),
}
#: Row columns that exist only in some stores.
_OPTIONAL = {"_sampled"}

# The Arrow table below the views. Fields cannot have this name: none begins with two underscores.
_TABLE = "__columns"
#: The relation of what consumers have drawn.
DRAWS = pa.schema(
    {
        "consumer": pa.string(),
        "draw": pa.int64(),
        "place": pa.int64(),
        "id": pa.int64(),
        "weight": pa.float64(),
        "time": pa.timestamp("us"),
    }
)
#: The relation `annotations`.
ANNOTATIONS = pa.schema(
    {
        "id": pa.int64(),
        "field": pa.string(),
        "value": pa.large_list(pa.float64()),
        "author": pa.string(),
        "time": pa.timestamp("us"),
        "number": pa.int64(),
    }
)
#: The relation `lineage`.
LINEAGE = pa.schema(
    {
        "number": pa.int64(),
        "kind": pa.string(),
        "time": pa.timestamp("us"),
        "first_id": pa.int64(),
        "last_id": pa.int64(),
        "rows": pa.int64(),
        "store": pa.string(),
        "session": pa.string(),
        "program": pa.string(),
        "git_commit": pa.string(),
        "dirty": pa.bool_(),
        "source": pa.string(),
        "facts": pa.string(),
    }
)
#: The relation `groups`.
GROUPS = pa.schema(
    {
        "group_id": pa.int64(),
        "key": pa.string(),
        "split": pa.string(),
        "status": pa.string(),
        "reason": pa.string(),
        "size": pa.int64(),
        "members": pa.list_(pa.int64()),
        "ended": pa.int64(),
        "length": pa.int64(),
        "mean_return": pa.float64(),
        "std_return": pa.float64(),
        "min_version": pa.int64(),
        "max_version": pa.int64(),
        "start_time": pa.timestamp("us"),
        "end_time": pa.timestamp("us"),
    }
)
#: Text of statements that may read the values in `annotations`, in lower case.
_MAY_READ_VALUES = re.compile(r"value|(?<!count\()\*|^\s*from|\(\s*from|columns|u&")
_HALF = {"float16", "bfloat16"}
#: Text of statements that may read rows, in lower case: it contains a relation's name, something that can
#: spell a name in another way, or something that lists relations. Creating the views takes up to 2 ms. If
#: another statement hides a name, DuckDB does not find the relation.
MAY_READ_ROWS = re.compile(
    "transitions|recent|priorities|query|show|desc|summar|schema|duckdb_|pragma|sqlite|pg_|u&"
)
#: The type and the error of a column that cannot be read.
_Lost = tuple[pa.DataType, CorruptionError]
#: Field dtype -> (dtype under which DuckDB sees the bytes, DuckDB's name of the type, values per item).
_SQL_TYPES: dict[str, tuple[str, str, int]] = {
    "bool": ("u1", "BOOLEAN", 1),
    "uint8": ("u1", "UTINYINT", 1),
    "int8": ("i1", "TINYINT", 1),
    "int16": ("<i2", "SMALLINT", 1),
    "int32": ("<i4", "INTEGER", 1),
    "int64": ("<i8", "BIGINT", 1),
    "uint16": ("<u2", "USMALLINT", 1),
    "uint32": ("<u4", "UINTEGER", 1),
    "uint64": ("<u8", "UBIGINT", 1),
    "float16": ("<u2", "FLOAT", 1),
    "bfloat16": ("<u2", "FLOAT", 1),
    "float32": ("<f4", "FLOAT", 1),
    "float64": ("<f8", "DOUBLE", 1),
    "complex64": ("<f4", "FLOAT", 2),
    OBJECT: ("O", "VARCHAR", 1),
}


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the readable rows.

    Args:
        key: Path of the field, or a row column such as `("_id",)`.
        dtype: Dtype of the field as in the schema.
        shape: Shape of one row's value.
        parts: Consecutive views, each C-contiguous of shape `(n, *shape)`; together all rows, in the same
            order in every column. bfloat16 is given as uint16 bits; objects are shown as text.
        fault: The error of a damaged column, which has no parts; queries that need the column raise it.
        take: For a column that cannot be viewed and has no parts: a function that copies rows, given their
            numbers, in the order of the numbers.
        arrow: For a variable-length field: the text of its Arrow type, as in `Field.arrow`. `parts` and the
            result of `take` are then pyarrow Arrays.
        gather: For a column that is assembled when a query names it, and has no parts yet: a function that
            returns its parts.
    """

    key: Key
    dtype: str
    shape: tuple[int, ...]
    parts: Sequence[Array]
    fault: CorruptionError | None = None
    take: Callable[[IntArray], Any] | None = None
    arrow: str = ""
    gather: Callable[[], Sequence[Array]] | None = None

    def gather_parts(self) -> Column:
        """Return the column with its parts assembled, or with the error if they cannot be read."""
        if self.gather is None:
            return self
        try:
            return dataclasses.replace(self, parts=self.gather())
        except CorruptionError as exc:
            return dataclasses.replace(self, fault=exc)


@dataclass(frozen=True, slots=True)
class Relations:
    """The data that one query sees in addition to the tables of the index.

    Args:
        columns: Row columns and fields. Empty if the rows cannot be read (the index of a closed store): then
            `transitions` has no rows and `priorities` is the table written last.
        window: The readable ids, to which `fragments` is cut; None: those of the last commit.
        capacity: Capacity of the ring; `_index` is computed from it if it is not a column. None: unbounded.
        tops: Names of the first parts of the fields' keys, as `call_tops` returns them for all fields; None:
            computed from the fields in `columns`.
        recent: The newest id that is not in `recent`.
        rows: The row columns that `columns` begins with; needed if a field that follows has the name of a row
            column. None: every column with such a name is a row column.
        draws: Reads the relation `draws`; None: it has no rows.
        lineage: Reads the relation `lineage`; None: it has no rows.
        groups: The relation `groups`; None: it has no rows.
        annotations: Reads the relation `annotations`, with its values or not; None: it has no rows.
    """

    columns: Sequence[Column] = ()
    window: Window | None = None
    capacity: int | None = None
    tops: Mapping[str, str] | None = None
    rows: Collection[str] | None = None
    recent: int = 0
    draws: Callable[[], pa.Table] | None = None
    lineage: Callable[[], pa.Table] | None = None
    groups: pa.Table | None = None
    annotations: Callable[..., pa.Table] | None = None

    def attach(self, cursor: duckdb.DuckDBPyConnection, sql: str) -> list[ExpStoreError]:
        """Create the views that `sql` needs, on this cursor only; they last until it is closed.

        Returns:
            A list to which errors are appended while the query reads columns.

        Raises:
            CorruptionError: No column can be read.
        """
        text = sql.lower()
        if self.window is not None and "fragments" in text:
            cursor.execute(_FRAGMENTS.format(low=int(self.window.low), high=int(self.window.last)))
        if "draws" in text:
            cursor.register("draws", DRAWS.empty_table() if self.draws is None else self.draws())
        if "lineage" in text:
            found = LINEAGE.empty_table() if self.lineage is None else self.lineage()
            cursor.register("__lineage", found)
            cursor.execute(
                "CREATE TEMP VIEW lineage AS SELECT * REPLACE (facts::JSON AS facts) FROM __lineage"
            )
        if "groups" in text:
            cursor.register("groups", GROUPS.empty_table() if self.groups is None else self.groups)
        if "annotations" in text:
            found = ANNOTATIONS.empty_table()
            if self.annotations is not None:
                found = self.annotations(values=bool(_MAY_READ_VALUES.search(text)))
            cursor.register("annotations", found)
        refused: list[ExpStoreError] = []
        if MAY_READ_ROWS.search(text):
            visible = self._show(cursor, sql, refused)
            cursor.execute(f"CREATE TEMP VIEW transitions AS {visible}")
            if "recent" in text:
                cursor.execute(f"CREATE TEMP VIEW recent AS FROM transitions WHERE _id > {int(self.recent)}")
            if self.columns and "priorities" in text:
                cursor.execute(
                    f"CREATE TEMP VIEW priorities AS SELECT _id AS id, _priority AS priority FROM {_TABLE}"
                )
        return refused

    def column_names(self) -> dict[str, list[str]]:
        """Return all dotted column names of relations whose views have only the columns a query names."""
        row, fields, lost = self._split()
        taken = [name for name in ROW_COLUMNS if name in {*row, *lost} or name not in _OPTIONAL]
        tops = call_tops((column.key for column in fields), taken) if self.tops is None else self.tops
        names = [*(".".join((tops[column.key[0]], *column.key[1:])) for column in fields), *taken]
        return {"transitions": names, "recent": names}

    def _show(self, cursor: duckdb.DuckDBPyConnection, sql: str, refused: list[ExpStoreError]) -> str:
        """Register the columns that `sql` needs, on this cursor only; return the SELECT that reads them.

        Args:
            cursor: The query's cursor.
            sql: The statement.
            refused: A list to which errors of columns are appended while they are read.

        Raises:
            CorruptionError: No column can be read.
        """
        row, fields, lost = self._split()
        names = [name for name in ROW_COLUMNS if name in {*row, *lost} or name not in _OPTIONAL]
        tops = call_tops((column.key for column in fields), names) if self.tops is None else self.tops
        items = [_Item(f"c{place}", column) for place, column in enumerate(fields)]
        items = _drop_unnamed(items, tops, cursor, sql)
        for item in items:
            item.column = item.column.gather_parts()
        stored = [item for item in items if item.stored]
        lost |= {item.name: (item.arrow_kind(), item.column.fault) for item in stored if item.column.fault}
        texts = {item.name: item.column.parts for item in stored if item.column.dtype == OBJECT}
        packed = {item.name: item.to_packed() for item in stored if item.column.take is not None}
        data = {item.name: item.data() for item in stored if item.name not in {*lost, *texts, *packed}}
        if lost and not row and not data:
            raise next(fault for _, fault in lost.values())
        rows = max(map(len, (*row.values(), *data.values())), default=0)
        known = {*row, *lost}
        missing = {name: pa.nulls(rows, ROW_COLUMNS[name]) for name in names if name not in known}
        index = "_index" if "_index" in known else f"(_id - 1){_modulo(self.capacity)} AS _index"
        raw = pa.table(row | missing | data)
        half = {
            item.name: item.column.dtype
            for item in stored
            if item.column.dtype in _HALF and item.loose is None and item.name in {*data, *packed}
        }
        if half or lost or texts or packed:
            # Imported here, because it loads pyarrow.dataset, and with it pandas: 0.2 s.
            from expstore.sql.arrow_dataset import ViewDataset

            raw = ViewDataset(raw, half, lost, texts, packed, refused)
        cursor.register(_TABLE, raw)
        return f"SELECT {_select(items, names, index, tops)} FROM {_TABLE}"

    def _split(self) -> tuple[dict[str, pa.ChunkedArray], list[Column], dict[str, _Lost]]:
        """Split the columns into row columns, fields (which may share a name) and damaged row columns."""
        row: dict[str, pa.ChunkedArray] = {}
        fields: list[Column] = []
        lost: dict[str, _Lost] = {}
        own = ROW_COLUMNS if self.rows is None else self.rows
        for column in self.columns:
            name = column.key[0]
            if len(column.key) != 1 or name not in own or name in row or name in lost:
                fields.append(column)
                continue
            column = column.gather_parts()
            if column.fault is not None:
                lost[name] = ROW_COLUMNS[name], column.fault
            else:
                row[name] = _arrow(column.parts, ROW_COLUMNS[name], ())
        return row, fields, lost


class _Item:
    """One field: its column in the registered table, and the SQL expression that returns it."""

    def __init__(self, name: str, column: Column) -> None:
        self.name = name
        self.column = column
        self.shape: tuple[int, ...] = ()
        self.stored = True
        self.loose = SqlValues(column.arrow) if column.arrow else None
        if self.loose is not None:
            return
        visible, self.kind, width = _SQL_TYPES[column.dtype]
        self.dtype = np.dtype(visible)
        self.shape = () if column.shape == (1,) else column.shape
        if width > 1:
            self.shape += (width,)
        # DuckDB has no arrays of length 0: such a field becomes an empty list.
        self.stored = 0 not in self.shape

    def data(self) -> pa.ChunkedArray:
        """Return the column as Arrow, without a copy if DuckDB supports its type."""
        if self.loose is not None:
            return pa.chunked_array(map(self.loose.of, self.column.parts), self.loose.kind)
        parts = [np.ascontiguousarray(part).reshape(-1).view(self.dtype) for part in self.column.parts]
        return _arrow(parts, pa.from_numpy_dtype(self.dtype), self.shape)

    def to_packed(self) -> Packed:
        """Return how to read rows of the column as Arrow."""
        from expstore.sql.arrow_dataset import Packed

        if self.loose is not None:
            return Packed(".".join(self.column.key), self.loose.kind, self._take)
        kind: pa.DataType = pa.from_numpy_dtype(self.dtype)
        for size in reversed(self.shape):
            kind = pa.list_(kind, size)
        return Packed(".".join(self.column.key), kind, self._take)

    def _take(self, numbers: IntArray) -> pa.ChunkedArray:
        rows = () if self.column.take is None else (self.column.take(numbers),)
        if self.loose is not None:
            return pa.chunked_array(map(self.loose.of, rows), self.loose.kind)
        parts = [np.ascontiguousarray(part).reshape(-1).view(self.dtype) for part in rows]
        return _arrow(parts, pa.from_numpy_dtype(self.dtype), self.shape)

    def arrow_kind(self) -> pa.DataType:
        """Return the Arrow type that DuckDB sees."""
        if self.loose is not None:
            return self.loose.kind
        kind = pa.float32() if self.column.dtype in _HALF else pa.from_numpy_dtype(self.dtype)
        for size in reversed(self.shape):
            kind = pa.list_(kind, size)
        return kind

    def expression(self) -> str:
        """Return the SQL expression for the column."""
        if not self.stored:
            return f"[]::{self.kind}[]"
        if self.column.dtype == "bool" and self.loose is None:
            return f"{self.name}::{self.kind}" + "".join(f"[{size}]" for size in reversed(self.shape))
        return self.name


def _drop_unnamed(
    items: Sequence[_Item], tops: Mapping[str, str], cursor: duckdb.DuckDBPyConnection, sql: str
) -> list[_Item]:
    """Remove the items that a statement does not name, of packed struct members and of assembled columns."""
    members = {
        item.name: (tops[item.column.key[0]], *item.column.key[1:])
        for item in items
        if item.column.gather is not None or (item.column.take is not None and len(item.column.key) > 1)
    }
    named = find_members(cursor, sql, members.values()) if members else set()
    return [item for item in items if item.name not in members or members[item.name] in named]


def _arrow(parts: Sequence[Array], kind: pa.DataType, shape: tuple[int, ...]) -> pa.ChunkedArray:
    """Convert arrays to one Arrow column of nested lists of `shape`, without copying."""
    arrays = []
    for part in parts:
        flat = np.ascontiguousarray(part).reshape(-1)
        array = pa.Array.from_buffers(kind, len(flat), [None, pa.py_buffer(flat)])
        for size in reversed(shape):
            array = pa.FixedSizeListArray.from_arrays(array, size)
        arrays.append(array)
    for size in reversed(shape):
        kind = pa.list_(kind, size)
    return pa.chunked_array(arrays, type=kind)


def _modulo(capacity: int | None) -> str:
    return "" if capacity is None else f" % {int(capacity)}"


def call_tops(keys: Iterable[Key], taken: Iterable[str]) -> dict[str, str]:
    """Return a unique SQL name for the first part of each key, different from the names in `taken`.

    >>> from expstore.sql.views import call_tops
    >>> call_tops([("a",), ("A",), ("next", "a"), ("next", "b"), ("_id",)], ["_id"])
    {'a': 'a', 'A': 'A_', 'next': 'next', '_id': '_id_'}
    """
    used = {name.lower() for name in taken}
    tops: dict[str, str] = {}
    for top in dict.fromkeys(key[0] for key in keys):
        name = top
        while name.lower() in used:
            name += "_"
        used.add(name.lower())
        tops[top] = name
    return tops


def _select(items: Sequence[_Item], names: Sequence[str], index: str, tops: Mapping[str, str]) -> str:
    """Return the SELECT list: first the row columns, then the fields, with nested keys as structs."""
    tree: dict[str, Any] = {}
    for item in items:
        branch = tree
        for part in item.column.key[:-1]:
            branch = branch.setdefault(part, {})
        branch[item.column.key[-1]] = item.expression()
    visible = [index if name == "_index" else name for name in names]
    return ", ".join([*visible, *(f"{_struct(value)} AS {quote(tops[top])}" for top, value in tree.items())])


def _struct(value: str | dict[str, Any]) -> str:
    # DuckDB reads all members of a struct, even if a query names only one.
    if isinstance(value, str):
        return value
    members = ", ".join(f"{quote(name)} := {_struct(member)}" for name, member in value.items())
    return f"struct_pack({members})"


def quote(name: str) -> str:
    """Return a name as an identifier in SQL.

    >>> from expstore.sql.views import quote
    >>> print(quote('the "b" field'))
    "the ""b"" field"
    """
    return '"' + name.replace('"', '""') + '"'


def select_rows(relation: str, id: str, where: str | None, order_by: str | None, limit: int | None) -> str:
    """Return the query for some rows of a relation that has a column with ids.

    Raises:
        QueryError: `where` is not a single expression, or `order_by` is not a list of expressions.
        ArgumentError: A condition is not a string; the limit is negative, or not an integer.
    """
    # Each part is on its own line, so that a comment at its end hides nothing.
    parts = [f"SELECT * FROM {relation}"]
    if where is not None:
        _parse("where", where, where, "one SQL expression, as after WHERE")
        parts += ["WHERE (", where, ")"]
    if order_by is not None:
        _parse("order_by", order_by, f"first(0 ORDER BY {order_by}\n)", "SQL expressions, as after ORDER BY")
        parts += ["ORDER BY", order_by, f", {id}"]
    else:
        parts.append(f"ORDER BY {id}")
    if limit is not None:
        count = check_whole("limit", limit)
        if count < 0:
            raise ArgumentError(f"limit must be at least 0, got {count}")
        parts.append(f"LIMIT {count}")
    return "\n".join(parts)


#: Return the query for some of the episodes.
select_episodes = partial(select_rows, "episodes", "episode_id")


def _parse(name: str, given: str, expression: str, expected: str) -> None:
    if not isinstance(given, str):
        raise ArgumentError(f"{name} must be a string of SQL, got {given!r}", hint=f"give {expected}")
    try:
        duckdb.SQLExpression(expression)
    except duckdb.Error as exc:
        reason = str(exc).strip().splitlines()[0]
        raise QueryError(f"{name}={given!r} cannot be used: {reason}", hint=f"give {expected}") from exc


# The same as the view of this name in the index, but cut to the ids that this query sees.
_FRAGMENTS = """
CREATE TEMP VIEW fragments AS
WITH clipped AS (
    SELECT *,
        CASE WHEN {low} < first_id THEN 0 ELSE ({low} - first_id) // greatest(stride, 1) + 1 END AS head,
        CASE WHEN {high} >= last_id THEN 0 ELSE (last_id - {high} - 1) // greatest(stride, 1) + 1 END AS tail
    FROM fragment_rows
)
SELECT
    episode_id,
    first_step + head AS first_step,
    length - head - tail AS length,
    first_id + head * stride AS first_id,
    greatest(stride, 1) AS stride
FROM clipped
WHERE length > head + tail
"""
