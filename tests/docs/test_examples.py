"""The examples that train continue after kill -9 and Ctrl-C, with the store's rows and the checkpoint."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import expstore
from tests.support.diffs import apply_diff
from tests.support.example_runs import Run, check_episodes, flatten_state, run_example, stop_example
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow  # each trains, and is killed and continued

EXAMPLES = ROOT / "examples"
COMMON = ("--batch-size", "32", "--learning-starts", "64", "--checkpoint-every", "100", "--log-every", "50")
DQN_OPTIONS = (*COMMON, "--exploration-steps", "300", "--train-every", "2")
#: Steps of a life that is too short for a gradient step.
IDLE = 60
#: Rows that the workers of collect_dqn.py may be ahead of the training, or behind it, and those of blocks on
#: their way.
AHEAD = 2 * 2 * 2 * 4 + 16


@dataclass(frozen=True)
class Checkpoint:
    """The step of a checkpoint, how many gradient steps each optimizer took, and all its other values."""

    step: int
    updates: list[int]
    values: dict[str, Any]


def load_torch(folder: Path, *optimizers: str) -> Checkpoint:
    state: dict[str, Any] = torch.load(folder / "a.checkpoint.pt", weights_only=True)
    updates = [int(state[name]["state"][0]["step"]) for name in optimizers or ("optimizer",)]
    return Checkpoint(state["step"], updates, flatten_state({**state, "step": 0}))


def load_sac(folder: Path) -> Checkpoint:
    return load_torch(folder, "q_optimizer", "policy_optimizer", "alpha_optimizer")


def load_jax(folder: Path) -> Checkpoint:
    with np.load(folder / "a.checkpoint.npz") as file:
        step, *leaves, updates = (file[name].tolist() for name in file.files)
    return Checkpoint(step, [updates], dict(enumerate(leaves)))


def load_sb3(folder: Path) -> Checkpoint:
    with zipfile.ZipFile(folder / "a.model.zip") as file:
        return Checkpoint(json.loads(file.read("data"))["num_timesteps"], [], {})


@dataclass(frozen=True)
class Example:
    """An example, and what is known of it.

    Args:
        name: Its file, without the suffix.
        options: Arguments with which it trains soon.
        load: Reads the checkpoint in a folder.
        stop_at: The step at which it is killed.
        every: It takes a gradient step after so many environment steps.
        missing: So many of them did not take place, as there were fewer than 64 rows.
        last: It continues for so many steps after Ctrl-C.
        lanes: Streams of episodes.
        needs: Package that users may lack.
    """

    name: str
    options: tuple[str, ...]
    load: Callable[[Path], Checkpoint] = load_torch
    stop_at: int = 350
    every: int = 2
    missing: int = 31
    last: int = 40
    lanes: int = 1
    needs: str = "torch"

    def run(self, program: Path, folder: Path, *arguments: object) -> Run:
        return run_example(str(program), folder, "--path", "a.exp", *self.options, *map(str, arguments))

    def stop(self, program: Path, folder: Path, at: int, number: signal.Signals) -> Run:
        arguments = ("--path", "a.exp", *self.options, "--steps", "1000000")
        return stop_example(str(program), folder, *arguments, stop_at=at, number=number)


DQN = Example("dqn", DQN_OPTIONS)
#: The example with the lines that docs/cleanrl.md adds to it.
PRIORITIZED = Example("prioritized", (*COMMON, "--train-every", "1"), stop_at=250, every=1, missing=63)
SAC = Example(
    "sac", (*COMMON, "--num-envs", "2", "--train-every", "4"),
    load=load_sac, stop_at=450, every=4, missing=16, last=420, lanes=2,
)  # fmt: skip
JAX = Example("jax_dqn", DQN_OPTIONS, load=load_jax, needs="jax")
COLLECT = Example(
    "collect_dqn", (*DQN_OPTIONS, "--workers", "2", "--lanes", "2", "--block", "4", "--push-every", "20"),
    missing=32, lanes=4,
)  # fmt: skip
SB3 = Example(
    "sb3_dqn", ("--checkpoint-every", "100", "--log-every", "50"), load=load_sb3, needs="stable_baselines3"
)


@dataclass
class Lives:
    """The runs of an example; rows, priorities and checkpoint after each."""

    folder: Path
    example: Example
    runs: list[Run] = field(default_factory=list)
    rows: list[TensorDict] = field(default_factory=list)
    priorities: list[dict[int, float]] = field(default_factory=list)
    checkpoints: list[Checkpoint] = field(default_factory=list)

    def note(self, run: Run) -> None:
        assert "Traceback" not in run.text
        self.runs.append(run)
        with expstore.open(self.folder / "a.exp", mode="r") as rb:
            self.rows.append(rb[:])
            self.priorities.append(dict(rb.sql("SELECT _id, _priority FROM transitions").fetchall()))
        self.checkpoints.append(self.example.load(self.folder))


def write_program(example: Example, folder: Path) -> Path:
    """Return the file of an example; of the one with priorities, apply the page's diff first."""
    if example is not PRIORITIZED:
        return EXAMPLES / f"{example.name}.py"
    page = (ROOT / "docs" / "cleanrl.md").read_text()
    (diff,) = re.findall(
        r"^### examples/dqn.py with priorities\n.*?^```diff\n(.*?)^```$", page, re.DOTALL | re.M
    )
    program = folder / "dqn.py"
    program.write_text(apply_diff(diff, (EXAMPLES / "dqn.py").read_text()))
    return program


