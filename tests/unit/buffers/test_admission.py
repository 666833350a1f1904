"""Groups that are started when they will not lag too much, and drawn in that order."""

from __future__ import annotations

import heapq
import math
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import expstore
from expstore import GroupSampler
from expstore.errors import ArgumentError, NotFoundError, NotReadyError, StateError
from tests.support.forks import in_child
from tests.support.waits import wait_until

pytestmark = pytest.mark.usefixtures("no_syncs")

NUMPY = {"as_numpy": True}


def opened(path: Path, *, size: int | None = 1, **options: Any) -> Any:
    roles = {"group": "group", "group_size": size, "traj": "traj"}
    return expstore.open(path, **{"episodes": roles, "batches": NUMPY, "seed": 1, **options})


def learn(rb: Any, groups: int = 1, **options: Any) -> Any:
    return rb.consumer("learner", sampler=GroupSampler(groups, **{"max_lag": 1, **options}))


def write(rb: Any, group: int | str, version: int, *, length: int = 1, member: int = 0) -> None:
    """Append a member of a group."""
    ends = np.arange(length) == length - 1
    rb.extend(
        {
            "group": np.full(length, group) if isinstance(group, int) else [group] * length,
            "traj": np.full(length, member),
            "policy_version": np.full(length, version),
            "next": {"reward": np.zeros(length), "terminated": ends, "done": ends},
        }
    )


def drawn(learner: Any) -> list[Any]:
    """Draw a batch; return the values of its groups."""
    groups = learner.sample()["group"]
    return list(dict.fromkeys(groups.tolist()))


def refused(act: Callable[[], Any]) -> tuple[int | None, int | None]:
    with pytest.raises(NotReadyError) as caught:
        act()
    return caught.value.version, caught.value.lag


# -- what is started, and drawn when -------------------------------------------------------------------


def test_a_group_that_would_lag_is_not_started(tmp_path: Path) -> None:
    with opened(tmp_path / "a.exp") as rb:
        learner = learn(rb, 2)
        started = [rb.groups.start(version=0) for _ in range(4)]
        assert [group.lag for group in started] == [0, 0, 1, 1]
        assert refused(lambda: rb.groups.start(version=0)) == (0, 2)
        write(rb, started[1].id, 0)
        write(rb, started[0].id, 0)
        assert drawn(learner) == [group.id for group in started[:2]]
        # Nothing has changed for version 0, but the learner has version 1 now.
        assert refused(lambda: rb.groups.start(version=0)) == (0, 2)
        assert rb.groups.start(version=1).lag == 1
        with pytest.raises(ArgumentError, match="newer than that of the learner"):
            rb.groups.start(version=2)


def test_a_slow_group_delays_those_after_it(tmp_path: Path) -> None:
    with opened(tmp_path / "a.exp") as rb:
        learner = learn(rb)
        slow, fast = (rb.groups.start(version=0) for _ in range(2))
        write(rb, fast.id, 0)
        assert refused(learner.sample) == (None, None)
        with pytest.raises(
            NotReadyError, match=f"waits for group {slow.id}, which was started with version 0"
        ):
            learner.sample()
        other = rb.consumer("other", sampler=GroupSampler(1, "random"))
        assert drawn(other) == [fast.id]
        write(rb, slow.id, 0)
        assert drawn(learner) + drawn(learner) == [slow.id, fast.id]


def test_older_versions_come_first_and_delay_no_group_too_much(tmp_path: Path) -> None:
    with opened(tmp_path / "a.exp") as rb:
        learner = learn(rb)
        first = rb.groups.start(version=0)
        write(rb, first.id, 0)
        assert drawn(learner) == [first.id]
        new = [rb.groups.start(version=1) for _ in range(2)]
        # It would come before both, and the second of them would be 2 versions behind.
        assert refused(lambda: rb.groups.start(version=0)) == (0, 2)
        new[1].discard(reason="x")
        old = rb.groups.start(version=0)
        for group, version in ((new[0], 1), (old, 0)):
            write(rb, group.id, version)
        assert drawn(learner) + drawn(learner) == [old.id, new[0].id]


def test_groups_that_were_not_started_delay_others_too(tmp_path: Path) -> None:
    with opened(tmp_path / "a.exp") as rb:
        learner = learn(rb, max_lag=2)
        for key in (5, 6):
            write(rb, key, 0)
        last = rb.groups.start(version=0)
        assert last.lag == 2
        assert refused(lambda: rb.groups.start(version=0)) == (0, 3)
        write(rb, last.id, 0)
        assert [drawn(learner) for _ in range(3)] == [[5], [6], [last.id]]


