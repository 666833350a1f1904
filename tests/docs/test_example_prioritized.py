"""The DQN example with the priorities that docs/cleanrl.md adds to it continues after kill -9 and Ctrl-C."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import expstore
from tests.support.diffs import apply_diff
from tests.support.example_runs import Run, check_episodes, flatten_state, run_example, stop_example
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow  # each trains, and is killed and continued

SMALL = (
    *("--path", "a.exp", "--batch-size", "16", "--learning-starts", "64"),
    *("--train-every", "1", "--checkpoint-every", "100", "--log-every", "50"),
)
ENDLESS = ("--steps", "1000000")
CHECKPOINT = "a.checkpoint.pt"
#: Environment steps before the first gradient step.
BEFORE = 63


@dataclass(frozen=True)
class Killed:
    """A run that was killed, and two runs that continue it; with rows and checkpoint after each."""

    folder: Path
    runs: list[Run]
    rows: list[TensorDict]
    checkpoints: list[dict[str, Any]]
    priorities: list[list[tuple[int, float]]]

    def look(self) -> None:
        with expstore.open(self.folder / "a.exp", mode="r") as rb:
            self.rows.append(rb[:])
            self.priorities.append(rb.sql("SELECT _id, _priority FROM transitions ORDER BY _id").fetchall())
        self.checkpoints.append(torch.load(self.folder / CHECKPOINT, weights_only=True))


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The example with the lines of the page."""
    page = (ROOT / "docs" / "cleanrl.md").read_text()
    (diff,) = re.findall(
        r"^### examples/dqn.py with priorities\n.*?^```diff\n(.*?)^```$", page, re.DOTALL | re.M
    )
    path = tmp_path_factory.mktemp("example") / "dqn.py"
    path.write_text(apply_diff(diff, (ROOT / "examples" / "dqn.py").read_text()))
    return str(path)


@pytest.fixture(scope="module")
def killed(example: str, tmp_path_factory: pytest.TempPathFactory) -> Killed:
    folder = tmp_path_factory.mktemp("run")
    runs = [stop_example(example, folder, *SMALL, *ENDLESS, stop_at=250, number=signal.SIGKILL)]
    found = Killed(folder, runs, [], [], [])
    found.look()
    step = found.checkpoints[0]["step"]
    for arguments in (
        ("--steps", str(step + 60), "--learning-starts", "50000"),  # changes no network
        ("--steps", str(step + 160)),
    ):
        runs.append(run_example(example, folder, *SMALL, *arguments))
        found.look()
    return found


def test_a_killed_run_continues_to_its_end(killed: Killed) -> None:
    assert [run.code for run in killed.runs] == [-signal.SIGKILL, 0, 0], killed.runs[-1].text
    step = killed.checkpoints[0]["step"]
    assert killed.runs[2].last_line.startswith(f"done: {step + 160} steps, mean return of the last 20")
    assert "Traceback" not in "".join(run.text for run in killed.runs)


def test_rows_recorded_before_the_kill_stay(killed: Killed) -> None:
    counts = [len(rows) for rows in killed.rows]
    assert counts[0] >= 250, "a step that was printed is stored"
    assert [after - counts[0] for after in counts] == [0, 60, 160]
    for rows in killed.rows[1:]:
        assert (rows[: counts[0]] == killed.rows[0]).all()


def test_training_continues_from_the_checkpoint(killed: Killed) -> None:
    step, count = killed.checkpoints[0]["step"], len(killed.rows[0])
    assert step % 100 == 0
    assert 200 <= step <= count
    assert f"continuing at step {step}; the store has {count} rows" in killed.runs[1].text
    assert [state["step"] - step for state in killed.checkpoints] == [0, 60, 160]
    states = [flatten_state({**state, "step": 0}) for state in killed.checkpoints]
    assert states[0] == states[1], "the networks and the optimizers were loaded"
    assert states[1] != states[2]


def test_the_optimizer_counts_on(killed: Killed) -> None:
    """From 64 rows on; after the kill in the last 100 steps."""
    steps = killed.checkpoints[0]["step"] - BEFORE
    counts = [int(state["optimizer"]["state"][0]["step"]) for state in killed.checkpoints]
    assert counts == [steps, steps, steps + 100]


def test_episodes_are_whole(killed: Killed) -> None:
    with expstore.open(killed.folder / "a.exp", mode="r") as rb:
        check_episodes(rb)
        statuses = dict(rb.sql("SELECT status, count(*) FROM episodes GROUP BY status").fetchall())
    assert set(statuses) == {"terminated", "cut"}
    assert statuses["cut"] <= 3, "at most one of each run"


def test_priorities_outlive_the_process(killed: Killed) -> None:
    """A run that does not learn changes no priority, and samples by the former ones later."""
    first, second, third = (dict(priorities) for priorities in killed.priorities)
    assert len(set(first.values())) > 50
    assert {row: second[row] for row in first} == first
    assert {row: third[row] for row in first} != first


def test_ctrl_c_saves_a_checkpoint(example: str, tmp_path: Path) -> None:
    run = stop_example(example, tmp_path, *SMALL, *ENDLESS, stop_at=100, number=signal.SIGINT)
    assert run.code == 130
    assert "Traceback" not in run.text
    step = torch.load(tmp_path / CHECKPOINT, weights_only=True)["step"]
    assert run.last_line == f"stopped at step {step:,}; run the same command to continue"
    with expstore.open(tmp_path / "a.exp") as rb:
        assert rb.recovered is None, "the store was closed"
        assert rb.write_count == step >= 100
