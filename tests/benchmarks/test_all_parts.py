"""All benchmarks run, and fail if a result is below its bar.

Run with the other tests; sizes are tiny and the figures are meaningless.
"""

from __future__ import annotations

import gzip
import importlib.util
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import larger_than_memory
from benchmarks.atari import made_up
from benchmarks.datasets import write_run
from tests.support.atari_files import LoggedRing, Step
from tests.support.paths import ROOT

#: Seconds. Nothing here is about time: on a busy machine it may take long.
LIMIT = 1000
pytestmark = pytest.mark.timeout(LIMIT + 100)

SCRIPT = ROOT / "benchmarks" / "vs_torchrl.py"

ROWS = {
    *(f"{kind}/sample" for kind in ("locomotion", "pixels")),
    *(
        f"{kind}/{act}-{ring}"
        for kind in ("locomotion", "pixels")
        for act in ("extend", "add")
        for ring in ("filling", "full")
    ),
    "locomotion/extend-busy",
    "reopen/closed",
    "reopen/killed",
    "memory/growth",
    "cli/help",
    "cli/info",
    "cli/sql",
}


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(SCRIPT), "--smoke", "--folder", str(folder), *arguments]
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_every_row_is_printed_and_bars_can_fail(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    # One bar that is a least, one that is a most.
    bars = ("--bar", "locomotion/sample=1e9", "--bar", "memory/growth=-1e9", "--bar", "pixels/sample=0")
    planted = start(tmp_path / "a", "--json", str(figures), *bars)
    passing = start(tmp_path / "b", "--only", "cli/help", "--bar", "cli/help=1e9")
    table, trouble = planted.communicate(timeout=LIMIT)
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")][2:]
    assert {row[0].split(" ")[0] for row in rows} == ROWS, trouble
    assert len(rows) == len(ROWS)
    assert sorted(row[0].split(" ")[0] for row in rows if "no" in row[-1]) == [
        "locomotion/sample",
        "memory/growth",
    ]
    assert planted.returncode == 1
    told = json.loads(figures.read_text())
    assert told["whole"]
    assert {row["name"] for row in told["results"]} == ROWS
    assert {row["name"] for row in told["results"] if not row["ok"]} == {"locomotion/sample", "memory/growth"}
    _, trouble = passing.communicate(timeout=LIMIT)
    assert passing.returncode == 0, trouble
    assert not [*(tmp_path / "a").iterdir(), *(tmp_path / "b").iterdir()]


@pytest.mark.torture
def test_served_stores_are_measured(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, str(SCRIPT.with_name("remote.py")), "--smoke", "--json", str(figures)]
    done = subprocess.run(
        [*command, "--folder", str(tmp_path / "a")], text=True, capture_output=True, timeout=LIMIT
    )
    assert done.returncode == 0, done.stderr
    assert not [*(tmp_path / "a").iterdir()]
    found = {row["name"]: row["value"] for row in json.loads(figures.read_text())["results"]}
    assert [*found] == ["sample", "stream", "stream/pixels", "extend", "limit"]
    assert min(found.values()) > 0


@pytest.mark.torture
def test_many_writers_are_measured(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, str(SCRIPT.with_name("many_writers.py")), "--smoke", "--json", str(figures)]
    done = subprocess.run(
        [*command, "--folder", str(tmp_path / "a")], text=True, capture_output=True, timeout=LIMIT
    )
    assert done.returncode == 0, done.stderr
    assert not [*(tmp_path / "a").iterdir()]
    told = json.loads(figures.read_text())["results"]
    found = {row["name"].removeprefix("many-writers/"): row["value"] for row in told}
    sides = [
        f"{kind}-{what}" for kind in ("locomotion", "pixels") for what in ("throughput", "torchrl", "cpu")
    ]
    acts = [f"latency-{act}-{part}" for act in ("waiting", "training", "python") for part in ("p50", "p99")]
    assert [*found] == [*sides, "latency-idle", *acts]
    assert min(found.values()) > 0


@pytest.mark.torture
def test_open_pages_are_measured(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, str(SCRIPT.with_name("page.py")), "--smoke", "--json", str(figures)]
    done = subprocess.run(
        [*command, "--folder", str(tmp_path / "a")], text=True, capture_output=True, timeout=LIMIT
    )
    assert done.returncode == 0, done.stderr
    assert not [*(tmp_path / "a").iterdir()]
    found = {row["name"]: row["value"] for row in json.loads(figures.read_text())["results"]}
    assert [*found] == ["page/first data", "page/filter", "page/frames", "page/writer"]
    assert min(found.values()) > 0


# -- one run of all -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run what `make bench-smoke` runs; return its one file, with results by part and name."""
    out = tmp_path_factory.mktemp("benchmarks")
    command = [sys.executable, "-m", "benchmarks", "--smoke", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=LIMIT)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (folder,) = out.iterdir()
    told: dict[str, Any] = json.loads((folder / "run.json").read_text())
    left = {path.name for path in folder.iterdir()} - {"ratios.png", "growth.png"}
    assert left == {"parts", "run.json", "table.md"}
    table = (folder / "table.md").read_text()
    assert all(f"\n| {row['name']}" in table for row in told["results"])
    told["by_part"] = {}
    for row in told["results"]:
        told["by_part"].setdefault(row["part"], {})[row["name"]] = row
    return told


def names(run: dict[str, Any], part: str) -> list[str]:
    return [*run["by_part"][part]]


def test_every_part_comes_to_its_end(run: dict[str, Any]) -> None:
    assert {part["name"]: part["state"] for part in run["parts"]} == dict.fromkeys(run["by_part"], "done")
    assert not run["missed"]  # there are no bars
    assert run["effort"] == "smoke"


def test_others_are_measured_or_said_to_be_left_out(run: dict[str, Any]) -> None:
    sides = [
        "torchrl-list",
        "torchrl-tensor",
        "torchrl-memmap",
        "torchrl-store",
        "stable-baselines3",
        "cpprb",
    ]
    for kind in ("locomotion", "atari", "wide"):
        found = names(run, f"peers-{kind}")
        for side in [*sides, "lance", "index-select", "memcpy"]:
            there = {f"{kind}/sample/{side}", f"{kind}/sample/{side}@1"} <= set(found)
            assert there != (f"{kind}/{side}" in run["skipped"]), side
    row = run["by_part"]["peers-locomotion"]["locomotion/sample/torchrl-tensor"]
    assert row["data"]["side"] == "expstore-default"
    assert "atari/sample/expstore-default" in names(run, "peers-atari")
    assert row["data"].keys() == {"expstore", "torchrl-tensor", "side"}


def test_questions_about_trajectories_are_measured(run: dict[str, Any]) -> None:
    found = [name for name in names(run, "trajectories") if "@" not in name]
    asked = [f"trajectories/{name}" for name in ("return-sql", "return-query", "reward-sql")]
    assert found == asked + ["trajectories/minari"] * (importlib.util.find_spec("minari") is not None)


def test_growth_is_measured(run: dict[str, Any]) -> None:
    acts = ["sample", "extend", "sql", "slices", "open", "disk"]
    sized = [f"growth/{act}/{rows}" for rows in (1000, 2000) for act in acts]
    assert names(run, "growth") == [
        *sized,
        *(f"growth/{act}" for act in ("sample", "extend", "sql", "slices", "open")),
    ]


def test_versions_are_measured(run: dict[str, Any]) -> None:
    found = [name.partition("/")[2] for name in names(run, "snapshots")]
    assert found == ["first", "load", "next-time", "next-bytes"]


def test_being_sure_is_measured(run: dict[str, Any]) -> None:
    found = {name: row["data"]["fsyncs"] for name, row in run["by_part"]["durability"].items()}
    for rows in ("add", "extend-1", "extend-10", "extend-100", "extend-1000"):
        assert (found[f"sync/{rows}"], found[f"process/{rows}"]) == (1, 0)
    # Columns, checksums and journal, for one row as for many.
    assert found["flush/1"] > 10
    assert found["close"] > 10
    assert found["reopen"] > 1
    assert (found["one-fsync/first"], found["one-fsync/again"]) == (1, 1)


def test_prioritized_sampling_is_measured(run: dict[str, Any]) -> None:
    found = run["by_part"]["prioritized"]
    acts = ("sample+update", "update", "sample+update@1", "update@1", "reopen", "reopen-cold")
    assert {name for name in found if "cpprb" not in name} == {f"prioritized/{name}" for name in acts}
    assert found["prioritized/reopen"]["data"]["probes"][0]["rows"] == 500


def test_slices_are_measured(run: dict[str, Any]) -> None:
    found = {name.partition("/")[2]: row["data"] for name, row in run["by_part"]["slices"].items()}
    assert [*found] == [
        *("beside-memmap", "beside-memory", "beside-memmap@1", "beside-memory@1"),
        *("index-by-size", "index-by-lanes", "sample-by-lanes"),
    ]
    assert found["beside-memory"].keys() == {"expstore", "torchrl"}
    one, many = found["index-by-lanes"]["rows_per_fragment"]
    assert one > 100
    assert many < 3


SB3_SIDES = (("add", 1), ("add", 16), ("add", 64), ("learn", 1), ("learn", 4), ("learn", 16))


def test_recording_is_measured(run: dict[str, Any]) -> None:
    found = {name.partition("/")[2]: row["data"] for name, row in run["by_part"]["recording"].items()}
    ours = {"record-1", "record-16", "add-dict", "add-tensordict"}
    kinds = {"cartpole", "locomotion", "pixels"}
    assert {f"{kind}-{side}" for kind in kinds for side in ours} <= found.keys()
    beside = [found.pop(f"sb3-{act}-{steps}") for act, steps in SB3_SIDES if f"sb3-{act}-{steps}" in found]
    assert len(beside) in (0, len(SB3_SIDES))  # stable-baselines3 may be missing
    assert all(min(data.values()) > 0 for data in beside)
    wrapper = found.pop("gymnasium-record")
    assert min(wrapper["plain"]) > 0
    assert min(wrapper["recorded"]) > 0
    assert all(data["cpu"] > 0 and data["p50"] <= data["p99"] for data in found.values())


def test_offered_rows_are_measured(run: dict[str, Any]) -> None:
    found = {name.partition("/")[2]: row["data"] for name, row in run["by_part"]["offered"].items()}
    on_memory = {"no-pause-memory"} & found.keys()
    assert found.keys() - on_memory == {
        *("locomotion-p50", "locomotion-p99", "pixels-p50", "pixels-p99", "no-pause-disk")
    }
    assert found["locomotion-p50"]["rate"] == 100
    assert all(min(found[name]["expstore"]) > 0 for name in ("locomotion-p50", "no-pause-disk"))


def test_a_cgroup_that_cannot_be_created_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(larger_than_memory, "CGROUPS", tmp_path / "nothing")
    told: list[str] = []
    arguments = ["--smoke", "--folder", str(tmp_path / "stores")]
    assert larger_than_memory.main(arguments, lambda line: told.append(str(line))) == 0
    left_out = [line for line in told if "is left out" in line]
    assert [line.split(" ")[0] for line in left_out] == [
        f"larger-than-memory/{act}" for act in ("sample", "slices")
    ]


def test_cgroups_are_removed_however_a_run_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(larger_than_memory, "CGROUPS", tmp_path)

    def run_out_of_luck() -> None:
        with larger_than_memory.memory_cgroup("one", 1 << 30) as group:
            assert (group / "memory.max").read_text() == str(1 << 30)
            (group / "memory.max").unlink()  # the rmdir of a cgroup does not mind its files
            raise RuntimeError

    with pytest.raises(RuntimeError):
        run_out_of_luck()
    ended = tmp_path / f"{larger_than_memory.PREFIX}{2**30}-expstore"
    ours = tmp_path / f"{larger_than_memory.PREFIX}{os.getpid()}-expstore"
    ended.mkdir()
    ours.mkdir()
    larger_than_memory.remove_leftovers()
    assert [*tmp_path.iterdir()] == [ours]


def test_looking_at_other_steps_is_measured(run: dict[str, Any]) -> None:
    found = {name.partition("/")[2]: row["data"] for name, row in run["by_part"]["steps"].items()}
    assert [*found] == [
        *(f"locomotion-{name}" for name in ("n-step", "frames", "next-state", "to-go")),
        *(f"pixels-{name}" for name in ("n-step", "frames")),
    ]
    assert all(data.keys() == {"with", "without"} for data in found.values())


def test_filters_are_measured(run: dict[str, Any]) -> None:
    found = {name.partition("/")[2]: row["value"] for name, row in run["by_part"]["filters"].items()}
    assert set(found) == {
        f"{what}-{name}" for what in ("first", "new", "sample") for name in ("row", "episode")
    } | {"sample-row@1", "sample-episode@1"}
    assert min(found.values()) > 0


def test_rows_of_tokens_are_measured(run: dict[str, Any]) -> None:
    found = run["by_part"]["tokens"]
    kinds = ("", "/narrow", "/lz4", "/zstd")
    assert [*found] == [f"{what}{kind}" for kind in kinds for what in ("extend", "sample", "reopen", "size")]
    sizes = [found[f"size{kind}"]["value"] for kind in kinds]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] < 1.1
    assert sizes[1] < 0.6
    beside = {row["theirs"] != "–" for row in found.values()}
    assert beside == {importlib.util.find_spec("lance") is not None}


