"""The CartPole example learns although it is killed repeatedly, and reports its progress."""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import expstore
from tests.support.example_runs import Fork, Run, import_example, run_forks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # each trains, and is killed and continued

STEPS = 6_000


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Run]]:
    """Run the example with three kills and a Ctrl-C on the way, to its end, and again; then short runs."""
    folder = tmp_path_factory.mktemp("example")
    chance, steps = random.Random(0), ["--steps", str(STEPS)]
    forks = [
        Fork(steps, chance.randrange(20, 600), chance.uniform(0.1, 20.0) if is_killed else None)
        for is_killed in (True, True, False, True)
    ]
    forks += [Fork(steps), Fork(steps)]
    forks += [
        Fork(["--path", "mine.exp", "--envs", "3", *more])
        for more in (["--steps", "1100"], ["--steps", "500", "--fresh"], ["--steps", "500", "--seed", "1"])
    ]
    return folder, run_forks("cartpole_dqn", "cartpole_dqn:Agent.learn", folder, forks)


def test_runs_end_as_they_should(stopped: tuple[Path, list[Run]]) -> None:
    codes = [run.code for run in stopped[1][:6]]
    assert codes == [-signal.SIGPROF, -signal.SIGPROF, 130, -signal.SIGPROF, 0, 0]


def test_each_run_continues_from_the_store(stopped: tuple[Path, list[Run]]) -> None:
    pattern = re.compile(
        r"resuming runs/cartpole.exp at step ([\d,]+), (?:weights as of step ([\d,]+)|no weights)"
    )
    found = [pattern.search(run.text) for run in stopped[1][:6]]
    assert found[0] is None
    steps = [[int(number.replace(",", "")) for number in m.groups()] for m in found[1:] if m]
    assert len(steps) == len(found) - 1
    for (before, _), (after, _) in itertools.pairwise(steps):
        assert before <= after
    for stored, saved in steps:
        assert saved <= stored < saved + 1000 + 3 * 64


def test_one_line_says_what_was_recovered_after_a_kill(stopped: tuple[Path, list[Run]]) -> None:
    lines = [[line for line in run.text.splitlines() if "did not close" in line] for run in stopped[1][:6]]
    assert list(map(len, lines)) == [0, 1, 1, 0, 1, 0]
    assert "stopped; run it again" in stopped[1][2].text


def test_it_learns_through_all_that(stopped: tuple[Path, list[Run]]) -> None:
    with expstore.open(stopped[0] / "runs" / "cartpole.exp") as rb:
        assert rb.write_count >= STEPS
        returns = rb.sql(
            """
            SELECT "return", length FROM episodes
            WHERE status IN ('terminated', 'truncated') ORDER BY end_time, episode_id
            """
        ).fetchall()
        assert rb.sql("SELECT count(*) FROM transitions").fetchall() == [(rb.write_count,)]
    assert all(total == length for total, length in returns)
    first, last = np.mean(returns[:20], axis=0)[0], np.mean(returns[-20:], axis=0)[0]
    assert last > 2 * first
    assert f"first 20 episodes {first:.1f}, last 20 episodes {last:.1f}" in stopped[1][4].text


def test_a_finished_run_says_so_and_how_to_look_further(stopped: tuple[Path, list[Run]]) -> None:
    text = stopped[1][5].text
    assert f"all {STEPS:,} steps are done; pass --steps for more, --fresh to start again" in text
    assert "expstore info runs/cartpole.exp\n" in text
    assert "expstore sql runs/cartpole.exp 'SELECT status" in text


def test_fresh_moves_the_old_run(stopped: tuple[Path, list[Run]]) -> None:
    folder, runs = stopped
    assert [run.code for run in runs[6:8]] == [0, 0]
    with expstore.open(folder / "mine.exp") as rb:
        assert 500 <= rb.write_count < 600
    with np.load(folder / "mine.weights.npz") as weights:
        assert weights["updates"] == 0


def test_an_error_of_the_store_is_one_message(stopped: tuple[Path, list[Run]]) -> None:
    run = stopped[1][8]
    assert run.code == 1
    assert "seed=1" in run.text
    assert "Traceback" not in run.text


@pytest.fixture
def example() -> ModuleType:
    return import_example("cartpole_dqn")


def make_batch(seed: int) -> TensorDict:
    random_ = torch.Generator().manual_seed(seed)
    batch = TensorDict({}, batch_size=[32])
    batch["observation"] = torch.randn(32, 4, generator=random_)
    batch["action"] = torch.randint(0, 2, (32,), generator=random_)
    batch["next", "observation"] = torch.randn(32, 4, generator=random_)
    batch["next", "reward"] = torch.ones(32, 1)
    batch["next", "terminated"] = torch.rand(32, 1, generator=random_) < 0.1
    return batch


def test_weights_come_back_with_optimizer_and_counter(example: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "w.npz"
    agent, other = example.Agent(0), example.Agent(1)
    for seed in range(5):
        agent.learn(make_batch(seed))
    example.save_weights(path, agent, 640)
    assert example.load_weights(path, other, 700) == 640
    for either in (agent, other):
        either.learn(make_batch(9))
    assert agent.arrays().keys() == other.arrays().keys()
    for name, array in agent.arrays().items():
        np.testing.assert_array_equal(array, other.arrays()[name])


def test_weights_of_another_store_are_ignored(example: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "w.npz"
    example.save_weights(path, example.Agent(0), 640)
    agent = example.Agent(1)
    before = agent.arrays()["online/0.weight"].copy()
    assert example.load_weights(path, agent, 639) == 0
    np.testing.assert_array_equal(agent.arrays()["online/0.weight"], before)


def test_a_save_that_breaks_off_leaves_the_old_weights(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "w.npz"
    agent = example.Agent(0)
    example.save_weights(path, agent, 640)
    before = path.read_bytes()

    def broken(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="No space"):
        example.save_weights(path, agent, 700)
    assert path.read_bytes() == before
