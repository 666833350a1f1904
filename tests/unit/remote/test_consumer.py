"""Consumers over a connection: the methods of a local one, also while the server is killed and started."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import expstore
from expstore.api import Settings
from expstore.errors import (
    ArgumentError,
    LockedError,
    NotFoundError,
    NotReadyError,
    QueryError,
    RemoteError,
    RowsChangedError,
    StateError,
)
from expstore.remote import Retries
from tests.support.arrow_bodies import batch_of
from tests.support.forks import forked
from tests.support.servers import KillableServer, Serving

SOON = Retries(seconds=60, first=0.01, longest=0.05, seed=3)


def build(folder: Path, **options: Any) -> Path:
    """Make a store of 100 rows."""
    path = folder / "run.exp"
    with expstore.open(path, mode="x", seed=3, **options) as rb:
        rb.extend(batch_of(100))
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return build(tmp_path)


@pytest.fixture
def rb(path: Path) -> Iterator[Any]:
    with Serving(Settings(path=path.parent)) as server, connect(server) as rb:
        yield rb


def connect(server: Any, **options: Any) -> Any:
    address = f"http://127.0.0.1:{server.port}/run"
    options = {"batch_size": 10, "retries": SOON, **options}
    return expstore.connect(address, **options)


def ids(batch: Any) -> list[int]:
    found: list[int] = batch["id"].tolist()
    return found


def draw(consumer: Any, count: int) -> list[list[int]]:
    return [ids(consumer.sample()) for _ in range(count)]


# -- as a local one --------------------------------------------------------------------------------------


@pytest.mark.guarantee("server/consumers")
def test_a_learner_changes_between_a_connection_and_the_folder(path: Path) -> None:
    """Positions are the same values, and draws continue where the other one ended."""
    found: list[list[int]] = []
    position: Any = "committed"
    options: Any = {"batch_size": 10}
    for cycle in range(4):
        if cycle % 2:
            with expstore.open(path, **options) as rb:
                sampler = expstore.SamplerWithoutReplacement()
                with rb.consumer("learner", sampler=sampler, at=position) as c:
                    found += draw(c, 3)
                    position = json.loads(json.dumps(c.position))
        else:
            with Serving(Settings(path=path.parent)) as server, connect(server) as rb:
                with rb.consumer("learner", sampler="without_replacement", at=position) as c:
                    found += draw(c, 3)
                    position = json.loads(json.dumps(c.position))
    assert position["draw"] == 12
    assert sorted(chain(*found[:10])) == [*range(1, 101)]
    with expstore.open(path, **options) as rb:
        alone = rb.consumer("alone", sampler=expstore.SamplerWithoutReplacement())
        assert found == draw(alone, 12)
        learner = rb.consumer("learner", sampler=expstore.SamplerWithoutReplacement())
        assert found == draw(learner, 12)


def test_positions(rb: Any) -> None:
    with rb.consumer("learner", keep="all") as c:
        found = draw(c, 3)
        position = c.position
        assert position == {"consumer": "learner", "id": position["id"], "draw": 3}
        found += draw(c, 3)
        c.commit(position)
        assert (c.committed, c.position["draw"], c.replaying) == (3, 6, False)
        for place, number in ((position, 3), ("committed", 3), ("end", 6), (position | {"draw": 1}, 1)):
            c.seek(place)
            assert c.position["draw"] == number
            assert c.replaying is (number < 6)
        assert draw(c, 5) == found[1:]
        assert ids(c.draw(2)) == found[2]
        assert [ids(batch) for batch in c.replay(2)] == found[2:]
        assert [ids(batch) for batch in c.replay(0, 1)] == found[:2]
        assert c.position["draw"] == 6
        c.commit()
        assert c.committed == 6
        for wrong in (7, 2):
            with pytest.raises(StateError):
                c.commit(position | {"draw": wrong})
        with pytest.raises(StateError):
            c.seek(position | {"draw": 7})
        for bad in ({"draw": 2}, "here", 3, position | {"id": "another"}, position | {"draw": "x"}):
            with pytest.raises(ArgumentError):
                c.seek(bad)
        for numbers in ((0, 6), (7, 7), (-1, 0)):
            with pytest.raises(NotFoundError):
                list(c.replay(*numbers))
        assert c.position["draw"] == 6
    with pytest.raises(StateError, match="is closed"):
        c.sample()
    with rb.consumer("learner") as c:
        assert c.position["draw"] == 6
    with rb.consumer("learner", at=position) as c:
        assert draw(c, 3) == found[3:]


def test_batches_come_as_samples_do(rb: Any) -> None:
    with rb.consumer("learner", sampler={"kind": "prioritized", "alpha": 0.5}) as c:
        batch, info = c.sample(return_info=True)
        assert isinstance(batch["action"], torch.Tensor)
        assert set(info) == {"id", "index", "priority_weight"}
        c.seek("committed")
        again, info = c.sample(return_info=True, as_numpy=True)
        assert isinstance(again["action"], np.ndarray)
        assert info["id"].tolist() == ids(batch) == c.draw(0, as_numpy=True)["id"].tolist()


def test_iteration_ends_after_a_pass(rb: Any) -> None:
    with rb.consumer("learner", sampler="without_replacement", batch_size=30) as c:
        passes = [[ids(batch) for batch in c] for _ in range(2)]
        assert [len(one) for one in passes] == [4, 4]
        for one in passes:
            assert sorted(chain(*one)) == [*range(1, 101)]
        c.seek("committed")
        assert [ids(batch) for batch in c] == passes[0]


def test_rows_that_left(tmp_path: Path) -> None:
    build(tmp_path, capacity=100)
    with Serving(Settings(path=tmp_path)) as server, connect(server) as rb:
        with rb.consumer("learner", missing="raise") as c:
            found = draw(c, 1)
            rb.extend(batch_of(50, 100))
            c.seek("committed")
            with pytest.raises(RowsChangedError):
                c.sample()
            assert c.position["draw"] == 0
        with rb.consumer("learner", missing="skip") as c:
            assert draw(c, 1) == [[number for number in found[0] if number > 50]]


def test_conditions_and_kinds(rb: Any) -> None:
    with rb.consumer("odd", where="action > 90", seed=1) as c:
        assert set(chain(*draw(c, 5))) <= {*range(92, 101)}
    with rb.consumer("slices", sampler={"kind": "slices", "slice_len": 5}) as c:
        assert (np.diff(np.reshape(ids(c.sample()), (2, 5))) == 1).all()


def test_wrong_calls_open_nothing(rb: Any) -> None:
    position = {"consumer": "learner", "id": "5f", "draw": 0}
    wrong: list[tuple[type[Exception], dict[str, Any]]] = [
        (ArgumentError, {"at": "here"}),
        (ArgumentError, {"at": position}),
        (ArgumentError, {"at": {"draw": 0}}),
        (ArgumentError, {"missing": "some"}),
        (ArgumentError, {"keep": -1}),
        (ArgumentError, {"sampler": "no_such"}),
        (ArgumentError, {"sampler": {"kind": "slices"}}),
        (ArgumentError, {"batch_size": 0}),
        (ArgumentError, {"batch_size": 10**7}),
        (ArgumentError, {"rank": 0}),
        (ArgumentError, {"rank": 2, "world": 2}),
        (ArgumentError, {"timeout": 0}),
        (ArgumentError, {"seed": -1}),
        (RemoteError, {"sampler": expstore.RandomSampler()}),
        (QueryError, {"where": "sqrt(action) > 1"}),
        (NotReadyError, {"rank": 1, "world": 2, "timeout": 0.01}),
    ]
    for error, options in wrong:
        with pytest.raises(error):
            rb.consumer("learner", **options)
    for name in ("", "a/b", ".hidden", 3):
        with pytest.raises(ArgumentError):
            rb.consumer(name)
    assert rb.consumers.list() == []


def test_they_are_listed_and_dropped(rb: Any, path: Path) -> None:
    with rb.consumer("learner") as c, rb.consumer("other") as other:
        draw(c, 3)
        c.commit()
        found = {one.name: (one.draws, one.committed, one.is_open) for one in rb.consumers.list()}
        assert found == {"learner": (3, 3, True), "other": (0, 0, True)}
        rb.consumers.drop("learner")
        for act in (c.sample, c.commit):
            with pytest.raises(NotFoundError):
                act()
        with pytest.raises(ArgumentError, match="was dropped"):
            c.seek("end")
        with rb.consumer("learner") as new:
            assert new.position["draw"] == 0
            with pytest.raises(ArgumentError, match="was dropped"):
                c.sample()
            c.close()  # it does not close the new one
            draw(new, 1)
        with pytest.raises(NotFoundError):
            rb.consumers.drop("no_such")
        reader = expstore.open(path, mode="r", batch_size=10)
        with pytest.raises(LockedError):
            reader.consumer("other")
        other.close()
        other.close()
        with reader.consumer("other"):
            with pytest.raises(LockedError):
                rb.consumer("other")
            with pytest.raises(LockedError):
                rb.consumers.drop("other")
        reader.close()


def test_it_belongs_to_its_process(rb: Any) -> None:
    with rb.consumer("learner") as c:
        with pytest.raises(StateError):
            pickle.dumps(c)

        def in_child() -> Any:
            try:
                c.sample()
            except StateError as exc:
                c.close()  # which is not the parent's
                with rb.consumer("child") as own:
                    return str(exc), len(draw(own, 2))

        with forked(in_child) as wait:
            text, count = wait()
        assert f"belongs to process {os.getpid()}" in text
        assert count == 2
        assert len(draw(c, 1)) == 1


# -- ranks -----------------------------------------------------------------------------------------------


def test_ranks_share_the_batches(rb: Any) -> None:
    """Rank 1 begins first, and waits; a restart with more ranks continues the pass."""
    seen: list[list[int]] = []
    with ThreadPoolExecutor(3) as pool:
        for world in (2, 3):

            def work(rank: int, world: int = world) -> list[list[int]]:
                with connect_again(rb) as mine:
                    options = {"sampler": "without_replacement", "rank": rank, "world": world}
                    c = mine.consumer("learner", timeout=60, **options)
                    found = draw(c, 5)
                    c.commit()
                    return found

            later = [pool.submit(work, rank) for rank in range(1, world)]
            parts = [work(0), *(one.result(60) for one in later)]
            seen += [list(chain(*step)) for step in zip(*parts, strict=True)]
    assert sorted(chain(*seen)) == [*range(1, 101)]
    assert rb.consumers.list()[0].committed == 10


def connect_again(rb: Any) -> Any:
    return expstore.connect(str(rb.member.place), batch_size=10, retries=SOON)


@pytest.mark.guarantee("consumers/fence")
def test_a_former_rank_is_refused_after_restarts_too(path: Path) -> None:
    with Serving(Settings(path=path.parent)) as server:
        first, again = connect(server), connect(server)
        old = [first.consumer("learner", rank=rank, world=2) for rank in (0, 1)]
        for one in old:
            draw(one, 1)
        again.consumer("learner", rank=0, world=1)
        again.consumer("learner", rank=0, world=2)
        for one in old:
            for act in (one.sample, one.commit, lambda one=one: one.seek("end")):
                with pytest.raises(StateError, match="another number of ranks"):
                    act()
        again.consumer("learner", rank=0, world=3)
        again.close()
    with Serving(Settings(path=path.parent)) as server:
        for one in old:
            one._connection.move(type(one._connection.address)(server.url, "run"), None)
            with pytest.raises(StateError, match="another number of ranks"):  # it must not open it again
                one.sample()
        with connect(server) as rb, rb.consumer("learner", rank=1, world=3, timeout=0.01) as c:
            assert c.position["draw"] == 0  # rank 0 of three is still the last one that opened it
        first.close()


# -- servers that end ------------------------------------------------------------------------------------


@pytest.mark.guarantee(
    "server/consumers-kill",
    "A learner whose server is killed and started gets each batch of its consumer once, in order.",
)
@pytest.mark.slow
def test_a_killed_server_repeats_and_loses_no_draw(path: Path) -> None:
    server = KillableServer(path.parent)
    try:
        with connect(server, retries=Retries(seconds=100, seed=1)) as rb:
            c = rb.consumer("learner", sampler="without_replacement", batch_size=7)
            other = rb.consumer("ranks", sampler="without_replacement", batch_size=8, rank=0, world=2)
            part = rb.consumer("ranks", sampler="without_replacement", batch_size=8, rank=1, world=2)
            found, parts = [], []
            for number in range(12):
                if number % 4 == 2:
                    server.kill()
                    server.begin()
                found += draw(c, 1)
                parts += [draw(one, 1)[0] for one in (part, other)]
                if number % 3 == 0:
                    c.commit()
            assert c.position["draw"] == 12
            assert c.committed == 10
            assert len(set(chain(*found))) == 84
            assert len(set(chain(*parts))) == 96
            c.seek("committed")
            assert draw(c, 2) == found[10:]
    finally:
        server.kill()
    with expstore.open(path) as rb:
        sampler = expstore.SamplerWithoutReplacement()
        alone = rb.consumer("alone", sampler=sampler, batch_size=7)
        assert [ids(batch) for batch in islice(alone, 12)] == found
