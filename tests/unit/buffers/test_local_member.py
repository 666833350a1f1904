"""A store of this process as a member: samplers by description and by name, shared by threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tensordict import TensorDict

import expstore
from expstore.buffers import local_member
from expstore.buffers.local_member import LocalMember
from expstore.buffers.member import Draw
from expstore.errors import ArgumentError, NotFoundError, StateError
from expstore.samplers.base import Sampler

SECONDS = 60
PASSES = {"kind": "without_replacement"}


@pytest.fixture
def member(tmp_path: Path) -> Iterator[LocalMember]:
    path = tmp_path / "run.exp"
    with expstore.open(path, schema={"x": "int64"}) as rb:
        rb.extend(TensorDict({"x": [*range(10)]}, [10]))
        rb.flush()
        member = LocalMember(rb)
        yield member
        member.close()


def count(member: LocalMember, draw: Draw, rows: int) -> int:
    return int(member.sample(draw, rows).batch.numel())


def test_a_reader_that_opens_delays_no_draw(member: LocalMember, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, free, openings = threading.Event(), threading.Event(), []

    def follow(*arguments: Any, **options: Any) -> Any:
        openings.append(arguments)
        begun.set()
        assert free.wait(SECONDS)
        return open_reader(*arguments, **options)

    open_reader = local_member.FollowerStorage
    monkeypatch.setattr(local_member, "FollowerStorage", follow)
    naming = [threading.Thread(target=member.name_sampler, args=("pass", PASSES, None, 1)) for _ in range(3)]
    for thread in naming:
        thread.start()
    try:
        assert begun.wait(SECONDS)
        drawn: list[int] = []

        def draw() -> None:
            drawn.append(count(member, Draw({"kind": "prioritized"}, seed=3), 4))
            member.name_sampler("once", {"kind": "consuming"}, None, None)
            drawn.append(count(member, Draw("once"), 4))

        drawing = threading.Thread(target=draw, daemon=True)
        drawing.start()
        drawing.join(SECONDS)
        assert drawn == [4, 4]
    finally:
        free.set()
        for thread in naming:
            thread.join(SECONDS)
    assert len(openings) == 1
    assert sorted(member.samplers()) == ["once", "pass"]
    assert count(member, Draw("pass"), 10) == 10


def test_a_sampler_in_use_is_not_detached(member: LocalMember, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[Sampler] = []
    monkeypatch.setattr(Sampler, "detach", lambda self: ended.append(self))
    draw = Draw({"kind": "uniform"}, "x > 2", 0)
    with member.choose(draw, 2, 1) as (_, first):
        with member.choose(draw, 2, 1) as (_, same):
            for seed in range(1, 40):
                member.sample(Draw({"kind": "uniform"}, None, seed), 2)
            assert same is first
        assert len(ended) == 7  # of 40, the 32 newest are kept, and the first is in use
        assert first not in ended
    assert ended[-1] is first
    member.close()
    assert len(ended) == len(set(ended)) == 40


@pytest.mark.parametrize("kind", ["consuming", "without_replacement"])
def test_a_named_sampler_in_use_is_not_ended(
    member: LocalMember, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    member.name_sampler("mine", {"kind": kind}, None, None)
    ended: list[str] = []
    with member._use_named("mine") as named:
        end = named.end
        monkeypatch.setattr(named, "end", lambda: ended.append(kind) or end())  # type: ignore[func-returns-value]
        member.forget_sampler("mine")
        assert named.buffer.sample(2).numel() == 2
        assert ended == []
    assert ended == [kind]
    with pytest.raises(NotFoundError):
        member.sample(Draw("mine"), 2)


def test_samplers_that_cannot_be_made_are_refused_with_the_reason(member: LocalMember) -> None:
    for draw, message in (
        (Draw(PASSES), "needs a name"),
        (Draw({"kind": "newest"}), "there is no sampler 'newest'"),
        (Draw({"kind": "uniform", "alpha": 1.0}), "cannot be made"),
    ):
        with pytest.raises(ArgumentError, match=message):
            member.sample(draw, 2)
    with pytest.raises(ArgumentError, match="is a kind of samplers"):
        member.name_sampler("uniform", PASSES, None, None)
    with pytest.raises(ArgumentError, match="does not take a seed"):
        member.name_sampler("once", {"kind": "consuming"}, None, 1)
    member.name_sampler("pass", PASSES, None, None)
    with pytest.raises(StateError, match="already another sampler"):
        member.name_sampler("pass", PASSES, None, 2)
    with pytest.raises(ArgumentError, match="leave where, seed and draw out"):
        member.sample(Draw("pass", seed=1), 2)
    in_memory = LocalMember(expstore.TensorDictReplayBuffer(storage=expstore.LazyTensorStorage(10)))
    with pytest.raises(StateError, match="rows in RAM"):
        in_memory.name_sampler("pass", PASSES, None, None)
