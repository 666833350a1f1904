"""Selections of a local store, through a worker of `rb.share()` and over a connection: one contract."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import expstore
from expstore.api import Settings
from expstore.errors import ArgumentError, ExpStoreError, NotFoundError, QueryError, StateError
from tests.support.asgi import api_client
from tests.support.servers import Serving

pytestmark = pytest.mark.usefixtures("no_syncs")


def write(path: Path) -> Any:
    """Return a store with four episodes of one row, two rows, ..."""
    rb = expstore.open(path, batches={"as_numpy": True})
    for count in (1, 2, 3, 4):
        ends = np.arange(count) == count - 1
        rb.extend({"x": np.full(count, count), "next": {"terminated": ends, "done": ends}})
    return rb


@pytest.fixture(params=["local", "worker", "served"])
def rb(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    made = write(tmp_path / "run.exp")
    if request.param == "local":
        with made:
            yield made
    elif request.param == "worker":
        with made.share() as owner, pickle.loads(pickle.dumps(owner)) as worker:
            yield worker
    else:
        made.close()
        with Serving(Settings(path=tmp_path, sql_seconds=200.0)) as server:
            address = f"http://127.0.0.1:{server.port}/run"
            with expstore.connect(address, timeout=200.0, as_numpy=True) as connected:
                yield connected


def test_selections_are_the_same_everywhere(rb: Any) -> None:
    clean = rb.selections.create("clean v1", "length > 1 -- more", reason="demos", by="ada")
    assert (clean.condition, clean.by, clean.reason) == ("length > 1 -- more", "ada", "demos")
    assert clean.version.startswith("1.")
    assert clean.episodes().tolist() == [2, 3, 4]
    rb.selections.exclude("clean v1", 3, reason="hangs", by="bob")
    rb.selections.include("clean v1", np.array([1]), reason="short", by="bob")
    rb.selections.create("some", episodes=[1, 4])
    found = rb.selections.diff("clean v1", "some")
    assert [ids.tolist() for ids in found] == [[2], [], [1, 4]]
    assert [(one["episode_id"], one["act"]) for one in clean.changes()] == [(3, "exclude"), (1, "include")]
    assert rb.selections(order_by="episodes DESC").arrow()["name"].to_pylist() == ["clean v1", "some"]
    assert rb.episodes("selection('some')").arrow()["episode_id"].to_pylist() == [1, 4]
    acts: list[tuple[Any, type[ExpStoreError]]] = [
        (lambda: rb.selections.create("some", "true"), StateError),
        (lambda: rb.selections.create("a/b", "true"), ArgumentError),
        (lambda: rb.selections.create("empty", "length > 9"), NotFoundError),
        (lambda: rb.selections.create("wrong", "nothing > 9"), QueryError),
        (lambda: rb.selections.exclude("clean v1", 9, reason="r"), NotFoundError),
        (lambda: rb.selections.exclude("none", 1, reason="r"), NotFoundError),
        (lambda: rb.selections.exclude("clean v1", 1, reason=""), ArgumentError),
        (lambda: rb.selections["none"], NotFoundError),
        (lambda: rb.episodes("selection('none')"), QueryError),
    ]
    for act, error in acts:
        with pytest.raises(error):
            act()
    rb.selections.drop("some")
    assert list(rb.selections) == ["clean v1"]


def test_a_sampler_of_a_server_draws_a_selection(tmp_path: Path) -> None:
    with write(tmp_path / "run.exp") as made:
        made.selections.create("clean", "length > 2")
    with api_client(tmp_path, sql_seconds=200.0) as client:
        body = {"batch_size": 64, "where": "selection('clean') AND x > 0"}
        answer = client.post("/v1/stores/run/sample", json=body, headers={"Accept": "application/json"})
        assert answer.status_code == 200, answer.text
        assert set(answer.json()["rows"]["x"]) == {3, 4}
        for where in ("selection(x)", "selection('a', 'b')", "selection('nothing')"):
            refused = client.post("/v1/stores/run/sample", json=body | {"where": where})
            assert refused.status_code == 422, refused.text
        key = {"Idempotency-Key": "1"}
        for _ in range(2):
            made_one = client.post(
                "/v1/stores/run/selections", json={"name": "b", "episodes": [1, 2, 2]}, headers=key
            )
            assert made_one.json() == {"name": "b", "episodes": 2}
        both = {"name": "c", "episodes": [1], "where": "true"}
        assert client.post("/v1/stores/run/selections", json=both).status_code == 422
