"""`expstore resize` and `expstore merge`: questions, output, and resulting stores."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import typer

import expstore
from expstore.cli import reshape
from tests.support.batches import numbered_rows
from tests.support.commands import Cli, Done
from tests.support.stores import build_store

pytestmark = [pytest.mark.index, pytest.mark.usefixtures("no_syncs")]

ROWS = numbered_rows(30, key="x")
make = partial(build_store, source="arm")


def capacity_of(path: Path) -> int | None:
    with expstore.open(path, mode="r") as rb:
        capacity: int | None = rb.storage.capacity
        return capacity


def test_resize(tmp_path: Path, cli: Cli) -> None:
    path = make(tmp_path / "run.exp", ROWS)
    assert cli("resize", path, "--capacity", 50) == Done(
        0, f"{path} holds 30 rows; capacity 50, before unbounded\n", ""
    )
    facts = {"path": str(path), "former": 50, "capacity": 12, "rows": 12, "given_up": 18}
    assert cli("resize", path, "--capacity", 12, "--yes", "--json").json == facts
    done = cli("resize", path, "--unbounded")
    assert (done.code, done.out) == (0, f"{path} holds 12 rows; capacity unbounded, before 12\n")
    out = cli("resize", path, "--capacity", 5, "--yes").out
    assert out == f"{path} holds 5 rows, 7 were deleted; capacity 5, before unbounded\n"


def test_resize_asks_before_rows_are_given_up(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make(tmp_path / "run.exp", ROWS)
    code, _, err = cli("resize", path, "--capacity", 12)
    assert code == 2  # nobody is there to be asked
    assert "the oldest 18 of 30 rows do not fit; nothing was changed; pass --yes to delete them" in err
    asked: list[str] = []

    def answer(text: str, **_: object) -> bool:
        asked.append(text)
        if len(asked) == 1:
            raise typer.Abort  # Ctrl-C
        return len(asked) == 3

    monkeypatch.setattr(reshape.typer, "confirm", answer)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert cli("resize", path, "--capacity", 12)[0] == 130
    refused = cli("resize", path, "--capacity", 12)
    assert (refused.code, refused.err) == (1, "nothing was changed\n")
    assert capacity_of(path) is None
    assert cli("resize", path, "--capacity", 12)[0] == 0
    assert capacity_of(path) == 12
    assert asked == ["the oldest 18 of 30 rows do not fit and will be deleted. Continue?"] * 3
    assert cli("resize", path, "--capacity", 90)[0] == 0  # nothing is lost: nothing is asked
    assert len(asked) == 3


def test_resize_takes_exactly_one_capacity(tmp_path: Path, cli: Cli) -> None:
    path = make(tmp_path / "run.exp", ROWS)
    for arguments in ((), ("--capacity", 5, "--unbounded")):
        code, _, err = cli("resize", path, *arguments)
        assert (code, "pass either --capacity N or --unbounded" in err) == (2, True)
    assert cli("resize", tmp_path / "no.exp", "--unbounded")[0] == 2
    assert os.listdir(tmp_path) == ["run.exp"]
    with expstore.open(path):
        assert cli("resize", path, "--capacity", 99)[0] == 3


def test_merge(tmp_path: Path, cli: Cli) -> None:
    a, b = make(tmp_path / "a.exp", ROWS[:5]), make(tmp_path / "b.exp", ROWS[:7], capacity=6)
    out = tmp_path / "c.exp"
    done = cli("merge", a, b, "--out", out)
    assert (done.code, done.err) == (0, "")
    assert done.out == (
        f"{a}: 5 rows, 1 episodes (with those that have no rows left); sources a/...\n"
        f"{b}: 6 rows, 1 episodes (with those that have no rows left); sources b/...\n"
        f"{out} holds 11 rows\n"
    )
    found = cli("merge", a, b, "--out", tmp_path / "d.exp", "--capacity", 4, "--json").json
    assert (found["rows"], found["given_up"]) == (4, 7)
    assert found["runs"][1] == {"path": str(b), "name": "b", "rows": 6, "episodes": 1}
    assert cli("merge", a, "--out", out)[0] == 2


STOPPED = """
import os, signal, sys
from expstore.cli import app
from expstore.disk.files import Disk
from expstore.storages.columns.column_set_writer import WritableColumns

def interrupted(call):
    def wrapped(*args):
        os.kill(os.getpid(), signal.SIGINT)
        return call(*args)
    return wrapped

WritableColumns.write = interrupted(WritableColumns.write)
Disk.remove_tree = interrupted(Disk.remove_tree)
app.main()
"""


@pytest.mark.some(1)
@pytest.mark.parametrize("command", ["resize", "merge"])
def test_any_number_of_interrupts_leaves_nothing(tmp_path: Path, command: str) -> None:
    a, b = make(tmp_path / "a.exp", ROWS), make(tmp_path / "b.exp", ROWS)
    arguments = {
        "resize": ["resize", str(a), "--capacity", "99"],
        "merge": ["merge", str(a), str(b), "--out", str(tmp_path / "c.exp")],
    }
    done = subprocess.run(
        [sys.executable, "-c", STOPPED, *arguments[command]], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (130, "")
    assert "Traceback" not in done.stderr
    assert sorted(os.listdir(tmp_path)) == ["a.exp", "b.exp"]
    assert [name for name in os.listdir(a) if name.startswith("load")] == []
    with expstore.open(a) as rb:
        assert (len(rb), rb.storage.capacity) == (30, None)
