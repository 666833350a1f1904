"""The example with TorchRL's Trainer continues after a kill, and two continuations are equal."""

from __future__ import annotations

import json
import os
import random
import re
import runpy
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import expstore
from tests.support import warm_processes
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow  # each trains, and is killed and continued

EXAMPLE = ROOT / "examples" / "torchrl_dqn.py"
STEPS, SAVED = 1_600, 1_000

# Imports once and forks for each run, since the imports take longer than a run. A run may be stopped after
# so many updates, a few milliseconds of computing later, by a signal that nobody catches. What was drawn is
# noted.
DRIVER = """
import json, os, shutil, signal, sys
sys.path.insert(0, os.path.dirname(sys.argv[1]))
import torchrl_dqn, expstore

def child(number, arguments, after, milliseconds, ctrl_c=False):
    sample, calls, drawn = expstore.ReplayBufferTrainer.sample, 0, []

    def noting(hook, batch=None):
        nonlocal calls
        calls += 1
        if calls == after and ctrl_c:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.kill(os.getpid(), signal.SIGINT)
        elif calls == after:
            signal.setitimer(signal.ITIMER_PROF, milliseconds / 1000)
        draw = hook.replay_buffer.storage.draws.number
        found = sample(hook, batch)
        drawn.append([draw, found["id"].tolist()])
        return found

    expstore.ReplayBufferTrainer.sample = noting
    code = torchrl_dqn.main(arguments)
    with open(f"drawn-{number}", "w") as file:
        json.dump(drawn, file)
    sys.stdout.flush()
    os._exit(code)

for number, run in enumerate(json.loads(sys.argv[2])):
    if "copy" in run:
        shutil.copytree("one.exp", "two.exp")
        shutil.copy("one.weights.pt", "two.weights.pt")
        shutil.copy("one.weights.pt", "two.kept.pt")
        continue
    pid = os.fork()
    if pid == 0:
        out = os.open(f"out-{number}", os.O_CREAT | os.O_WRONLY)
        os.dup2(out, 1)
        os.dup2(out, 2)
        child(number, **run)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with open(f"code-{number}", "w") as file:
        file.write(str(code))
"""


