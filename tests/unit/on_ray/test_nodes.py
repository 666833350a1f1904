"""Shards on several nodes of Ray: a node that dies takes its shard with it, and the others go on."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import expstore
from expstore.errors import RemoteError, StateError
from tests.support.arrow_bodies import batch_of
from tests.support.paths import ROOT
from tests.support.s3_server import S3Server, start_moto
from tests.support.waits import wait_until

ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'expstore[ray]'")

pytestmark = [
    pytest.mark.torture,  # three nodes are some thirty processes
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # of Ray's own settings
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # its processes outlive the call that starts them
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

#: Addresses of two nodes. The head node has the address of the machine.
SECOND, THIRD = "127.0.0.2", "127.0.0.3"


@pytest.fixture
def moto() -> Iterator[S3Server]:
    """A server of objects, whose address the nodes have."""
    pytest.importorskip("moto", reason="moto is not installed: there is no server to ask")
    with start_moto() as port, S3Server(port, "bucket") as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server


@pytest.fixture
def nodes() -> Iterator[dict[str, Any]]:
    """Three nodes of Ray on this machine, each with an address and processes of its own."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        options: dict[str, Any] = {
            "num_cpus": 1, "include_dashboard": False, "object_store_memory": 100 << 20,
        }  # fmt: skip
        cluster = Cluster(initialize_head=True, head_node_args=dict(options))
        try:
            more = {one: cluster.add_node(node_ip_address=one, **options) for one in (SECOND, THIRD)}
            ray.init(address=cluster.address, logging_level="error", log_to_driver=False)
            cluster.wait_for_nodes()
            yield {"cluster": cluster} | more
        finally:
            ray.shutdown()
            cluster.shutdown()


def test_a_node_dies_and_its_shard_is_replaced_on_another(nodes: dict[str, Any], tmp_path: Path) -> None:
    head = ray.util.get_node_ip_address()
    cluster = expstore.cluster.ray.start(
        tmp_path / "run-{shard}.exp", shards=3, nodes=[head, SECOND, THIRD], name="nodes"
    )
    assert [one.node for one in cluster.status()] == [head, SECOND, THIRD]
    with cluster.buffer(batch_size=32, down="partial", wait=1) as rb:
        for number in range(12):
            rb.extend(batch_of(10, 10 * number), source=f"actor-{number}")
        assert set(rb.sample(256)["id"][:, 0].tolist()) == {0, 1, 2}
        rb.shards[2].snapshots.tag("kept")
        shutil.copytree(tmp_path / "run-2.exp" / "versions", tmp_path / "copy")  # to another disk
        kept = rb.shards[2].sql("SELECT _id, action FROM transitions ORDER BY _id").fetchall()

        nodes["cluster"].remove_node(nodes[THIRD], allow_graceful=False)
        wait_until(lambda: [one.state for one in cluster.status()] == ["serving", "serving", "lost"])
        assert set(rb.sample(256)["id"][:, 0].tolist()) == {0, 1}  # the others go on
        used = set()
        for k in range(12):
            with contextlib.suppress(RemoteError):  # a source of the lost shard
                used.add(int(rb.extend(batch_of(10, 500 + 10 * k), source=f"later-{k}")[0, 0]))
        assert used == {0, 1}
        with pytest.raises(RemoteError, match="the node of shard 2"):
            cluster.to_ray_dataset()
        with pytest.raises(StateError, match="answers at"):
            cluster.replace(1, from_=tmp_path / "copy")

        done = cluster.replace(2, from_=tmp_path / "copy")
        assert (done.shard, done.rows) == (3, len(kept))
        (status,) = [one for one in cluster.status() if one.number == 3]
        assert status.node in (head, SECOND)
        wait_until(lambda: set(rb.shards) == {0, 1, 3})
        assert rb.shards[3].sql("SELECT _id, action FROM transitions ORDER BY _id").fetchall() == kept
        assert set(rb.sample(256)["id"][:, 0].tolist()) == {0, 1, 3}
    found = cluster.to_ray_dataset(where="action < 120", fields=["action"])
    assert sorted(row["action"] for row in found.iter_rows()) == list(range(120))
    cluster.stop()


@pytest.mark.guarantee(
    "ship/shards",
    "A shard of a cluster on Ray whose node and disk are lost is restored on another node from what was"
    " shipped.",
)
def test_a_shard_that_is_shipped_moves_from_a_lost_node(
    moto: S3Server, nodes: dict[str, Any], tmp_path: Path
) -> None:
    """Then all disks and the cluster file are lost, and the same call restores the cluster."""

    def start() -> Any:
        return expstore.cluster.ray.start(
            tmp_path / "run-{shard}.exp", shards=3, nodes=[ray.util.get_node_ip_address(), SECOND, THIRD],
            name="shipped", server={"ship": "s3://bucket/runs"},
        )  # fmt: skip

    def read(rb: Any) -> list[Any]:
        found: list[Any] = rb.sql_each("SELECT _id, action, _episode FROM transitions").fetchall()
        return sorted(found)

    cluster = start()
    with cluster.buffer(batch_size=32, wait=120) as rb:
        for number in range(12):
            rb.extend(batch_of(10, 10 * number), source=f"actor-{number}")
        rb.update_priority(id=rb.sample()["id"], priority=2.0)
        rb.flush(shipped=True)
        expected, uuid = read(rb), rb.shards[2].stats()["uuid"]
        (tmp_path / "run-2.exp").rename(tmp_path / "lost")  # no other node has its disk
        nodes["cluster"].remove_node(nodes[THIRD], allow_graceful=False)
        for number in range(12):  # the writers wait for it
            rb.extend(batch_of(10, 500 + 10 * number), source=f"actor-{number}")
        assert {one.state for one in cluster.status()} == {"serving"}
        assert [one.number for one in cluster.status()] == [0, 1, 2]
        assert cluster.status()[2].node != THIRD
        assert rb.shards[2].stats()["uuid"] == uuid
        assert [row for row in read(rb) if row[1] < 500] == expected
        assert sorted(row[1] for row in read(rb) if row[1] >= 500) == list(range(500, 620))
        rb.flush(shipped=True)
        expected = read(rb)
    cluster.stop()
    for path in tmp_path.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    nodes["cluster"].add_node(node_ip_address=THIRD, num_cpus=1, include_dashboard=False)
    wait_until(lambda: len([one for one in ray.nodes() if one["Alive"]]) == 3)
    cluster = start()
    with cluster.buffer() as rb:
        assert read(rb) == expected
    cluster.stop()
