"""`expstore episode`: the facts and rows of an episode, and a picture of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

import expstore
from tests.support.commands import Cli, Done

pytestmark = pytest.mark.index


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ring of which the first episode has left, and the second in part; the third has 3 rows."""
    path = tmp_path_factory.mktemp("stores") / "run.exp"
    with expstore.open(path, capacity=12) as rb:
        for length in (10, 10, 3):
            number = np.arange(length)
            rows = {
                "frame": np.zeros((length, 20, 20), np.uint8),
                "speed": number / 4,
                "next": {"reward": np.ones(length, np.float32), "terminated": number == length - 1},
            }
            rb.extend(rows, source="red <b>", episode_info={"good": length == 3})
    return path


def test_the_facts_and_the_first_and_last_rows(cli: Cli, store: Path) -> None:
    done = cli("episode", store, 2)
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    facts = dict(line.split(maxsplit=1) for line in lines[:7])
    assert facts.pop("written").endswith("(UTC)")
    assert facts == {
        "episode": "2", "source": "red <b>", "status": "terminated", "length": "10 steps, 9 rows are left",
        "return": "10", "facts": '{"good": false}',
    }  # fmt: skip
    assert lines[8].split() == ["_step", "frame", "speed", "next.reward", "next.terminated"]
    assert [line.split()[0] for line in lines[9:15]] == ["1", "2", "3", "7", "8", "9"]
    assert lines[14].split() == ["9", "uint8[20,", "20]", "2.25", "1", "true"]
    assert lines[15:] == ["3 rows between them are not listed"]
    whole = cli("episode", store, 3).out.splitlines()
    assert [line.split()[0] for line in whole[9:]] == ["0", "1", "2"]
    gone = cli("episode", store, 1).out  # of an episode that has left the facts remain
    assert "10 steps, 0 rows are left" in gone
    assert "_step" not in gone


def test_infinite_returns_are_valid_json(cli: Cli, tmp_path: Path) -> None:
    with expstore.open(tmp_path / "run.exp") as rb:
        rb.extend({"x": [1, 2], "next": {"reward": np.array([np.inf, 1.0]), "terminated": [False, True]}})
    done = cli("episode", tmp_path / "run.exp", 1, "--json")
    assert done.code == 0
    assert json.loads(done.out, parse_constant=pytest.fail)["return"] is None


def test_json_has_the_facts(cli: Cli, store: Path) -> None:
    found = cli("episode", store, 3, "--json").json
    assert found.pop("start_time") <= found.pop("end_time")
    assert found == {
        "episode_id": 3, "source": "red <b>", "length": 3, "return": 3.0, "status": "terminated",
        "split": "train", "selections": [], "trajectory_id": None, "live_rows": 3, "info": {"good": True},
        "path": str(store), "png": None,
    }  # fmt: skip


def test_a_picture(cli: Cli, store: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    before = sorted(store.rglob("*"))
    picture = tmp_path / "out.png"
    done = cli("episode", store, 2, "--png", picture)
    assert (done.code, done.err) == (0, "")
    assert done.out == f"a picture of episode 2 was written to {picture}\n"
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert list(tmp_path.iterdir()) == [picture]
    assert sorted(store.rglob("*")) == before
    done = cli("episode", store, 1, "--png", picture)
    assert done.code == 2
    assert done.err.startswith("error: no row of episode 1 is left in the store")


def test_an_unknown_id_names_the_range(cli: Cli, store: Path) -> None:
    for number in (0, 4, 10**18):
        text = f"expstore sql {store} 'SELECT * FROM episodes' lists them\n"
        assert cli("episode", store, number) == Done(
            2, "", f"error: no episode {number}: their ids are 1 to 3; {text}"
        )


def test_an_empty_store_and_none(cli: Cli, tmp_path: Path) -> None:
    expstore.open(tmp_path / "a.exp").close()
    assert "the store has no episodes yet" in cli("episode", tmp_path / "a.exp", 1).err
    assert cli("episode", tmp_path / "b.exp", 1).code == 2


def test_matplotlib_is_needed_for_pictures_only(
    cli: Cli, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "expstore.plot", raising=False)
    assert cli("episode", store, 2).code == 0
    done = cli("episode", store, 2, "--png", tmp_path / "out.png")
    assert done.code == 2
    assert "matplotlib, which is not installed; pip install 'expstore[plot]'" in done.err
    assert list(tmp_path.iterdir()) == []