@dataclass(frozen=True)
class Runs:
    """What became of the runs, by number."""

    folder: Path

    def code(self, number: int) -> int:
        return int((self.folder / f"code-{number}").read_text())

    def text(self, number: int) -> str:
        return (self.folder / f"out-{number}").read_text()

    def drawn(self, number: int) -> list[Any]:
        """Return number and ids of every batch that was learned from."""
        found: list[Any] = json.loads((self.folder / f"drawn-{number}").read_text())
        return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Kill a run before the first weights are saved, and after; go on twice from a copy, to the end."""
    folder = tmp_path_factory.mktemp("torchrl")
    chance = random.Random(3)

    def run(name: str, after: int = 0, *more: str) -> dict[str, Any]:
        arguments = ["--path", f"{name}.exp", "--steps", str(STEPS), *more]
        return {"arguments": arguments, "after": after, "milliseconds": chance.uniform(0.1, 20.0)}

    first, second = chance.randrange(5, 100), chance.randrange(180, 300)
    todo = [
        run("one", first), run("one", second), {"copy": True}, run("one"), run("two"), run("one"),
        run("one", 0, "--seed", "9"), run("three", first) | {"ctrl_c": True},
    ]  # fmt: skip
    command = [sys.executable, "-c", DRIVER, str(EXAMPLE), json.dumps(todo)]
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLE.parents[1])}
    warm_processes.run(command, cwd=folder, env=environment, check=True, timeout=110)
    return Runs(folder)


def test_runs_end_as_they_should(runs: Runs) -> None:
    assert [runs.code(n) for n in (0, 1, 3, 4, 5)] == [-signal.SIGPROF, -signal.SIGPROF, 0, 0, 0]
    assert runs.code(6) == 1
    assert "seed=9" in runs.text(6)
    assert "Traceback" not in "".join(runs.text(n) for n in (0, 1, 3, 4, 5, 6))
    assert f"all {STEPS:,} steps are done" in runs.text(5)


def test_ctrl_c_ends_with_a_line(runs: Runs) -> None:
    assert runs.code(7) == 130
    assert runs.text(7).splitlines()[-1] == "stopped; run it again to continue from here"
    assert "Traceback" not in runs.text(7)
    with expstore.open(runs.folder / "three.exp", mode="r") as rb:
        assert 0 < rb.write_count < STEPS
    with expstore.open(runs.folder / "three.exp") as rb:
        assert rb.recovered is None, "it was closed"


@pytest.mark.parametrize("example", [EXAMPLE, EXAMPLE.with_name("cartpole_dqn.py")], ids=["torchrl", "own"])
@pytest.mark.parametrize("steps", ["-5", "0"])
def test_no_steps_are_refused(
    example: Path, steps: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "store.exp"
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(example))["main"](["--path", str(path), "--steps", steps])
    assert ended.value.code == 2
    assert f"--steps must be at least 1, not {steps}" in capsys.readouterr().err
    assert not path.exists()


def test_a_run_continues_from_the_store(runs: Runs) -> None:
    pattern = re.compile(r"resuming \w+\.exp at step ([\d,]+), weights as of step ([\d,]+)")
    found = [pattern.search(runs.text(n)) for n in (1, 3, 4)]
    steps = [[int(number.replace(",", "")) for number in match.groups()] for match in found if match]
    assert len(steps) == 3
    assert steps[0][1] == 0, "killed before the first weights were saved"
    assert 0 < steps[0][0] < SAVED
    assert steps[1][1] == SAVED
    assert SAVED <= steps[1][0] < STEPS
    assert steps[1] == steps[2]
    assert "did not close" in runs.text(1)


@pytest.mark.guarantee("draw/next")
def test_the_draws_continue(runs: Runs) -> None:
    """Both resumed runs draw the batches that follow the saved weights, the same ones, and learn the same."""
    one, two = runs.drawn(3), runs.drawn(4)
    assert one == two
    assert len(one) > 16
    weights = [torch.load(runs.folder / f"{name}.weights.pt", weights_only=True) for name in ("one", "two")]
    for part in ("loss_module", "collector"):
        assert weights[0][part].keys() == weights[1][part].keys()
    for name, value in weights[0]["loss_module"].items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, weights[1]["loss_module"][name]), name
    numbers = [draw for draw, _ in one]
    assert numbers == list(range(numbers[0], numbers[0] + len(one)))
    saved = torch.load(runs.folder / "two.kept.pt", weights_only=True)["replay_buffer"]["replay_buffer"]
    assert saved["_draws"]["draw"] == numbers[0], "with the batch that followed the weights"


def test_stored_episodes_are_whole(runs: Runs) -> None:
    for name in ("one", "two"):
        with expstore.open(runs.folder / f"{name}.exp", mode="r") as rb:
            assert rb.write_count >= STEPS
            assert rb.sql("SELECT count(*), sum(length) FROM episodes").fetchall()[0][1] == rb.write_count
            ended = rb.sql(
                "SELECT \"return\", length FROM episodes WHERE status IN ('terminated', 'truncated')"
            ).fetchall()
            assert len(ended) > 20
            assert all(total == length for total, length in ended)
            for (episode,) in rb.sql("SELECT episode_id FROM episodes").fetchall():
                rows = rb.trajectory(episode)
                assert torch.equal(rows["next", "observation"][:-1], rows["observation"][1:])


def test_priorities_are_those_that_the_loss_said(runs: Runs) -> None:
    with expstore.open(runs.folder / "one.exp", mode="r") as rb:
        told = rb.sql("SELECT count(DISTINCT _priority) FROM transitions").fetchall()
    assert told[0][0] > 100
