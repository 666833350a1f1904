"""The example of a preempted learner: killed at any step, its loss curve is the one without kills."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import warm_processes
from tests.support.paths import ROOT

EXAMPLE = ROOT / "examples" / "preempted.py"
STEPS = 130


def run(folder: Path, *, kill_after: int | None = None) -> list[str]:
    """Run the example; kill it when it has printed so many lines. Return its lines."""
    command = [sys.executable, str(EXAMPLE), "--folder", str(folder), "--steps", str(STEPS)]
    lines = []
    with warm_processes.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.strip())
            if len(lines) == kill_after:
                os.kill(process.pid, signal.SIGKILL)
    assert process.returncode == (0 if kill_after is None else -signal.SIGKILL)
    return lines


@pytest.mark.guarantee(
    "consumers/learner",
    "A learner that is killed and goes back to its checkpoint has the losses of one that was never killed.",
)
@pytest.mark.slow
def test_kills_do_not_change_the_loss_curve(tmp_path: Path) -> None:
    expected = run(tmp_path / "whole")
    assert [line.split()[0] for line in expected] == list(map(str, range(STEPS)))
    chance = random.Random(1)
    lines = [line for _ in range(3) for line in run(tmp_path / "killed", kill_after=chance.randint(40, 70))]
    lines += run(tmp_path / "killed")
    assert any(line.startswith("continues from step 50") for line in lines)
    losses = [line for line in lines if not line.startswith("continues")]
    assert len(losses) > STEPS
    assert set(losses) == set(expected)  # steps that came again have the same losses