def test_keeping_the_best_rows_is_measured(run: dict[str, Any]) -> None:
    found = {name.partition("/")[2]: row["data"] for name, row in run["by_part"]["topk"].items()}
    assert [*found] == ["few-disk", "all-disk", "few-memory", "all-memory"]
    assert found["all-disk"].keys() == {"expstore", "torchrl"}


def test_images_are_measured(run: dict[str, Any]) -> None:
    found = run["by_part"]["images"]
    assert [*found] == [
        *(f"Breakout/frame-8/{what}" for what in ("size", "sample", "slices", "slices-cached")),
        *(f"Breakout/extend-64/{where}" for where in ("tmpfs", "disk")),
        "offered/tmpfs",
    ]
    size = found["Breakout/frame-8/size"]["data"]
    # Two observations and 27 bytes, whole: nothing of TorchRL's is packed.
    assert 2 * 84 * 84 < size["torchrl"] < 2 * 84 * 84 + 1000
    assert 0 < size["images"] < 2 * 84 * 84 / 4


def test_importing_a_data_set_is_measured(run: dict[str, Any]) -> None:
    found = run["by_part"]["datasets"]
    assert [*found] == [f"Pong/{what}" for what in ("import", "memory", "size", "sample")]
    assert 500 < found["Pong/import"]["data"]["rows"] < 600  # less the rows of zeros before episodes
    # A frame, action, reward, terminal; and some files that have few bytes.
    assert 84 * 84 + 9 < found["Pong/size"]["data"]["torchrl"] < 84 * 84 + 200
    assert min(row["value"] for row in found.values()) > 0


