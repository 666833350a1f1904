"""TorchRL's collectors write into buffers of expstore, by themselves or batch by batch.

Each row contains its episode and step (`counting`), so that the expected rows are known.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from multiprocessing.context import set_spawning_popen
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import expstore
from tests.support.counting_env import EPISODES, Counting, Make

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # some of its modules use what other ones call deprecated
    from torchrl import data as theirs
    from torchrl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
    from torchrl.envs import SerialEnv

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torchrl"),
    pytest.mark.filterwarnings("ignore::FutureWarning:torchrl"),
]

TOTAL = 120

Row = tuple[int, int, int]


def one() -> Any:
    return Make(2)()


def three() -> Any:
    return SerialEnv(3, [Make(worker) for worker in range(3)])


def stored(rb: expstore.ReplayBuffer) -> list[list[Row]]:
    """Return the rows of each episode in the order of its steps; each must be what one episode showed."""
    episodes = []
    for (episode,) in rb.sql("SELECT episode_id FROM episodes ORDER BY 1").fetchall():
        found = [tuple(row) for row in rb.trajectory(episode)["observation"].tolist()]
        worker, number, _ = found[0]
        assert found == [(worker, number, step) for step in range(len(found))]
        episodes.append(found)
    return episodes


def expected(make: Callable[[], Any], **keywords: Any) -> set[Row]:
    """Return what a collector hands over that is not given a buffer."""
    collector = Collector(make(), None, total_frames=TOTAL, **keywords)
    try:
        return {tuple(row) for batch in collector for row in batch["observation"].reshape(-1, 3).tolist()}
    finally:
        collector.shutdown()


CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "one": (one, {"frames_per_batch": 5}),
    "three": (three, {"frames_per_batch": 15}),
    "row-by-row": (one, {"frames_per_batch": 5, "extend_buffer": False}),
    "postproc": (three, {"frames_per_batch": 15, "postproc": lambda data: data.exclude("action")}),
    "truncated": (one, {"frames_per_batch": 5, "set_truncated": True}),
    "reset": (three, {"frames_per_batch": 30, "reset_at_each_iter": True}),
}


@pytest.mark.some(2)
@pytest.mark.parametrize("case", CASES)
def test_a_collector_writes_by_itself(case: str, store_path: Path) -> None:
    make, keywords = CASES[case]
    with expstore.open(store_path, batch_size=8, seed=1) as rb:
        collector = Collector(make(), None, total_frames=TOTAL, replay_buffer=rb, **keywords)
        assert all(batch is None for batch in collector)
        collector.shutdown()
        assert rb.write_count == TOTAL
        episodes = stored(rb)
        asked = {name: value for name, value in keywords.items() if name not in ("extend_buffer", "postproc")}
        assert {row for episode in episodes for row in episode} == expected(make, **asked)
        # An episode is as long as the environment's, but for those that have not ended.
        ended = rb.sql("SELECT count(*) FROM episodes WHERE status = 'terminated'").fetchone()
        whole = [episode for episode in episodes if len(episode) == EPISODES[episode[0][0]]]
        assert ended == (len(whole),)
        assert len(whole) > 5


def test_random_frames_are_counted_across_restarts(store_path: Path) -> None:
    """A collector counts by what the buffer has stored."""

    def run() -> list[bool]:
        asked = []

        def policy(data: TensorDict) -> TensorDict:
            asked.append(True)
            return data.set("action", torch.tensor(0))

        with expstore.open(store_path, seed=1) as rb:
            collector = Collector(
                one(),
                policy,
                frames_per_batch=10,
                total_frames=30,
                init_random_frames=40,
                replay_buffer=rb,
                trust_policy=True,
            )
            asked.clear()
            for _ in collector:
                pass
            collector.shutdown()
        return asked

    assert run() == []
    assert len(run()) == 20


@pytest.mark.parametrize("make", [one, three])
def test_torchrls_buffer_over_a_store_is_written_by_a_collector(
    make: Callable[[], Any], store_path: Path
) -> None:
    lanes = 3 if make is three else 1
    own = expstore.ZarrStorage(store_path, 300, ndim=2 if lanes > 1 else 1)
    storage = expstore.torchrl.ExpStorage(own)
    with storage.buffer as kept:
        rb = theirs.TensorDictReplayBuffer(storage=storage, batch_size=8)
        collector = Collector(make(), None, frames_per_batch=15, total_frames=TOTAL, replay_buffer=rb)
        for _ in collector:
            pass
        collector.shutdown()
        assert len(rb) == kept.storage.write_count == TOTAL
        assert kept.write_count == TOTAL // lanes  # steps of time, as TorchRL counts
        assert {row for episode in stored(kept) for row in episode} == expected(make, frames_per_batch=15)


# -- restarts without a flag ---------------------------------------------------------------------------------


def endless() -> Any:
    return Counting(0, 10**6)


def lengths(rb: expstore.ReplayBuffer) -> list[tuple[int, str]]:
    """Return length and status of each episode, whose rows must be the steps of one run."""
    for (episode,) in rb.sql("SELECT episode_id FROM episodes").fetchall():
        steps = rb.trajectory(episode)["observation"][:, 2]
        assert steps.tolist() == list(range(len(steps)))
    return [
        tuple(row) for row in rb.sql("SELECT length, status FROM episodes ORDER BY episode_id").fetchall()
    ]


def test_each_rollout_is_an_episode(store_path: Path) -> None:
    """A rollout stops without an end flag, and the next one begins after a reset."""
    env = endless()
    with expstore.open(store_path) as rb:
        for _ in range(3):
            rb.extend(env.rollout(10))
        assert lengths(rb) == [(10, "cut"), (10, "cut"), (10, "open")]


@pytest.mark.parametrize("is_given", [True, False], ids=["replay_buffer", "extend"])
def test_a_restarted_collector_begins_other_episodes(
    is_given: bool, store_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It counts its trajectories from 0 again."""
    with expstore.open(store_path) as rb:
        for _ in range(3):
            keywords = {"replay_buffer": rb} if is_given else {}
            collector = Collector(endless(), None, frames_per_batch=10, total_frames=20, **keywords)
            for batch in collector:
                if not is_given:
                    rb.extend(batch)
            collector.shutdown()
        assert lengths(rb) == [(20, "cut"), (20, "cut"), (20, "open")]
    assert caplog.text.count("began another episode under the trajectory id of its open one") == 1


