"""The index of a store: episodes, fragments and sources in DuckDB, and all SQL over them.

Used by storages, which commit published changes to it and pass it the columns for a query. It is derived
data: if its file is damaged, a new one is built. The file is opened only through DuckDB, because closing
any other descriptor of the file would release DuckDB's lock.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb

from expstore.core.arguments import check_params
from expstore.core.values import Array
from expstore.disk.files import Disk
from expstore.disk.interruptible_calls import InterruptibleCalls
from expstore.episodes.log import LogEntry
from expstore.errors import (
    CorruptionError,
    ExpStoreError,
    LockedError,
    MigrationError,
    QueryError,
    StateError,
    StorageError,
)
from expstore.sql import delta as delta_tables
from expstore.sql.delta import Delta, Position
from expstore.sql.messages import explain_refusal
from expstore.sql.migrate import create, migrate
from expstore.sql.result import Result, widen_unsigned
from expstore.sql.views import Relations

CONFIG: dict[str, str | bool | int | float | list[str]] = {
    # Files that DuckDB 1.5 can open too.
    "storage_compatibility_version": "v1.5.0",
    # Every table starts with a few blocks: with the default of 256 KiB an empty index takes 1.8 MB. Smaller
    # blocks would make a large index larger.
    "default_block_size": "65536",
    # A query reads what it is given: no files, no variables of the caller, no extensions from the network.
    "enable_external_access": "false",
    "python_enable_replacements": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "allow_community_extensions": "false",
    "temp_directory": "",
    # DuckDB 2 starts 8 threads per database that read remote files ahead; there are no remote files here.
    **({} if duckdb.__version__.startswith("1.") else {"async_threads": 0}),
}
#: A function that reads rows from a relation into an Arrow table.
Read = Callable[[duckdb.DuckDBPyRelation], Any]
_LOG_SUFFIXES = (".wal", ".wal.checkpoint", ".wal.recovery")
_RELATIONS = (
    "annotations",
    "commits",
    "draws",
    "episodes",
    "fragments",
    "groups",
    "meta",
    "priorities",
    "recent",
    "selections",
    "sources",
    "transitions",
)


class Index:
    """Answer SQL over a store, and commit changes of the store to the index.

    Threads may query while another thread commits: each query has its own cursor, and commits run one at a
    time. Ctrl-C interrupts a query of the main thread. A forked child may not use it. Create one with `open`.

    Attributes:
        position: The last record that the index covers. (0, 0) if the index is empty, or after damage was
            found while running: the next commit must then be complete.
        notice: One line that explains why the file found at opening is not used, or None.
        complete: Whether the last commit wrote everything into a new file and closed it.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        disk: Disk,
        store_uuid: str,
        meta: Mapping[str, object] | None = None,
        config: Mapping[str, str] | None = None,
    ) -> None:
        self.path = path
        self._config = {**CONFIG, **(config or {})}
        self.position: Position = (0, 0)
        self.notice: str | None = None
        self.complete = False
        self._disk = disk
        self._uuid = store_uuid
        self._pid = os.getpid()
        self._meta: dict[str, str] = _texts(meta or {})
        self._con: duckdb.DuckDBPyConnection | None = None
        self._filed = path is None  # False while an in-memory database stands for the file
        self._damage: str | None = None
        self._closed = False
        self._committing = threading.Lock()
        self._cursors = threading.Lock()
        self._gate = _Gate()
        self._calls = InterruptibleCalls()

    @classmethod
    def open(
        cls,
        path: Path | None,
        *,
        disk: Disk,
        store_uuid: str,
        meta: Mapping[str, object] | None = None,
        config: Mapping[str, str] | None = None,
    ) -> Index:
        """Open the index of a store.

        The first commit creates a missing file. A file that is damaged or belongs to another store is
        renamed, and `notice` explains why.

        Args:
            path: The file; None keeps the index in memory.
            disk: Access to the file system.
            store_uuid: UUID of the store; the index file must have the same.
            meta: The content of the table `meta`, representable as JSON; None: what the file has.
            config: DuckDB settings in addition to those of every index.

        Raises:
            LockedError: Another program has the file open.
            MigrationError: The file was made by a newer version of expstore or DuckDB.
            StorageError: The file cannot be opened for another reason (permissions, too many open files).
        """
        index = cls(path, disk=disk, store_uuid=store_uuid, meta=meta, config=config)
        if path is not None and disk.exists(path):
            try:
                index._open_file(path)
            except CorruptionError as exc:
                index._quarantine(path, exc.message)
        return index

    def commit(self, delta: Delta, *, last: Mapping[str, object] | None = None) -> None:
        """Commit changes to the index, in one transaction.

        A delta older than the index changes nothing. A complete delta is built into a new file that replaces
        the old one; the table `priorities` is then empty.

        Args:
            delta: The changes.
            last: The content of the table `meta`, if only `close` follows. It is written into a new file
                directly, which is then not opened again (`complete` is True). This saves a third of the time
                of closing a small store.

        Raises:
            CorruptionError: The file is damaged; commit a complete delta.
            StorageError: The disk is full or cannot be written.
            StateError: The index is closed.
        """
        self._check_open()
        with self._committing:
            if delta.complete or not (self._filed or self._damage):
                self._rebuild(delta, last)
            elif delta.position < self.position:
                return
            else:
                with self._cursor("commit") as cursor:
                    delta_tables.apply(cursor, delta)
            self.position = delta.position

    def query(
        self,
        sql: str,
        params: Sequence[object] | Mapping[str, object] | None,
        relations: Relations,
        read: Read | None = None,
    ) -> Result:
        """Run one SELECT and return its rows.

        Args:
            sql: The statement.
            params: Values for `?` or `$1` (a sequence) or `$name` (a mapping).
            relations: The columns of the readable rows.
            read: Reads the rows from DuckDB's relation into an Arrow table; None: all of them.

        Raises:
            QueryError: `sql` is not a single SELECT that only reads, or DuckDB rejects it.
            CorruptionError: The file is damaged; commit a complete delta and ask again (kind "index"). Or a
                column that the query needs is damaged.
            StateError: The index is closed.
        """
        self._check_open()
        values = _plain(params)
        with self._cursor("query") as cursor:
            return self._calls.run(lambda: _answer(cursor, sql, values, relations, read), cursor.interrupt)

    def find_episodes(self, numbers: Sequence[int]) -> list[LogEntry]:
        """Return the log entries of the episodes that have these ids as of the last commit, in any order.

        Raises:
            CorruptionError: The file is damaged; commit a complete delta and ask again (kind "index").
            StateError: The index is closed.
        """
        self._check_open()
        with self._cursor("query") as cursor:
            return delta_tables.find_episodes(cursor, numbers)

    def write_priorities(self, ids: Array, priorities: Array) -> None:
        """Replace the table `priorities`.

        Args:
            ids: Row ids. Shape `(n,)`, int64.
            priorities: Their priorities. Shape `(n,)`, float32.

        Raises:
            CorruptionError: The file is damaged; commit a complete delta.
            StorageError: The disk is full or cannot be written.
            StateError: The index is closed.
        """
        self._check_open()
        with self._committing, self._cursor("commit") as cursor:
            delta_tables.replace_priorities(cursor, ids, priorities)

    def write_meta(self, meta: Mapping[str, object]) -> None:
        """Replace the content of the table `meta`; the values must be representable as JSON.

        Raises:
            CorruptionError: The file is damaged; commit a complete delta.
            StorageError: The disk is full or cannot be written.
            StateError: The index is closed.
        """
        self._check_open()
        texts = _texts(meta)
        with self._committing:
            self._meta = texts
            with self._cursor("commit") as cursor:
                delta_tables.replace_meta(cursor, texts)

    def close(self) -> None:
        """Write all changes to the file and close it; a second call does nothing.

        Raises:
            StorageError: The disk is full or cannot be written; the index is closed nevertheless.
        """
        if os.getpid() != self._pid:
            return  # closing the parent's connection here would write to the parent's file
        with self._committing, self._gate.alone():
            con, self._con, self._closed = self._con, None, True
            self._calls.close()
            if con is None:
                return
            try:
                if self._damage is None:
                    con.execute("CHECKPOINT")
            except duckdb.Error as exc:
                raise self._outside(exc) or StorageError(f"cannot complete the index: {exc}") from exc
            finally:
                con.close()

    def _check_open(self) -> None:
        if self._closed:
            raise StateError("the index is closed", hint="open the store again")
        if os.getpid() != self._pid:
            raise StateError("the index belongs to the process that opened it, and this is a fork of it")

    @contextlib.contextmanager
    def _cursor(self, act: str) -> Iterator[duckdb.DuckDBPyConnection]:
        """Return a cursor for one query or commit, and convert DuckDB's errors to expstore's."""
        with self._gate.together():
            self._check_open()
            if self._damage is not None:
                raise self._build_damage_error()
            try:
                with self._cursors:
                    if self._con is None:  # before the first commit
                        self._con = self._make(None)
                    cursor = self._con.cursor()
                try:
                    yield cursor
                finally:
                    delta_tables.rollback(cursor)
                    cursor.close()
            except duckdb.Error as exc:
                raise self._explain(exc, act) from exc
            except RuntimeError as exc:
                if "Query interrupted" in str(exc):  # DuckDB consumed the Ctrl-C
                    raise KeyboardInterrupt from exc
                raise

    def _explain(self, exc: duckdb.Error, act: str) -> ExpStoreError:
        text = str(exc).strip()
        outside = self._outside(exc)
        # In DuckDB 2.0 damaged blocks raise plain errors. After a fatal error, of any cause, DuckDB is
        # unusable.
        ruined = isinstance(exc, _RUINOUS) or type(exc) is duckdb.Error
        if isinstance(exc, _FATAL) or (ruined and outside is None):
            self._damage, self.position = text.splitlines()[0], (0, 0)
            return outside or self._build_damage_error()
        if outside is not None:
            return outside
        if isinstance(exc, duckdb.OutOfMemoryException):
            kind = QueryError if act == "query" else StorageError
            return kind(f"DuckDB needs more memory than is available: {text}", kind="memory")
        if act == "query":
            return QueryError(text)
        return StorageError(f"cannot {act} to the index: {text}")

    def _build_damage_error(self) -> CorruptionError:
        return CorruptionError(
            f"the index cannot be used: {self._damage}",
            kind="index",
            hint="it must be rebuilt from the store",
        )

    def _outside(self, exc: BaseException | None) -> ExpStoreError | None:
        """Return the matching error if the cause is not the file's content."""
        text = str(exc).strip()
        if "Could not set lock" in text or "different configuration" in text:
            who = re.search(r"held in (.*) \(PID (\d+)\)", text)
            by = f"{Path(who[1]).name} (PID {who[2]})" if who else "something else in this process"
            return LockedError(
                f"{self.path} is open in {by}", hint="close it there, then open the store again"
            )
        if "newer version of DuckDB" in text:
            return MigrationError(
                f"{self.path} is newer than DuckDB {duckdb.__version__} can read: {text.splitlines()[0]}",
                kind="newer",
                hint="upgrade duckdb, or delete the file: it is rebuilt from the store",
            )
        if re.search(r"No space left|Disk quota|File too large", text):
            return StorageError(
                f"the index cannot be written: {text}", kind="disk_full", hint="free some space"
            )
        if re.search(r"Permission denied|Too many open files|Read-only file system", text):
            return StorageError(f"the index cannot be opened: {text}")
        return None

    def _open_file(self, path: Path) -> None:
        con = None
        for suffix in ("", *_LOG_SUFFIXES):
            self._disk.unshare(path.with_name(path.name + suffix))
        try:
            con = duckdb.connect(str(path), config=self._config)
            found = con.execute("SELECT uuid FROM store").fetchall()
            if found != [(self._uuid,)]:
                raise CorruptionError(f"it belongs to store {found}, not {self._uuid}")
            migrate(con)
            self.position = delta_tables.last_position(con)
            known = delta_tables.read_meta(con)
            if self._meta and self._meta != known:
                delta_tables.replace_meta(con, self._meta)
            else:
                self._meta = known
            self._con, self._filed, con = con, True, None
        except duckdb.Error as exc:
            raise self._outside(exc) or CorruptionError(str(exc).strip().splitlines()[0]) from exc
        finally:
            if con is not None:
                con.close()

    def _make(self, path: Path | None, delta: Delta | None = None) -> duckdb.DuckDBPyConnection:
        """Create a database with all tables, and fill it from a complete delta if one is given."""
        con = duckdb.connect(":memory:" if path is None else str(path), config=self._config)
        try:
            with delta_tables.transaction(con):
                create(con)
                con.execute("INSERT INTO store VALUES (?)", [self._uuid])
                if delta is not None:
                    delta_tables.fill(con, delta, self._meta)
            if delta is None and self._meta:
                delta_tables.replace_meta(con, self._meta)
            con.execute("CHECKPOINT")
        except BaseException:
            con.close()
            raise
        return con

    def _rebuild(self, delta: Delta, last: Mapping[str, object] | None) -> None:
        """Build a new database next to the old file, then replace the old file."""
        temp = self.path and self.path.with_name("index.tmp")
        if last is not None:
            self._meta = _texts(last)
        try:
            if temp is not None:
                self._remove(temp, "", *_LOG_SUFFIXES)
            con = self._make(temp, delta)
        except (duckdb.Error, MigrationError) as exc:
            if temp is not None:
                self._remove(temp, "", *_LOG_SUFFIXES)
            cause = exc if isinstance(exc, duckdb.Error) else exc.__cause__
            raise self._outside(cause) or StorageError(f"cannot build the index: {exc}") from exc
        if temp is not None:
            con.close()
            self._disk.sync_path(temp)
        # No cursor may still have the old file open: closing its last cursor removes the log by name.
        with self._gate.alone():
            damage, self._damage = self._damage, "a new file could not take its place"
            self.position = (0, 0)
            if self._con is not None:
                self._con.close()
                self._con = None
            if self.path is None or temp is None:
                self._con = con
            else:
                self._put(temp, self.path, damage)
                if last is None:
                    self._open_file(self.path)
            self._damage, self.complete = None, last is not None

    def _put(self, temp: Path, path: Path, damage: str | None) -> None:
        if damage is not None:
            self._quarantine(path, damage)
        # Remove the old log first: DuckDB would replay it into the new file of the same name.
        self._remove(path, *_LOG_SUFFIXES)
        self._disk.rename(temp, path)
        self._disk.sync_dir(path.parent)

    def _remove(self, path: Path, *suffixes: str) -> None:
        for suffix in suffixes:
            if self._disk.exists(name := path.with_name(path.name + suffix)):
                self._disk.unlink(name)

    def _quarantine(self, path: Path, reason: str) -> None:
        number = 1
        while self._disk.exists(damaged := path.with_name(f"{path.name}.damaged-{number}")):
            number += 1
        for suffix in ("", *_LOG_SUFFIXES):
            if self._disk.exists(old := path.with_name(path.name + suffix)):
                self._disk.rename(old, damaged.with_name(damaged.name + suffix))
        self._disk.sync_dir(path.parent)
        self.notice = f"{path.name} cannot be used; it was renamed to {damaged.name} and is rebuilt: {reason}"


