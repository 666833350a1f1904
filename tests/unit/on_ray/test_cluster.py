"""Shards on Ray: restarts in place, growth, loss of a store, and reading by Ray Data."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import expstore
from expstore.errors import (
    ArgumentError,
    NotFoundError,
    NotReadyError,
    QueryError,
    RemoteError,
    SchemaError,
    StateError,
)
from tests.support.arrow_bodies import batch_of
from tests.support.paths import ROOT
from tests.support.s3_server import S3Server, start_moto
from tests.support.waits import wait_until

ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'expstore[ray]'")

pytestmark = [
    pytest.mark.slow,  # it takes 20 seconds to start the shards
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # of Ray's own settings
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # its processes outlive the call that starts them
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

Cluster = Any


@pytest.fixture(scope="module")
def connected() -> Iterator[None]:
    """A Ray cluster of this machine alone. The driver is this process, as in a user's program."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        ray.init(
            num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, logging_level="error",
            log_to_driver=False,
        )  # fmt: skip
        yield
        ray.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shards")


@pytest.fixture(scope="module")
def cluster(connected: None, folder: Path) -> Iterator[Cluster]:
    cluster = expstore.cluster.ray.start(
        folder / "run-{shard}.exp", shards=2, capacity=2_000_000, name="tests"
    )
    yield cluster
    cluster.stop()


def fill(rb: Any, first: int = 0, sources: int = 8) -> dict[tuple[int, ...], int]:
    """Write ten rows of each source; return the action of each row by shard and id."""
    found: dict[tuple[int, ...], int] = {}
    for number in range(sources):
        data = batch_of(10, first + 10 * number)
        pairs = rb.extend(data, source=f"actor-{number}").tolist()
        found |= dict(zip(map(tuple, pairs), data["action"].tolist(), strict=True))
    return found


def actions(cluster: Cluster) -> list[int]:
    """Return the actions of all rows, as the files of the stores have them."""
    with cluster.buffer() as rb:
        rb.flush()  # readers see small batches 0.1 s later otherwise
    found: list[int] = []
    for shard in cluster.status():
        with expstore.open(shard.path, mode="r") as rb:
            found += rb[:]["action"].tolist()
    return sorted(found)


def kill(cluster: Cluster, shard: int) -> int:
    """Kill the process of a shard; return its id."""
    (pid,) = [one.pid for one in cluster.status() if one.number == shard]
    os.kill(pid, signal.SIGKILL)
    return int(pid)


def is_restarted(cluster: Cluster, shard: int, former: int) -> bool:
    return cluster.status()[shard].pid not in (None, former)


def state_of(cluster: Cluster, shard: int) -> str:
    (found,) = [one.state for one in cluster.status() if one.number == shard]
    return str(found)


