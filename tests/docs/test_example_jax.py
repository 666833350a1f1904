"""The JAX example continues after kill -9 and Ctrl-C, with the store's rows and the checkpoint."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import expstore
from tests.support.example_runs import check_episodes, run_example, stop_example
from tests.support.paths import ROOT

# Not importorskip, which imports JAX here: it starts threads, and other tests fork this process.
pytestmark = pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="jax is not installed")

EXAMPLE = "jax_dqn.py"
SMALL = (
    *("--path", "a.exp", "--batch-size", "32", "--learning-starts", "64", "--exploration-steps", "300"),
    *("--train-every", "2", "--checkpoint-every", "100", "--log-every", "50"),
)
ENDLESS = ("--steps", "1000000")
CHECKPOINT = "a.checkpoint.npz"


def load(folder: Path) -> tuple[int, int, list[list[Any]]]:
    """Return the step, the number of gradient steps and the other arrays of the checkpoint."""
    with np.load(folder / CHECKPOINT) as file:
        step, *leaves, updates = (file[name] for name in file.files)
    return int(step), int(updates), [leaf.tolist() for leaf in leaves]


def test_a_killed_run_continues(tmp_path: Path) -> None:
    run = stop_example(EXAMPLE, tmp_path, *SMALL, *ENDLESS, stop_at=350, number=signal.SIGKILL)
    assert run.code == -signal.SIGKILL
    step, updates, leaves = load(tmp_path)
    with expstore.open(tmp_path / "a.exp", mode="r") as rb:
        stored, rows = len(rb), rb[:]
    assert stored >= 350, "a step that was printed is stored"
    assert step % 100 == 0
    assert 300 <= step <= stored
    assert updates == step // 2 - 31, "one gradient step every second step, from 64 rows on"

    idle = ("--steps", str(step + 60), "--learning-starts", "50000")  # changes no network
    run = run_example(EXAMPLE, tmp_path, *SMALL, *idle)
    assert run.code == 0, run.text
    assert f"continuing at step {step}; the store has {stored} rows" in run.text
    assert load(tmp_path) == (step + 60, updates, leaves)

    run = run_example(EXAMPLE, tmp_path, *SMALL, "--steps", str(step + 160))
    assert run.code == 0, run.text
    assert run.last_line.startswith(f"done: {step + 160} steps, mean return of the last 20")
    assert load(tmp_path)[:2] == (step + 160, updates + 50)
    assert load(tmp_path)[2] != leaves
    with expstore.open(tmp_path / "a.exp", mode="r") as rb:
        assert len(rb) == stored + 160
        assert (rb[:stored] == rows).all()
        check_episodes(rb)
        statuses = dict(rb.sql("SELECT status, count(*) FROM episodes GROUP BY status").fetchall())
    assert set(statuses) <= {"terminated", "cut"}
    assert statuses.get("cut", 0) <= 3, "at most one of each run"


def test_ctrl_c_saves_a_checkpoint(tmp_path: Path) -> None:
    run = stop_example(EXAMPLE, tmp_path, *SMALL, *ENDLESS, stop_at=150, number=signal.SIGINT)
    assert run.code == 130, run.text
    step = load(tmp_path)[0]
    assert run.last_line == f"stopped at step {step:,}; run the same command to continue"
    with expstore.open(tmp_path / "a.exp") as rb:
        assert rb.recovered is None, "the store was closed"
        assert rb.write_count == step >= 150


#: In a process of its own: JAX starts threads, and other tests fork this process.
STEPS = f"""
import runpy
import numpy as np

example = runpy.run_path({str(ROOT / "examples" / EXAMPLE)!r})
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
"""


def test_a_step_follows_from_state_and_batch() -> None:
    """A gradient step lowers the loss of its batch, leaves its inputs alone, and compiles once."""
    done = subprocess.run(
        [sys.executable, "-c", STEPS],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    run = run_example(EXAMPLE, tmp_path, *SMALL, "--steps", "0")
    assert run.code == 2
    assert "argument --steps: must be at least 1, got 0" in run.text
