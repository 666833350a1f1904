"""Servers of shards are killed while clients write and sample: acknowledged rows are stored once."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import expstore
from expstore.remote import Retries
from tests.support.arrow_bodies import batch_of
from tests.support.servers import KillableServer
from tests.support.waits import wait_until

SHARDS, WRITERS = 3, 4
PATIENT = Retries(seconds=200, first=0.02, longest=0.2, seed=1)


def connect(servers: list[KillableServer], **options: Any) -> expstore.cluster.ShardedReplayBuffer:
    urls = [f"http://127.0.0.1:{server.port}/run" for server in servers]
    return expstore.connect(urls, batch_size=32, retries=PATIENT, timeout=60, **options)


class Write(NamedTuple):
    """An acknowledged write: its shard, and when it began and ended."""

    shard: int
    began: float
    ended: float


class Clients:
    """Writers, of which each writes to one shard, a sampler that waits for shards, and one that does not."""

    def __init__(self, servers: list[KillableServer]) -> None:
        self.servers, self.ended = servers, threading.Event()
        self.written: list[dict[tuple[int, ...], int]] = [{} for _ in range(WRITERS)]
        self.writes: list[Write] = []
        self.drawn = [0, 0]
        self.missing: set[int] = set()
        self.futures: list[Future[None]] = []

    def start(self, pool: ThreadPoolExecutor) -> None:
        self.futures = [
            *(pool.submit(self.write, number) for number in range(WRITERS)),
            *(pool.submit(self.sample, number) for number in range(2)),
        ]

    def write(self, number: int) -> None:
        mine = self.written[number]
        with connect(self.servers) as rb:
            names = (f"writer-{number}-{n}" for n in itertools.count())
            source = next(name for name in names if rb._route(name).number == number % SHARDS)
            for cycle in itertools.count():
                data, began = batch_of(20, (number << 32) + cycle * 20), time.monotonic()
                pairs = [tuple(pair) for pair in rb.extend(data, source=source).tolist()]
                self.writes.append(Write(number % SHARDS, began, time.monotonic()))
                assert not mine.keys() & set(pairs), "a row came twice"
                mine.update(zip(pairs, data["action"].tolist(), strict=True))
                if self.ended.is_set():
                    return

    def sample(self, number: int) -> None:
        with connect(self.servers, down=("raise", "partial")[number], ahead=2) as rb:
            while not self.ended.is_set():
                batch = rb.sample()
                assert (batch["observation"][:, 0] == batch["action"].float()).all(), "a row is torn"
                self.drawn[number] += 1
                if number == 1:
                    self.missing.update(batch["shards_missing"])

    def check(self) -> bool:
        """Fail if a client has ended."""
        for future in self.futures:
            assert not future.done(), future.exception()
        return True

    def wait_for_draws(self, count: int) -> None:
        """Wait until the sampler that goes without shards has drawn some more batches."""
        goal = self.drawn[1] + count
        wait_until(lambda: self.check() and self.drawn[1] >= goal)

    def wait_for_write(self, shard: int, since: float) -> float:
        """Wait until a write that ended after some time was acknowledged; return when it ended."""

        def find() -> list[float]:
            self.check()
            return [write.ended for write in self.writes if write.shard == shard and write.ended > since]

        wait_until(find)
        return min(find())


@contextmanager
def serve(folder: Path) -> Iterator[list[KillableServer]]:
    servers = []
    for shard in range(SHARDS):
        (folder / str(shard)).mkdir()
        expstore.open(folder / str(shard) / "run.exp", mode="x", seed=shard).close()
        servers.append(KillableServer(folder / str(shard)))
    try:
        yield servers
    finally:
        for server in servers:
            server.kill()


class Absence(NamedTuple):
    """A shard that was killed, when, and when it acknowledged a write again."""

    shard: int
    began: float
    ended: float


def live_through_kills(folder: Path, kills: int) -> None:
    rng, absences = np.random.default_rng(kills), []
    with serve(folder) as servers:
        with connect(servers) as rb:
            for number in range(12):
                rb.extend(batch_of(20, number * 20 - 1000), source=f"first-{number}")
            assert set(rb.sample(200)["id"][:, 0].tolist()) == {0, 1, 2}
            before = len(rb)
        clients = Clients(servers)
        with ThreadPoolExecutor(WRITERS + 2) as pool:
            clients.start(pool)
            try:
                for _ in range(kills):
                    clients.wait_for_draws(int(rng.integers(1, 20)))
                    shard, began = int(rng.integers(SHARDS)), time.monotonic()
                    servers[shard].kill()
                    clients.wait_for_draws(5)  # while it is away
                    servers[shard].begin()
                    absences.append(Absence(shard, began, clients.wait_for_write(shard, time.monotonic())))
            finally:
                clients.ended.set()
            for future in clients.futures:
                future.result(300)
        assert clients.missing
        with connect(servers) as rb:
            found = rb.sql_each(
                "SELECT count(*) AS n, count(DISTINCT action) AS m FROM transitions"
            ).fetchall()
        acknowledged = {pair: action for mine in clients.written for pair, action in mine.items()}
        assert sum(n for n, _, _ in found) == sum(m for _, m, _ in found) == len(acknowledged) + before
    stored = {}
    for shard in range(SHARDS):
        with expstore.open(folder / str(shard) / "run.exp", mode="r") as store:
            rows = store.sql("SELECT _id, action FROM transitions WHERE action >= 0").fetchall()
            stored |= {(shard, row): action for row, action in rows}
    assert stored == acknowledged
    compare_times(clients.writes, absences)


def compare_times(writes: list[Write], absences: list[Absence]) -> None:
    """Print how long writes took while other shards were away, and at other times; fail if some waited."""

    def overlaps(write: Write, absence: Absence) -> bool:
        return write.began < absence.ended and write.ended > absence.began

    calm, others = [], []
    for write in writes:
        shards = {absence.shard for absence in absences if overlaps(write, absence)}
        if write.shard not in shards:
            (others if shards else calm).append(write.ended - write.began)
    for name, taken in (("all shards there", calm), ("another shard away", others)):
        p50, p99 = 1000 * np.percentile(taken, [50, 99])
        print(f"{name}: {len(taken)} writes of 20 rows, p50 {p50:.0f} ms, p99 {p99:.0f} ms")
    # An absence takes seconds, in which the start of its server takes a core: a write that waited for it
    # would take as long. The bound is loose, because machines are busy.
    shortest = min(absence.ended - absence.began for absence in absences)
    assert np.percentile(others, 50) < shortest / 2


@pytest.mark.guarantee("server/rows")
@pytest.mark.torture
@pytest.mark.timeout(1800)
def test_acknowledged_rows_are_stored_once_although_shards_are_killed(tmp_path: Path) -> None:
    live_through_kills(tmp_path, 30)
