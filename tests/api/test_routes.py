"""The routes of the HTTP server: rows in, batches out, errors in one format."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from tensordict import TensorDict

import expstore
from tests.support.arrow_bodies import ACCEPT_ARROW, ARROW, batch_of, body_of, post_rows, rows_of
from tests.support.asgi import api_client, refusal_of

pytestmark = pytest.mark.index


@pytest.fixture
def client(tmp_path: Path) -> Iterator[httpx.Client]:
    with api_client(tmp_path) as client:
        yield client


def read(client: httpx.Client, *ids: int) -> TensorDict:
    return rows_of(client.post("/v1/stores/run/rows", json={"ids": ids}, headers=ACCEPT_ARROW).content)


def test_rows_go_in_and_come_out(client: httpx.Client, tmp_path: Path) -> None:
    assert client.put("/v1/stores/run", json={"capacity": 100, "seed": 3}).json() == {"name": "run"}
    data = batch_of(30)
    told = {"first_id": 1, "count": 30, "generation": 1, "largest_priority": 1.0}
    assert post_rows(client, 30).json() == told
    rows = read(client, 3, 1, 30)
    assert rows["id"].tolist() == [3, 1, 30]
    assert (rows.exclude("id", "index") == data[[2, 0, 29]]).all()
    episode = rows_of(client.get("/v1/stores/run/episodes/2", headers=ACCEPT_ARROW).content)
    assert (episode.exclude("id", "index") == data[10:20]).all()
    assert client.get("/v1/stores").json() == {"stores": ["run"], "access": "write", "sql": True}
    assert client.post("/v1/stores/run/flush").json() == {"status": "ok"}
    with expstore.open(tmp_path / "run.exp", mode="r") as rb:
        assert torch.equal(rb[:]["action"], data["action"])


def test_json_is_taken_as_it_is_meant(client: httpx.Client) -> None:
    fields = {"x": ["float32", [2]], "n": "uint8", "next.reward": ["float32", [1]]}
    client.put("/v1/stores/run", json={"fields": fields})
    row = {"x": [[1, 2.5]], "n": [7], "next.reward": [0.5]}
    assert client.post("/v1/stores/run/add", json=row).json()["first_id"] == 1
    found = client.post("/v1/stores/run/rows", json={"ids": [1]}, headers={"Accept": "application/json"})
    assert found.json()["rows"] == {
        "x": [[1.0, 2.5]],
        "n": [7],
        "next.reward": [0.5],
        "index": [0],
        "id": [1],
    }
    for bad in ({"n": [300]}, {"n": [1.5]}, {"n": [True]}, {"x": [[1]]}, {"x": [["a", "b"]]}, {"x": 3},
                {"x": [[True, 2]]}, {"x": [[0.5, False]]}):  # fmt: skip
        refused = client.post("/v1/stores/run/add", json=row | bad)
        assert refusal_of(refused) == (422, "schema"), bad
    assert client.get("/v1/stores/run").json()["rows"] == 1


def test_json_values_of_different_types_are_refused(client: httpx.Client) -> None:
    """NumPy would make one type of them: a 1 of a true."""
    fields = {"whole": "int64", "real": "float64", "flag": "bool", "grid": ["int32", [2, 2]]}
    for name, (good, bad) in {
        "whole": ([[1, 2]], [[True, 2], [2, True], [True, False], [1.0, 2], [1, None], [1, "2"]]),
        "real": ([[1, 2.5], [1, 2]], [[True, 2.5], [1, False], [True, False]]),
        "flag": ([[True, False]], [[True, 0], [1, False], [0, 1], [1.0, True]]),
        "grid": ([[[[1, 2], [3, 4]]]], [[[[1, 2], [3, True]]], [[[1, 2], [3, 4.0]]]]),
    }.items():
        shaped = {"x": fields[name]}
        client.put(f"/v1/stores/{name}", json={"fields": shaped}).raise_for_status()
        for values in bad:
            refused = client.post(f"/v1/stores/{name}/extend", json={"x": values})
            assert refusal_of(refused) == (422, "schema"), (name, values)
        for values in good:
            assert client.post(f"/v1/stores/{name}/extend", json={"x": values}).status_code == 200, values


def test_fields_that_came_late_may_be_missing(client: httpx.Client, tmp_path: Path) -> None:
    with expstore.open(tmp_path / "run.exp", schema={"x": "int64", "y": "float32"}) as rb:
        rb.extend(TensorDict({"x": torch.arange(3), "y": torch.zeros(3)}, [3]))
        rb.columns.add("score", fill=torch.tensor(7.0))
    without = TensorDict({"x": torch.arange(2), "y": torch.ones(2)}, [2])
    for sent in (
        {"content": body_of(without), "headers": ARROW},
        {"json": {"x": [5], "y": [1.5]}},
        {"content": body_of(without.set("score", torch.ones(2))), "headers": ARROW},
    ):
        answer = client.post("/v1/stores/run/extend", **sent)
        assert answer.status_code == 200, answer.text
    assert read(client, *range(1, 9))["score"].tolist() == [7.0] * 6 + [1.0] * 2
    for bad in (body_of(without.exclude("y")), body_of(without.set("other", torch.ones(2)))):
        assert client.post("/v1/stores/run/extend", content=bad, headers=ARROW).status_code == 422


def test_priorities_are_as_many_as_ids(client: httpx.Client) -> None:
    client.put("/v1/stores/run", json={"seed": 3}).raise_for_status()
    post_rows(client, 5).raise_for_status()
    good = client.post("/v1/stores/run/priorities", json={"ids": [1, 2], "priorities": [3.0, 4.0]})
    assert good.json() == {"updated": 2}
    for values in ([9.0], [9.0] * 3, []):
        refused = client.post("/v1/stores/run/priorities", json={"ids": [1, 2], "priorities": values})
        assert refused.status_code == 422
        assert f"2 ids have {len(values)} priorities" in refused.json()["error"]["message"]
    told = client.post("/v1/stores/run/sql", json={"query": "SELECT priority FROM priorities ORDER BY id"})
    assert [row[0] for row in told.json()["rows"]][:2] == [3.0, 4.0]
