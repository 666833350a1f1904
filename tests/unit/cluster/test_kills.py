"""Servers of shards are killed while clients write and sample: acknowledged rows are stored once."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import expstore
from expstore import Retries
from tests.support.arrow_bodies import batch_of
from tests.support.servers import KillableServer

WRITERS = 4
PATIENT = Retries(seconds=200, first=0.02, longest=0.2, seed=1)


def connect(servers: list[KillableServer], **options: Any) -> expstore.ShardedReplayBuffer:
    urls = [f"http://127.0.0.1:{server.port}/run" for server in servers]
    return expstore.connect(urls, batch_size=32, retries=PATIENT, timeout=60, **options)


class Clients:
    """Writers, a sampler that waits for shards, and one that goes without them."""

    def __init__(self, servers: list[KillableServer]) -> None:
        self.servers, self.ended = servers, threading.Event()
        self.written: list[dict[tuple[int, ...], int]] = [{} for _ in range(WRITERS)]
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
            for cycle in itertools.count():
                data = batch_of(20, (number << 32) + cycle * 20)
                pairs = [
                    tuple(pair) for pair in rb.extend(data, source=f"writer-{number}-{cycle % 3}").tolist()
                ]
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

    def wait_for_draws(self, count: int) -> None:
        """Wait until the sampler that goes without shards has drawn some more batches."""
        goal = self.drawn[1] + count
        until = threading.Event()
        for _ in range(6000):
            if self.drawn[1] >= goal:
                return
            for future in self.futures:
                assert not future.done(), future.exception()
            until.wait(0.01)
        raise AssertionError("the shards that are left were not sampled")


def live_through_kills(folder: Path, kills: int) -> None:
    servers = []
    for shard in range(2):
        (folder / str(shard)).mkdir()
        expstore.open(folder / str(shard) / "run.exp", mode="x", seed=shard).close()
        servers.append(KillableServer(folder / str(shard)))
    rng = np.random.default_rng(kills)
    try:
        with connect(servers) as rb:
            for number in range(8):
                rb.extend(batch_of(20, number * 20 - 1000), source=f"first-{number}")
            assert set(rb.sample(200)["id"][:, 0].tolist()) == {0, 1}
            before = len(rb)
        clients = Clients(servers)
        with ThreadPoolExecutor(WRITERS + 2) as pool:
            clients.start(pool)
            try:
                for _ in range(kills):
                    clients.wait_for_draws(int(rng.integers(1, 20)))
                    victim = servers[int(rng.integers(2))]
                    victim.kill()
                    clients.wait_for_draws(5)  # while it is away
                    victim.begin()
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
    finally:
        for server in servers:
            server.kill()
    stored = {}
    for shard in range(2):
        with expstore.open(folder / str(shard) / "run.exp", mode="r") as store:
            rows = store.sql("SELECT _id, action FROM transitions WHERE action >= 0").fetchall()
            stored |= {(shard, row): action for row, action in rows}
    assert stored == acknowledged


@pytest.mark.timeout(900)
def test_acknowledged_rows_are_stored_once_although_shards_are_killed(tmp_path: Path) -> None:
    live_through_kills(tmp_path, 2)


@pytest.mark.torture
@pytest.mark.timeout(1800)
def test_thirty_kills(tmp_path: Path) -> None:
    live_through_kills(tmp_path, 30)
