"""The DQN and SAC examples continue after kill -9 and Ctrl-C, with the store's rows and the checkpoint.

The example with workers, whose rows are not in the order of its steps, has laws of its own in
test_example_collect.py; arguments and checkpoints of all three are tested here.
"""

from __future__ import annotations

import functools
import os
import runpy
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import expstore
from tests.support.example_runs import Run, check_episodes, flatten_state, run_example, stop_example
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow  # each trains, and is killed and continued

ENDLESS = ("--steps", "1000000")


@dataclass(frozen=True)
class Example:
    """An example, and what is known of it.

    Args:
        name: Its file, without the suffix.
        small: Arguments with which it trains soon.
        stop_at: The step at which it is killed.
        more: Steps that a run continues for.
        every: It takes a gradient step after so many steps, from 64 rows on.
        optimizers: Their names in a checkpoint.
    """

    name: str
    small: tuple[str, ...]
    stop_at: int
    more: int
    every: int
    optimizers: tuple[str, ...]

    def run(self, folder: Path, *arguments: str) -> Run:
        return run_example(f"{self.name}.py", folder, "--path", "a.exp", *self.small, *arguments)

    def stop(self, folder: Path, at: int, number: signal.Signals) -> Run:
        arguments = ("--path", "a.exp", *self.small, *ENDLESS)
        return stop_example(f"{self.name}.py", folder, *arguments, stop_at=at, number=number)


COMMON = ("--batch-size", "32", "--learning-starts", "64", "--checkpoint-every", "100", "--log-every", "50")
DQN = Example(
    "dqn", (*COMMON, "--exploration-steps", "300", "--train-every", "2"), 350, 360, 2, ("optimizer",)
)
SAC = Example(
    *("sac", (*COMMON, "--num-envs", "2", "--train-every", "4"), 500, 460, 4),
    ("q_optimizer", "policy_optimizer", "alpha_optimizer"),
)
EACH = pytest.mark.parametrize("example", [DQN, SAC], ids=lambda example: example.name)


@dataclass
class Killed:
    """A run that was killed, and three runs that continue it; with rows and checkpoint after each."""

    example: Example
    folder: Path
    runs: list[Run] = field(default_factory=list)
    rows: list[TensorDict] = field(default_factory=list)
    checkpoints: list[dict[str, Any]] = field(default_factory=list)

    def note(self, run: Run) -> None:
        self.runs.append(run)
        with expstore.open(self.folder / "a.exp", mode="r") as rb:
            self.rows.append(rb[:])
        self.checkpoints.append(load(self.folder))


