"""Trackers log each ended episode once, sizes, and ages of sampled rows."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import expstore
from expstore import trackers
from expstore.disk.files import Disk
from tests.support.paths import ROOT
from tests.support.servers import serving


class Scalars:
    """Has the method of a SummaryWriter."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, float, int]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.calls.append((name, value, step))


class Run:
    """Has the method of a run of wandb."""

    def __init__(self) -> None:
        self.calls: list[tuple[dict[str, float], int]] = []

    def log(self, values: dict[str, float], step: int) -> None:
        self.calls.append((values, step))


def step(recorder: Any, reward: float = 1.0, *, terminated: bool = False, truncated: bool = False) -> None:
    zeros = np.zeros(3, np.float32)
    recorder.step(zeros, 0, reward, zeros, terminated, truncated)


def write_episode(recorder: Any, length: int, reward: float = 1.0) -> None:
    for number in range(length):
        step(recorder, reward, terminated=number == length - 1)


@pytest.fixture
def rb(tmp_path: Path) -> Iterator[expstore.TensorDictReplayBuffer]:
    with expstore.open(tmp_path / "a.exp", capacity=100, batch_size=8, seed=0) as rb:
        yield rb


def episodes_of(values: dict[str, float]) -> dict[str, float]:
    start = "expstore/episode/"
    return {name.removeprefix(start): value for name, value in values.items() if name.startswith(start)}


def test_ended_episodes_are_logged_once(rb: expstore.TensorDictReplayBuffer) -> None:
    with rb.record("early") as recorder:
        write_episode(recorder, 5)
    tracker = trackers.Tracker(rb, Scalars())
    assert episodes_of(tracker.log_now()) == {"count": 0}, "it ended before the tracker was created"
    with rb.record("a") as first, rb.record("b") as second:
        step(first)  # is open while later episodes end
        write_episode(second, 2, reward=3.0)
        write_episode(second, 4)
        expected = {"count": 2, "length": 3, "return": 5, "return_min": 4, "return_max": 6}
        assert episodes_of(tracker.log_now()) == expected
        assert episodes_of(tracker.log_now()) == {"count": 0}
        step(first, 2.0, truncated=True)
        expected = {"count": 1, "length": 2, "return": 3, "return_min": 3, "return_max": 3}
        assert episodes_of(tracker.log_now()) == expected
        step(first)
        assert episodes_of(tracker.log_now()) == {"count": 0}
    assert episodes_of(tracker.log_now()) == {"count": 0}, "a cut episode has no return"


def test_an_open_episode_of_before_is_logged_when_it_ends(rb: expstore.TensorDictReplayBuffer) -> None:
    with rb.record("a") as recorder:
        step(recorder)
        tracker = trackers.Tracker(rb, Scalars())
        step(recorder, terminated=True)
        assert episodes_of(tracker.log_now())["return"] == 2