def test_the_files_to_import_are_dopamines(tmp_path: Path) -> None:
    """What `datasets.py` writes of a game is what a ring buffer logs that is given the game's steps."""
    game = made_up(60)
    write_run(game, tmp_path / "found", rows=700, checkpoints=3)
    ring = LoggedRing(tmp_path / "wanted", slots=_array(tmp_path / "found", "add_count", 0).item() + 1)
    for at in itertools.cycle(game.steps(1).tolist()):
        reward, over = float(game.reward[at].clip(-1, 1)), bool(game.last[at + 1])
        ring.add(Step(game.frames[at], int(game.action[at]), reward, over))
        if ring.dumps == 3:
            break
    assert not ring.lost_rounds
    names = sorted(path.name for path in (tmp_path / "wanted").iterdir())
    assert sorted(path.name for path in (tmp_path / "found").iterdir()) == names
    assert len(names) == 18
    for name in names:
        stem, _, number = name.removesuffix(".gz").partition("_ckpt.")
        found, wanted = (_array(tmp_path / folder, stem, int(number)) for folder in ("found", "wanted"))
        assert found.dtype == wanted.dtype
        np.testing.assert_array_equal(found, wanted)


def _array(folder: Path, name: str, number: int) -> Any:
    with gzip.open(folder / f"{name}_ckpt.{number}.gz") as file:
        return np.load(file)
