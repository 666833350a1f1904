"""Migrations of the index's tables: found, applied once, never changed afterwards."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pytest

import expstore.sql.migrate
from expstore.errors import MigrationError
from expstore.sql.migrate import Migration, folder, migrate, migrations, read_applied
from tests.support.paths import ROOT

pytestmark = pytest.mark.index

ONE = Migration(1, "one", "CREATE TABLE a (x BIGINT); CREATE VIEW b AS SELECT x + 1 AS y FROM a;")
TWO = Migration(2, "two", "INSERT INTO a VALUES (41);")
BROKEN = Migration(2, "broken", "INSERT INTO a VALUES (1); INSERT INTO nowhere VALUES (1);")


@pytest.fixture
def con(tmp_path: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    with duckdb.connect(str(tmp_path / "m.duckdb")) as made:
        yield made


def test_steps_are_applied_in_order_and_once(con: duckdb.DuckDBPyConnection) -> None:
    assert migrate(con, [ONE, TWO]) == [ONE, TWO]
    assert migrate(con, [ONE, TWO]) == []
    assert con.execute("SELECT y FROM b").fetchall() == [(42,)]
    assert read_applied(con) == [(1, "one", ONE.checksum), (2, "two", TWO.checksum)]


def test_a_later_step_joins_the_earlier_ones(con: duckdb.DuckDBPyConnection) -> None:
    migrate(con, [ONE])
    assert migrate(con, [ONE, TWO]) == [TWO]
    assert con.execute("SELECT version FROM schema_migrations ORDER BY applied, version").fetchall() == [
        (1,),
        (2,),
    ]


def test_a_failed_step_leaves_nothing_and_the_steps_before_stay(con: duckdb.DuckDBPyConnection) -> None:
    with pytest.raises(MigrationError, match=r"0002_broken .*nowhere") as caught:
        migrate(con, [ONE, BROKEN])
    assert caught.value.kind == "failed"
    assert con.execute("SELECT count(*) FROM a").fetchall() == [(0,)]
    assert [version for version, _, _ in read_applied(con)] == [1]
    assert migrate(con, [ONE, TWO]) == [TWO]


def test_a_newer_database_is_refused_and_both_versions_named(con: duckdb.DuckDBPyConnection) -> None:
    migrate(con, [ONE, TWO])
    with pytest.raises(MigrationError, match=r"has step 0002_two.* knows steps up to 0001_one") as caught:
        migrate(con, [ONE])
    assert caught.value.kind == "newer"


def test_a_changed_step_is_refused(con: duckdb.DuckDBPyConnection) -> None:
    migrate(con, [ONE])
    changed = Migration(1, "one", ONE.sql + " -- better")
    with pytest.raises(MigrationError, match="checksum") as caught:
        migrate(con, [changed, TWO])
    assert caught.value.kind == "changed"
    assert len(read_applied(con)) == 1


def test_line_endings_are_no_change() -> None:
    assert Migration(1, "a", "x;\ny;\n").checksum == Migration(1, "a", "x;\r\ny;\r\n").checksum


def test_nothing_is_left_in_the_log(con: duckdb.DuckDBPyConnection, tmp_path: Path) -> None:
    migrate(con, [ONE, TWO])
    log = tmp_path / "m.duckdb.wal"
    assert not log.exists() or log.stat().st_size == 0


@pytest.mark.parametrize(
    "names", [[], ["0002_two.sql"], ["0001_a.sql", "0001_b.sql"], ["0001_a.sql", "0003_c.sql"]]
)
def test_missing_numbers_are_refused(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        (tmp_path / name).write_text("SELECT 1;")
    with pytest.raises(MigrationError, match="without gaps"):
        migrations(tmp_path)


def test_other_files_are_no_steps(tmp_path: Path) -> None:
    for name in ("0001_a.sql", "README.md", "1_b.sql", "0002_b.sql.orig"):
        (tmp_path / name).write_text("SELECT 1;")
    assert [str(step) for step in migrations(tmp_path)] == ["0001_a"]


def test_the_folder_is_found_in_a_checkout() -> None:
    assert folder().samefile(ROOT / "migrations")
    assert str(migrations()[0]) == "0001_initial"


def test_the_folder_is_found_in_an_installed_package(tmp_path: Path) -> None:
    # As a wheel lays it out: the real folder inside the package.
    package = tmp_path / "site" / "expstore"
    shutil.copytree(
        Path(expstore.sql.migrate.__file__).parents[1], package, ignore=shutil.ignore_patterns("api")
    )
    assert not (package / "migrations").is_symlink()
    code = "from expstore.sql.migrate import folder, migrations; print(folder(), migrations()[0])"
    env = {"PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=tmp_path, check=True
    )
    assert done.stdout.split() == [str(package / "migrations"), "0001_initial"]
