"""`expstore migrate`: its output, its effect, and the backup of the old index."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pytest
from tensordict import TensorDict

import expstore
from expstore.disk.files import Disk
from expstore.errors import CorruptionError, LockedError, MigrationError, NotFoundError, StorageError
from expstore.maintenance.upgrade import Upgrade, upgrade
from expstore.sql import migrate
from expstore.sql.sync import Catalog
from expstore.storages.format import manifest
from expstore.storages.format.manifest import FORMAT, Manifest
from tests.support.commands import Cli
from tests.support.stores import read_files

pytestmark = pytest.mark.index

MakeBatch = Callable[..., TensorDict]
QUERY = 'SELECT episode_id, source, length, "return", live_rows FROM episodes ORDER BY 1'


#: How many steps this version knows, and the next one.
STEPS = len(list(migrate.folder().glob("*.sql")))
NEXT = f"{STEPS + 1:04}_notes"


@pytest.fixture
def store(store_path: Path, make_batch: MakeBatch) -> Path:
    with expstore.open(store_path, capacity=100) as rb:
        rb.extend(make_batch(60, episode_length=7), source="arm")
        rb.sql(QUERY)
    return store_path


@pytest.fixture
def newer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library that knows one more step."""
    steps = tmp_path / "steps"
    shutil.copytree(migrate.folder(), steps)
    (steps / f"{NEXT}.sql").write_text("CREATE TABLE notes (text VARCHAR);")
    monkeypatch.setattr(migrate, "folder", lambda: steps)
    return steps


def applied(steps: int) -> list[tuple[int]]:
    return [(number + 1,) for number in range(steps)]


def test_nothing_to_do_is_said_and_nothing_is_touched(store: Path, cli: Cli) -> None:
    before = read_files(store)
    code, out, err = cli("migrate", store)
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        f"{store}: format 1, index at step {STEPS}; this version knows format {FORMAT} and {STEPS} steps",
        "nothing to do",
    ]
    assert read_files(store) == before


def test_without_an_index_there_is_nothing_to_do(store: Path) -> None:
    (store / "index.duckdb").unlink()
    assert upgrade(store) == Upgrade(1, FORMAT, None, STEPS)


def test_a_dry_run_says_what_would_be_done(store: Path, newer: Path, cli: Cli) -> None:
    before = read_files(store)
    code, out, _ = cli("migrate", store, "--dry-run")
    assert code == 0
    assert out.splitlines()[1:] == [
        f"would be: index.duckdb: rebuilt with {NEXT}; the old one is kept as index.duckdb.old-1"
    ]
    assert read_files(store) == before
    code, out, _ = cli("migrate", store, "--dry-run", "--json")
    assert json.loads(out)["acts"]
    assert json.loads(out)["dry_run"] is True


def test_the_old_index_is_kept(store: Path, newer: Path, cli: Cli) -> None:
    old = (store / "index.duckdb").read_bytes()
    (store / "index.duckdb.old-1").write_bytes(b"of another time")
    code, out, _ = cli("migrate", store, "--json")
    assert code == 0
    said = json.loads(out)
    assert (said["index_found"], said["index_known"], len(said["acts"])) == (STEPS, STEPS + 1, 1)
    assert (store / "index.duckdb.old-1").read_bytes() == b"of another time"
    assert (store / "index.duckdb.old-2").read_bytes() == old
    with duckdb.connect(str(store / "index.duckdb"), read_only=True) as con:
        assert con.execute("SELECT version FROM schema_migrations ORDER BY 1").fetchall() == applied(
            STEPS + 1
        )
    with duckdb.connect(str(store / "index.duckdb.old-2"), read_only=True) as con:
        assert con.execute("SELECT version FROM schema_migrations ORDER BY 1").fetchall() == applied(STEPS)
        before = con.execute("SELECT count(*) FROM episodes").fetchall()
    with expstore.open(store) as rb:
        found = rb.sql(QUERY).fetchall()
    assert len(found) == before[0][0] == 9
    assert upgrade(store).acts == ()


def test_a_failure_puts_the_old_index_back(store: Path, newer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = (store / "index.duckdb").read_bytes()

    def fail(catalog: Catalog, facts: Any = None) -> Any:
        raise StorageError("no space")

    monkeypatch.setattr(Catalog, "catch_up", fail)
    with pytest.raises(StorageError, match="no space"):
        upgrade(store)
    assert (store / "index.duckdb").read_bytes() == old
    assert not (store / "index.duckdb.old-1").exists()
    expstore.open(store).close()  # and the store is not locked


def test_newer_ones_are_refused(store: Path, newer: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    upgrade(store)
    (newer / f"{NEXT}.sql").unlink()
    with pytest.raises(MigrationError, match="newer version of expstore"):
        upgrade(store)
    kept = Manifest.load(Disk(), store)
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "FORMAT", FORMAT + 1)
        kept.save(Disk(), store)
    code, _, err = cli("migrate", store)
    assert code == 1
    assert f"format {FORMAT + 1}" in err


def test_one_that_is_open_is_locked(store: Path, newer: Path, cli: Cli) -> None:
    with expstore.open(store):
        before = read_files(store)
        with pytest.raises(LockedError):
            upgrade(store)
        assert cli("migrate", store)[0] == 3
        assert read_files(store).keys() == before.keys()


def test_other_failures(store: Path, tmp_path: Path, newer: Path, cli: Cli) -> None:
    with pytest.raises(NotFoundError):
        upgrade(tmp_path / "nothing")
    assert cli("migrate", tmp_path / "nothing")[0] == 2
    (store / "index.duckdb").write_bytes(b"no database" * 1000)
    with pytest.raises(CorruptionError, match=r"index\.duckdb cannot be read.*repair"):
        upgrade(store)
