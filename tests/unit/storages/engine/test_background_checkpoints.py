"""What is done in the background, and when; the time is a number here."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from expstore.core import tuning
from expstore.storages.engine import background_checkpoints
from expstore.storages.engine.background_checkpoints import BEAT_SECONDS, REST_SECONDS, Keeper


class Engine:
    """An engine that records what is done, and can rest from the second time on."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def beat(self) -> None:
        self.done.append("beat")

    def tend(self) -> None:
        self.done.append("tend")

    def checkpoint(self) -> None:
        self.done.append("checkpoint")

    def rest(self) -> bool:
        self.done.append("rest")
        return self.done.count("rest") > 1


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(background_checkpoints._scheduler, "add", lambda keeper: None)
    monkeypatch.setattr(background_checkpoints, "time", SimpleNamespace(monotonic=lambda: 0.0))
    monkeypatch.setattr(tuning, "CHECKPOINT_SECONDS", 1.0)
    monkeypatch.setattr(tuning, "PRIORITY_SECONDS", 0.1)
    return Engine()


def start(engine: Engine) -> Keeper:
    keeper = Keeper(engine)
    keeper.start(engine)
    return keeper


def step(keeper: Keeper, engine: Engine, now: float) -> list[str]:
    """Do what is due at a time; return its name."""
    before = len(engine.done)
    if (job := keeper.choose(now)) is not None:
        job.run()
        assert job.error is None
    return engine.done[before:]


def test_an_idle_store_sends_heartbeats_and_rests_once(engine: Engine) -> None:
    keeper = start(engine)
    steps = [step(keeper, engine, BEAT_SECONDS * number) for number in range(8)]
    first = int(REST_SECONDS / BEAT_SECONDS)
    assert steps == [[], *[["beat"]] * (first - 1), ["rest"], ["rest"], ["beat"], ["beat"]]


def test_writes_are_followed_by_one_checkpoint_however_many_there_are(engine: Engine) -> None:
    keeper, found = start(engine), list[str]()
    for number in range(126):
        if number < 100:
            keeper.note()
        found += step(keeper, engine, number / 100)
    assert found == ["tend"] * 9 + ["checkpoint", "beat"]


def test_what_is_written_after_a_checkpoint_began_is_followed_by_another(engine: Engine) -> None:
    keeper = start(engine)
    keeper.note()
    assert step(keeper, engine, 0) == []
    job = keeper.choose(1.0)
    keeper.note()
    assert job is not None
    job.run()
    assert step(keeper, engine, 1.0) == []
    assert [step(keeper, engine, at) for at in (1.05, 1.1, 1.15, 2.0)] == [[], ["tend"], [], ["checkpoint"]]


def test_a_checkpoint_that_is_wanted_at_once_is_not_delayed(engine: Engine) -> None:
    keeper = start(engine)
    keeper.hurry()
    assert step(keeper, engine, 0) == ["checkpoint"]
    keeper.note()
    assert step(keeper, engine, 0.01) == []
    keeper.hurry()
    assert step(keeper, engine, 0.02) == ["checkpoint"]
    assert step(keeper, engine, 0.03) == []


def test_after_stop_nothing_is_done(engine: Engine) -> None:
    keeper = start(engine)
    job = keeper.choose(BEAT_SECONDS)
    keeper.stop()
    assert job is not None
    assert job.done
    keeper.note()
    assert step(keeper, engine, 5) == step(keeper, engine, 9) == []
    assert engine.done == []


def test_nothing_is_done_for_a_store_that_was_dropped(engine: Engine) -> None:
    class Owner: ...

    owner, keeper = Owner(), Keeper(engine)
    keeper.start(owner)
    del owner
    assert step(keeper, engine, 5) == []
    keeper.note()
    assert step(keeper, engine, 9) == []
