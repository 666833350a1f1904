"""`expstore datasets`: fetch from a server, list, inspect, delete; errors."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.commands import Cli
from tests.support.data_server import serving_files
from tests.unit.datasets.test_d4rl import arrays, write

NAME = "d4rl:hopper-medium-v2"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EXPSTORE_DATA", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.slow
def test_a_data_set_from_fetch_to_delete(tmp_path: Path, cache: Path, cli: Cli) -> None:
    assert "expstore datasets list d4rl --available shows names" in cli("datasets", "list").out
    (tmp_path / "public" / "gym_mujoco_v2").mkdir(parents=True)
    write(tmp_path / "public" / "gym_mujoco_v2" / "hopper_medium-v2.hdf5", arrays())
    with serving_files(tmp_path / "public") as server:
        for _ in range(2):  # then it is here
            assert "holds 12 rows" in cli("datasets", "fetch", NAME, "--mirror", server.url).out
        assert len(server.requests) == 1
    (found,) = cli("datasets", "list", "--json").json
    assert (found["name"], found["rows"]) == (NAME, 12)
    told = cli("datasets", "list", "atari").out
    assert "none is downloaded; expstore datasets list atari --available" in told
    assert NAME not in told
    told = cli("datasets", "info", NAME).out
    assert "made of hopper_medium-v2.hdf5" in told
    assert "sha256" in told
    assert cli("datasets", "info", NAME, "--json").json["meta"]["d4rl"]["algorithm"] == "SAC"
    assert cli("sql", found["path"], "SELECT count(*) FROM episodes").code == 0
    assert cli("datasets", "delete", NAME).code == 0
    assert not (cache / "d4rl" / "hopper-medium-v2").exists()
    done = cli("datasets", "delete", NAME)
    assert done.code == 2
    assert "is not downloaded: there is no store" in done.err


@pytest.mark.slow
def test_a_source_and_a_root(tmp_path: Path, cache: Path, cli: Cli) -> None:
    file = write(tmp_path / "mine.hdf5", arrays())
    root = tmp_path / "root"
    fetch = ("datasets", "fetch", NAME, "--source", file, "--root", root)
    assert cli(*fetch, "--json").json["path"] == str(root / "hopper-medium-v2")
    assert cli("datasets", "info", NAME, "--root", root).code == 0
    (found,) = cli("datasets", "list", "d4rl", "--root", root, "--json").json
    assert (found["name"], found["path"]) == (NAME, str(root / "hopper-medium-v2"))
    assert cli(*fetch, "--force").code == 0
    assert not cache.exists()


def test_a_prefix_in_any_case(tmp_path: Path, cache: Path, cli: Cli) -> None:
    file = write(tmp_path / "mine.hdf5", arrays())
    name = NAME.replace("d4rl", "D4RL")
    assert cli("datasets", "fetch", name, "--source", file).code == 0
    assert NAME in cli("datasets", "list", "D4RL").out
    assert cli("datasets", "info", name, "--json").json["meta"]["import"]["format"] == "d4rl"
    assert str(cache / "d4rl" / "hopper-medium-v2") in cli("datasets", "delete", name).out
    assert cli("datasets", "list", "D4RL", "--json").json == []


def test_without_a_command_they_are_listed(cli: Cli) -> None:
    done = cli("datasets")
    assert (done.code, done.err) == (2, "")
    assert "Public data sets by name" in done.out


def test_names_are_listed(cache: Path, cli: Cli) -> None:
    assert len(cli("datasets", "list", "atari", "--available").out.split()) == 250
    done = cli("datasets", "list", "--available")
    assert done.code == 2
    assert "choose a collection: atari" in done.err
    for prefix in ("lerobot", "RLDS"):  # collections without a list
        told = cli("datasets", "list", prefix, "--available").out
        assert f"fetch an id with: expstore datasets fetch {prefix.lower()}:ID" in told
        assert cli("datasets", "list", prefix, "--available", "--json").json == []


def test_errors_are_printed(cache: Path, cli: Cli) -> None:
    for *words, text in (
        ("fetch", "hopper", "must be prefixed"),
        ("fetch", "nobody:hopper", "Unknown dataset source 'nobody'"),
        ("fetch", "d4rl:?", "Env ? not found. expstore datasets list d4rl --available shows all names"),
        ("fetch", "d4rl:hoper-medium-v2", "not found. Similar names: d4rl:hopper-medium-v2, d4rl:"),
        ("fetch", "atari:Pong/1", "atari-replay-datasets/dqn, no longer exists"),
        ("fetch", NAME, "--source", "nowhere", "there is no file or folder"),
        ("info", "d4rl", "not of the form PREFIX:ID"),
        ("delete", "d4rl:../x", "not of the form PREFIX:ID"),
        ("delete", "d4rl:x", "expstore datasets list shows the downloaded ones"),
        ("list", "nobody", "--available", "Unknown dataset source"),
        ("list", "d4l", "Unknown dataset source 'd4l'. Supported prefixes: atari, atari_dqn, d4rl"),
        ("list", "--root", ".", "--root is the folder of one collection: also pass PREFIX"),
    ):
        done = cli("datasets", *words)
        assert done.code == 2, words
        assert text in " ".join(done.err.split())


def test_without_the_library_of_a_format_it_says_what_to_install(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("sklearn", "sklearn.preprocessing"):
        monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "shuttle.csv").write_text("a,class\n1,2\n")
    done = cli("import", tmp_path / "shuttle.csv", tmp_path / "shuttle.exp", "--format", "openml")
    assert done.code == 2
    assert "sklearn.preprocessing, which is not installed; pip install 'expstore[openml]'" in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["shuttle.csv"]
