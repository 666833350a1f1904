"""The output of the command line: tables, CSV, JSON and progress.

Used by `expstore.cli.app`. Tables are for people and shorten long values; CSV and JSON keep every value.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any

import typer

from expstore.core.tables import printable, size_text
from expstore.core.values import to_finite
from expstore.errors import QueryError

if TYPE_CHECKING:
    from expstore.sql.result import Result

#: The option of commands that print JSON.
Json = Annotated[bool, typer.Option("--json", help="Print JSON; NaN and infinities are null.")]
CELL = 60
LIST_ITEMS = 3
BATCH_ROWS = 10_000


def rows_of(result: Result) -> Iterator[tuple[Any, ...]]:
    """Yield the rows as Python values, converted batch by batch.

    Raises:
        QueryError: Python cannot represent a date, such as 'infinity'.
    """
    for start in range(0, len(result), BATCH_ROWS):
        try:
            rows = type(result)(result.arrow().slice(start, BATCH_ROWS)).fetchall()
        except (OverflowError, ValueError) as exc:
            raise QueryError(f"the result cannot be printed: {exc}", hint="cast dates to VARCHAR") from exc
        yield from rows


def print_json(value: object) -> None:
    """Print one JSON value; NaN and infinities become null."""
    typer.echo(json.dumps(_plain(value), indent=1))


def print_rows(result: Result) -> None:
    """Print rows as a JSON array of objects, one per line."""
    names: list[str] = []
    for name in result.columns:  # an object has only one value per name
        while name in names:
            name += "_"
        names.append(name)
    before = "["
    for row in rows_of(result):
        values = dict(zip(names, map(_plain, row), strict=True))
        typer.echo(f"{before}\n{json.dumps(values)}", nl=False)
        before = ","
    typer.echo("[]" if before == "[" else "\n]")


def print_csv(result: Result) -> None:
    """Print rows as CSV with a header."""
    typer.echo(",".join(map(_csv_cell, result.columns)))
    for row in rows_of(result):
        typer.echo(",".join(map(_csv_cell, row)))


def _plain(value: Any) -> Any:
    """Convert a value for JSON; NaN and infinities become null, as in answers of a server."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return to_finite(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, Decimal) and value.as_tuple().exponent == 0:
        return int(value)
    return value.hex() if isinstance(value, bytes) else str(value)


def _csv_cell(value: Any) -> str:
    """Format a value for CSV; NULL is empty, an empty text is quoted."""
    if value is None:
        return ""
    if isinstance(value, str):
        plain = value and not any(mark in value for mark in ',"\n\r')
        return value if plain else '"' + value.replace('"', '""') + '"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple | dict):
        return _csv_cell(json.dumps(_plain(value)))
    return value.hex() if isinstance(value, bytes) else str(value)


def _cell(value: Any) -> str:
    """Format a value so that it fits in a table."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        items = [_cell(item) for item in value[:LIST_ITEMS]]
        text = ", ".join([*items, f"... {len(value)}"] if len(value) > LIST_ITEMS else items)
        return _elide(f"[{text}]")
    if isinstance(value, dict):
        return _elide("{" + ", ".join(f"{name}: {_cell(item)}" for name, item in value.items()) + "}")
    return "NULL" if value is None else _elide(str(value))


def _elide(text: str) -> str:
    """Cut a text to the width of a cell, without the control characters that a terminal would obey."""
    text = printable(text[: CELL + 1])
    return text if len(text) <= CELL else text[: CELL - 3] + "..."


def print_versions(
    found: Sequence[Any], facts: Sequence[dict[str, Any]], sizes: Mapping[str, str], *, as_json: bool
) -> None:
    """Print versions, as JSON or as a table.

    Args:
        found: The versions, of a folder or of an object storage.
        facts: For JSON, all facts of each.
        sizes: Columns with sizes: title -> name of the attribute, in bytes.
        as_json: Whether to print JSON.
    """
    if as_json:
        print_json({"versions": list(facts)})
        return
    rows = [
        (
            version.number, version.tag or "", local_text(iso_text(version.time)),
            f"{version.rows:,}", f"{version.episodes:,}",
            *(size_text(getattr(version, name)) for name in sizes.values()),
        )
        for version in found
    ]  # fmt: skip
    print_table(["version", "tag", "made", "rows", "episodes", *sizes], rows)


def print_table(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table, as wide as the terminal; without a terminal as plain text.

    Args:
        names: Names of the columns.
        rows: Rows with one value per column.
    """
    head = [_elide(name) for name in names]
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    numeric = [
        all(value is None or isinstance(value, int | float) for value in column)
        for column in zip(*rows, strict=True)
    ] or [False] * len(head)
    if sys.stdout.isatty():
        _print_rich(head, cells, widths, numeric)
        return
    for line in (head, *cells):
        texts = [
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(line, widths, numeric, strict=True)
        ]
        typer.echo("  ".join(texts).rstrip())


def _print_rich(
    head: Sequence[str], cells: Sequence[Sequence[str]], widths: Sequence[int], numeric: Sequence[bool]
) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    fitting = max(1, sum(sum(widths[: k + 1]) + 3 * k + 2 <= console.width for k in range(len(widths))))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name, right in zip(head[:fitting], numeric, strict=False):
        table.add_column(Text(name), justify="right" if right else "left", no_wrap=True)
    for line in cells:
        table.add_row(*(Text(text, style="dim" if text == "NULL" else "") for text in line[:fitting]))
    console.print(table)
    if fitting < len(head):
        typer.echo(f"too narrow for {', '.join(head[fitting:])}; name the columns you want", err=True)


def iso_text(seconds: float | None) -> str | None:
    """Format a time in seconds since 1970 for programs."""
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def local_text(text: str | None) -> str:
    """Format a time made by `iso_text` for people."""
    return f"{datetime.fromisoformat(text).astimezone():%Y-%m-%d %H:%M:%S}" if text else "an unknown time"


class _Notes(logging.Handler):
    """Print the library's log messages as notes."""

    def emit(self, record: logging.LogRecord) -> None:
        typer.echo(f"note: {record.getMessage()}", err=True)


@contextlib.contextmanager
def show_notes() -> Iterator[None]:
    """Print the library's log messages of level INFO and above inside the block."""
    logger, handler = logging.getLogger("expstore"), _Notes()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