@pytest.mark.parametrize("has_ids", [True, False])
def test_interleaved_collectors_are_warned_of_once(
    has_ids: bool, store_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    collectors = [
        iter(Collector(Counting(worker, 10**6), None, frames_per_batch=10, total_frames=40))
        for worker in (0, 1)
    ]
    with expstore.open(store_path) as rb:
        for _ in range(4):
            for collector in collectors:
                batch = next(collector)
                rb.extend(batch if has_ids else batch.exclude("collector"))
        statuses = rb.sql("SELECT status FROM episodes").fetchall()
    assert statuses == [("cut",)] * 7 + [("open",)]
    (warning,) = (record.getMessage() for record in caplog.records if record.name == "expstore")
    assert warning.startswith("rows without a source began another episode")
    assert ("trajectory id" in warning) == has_ids
    assert "episodes.end()" in warning


# -- several processes ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("make", "workers"), [(MultiSyncCollector, 1), (MultiAsyncCollector, 2)])
def test_collectors_of_several_processes_fill_rows_in_ram(make: Callable[..., Any], workers: int) -> None:
    rb = expstore.TensorDictReplayBuffer(storage=expstore.LazyTensorStorage(1000), batch_size=8, shared=True)
    environments = [Make(worker) for worker in range(workers)]
    collector = make(environments, None, frames_per_batch=10, total_frames=50, replay_buffer=rb)
    for _ in collector:
        rb.sample()
    collector.shutdown()
    assert len(rb) == rb.write_count >= 50
    assert all(len(episode) == len(set(episode)) for episode in stored(rb))


def test_an_ensemble_is_not_shared() -> None:
    rb = expstore.ReplayBuffer()
    assert rb.share(False) is rb
    with pytest.raises(expstore.errors.StateError, match="Collector.*which runs in this process"):
        expstore.ReplayBufferEnsemble(rb).share()


def test_torchrls_buffer_over_a_store_is_refused_before_they_start(store_path: Path) -> None:
    """Also before a row is there, when a collector would write one to learn the fields."""
    with expstore.torchrl.ExpStorage(store_path, capacity=50).buffer as kept:
        rb = theirs.TensorDictReplayBuffer(storage=expstore.torchrl.ExpStorage(kept))
        with pytest.raises(expstore.errors.StateError, match="could only read"):
            MultiSyncCollector(
                [Make(0), Make(1)], None, frames_per_batch=10, total_frames=50, replay_buffer=rb
            )
        assert kept.write_count == 0
        set_spawning_popen(object())
        try:
            with pytest.raises(expstore.errors.StateError, match="multi-process collectors cannot write"):
                pickle.dumps(rb)
        finally:
            set_spawning_popen(None)
