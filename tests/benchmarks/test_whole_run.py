"""One tiny run of all benchmarks, as `make bench-smoke` does it: every part ends, and has its results.

It takes a minute of CPU, so it belongs to the long run.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from typing import Any

import pytest

from tests.support.paths import ROOT

#: Seconds. Nothing here is about time: on a busy machine it may take long.
LIMIT = 1000
SB3_SIDES = (("add", 1), ("add", 16), ("add", 64), ("learn", 1), ("learn", 4), ("learn", 16))
pytestmark = [pytest.mark.torture, pytest.mark.timeout(LIMIT + 100)]


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
    kinds = ("", "/lz4", "/zstd")
    assert [*found] == [f"{what}{kind}" for kind in kinds for what in ("extend", "sample", "reopen", "size")]
    sizes = [found[f"size{kind}"]["value"] for kind in kinds]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] < 1.1
    assert sizes[-1] < 0.6
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
