"""Batches of served stores, stores of this process and copies of shared ones together."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import expstore
from expstore import SampleToInsertRatio
from expstore.errors import ArgumentError, NotFoundError, RemoteError, SchemaError, StateError
from tests.support.forks import forked
from tests.support.mixed_stores import LOCAL, SERVED, SHARED, SOON, MixedStores, open_mixed_stores, source_for
from tests.support.servers import KillableServer
from tests.support.shard_rows import (
    ALPHA,
    BETA,
    SIZES,
    assert_distributed,
    fill,
    place_of,
    powers,
    priorities_of,
    rows_of,
    weights_of,
)
from tests.support.waits import wait_until

BATCH, BATCHES = 256, 64
PRIORITIZED = {"kind": "prioritized", "alpha": ALPHA, "beta": BETA}


@pytest.fixture(scope="module")
def rest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MixedStores]:
    """Stores with rows and priorities, which no test changes."""
    with open_mixed_stores(tmp_path_factory.mktemp("rest"), filled=True) as stores:
        yield stores


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[MixedStores]:
    """Stores without rows."""
    with open_mixed_stores(tmp_path, filled=False) as stores:
        yield stores


def draw_some(rb: expstore.cluster.ShardedReplayBuffer) -> Any:
    batches: list[Any] = [rb.sample().exclude("shards_missing") for _ in range(BATCHES)]
    return torch.cat(batches)


def ids_of(batches: Any) -> list[list[list[int]]]:
    return [batch["id"].tolist() for batch in batches]


@pytest.mark.slow
def test_a_served_store_is_away_and_comes_back(rest: MixedStores, tmp_path: Path) -> None:
    with expstore.open(tmp_path / "run.exp", seed=0) as rb:
        fill(rb, SERVED)
    server = KillableServer(tmp_path)
    places = [f"http://127.0.0.1:{server.port}/run", *rest.places[1:]]
    options: dict[str, Any] = {"batch_size": BATCH, "seed": 5, "ahead": 2, "sampler": PRIORITIZED}
    options["retries"] = SOON
    try:
        with (
            expstore.connect(places, **options, down="partial") as rb,
            expstore.connect(places, **options) as patient,
        ):
            assert rb.sample()["shards_missing"] == []
            wanted = ids_of(patient.stream(6))
            server.kill()
            wait_until(lambda: rb.sample()["shards_missing"] == [SERVED])
            drawn = draw_some(rb)
            masses = powers() * np.repeat([0.0, 1.0, 1.0], SIZES)
            rows = place_of(drawn["id"])
            assert_distributed(rows, masses)
            np.testing.assert_allclose(drawn["priority_weight"].numpy(), weights_of(masses)[rows], rtol=1e-6)
            pairs = torch.tensor([[SERVED, 1], [LOCAL, 1], [SHARED, 1]])
            first = torch.tensor([priorities_of(number, 1)[0] for number in range(3)])
            assert rb.update_priority(id=pairs, priority=first) == 2
            server.begin()
            wait_until(lambda: rb.shards_missing == ())
            assert_distributed(place_of(draw_some(rb)["id"]), powers())
            patient.load_state_dict(patient.state_dict() | {"draw": 0})
            assert ids_of(patient.stream(6)) == wanted
    finally:
        server.kill()


# -- rows ------------------------------------------------------------------------------------------


def test_rows_go_to_the_place_of_their_source_and_are_found_there(stores: MixedStores) -> None:
    with stores.connect(batch_size=32) as rb:
        pairs = torch.cat([rb.extend(rows_of(6, 6, 6 * n), source=f"actor-{n}") for n in range(24)])
        added = [rb.add(rows_of(1, 6, 900 + n)[0], source=f"one-{n}") for n in range(8)]
        for n in range(8):
            with pytest.raises(SchemaError, match="batch"):
                rb.add(rows_of(2, 2), source=f"one-{n}")
        assert set(pairs[:, 0].tolist()) == {SERVED, LOCAL, SHARED}
        assert all(len(set(pairs[n : n + 6, 0].tolist())) == 1 for n in range(0, 144, 6))
        rb.flush()
        stores.wait_for_rows(int((pairs[:, 0] == SHARED).sum()))
        mixed = torch.cat([pairs, torch.tensor(added)])[
            torch.randperm(152, generator=torch.Generator().manual_seed(1))
        ]
        number = {tuple(pair): n for n, pair in enumerate(pairs.tolist())}
        number |= {pair: 900 + n for n, pair in enumerate(added)}
        rows = rb.by_id(mixed)
        assert rows["id"].tolist() == mixed.tolist()
        assert rows["number"].tolist() == [number[tuple(pair)] for pair in mixed.tolist()]
        for place, local in ((LOCAL, stores.places[LOCAL]), (SHARED, stores.owner)):
            mine = pairs[pairs[:, 0] == place]
            assert local.by_id(mine[:, 1])["number"].tolist() == [number[tuple(p)] for p in mine.tolist()]
        for pair in ([SERVED, 999], [LOCAL, 999], [SHARED, 999]):
            with pytest.raises(NotFoundError, match=rf"shard {pair[0]} "):
                rb.by_id([pair])
        total = rb.sql("SELECT sum(n) FROM parts", each="SELECT count(*) AS n FROM transitions")
        assert total.fetchone() == (len(rb),) == (152,)
        each = rb.sql_each("SELECT _id FROM transitions ORDER BY _id", limit=2).fetchall()
        assert each == [(row, place) for place in range(3) for row in (1, 2)]
        found = rb.episodes("length = 6", "source", 3)
        assert [row[found.columns.index("source")] for row in found] == ["actor-0", "actor-1", "actor-10"]
        row = dict(zip(found.columns, found.fetchall()[1], strict=True))
        assert rb.trajectory((row["_shard"], row["episode_id"]))["number"].tolist() == list(range(6, 12))
        # priorities
        assert rb.update_priority(id=pairs, priority=torch.arange(1.0, 145.0)) == 144
        assert rb.update_priority(id=torch.tensor([[p, 999] for p in range(3)]), priority=500.0) == 0
        owner = stores.owner.sql("SELECT _id, _priority FROM transitions").fetchall()
        known = {(SHARED, row): priority for row, priority in owner}
        assert all(known[pair] == n + 1 for pair, n in number.items() if pair[0] == SHARED and n < 900)
        new = rb.extend(rows_of(6, 6), source=source_for(rb, LOCAL))
        given = stores.places[LOCAL].sql("SELECT _id, _priority FROM transitions").fetchall()
        # the largest of all places, not that of rows which are not there
        assert {priority for row, priority in given if [LOCAL, row] in new.tolist()} == {144.0}
        # sources
        with stores.connect() as other:
            again = [int(other.extend(rows_of(6, 6), source=f"actor-{n}")[0, 0]) for n in range(4)]
        assert again == pairs[:24:6, 0].tolist()
        assert len({int(rb.extend(rows_of(6, 6))[0, 0]) for _ in range(3)}) == 1  # without a name


def test_samplers_are_named_everywhere(rest: MixedStores) -> None:
    whole = {"kind": "without_replacement", "split": "train", "shuffle": True, "drop_last": False}
    with rest.connect() as rb:
        for _ in range(2):
            rb.name_sampler("pass", {"kind": "without_replacement"}, where="even")
        assert rb.samplers() == {"pass": whole}
        rb.forget_sampler("pass")
        assert rb.samplers() == {}
    for place, size in enumerate(SIZES):
        shares = [float(place == other) for other in range(3)]
        with rest.connect(sampler="pass", by="member", p=shares, ahead=1, batch_size=None) as rb:
            rb.name_sampler("pass", {"kind": "without_replacement"}, where="even")  # stores here forget it
            assert sorted(ids_of([rb.sample(size // 2)])[0]) == [[place, n] for n in range(1, size, 2)]
    with rest.connect(sampler="pass") as rb:
        rb.name_sampler("pass", {"kind": "without_replacement"}, where="even")
        with pytest.raises(StateError, match="mass"):
            rb.sample()


def test_draws_continue_in_other_buffers_and_processes(rest: MixedStores) -> None:
    with rest.connect(sampler=PRIORITIZED, ahead=2) as rb:
        first = ids_of(rb.sample() for _ in range(5))
        state = rb.state_dict()
        after = ids_of(rb.sample() for _ in range(6))
        rb.load_state_dict(state)
        assert ids_of(rb.sample() for _ in range(2)) == after[:2]
        data = pickle.dumps(rb)
        with pickle.loads(data) as copied:
            assert ids_of(copied.sample() for _ in range(4)) == after[2:]
            close_stores(copied)
        for given in (data, rb):  # a copy, and a buffer that was forked
            with forked(lambda given=given: draw_and_write(given)) as answer:  # type: ignore[misc]
                assert answer() == (after[2:], {LOCAL: "StateError"})
        assert ids_of(rb.sample() for _ in range(4)) == after[2:]
    with rest.connect(sampler=PRIORITIZED, ahead=2) as rb:
        assert ids_of(rb.sample() for _ in range(5)) == first
        rb.load_state_dict(state)
        assert ids_of(rb.sample() for _ in range(6)) == after
    with rest.connect(sampler=PRIORITIZED, ahead=3) as rb, pytest.raises(StateError, match="ahead"):
        rb.load_state_dict(state)


def close_stores(rb: expstore.cluster.ShardedReplayBuffer) -> None:
    for number in (LOCAL, SHARED):
        rb.shards[number].close()


def draw_and_write(given: Any) -> Any:
    """Draw, and try to set a priority of the first row of each place to what it is."""
    rb = pickle.loads(given) if isinstance(given, bytes) else given
    found, refused = ids_of(rb.sample() for _ in range(4)), {}
    for number in range(3):
        try:
            count = rb.update_priority(id=[(number, 1)], priority=priorities_of(number, 1)[0])
            assert count == 1
        except expstore.ExpStoreError as exc:
            refused[number] = type(exc).__name__
    return found, refused


def test_a_rate_limiter_of_a_store_counts_draws(tmp_path: Path, rest: MixedStores) -> None:
    """Otherwise a writer would wait for draws for ever."""
    limiter = SampleToInsertRatio(1.0, min_size_to_sample=10, error_buffer=(-40.0, 40.0), timeout=0)
    with expstore.open(tmp_path / "run.exp", batches={"rate_limiter": limiter}, seed=1) as local:
        with expstore.connect([local], batch_size=8, seed=1, ahead=1) as rb:
            for _ in range(6):
                rb.extend(rows_of(10, 10))
                for _ in range(2):
                    assert len(rb.sample()) == 8
            assert limiter.count().sampled == 96
        local.extend(rows_of(10, 10))
        with expstore.connect([local], batch_size=8, rate_limiter=limiter, ahead=1) as rb:
            assert len(rb.sample()) == 8


def test_what_cannot_be_done_is_refused(stores: MixedStores) -> None:
    local, copy = stores.places[1:]
    for twice in ([local, local], [stores.owner, copy]):
        with pytest.raises(ArgumentError, match="same store"):
            expstore.connect(twice)
    with stores.connect(batch_size=8) as rb:
        rb.extend(rows_of(6, 6), source="first")
        with pytest.raises(StateError, match=r"shard 2 .*server that writes|shard 2 .*count"):
            rb.name_sampler("once", {"kind": "consuming"})
    for act in (rb.sample, lambda: rb.extend(rows_of(6, 6)), lambda: rb.by_id([(LOCAL, 1)]), lambda: len(rb)):
        with pytest.raises(StateError, match="closed"):
            act()
    assert local.extend(rows_of(6, 6)).tolist()[-1] == len(local) - 1  # the stores remain open
    with stores.connect(batch_size=8, down="partial") as rb:
        pairs = [(LOCAL, len(local)), (SHARED, 1)]
        stores.owner.extend(rows_of(100, 10))
        stores.wait_for_rows(100)
        stores.owner.close()
        assert rb.update_priority(id=pairs, priority=2.0) == 1  # those of an owner that is gone are skipped
        with pytest.raises(RemoteError, match="shard 2"):
            rb.extend(rows_of(6, 6), source=source_for(rb, SHARED))
        assert SHARED in {int(place) for _ in range(4) for place in rb.sample()["id"][:, 0]}
