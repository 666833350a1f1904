"""TorchRL's collectors of several processes write into one store, as its documents say.

An environment shows which worker, episode and step a row is, so the rows of each episode in the store are
compared with what the environment has produced, one by one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import expstore
from tests.support.counting_env import Make
from tests.support.servers import Serving
from tests.support.waits import wait_for_workers

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # some of its modules use what other ones call deprecated
    from torchrl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
    from torchrl.envs import ParallelEnv, SerialEnv

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.usefixtures("forking"),
]

#: Steps of the episodes of each environment.
LENGTHS = (3, 4, 7, 5, 6, 3, 8, 4)
Maker = Callable[[], Any]


class Several:
    """Makes an environment with several lanes."""

    def __init__(self, first: int, kind: type = SerialEnv, lanes: int = 2) -> None:
        self.first, self.kind, self.lanes = first, kind, lanes

    def __call__(self) -> Any:
        numbers = range(self.first, self.first + self.lanes)
        return self.kind(self.lanes, [Make(number, LENGTHS[number]) for number in numbers])


def makers(workers: int, lanes: int = 0, kind: type = SerialEnv) -> list[Maker]:
    if lanes:
        return [Several(worker * lanes, kind, lanes) for worker in range(workers)]
    return [Make(worker, LENGTHS[worker]) for worker in range(workers)]


def check(rb: Any, *, environments: int, whole: bool = False) -> dict[int, int]:
    """Compare the episodes in the store with those of the environments; return rows by environment.

    Every episode of the store is one of an environment, from its first step on and without a gap; of each
    environment the episodes are the first ones; and all that have ended have their length.
    """
    query = "SELECT episode_id, status FROM episodes ORDER BY episode_id"
    found: dict[int, list[list[int]]] = {}
    for episode, status in rb.sql(query).fetchall():
        rows = rb.trajectory(episode)["observation"].tolist()
        environment, number, _ = rows[0]
        assert rows == [[environment, number, step] for step in range(len(rows))]
        if status == "terminated":
            assert len(rows) == LENGTHS[environment]
        else:
            assert len(rows) < LENGTHS[environment]
            assert not whole
        found.setdefault(environment, []).append([number, len(rows)])
    assert set(found) == set(range(environments))
    rows_of = {}
    for environment, episodes in found.items():
        numbers = [number for number, _ in sorted(episodes)]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        assert numbers[0] <= 1  # fake steps that tell the shapes may have been its first episode
        rows_of[environment] = sum(count for _, count in episodes)
    assert sum(rows_of.values()) == rb.write_count
    return rows_of


@pytest.fixture
def rb(store_path: Path) -> Iterator[Any]:
    with expstore.open(store_path, batch_size=16, sampler="prioritized", seed=1) as opened:
        yield opened


def run(kind: Callable[..., Any], *arguments: Any, replay_buffer: Any, **keywords: Any) -> None:
    """Collect to the end."""
    collector = kind(*arguments, replay_buffer=replay_buffer, **keywords)
    try:
        assert all(batch is None for batch in collector)
    finally:
        collector.shutdown()
    if isinstance(replay_buffer, expstore.ReplayBuffer):
        wait_for_workers(replay_buffer)


KINDS = {"sync": MultiSyncCollector, "async": MultiAsyncCollector}


@pytest.mark.slow
@pytest.mark.some(4)
@pytest.mark.parametrize("lanes", [0, 2])
@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_episodes_are_those_of_the_environments(rb: Any, kind: str, workers: int, lanes: int) -> None:
    """Batches of shape [T] and [B, T]."""
    frames = 40 * workers
    run(
        KINDS[kind], makers(workers, lanes), None, frames_per_batch=frames, total_frames=5 * frames,
        replay_buffer=rb,
    )  # fmt: skip
    rows = check(rb, environments=workers * max(lanes, 1))
    if kind == "sync":
        assert set(rows.values()) == {200 // max(lanes, 1)}
    # Asynchronous workers may write once more than the collector counts.
    assert rb.write_count >= 5 * frames
    sources = rb.sql("SELECT count(DISTINCT source) FROM episodes").fetchone()
    assert sources == (workers * max(lanes, 1),)


OPTIONS: dict[str, dict[str, Any]] = {
    "row by row": {"extend_buffer": False},
    "whole trajectories": {"trajs_per_batch": 2},
    "split": {"split_trajs": True},
    "random frames": {"init_random_frames": 60},
    "reset": {"reset_at_each_iter": True},
    "stack": {"cat_results": "stack"},
}


@pytest.mark.some(6)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_options_of_collectors(rb: Any, kind: str, option: str) -> None:
    run(
        KINDS[kind], makers(2), None, frames_per_batch=40, total_frames=200, replay_buffer=rb,
        **OPTIONS[option],
    )  # fmt: skip
    if option == "reset":
        starts = rb.sql("SELECT status, count(*) FROM episodes GROUP BY 1").fetchall()
        assert dict(starts).keys() == {"terminated", "cut"}
        for (episode,) in rb.sql("SELECT episode_id FROM episodes").fetchall():
            steps = rb.trajectory(episode)["observation"]
            assert steps[:, 2].tolist() == list(range(len(steps)))
            assert len(steps[:, :2].unique(dim=0)) == 1
    else:
        check(rb, environments=2, whole=option == "whole trajectories")


def test_set_truncated(rb: Any) -> None:
    """Every batch ends with a truncated row; the episode continues in the next batch."""
    run(
        MultiSyncCollector, makers(2), None, frames_per_batch=40, total_frames=200, replay_buffer=rb,
        set_truncated=True,
    )  # fmt: skip
    ends = rb[:]["next", "truncated"].sum()
    assert 0 < ends <= 10
    for (episode,) in rb.sql("SELECT episode_id FROM episodes").fetchall():
        steps = rb.trajectory(episode)["observation"]
        assert (steps[1:, 2] == steps[:-1, 2] + 1).all()
        assert len(steps[:, :2].unique(dim=0)) == 1
    assert rb.write_count == 200


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_collecting_in_the_background(rb: Any, kind: str) -> None:
    """`start()`: this process draws, sets priorities and asks SQL meanwhile."""
    collector = KINDS[kind](
        makers(2), None, frames_per_batch=20, total_frames=-1, replay_buffer=rb, init_random_frames=50
    )
    try:
        collector.start()
        draws = 0
        while rb.write_count < 400 or draws < 20:
            if len(rb) < 16:
                continue
            sample = rb.sample()
            one = sample["observation"]
            assert torch.equal(sample["next", "observation"][:, 2], one[:, 2] + 1)
            sample["td_error"] = torch.rand(16)
            assert rb.update_tensordict_priority(sample) > 0
            rb.sql("SELECT count(*) FROM episodes").fetchone()
            draws += 1
        assert collector.getattr_rb("write_count") >= 400
    finally:
        collector.async_shutdown()
    wait_for_workers(rb)
    check(rb, environments=2)


@pytest.mark.slow
def test_environments_in_processes_of_their_own(rb: Any) -> None:
    run(
        MultiSyncCollector, makers(2, 2, ParallelEnv), None, frames_per_batch=80, total_frames=320,
        replay_buffer=rb,
    )  # fmt: skip
    assert set(check(rb, environments=4).values()) == {80}


@pytest.mark.parametrize("results", ["stack", -1, 0])
def test_batches_that_are_handed_over(rb: Any, results: Any) -> None:
    """Extend in this process by what a collector of several processes yields."""
    collector = MultiSyncCollector(
        makers(2), None, frames_per_batch=40, total_frames=200, cat_results=results
    )
    try:
        for batch in collector:
            rb.extend(batch)
    finally:
        collector.shutdown()
    assert set(check(rb, environments=2).values()) == {100}


@pytest.mark.slow
def test_a_second_run_continues(rb: Any, store_path: Path) -> None:
    """Collectors that follow one another are sessions of their own, and so are their workers."""
    for number in (1, 2):
        run(MultiSyncCollector, makers(2), None, frames_per_batch=40, total_frames=120, replay_buffer=rb)
        assert rb.write_count == number * 120
    rb.close()
    with expstore.open(store_path) as again:
        run(MultiAsyncCollector, makers(2), None, frames_per_batch=40, total_frames=120, replay_buffer=again)
        assert again.sql("SELECT count(DISTINCT source) FROM episodes").fetchone() == (6,)
        for (episode,) in again.sql("SELECT episode_id FROM episodes").fetchall():
            steps = again.trajectory(episode)["observation"]
            assert steps[:, 2].tolist() == list(range(len(steps)))


@pytest.mark.torture
def test_workers_that_are_spawned(store_path: Path) -> None:
    """TorchRL's default: workers get the buffer pickled."""
    import multiprocessing

    multiprocessing.set_start_method("spawn", force=True)
    try:
        with expstore.open(store_path) as rb:
            run(
                MultiSyncCollector, makers(2), None, frames_per_batch=40, total_frames=80, replay_buffer=rb
            )  # fmt: skip
            check(rb, environments=2)
    finally:
        multiprocessing.set_start_method("fork", force=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector, MultiAsyncCollector])
def test_collectors_over_a_connection(store_path: Path, kind: Any) -> None:
    from expstore.api import Settings

    expstore.open(store_path).close()
    with Serving(Settings(path=store_path.parent)) as server:
        name = store_path.name.removesuffix(".exp")
        with expstore.connect(f"{server.url}/{name}", batch_size=8) as remote:
            make = makers(2) if kind is not Collector else makers(1)[0]
            run(kind, make, None, frames_per_batch=40, total_frames=120, replay_buffer=remote)
            assert remote.write_count >= 120
            for (episode,) in remote.sql("SELECT episode_id FROM episodes").fetchall():
                steps = remote.trajectory(episode)["observation"]
                assert steps[:, 2].tolist() == list(range(len(steps)))
                assert len(steps[:, :2].unique(dim=0)) == 1