def test_only_few_episodes_are_read(
    rb: expstore.TensorDictReplayBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rb.record("a") as recorder, rb.record("b") as other:
        step(other)
        for _ in range(20):
            write_episode(recorder, 1)
        tracker = trackers.Tracker(rb, Scalars())
        write_episode(recorder, 1)
        read = []
        describe = trackers._describe_episodes
        monkeypatch.setattr(
            trackers, "_describe_episodes", lambda rows: read.append(len(rows)) or describe(rows)
        )
        tracker.log_now()
        tracker.log_now()
    assert read == [2, 1]


def test_sizes_of_the_store(rb: expstore.TensorDictReplayBuffer) -> None:
    tracker = trackers.Tracker(rb, Scalars(), prefix="")
    with rb.record("a") as recorder:
        write_episode(recorder, 130)
    values = tracker.log_now()
    assert (values["store/rows"], values["store/written"]) == (100, 130)
    rb.flush()
    stored = Disk().measure_space(Path(rb.stats()["path"]))
    assert tracker.log_now()["store/bytes"] == pytest.approx(stored, rel=0.2)


@pytest.mark.parametrize("as_numpy", [False, True])
def test_ages_are_counted_in_rows(rb: expstore.TensorDictReplayBuffer, as_numpy: bool) -> None:
    tracker = trackers.Tracker(rb, Scalars(), prefix="")
    with rb.record("a") as recorder:
        write_episode(recorder, 20)
    batch = rb.sample(as_numpy=as_numpy)
    ids = np.asarray(batch["id"])
    values = tracker.log_now(batch)
    assert values["sampling/age"] == pytest.approx(20 - ids.mean())
    assert values["sampling/age_max"] == 20 - ids.min()
    assert "sampling/age" not in tracker.log_now()


def test_it_logs_every_so_many_rows(rb: expstore.TensorDictReplayBuffer) -> None:
    writer = Scalars()
    tracker = trackers.Tracker(rb, writer, every=10)
    logged = []
    with rb.record("a") as recorder:
        for number in range(1, 36):
            step(recorder, terminated=number % 7 == 0)
            if tracker.log():
                logged.append(number)
    assert logged == [10, 20, 30]
    assert {step for _, _, step in writer.calls} == {10, 20, 30}
    counts = [value for name, value, _ in writer.calls if name == "expstore/episode/count"]
    assert counts == [1, 1, 2]
    assert tracker.log() == {}
    tracker.log_now(step=7)
    assert writer.calls[-1][2] == 7


def test_a_run_gets_one_dict_per_step(rb: expstore.TensorDictReplayBuffer) -> None:
    run = Run()
    tracker = trackers.Tracker(rb, run, every=1)
    with rb.record("a") as recorder:
        write_episode(recorder, 3)
    values = tracker.log(rb.sample())
    assert run.calls == [(values, 3)]
    assert all(type(value) is float for value in values.values())


def test_what_a_failed_writer_missed_is_logged_again(rb: expstore.TensorDictReplayBuffer) -> None:
    class Broken(Run):
        def log(self, values: dict[str, float], step: int) -> None:
            if not self.calls:
                self.calls.append((values, step))
                raise OSError("no connection")
            super().log(values, step)

    run = Broken()
    tracker = trackers.Tracker(rb, run, every=1)
    with rb.record("a") as recorder:
        write_episode(recorder, 3)
    with pytest.raises(OSError, match="no connection"):
        tracker.log()
    assert episodes_of(tracker.log())["count"] == 1


def test_rows_without_rewards_have_no_returns(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "a.exp") as rb:
        tracker = trackers.Tracker(rb, Scalars())
        ends = np.arange(4) == 3
        rb.extend({"observation": np.zeros(4), "next": {"terminated": ends, "truncated": ~ends & False}})
        assert episodes_of(tracker.log_now()) == {"count": 1, "length": 4}


@pytest.mark.slow
def test_a_reader_and_a_client_log_what_another_process_writes(rb: expstore.TensorDictReplayBuffer) -> None:
    path = Path(rb.stats()["path"])
    with rb.record("a") as recorder:
        write_episode(recorder, 1)
        rb.flush()
        with expstore.open(path, mode="r") as reader, serving(path, "--read-only") as (_, facts):
            client = expstore.connect(f"{facts['listening']}/a")
            found = [trackers.Tracker(one, Scalars()) for one in (reader, client)]
            write_episode(recorder, 6)
            rb.flush()
            values = [tracker.log_now() for tracker in found]
            client.close()
    assert [episodes_of(one)["return"] for one in values] == [6, 6]
    assert "expstore/store/bytes" in values[0]
    assert "expstore/store/bytes" not in values[1], "the files are on another machine"


def test_wrong_arguments_are_refused(rb: expstore.TensorDictReplayBuffer) -> None:
    with pytest.raises(expstore.ArgumentError, match="cannot log to a object: it has neither add_scalar"):
        trackers.Tracker(rb, object())
    with pytest.raises(expstore.ArgumentError, match="every must be an integer of at least 1, got 0"):
        trackers.Tracker(rb, Scalars(), every=0)
    writer = Scalars()
    tracker = trackers.Tracker(rb, writer)
    with rb.record("a") as recorder:
        write_episode(recorder, 2)
    for batch in ({"observation": np.zeros(3)}, rb.sample().exclude("id"), np.zeros(3)):
        with pytest.raises(expstore.ArgumentError, match="cannot log the age of a .* without ids"):
            tracker.log_now(batch)
    assert writer.calls == []


def run_script(script: str, folder: Path, **more: str) -> str:
    """Run a script in a process of its own: these libraries warn and start threads."""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **more},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


SCRIPT = """
import numpy as np, expstore
with expstore.open("a.exp", batch_size=4) as rb:
    tracker = expstore.trackers.Tracker(rb, writer, every=5)
    with rb.record("a") as recorder:
        for number in range(1, 11):
            recorder.step(np.zeros(2), 0, 1.5, np.zeros(2), number % 5 == 0, False)
            tracker.log(rb.sample())
"""


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_tensorboard_reads_what_was_logged(tmp_path: Path) -> None:
    before = "from torch.utils.tensorboard import SummaryWriter\nwriter = SummaryWriter('log')\n"
    after = """
writer.close()
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator("log")
events.Reload()
for name in ("episode/return", "episode/length", "store/rows", "store/written"):
    print(name, [(event.step, event.value) for event in events.Scalars("expstore/" + name)])
print(sorted(events.Tags()["scalars"]))
"""
    lines = run_script(before + SCRIPT + after, tmp_path).splitlines()
    assert lines[:4] == [
        "episode/return [(5, 7.5), (10, 7.5)]",
        "episode/length [(5, 5.0), (10, 5.0)]",
        "store/rows [(5, 5.0), (10, 10.0)]",
        "store/written [(5, 5.0), (10, 10.0)]",
    ]
    assert "'expstore/sampling/age'" in lines[4]


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_an_offline_run_of_wandb_has_what_was_logged(tmp_path: Path) -> None:
    before = "import wandb\nwriter = wandb.init(mode='offline', dir='.', project='test')\n"
    after = "\nprint('summary', writer.summary['expstore/episode/return'], writer.step)\nwriter.finish()\n"
    out = run_script(before + SCRIPT + after, tmp_path, WANDB_SILENT="true", HOME=str(tmp_path))
    assert "summary 7.5 10" in out
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