def test_a_learner_that_goes_back_is_as_far_ahead_as_it_was(tmp_path: Path) -> None:
    with opened(tmp_path / "a.exp") as rb:
        learner = learn(rb, max_lag=1)
        position = learner.position
        batches = []
        for version in range(3):
            group = rb.groups.start(version=version)
            write(rb, group.id, version)
            batches.append(drawn(learner))
        learner.seek(position)
        assert refused(lambda: rb.groups.start(version=0)) == (0, 3)  # drawn after the three that come again
        assert [drawn(learner) for _ in range(3)] == batches
        assert rb.groups.start(version=learner.position["draw"]).lag == 0


def test_it_waits_for_a_newer_version(tmp_path: Path) -> None:
    with opened(tmp_path / "a.exp") as rb:
        learner = learn(rb, max_lag=0)
        first = rb.groups.start(version=0)
        asked = []

        def version() -> int:
            asked.append(learner.position["draw"])
            if len(asked) == 2:
                write(rb, first.id, 0)
                learner.sample()
            return int(asked[-1])

        group = rb.groups.start(version=version, timeout=60.0)
        assert (group.version, group.lag, asked) == (1, 0, [0, 0, 1])
        assert refused(lambda: rb.groups.start(version=1, timeout=0.001)) == (1, 1)


# -- how a group ends ------------------------------------------------------------------------------------


def test_a_failed_group_frees_its_place(tmp_path: Path) -> None:
    with opened(tmp_path / "a.exp", size=2) as rb:
        learner = learn(rb, max_lag=0)

        def fail(length: int) -> None:
            with rb.groups.start(version=0) as group:
                if length:
                    write(rb, group.id, 0, length=length)
                raise ZeroDivisionError

        for length in (3, 0):
            with pytest.raises(ZeroDivisionError):
                fail(length)
        with rb.groups.start(version=0) as group:
            for member in range(2):
                write(rb, group.id, 0, member=member)
        assert drawn(learner) == [group.id]
        with pytest.raises(ZeroDivisionError), group:
            raise ZeroDivisionError  # it is complete
        counts = "SELECT status, reason, length, count(*) FROM groups GROUP BY ALL ORDER BY ALL"
        assert rb.sql(counts).fetchall() == [
            ("complete", None, 2, 1), ("discarded", "exception: ZeroDivisionError", 3, 1),
        ]  # fmt: skip


def test_a_block_closes_its_group(tmp_path: Path) -> None:
    with opened(tmp_path / "a.exp", size=None) as rb:
        learner = learn(rb, max_lag=0)
        with rb.groups.start(version=0) as group:
            write(rb, group.id, 0)
            write(rb, group.id, 0, member=1)
        assert learner.sample()["traj"].tolist() == [0, 1]
        with pytest.raises(StateError, match="has no episode"), rb.groups.start(version=1):
            pass
        rb.groups.discard(next(iter(rb._store.catalog.groups.places.values())).id, reason="no rollout")
        with rb.groups.start(version=1) as group:
            write(rb, group.id, 1)
        with pytest.raises(NotFoundError):
            rb._store.catalog.groups.end_place(rb._store.catalog, 7, "discarded", "x")


def test_a_field_of_texts(tmp_path: Path) -> None:
    with opened(tmp_path / "a.exp", layout="arrow") as rb:
        learner = learn(rb, max_lag=1)
        slow, fast = (rb.groups.start(version=0) for _ in range(2))
        write(rb, str(fast.id), 0)
        assert not learner.sampler.can_sample(rb.storage, 1)
        with slow:
            write(rb, str(slow.id), 0)
        assert [drawn(learner), drawn(learner)] == [[str(slow.id)], [str(fast.id)]]


def test_numbers_are_not_used_again_when_the_clock_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path / "a.exp", size=2) as rb:
        learn(rb)
        first = rb.groups.start(version=0)
        write(rb, first.id, 0)
    monkeypatch.setattr("time.time_ns", lambda: 1)
    with opened(tmp_path / "a.exp", size=2) as rb:
        learn(rb)
        assert rb.groups.start(version=0).id > first.id


def test_groups_of_a_process_that_has_ended_delay_no_others(tmp_path: Path) -> None:
    path = tmp_path / "a.exp"

    def live() -> None:
        rb = opened(path, size=2)
        learn(rb)
        half, started = (rb.groups.start(version=0) for _ in range(2))
        write(rb, half.id, 0)
        for member in range(2):
            write(rb, started.id, 0, member=member)

    in_child(live)
    with opened(path, size=2) as rb:
        learner = learn(rb)
        assert [row["status"] for row in rb.groups().arrow().to_pylist()] == ["open", "complete"]
        assert len(drawn(learner)) == 1
        assert rb.groups.start(version=1).lag == 0


# -- other processes -------------------------------------------------------------------------------------