def load(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(folder / "a.checkpoint.pt", weights_only=True)
    return state


@pytest.fixture(scope="module", params=[DQN, SAC], ids=lambda example: example.name)
def killed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Killed:
    example: Example = request.param
    found = Killed(example, tmp_path_factory.mktemp(example.name))
    found.note(example.stop(found.folder, example.stop_at, signal.SIGKILL))
    step = found.checkpoints[0]["step"]
    for arguments in (
        ("--steps", str(step + 60), "--learning-starts", "50000"),  # changes no network
        ("--steps", str(step + example.more)),
        ("--steps", str(step + example.more)),
    ):
        found.note(example.run(found.folder, *arguments))
    return found


def test_a_killed_run_continues_to_its_end(killed: Killed) -> None:
    assert [run.code for run in killed.runs] == [-signal.SIGKILL, 0, 0, 0]
    steps = killed.checkpoints[0]["step"] + killed.example.more
    assert killed.runs[2].last_line.startswith(f"done: {steps:,} steps, mean return of the last 20")
    assert f"all {steps:,} steps are done" in killed.runs[3].last_line
    assert "Traceback" not in "".join(run.text for run in killed.runs)


def test_rows_recorded_before_the_kill_stay(killed: Killed) -> None:
    counts = [len(rows) for rows in killed.rows]
    assert counts[0] >= killed.example.stop_at, "a step that was printed is stored"
    assert [after - counts[0] for after in counts] == [0, 60, killed.example.more, killed.example.more]
    for rows in killed.rows[1:]:
        assert (rows[: counts[0]] == killed.rows[0]).all()


def test_training_continues_from_the_checkpoint(killed: Killed) -> None:
    step, count, more = killed.checkpoints[0]["step"], len(killed.rows[0]), killed.example.more
    assert step % 100 == 0
    assert killed.example.stop_at - 100 <= step <= count, "a line of progress comes before its checkpoint"
    assert f"continuing at step {step:,}; the store has {count} rows" in killed.runs[1].text
    assert [state["step"] - step for state in killed.checkpoints] == [0, 60, more, more]
    states = [flatten_state({**state, "step": 0}) for state in killed.checkpoints]
    assert states[0] == states[1], "the networks and the optimizers were loaded"
    assert states[1] != states[2]
    assert states[2] == states[3]


def test_the_optimizers_count_on(killed: Killed) -> None:
    every, more = killed.example.every, killed.example.more
    learned = more - 60
    for name in killed.example.optimizers:
        counts = [int(state[name]["state"][0]["step"]) for state in killed.checkpoints]
        first = killed.checkpoints[0]["step"] // every - 64 // every
        assert counts[0] == first + (killed.example is DQN), "DQN's first is at row 64"
        assert [count - counts[0] for count in counts] == [0, 0, learned // every, learned // every]


def test_episodes_are_whole(killed: Killed) -> None:
    with expstore.open(killed.folder / "a.exp", mode="r") as rb:
        check_episodes(rb)
        found = rb.sql('SELECT source, status, length, "return" FROM episodes ORDER BY episode_id').fetchall()
    statuses = [status for _, status, *_ in found]
    if killed.example is DQN:
        assert all(length == total for *_, length, total in found)
        assert set(statuses) <= {"terminated", "cut"}
        assert statuses.count("terminated") > 10
        assert statuses.count("cut") <= 3, "at most one of each run that recorded"
        return
    whole = [(source, length) for source, status, length, _ in found if status == "truncated"]
    # A reset that was recorded as a step would make an episode longer than Pendulum's time limit.
    assert {length for _, length in whole} == {200}
    before = len(killed.rows[0]) // 400
    assert before >= 1
    assert len(whole) == 2 * before + 2, "one of each environment after the kill"
    assert len({source for source, _ in whole}) == 2
    assert set(statuses) == {"truncated", "cut"}
    rows = killed.rows[-1]
    assert (rows["next", "reward"] < 0).all(), "a reset has a reward of 0"
    assert rows["action"].shape == (len(rows), 1)
    assert rows["action"].abs().max() <= 2
    assert rows["action"].unique().numel() > len(rows) // 2


@EACH
def test_ctrl_c_saves_a_checkpoint(example: Example, tmp_path: Path) -> None:
    run = example.stop(tmp_path, 150, signal.SIGINT)
    assert run.code == 130
    assert "Traceback" not in run.text
    step = load(tmp_path)["step"]
    assert run.last_line == f"stopped at step {step:,}; run the same command to continue"
    assert step >= 150
    with expstore.open(tmp_path / "a.exp") as rb:
        assert rb.recovered is None, "the store was closed"
        assert rb.write_count == step
    run = example.run(tmp_path, "--steps", str(step + 10))
    assert run.code == 0
    assert f"continuing at step {step:,};" in run.text


@EACH
def test_errors_are_one_message(example: Example, tmp_path: Path) -> None:
    assert example.run(tmp_path, "--steps", "20").code == 0
    run = example.run(tmp_path, "--seed", "1")
    assert run.code == 1
    assert "seed=1" in run.text
    assert "Traceback" not in run.text
    (tmp_path / "a.exp").rename(tmp_path / "other.exp")
    run = example.run(tmp_path, "--steps", "20")
    assert run.code == 1
    assert "a.checkpoint.pt is of step 20, but the store has had only 0 rows" in run.text
    assert "Traceback" not in run.text


# -- without training ------------------------------------------------------------------------------------


@functools.cache
def names_of(example: str) -> dict[str, Any]:
    """Return what an example defines."""
    return runpy.run_path(str(ROOT / "examples" / f"{example}.py"))


@pytest.mark.parametrize("example", ["dqn", "sac", "collect_dqn"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--{count} 0", "argument --{count}: must be at least 1, got 0"),
        ("--seed -1", "argument --seed: must be at least 0, got -1"),
        ("--gamma 1.5", "argument --gamma: must be between 0 and 1, got 1.5"),
        ("--tau 1.5", "argument --tau: must be between 0 and 1, got 1.5"),
        ("--batch-size many", "argument --batch-size: invalid int value: 'many'"),
        ("--learning-starts 60 --buffer-size 50", "--learning-starts: must be at most --buffer-size"),
        ("--colour red", "unrecognized arguments: --colour red"),
    ],
)
def test_wrong_arguments_are_refused(
    example: str, arguments: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    count = {"dqn": "steps", "sac": "num-envs", "collect_dqn": "workers"}[example]
    with pytest.raises(SystemExit) as ended:
        names_of(example)["main"](["--path", str(tmp_path / "a.exp"), *arguments.format(count=count).split()])
    assert ended.value.code == 2
    assert message.format(count=count) in capsys.readouterr().err
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
