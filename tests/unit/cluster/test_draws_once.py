"""Samplers that draw every row once, over several stores: passes and consuming, as from one store."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import expstore
from expstore.cluster.shares import draw_rest
from expstore.errors import NotReadyError, StateError
from expstore.remote import Retries
from tests.support.arrow_bodies import batch_of
from tests.support.chi_square import below, chi_square, solve
from tests.support.servers import KillableServer, Serving

SIZES = (40, 77, 13)
ONCE = Retries(seconds=20, first=0.01, longest=0.05, seed=3)


@pytest.fixture
def places(server: Serving, folder: Path, request: pytest.FixtureRequest) -> Iterator[list[Any]]:
    """Yield two addresses and a buffer of this process: stores of 40, 77 and 13 rows."""
    name = "".join(letter for letter in request.node.name if letter.isalnum())[:60]
    found: list[Any] = []
    for number, rows in enumerate(SIZES):
        rb = expstore.open(folder / f"{name}{number}.exp", mode="x", seed=number)
        rb.extend(batch_of(rows, 1000 * number))
        rb.flush()
        if number < 2:
            rb.close()
            found.append(f"{server.url}/{name}{number}")
        else:
            found.append(rb)
    yield found
    found[-1].close()


def connect(places: list[Any], **options: Any) -> expstore.cluster.ShardedReplayBuffer:
    return expstore.connect(places, **({"batch_size": 16, "seed": 5, "retries": ONCE} | options))


def pairs(batch: Any) -> list[tuple[int, ...]]:
    return [tuple(pair) for pair in batch["id"].tolist()]


def draw(rb: expstore.cluster.ShardedReplayBuffer) -> list[tuple[int, ...]]:
    """Return the rows of a batch; none if no row is left."""
    try:
        return pairs(rb.sample())
    except NotReadyError:
        return []


def all_pairs(more: int = 0) -> set[tuple[int, int]]:
    return {(number, row + 1) for number, rows in enumerate(SIZES) for row in range(rows + more)}


@pytest.mark.guarantee(
    "cluster/once",
    "Every row comes once per pass of a sampler without replacement, and as often as a consuming sampler "
    "allows, whatever other clients draw.",
)
def test_every_row_comes_once_per_pass(places: list[Any]) -> None:
    with connect(places) as rb:
        rb.name_sampler("pass", {"kind": "without_replacement"})
    orders = []
    with connect(places, sampler="pass", ahead=4) as rb:
        for _ in range(3):
            batches = [rb.sample() for _ in range(9)]
            assert [len(batch) for batch in batches] == [16] * 8 + [sum(SIZES) % 16]
            drawn = [pair for batch in batches for pair in pairs(batch)]
            assert len(drawn) == len(set(drawn)) == sum(SIZES)
            assert set(drawn) == all_pairs()
            orders.append(drawn)
        assert orders[0] != orders[1] != orders[2]
        streamed = [pair for batch in itertools.islice(rb.stream(), 9) for pair in pairs(batch)]
        assert set(streamed) == all_pairs()
        assert set(pairs(rb.sample(1000))) == all_pairs()  # nothing was drawn ahead
        assert rb.sample(7).shape == (7,)


@pytest.mark.guarantee("cluster/once")
def test_rows_are_consumed_once_by_all_clients(places: list[Any]) -> None:
    with connect(places) as rb:
        rb.name_sampler("once", {"kind": "consuming", "max_sample_count": 2})

    def consume(_: int) -> list[tuple[int, ...]]:
        drawn: list[tuple[int, ...]] = []
        with connect(places, sampler="once", batch_size=8) as rb:
            while more := draw(rb):
                drawn += more
        return drawn

    with ThreadPoolExecutor(3) as pool:
        found = Counter(pair for drawn in pool.map(consume, range(3)) for pair in drawn)
    assert found == Counter(dict.fromkeys(all_pairs(), 2))
    with connect(places, sampler="once") as rb:
        rb.extend(batch_of(5, 500), source="a")
        more = pairs(rb.sample()) + pairs(rb.sample())
        assert len(more) == 10
        assert Counter(more) == Counter(dict.fromkeys(set(more), 2))
        assert not set(more) & all_pairs()
        with pytest.raises(NotReadyError, match="none of the 3 shards"):
            rb.sample()


def test_other_samplers_under_the_name_and_those_without_a_rest_are_refused(places: list[Any]) -> None:
    with connect(places) as rb:
        rb.name_sampler("matching", {"kind": "without_replacement"}, where="action > 3")
        for number, kind in enumerate(("consuming", "prioritized")):
            rb.shards[number].name_sampler("mixed", {"kind": kind})
    with connect(places, sampler="matching") as rb, pytest.raises(StateError, match='by="member"'):
        rb.sample()
    with connect(places[:2], sampler="mixed") as rb, pytest.raises(StateError, match="different samplers"):
        rb.sample()


def test_a_batch_is_a_sample_of_the_rows_that_are_left() -> None:
    """The number of rows of the first shard is hypergeometric."""
    left, rows = np.array([6, 9]), 5
    counts = np.array([draw_rest(3, (number, 0), rows, left) for number in range(4000)])
    assert (counts.sum(axis=1) == rows).all()
    found = np.bincount(counts[:, 0], minlength=rows + 1)

    def choose(n: int, k: int) -> float:
        return float(np.prod([(n - i) / (i + 1) for i in range(k)]))

    chances = np.array([choose(6, k) * choose(9, rows - k) / choose(15, rows) for k in range(rows + 1)])
    limit = solve(lambda x: below(x, rows), 0.999, 200.0)
    assert chi_square(found, chances) < limit
    assert draw_rest(3, (0, 0), 50, left).tolist() == [6, 9]


@pytest.mark.slow
def test_rows_of_a_shard_that_was_away_come_later(tmp_path: Path) -> None:
    servers = []
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        with expstore.open(tmp_path / str(number) / "run.exp", mode="x", seed=number) as rb:
            rb.extend(batch_of(40, 100 * number))
        servers.append(KillableServer(tmp_path / str(number)))
    try:
        urls = [f"http://127.0.0.1:{server.port}/run" for server in servers]
        with connect(urls) as rb:
            rb.name_sampler("once", {"kind": "consuming"})
        with connect(urls, sampler="once", down="partial") as rb:
            drawn = pairs(rb.sample())
            servers[1].kill()
            while more := draw(rb):
                drawn += more
            assert len(set(drawn)) == len(drawn)
            assert {pair for pair in drawn if pair[0] == 0} == {(0, row + 1) for row in range(40)}
            servers[1].begin()
            with connect(urls) as other:
                other.name_sampler("once", {"kind": "consuming"})  # named samplers end with their server
            while len(drawn) < 80:
                drawn += draw(rb)
            assert set(drawn) == {(number, row + 1) for number in range(2) for row in range(40)}
    finally:
        for server in servers:
            server.kill()