def test_workers_start_groups_and_lose_them_when_they_are_killed(tmp_path: Path) -> None:
    with opened(tmp_path / "a.exp", size=2) as rb:
        learner = learn(rb, max_lag=0)
        rb.share()

        def work() -> None:
            with rb.groups.start(version=0) as group:
                for member in range(2):
                    write(rb, group.id, 0, member=member)
            assert refused(lambda: rb.groups.start(version=0)) == (0, 1)

        in_child(work)
        assert len(drawn(learner)) == 1

        def begin() -> None:
            write(rb, rb.groups.start(version=1, timeout=60.0).id, 1, length=5)

        in_child(lambda: rb.groups.start(version=1))
        in_child(begin)  # the place of the first one is freed when its connection ends
        wait_until(lambda: not rb._store.catalog.groups.places)
        assert rb.groups.start(version=1).lag == 0
        lost = rb.groups("status = 'discarded'").arrow().to_pylist()
        assert [(row["reason"], row["length"]) for row in lost] == [("lost", 5)]


# -- lengths and lags ------------------------------------------------------------------------------------


def compare(some: list[int], others: list[int]) -> float:
    """Return the p-value of the Kolmogorov-Smirnov test of two samples, by its limit for large ones."""
    values = np.concatenate([some, others])
    shares = [np.searchsorted(np.sort(one), values, "right") / len(one) for one in (some, others)]
    distance = np.abs(shares[0] - shares[1]).max()
    size = math.sqrt(len(some) * len(others) / len(values))
    scaled = (size + 0.12 + 0.11 / size) * distance
    terms = [(-1) ** (k - 1) * math.exp(-2 * k * k * scaled * scaled) for k in range(1, 101)]
    return 1.0 if scaled < 0.2 else 2 * sum(terms)


class Simulation:
    """Workers that write groups of log-normal lengths, and a learner, in virtual time.

    Args:
        rb: The buffer.
        admits: Whether groups are started by `rb.groups.start`; otherwise whenever a worker is free.
    """

    GROUPS, MAX_LAG, WORKERS = 4, 3, 24

    def __init__(self, rb: Any, *, admits: bool, seed: int) -> None:
        self.rb, self.admits = rb, admits
        self.learner = learn(rb, self.GROUPS, max_lag=self.MAX_LAG)
        self.numbers = np.random.default_rng(seed)
        self.submitted: dict[int, int] = {}  # lengths by group
        self.versions: dict[int, int] = {}
        self.trained: list[int] = []
        self.lags: list[int] = []

    def start(self, version: int) -> int | None:
        """Start a group; None: it would lag."""
        if not self.admits:
            return len(self.submitted)
        try:
            return int(self.rb.groups.start(version=version).id)
        except NotReadyError:
            return None

    def train(self) -> None:
        """Draw batches while there are any, one per unit of time at most."""
        number = self.learner.position["draw"]
        for group in drawn(self.learner):
            self.trained.append(group)
            self.lags.append(number - self.versions[group])

    def run(self, groups: int) -> None:
        """Run until this many groups were trained on."""
        now, free, events = 0.0, self.WORKERS, [(0.0, 0)]
        while len(self.trained) < groups:
            now, ended = heapq.heappop(events)
            if ended:
                write(self.rb, ended, self.versions[ended], length=self.submitted[ended])
                free += 1
            else:
                with_batch = True
                try:
                    self.train()
                except NotReadyError:
                    with_batch = False
                heapq.heappush(events, (now + (1.0 if with_batch else 0.1), 0))
            version = self.learner.position["draw"]
            while free and (group := self.start(version)) is not None:
                group = group or 1 << 40
                length = int(np.clip(np.exp(self.numbers.normal(2.0, 1.0)), 2, 60))  # 30 times apart
                self.submitted[group], self.versions[group] = length, version
                heapq.heappush(events, (now + length / 8, group))
                free -= 1


@pytest.mark.guarantee(
    "consumers/admission",
    "Groups that `rb.groups.start` starts are never further behind than `max_lag`, and the lengths of those "
    "that are trained on have the distribution of all.",
)
@pytest.mark.slow
def test_lengths_that_are_trained_on_are_those_that_were_submitted(tmp_path: Path) -> None:
    """Every group is trained on, in the order of the starts: whether it is does not depend on its length.

    Where workers start groups at any time, the long ones are discarded, which a test of the lengths sees.
    """
    for admits in (True, False):
        with opened(tmp_path / f"{admits}.exp") as rb:
            run = Simulation(rb, admits=admits, seed=7)
            run.run(300)
            lengths = [run.submitted[group] for group in run.trained]
            discarded = rb.groups("status = 'discarded' AND reason = 'lag'").arrow().num_rows
            assert len(set(run.trained)) == len(run.trained)
            if admits:
                assert run.trained == list(run.submitted)[: len(run.trained)]
                assert len(set(lengths)) > 30
                assert max(run.lags) <= run.MAX_LAG
                assert discarded == 0
            else:
                assert discarded > 100
                assert compare(lengths, list(run.submitted.values())) < 1e-6


