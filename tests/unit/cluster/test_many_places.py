"""Batches of served stores, stores of this process and copies of shared ones together."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import expstore
from expstore import SampleToInsertRatio
from expstore.api import Settings
from expstore.errors import ArgumentError, NotFoundError, RemoteError, SchemaError, StateError
from expstore.remote import Retries
from tests.support.servers import KillableServer, Serving
from tests.support.shard_rows import (
    ALPHA,
    BETA,
    EPS,
    SIZES,
    assert_distributed,
    even,
    fill,
    first_rows,
    limit_of,
    place_of,
    powers,
    priorities_of,
    rows_of,
    starts_of,
    weights_of,
)
from tests.support.waits import wait_until

SOON = Retries(seconds=60, first=0.01, longest=0.05, seed=3)
BATCH, BATCHES, AHEAD = 256, 64, 8
PRIORITIZED = {"kind": "prioritized", "alpha": ALPHA, "beta": BETA}
#: The number of the store of each place.
SERVED, LOCAL, SHARED = range(3)


def connect(places: list[Any], **options: Any) -> expstore.cluster.ShardedReplayBuffer:
    given: dict[str, Any] = {"batch_size": BATCH, "seed": 5, "ahead": AHEAD, "retries": SOON}
    return expstore.connect(places, **given | options)


class Stores(NamedTuple):
    """A served store, one of this process, and a copy of one that its owner shares."""

    places: list[Any]
    owner: expstore.TensorDictReplayBuffer
    server: Serving

    def connect(self, **options: Any) -> expstore.cluster.ShardedReplayBuffer:
        return connect(self.places, **options)

    def wait_for_rows(self, count: int) -> None:
        """Wait until the copy can read as many rows: its owner writes small batches a moment later."""
        wait_until(lambda: len(self.places[SHARED]) >= count)


def open_stores(folder: Path, *, filled: bool) -> Iterator[Stores]:
    served = folder / "served"
    served.mkdir()
    with (
        expstore.open(served / "run.exp", seed=0) as first,
        expstore.open(folder / "local.exp", seed=1) as local,
        expstore.open(folder / "owner.exp", seed=2).share() as owner,
    ):
        if filled:
            for number, rb in enumerate((first, local, owner)):
                fill(rb, number)
            owner.flush()
        first.close()
        with Serving(Settings(path=served)) as server, pickle.loads(pickle.dumps(owner)) as copy:
            yield Stores([f"{server.url}/run", local, copy], owner, server)


@pytest.fixture(scope="module")
def rest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stores]:
    """Stores with rows and priorities, which no test changes."""
    yield from open_stores(tmp_path_factory.mktemp("rest"), filled=True)


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[Stores]:
    """Stores without rows."""
    yield from open_stores(tmp_path, filled=False)


def draw_all(rb: expstore.cluster.ShardedReplayBuffer) -> Any:
    with rb:
        return torch.cat(list(rb.stream(BATCHES)))


def draw_some(rb: expstore.cluster.ShardedReplayBuffer) -> Any:
    batches: list[Any] = [rb.sample().exclude("shards_missing") for _ in range(BATCHES)]
    return torch.cat(batches)


def ids_of(batches: Any) -> list[list[list[int]]]:
    return [batch["id"].tolist() for batch in batches]


# -- distributions ---------------------------------------------------------------------------------


@pytest.mark.parametrize("where", [None, "even"])
def test_rows_are_drawn_uniformly(rest: Stores, where: str | None) -> None:
    drawn = draw_all(rest.connect(where=where))
    assert_distributed(place_of(drawn["id"]), np.ones(sum(SIZES)) if where is None else even().astype(float))
    assert "priority_weight" not in drawn.keys()  # noqa: SIM118 - a TensorDict yields values


@pytest.mark.parametrize("where", [None, "even"])
def test_rows_are_drawn_by_priority(rest: Stores, where: str | None) -> None:
    drawn = draw_all(rest.connect(sampler=PRIORITIZED, where=where))
    masses = powers() * (1.0 if where is None else even())
    places = place_of(drawn["id"])
    assert_distributed(places, masses)
    np.testing.assert_allclose(drawn["priority_weight"].numpy(), weights_of(masses)[places], rtol=1e-6)


@pytest.mark.parametrize("where", [None, "even"])
def test_slices_are_drawn_as_from_one_store(rest: Stores, where: str | None) -> None:
    drawn = draw_all(rest.connect(sampler={"kind": "slices", "slice_len": 4, "by": "start"}, where=where))
    assert_distributed(first_rows(drawn, 4), starts_of(4) * (1.0 if where is None else even()))


@pytest.mark.slow
def test_batches_keep_their_distribution_while_rows_are_written(stores: Stores) -> None:
    """Each batch is compared with the masses that it was drawn with, of which some are not those of now."""
    given: list[dict[int, float]] = [{}, {}, {}]
    rng = np.random.default_rng(1)
    with stores.connect(sampler=PRIORITIZED, ahead=2) as rb:
        for number in range(3):
            source = next(f"s{n}" for n in range(99) if rb._route(f"s{n}").number == number)
            write(rb, source, 60, given, rng)
        stores.wait_for_rows(60)
        expected, counts, changed = np.zeros((3, 400)), np.zeros((3, 400)), 0
        for step in range(60):
            drawn, info = rb.sample(return_info=True)
            masses, assumed = info["draw"].masses, info["draw"].assumed
            chances = []
            for number in range(3):
                powered = (np.array(list(given[number].values())).astype(np.float32) + EPS) ** ALPHA
                chances.append(assumed[number] / sum(assumed.values()) * powered / powered.sum())
                np.testing.assert_allclose(masses[number].total, powered.sum(), rtol=1e-5)
                expected[number, : powered.size] += BATCH * chances[-1]
                changed += assumed[number] != masses[number].total
            ids = drawn["id"].numpy()
            np.add.at(counts, (ids[:, 0], ids[:, 1] - 1), 1)
            mine = np.array([chances[number][row - 1] for number, row in ids])
            weights = (mine / min(float(each.min()) for each in chances)) ** -BETA
            np.testing.assert_allclose(drawn["priority_weight"].numpy(), weights, rtol=2e-6)
            if step % 2:  # after both batches that were drawn together
                number = int(rng.integers(3))
                source = next(f"s{n}" for n in range(99) if rb._route(f"s{n}").number == number)
                write(rb, source, int(rng.integers(1, 12)), given, rng)
                settle(stores, rb, given)
    assert changed > 20
    some = expected >= 5
    assert ((counts - expected)[some] ** 2 / expected[some]).sum() < limit_of(int(some.sum()) + 1)


def write(rb: Any, source: str, count: int, given: list[dict[int, float]], rng: Any) -> None:
    """Write rows of a source and their priorities, and note them."""
    ids = rb.extend(rows_of(count, count), source=source)
    priorities = rng.random(count) * 3 + 0.01
    assert rb.update_priority(id=ids, priority=priorities) == count
    given[int(ids[0, 0])].update(zip(ids[:, 1].tolist(), priorities.tolist(), strict=True))


def settle(stores: Stores, rb: Any, given: list[dict[int, float]]) -> None:
    """Wait until the copy draws by what was written to it."""
    stores.wait_for_rows(len(given[SHARED]))
    powered = (np.array(list(given[SHARED].values())).astype(np.float32) + EPS) ** ALPHA
    shard, draw = rb._shards.find(SHARED), rb._describe(BATCH)
    wait_until(lambda: np.isclose(shard._reach.member.weigh(draw, 1).mass.total, powered.sum(), rtol=1e-6))


@pytest.mark.slow
def test_a_served_store_is_away_and_comes_back(rest: Stores, tmp_path: Path) -> None:
    with expstore.open(tmp_path / "run.exp", seed=0) as rb:
        fill(rb, SERVED)
    server = KillableServer(tmp_path)
    places = [f"http://127.0.0.1:{server.port}/run", *rest.places[1:]]
    try:
        with (
            connect(places, ahead=2, sampler=PRIORITIZED, down="partial") as rb,
            connect(places, ahead=2, sampler=PRIORITIZED) as patient,
        ):
            assert rb.sample()["shards_missing"] == []
            wanted = ids_of(patient.stream(6))
            server.kill()
            wait_until(lambda: rb.sample()["shards_missing"] == [SERVED])
            drawn = draw_some(rb)
            masses = powers() * np.repeat([0.0, 1.0, 1.0], SIZES)
            places_of_rows = place_of(drawn["id"])
            assert_distributed(places_of_rows, masses)
            np.testing.assert_allclose(
                drawn["priority_weight"].numpy(), weights_of(masses)[places_of_rows], rtol=1e-6
            )
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


def test_rows_go_to_the_place_of_their_source_and_are_found_there(stores: Stores) -> None:
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
        # queries
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
        source = next(f"s{n}" for n in range(99) if rb._route(f"s{n}").number == LOCAL)
        new = rb.extend(rows_of(6, 6), source=source)
        given = stores.places[LOCAL].sql("SELECT _id, _priority FROM transitions").fetchall()
        # the largest of all places, not that of rows which are not there
        assert {priority for row, priority in given if [LOCAL, row] in new.tolist()} == {144.0}


def test_samplers_are_named_everywhere(rest: Stores) -> None:
    whole = {"kind": "without_replacement", "shuffle": True, "drop_last": False}
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


def test_draws_continue_in_other_buffers_and_processes(rest: Stores) -> None:
    context = multiprocessing.get_context("fork")
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
            mine, theirs = context.Pipe()
            child = context.Process(target=draw_in_child, args=(given, theirs))
            child.start()
            theirs.close()
            try:
                assert mine.poll(60), "the child says nothing"
                found, written = mine.recv()
            finally:
                child.kill()
                child.join(60)
            assert found == after[2:]
            assert written == {LOCAL: "StateError"}
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


def draw_in_child(given: Any, sent: Any) -> None:
    """Draw, and try to set a priority of the first row of each place to what it is."""
    torch.set_num_threads(1)
    rb = pickle.loads(given) if isinstance(given, bytes) else given
    found, refused = ids_of(rb.sample() for _ in range(4)), {}
    for number in range(3):
        try:
            count = rb.update_priority(id=[(number, 1)], priority=priorities_of(number, 1)[0])
            assert count == 1
        except expstore.ExpStoreError as exc:
            refused[number] = type(exc).__name__
    sent.send((found, refused))
    os._exit(0)


def test_a_rate_limiter_of_a_store_counts_draws(tmp_path: Path, rest: Stores) -> None:
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


def test_what_cannot_be_done_is_refused(stores: Stores) -> None:
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
        source = next(f"s{n}" for n in range(99) if rb._route(f"s{n}").number == SHARED)
        with pytest.raises(RemoteError, match="shard 2"):
            rb.extend(rows_of(6, 6), source=source)
        assert SHARED in {int(place) for _ in range(4) for place in rb.sample()["id"][:, 0]}
