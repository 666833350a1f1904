"""The example with workers continues after kill -9 and Ctrl-C, with the store's rows and the checkpoint.

Its arguments, and a checkpoint that cannot be saved, are in test_example_learners.py.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import expstore
from tests.support.example_runs import Run, check_episodes, flatten_state, run_example, stop_example

pytestmark = pytest.mark.slow  # each trains, and is killed and continued

EXAMPLE = "collect_dqn.py"
SMALL = (
    *("--path", "a.exp", "--workers", "2", "--lanes", "2", "--block", "4", "--batch-size", "32"),
    *("--learning-starts", "64", "--exploration-steps", "300", "--train-every", "2", "--push-every", "20"),
    *("--checkpoint-every", "100", "--log-every", "50"),
)
ENDLESS = ("--steps", "1000000")
CHECKPOINT = "a.checkpoint.pt"
#: Rows that the workers may be ahead of the training, or behind it, and those of blocks on their way.
AHEAD = 2 * 2 * 2 * 4 + 16


def load(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(folder / CHECKPOINT, weights_only=True)
    return state


@dataclass(frozen=True)
class Killed:
    """A run that was killed, and two that continue it; with the number of rows and checkpoint after each."""

    folder: Path
    runs: list[Run]
    rows: list[int]
    checkpoints: list[dict[str, Any]]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Killed:
    folder = tmp_path_factory.mktemp("collect")
    runs = [stop_example(EXAMPLE, folder, *SMALL, *ENDLESS, stop_at=350, number=signal.SIGKILL)]
    found = Killed(folder, runs, [], [])

    def look() -> None:
        with expstore.open(folder / "a.exp", mode="r") as rb:
            found.rows.append(rb.write_count)
        found.checkpoints.append(load(folder))

    look()
    steps = str(found.checkpoints[0]["step"] + 360)
    for _ in range(2):
        runs.append(run_example(EXAMPLE, folder, *SMALL, "--steps", steps))
        look()
    return found


def test_a_killed_run_continues_to_its_end(killed: Killed) -> None:
    assert [run.code for run in killed.runs] == [-signal.SIGKILL, 0, 0]
    step = killed.checkpoints[0]["step"]
    assert killed.runs[1].last_line.startswith(f"done: {step + 360} steps, mean return of the last 20")
    assert f"all {step + 360} steps are done" in killed.runs[2].last_line
    assert "Traceback" not in "".join(run.text for run in killed.runs)


def test_training_continues_from_the_checkpoint(killed: Killed) -> None:
    step, rows = killed.checkpoints[0]["step"], killed.rows[0]
    assert step >= 300
    assert f"continuing at step {step}; the store has {rows} rows" in killed.runs[1].text
    assert [state["step"] - step for state in killed.checkpoints] == [0, 360, 360]
    states = [flatten_state(state) for state in killed.checkpoints]
    assert states[0] != states[1]
    assert states[1] == states[2]


def test_there_is_one_gradient_step_for_so_many_rows(killed: Killed) -> None:
    """One for every second row after the first 64."""
    counts = [int(state["optimizer"]["state"][0]["step"]) for state in killed.checkpoints]
    assert [count - counts[0] for count in counts] == [0, 180, 180]
    for state, count in zip(killed.checkpoints, counts, strict=True):
        assert count == (state["step"] - 64) // 2
        assert state["rows"] >= state["step"] - AHEAD
    # Of the rows before the kill and after it alike, so as many more as were drawn for in vain.
    assert abs(killed.rows[0] - killed.checkpoints[0]["step"]) <= AHEAD + 100
    assert 360 - AHEAD <= killed.rows[1] - killed.rows[0] <= 360 + 2 * AHEAD
    assert killed.rows[1] == killed.rows[2]


def test_rows_are_those_of_the_workers(killed: Killed) -> None:
    with expstore.open(killed.folder / "a.exp", mode="r") as rb:
        check_episodes(rb)
        assert rb.sql('SELECT count(*) FROM episodes WHERE "return" != length').fetchall() == [(0,)]
        statuses = dict(rb.sql("SELECT status, count(*) FROM episodes GROUP BY status").fetchall())
        sources = rb.sql("SELECT DISTINCT split_part(source, '//', 1) FROM episodes ORDER BY 1").fetchall()
        versions = rb.sql("SELECT max(policy_version), min(policy_version) FROM transitions").fetchone()
        settings = rb.sql("SELECT info->'origin'->'hyperparameters'->>'gamma' FROM episodes").fetchall()
    assert set(statuses) <= {"terminated", "cut"}
    assert statuses["terminated"] > 10
    assert statuses.get("cut", 0) <= 8, "at most one of each lane of each run"
    assert sources == [("collector/0",), ("collector/1",)]
    assert versions is not None
    assert versions[0] > 10
    assert ("0.99",) in settings


def test_ctrl_c_saves_a_checkpoint(tmp_path: Path) -> None:
    run = stop_example(EXAMPLE, tmp_path, *SMALL, *ENDLESS, stop_at=150, number=signal.SIGINT)
    assert run.code == 130
    assert "Traceback" not in run.text
    step = load(tmp_path)["step"]
    assert run.last_line == f"stopped at step {step}; run the same command to continue"
    assert step >= 150
    with expstore.open(tmp_path / "a.exp") as rb:
        assert rb.recovered is None, "the store was closed"
        assert rb.write_count >= load(tmp_path)["rows"]
    (tmp_path / "a.exp").rename(tmp_path / "other.exp")
    run = run_example(EXAMPLE, tmp_path, *SMALL, "--steps", "20")
    assert run.code == 1
    assert f"{CHECKPOINT} is of row" in run.text
    assert "but the store has had only 0 rows" in run.text
    assert "Traceback" not in run.text
