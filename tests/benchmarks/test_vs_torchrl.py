"""The comparison with TorchRL runs, and fails if a result is below its bar; tools of other benchmarks.

Sizes are tiny and the figures are meaningless. test_whole_run.py runs all benchmarks.
"""

from __future__ import annotations

import gzip
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


@pytest.mark.slow
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


SIDES = [f"{kind}-{what}" for kind in ("locomotion", "pixels") for what in ("throughput", "torchrl", "cpu")]
ACTS = [f"latency-{act}-{part}" for act in ("waiting", "training", "python") for part in ("p50", "p99")]


@pytest.mark.torture
@pytest.mark.parametrize(
    ("script", "names"),
    [
        ("remote", ["sample", "stream", "stream/pixels", "extend", "limit"]),
        ("many_writers", [f"many-writers/{name}" for name in (*SIDES, "latency-idle", *ACTS)]),
        ("page", ["page/first data", "page/filter", "page/frames", "page/writer"]),
    ],
)
def test_other_benchmarks_have_their_results(script: str, names: list[str], tmp_path: Path) -> None:
    figures, folder = tmp_path / "figures.json", tmp_path / "a"
    command = [sys.executable, str(SCRIPT.with_name(f"{script}.py")), "--smoke"]
    done = subprocess.run(
        [*command, "--json", str(figures), "--folder", str(folder)], text=True, capture_output=True,
        timeout=LIMIT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not [*folder.iterdir()]
    found = {row["name"]: row["value"] for row in json.loads(figures.read_text())["results"]}
    assert [*found] == names
    assert min(found.values()) > 0


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
