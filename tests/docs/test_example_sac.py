"""The SAC example continues after kill -9 and Ctrl-C, with the store's rows and the checkpoint."""

from __future__ import annotations

import runpy
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import expstore
from tests.support.example_runs import Run, check_episodes, flatten_state, run_example, stop_example
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow  # each trains, and is killed and continued

EXAMPLE = "sac.py"
SMALL = (
    *("--path", "a.exp", "--num-envs", "2", "--batch-size", "32", "--learning-starts", "64"),
    *("--train-every", "4", "--checkpoint-every", "100", "--log-every", "50"),
)
ENDLESS = ("--steps", "1000000")
CHECKPOINT = "a.checkpoint.pt"


def load(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(folder / CHECKPOINT, weights_only=True)
    return state


def read_rows(folder: Path) -> TensorDict:
    with expstore.open(folder / "a.exp", mode="r") as rb:
        return rb[:]


@dataclass(frozen=True)
class Killed:
    """A run that was killed, and three runs that continue it; with rows and checkpoint after each."""

    folder: Path
    runs: list[Run]
    rows: list[TensorDict]
    checkpoints: list[dict[str, Any]]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Killed:
    folder = tmp_path_factory.mktemp("sac")
    runs = [stop_example(EXAMPLE, folder, *SMALL, *ENDLESS, stop_at=500, number=signal.SIGKILL)]
    found = Killed(folder, runs, [read_rows(folder)], [load(folder)])
    step = found.checkpoints[0]["step"]
    for arguments in (
        ("--steps", str(step + 60), "--learning-starts", "50000"),  # changes no network
        ("--steps", str(step + 460)),
        ("--steps", str(step + 460)),
    ):
        runs.append(run_example(EXAMPLE, folder, *SMALL, *arguments))
        found.rows.append(read_rows(folder))
        found.checkpoints.append(load(folder))
    return found


def test_a_killed_run_continues_to_its_end(killed: Killed) -> None:
    assert [run.code for run in killed.runs] == [-signal.SIGKILL, 0, 0, 0]
    step = killed.checkpoints[0]["step"]
    assert killed.runs[2].last_line.startswith(f"done: {step + 460:,} steps, mean return of the last 20")
    assert f"all {step + 460:,} steps are done" in killed.runs[3].last_line
    assert "Traceback" not in "".join(run.text for run in killed.runs)


def test_rows_recorded_before_the_kill_stay(killed: Killed) -> None:
    counts = [len(rows) for rows in killed.rows]
    assert counts[0] >= 500, "a step that was printed is stored"
    assert [after - counts[0] for after in counts] == [0, 60, 460, 460]
    for rows in killed.rows[1:]:
        assert (rows[: counts[0]] == killed.rows[0]).all()


def test_training_continues_from_the_checkpoint(killed: Killed) -> None:
    step, count = killed.checkpoints[0]["step"], len(killed.rows[0])
    assert step % 100 == 0
    assert 400 <= step <= count, "a line of progress comes before its checkpoint"
    assert f"continuing at step {step:,}; the store has {count} rows" in killed.runs[1].text
    assert [state["step"] - step for state in killed.checkpoints] == [0, 60, 460, 460]
    states = [flatten_state({**state, "step": 0}) for state in killed.checkpoints]
    assert states[0] == states[1], "the networks and the optimizer were loaded"
    assert states[1] != states[2]
    assert states[2] == states[3]


def test_the_optimizers_count_on(killed: Killed) -> None:
    """One gradient step for every four transitions, after the first 64."""
    for name in ("q_optimizer", "policy_optimizer", "alpha_optimizer"):
        counts = [int(state[name]["state"][0]["step"]) for state in killed.checkpoints]
        assert counts[0] == killed.checkpoints[0]["step"] // 4 - 16
        assert [count - counts[0] for count in counts] == [0, 0, 100, 100]


def test_episodes_are_whole(killed: Killed) -> None:
    with expstore.open(killed.folder / "a.exp", mode="r") as rb:
        check_episodes(rb)
        found = rb.sql("SELECT source, status, length FROM episodes ORDER BY episode_id").fetchall()
    whole = [(source, length) for source, status, length in found if status == "truncated"]
    # A reset that was recorded as a step would make an episode longer than Pendulum's time limit.
    assert {length for _, length in whole} == {200}
    before = len(killed.rows[0]) // 400
    assert before >= 1
    assert len(whole) == 2 * before + 2, "one of each environment after the kill"
    assert len({source for source, _ in whole}) == 2
    assert {status for _, status, _ in found} == {"truncated", "cut"}
    rows = killed.rows[-1]
    assert (rows["next", "reward"] < 0).all(), "a reset has a reward of 0"
    assert rows["action"].shape == (len(rows), 1)
    assert rows["action"].abs().max() <= 2
    assert rows["action"].unique().numel() > len(rows) // 2


def test_ctrl_c_saves_a_checkpoint(tmp_path: Path) -> None:
    run = stop_example(EXAMPLE, tmp_path, *SMALL, *ENDLESS, stop_at=150, number=signal.SIGINT)
    assert run.code == 130
    assert "Traceback" not in run.text
    step = load(tmp_path)["step"]
    assert run.last_line == f"stopped at step {step:,}; run the same command to continue"
    assert step >= 150
    with expstore.open(tmp_path / "a.exp") as rb:
        assert rb.recovered is None, "the store was closed"
        assert rb.write_count == step
    run = run_example(EXAMPLE, tmp_path, *SMALL, "--steps", str(step + 10))
    assert run.code == 0
    assert f"continuing at step {step:,};" in run.text


def test_errors_are_one_message(tmp_path: Path) -> None:
    assert run_example(EXAMPLE, tmp_path, *SMALL, "--steps", "20").code == 0
    run = run_example(EXAMPLE, tmp_path, *SMALL, "--seed", "1")
    assert run.code == 1
    assert "seed=1" in run.text
    assert "Traceback" not in run.text
    (tmp_path / "a.exp").rename(tmp_path / "other.exp")
    run = run_example(EXAMPLE, tmp_path, *SMALL, "--steps", "20")
    assert run.code == 1
    assert f"{CHECKPOINT} is of step 20, but the store has had only 0 rows" in run.text
    assert "Traceback" not in run.text


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "examples" / EXAMPLE))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "argument --steps: must be at least 1, got 0"),
        (["--num-envs", "-1"], "argument --num-envs: must be at least 1, got -1"),
        (["--tau", "1.5"], "argument --tau: must be between 0 and 1, got 1.5"),
        (["--batch-size", "many"], "argument --batch-size: invalid int value: 'many'"),
        (
            ["--learning-starts", "60", "--buffer-size", "50"],
            "--learning-starts: must be at most --buffer-size",
        ),
        (["--colour", "red"], "unrecognized arguments: --colour red"),
    ],
)
def test_wrong_arguments_are_refused(
    example: dict[str, Any],
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        example["main"](["--path", str(tmp_path / "a.exp"), *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
