"""`expstore.Collector`, in this process and in several: whole episodes, and workers that die are replaced."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

import expstore
from expstore import Collector
from expstore.collectors.policies import ModulePolicy, load_policy, weights_of
from expstore.errors import NotFoundError, SchemaError, StateError, StorageError
from tests.support.paths import ROOT
from tests.support.refusals import check_refusals
from tests.support.waits import wait_until

WAIT = 60.0


class Numbered(gym.Env[Any, Any]):
    """Its observation has the seed of the lane, the episode and the step, from which lengths follow."""

    observation_space = spaces.Box(0, 1e6, (3,), np.float32)
    action_space = spaces.Discrete(5)

    def __init__(self) -> None:
        self.lane = self.episode = self.number = 0

    def observe(self) -> Any:
        return np.array([self.lane, self.episode, self.number], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self.lane = seed
        self.episode, self.number = self.episode + 1, 0
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.number += 1
        return self.observe(), 1.0, self.number == length_of(self.lane, self.episode), False, {}


def length_of(lane: int, episode: int) -> int:
    return (lane * 7 + episode * 3) % 6 + 1


class Failing(Numbered):
    """Its steps raise an error after the tenth episode of the first lane of each worker."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.episode > 10:
            raise ValueError("the simulator has crashed")
        return super().step(action)


class Broken(Numbered):
    """Its first step raises an error."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        raise ValueError("no such simulator")


class Weighted(nn.Module):
    """Chooses the action that is its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.action = nn.Parameter(torch.zeros(()))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return torch.full(observation.shape[:1], int(self.action))


def choose_two(observation: Any) -> Any:
    return np.full(len(observation), 2)


def choose_any(observation: Any) -> Any:
    """Choose by the global generators, as policies do that explore."""
    actions = torch.randint(2, (len(observation),)) + np.random.randint(2) + random.randrange(2)
    return actions


def check_rows(rb: Any) -> int:
    """Check that every episode has the steps that its environment made; return how many ended."""
    rows = rb.sql(
        "SELECT t._episode, t._step, t.observation, t.next.observation, e.status, e.length "
        "FROM transitions t JOIN episodes e ON t._episode = e.episode_id ORDER BY t._episode, t._step"
    ).fetchall()
    ended, seen = set(), {}
    for episode, step, before, after, status, length in rows:
        lane, number, place = map(int, before)
        assert place == step, "no step is missing"
        assert [*map(int, after)] == [lane, number, step + 1]
        assert seen.setdefault((lane, number), episode) == episode, "no episode is stored twice"
        if status == "terminated":
            assert length == length_of(lane, number)
            ended.add(episode)
        else:
            assert status in ("open", "cut")
            assert length <= length_of(lane, number)
    return len(ended)


@dataclass(frozen=True)
class Collected:
    """A store that two workers have filled, of which one was killed, and what the collector returned."""

    path: Path
    counts: list[int]
    versions: list[int]
    stats: dict[str, Any]


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> Collected:
    path = tmp_path_factory.mktemp("collector") / "run.exp"
    policy, counts, versions = Weighted(), [], []
    keywords = {"lanes": 2, "steps_per_lane": 8, "seed": 10, "hyperparameters": {"lr": 0.5}}
    with expstore.open(path, capacity=100_000) as rb:
        with Collector(Numbered, policy, rb, workers=2, **keywords) as collector:
            counts.append(collector.collect(200))
            policy.action.data += 3
            versions.append(collector.update_policy())
            counts.append(collector.collect(200))
            workers = collector._workers
            assert workers is not None
            os.kill(workers._workers[0].process.pid, signal.SIGKILL)
            # The other one continues, until the killed one has been replaced.
            while collector.stats()["restarts"] == 0 or not workers._workers[0].stored:
                counts.append(collector.collect(100))
            counts.append(collector.collect(400))
            stats = collector.stats()
        assert len(rb) == sum(counts)
        assert rb.specs is not None
        assert rb.specs["action"].n == 5
    return Collected(path, counts, versions, stats)


@pytest.fixture
def rb(collected: Collected) -> Iterator[Any]:
    with expstore.open(collected.path, mode="r") as found:
        yield found


