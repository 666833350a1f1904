"""The result of an SQL query: a table in memory, with methods to convert it to other formats.

Returned by the index. It holds no connection, no file and no view into the store, so later changes of the
store do not affect it.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from os import PathLike
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from expstore.core.tables import ITEMS, PREVIEW_ROWS, ListHead, Table, build_table, render_card
from expstore.disk.local_path import local_path
from expstore.errors import StorageError


class Result:
    """The rows of one query.

    Args:
        table: The rows as an Arrow table.

    Example:
        >>> import pyarrow as pa
        >>> from expstore.sql.result import Result
        >>> result = Result(pa.table({"n": [1, 2]}))
        >>> result.fetchall(), result.columns, len(result)
        ([(1,), (2,)], ['n'], 2)
    """

    def __init__(self, table: pa.Table) -> None:
        self._table = _plain_integers(table)
        self._next = 0

    @property
    def columns(self) -> list[str]:
        """Names of the columns, in order."""
        return list(self._table.column_names)

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows and number of columns."""
        return self._table.num_rows, self._table.num_columns

    def arrow(self) -> pa.Table:
        """Return the rows as a pyarrow Table."""
        return self._table

    def df(self) -> Any:
        """Return the rows as a pandas DataFrame.

        Raises:
            ImportError: pandas is not installed.
        """
        importlib.import_module("pandas")
        return self._table.to_pandas()

    def pl(self) -> Any:
        """Return the rows as a polars DataFrame.

        Raises:
            ImportError: polars is not installed.
        """
        return importlib.import_module("polars").from_arrow(self._table)

    def fetchall(self) -> list[tuple[Any, ...]]:
        """Return all rows as tuples of Python values."""
        return _tuples(self._table)

    def fetchone(self) -> tuple[Any, ...] | None:
        """Return the next row, or None after the last one."""
        rows = _tuples(self._table.slice(self._next, 1))
        self._next += len(rows)
        return rows[0] if rows else None

    def to_parquet(self, path: str | PathLike[str]) -> None:
        """Write the rows to a Parquet file; an existing file is replaced.

        Raises:
            StateError: The path is a URL.
            StorageError: The file cannot be written, or Parquet does not support a column's type.
        """
        path = local_path(path)
        try:
            pq.write_table(self._table, path)
        except (OSError, pa.ArrowException) as exc:
            raise StorageError(f"cannot write the result to {path}: {exc}") from exc

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return iter(self.fetchall())

    def __repr__(self) -> str:
        return self._preview().render_text()

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the first rows."""
        facts = [f"{self.shape[0]:,} rows", f"{self.shape[1]} columns"]
        return render_card(type(self).__name__, facts, [self._preview()])

    def _preview(self) -> Table:
        first = [column.slice(0, PREVIEW_ROWS) for column in self._table.columns]
        rows = zip(*(map(_peek, column) for column in first), strict=True)
        return build_table(self.columns, rows, total=len(self))


def build_result(rows: Sequence[Mapping[str, object]], columns: Mapping[str, str]) -> Result:
    """Return rows as a result.

    Args:
        rows: Values by column.
        columns: Names of Arrow types, such as "int64", by column.

    >>> from expstore.sql.result import build_result
    >>> build_result([{"n": 1}, {"n": None}], {"n": "int64"}).fetchall()
    [(1,), (None,)]
    """
    types = [(name, pa.type_for_alias(kind)) for name, kind in columns.items()]
    return Result(pa.Table.from_pylist(list(rows), pa.schema(types)))


def table_stream(table: pa.Table) -> pa.Buffer:
    """Return a table as a complete Arrow IPC stream that holds no bytes but those of its values.

    Under a null, DuckDB leaves what the memory held before: addresses, or values of other queries. Whoever
    receives the stream must not read them.
    """
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        for batch in table.to_batches():
            columns = [_clear_nulls(column) for column in batch.columns]
            writer.write_batch(pa.record_batch(columns, schema=batch.schema))
    return sink.getvalue()


def _clear_nulls(array: pa.Array) -> pa.Array:
    """Return an array with zeros in the slots of its nulls."""
    if not array.null_count and not array.type.num_fields:
        return array
    return array.take(pa.array(np.arange(len(array))))  # take() writes zeros for nulls, also in nested arrays


def _tuples(table: pa.Table) -> list[tuple[Any, ...]]:
    # Not Table.to_pylist: its rows are dicts, which lose columns of the same name.
    return list(zip(*map(_values, table.columns), strict=True))


def _values(column: pa.ChunkedArray) -> list[Any]:
    """Return a column as Python values; integers above 64 bits, too, are int."""
    values = column.to_pylist()
    if not _is_whole(column.type):
        return list(values)
    return [None if value is None else int(value) for value in values]


def _is_whole(kind: pa.DataType) -> bool:
    """Return whether a type is that of 128-bit integers, which Arrow does not have."""
    return bool(pa.types.is_decimal(kind) and kind.precision >= 38 and kind.scale == 0)


def widen_unsigned(table: pa.Table, kinds: Sequence[object]) -> pa.Table:
    """Return a table whose UHUGEINT columns have their values: DuckDB returns large ones as negative ones.

    Args:
        table: Rows of DuckDB.
        kinds: DuckDB's type of each column.
    """
    for place, kind in enumerate(kinds):
        values = table.column(place).to_pylist() if str(kind) == "UHUGEINT" else []
        if any(value is not None and value < 0 for value in values):
            whole = [None if value is None else Decimal(int(value) % 2**128) for value in values]
            column = pa.array(whole, pa.decimal256(39, 0))
            table = table.set_column(place, table.schema.field(place).name, column)
    return table


def _plain_integers(table: pa.Table) -> pa.Table:
    """Convert the 128-bit integers of sum() and count() to int64 where the values fit."""
    for place, field in enumerate(table.schema):
        if _is_whole(field.type):
            try:
                column = table.column(place).cast(pa.int64())
            except pa.ArrowInvalid:
                continue
            table = table.set_column(place, field.name, column)
    return table


def _peek(scalar: Any) -> Any:
    """Return a value for a preview; of a list only the first items, because images are lists, too."""
    if isinstance(scalar, pa.ListScalar) and scalar.is_valid:
        return ListHead([_peek(item) for item in scalar.values[:ITEMS]], len(scalar.values))
    if isinstance(scalar, pa.StructScalar) and scalar.is_valid:
        return {name: _peek(item) for name, item in scalar.items()}
    return scalar.as_py()
