"""The example with Stable-Baselines3 continues after kill -9 and Ctrl-C, with the store's rows."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

import expstore
from tests.support.example_runs import check_episodes, run_example, stop_example

pytest.importorskip("stable_baselines3", reason="stable-baselines3 is not installed")

EXAMPLE = "sb3_dqn.py"
SMALL = ("--path", "a.exp", "--checkpoint-every", "100", "--log-every", "50")
ENDLESS = ("--steps", "1000000")


@pytest.mark.slow
def test_a_killed_run_continues_with_all_its_rows(tmp_path: Path) -> None:
    run = stop_example(EXAMPLE, tmp_path, *SMALL, *ENDLESS, stop_at=350, number=signal.SIGKILL)
    assert run.code == -signal.SIGKILL
    with expstore.open(tmp_path / "a.exp", mode="r") as rb:
        stored, rows = len(rb), rb[:]
    assert stored >= 349, "callbacks are called before the step is added"
    run = run_example(EXAMPLE, tmp_path, *SMALL, "--steps", "600")
    assert run.code == 0, run.text
    (found,) = re.findall(rf"continuing at step (\d+); the store has {stored} rows", run.text)
    step = int(found)
    assert step % 100 == 0
    assert 300 <= step <= stored + 1
    assert run.last_line.startswith("done: 600 steps, mean return of the last")
    assert "Traceback" not in run.text
    with expstore.open(tmp_path / "a.exp", mode="r") as rb:
        assert len(rb) == stored + 600 - step
        assert (rb[:stored] == rows).all()
        check_episodes(rb)
        statuses = dict(rb.sql("SELECT status, count(*) FROM episodes GROUP BY status").fetchall())
    assert set(statuses) <= {"terminated", "cut"}
    assert statuses.get("cut", 0) <= 2


@pytest.mark.slow
def test_ctrl_c_saves_a_checkpoint(tmp_path: Path) -> None:
    run = stop_example(EXAMPLE, tmp_path, *SMALL, *ENDLESS, stop_at=150, number=signal.SIGINT)
    assert run.code == 130
    assert "Traceback" not in run.text
    assert run.last_line.endswith("; run the same command to continue")
    with expstore.open(tmp_path / "a.exp") as rb:
        assert rb.recovered is None, "the store was closed"