class Clients:
    """Two writers and a sampler, which run until they are told to end."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.ended = cluster, threading.Event()
        self.acknowledged: list[dict[tuple[int, ...], int]] = [{}, {}]
        self.drawn = 0

    def write(self, number: int) -> None:
        with self.cluster.buffer() as rb:
            cycle = 0
            while not self.ended.is_set():
                data = batch_of(10, (number + 1 << 32) + cycle * 10)
                pairs = map(tuple, rb.extend(data, source=f"writer-{number}-{cycle % 3}").tolist())
                rows = dict(zip(pairs, data["action"].tolist(), strict=True))
                assert not self.acknowledged[number].keys() & rows.keys(), "a row came twice"
                self.acknowledged[number] |= rows
                cycle += 1

    def sample(self) -> None:
        with self.cluster.buffer(batch_size=32, ahead=2) as rb:
            while not self.ended.is_set():
                batch = rb.sample()
                assert (batch["observation"][:, 0] == batch["action"].float()).all(), "a row is torn"
                self.drawn += 1


def live_through_kills(cluster: Cluster, kills: int) -> None:
    """Kill shards under writers and a sampler; all acknowledged rows are stored once."""
    with cluster.buffer() as rb:
        before = fill(rb, first=-1_000_000)
    known = actions(cluster)
    assert {shard for shard, _ in before} == {0, 1}
    clients = Clients(cluster)
    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(clients.write, 0), pool.submit(clients.write, 1), pool.submit(clients.sample)]

        def has_drawn(goal: int) -> bool:
            for future in futures:
                if future.done():
                    future.result()
            return clients.drawn > goal

        try:
            for number in range(kills):
                wait_until(partial(has_drawn, clients.drawn + 3))
                pid = kill(cluster, number % 2)
                wait_until(partial(is_restarted, cluster, number % 2, pid))  # by Ray alone
                wait_until(partial(has_drawn, clients.drawn + 5))
        finally:
            clients.ended.set()
        for future in futures:
            future.result(120)
    written = [action for mine in clients.acknowledged for action in mine.values()]
    assert len(written) > 20
    assert actions(cluster) == sorted(known + written)


@pytest.mark.guarantee("server/rows")
@pytest.mark.torture  # Ray starts many processes for it: a minute or more on two cores
def test_a_killed_shard_is_restarted_and_no_acknowledged_row_is_lost(cluster: Cluster) -> None:
    address = cluster.members.members[0].url
    live_through_kills(cluster, 1)
    assert cluster.members.members[0].url == address


@pytest.mark.guarantee("server/rows")
@pytest.mark.torture
def test_ten_kills(cluster: Cluster) -> None:
    live_through_kills(cluster, 10)


def test_a_version_of_all_shards_is_followed_by_the_same_batches(cluster: Cluster, tmp_path: Path) -> None:
    with cluster.buffer(batch_size=16, seed=3) as rb:
        fill(rb)
        rb.sample()
        rb.dumps(tmp_path / "version")
        expected = [rb.sample()["action"].tolist() for _ in range(6)]
        fill(rb, first=5000)
    with cluster.buffer(batch_size=16, seed=3) as rb:
        rb.loads(tmp_path / "version")
        assert [rb.sample()["action"].tolist() for _ in range(6)] == expected


def write_elsewhere(rb: Any, first: int) -> tuple[list[int], int]:
    batch = rb.sample()
    pairs = rb.extend(batch_of(10, first), source="from a task")
    return [len(batch), os.getpid()], int(pairs[0, 0])


def test_tasks_write_and_sample_through_a_copy_of_the_buffer(cluster: Cluster) -> None:
    with cluster.buffer(batch_size=16) as rb:
        fill(rb)
        before = len(rb)
        (size, pid), shard = ray.get(ray.remote(num_cpus=0)(write_elsewhere).remote(rb, 9000))
        assert size == 16
        assert pid != os.getpid()
        assert shard in (0, 1)
        assert len(rb) == before + 10
    assert expstore.cluster.ray.find("tests").token == cluster.token


@pytest.mark.torture  # Ray starts many processes for it: a minute or more on two cores
def test_a_shard_is_added_retired_lost_and_replaced(cluster: Cluster, folder: Path, tmp_path: Path) -> None:
    with cluster.buffer(batch_size=64, down="partial", wait=5) as rb:
        fill(rb)
        (number,) = cluster.add()
        assert number == cluster.members.members[-1].number
        wait_until(lambda: number in rb.shards)
        pairs = [rb.extend(batch_of(10, 10 * k), source=f"new-{k}") for k in range(12)]
        assert number in {int(found[0, 0]) for found in pairs}  # new sources go there
        wait_until(lambda: number in rb.sample()["id"][:, 0])  # it may have one row of a hundred
        cluster.retire(number)
        wait_until(lambda: not rb._shards.find(number).entry.accepts)
        later = [rb.extend(batch_of(10, 10 * k), source=f"newer-{k}") for k in range(12)]
        assert number not in {int(found[0, 0]) for found in later}

        # Its disk is lost, after a version was copied elsewhere and more rows were written.
        rb.shards[0].snapshots.tag("other")
        version = rb.shards[number].snapshots.tag("kept")
        path = folder / f"run-{number}.exp"
        shutil.copytree(path / "versions", tmp_path / "versions")
        kept = rb.shards[number].sql("SELECT _id, action FROM transitions ORDER BY _id").fetchall()
        rb.shards[number].extend(batch_of(7, 700))
        with pytest.raises(StateError, match="answers at"):
            cluster.replace(number, from_=tmp_path / "versions")
        registry = ray.get_actor("tests:registry", namespace="expstore")
        wait_until(lambda: ray.get(registry.find_written.remote(number)) == len(kept) + 7)
        path.rename(tmp_path / "lost.exp")
        expstore.open(path, mode="x").close()
        kill(cluster, number)
        wait_until(lambda: "is store" in state_of(cluster, number))  # it does not serve the other store
        path.rename(tmp_path / "other.exp")
        wait_until(lambda: "there is no store" in state_of(cluster, number))
        with pytest.raises(StateError, match="the versions in"):
            cluster.replace(number, from_=folder / "run-0.exp")
        done = cluster.replace(number, from_=tmp_path / "versions")
        assert done.shard > number
        assert (done.rows, done.missing) == (version.rows, 7)
        wait_until(lambda: set(rb.shards) == {0, 1, done.shard})
        found = rb.shards[done.shard].sql("SELECT _id, action FROM transitions ORDER BY _id").fetchall()
        assert found == kept
        cluster.retire(done.shard)
        cluster.remove(done.shard)
        with pytest.raises(NotFoundError, match="there is no shard"):
            cluster.retire(done.shard)
        wait_until(lambda: set(rb.shards) == {0, 1})
    assert [one.state for one in cluster.status()] == ["serving", "serving"]


@pytest.mark.torture  # Ray starts many processes for it: a minute or more on two cores
def test_ray_data_reads_the_rows_of_all_shards(cluster: Cluster) -> None:
    with cluster.buffer() as rb:
        fill(rb)
        expected = rb.sql_each("SELECT _id, action, next.reward FROM transitions WHERE action >= 40")
        rows = cluster.to_ray_dataset(
            where="action >= 40", fields=["action", "next.reward"], block_rows=30
        ).take_all()
    found = sorted((row["_id"], row["action"], row["next"]["reward"], row["_shard"]) for row in rows)
    assert found == sorted(expected.fetchall())
    with pytest.raises(QueryError, match="nothing"):
        cluster.to_ray_dataset(where="nothing = 1")
    with pytest.raises(SchemaError, match="nothing"):
        cluster.to_ray_dataset(fields=["nothing"])


def test_what_cannot_be_started_is_refused(cluster: Cluster, folder: Path, tmp_path: Path) -> None:
    expstore.open(tmp_path / "run-0.exp", mode="x").close()
    here, there = tmp_path / "run-{shard}.exp", folder / "run-{shard}.exp"
    for path, options, error, match in (
        (there, {"name": "tests"}, StateError, "'tests' runs already"),
        (tmp_path / "run.exp", {}, ArgumentError, "{shard}"),
        (here, {"name": "a b"}, ArgumentError, "is not a name"),
        (here, {"shards": 0}, ArgumentError, "at least 1"),
        (here, {"store": {"mode": "w"}}, ArgumentError, "must not have 'mode'"),
        (here, {"server": {"nonsense": 1}}, ArgumentError, "'nonsense'"),
        (here, {"allow_lost": True}, ArgumentError, "allow_lost"),
        (here, {"nodes": ["10.0.0.1"]}, NotFoundError, "no node '10.0.0.1'"),
        (tmp_path / "none" / "run-{shard}.exp", {}, NotFoundError, "there is no folder"),
        (here, {"shards": 2}, StateError, r"run-0.exp .* exists, and .*run-1.exp .* does not"),
        (
            there,
            {"shards": 3, "file": folder / "tests.cluster.json"},
            StateError,
            "2 shards, and 3 were asked",
        ),
    ):
        with pytest.raises(error, match=match):
            expstore.cluster.ray.start(path, **{"name": "other"} | options)
    with pytest.raises(NotFoundError, match="no cluster 'other'"):
        expstore.cluster.ray.find("other")
    with pytest.raises(RemoteError, match="token"):
        expstore.connect([member.url for member in cluster.members.members], token="wrong")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run-0.exp"]


@pytest.mark.torture  # importing torchrl in two workers takes ten seconds of CPU
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_ray_collector_of_torchrl_fills_it(connected: None, tmp_path: Path) -> None:
    from torchrl.collectors.distributed import RayCollector

    from tests.support.counting_env import Make

    cluster = expstore.cluster.ray.start(tmp_path / "run-{shard}.exp", shards=2, name="collected")
    with cluster.buffer() as rb:
        collector = RayCollector(
            [Make(0, 3), Make(1, 4)], None, frames_per_batch=40, total_frames=200, sync=True,
            replay_buffer=rb, collector_class="single", remote_configs={"num_cpus": 0.5, "memory": 1 << 28},
        )  # fmt: skip
        batches = 0
        for batch in collector:
            assert batch is None  # the workers write
            batches += 1
        assert batches == 5
        collector.shutdown()
        assert ray.is_initialized()
        assert len(rb) == 200
        workers = set()
        found = rb.sql_each("SELECT episode_id, length, status FROM episodes").fetchall()
        for episode, length, status, shard in found:
            rows = rb.trajectory((shard, episode))["observation"].tolist()
            worker, number, _ = rows[0]
            assert rows == [[worker, number, step] for step in range(length)]
            assert length == (3, 4)[worker] or status != "terminated"
            workers.add(worker)
        assert workers == {0, 1}
    cluster.stop()


@pytest.mark.torture
def test_it_continues_after_a_stop_and_its_registry_after_a_kill(connected: None, tmp_path: Path) -> None:
    start, name, path = expstore.cluster.ray.start, "stopped", tmp_path / "run-{shard}.exp"
    cluster = start(path, shards=1, name=name)
    with pytest.raises(NotReadyError, match="no shard has rows"):
        cluster.to_ray_dataset()
    with cluster.buffer(batch_size=8) as rb:
        fill(rb)
        registry = ray.get_actor(f"{name}:registry", namespace="expstore")
        ray.kill(registry, no_restart=False)  # Ray starts it again
        assert len(rb.sample()) == 8  # the list is known
        cluster.add()
        wait_until(lambda: set(rb.shards) == {0, 1})
    cluster.retire(0)
    cluster.stop()
    with pytest.raises(NotFoundError):
        cluster.status()
    again = start(path, name=name)
    assert [one.accepts for one in again.status()] == [False, True]
    with again.buffer() as rb:
        assert len(rb) == 80
    again.stop()


@pytest.mark.torture
def test_a_shard_whose_port_is_taken_is_found_at_another_one(connected: None, tmp_path: Path) -> None:
    cluster = expstore.cluster.ray.start(tmp_path / "run-{shard}.exp", shards=1, name="moved")
    (member,) = cluster.members.members
    address = urlsplit(member.url)
    assert address.hostname is not None
    assert address.port is not None
    taken: list[socket.socket] = []

    def take_port() -> bool:
        with contextlib.suppress(OSError):
            taken.append(socket.create_server((address.hostname, address.port)))
        return bool(taken)

    with cluster.buffer() as rb:
        fill(rb)
        kill(cluster, 0)
        wait_until(take_port)
        wait_until(lambda: cluster.members.members[0].url != member.url)
        fill(rb, first=1000)
        assert len(rb) == 160
    taken[0].close()
    cluster.stop()


@pytest.mark.torture
def test_a_shard_on_a_lost_node_is_replaced_from_an_object_storage(connected: None, tmp_path: Path) -> None:
    pytest.importorskip("moto", reason="moto is not installed: there is no server to ask")
    from obstore.store import S3Store

    start, name, path = expstore.cluster.ray.start, "lost", tmp_path / "run-{shard}.exp"
    cluster = start(path, shards=2, name=name)
    with cluster.buffer() as rb:
        fill(rb)
        expected = rb.shards[1].sql("SELECT action FROM transitions ORDER BY _id").fetchall()
        rb.shards[1].snapshots.tag("kept")
    cluster.stop()
    file = tmp_path / f"{name}.cluster.json"
    facts = json.loads(file.read_text())
    facts["shards"][1]["url"] = "http://203.0.113.9:8420/run-1"  # no node has this address
    file.write_text(json.dumps(facts))
    with pytest.raises(StateError, match="shard 1 was on node 203.0.113.9"):
        start(path, name=name)
    cluster = start(path, name=name, allow_lost=True)
    assert [one.state for one in cluster.status()] == ["serving", "lost"]
    with start_moto() as port, S3Server(port, "bucket") as server:
        where = S3Store.from_url(
            "s3://bucket/run-1", endpoint=server.url, access_key_id="key", secret_access_key="secret",
            region="us-east-1", client_options={"allow_http": True},
        )  # fmt: skip
        expstore.cold.push(tmp_path / "run-1.exp", where)
        done = cluster.replace(1, from_=where)
    assert (done.shard, done.rows, done.missing) == (2, len(expected), None)
    with cluster.buffer() as rb:
        assert set(rb.shards) == {0, 2}
        found = rb.shards[2].sql("SELECT action FROM transitions ORDER BY _id").fetchall()
        assert found == expected
    cluster.stop()


@pytest.mark.torture
def test_the_blocks_of_its_page_run(connected: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "cluster.md").read_text().partition("\n## Shards on Ray\n")[2]
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 4
    monkeypatch.setattr(ray, "init", lambda: None)  # this process is connected already
    names: dict[str, Any] = {"batch": batch_of}
    # The second block is another program, which has a buffer of its own.
    with contextlib.ExitStack() as stack:
        for block in blocks:
            exec(compile(block.replace("/data", str(tmp_path)), "docs/cluster.md", "exec"), names)
            stack.callback(names["rb"].close)
        assert names["states"] == ["serving"] * 3
        assert 0 < names["rows"].count() <= 4000
    names["cluster"].stop()


def run_python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=folder
    )


def test_without_ray_the_error_says_what_to_install(tmp_path: Path) -> None:
    code = "import sys; sys.modules['ray'] = None; import expstore; expstore.cluster.ray.start"
    assert "pip install 'expstore[ray]'" in run_python(code, tmp_path).stderr


def test_without_a_connection_to_ray_nothing_is_started(tmp_path: Path) -> None:
    done = run_python("import expstore; expstore.cluster.ray.start('run-{shard}.exp')", tmp_path)
    assert "StateError: this process is not connected to Ray; call ray.init() first" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_start_that_fails_ends_the_shards_that_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from expstore.on_ray import cluster as module

    node, ended = module.Node("id", "127.0.0.1"), []

    def start_shard(shard: Any, _: object) -> str:
        if shard.number == 2:
            raise StateError("an actor of this name runs already", kind="exists")
        return f"actor {shard.number}"

    for name, replacement in {
        "check_initialized": lambda: None, "has_actor": lambda _: False, "find_head": lambda: node,
        "run_on": lambda *_: None, "choose_nodes": lambda _: [node], "start_shard": start_shard,
        "submit": lambda *_: module.Found(None, 1), "wait_for": lambda answer: answer,
    }.items():  # fmt: skip
        monkeypatch.setattr(module, name, replacement)
    monkeypatch.setattr(ray, "kill", lambda actor, *, no_restart: ended.append(actor))
    with pytest.raises(StateError, match="runs already"):
        module.start(tmp_path / "run-{shard}.exp", shards=3)
    assert ended == ["actor 0", "actor 1"]
