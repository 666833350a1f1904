"""The result of an SQL query: a table in memory, with methods to convert it to other formats.

Returned by the index. It holds no connection, no file and no view into the store, so later changes of the
store do not affect it.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from os import PathLike
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from expstore.disk.local_path import local_path
from expstore.errors import StorageError

__all__ = ["Result"]

_PREVIEW_ROWS = 10
_WIDTH = 100
_CELL = 28
_ITEMS = 3


class Result:
    """The rows of one query.

    Args:
        table: The rows as an Arrow table.

    Example:
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
        names = [_elide(name) for name in self.columns]
        rows = [
            [_elide(_short(value)) for value in row] for row in _tuples(self._table.slice(0, _PREVIEW_ROWS))
        ]
        widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
        fitting = max(1, sum(sum(widths[: k + 1]) + 2 * k <= _WIDTH for k in range(len(widths))))
        lines = ["  ".join(map(str.ljust, row[:fitting], widths)).rstrip() for row in (names, *rows)]
        more = [f"{len(self)} rows"] if len(self) > _PREVIEW_ROWS else []
        if fitting < len(names):
            more.append(
                f"{len(names) - fitting} more columns: {_elide(', '.join(self.columns[fitting:]), _WIDTH)}"
            )
        return "\n".join(lines + ["... " + ", ".join(more)] * bool(more))


def _tuples(table: pa.Table) -> list[tuple[Any, ...]]:
    # Not Table.to_pylist: its rows are dicts, which lose columns of the same name.
    return list(zip(*(column.to_pylist() for column in table.columns), strict=True))


def _plain_integers(table: pa.Table) -> pa.Table:
    """Convert the 128-bit integers of sum() and count() to int64 where the values fit."""
    for place, field in enumerate(table.schema):
        if pa.types.is_decimal128(field.type) and field.type.precision == 38 and field.type.scale == 0:
            try:
                column = table.column(place).cast(pa.int64())
            except pa.ArrowInvalid:
                continue
            table = table.set_column(place, field.name, column)
    return table


def _short(value: Any) -> str:
    """Format a value; long lists are shortened to the first items and the length."""
    if isinstance(value, list):
        inside = ", ".join(_short(item) for item in value[:_ITEMS])
        return f"[{inside}, ... {len(value)}]" if len(value) > _ITEMS else f"[{inside}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_short(item)}" for name, item in list(value.items())[:_ITEMS]) + "}"
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value).replace("\n", " ")


def _elide(text: str, width: int = _CELL) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."