@pytest.mark.timeout(600)  # up to nine processes, one after the other
@pytest.mark.parametrize(
    "example", [DQN, PRIORITIZED, SAC, JAX, COLLECT, SB3], ids=lambda example: example.name
)
def test_an_example_continues(example: Example, tmp_path: Path) -> None:
    """Kill it, let it run without learning, stop it by Ctrl-C, and let it run to its end."""
    # Not importorskip, which imports JAX here: it starts threads, and other tests fork this process.
    if importlib.util.find_spec(example.needs) is None:
        pytest.skip(f"{example.needs} is not installed")
    program = write_program(example, tmp_path)
    lives = Lives(tmp_path, example)
    lives.note(example.stop(program, tmp_path, example.stop_at, signal.SIGKILL))
    start = lives.checkpoints[0].step
    if example not in (COLLECT, SB3):
        lives.note(example.run(program, tmp_path, "--steps", start + IDLE, "--learning-starts", 50_000))
        check_that_nothing_was_learned(lives)
    lives.note(example.stop(program, tmp_path, start + 150, signal.SIGINT))
    with expstore.open(tmp_path / "a.exp") as rb:
        assert rb.recovered is None, "Ctrl-C closes the store"
    end = lives.checkpoints[-1].step + example.last
    lives.note(example.run(program, tmp_path, "--steps", end))
    assert [run.code for run in lives.runs] == [-signal.SIGKILL, *[0] * (len(lives.runs) == 4), 130, 0]
    check_what_was_said(lives, end)
    check_rows(lives)
    if example is not SB3:
        check_learning(lives)
    with expstore.open(tmp_path / "a.exp", mode="r") as rb:
        check_episodes(rb)
        found = rb.sql('SELECT source, status, length, "return" FROM episodes ORDER BY episode_id').fetchall()
        if example is COLLECT:
            check_workers(rb)
    statuses = [status for _, status, *_ in found]
    assert statuses.count("cut") <= example.lanes * len(lives.runs), "at most one of each lane of each run"
    if example is SAC:
        check_pendulum(found, lives.rows)
    else:
        assert set(statuses) <= {"terminated", "cut"}
        assert statuses.count("terminated") > 5
        assert all(total == length for *_, length, total in found)
    if example in (DQN, SAC, COLLECT):
        check_that_it_is_done(lives, program, end)


def check_that_nothing_was_learned(lives: Lives) -> None:
    """The networks, optimizers and priorities of a run without gradient steps are those it has loaded."""
    before, after = lives.checkpoints
    assert after.step == before.step + IDLE
    assert (after.updates, after.values) == (before.updates, before.values)
    assert {row: lives.priorities[1][row] for row in lives.priorities[0]} == lives.priorities[0]
    assert (len(set(lives.priorities[0].values())) > 50) == (lives.example is PRIORITIZED)


