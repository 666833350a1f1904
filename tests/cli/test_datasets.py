"""`expstore datasets`: fetch from a server, list, inspect, delete; errors."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from expstore.cli.app import run
from tests.support.data_server import serving_files
from tests.unit.datasets.test_d4rl import arrays, write

NAME = "d4rl:hopper-medium-v2"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EXPSTORE_DATA", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.slow
def test_a_data_set_from_fetch_to_delete(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["datasets", "list"]) == 0
    assert "expstore datasets list d4rl --available shows names" in capsys.readouterr().out
    (tmp_path / "public" / "gym_mujoco_v2").mkdir(parents=True)
    write(tmp_path / "public" / "gym_mujoco_v2" / "hopper_medium-v2.hdf5", arrays())
    with serving_files(tmp_path / "public") as server:
        assert run(["datasets", "fetch", NAME, "--mirror", server.url]) == 0
        assert run(["datasets", "fetch", NAME]) == 0  # it is here
        assert len(server.requests) == 1
    assert "holds 12 rows" in capsys.readouterr().out
    assert run(["datasets", "list", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["name"], found["rows"]) == (NAME, 12)
    assert run(["datasets", "list", "atari"]) == 0
    told = capsys.readouterr().out
    assert "none is downloaded; expstore datasets list atari --available" in told
    assert NAME not in told
    assert run(["datasets", "info", NAME]) == 0
    told = capsys.readouterr().out
    assert "made of hopper_medium-v2.hdf5" in told
    assert "sha256" in told
    assert run(["datasets", "info", NAME, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["meta"]["d4rl"]["algorithm"] == "SAC"
    assert run(["sql", found["path"], "SELECT count(*) FROM episodes"]) == 0
    assert run(["datasets", "delete", NAME]) == 0
    assert not (cache / "d4rl" / "hopper-medium-v2").exists()
    capsys.readouterr()
    assert run(["datasets", "delete", NAME]) == 2
    assert "is not downloaded: there is no store" in capsys.readouterr().err


@pytest.mark.slow
def test_a_source_and_a_root(tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "mine.hdf5", arrays())
    root = tmp_path / "root"
    assert run(["datasets", "fetch", NAME, "--source", str(file), "--root", str(root), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["path"] == str(root / "hopper-medium-v2")
    assert run(["datasets", "info", NAME, "--root", str(root)]) == 0
    capsys.readouterr()
    assert run(["datasets", "list", "d4rl", "--root", str(root), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["name"], found["path"]) == (NAME, str(root / "hopper-medium-v2"))
    assert run(["datasets", "fetch", NAME, "--source", str(file), "--root", str(root), "--force"]) == 0
    assert not cache.exists()


def test_a_prefix_in_any_case(tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "mine.hdf5", arrays())
    name = NAME.replace("d4rl", "D4RL")
    assert run(["datasets", "fetch", name, "--source", str(file)]) == 0
    capsys.readouterr()
    assert run(["datasets", "list", "D4RL"]) == 0
    assert NAME in capsys.readouterr().out
    assert run(["datasets", "info", name, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["meta"]["import"]["format"] == "d4rl"
    assert run(["datasets", "delete", name]) == 0
    assert str(cache / "d4rl" / "hopper-medium-v2") in capsys.readouterr().out
    assert run(["datasets", "list", "D4RL", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_without_a_command_they_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["datasets"]) == 2
    told = capsys.readouterr()
    assert "Public data sets by name" in told.out
    assert not told.err


def test_names_are_listed(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["datasets", "list", "atari", "--available"]) == 0
    assert len(capsys.readouterr().out.split()) == 250
    assert run(["datasets", "list", "--available"]) == 2
    assert "choose a collection: atari" in capsys.readouterr().err


@pytest.mark.parametrize("prefix", ["lerobot", "RLDS"])
def test_a_collection_without_a_list_says_so(
    cache: Path, capsys: pytest.CaptureFixture[str], prefix: str
) -> None:
    assert run(["datasets", "list", prefix, "--available"]) == 0
    told = f"fetch an id with: expstore datasets fetch {prefix.lower()}:ID"
    assert told in capsys.readouterr().out
    assert run(["datasets", "list", prefix, "--available", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["fetch", "hopper"], 2, "must be prefixed"),
        (["fetch", "nobody:hopper"], 2, "Unknown dataset source 'nobody'"),
        (["fetch", "d4rl:?"], 2, "Env ? not found. expstore datasets list d4rl --available shows all names"),
        (["fetch", "d4rl:hoper-medium-v2"], 2, "not found. Similar names: d4rl:hopper-medium-v2, d4rl:"),
        (["fetch", "atari:Pong/1"], 2, "atari-replay-datasets/dqn, no longer exists"),
        (["fetch", NAME, "--source", "nowhere"], 2, "there is no file or folder"),
        (["info", "d4rl"], 2, "not of the form PREFIX:ID"),
        (["delete", "d4rl:../x"], 2, "not of the form PREFIX:ID"),
        (["delete", "d4rl:x"], 2, "expstore datasets list shows the downloaded ones"),
        (["list", "nobody", "--available"], 2, "Unknown dataset source"),
        (["list", "d4l"], 2, "Unknown dataset source 'd4l'. Supported prefixes: atari, atari_dqn, d4rl"),
        (["list", "--root", "."], 2, "--root is the folder of one collection: also pass PREFIX"),
    ],
)
def test_errors_are_printed(
    cache: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, text: str
) -> None:
    assert run(["datasets", *arguments]) == code
    assert text in " ".join(capsys.readouterr().err.split())


def test_without_the_library_of_a_format_it_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("sklearn", "sklearn.preprocessing"):
        monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "shuttle.csv").write_text("a,class\n1,2\n")
    arguments = [str(tmp_path / "shuttle.csv"), str(tmp_path / "shuttle.exp"), "--format", "openml"]
    assert run(["import", *arguments]) == 2
    told = capsys.readouterr().err
    assert "sklearn.preprocessing, which is not installed; pip install 'expstore[openml]'" in told
    assert [path.name for path in tmp_path.iterdir()] == ["shuttle.csv"]