def test_collect_stores_as_many_steps_as_were_asked_for(collected: Collected) -> None:
    most = 2 * 2 * 8 * 2  # two blocks of each worker are on their way at most
    assert [*map(bool, collected.counts)] == [True] * len(collected.counts)
    assert 200 <= collected.counts[0] <= 200 + most
    assert 400 <= collected.counts[-1] <= 400 + most
    assert collected.stats["rows"] == sum(collected.counts)


@pytest.mark.guarantee(
    "kill/collector",
    "Workers of `expstore.Collector` that die are replaced; all episodes are whole, and none is stored "
    "twice.",
)
def test_episodes_are_whole_although_a_worker_was_killed(collected: Collected, rb: Any) -> None:
    ended = check_rows(rb)
    assert ended == collected.stats["episodes"]
    assert collected.stats["restarts"] == 1
    statuses = dict(rb.sql("SELECT status, count(*) FROM episodes GROUP BY 1").fetchall())
    assert statuses["terminated"] == ended
    assert statuses["cut"] <= 6


def test_each_lane_has_a_source_and_seeds_of_its_own(rb: Any) -> None:
    found = rb.sql(
        "SELECT e.source, list_sort(list(DISTINCT t.observation[1]::INT)) FROM transitions t "
        "JOIN episodes e ON t._episode = e.episode_id GROUP BY 1 ORDER BY 1"
    ).fetchall()
    assert found == [
        ("collector/0", [10, 14]),  # the second seed is that of the worker that replaced the first
        ("collector/0//1", [11, 15]),
        ("collector/1", [12]),
        ("collector/1//1", [13]),
    ]


def test_trajectory_ids_are_unique(rb: Any) -> None:
    ((episodes, ids),) = rb.sql("SELECT count(*), count(DISTINCT trajectory_id) FROM episodes").fetchall()
    assert episodes == ids
    # Also those to come: each worker, and what replaces it, has ids of its own.
    found = rb.sql("SELECT DISTINCT source[11]::INT, trajectory_id % 2 FROM episodes ORDER BY ALL").fetchall()
    assert found == [(0, 0), (1, 1)]


def test_rows_know_the_version_of_the_weights(collected: Collected, rb: Any) -> None:
    assert collected.versions == [1]
    found = rb.sql("SELECT policy_version, list(DISTINCT action) FROM transitions GROUP BY 1 ORDER BY 1")
    assert found.fetchall() == [(0, [0]), (1, [3])]
    sampler = expstore.StalenessAwareSampler(max_staleness=0)
    sampler.consumer_version = 1
    with expstore.open(collected.path, mode="r", sampler=sampler, batch_size=64) as fresh:
        assert set(fresh.sample()["policy_version"].tolist()) == {1}


def test_episodes_say_where_they_come_from(rb: Any) -> None:
    found = rb.sql(
        "SELECT source, info->>'worker', info->>'origin' FROM episodes WHERE (info->'origin') IS NOT NULL"
    ).fetchall()
    sources = {source for source, _, _ in found}
    assert sources == {"collector/0", "collector/0//1", "collector/1", "collector/1//1"}
    for source, worker, text in found:
        origin = json.loads(text)
        assert worker == source[len("collector/")]
        assert (origin["env"], origin["hyperparameters"]) == ("Numbered", {"lr": 0.5})
        assert origin["packages"]["expstore"] == expstore.__version__
        assert origin["seed"] == {"0": 10, "1": 12}[worker] or origin["seed"] == 14


@pytest.mark.slow
def test_a_worker_whose_environment_fails_is_replaced(store_path: Path) -> None:
    keywords: dict[str, Any] = {"workers": 1, "lanes": 2, "steps_per_lane": 4, "seed": 0}
    with Collector(Failing, choose_two, store_path, **keywords) as collector:
        collector.collect(200)
        assert collector.stats()["restarts"] >= 2
    with expstore.open(store_path, mode="r") as rb:
        check_rows(rb)
        assert rb.sql("SELECT DISTINCT action FROM transitions").fetchall() == [(2,)]


