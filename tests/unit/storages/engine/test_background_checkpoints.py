"""What is done in the background, and when; the time is a number here."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest

from expstore.core import tuning
from expstore.storages.engine import background_checkpoints
from expstore.storages.engine.background_checkpoints import BEAT_SECONDS, REST_SECONDS, Keeper


class Store:
    """A store that records what is done, and can rest from the second time on."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.shared = SimpleNamespace(beat=lambda: self.done.append("beat"))
        self.checkpoints = SimpleNamespace(rest=self._rest)
        self.holders = SimpleNamespace(take_requests=None)

    def write_values(self) -> None:
        self.done.append("write")

    def sync(self) -> None:
        self.done.append("sync")

    def _rest(self, store: object) -> bool:
        self.done.append("rest")
        return self.done.count("rest") > 1


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(background_checkpoints._scheduler, "add", lambda keeper: None)
    monkeypatch.setattr(background_checkpoints, "time", SimpleNamespace(monotonic=lambda: 0.0))
    monkeypatch.setattr(tuning, "CHECKPOINT_SECONDS", 1.0)
    monkeypatch.setattr(tuning, "PRIORITY_SECONDS", 0.1)
    return Store()


def start(store: Store) -> Keeper:
    keeper = Keeper(store)  # type: ignore[arg-type]
    keeper.start()
    return keeper


def step(keeper: Keeper, store: Store, now: float) -> list[str]:
    """Do what is due at a time; return its name."""
    before = len(store.done)
    if (job := keeper.choose(now)) is not None:
        job.run()
        assert job.error is None
    return store.done[before:]


def test_an_idle_store_sends_heartbeats_and_rests_once(store: Store) -> None:
    keeper = start(store)
    steps = [step(keeper, store, BEAT_SECONDS * number) for number in range(8)]
    first = int(REST_SECONDS / BEAT_SECONDS)
    assert steps == [[], *[["beat"]] * (first - 1), ["beat", "rest"], ["beat", "rest"], ["beat"], ["beat"]]


def test_requests_of_other_processes_are_looked_for_with_each_heartbeat_and_checkpoint(store: Store) -> None:
    keeper, looks = start(store), list[Store]()
    store.holders.take_requests = looks.append
    keeper.note()
    found = [done for number in range(150) for done in step(keeper, store, number / 100)]
    assert "sync" in found
    assert looks == [store] * (found.count("beat") + found.count("sync"))


def test_writes_are_followed_by_one_checkpoint_however_many_there_are(store: Store) -> None:
    keeper, found = start(store), list[str]()
    for number in range(126):
        if number < 100:
            keeper.note()
        found += step(keeper, store, number / 100)
    assert found == ["beat", "write"] * 9 + ["sync", "beat"]


def test_what_is_written_after_a_checkpoint_began_is_followed_by_another(store: Store) -> None:
    keeper = start(store)
    keeper.note()
    assert step(keeper, store, 0) == []
    job = keeper.choose(1.0)
    keeper.note()
    job.run()
    assert step(keeper, store, 1.0) == []
    assert [step(keeper, store, at) for at in (1.05, 1.1, 1.15, 2.0)] == [[], ["beat", "write"], [], ["sync"]]


def test_a_checkpoint_that_is_wanted_at_once_is_not_delayed(store: Store) -> None:
    keeper = start(store)
    keeper.hurry()
    assert step(keeper, store, 0) == ["sync"]
    keeper.note()
    assert step(keeper, store, 0.01) == []
    keeper.hurry()
    assert step(keeper, store, 0.02) == ["sync"]
    assert step(keeper, store, 0.03) == []


def test_after_stop_nothing_is_done(store: Store) -> None:
    keeper = start(store)
    job = keeper.choose(BEAT_SECONDS)
    keeper.stop()
    assert job.done
    keeper.note()
    assert step(keeper, store, 5) == step(keeper, store, 9) == []
    assert store.done == []


def test_nothing_is_done_for_a_store_that_was_dropped(store: Store) -> None:
    other = Store()
    keeper, done = start(other), other.done
    del other
    gc.collect()
    for now in (5.0, 9.0):
        if (job := keeper.choose(now)) is not None:
            job.run()
            assert job.error is None
        keeper.note()
    assert keeper._stopped
    assert done == []
