"""The benchmark script runs through, and fails when something is below its bar.

Run with the other tests; sizes are tiny and the figures mean nothing here.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

#: Seconds. Nothing here is about time: on a busy machine it may take long.
LIMIT = 500
pytestmark = pytest.mark.timeout(LIMIT + 100)

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "vs_torchrl.py"

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


def test_every_row_is_there_and_bars_can_fail(tmp_path: Path) -> None:
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
    assert {row["name"] for row in json.loads(figures.read_text())["results"]} == ROWS
    _, trouble = passing.communicate(timeout=LIMIT)
    assert passing.returncode == 0, trouble
    assert not [*(tmp_path / "a").iterdir(), *(tmp_path / "b").iterdir()]


def results_of(script: str, folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """Run a script of benchmarks, tiny; return its results. It must leave nothing behind."""
    figures = folder / "figures.json"
    command = [sys.executable, str(SCRIPT.with_name(script)), "--smoke", "--json", str(figures), *arguments]
    done = subprocess.run(
        [*command, "--folder", str(folder / "a")], text=True, capture_output=True, timeout=LIMIT
    )
    assert done.returncode == 0, done.stderr
    assert not [*(folder / "a").iterdir()]
    results: list[dict[str, Any]] = json.loads(figures.read_text())["results"]
    return results


def test_versions_are_measured(tmp_path: Path) -> None:
    names = [row["name"].partition("/")[2] for row in results_of("snapshots.py", tmp_path)]
    assert names == ["first", "load", "next-time", "next-bytes"]


def test_being_sure_is_measured(tmp_path: Path) -> None:
    found = {row["name"]: row["data"]["fsyncs"] for row in results_of("durability.py", tmp_path)}
    for rows in ("add", "extend-1", "extend-10", "extend-100", "extend-1000"):
        assert (found[f"sync/{rows}"], found[f"process/{rows}"]) == (1, 0)
    # Columns, checksums and journal, for one row as for many.
    assert found["flush/1"] > 10
    assert found["close"] > 10
    assert found["reopen"] > 1
    assert (found["one-fsync/first"], found["one-fsync/again"]) == (1, 1)


def test_prioritized_sampling_is_measured(tmp_path: Path) -> None:
    found = {row["name"]: row["data"] for row in results_of("samplers.py", tmp_path)}
    assert set(found) == {f"prioritized/{name}" for name in ("sample+update", "reopen", "reopen-cold")}
    assert found["prioritized/reopen"]["probes"][0]["rows"] == 500


def test_slices_are_measured(tmp_path: Path) -> None:
    found = {row["name"].partition("/")[2]: row["data"] for row in results_of("slices.py", tmp_path)}
    assert [*found] == [
        "beside-memmap",
        "beside-memory",
        "index-by-size",
        "index-by-lanes",
        "sample-by-lanes",
    ]
    assert found["beside-memory"].keys() == {"expstore", "torchrl"}
    one, many = found["index-by-lanes"]["rows_per_fragment"]
    assert one > 100
    assert many < 3


def test_looking_at_other_steps_is_measured(tmp_path: Path) -> None:
    found = {row["name"].partition("/")[2]: row["data"] for row in results_of("steps.py", tmp_path)}
    assert [*found] == [
        *(f"locomotion-{name}" for name in ("n-step", "frames", "next-state", "to-go")),
        *(f"pixels-{name}" for name in ("n-step", "frames")),
    ]
    assert all(data.keys() == {"with", "without"} for data in found.values())


def test_filters_are_measured(tmp_path: Path) -> None:
    found = {row["name"].partition("/")[2]: row["value"] for row in results_of("filters.py", tmp_path)}
    assert set(found) == {
        f"{what}-{name}" for what in ("first", "new", "sample") for name in ("row", "episode")
    }
    assert min(found.values()) > 0


def test_rows_of_tokens_are_measured(tmp_path: Path) -> None:
    found = {row["name"]: row for row in results_of("tokens.py", tmp_path)}
    kinds = ("", "/narrow", "/lz4", "/zstd")
    assert [*found] == [f"{what}{kind}" for kind in kinds for what in ("extend", "sample", "reopen", "size")]
    sizes = [found[f"size{kind}"]["value"] for kind in kinds]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] < 1.1
    assert sizes[1] < 0.6
    beside = {row["theirs"] != "–" for row in found.values()}
    assert beside == {importlib.util.find_spec("lance") is not None}


def test_served_stores_are_measured(tmp_path: Path) -> None:
    found = {row["name"]: row["value"] for row in results_of("remote.py", tmp_path)}
    assert [*found] == ["sample", "stream", "stream/pixels", "extend", "limit"]
    assert min(found.values()) > 0


def test_keeping_the_best_rows_is_measured(tmp_path: Path) -> None:
    found = {row["name"].partition("/")[2]: row["data"] for row in results_of("topk.py", tmp_path)}
    assert [*found] == ["few-disk", "all-disk", "few-memory", "all-memory"]
    assert found["all-disk"].keys() == {"expstore", "torchrl"}


def make_game(folder: Path, name: str, *, lanes: int = 8, steps: int = 80) -> None:
    """Write what a game showed where `images.py` looks for it: a dot that moves, two episodes a lane."""
    each = steps + 2
    number = np.arange(lanes * each)
    frames = np.zeros((number.size, 84, 84), np.uint8)
    frames[number, number % 84, number // each] = 200
    last = np.isin(number % each, (steps // 2, each - 1))
    np.savez(
        folder / f"{name}-{steps}.npz",
        frames=frames,
        last=last,
        action=number % 4,
        reward=np.ones(number.size, np.float32),
        terminated=np.roll(last, -1),
        lane=number // each,
    )


def test_images_are_measured(tmp_path: Path) -> None:
    games, memory = tmp_path / "games", tmp_path / "memory"
    games.mkdir()
    for name in ("Breakout", "Pong", "Seaquest", "MsPacman"):
        make_game(games, name)
    given = ("--frames", str(games), "--memory", str(memory), "--only")
    found = {row["name"]: row for row in results_of("images.py", tmp_path, *given, "Breakout")}
    kinds = [f"{what}-{lanes}" for what in ("frame", "stack") for lanes in (1, 8)]
    assert [*found] == [
        *(
            f"Breakout/{kind}/{what}"
            for kind in kinds
            for what in ("size", "sample", "slices", "slices-cached")
        ),
        *(f"Breakout/extend-{rows}/{where}" for rows in (64, 256, 1000) for where in ("tmpfs", "disk")),
    ]
    # Two observations and 27 bytes, whole: nothing of TorchRL's is packed.
    assert 2 * 84 * 84 < found["Breakout/frame-1/size"]["data"]["torchrl"] < 2 * 84 * 84 + 1000
    assert 0 < found["Breakout/frame-1/size"]["data"]["images"] < 2 * 84 * 84 / 4
    offered = results_of("images.py", tmp_path, *given, "offered")
    assert [row["name"] for row in offered] == ["offered/tmpfs", "offered/disk"]
    assert not [*memory.iterdir()]
