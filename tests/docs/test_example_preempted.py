"""The example of a preempted learner: killed at any step, its loss curve is the one without kills."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support import warm_processes
from tests.support.paths import ROOT

EXAMPLE = ROOT / "examples" / "preempted.py"
STEPS = 130


def run(folder: Path, *options: str, kill_after: int | None = None) -> list[str]:
    """Run the example; kill it when it has printed so many lines. Return its lines."""
    command = [sys.executable, str(EXAMPLE), "--folder", str(folder), "--steps", str(STEPS), *options]
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


@pytest.mark.guarantee("consumers/learner")
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_lost_nodes_do_not_change_the_loss_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kill also takes the disk with the store; the checkpoints are on another one."""
    pytest.importorskip("moto", reason="moto is not installed: there is no server to ship to")
    from tests.support.s3_server import S3Server, start_moto

    expected = run(tmp_path / "whole", "--checkpoint", str(tmp_path / "whole.pt"))
    options = "--ship", "s3://bucket/run", "--checkpoint", str(tmp_path / "learner.pt")
    lines: list[str] = []
    with start_moto() as port, S3Server(port, "bucket") as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        for kill_after in (70, 60, None):
            lines += run(tmp_path / "lost", *options, kill_after=kill_after)
            shutil.rmtree(tmp_path / "lost")
    assert any(line.startswith("continues from step") for line in lines)
    losses = [line for line in lines if not line.startswith("continues")]
    assert set(losses) == set(expected)
    parameters = [torch.load(tmp_path / name)["network"] for name in ("whole.pt", "learner.pt")]
    assert all(torch.equal(value, parameters[1][name]) for name, value in parameters[0].items())
