"""Bring the tables of an index to the schema of this version of the library.

Used by the index when it opens or creates its file. Applies `migrations/NNNN_name.sql` in order, each once
and in a transaction. It never downgrades, and never changes a step that has been applied.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import duckdb

from expstore.disk.files import Disk
from expstore.errors import MigrationError

_NAME = re.compile(r"(\d{4})_(\w+)\.sql")
_RECORDS = "schema_migrations"


@dataclass(frozen=True, slots=True)
class Migration:
    """One migration step.

    Args:
        version: Its number; steps are numbered from 1 without gaps.
        name: What it does, from the file's name.
        sql: Its statements.
    """

    version: int
    name: str
    sql: str

    @property
    def checksum(self) -> str:
        """Checksum of the SQL, to detect that an applied step was changed; line endings do not matter."""
        return hashlib.sha256("\n".join(self.sql.splitlines()).encode()).hexdigest()

    def __str__(self) -> str:
        return f"{self.version:04d}_{self.name}"


def folder() -> Path:
    """Return the folder of the migrations, next to this module (in a checkout it is a link)."""
    return Path(__file__).parent.parent / "migrations"


def migrations(path: Path | None = None, *, disk: Disk | None = None) -> list[Migration]:
    """Return all steps in order.

    Args:
        path: The folder with the steps; the library's own by default.
        disk: Access to the file system.

    Raises:
        MigrationError: There are no steps, or their numbers are not 1, 2, 3, ...
    """
    path, disk = path or folder(), disk or Disk()
    steps = []
    for name in disk.names(path):
        if match := _NAME.fullmatch(name):
            sql = disk.read_whole(path / name).decode("utf-8")
            steps.append(Migration(int(match[1]), match[2], sql))
    if [step.version for step in steps] != list(range(1, len(steps) + 1)) or not steps:
        raise MigrationError(
            f"the steps in {path} are {[str(step) for step in steps]}, expected 0001, 0002, ... without gaps",
            hint="install expstore again",
        )
    return steps


def read_applied(con: duckdb.DuckDBPyConnection) -> list[tuple[int, str, str]]:
    """Return (version, name, checksum) of every applied step, in order; changes nothing."""
    try:  # checking for the table first would take twice as long
        found = con.execute(f"SELECT version, name, checksum FROM {_RECORDS}").fetchall()
    except duckdb.CatalogException:
        return []
    return sorted(found)


def check(con: duckdb.DuckDBPyConnection, steps: list[Migration]) -> list[Migration]:
    """Return the steps that still have to be applied; changes nothing.

    Raises:
        MigrationError: The database has a step that is not in `steps`, or a step with another checksum.
    """
    done = read_applied(con)
    newest = f"up to {steps[-1]}"
    for version, name, checksum in done:
        if version > len(steps):
            raise MigrationError(
                f"the index was made by a newer version of expstore: it has step {version:04d}_{name}, "
                f"this version knows steps {newest}",
                kind="newer",
                hint="upgrade expstore, or delete index.duckdb: it is rebuilt from the store",
            )
        step = steps[version - 1]
        if checksum != step.checksum:
            raise MigrationError(
                f"step {version:04d}_{name} of the index has checksum {checksum[:12]}, "
                f"this version's {step} has {step.checksum[:12]}",
                kind="changed",
                hint="use the version that made it, or delete index.duckdb: it is rebuilt from the store",
            )
    return steps[len(done) :]


def migrate(con: duckdb.DuckDBPyConnection, steps: list[Migration] | None = None) -> list[Migration]:
    """Apply all missing steps and return them.

    Each step and its record are one transaction. A checkpoint follows immediately, because DuckDB's log is
    least safe while it contains changes of tables.

    Args:
        con: An open connection without a transaction.
        steps: All steps; None: the library's own.

    Raises:
        MigrationError: The database is newer than `steps`, a step was changed, or a step failed. The steps
            before the failed one remain applied.
    """
    steps = migrations() if steps is None else steps
    pending = check(con, steps)
    for step in pending:
        try:
            con.begin()
            con.execute(step.sql)
            _record(con, [step])
            con.commit()
            con.execute("CHECKPOINT")
        except duckdb.Error as exc:
            # The failure may already have ended the transaction.
            with contextlib.suppress(duckdb.Error):
                con.rollback()
            raise _build_error(step, exc) from exc
    return pending


def create(con: duckdb.DuckDBPyConnection, steps: list[Migration] | None = None) -> None:
    """Apply all steps to an empty database, in the caller's transaction.

    For files that are renamed into place once they are complete. Takes half the time of `migrate`.

    Raises:
        MigrationError: A step failed.
    """
    steps = migrations() if steps is None else steps
    for step in steps:
        try:
            con.execute(step.sql)
        except duckdb.Error as exc:
            raise _build_error(step, exc) from exc
    _record(con, steps)


def _record(con: duckdb.DuckDBPyConnection, steps: list[Migration]) -> None:
    """Write down that steps were applied."""
    con.execute(
        f"CREATE TABLE IF NOT EXISTS {_RECORDS} "
        "(version BIGINT, name VARCHAR, checksum VARCHAR, applied TIMESTAMP)"
    )
    now = datetime.now(UTC).replace(tzinfo=None)
    values = [value for step in steps for value in (step.version, step.name, step.checksum, now)]
    con.execute(f"INSERT INTO {_RECORDS} VALUES {', '.join(['(?, ?, ?, ?)'] * len(steps))}", values)


def _build_error(step: Migration, exc: duckdb.Error) -> MigrationError:
    return MigrationError(f"step {step} of the index failed: {exc}", kind="failed")