@pytest.mark.slow
def test_workers_explore_differently_and_again_alike(tmp_path: Path) -> None:
    runs = []
    for run in ("one", "two"):
        with (
            expstore.open(tmp_path / f"{run}.exp") as rb,
            Collector(Numbered, choose_any, rb, workers=2, steps_per_lane=16, seed=4) as collector,
        ):
            actions: dict[str, list[int]] = {}
            while len(actions) < 2:
                collector.collect(16)
                query = (
                    "SELECT e.source, list(t.action ORDER BY t._id) FROM transitions t "
                    "JOIN episodes e ON t._episode = e.episode_id GROUP BY 1 ORDER BY 1"
                )
                actions = dict(rb.sql(query).fetchall())
        runs.append([found[:8] for found in actions.values()])
    assert runs[0][0] != runs[0][1]
    assert runs[0] == runs[1]


def test_workers_that_wait_for_the_limiter_stop_and_end(store_path: Path) -> None:
    limiter = expstore.SampleToInsertRatio(1.0, min_size_to_sample=8, error_buffer=24.0)
    with expstore.open(store_path, batches={"rate_limiter": limiter}, batch_size=8) as rb:
        with Collector(Numbered, None, rb, workers=1, steps_per_lane=8, seed=0) as collector:
            workers = collector._workers
            assert workers is not None
            process = workers._workers[0].process

            collector.start()
            wait_until(lambda: limiter._changed._waiters)
            collector.stop()
            rows = rb.write_count
            assert rows == collector.stats()["rows"] > 8 + 24
            collector.start()
            wait_until(lambda: limiter._changed._waiters)
        assert process.exitcode == 0, "it was not killed"
        assert rb.write_count > rows
        assert not limiter.can_insert(1), "the limit is back"
        check_rows(rb)


class Large(nn.Module):
    """Its weights are larger than what a pipe holds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1 << 20))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return torch.full((len(observation),), int(self.weight[0]))


@pytest.mark.slow
def test_weights_never_wait_for_a_worker_that_waits_for_the_limiter(store_path: Path) -> None:
    limiter = expstore.SampleToInsertRatio(1.0, min_size_to_sample=8, error_buffer=24.0)
    policy = Large()
    with (
        expstore.open(store_path, batches={"rate_limiter": limiter}, batch_size=8, seed=0) as rb,
        Collector(Numbered, policy, rb, workers=2, steps_per_lane=8, seed=0) as collector,
    ):
        collector.start()
        wait_until(lambda: len(limiter._changed._waiters) == 2)
        with torch.no_grad():
            for number in range(1, 5):
                policy.weight.fill_(number)
                assert collector.update_policy() == number
        for _ in range(40):
            rb.sample()
        query = "SELECT DISTINCT policy_version, action FROM transitions ORDER BY 1"
        wait_until(lambda: (4, 4) in rb.sql(query).fetchall())
        assert set(rb.sql(query).fetchall()) <= {(number, number) for number in range(5)}


def test_a_worker_that_fails_at_once_ends_the_collection(store_path: Path) -> None:
    with Collector(Broken, Weighted(), store_path, workers=1) as collector:
        with pytest.raises(StateError, match=r"(?s)worker 0: Traceback.*no such simulator"):
            collector.collect(10)
        with pytest.raises(StateError, match="no such simulator"):
            collector.update_policy()
        with pytest.raises(StateError, match="no such simulator"):
            collector.start()
    with pytest.raises(StateError, match="closed|no such simulator"):
        collector.collect(10)


def test_a_buffer_that_is_closed_first_ends_the_collection(store_path: Path) -> None:
    rb = expstore.open(store_path)
    with Collector(Numbered, None, rb, workers=1, steps_per_lane=4) as collector:
        collector.collect(4)
        rb.close()
        with pytest.raises(StateError, match=r"(?s)a worker of the collector failed.*It was not replaced"):
            collector.collect(4)


def test_specs_that_cannot_be_stored_end_the_collection(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise StorageError("no space left")

    monkeypatch.setattr("expstore.collectors.workers.describe_rows", fail)
    with expstore.open(store_path) as rb, Collector(Numbered, None, rb, workers=1) as collector:
        with pytest.raises(StateError, match=r"(?s)a worker of the collector failed.*no space left"):
            collector.collect(100_000)
        assert len(rb)


def test_workers_collect_in_the_background_and_in_loops(store_path: Path) -> None:
    with (
        expstore.open(store_path) as rb,
        Collector(Numbered, None, rb, workers=1, steps_per_lane=4, seed=3, source="background") as collector,
    ):
        collector.start()
        workers = collector._workers
        assert workers is not None
        workers.wait_for(20)
        collector.stop()
        rows = len(rb)
        assert rows == collector.stats()["rows"] >= 20
        for stored in collector:
            assert stored >= 1
            break
        assert len(rb) > rows
        assert rb.sql("SELECT DISTINCT source FROM episodes").fetchall() == [("background/0",)]
        check_rows(rb)
        rows = len(rb)
        assert collector.collect(8) >= 8  # continues the episode
        check_rows(rb)


SCRIPT = """
import os, sys, gymnasium, expstore
from tests.unit.collectors.test_collector import Numbered
if __name__ == "__main__":
    with expstore.Collector(Numbered, None, sys.argv[1], workers=2, steps_per_lane=4, seed=0) as collector:
        try:
            for stored in collector:
                pids = [worker.process.pid for worker in collector._workers._workers.values()]
                print("stored", collector.stats()["rows"], *pids, flush=True)
        except KeyboardInterrupt:
            print("stopped", collector.stats()["rows"], flush=True)