def check_what_was_said(lives: Lives, end: int) -> None:
    for run, rows, before in zip(lives.runs[1:], lives.rows, lives.checkpoints, strict=False):
        assert f"continuing at step {before.step:,}; the store has {len(rows):,} rows" in run.text
    stopped, done = (run.last_line for run in lives.runs[-2:])
    assert stopped == f"stopped at step {lives.checkpoints[-2].step:,}; run the same command to continue"
    assert done.startswith(f"done: {end:,} steps, mean return of the last")


def check_rows(lives: Lives) -> None:
    """A step that was printed is stored, and rows of former runs stay."""
    example, steps = lives.example, [checkpoint.step for checkpoint in lives.checkpoints]
    counts = [len(rows) for rows in lives.rows]
    # Callbacks of Stable-Baselines3 are called before the step is added; the workers are not in step.
    slack = {SB3: 1, COLLECT: AHEAD + 100}.get(example, 0)
    assert counts[0] >= example.stop_at - slack
    assert example.stop_at - 100 <= steps[0] <= counts[0] + slack, "a line comes before its checkpoint"
    for before, after in itertools.pairwise(range(len(steps))):
        extra = (counts[after] - counts[before]) - (steps[after] - steps[before])
        assert -AHEAD <= extra <= 2 * AHEAD if example is COLLECT else abs(extra) <= slack
    if example is COLLECT:
        assert counts[0] - steps[0] <= slack
        for count, checkpoint in zip(counts, lives.checkpoints, strict=True):
            assert checkpoint.step - AHEAD <= checkpoint.values["/rows"] <= count
    for rows in lives.rows[1:]:
        assert (rows[: counts[0]] == lives.rows[0]).all()


def check_learning(lives: Lives) -> None:
    """Each optimizer counts on from its checkpoint, a step for every so many rows."""
    every, first = lives.example.every, lives.checkpoints[0]
    idle = IDLE if len(lives.runs) == 4 else 0
    for checkpoint in lives.checkpoints:
        skipped = (first.step + idle) // every - first.step // every if checkpoint.step > first.step else 0
        expected = checkpoint.step // every - lives.example.missing - skipped
        assert set(checkpoint.updates) == {expected}
    assert lives.checkpoints[-1].values != first.values
    if lives.example is PRIORITIZED:
        last = lives.priorities[-1]
        assert {row: last[row] for row in lives.priorities[0]} != lives.priorities[0]


def check_pendulum(found: list[tuple[Any, ...]], rows: list[TensorDict]) -> None:
    whole = [(source, length) for source, status, length, _ in found if status == "truncated"]
    # A reset that was recorded as a step would make an episode longer than Pendulum's time limit.
    assert {length for _, length in whole} == {200}
    before = len(rows[0]) // 400
    assert before >= 1
    assert len(whole) >= 2 * before + 2, "one of each environment after the kill"
    assert len({source for source, _ in whole}) == 2
    assert {status for _, status, *_ in found} == {"truncated", "cut"}
    action = rows[-1]["action"]
    assert (rows[-1]["next", "reward"] < 0).all(), "a reset has a reward of 0"
    assert action.shape == (len(action), 1)
    assert action.abs().max() <= 2
    assert action.unique().numel() > len(action) // 2


def check_workers(rb: expstore.TensorDictReplayBuffer) -> None:
    sources = rb.sql("SELECT DISTINCT split_part(source, '//', 1) FROM episodes ORDER BY 1").fetchall()
    assert sources == [("collector/0",), ("collector/1",)]
    assert rb.sql("SELECT max(policy_version) FROM transitions").fetchall()[0][0] > 10
    settings = rb.sql("SELECT info->'origin'->'hyperparameters'->>'gamma' FROM episodes").fetchall()
    assert ("0.99",) in settings


