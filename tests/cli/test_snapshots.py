"""The commands `versions create`, `restore` and `list`: output and exit codes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from tensordict import TensorDict

import expstore
from expstore.storages.factory import ZarrStorage
from tests.support.commands import Cli

pytestmark = pytest.mark.index

Make = Callable[..., TensorDict]


def test_a_version_is_saved_and_restored(cli: Cli, store: Path, tmp_path: Path, make_batch: Make) -> None:
    place, new = tmp_path / "backup", tmp_path / "new.exp"
    done = cli("versions", "create", store, place, "--tag", "start")
    assert (done.code, done.out.split(",")[0]) == (0, "snapshot 1 (start): 30 rows")
    for _ in range(3):
        made = cli("versions", "create", store, place, "--keep", 2, "--json").json
    assert (made["number"], made["rows"], made["tag"]) == (4, 30, None)
    found = cli("versions", "list", place, "--json").json["versions"]
    assert [(one["number"], one["tag"]) for one in found] == [(1, "start"), (3, None), (4, None)]
    assert all(one["episodes"] == 3 and one["disk_bytes"] >= one["new_bytes"] > 0 for one in found)
    table = cli("versions", "list", place).out.splitlines()
    assert table[0].split()[:3] == ["version", "tag", "made"]
    assert table[1].split()[:2] == ["1", "start"]
    done = cli("versions", "restore", new, place, "--version", "start")
    assert (done.code, done.out) == (0, f"{new} holds the 30 rows of {place / 'v0001'}\n")
    with expstore.open(new) as rb:
        assert (len(rb), rb.storage.capacity) == (30, 50)  # as the version's
        rb.extend(make_batch(9))
    assert cli("versions", "restore", new, place, "--json").json["rows"] == 30


def test_a_folder_of_versions_means_its_newest(cli: Cli, store: Path, tmp_path: Path) -> None:
    place = tmp_path / "backup"
    for _ in range(2):
        cli("versions", "create", store, place)
    assert cli("info", place, "--json").json["stores"][0]["path"] == str(place / "v0002")
    assert cli("sql", place, "SELECT count(*) AS n FROM transitions", "--json").json == [{"n": 30}]
    assert cli("verify", place)[:2] == (0, f"{place / 'v0002'}: nothing found\n")


def test_a_new_store_is_of_the_kind_of_the_version(cli: Cli, tmp_path: Path) -> None:
    place, new = tmp_path / "backup", tmp_path / "new.exp"
    with expstore.open(tmp_path / "texts.exp", layout="arrow") as rb:
        rb.extend(pa.table({"text": ["a", "longer"], "done": [False, True]}))
        rb.dumps(place)
    assert cli("versions", "restore", new, place).out == f"{new} holds the 2 rows of {place / 'v0001'}\n"
    with expstore.open(new) as rb:
        assert rb.sql("SELECT text FROM transitions").fetchall() == [("a",), ("longer",)]


def test_a_version_that_cannot_be_loaded_makes_no_store(cli: Cli, store: Path, tmp_path: Path) -> None:
    place, new = tmp_path / "backup", tmp_path / "new.exp"
    cli("versions", "create", store, place)
    (place / "v0001/columns/action/c.0").unlink()
    assert cli("versions", "restore", new, place).code == 4
    assert not new.exists()


def test_exit_codes(cli: Cli, store: Path, tmp_path: Path) -> None:
    place = tmp_path / "backup"
    assert cli("versions", "create", tmp_path / "nothing.exp", place)[0] == 2
    assert not (tmp_path / "nothing.exp").exists()
    assert cli("versions", "list", place)[0] == 2
    assert cli("versions", "create", store, place, "--tag", "7")[0] == 2
    assert cli("versions", "create", store, place)[0] == 0
    code, _, err = cli("versions", "restore", store, place, "--version", "best")
    assert (code, "there are 1" in err) == (2, True)
    held = ZarrStorage(store)
    assert cli("versions", "create", store, place)[0] == 3
    assert cli("versions", "restore", store, place)[0] == 3
    held.close()
    (place / "v0001/columns/action/c.0").unlink()
    code, _, err = cli("versions", "restore", store, place)
    assert (code, "action" in err) == (4, True)
