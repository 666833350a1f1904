"""A rate limiter over all shards: draws and writes stay within its bounds, and wait for one another."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import expstore
from expstore import MinSize, SampleToInsertRatio
from expstore.api import Settings
from expstore.errors import NotReadyError, StateError
from expstore.remote import Retries
from expstore.remote.transport import Connection
from tests.support.arrow_bodies import batch_of
from tests.support.servers import Serving
from tests.support.waits import wait_until

RATIO, SIZE, AHEAD = 2.0, 10, 2
#: Rows of the batches that are drawn together.
TOGETHER = SIZE * AHEAD
SOON = Retries(seconds=20, first=0.01, longest=0.05, seed=3)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Serving]:
    with Serving(Settings(path=folder, samples_per_insert=RATIO, error_buffer=math.inf)) as server:
        yield server


def connect(urls: list[str], limiter: Any = None, **options: Any) -> expstore.cluster.ShardedReplayBuffer:
    options = {"batch_size": SIZE, "seed": 5, "retries": SOON, "ahead": AHEAD} | options
    return expstore.connect(urls, rate_limiter=limiter, **options)


def counts_of(rb: expstore.cluster.ShardedReplayBuffer) -> tuple[int, int]:
    """Return how many rows were inserted into all shards, and sampled from them."""
    found = [shard.stats()["rate_limiter"] for shard in rb.shards.values()]
    return sum(one["inserted"] for one in found), sum(one["sampled"] for one in found)


def source_for(rb: expstore.cluster.ShardedReplayBuffer, shard: int) -> str:
    return next(name for n in range(99) if rb._route(name := f"actor-{n}").number == shard)


def sample_all(rb: expstore.cluster.ShardedReplayBuffer) -> int:
    """Sample until the limiter forbids it; return the number of batches."""
    for count in range(10_000):
        try:
            rb.sample()
        except NotReadyError:
            return count
    raise AssertionError("nothing limits it")


@pytest.mark.guarantee(
    "cluster/rates",
    "A rate limiter over shards lets one client draw no more than the sums of all shards permit, and "
    "several exceed it by a stated bound.",
)
def test_one_client_draws_what_the_sums_permit_and_no_more(urls: list[str]) -> None:
    limiter = SampleToInsertRatio(RATIO, 20, (-30.0, 1000.0), timeout=0)
    with connect(urls, limiter) as rb:
        sources = [source_for(rb, shard) for shard in range(3)]
        rb.extend(batch_of(15), source=sources[0])
        with pytest.raises(NotReadyError, match="15 of min_size_to_sample = 20 rows"):
            rb.sample()
        inserted = 15
        for shard, rows in ((0, 90), (1, 7), (2, 31), (1, 3)):  # unequal shards
            rb.extend(batch_of(rows), source=sources[shard])
            inserted += rows
            sample_all(rb)
            assert counts_of(rb)[0] == inserted
            permitted = RATIO * inserted + 30
            assert permitted - TOGETHER < counts_of(rb)[1] <= permitted
        assert counts_of(rb)[1] > 200


@pytest.mark.slow
def test_a_sampler_that_is_ahead_continues_after_an_insert_to_any_shard(urls: list[str]) -> None:
    limiter = SampleToInsertRatio(RATIO, 1, (0.0, 1000.0))
    with connect(urls, limiter) as rb, connect(urls) as writer, ThreadPoolExecutor(1) as pool:
        sources = [source_for(writer, shard) for shard in range(3)]
        writer.extend(batch_of(20), source=sources[0])
        assert [len(rb.sample()) for _ in range(4)] == [SIZE] * 4
        for shard in (1, 2, 0):
            batch = pool.submit(rb.sample)
            assert not batch.done()
            writer.extend(batch_of(TOGETHER // 2), source=sources[shard])
            assert len(batch.result(60)) == SIZE
            assert len(rb.sample()) == SIZE
            assert counts_of(rb) == (inserted := counts_of(rb)[0], RATIO * inserted)


def test_writers_wait_for_samplers_of_other_clients(urls: list[str]) -> None:
    limiter = SampleToInsertRatio(RATIO, 1, (-1000.0, 100.0))
    with connect(urls, limiter) as rb, connect(urls) as sampler, ThreadPoolExecutor(1) as pool:
        source = source_for(rb, 1)
        for n in range(5):
            rb.extend(batch_of(10, 10 * n), source=source)
        assert counts_of(rb) == (50, 0)
        written = pool.submit(rb.extend, batch_of(10, 50), source=source)
        sampler.sample()  # draws as many rows as the insert needs
        assert written.result(60).shape == (10, 2)
        quick = SampleToInsertRatio(RATIO, 1, (-1000.0, 100.0), timeout=0)
        with connect(urls, quick) as other:
            with pytest.raises(NotReadyError, match="cannot insert 10 rows yet.* max_diff is 100"):
                other.extend(batch_of(10), source="x")
            with pytest.raises(NotReadyError, match="cannot insert 1 rows yet"):
                other.add(batch_of(1)[0], source="x")
            with pytest.raises(ValueError, match="moves the error by"):
                other.extend({"x": np.zeros(1000)}, source="x")
        assert counts_of(rb) == (60, 20)


def test_a_writer_asks_for_counts_that_are_old(urls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    limiter = SampleToInsertRatio(RATIO, 1, (-1000.0, 100.0), timeout=0)
    with connect(urls, limiter) as rb, connect(urls) as other:
        other.extend(batch_of(50), source=source_for(other, 0))
        for shard in rb._shards.all:
            shard.answered = shard._asked = -math.inf  # long ago
        with pytest.raises(NotReadyError, match="50 rows inserted"):
            rb.extend(batch_of(10), source=source_for(other, 1))


@pytest.mark.guarantee("cluster/rates")
@pytest.mark.slow
def test_several_clients_stay_within_the_stated_bound(urls: list[str]) -> None:
    """Each of n samplers exceeds the sum by what it and the others draw together, at most."""
    samplers, writers = 3, 2
    lowest, largest = 0.0, 400.0
    limiter = SampleToInsertRatio(RATIO, 10, (lowest, largest))
    ended = threading.Event()
    drawn = [0] * samplers

    def sample(number: int) -> None:
        with connect(urls, SampleToInsertRatio(RATIO, 10, (lowest, largest), timeout=0.2)) as rb:
            while not ended.is_set():
                try:
                    rb.sample()
                except NotReadyError:
                    continue
                drawn[number] += 1

    def write(number: int) -> None:
        with connect(urls, limiter) as rb:
            for n in range(30):
                rb.extend(batch_of(10, 10 * n), source=f"actor-{number}-{n % 3}")

    with ThreadPoolExecutor(samplers + writers) as pool, connect(urls) as watcher:
        sampling = [pool.submit(sample, number) for number in range(samplers)]
        writing = [pool.submit(write, number) for number in range(writers)]
        try:
            while not all(future.done() for future in writing):
                sampled = counts_of(watcher)[1]
                inserted = counts_of(watcher)[0]  # later: the bound holds for what was inserted by then
                assert sampled <= RATIO * inserted - lowest + 2 * (samplers - 1) * TOGETHER
            for future in writing:
                future.result()
            wait_until(lambda: counts_of(watcher)[1] > RATIO * 600 - lowest - TOGETHER)
        finally:
            ended.set()
        for future in sampling:
            future.result(60)
        inserted, sampled = counts_of(watcher)
        assert inserted == 600
        assert sampled <= RATIO * inserted - lowest + 2 * (samplers - 1) * TOGETHER
        assert all(drawn)


@pytest.mark.slow
def test_a_shard_that_its_own_limiter_holds_is_not_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, waits = Connection.request, threading.Event()

    def note(connection: Connection, method: str, route: str, **more: Any) -> Any:
        if route == "sample" and connection.retries.seconds:
            waits.set()
        return request(connection, method, route, **more)

    for shard in range(2):
        expstore.open(tmp_path / f"run{shard}.exp", mode="x", seed=shard).close()
    settings = Settings(path=tmp_path, samples_per_insert=RATIO, error_buffer=100.0)
    with Serving(settings) as server, ThreadPoolExecutor(1) as pool:
        urls = [f"{server.url}/run{shard}" for shard in range(2)]
        with connect(urls, ahead=1, down="partial") as rb, connect(urls, down="partial", wait=0.0) as quick:
            for shard in (0, 1):
                rb.shards[shard].extend(batch_of(30))
            sample_all(quick)
            with pytest.raises(NotReadyError, match="shard . .*cannot sample") as caught:
                quick.sample()
            assert caught.value.kind == "rate_limited"
            monkeypatch.setattr(Connection, "request", note)
            drawn = pool.submit(lambda: [rb.sample()["shards_missing"] for _ in range(10)])
            wait_until(lambda: waits.is_set() or drawn.done())
            for shard in (0, 1):
                rb.shards[shard].extend(batch_of(60))
            assert drawn.result(60) == [[]] * 10
            assert (rb.shards_missing, quick.shards_missing) == ((), ())


def test_servers_that_do_not_count_are_refused(urls: list[str], tmp_path: Path) -> None:
    expstore.open(tmp_path / "free.exp", mode="x").close()
    limiter = SampleToInsertRatio(RATIO, 1, 100)
    with Serving(Settings(path=tmp_path)) as free:
        with pytest.raises(StateError, match="shard 1 .* counts nothing.* --samples-per-insert 2 --error-b"):
            connect([urls[0], f"{free.url}/free"], limiter)
    with pytest.raises(StateError, match="counts for 2 samples per insert.* for 3 samples per insert"):
        connect(urls, SampleToInsertRatio(3.0, 1, 100))
    with connect(urls, MinSize(30, timeout=0)) as rb:  # its ratio does not matter
        rb.extend(batch_of(20), source="a")
        with pytest.raises(NotReadyError, match="20 of min_size"):
            rb.sample()
        rb.extend(batch_of(20), source="b")
        assert len(rb.sample()) == SIZE
    with connect(urls, SampleToInsertRatio(RATIO, 1, 9)) as rb, pytest.raises(ValueError, match="20 rows"):
        rb.sample()
    with pytest.raises(ValueError, match="several shards"):
        expstore.connect(urls[0], rate_limiter=limiter)  # type: ignore[call-overload]


def test_a_buffer_that_is_closed_does_not_wait(urls: list[str]) -> None:
    rb = connect(urls, SampleToInsertRatio(RATIO, 1, 100))
    with ThreadPoolExecutor(1) as pool:
        batch = pool.submit(rb.sample)
        rb.close()
        with pytest.raises(StateError, match="closed"):
            batch.result(60)