@pytest.mark.guarantee("consumers/admission")
@pytest.mark.parametrize("seed", [0, 1, pytest.param(2, marks=pytest.mark.torture)])
def test_no_group_lags_whatever_happens(seed: int, tmp_path: Path) -> None:
    """Starts with any version, failures, discards, draws, a learner that goes back, and restarts."""
    chance, path = random.Random(seed), tmp_path / "a.exp"
    limit, versions, trained = 2, dict[int, int](), dict[int, list[int]]()
    running: list[Any] = []
    rb = opened(path, size=2)
    learner = learn(rb, 2, max_lag=limit)
    for _ in range(600):
        act = chance.random()
        if act < 0.4:
            version = max(0, learner.position["draw"] - chance.choice([0, 0, 0, 1, 2]))
            try:
                group = rb.groups.start(version=version)
            except NotReadyError:
                continue
            assert group.lag <= limit
            versions[group.id] = version
            running.append(group)
        elif act < 0.7 and running:
            group = running.pop(chance.randrange(len(running)))
            for member in range(2):
                write(rb, group.id, versions[group.id], member=member)
        elif act < 0.75 and running:
            running.pop(chance.randrange(len(running))).discard(reason="x")
        elif act < 0.97:
            number = learner.position["draw"]
            try:
                groups = drawn(learner)
            except NotReadyError:
                continue
            assert trained.setdefault(number, groups) == groups
            assert all(number - versions[group] <= limit for group in groups)
        elif act < 0.98:
            learner.seek(learner.position | {"draw": chance.randint(0, learner.position["draw"])})
        elif act < 0.99:
            rb.close()
            running.clear()
            rb = opened(path, size=2)
            learner = learn(rb, 2, max_lag=limit)
            learner.seek("end")
    rb.close()
    every = [group for groups in trained.values() for group in groups]
    assert len(set(every)) == len(every) > 60


# -- what is refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"version": -1}, "version must be at least 0"),
        ({"version": "new"}, "version"),
        ({"version": 0, "timeout": -1}, "timeout"),
        ({"version": 0, "consumer": 3}, "consumer must be a name"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    with opened(tmp_path / "a.exp") as rb:
        learn(rb)
        with pytest.raises(ArgumentError, match=words):
            rb.groups.start(**options)


def test_wrong_uses(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "plain.exp") as rb, pytest.raises(StateError, match="no groups"):
        rb.groups.start(version=0)
    with opened(tmp_path / "a.exp") as rb:
        for sampler in (GroupSampler(1), GroupSampler(1, "random", max_lag=1), expstore.RandomSampler()):
            size = None if isinstance(sampler, GroupSampler) else 1
            with rb.consumer("other", sampler=sampler, batch_size=size):
                with pytest.raises(NotReadyError, match="no consumer that limits the lag"):
                    rb.groups.start(version=0)
        with learn(rb), rb.consumer("critic", sampler=GroupSampler(1, max_lag=0)):
            with pytest.raises(ArgumentError, match="2 open consumers .*: learner, critic"):
                rb.groups.start(version=0)
            rb.groups.start(version=0, consumer="learner")
            assert refused(lambda: rb.groups.start(version=0, consumer="critic")) == (0, 1)
            with pytest.raises(NotReadyError, match="no consumer 'judge'"):
                rb.groups.start(version=0, consumer="judge")
        rb.flush()
        with opened(tmp_path / "a.exp", mode="r") as reader, pytest.raises(StateError):
            reader.groups.start(version=0)


def test_it_waits_until_the_consumer_is_open(tmp_path: Path) -> None:
    with opened(tmp_path / "a.exp") as rb:
        opens = [0]

        def version() -> int:
            opens[0] += 1
            if opens[0] == 2:
                learn(rb)
            return 0

        assert rb.groups.start(version=version, timeout=60.0).lag == 0


def test_threads_start_no_group_too_many(tmp_path: Path) -> None:
    with opened(tmp_path / "a.exp") as rb:
        learner = learn(rb, 2, max_lag=2)
        lags: list[int] = []

        def work() -> None:
            for _ in range(40):
                group = rb.groups.start(version=lambda: learner.position["draw"], timeout=60.0)
                write(rb, group.id, group.version)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        while len(lags) < 160:
            number = learner.position["draw"]
            try:
                batch = learner.sample()
            except NotReadyError:
                continue
            lags += (number - batch["policy_version"]).tolist()
        for thread in threads:
            thread.join()
        assert max(lags) <= 2