def check_that_it_is_done(lives: Lives, program: Path, end: int) -> None:
    """A finished run changes nothing; another seed, or another store, is one message."""
    example, folder = lives.example, lives.folder
    lives.note(example.run(program, folder, "--steps", end))
    assert f"all {end:,} steps are done" in lives.runs[-1].last_line
    assert len(lives.rows[-1]) == len(lives.rows[-2])
    assert lives.checkpoints[-1] == lives.checkpoints[-2]
    refused = [(example.run(program, folder, "--seed", 1), "seed=1")]
    (folder / "a.exp").rename(folder / "other.exp")
    refused.append((example.run(program, folder, "--steps", 20), "but the store has had only 0 rows"))
    for run, words in refused:
        assert run.code == 1
        assert words in run.text
        assert "Traceback" not in run.text


# -- without training ------------------------------------------------------------------------------------


@functools.cache
def names_of(example: str) -> dict[str, Any]:
    """Return what an example defines."""
    return runpy.run_path(str(EXAMPLES / f"{example}.py"))


COUNTS = {"dqn": "steps", "sac": "num-envs", "collect_dqn": "workers"}


@pytest.mark.parametrize("example", COUNTS)
def test_wrong_arguments_are_refused(
    example: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    count = COUNTS[example]
    for arguments, message in (
        (f"--{count} 0", f"argument --{count}: must be at least 1, got 0"),
        ("--seed -1", "argument --seed: must be at least 0, got -1"),
        ("--gamma 1.5", "argument --gamma: must be between 0 and 1, got 1.5"),
        ("--tau 1.5", "argument --tau: must be between 0 and 1, got 1.5"),
        ("--batch-size many", "argument --batch-size: invalid int value: 'many'"),
        ("--learning-starts 60 --buffer-size 50", "--learning-starts: must be at most --buffer-size"),
        ("--colour red", "unrecognized arguments: --colour red"),
    ):
        with pytest.raises(SystemExit) as ended:
            names_of(example)["main"](["--path", str(tmp_path / "a.exp"), *arguments.split()])
        assert ended.value.code == 2, arguments
        assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("example", "key"), [("dqn", "step"), ("sac", "step"), ("collect_dqn", "rows")])
def test_a_failed_save_keeps_the_old_checkpoint(
    example: str, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, names = tmp_path / "a.checkpoint.pt", names_of(example)
    names["save_checkpoint"](path, {key: 1})

    def fail(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="No space"):
            names["save_checkpoint"](path, {key: 2})
    assert names["load_checkpoint"](path, 1) == {key: 1}
    names["save_checkpoint"](path, {key: 3})
    assert names["load_checkpoint"](path, 3) == {key: 3}


#: In a process of its own: JAX starts threads, and other tests fork this process.
JAX_STEPS = f"""
import runpy
import numpy as np

example = runpy.run_path({str(EXAMPLES / "jax_dqn.py")!r})
args = example["parse_args"](["--learning-rate", "0.01"])
rng = np.random.default_rng(0)
batch = {{
    "observation": rng.normal(size=(8, 4)).astype(np.float32),
    "action": rng.integers(2, size=8),
    "next": {{
        "observation": rng.normal(size=(8, 4)).astype(np.float32),
        "reward": np.ones((8, 1), np.float32),
        "terminated": np.ones((8, 1), bool),
    }},
}}
update, first = example["make_update"](args), example["init_state"](0)
state, losses = first, []
for _ in range(50):
    state, loss = update(state, batch)
    losses.append(float(loss))
assert losses[-1] < losses[0] / 10, losses
assert int(state.updates) == 50
assert update(first, batch)[1] == losses[0], "the inputs were changed"
assert update._cache_size() == 1, "it was compiled again"
example["main"](["--steps", "0"])
"""


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="jax is not installed")
def test_a_step_of_jax_follows_from_state_and_batch() -> None:
    """A gradient step lowers the loss of its batch, leaves its inputs alone, and compiles once.

    After that the program refuses wrong arguments.
    """
    done = subprocess.run(
        [sys.executable, "-c", JAX_STEPS],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert "argument --steps: must be at least 1, got 0" in done.stderr
    assert done.returncode == 2, done.stderr