#: The relations that come from the index alone, with their columns: an older index may order them
#: differently.
COMPARED = {
    "sources": "number, name, named, generation, session, started, ended",
    "episodes": 'episode_id, source, trajectory_id, start_time, end_time, length, "return", status, '
    "live_rows, info",
    "fragments": "episode_id, first_step, length, first_id, stride",
}


def read_tables(path: Path, *, store_uuid: str) -> tuple[Position, dict[str, list[tuple[Any, ...]]]]:
    """Read the file of an index that no process has open, without changing it.

    Args:
        path: The file.
        store_uuid: UUID of the store.

    Returns:
        The last record that the index covers, and the rows of the relations of `COMPARED`, sorted.

    Raises:
        CorruptionError: The file is damaged, or belongs to another store.
        LockedError: Another program has the file open.
        MigrationError: The file was made by a newer version of expstore or DuckDB.
    """
    index = Index(path, disk=Disk(), store_uuid=store_uuid)
    try:
        with duckdb.connect(str(path), read_only=True, config=CONFIG) as con:
            found = con.execute("SELECT uuid FROM store").fetchall()
            if found != [(store_uuid,)]:
                raise CorruptionError(f"{path} belongs to store {found}, not {store_uuid}")
            rows = {
                name: con.execute(f"SELECT {columns} FROM {name} ORDER BY ALL").fetchall()
                for name, columns in COMPARED.items()
            }
            return delta_tables.last_position(con), rows
    except duckdb.Error as exc:
        first_line = str(exc).strip().splitlines()[0]
        raise index._outside(exc) or CorruptionError(f"{path} cannot be read: {first_line}") from exc


