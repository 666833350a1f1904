"""The example with TorchRL's Trainer continues after a kill, and two continuations are equal."""

from __future__ import annotations

import random
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import expstore
from tests.support.example_runs import Fork, Run, import_example, read_drawn, run_forks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # each trains, and is killed and continued

STEPS, SAVED = 1_600, 1_000


@dataclass(frozen=True)
class Runs:
    """What became of the runs, in their order."""

    folder: Path
    found: list[Run]

    def drawn(self, number: int) -> list[Any]:
        """Return number and ids of every batch that a run learned from."""
        return read_drawn(self.folder, number)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Kill a run before the first weights are saved, and after; go on twice from a copy, to the end."""
    folder = tmp_path_factory.mktemp("torchrl")
    chance = random.Random(3)
    first, second = chance.randrange(5, 100), chance.randrange(180, 300)

    def fork(name: str, *more: str, after: int = 0, is_killed: bool = True, **options: Any) -> Fork:
        arguments = ["--path", f"{name}.exp", "--steps", str(STEPS), *more]
        return Fork(arguments, after, chance.uniform(0.1, 20.0) if is_killed else None, **options)

    copies = [("one.exp", "two.exp"), *(("one.weights.pt", f"two.{name}.pt") for name in ("weights", "kept"))]
    forks = [
        fork("one", after=first), fork("one", after=second), fork("one", copies=copies), fork("two"),
        fork("one"), fork("one", "--seed", "9"), fork("three", after=first, is_killed=False),
    ]  # fmt: skip
    found = run_forks("torchrl_dqn", "expstore:ReplayBufferTrainer.sample", folder, forks)
    return Runs(folder, found)


def test_runs_end_as_they_should(runs: Runs) -> None:
    codes = [run.code for run in runs.found]
    assert codes == [-signal.SIGPROF, -signal.SIGPROF, 0, 0, 0, 1, 130]
    assert "Traceback" not in "".join(run.text for run in runs.found)
    assert f"all {STEPS:,} steps are done" in runs.found[4].text
    assert "seed=9" in runs.found[5].text
    assert runs.found[6].last_line == "stopped; run it again to continue from here"
    with expstore.open(runs.folder / "three.exp", mode="r") as rb:
        assert 0 < rb.write_count < STEPS
    with expstore.open(runs.folder / "three.exp") as rb:
        assert rb.recovered is None, "it was closed"


@pytest.mark.parametrize("example", ["torchrl_dqn", "cartpole_dqn"])
@pytest.mark.parametrize("steps", ["-5", "0"])
def test_no_steps_are_refused(
    example: str, steps: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "store.exp"
    with pytest.raises(SystemExit) as ended:
        import_example(example).main(["--path", str(path), "--steps", steps])
    assert ended.value.code == 2
    assert f"--steps must be at least 1, not {steps}" in capsys.readouterr().err
    assert not path.exists()


def test_a_run_continues_from_the_store(runs: Runs) -> None:
    pattern = re.compile(r"resuming \w+\.exp at step ([\d,]+), weights as of step ([\d,]+)")
    found = [pattern.search(run.text) for run in runs.found[1:4]]
    steps = [[int(number.replace(",", "")) for number in match.groups()] for match in found if match]
    assert len(steps) == 3
    assert steps[0][1] == 0, "killed before the first weights were saved"
    assert 0 < steps[0][0] < SAVED
    assert steps[1][1] == SAVED
    assert SAVED <= steps[1][0] < STEPS
    assert steps[1] == steps[2]
    assert "did not close" in runs.found[1].text


@pytest.mark.guarantee("draw/next")
def test_the_draws_continue(runs: Runs) -> None:
    """Both resumed runs draw the batches that follow the saved weights, the same ones, and learn the same."""
    one, two = runs.drawn(2), runs.drawn(3)
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
