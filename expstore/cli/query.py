"""Run SQL on stores for the command line: query one after the other, and combine the results.

Used by `expstore sql`. It opens a store as a reader while the query runs: other processes may write to it,
and nothing is changed.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import typer

from expstore.disk.files import Disk, ReadingDisk
from expstore.errors import QueryError, StorageError
from expstore.sql.result import Result
from expstore.sql.sync import Catalog
from expstore.storages.follower import FollowerStorage
from expstore.storages.snapshots.catalog import store_meant

#: Interval in seconds at which a Ctrl-C that another thread received is noticed.
_LISTEN_SECONDS = 0.1
_FIRST_WORDS = frozenset({"select", "with", "from", "values", "describe", "show", "summarize", "table"})


def check_order(paths: Sequence[Path], query: str | None) -> tuple[Sequence[Path], str]:
    """Return the stores and the query of a command line, in which the query is last.

    Raises:
        BadParameter: One of them is missing, or the query comes first.
    """
    example = 'expstore sql STORE "SELECT count(*) FROM transitions"'
    if query is None:
        raise typer.BadParameter(f"there is no store and no query; write {example}, or pass -f FILE")
    is_sql = _is_sql(query)
    misplaced = next((path for path in paths if _is_sql(str(path))), None)
    if misplaced is not None and not is_sql:
        stores = [str(path) for path in paths if path is not misplaced]
        line = " ".join(["expstore sql", *stores, query, f'"{misplaced}"'])
        raise typer.BadParameter(
            f"the query comes after the stores; write {line}"
            if not stores
            else f"{query!r} comes after the query; leave it out, or if it is a store, write {line}",
            param_hint="QUERY",
        )
    disk = Disk()
    if any(str(path).lower() in _FIRST_WORDS and not disk.exists(path) for path in paths):
        raise typer.BadParameter(f"put the query in quotes; {example}", param_hint="QUERY")
    if not paths:
        if is_sql:
            raise typer.BadParameter(
                f'there is no store; write expstore sql STORE "{query}"', param_hint="STORE"
            )
        raise typer.BadParameter(
            f'there is no query; write expstore sql {query} "SELECT count(*) FROM transitions", or pass '
            "-f FILE (-f - reads standard input)",
            param_hint="QUERY",
        )
    return paths, query


def read_query(paths: Sequence[Path], file: Path) -> tuple[Sequence[Path], str]:
    """Return the stores of a command line, and the query in a file.

    Args:
        paths: The arguments.
        file: The file; "-" is standard input.

    Raises:
        BadParameter: There is no store, an argument is a second query, or the file is missing or empty.
    """
    if not paths:
        raise typer.BadParameter(f"there is no store; write expstore sql STORE -f {file}", param_hint="STORE")
    if second := next((str(path) for path in paths if _is_sql(str(path))), None):
        raise typer.BadParameter(f"there are two queries, {second!r} and {file}: pass one of them")
    try:
        query = sys.stdin.read() if str(file) == "-" else ReadingDisk().read_whole(file).decode()
    except (StorageError, UnicodeDecodeError) as exc:
        raise typer.BadParameter(f"{file} cannot be read: {exc}", param_hint="--file") from exc
    if not query.strip():
        raise typer.BadParameter(f"{file} is empty", param_hint="--file")
    return paths, query


def _is_sql(text: str) -> bool:
    """Return whether a text is a query: a keyword and further words. A path such as `select` is not one."""
    words = text.split(maxsplit=1)
    return len(words) > 1 and words[0].strip("(").lower() in _FIRST_WORDS


def ask(paths: Sequence[Path], query: str, most: int | None) -> Result:
    """Run one SELECT on each store; with several stores a first column `store` names the store.

    Args:
        paths: The stores' folders, at least one.
        query: The statement.
        most: Number of wanted rows; more are returned if there are more. None: all.

    Raises:
        NotFoundError: There is no store.
        StateError: A writer overwrote the rows while they were read, twice.
        QueryError: It is not a single SELECT, DuckDB rejects it, or the stores return different columns.
    """
    return _union([(path, _ask(path, query, most, several=len(paths) > 1)) for path in paths])


def _ask(path: Path, query: str, most: int | None, *, several: bool) -> Result:
    with contextlib.ExitStack() as stack:
        storage = FollowerStorage(store_meant(Disk(), path))
        stack.callback(storage.close)
        catalog = Catalog(storage)
        stack.callback(catalog.drop)
        if storage.counters.recovered:
            typer.echo(f"note: {path}: {storage.counters.recovered}", err=True)
        try:
            return _ask_in_thread(lambda: _query(catalog, query, most))
        except QueryError as exc:
            if several:
                raise QueryError(f"{path}: {exc.message}", kind=exc.kind, hint=exc.hint) from exc
            raise


def _query(catalog: Catalog, query: str, most: int | None) -> Result:
    if most is not None:
        with contextlib.suppress(QueryError):  # a query with a LIMIT cannot get a second one
            return catalog.query(f"{query.rstrip().rstrip(';')}\nLIMIT {most + 1}", None)
    return catalog.query(query, None)


def _ask_in_thread(ask: Callable[[], Result]) -> Result:
    """Call `ask` in a thread: DuckDB does not always notice Ctrl-C while it works in the main thread."""
    with ThreadPoolExecutor(1) as pool:
        try:
            answer = pool.submit(ask)
            while not answer.done():
                # The system may deliver the signal to another thread, which does not wake this one.
                wait([answer], _LISTEN_SECONDS)
            return answer.result()
        except KeyboardInterrupt:
            # Python would wait for the thread; end the process as a program does that does not catch Ctrl-C.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.raise_signal(signal.SIGINT)
            raise


def _union(answers: list[tuple[Path, Result]]) -> Result:
    """Concatenate the results of several stores, with the store as the first column."""
    (path, result), *others = answers
    if not others:
        return result
    first: Any = result.arrow()
    parts = []
    for other, answer in answers:
        table = answer.arrow()
        if table.schema != first.schema:
            raise QueryError(
                f"{path} and {other} return different columns: {_difference(first, table)}",
                hint="name columns that all stores have, and cast them to one type",
            )
        # At least one row, otherwise the column would have no type.
        label = type(first).from_pydict({"store": [str(other)] * max(1, len(table))}).slice(0, len(table))
        parts.append(table.add_column(0, label.schema.field(0), label.column(0)))
    batches = [batch for table in parts for batch in table.to_batches()]
    return type(result)(type(first).from_batches(batches, schema=parts[0].schema))


def _difference(one: Any, other: Any) -> str:
    names, others = one.column_names, other.column_names
    if single := [name for name in [*names, *others] if (name in names) != (name in others)]:
        return ", ".join(single)
    if names != others:
        return "another order"
    pairs = zip(one.schema, other.schema, strict=True)
    return ", ".join(f"{a.name} ({a.type} and {b.type})" for a, b in pairs if a.type != b.type)