"""


def start_script(path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(path)], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def read_until(process: subprocess.Popen[str], rows: int) -> list[str]:
    assert process.stdout is not None
    for line in process.stdout:
        words = line.split()
        if int(words[1]) >= rows:
            return words
    raise AssertionError(process.communicate()[1])


@pytest.mark.guarantee("kill/collector")
@pytest.mark.slow
def test_ctrl_c_keeps_everything(store_path: Path) -> None:
    process = start_script(store_path)
    read_until(process, 100)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: all processes get it
    out, err = process.communicate(timeout=WAIT)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    stored = int(out.rpartition("stopped")[2])  # the signal may have come in the middle of a line
    with expstore.open(store_path) as rb:
        assert rb.recovered is None
        assert len(rb) == stored
        check_rows(rb)


@pytest.mark.guarantee("kill/collector")
@pytest.mark.slow
def test_workers_end_when_the_owner_is_killed(store_path: Path) -> None:
    process = start_script(store_path)
    words = read_until(process, 100)
    workers = [os.pidfd_open(int(pid)) for pid in words[2:]]
    process.kill()
    process.wait()
    for worker in workers:
        assert select.select([worker], [], [], WAIT)[0], "the worker has ended"
        os.close(worker)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    process.stderr.close()
    with expstore.open(store_path) as rb:
        assert len(rb) >= int(words[1])
        check_rows(rb)


# -- in this process -----------------------------------------------------------------------------------


def test_environments_are_made_by_function_or_name(store_path: Path) -> None:
    with Collector(Numbered, None, store_path, lanes=3, seed=5) as collector:
        assert collector.collect(60) >= 60
    with expstore.open(store_path) as rb:
        check_rows(rb)
        info = rb.sql("SELECT info->>'origin' FROM episodes WHERE (info->'origin') IS NOT NULL").fetchall()
        assert [json.loads(text)["seed"] for (text,) in info] == [5] * len(info)
        rows = len(rb)
        with Collector("CartPole-v1", None, expstore.ReplayBuffer(), lanes=2) as collector:
            assert collector.collect(30) >= 30
        assert len(rb) == rows


def test_a_module_in_this_process_has_versions(store_path: Path) -> None:
    policy = Weighted()
    with expstore.open(store_path) as rb, Collector(Numbered, policy, rb, steps_per_lane=4) as collector:
        collector.collect(4)
        policy.action.data += 1
        assert collector.update_policy() == 1
        collector.collect(4)
        found = rb.sql("SELECT policy_version, action FROM transitions ORDER BY _id").fetchall()
    assert found == [(0, 0)] * 4 + [(1, 1)] * 4


def test_what_a_collector_has_done_in_this_process(store_path: Path) -> None:
    with Collector(Numbered, Weighted(), store_path, lanes=2, steps_per_lane=4, seed=0) as collector:
        nothing = {"rows": 0, "episodes": 0, "mean_return": None, "restarts": 0, "policy_version": 0}
        assert collector.stats() == nothing
        stored = collector.collect(50)
        collector.update_policy()
        stats = collector.stats()
    with expstore.open(store_path, mode="r") as rb:
        query = "SELECT count(*), avg(\"return\") FROM episodes WHERE status = 'terminated'"
        ((episodes, mean),) = rb.sql(query).fetchall()
    assert stats == {
        "rows": stored, "episodes": episodes, "mean_return": mean, "restarts": 0, "policy_version": 1
    }  # fmt: skip
    assert episodes > 5


def test_policies_are_found_by_name() -> None:
    assert load_policy("tests.unit.collectors.test_collector:choose_two") is choose_two
    with Collector(Numbered, f"{__name__}:choose_two", expstore.ReplayBuffer()) as collector:
        collector.collect(3)


def test_wrong_arguments_make_no_store(store_path: Path) -> None:
    def make(env: Any, policy: Any, **keywords: Any) -> Callable[[], object]:
        return lambda: Collector(env, policy, store_path, **keywords)

    new = "pass a function that returns a new environment"
    check_refusals(
        [
            (make(Numbered, "choose_two"), NotFoundError, "write it as module:function"),
            (make(Numbered, "no_such_module:f"), NotFoundError, "there is no module 'no_such_module'"),
            (make(Numbered, f"{__name__}:choose_three"), NotFoundError, "has no 'choose_three'"),
            (make(Numbered, 3), TypeError, "policy is 3"),
            (make(Numbered(), None, lanes=2), TypeError, new),
            (make(Numbered(), None, workers=1), TypeError, new),
            (make("NoSuch-v0", None), NotFoundError, "NoSuch"),
            (make(Numbered, None, workers=-1), ValueError, "workers is -1"),
            (make(Numbered, None, lanes=0), ValueError, "lanes is 0"),
            (make(Numbered, None, steps_per_lane=0), ValueError, "steps_per_lane is 0"),
            (make(Numbered, None, workers=1, steps_per_lane=0), ValueError, "steps_per_lane is 0"),
            (make(Numbered, None, hyperparameters={"a": object()}), SchemaError, "'a'"),
        ],
        absent=store_path,
    )


@pytest.mark.slow
def test_workers_collect_into_rows_in_memory() -> None:
    rb = expstore.ReplayBuffer(storage=expstore.MemoryStorage(10_000, flatten=True))
    with Collector(Numbered, None, rb, workers=2, steps_per_lane=8, seed=0) as collector:
        assert collector.collect(200) >= 200
    assert check_rows(rb) > 0
    with pytest.raises(StateError, match="are objects in this process's memory"):
        Collector(Numbered, None, expstore.ReplayBuffer(storage=expstore.ListStorage(10)), workers=1)


def test_what_needs_workers_or_a_module_says_so() -> None:
    with Collector(Numbered, choose_two, expstore.ReplayBuffer()) as collector:
        for act in (collector.start, collector.stop):
            with pytest.raises(StateError, match="has no workers"):
                act()
        with pytest.raises(StateError, match=r"only a torch\.nn\.Module"):
            collector.update_policy()
    with pytest.raises(StateError, match="closed"):
        collector.collect(1)


def test_weights_of_all_dtypes_are_passed_on() -> None:
    module, other = (nn.Linear(2, 3).to(torch.bfloat16) for _ in range(2))
    module.register_buffer("steps", torch.tensor(7))
    other.register_buffer("steps", torch.tensor(0))
    ModulePolicy(other).set_weights(weights_of(module))
    for name, value in module.state_dict().items():
        assert torch.equal(other.state_dict()[name], value)
        assert other.state_dict()[name].dtype == value.dtype


@pytest.mark.slow
def test_without_gymnasium_it_says_what_to_install() -> None:
    code = "import sys; sys.modules['gymnasium'] = None\nimport expstore\nexpstore.Collector"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 1
    assert "gymnasium, which is not installed; pip install 'expstore[gym]'" in done.stderr