def _texts(meta: Mapping[str, object]) -> dict[str, str]:
    return {str(key): json.dumps(value) for key, value in meta.items()}


_FATAL = (duckdb.FatalException, duckdb.InternalException)
_RUINOUS = (*_FATAL, duckdb.IOException, duckdb.SerializationException)


class _Gate:
    """Let threads enter together, or one thread exclusively."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._shut = False

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        with self._changed:
            while self._shut:
                self._changed.wait()
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        with self._changed:
            while self._shut:
                self._changed.wait()
            self._shut = True
            while self._inside:
                self._changed.wait()
        try:
            yield
        finally:
            with self._changed:
                self._shut = False
                self._changed.notify_all()


def _plain(params: Sequence[object] | Mapping[str, object] | None) -> Any:
    """Convert NumPy and torch numbers in parameters to Python numbers, which DuckDB accepts.

    Raises:
        ArgumentError: The parameters are neither a sequence nor a mapping.
    """
    if params is None:
        return None
    if isinstance(params, Mapping):
        return {name: _plain_value(value) for name, value in params.items()}
    check_params(params)
    return [_plain_value(value) for value in params]


def _plain_value(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def _answer(
    cursor: duckdb.DuckDBPyConnection, sql: str, values: Any, relations: Relations, read: Read | None
) -> Result:
    statement = _require_one_select(cursor, sql)
    named = statement.named_parameters
    refused = relations.attach(cursor, sql)
    # The kind of a statement is not enough: a SELECT may contain an INSERT.
    cursor.execute("BEGIN TRANSACTION READ ONLY")
    try:
        relation = cursor.sql(statement, params=values)
        table = relation.to_arrow_table() if read is None else read(relation)
        return Result(widen_unsigned(table, relation.types))
    except Exception as exc:
        if refused:  # DuckDB's own error only says that reading a column failed
            raise refused[0] from None
        if isinstance(exc, duckdb.Error):
            _check_parameters(named, values)
        if isinstance(exc, duckdb.BinderException | duckdb.CatalogException):
            delta_tables.rollback(cursor)
            raise explain_refusal(exc, cursor, sql, relations.column_names(), _RELATIONS) from exc
        raise


def _check_parameters(named: Collection[str], values: Any) -> None:
    """Raise QueryError if a query has other parameters than the values that were passed.

    Args:
        named: The parameters of the query; "1", "2", ... for `?`.
        values: The values: a list, a dict, or None.
    """
    given = [
        str(name) for name in (values if isinstance(values, Mapping) else range(1, len(values or ()) + 1))
    ]
    if sorted(map(str.lower, named)) == sorted(map(str.lower, given)):
        return
    asked = [name for name in sorted(named) if not name.isdigit()]
    if asked:
        wanted = f"values for {', '.join(f'${name}' for name in asked)}"
        hint = f"use params={{{', '.join(f'{name!r}: ...' for name in asked)}}}"
    elif named:
        wanted = f"a list of length {len(named)}, one value for each ?"
        hint = f"use params=[{', '.join('...' for _ in named)}]"
    else:
        wanted, hint = "no values", "leave params out, or write $name or ? in the query"
    if isinstance(values, Mapping):
        found = f"a dict with {', '.join(given)}" if given else "an empty dict"
    else:
        found = "None" if values is None else f"a list of length {len(values)}"
    raise QueryError(f"the query takes {wanted}, params is {found}", hint=hint)


def _require_one_select(cursor: duckdb.DuckDBPyConnection, sql: str) -> duckdb.Statement:
    """Return the statement if it is a single SELECT; raise QueryError otherwise."""
    found = cursor.extract_statements(sql)
    if len(found) != 1:
        hint = "run one at a time" if found else "write one, such as SELECT count(*) FROM transitions"
        raise QueryError(f"expected one SELECT, found {len(found)} statements", hint=hint)
    try:
        kind = found[0].type
    except ValueError:  # a statement that DuckDB knows but its Python client does not
        kind = None
    if kind != duckdb.StatementType.SELECT:
        raise QueryError(
            f"expected one SELECT, found {kind.name if kind else 'another statement'}",
            hint="SQL only reads; change the store with the buffer's methods",
        )
    return found[0]
