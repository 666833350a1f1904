"""Groups of a served store: workers start them over connections, and a learner draws them over another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import expstore
from expstore.api import Settings
from expstore.errors import ArgumentError, NotFoundError, NotReadyError, StateError
from expstore.remote import Retries
from tests.support.asgi import api_client
from tests.support.servers import Serving
from tests.support.waits import ManualClock, wait_until

SOON = Retries(seconds=60, first=0.01, longest=0.05, seed=3)
ROLES = {"group": "group", "group_size": 2, "traj": "traj"}
SAMPLER = {"kind": "groups", "groups_per_batch": 1, "max_lag": 1}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "run.exp"
    expstore.open(path, episodes=ROLES, seed=3).close()
    return path


@pytest.fixture
def server(path: Path) -> Iterator[Serving]:
    with Serving(Settings(path=path.parent, clock=ManualClock(), sql_seconds=200.0)) as server:
        yield server


def connect(server: Serving) -> Any:
    address = f"http://127.0.0.1:{server.port}/run"
    return expstore.connect(address, retries=SOON, timeout=200.0, as_numpy=True)


def write(rb: Any, group: int, version: int, members: int = 2) -> None:
    """Append members of a group, each of one row."""
    ends = np.ones(members, bool)
    rb.extend(
        {
            "group": np.full(members, group),
            "traj": np.arange(members),
            "policy_version": np.full(members, version),
            "next": {"reward": np.arange(members) / 2, "terminated": ends, "done": ends},
        }
    )


@pytest.mark.guarantee("consumers/admission")
def test_workers_and_a_learner_on_other_machines(server: Serving) -> None:
    with connect(server) as worker, connect(server) as other, connect(server) as rb:
        with rb.consumer("learner", sampler=SAMPLER) as learner:
            slow = worker.groups.start(version=0)
            with other.groups.start(version=0, consumer="learner") as fast:
                write(other, fast.id, 0)
            with pytest.raises(NotReadyError) as caught:
                worker.groups.start(version=0)
            assert (caught.value.version, caught.value.lag) == (0, 2)
            with pytest.raises(NotReadyError, match="waits for group"):
                learner.sample()
            write(worker, slow.id, 0)
            slow.close()  # it is complete
            drawn = [learner.sample()["group"].tolist() for _ in range(2)]
            assert drawn == [[slow.id] * 2, [fast.id] * 2]
            late = worker.groups.start(version=lambda: learner.position["draw"], timeout=60.0)
            assert (late.version, late.lag) == (2, 0)
            with pytest.raises(ArgumentError, match="newer than that of the learner"):
                worker.groups.start(version=3)


def test_groups_are_queried_closed_and_discarded(server: Serving) -> None:
    with connect(server) as rb:
        write(rb, 7, 0)
        write(rb, 8, 0, members=1)
        rb.groups.discard(1, reason="no signal")
        rb.groups.close(3)
        found = rb.groups(order_by="key").arrow().select(["key", "status", "reason", "length"]).to_pylist()
        assert [list(row.values()) for row in found] == [
            ["7", "discarded", "no signal", 2], ["8", "complete", None, 1],
        ]  # fmt: skip
        assert rb.groups("std_return > $least", params={"least": 0.1}, limit=1).arrow().num_rows == 1
        with pytest.raises(StateError, match="discarded already"):
            rb.groups.discard(1, reason="again")
        for number in (2, -1):
            with pytest.raises(NotFoundError):
                rb.groups.close(number)
        with pytest.raises(ArgumentError, match="reason must be text"):
            rb.groups.discard(3, reason="")
        with pytest.raises(NotReadyError, match="no consumer that limits the lag"):
            rb.groups.start(version=0)


@pytest.mark.parametrize("silent", [False, True])
def test_the_groups_of_a_lost_worker_are_discarded(silent: bool, server: Serving) -> None:
    with connect(server) as rb, rb.consumer("learner", sampler=SAMPLER):
        worker = connect(server)
        half, empty = (worker.groups.start(version=0) for _ in range(2))
        write(worker, half.id, 0, members=1)
        served = server.app.state.stores.get("run")
        if silent:
            served.end_silent()
            assert len(served.rb._store.catalog.groups.places) == 2
            worker._connection._get_in_process().ended.set()  # no more heartbeats
            served._settings.clock.now += served._settings.session_timeout + 1
            wait_until(lambda: not (served.end_silent() or served.rb._store.catalog.groups.places))
        else:
            worker.close()
        assert rb.groups.start(version=0).lag == 0
        (lost,) = rb.groups().arrow().to_pylist()
        assert (lost["key"], lost["status"], lost["reason"]) == (str(half.id), "discarded", "lost")
        assert str(empty.id) not in served.rb._store.catalog.groups.places
        worker.close()


def test_a_repeated_request_starts_one_group(path: Path) -> None:
    run = "/v1/stores/run"
    with api_client(path.parent) as client:
        answer = client.put(f"{run}/consumers/learner", json={"sampler": SAMPLER})
        assert answer.status_code == 200, answer.text
        asked = [
            client.post(f"{run}/groups", json={"version": 0}, headers={"Idempotency-Key": key}).json()
            for key in ("1", "1", "2", "3", "3")
        ]
        assert asked[0] == asked[1]
        assert [one["lag"] for one in asked] == [0, 0, 1, 2, 2]
        assert asked[3]["id"] is None
        for _ in range(2):  # the key makes the second one the same request
            body = {"status": "abandoned", "reason": "x", "started": True}
            headers = {"Idempotency-Key": "4"}
            ended = client.post(f"{run}/groups/{asked[0]['id']}/end", json=body, headers=headers)
            assert ended.status_code == 200, ended.text
        assert client.post(f"{run}/groups", json={"version": 0}).json()["lag"] == 1


def test_what_the_sampler_of_groups_refuses(server: Serving) -> None:
    with connect(server) as rb:
        with pytest.raises(ArgumentError, match="decides how many rows"):
            rb.consumer("learner", sampler=SAMPLER, batch_size=4)
        with pytest.raises(Exception, match="does not take where"):
            rb.consumer("learner", sampler=SAMPLER, where="_step < 3")
    with api_client(server.app) as client:
        body = {"sampler": SAMPLER, "batch_size": 4}
        assert client.put("/v1/stores/run/consumers/x", json=body).status_code == 422
