"""Facts that clients attach to episodes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import expstore
from tests.support.arrow_bodies import batch_of
from tests.support.asgi import api_client, refusal_of
from tests.support.servers import serving

RUN = "/v1/stores/run/episodes"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with expstore.open(tmp_path / "run.exp") as rb:
        rb.extend(batch_of(25), episode_info={"site": "lab"})
    return tmp_path


@pytest.fixture
def client(folder: Path) -> Iterator[httpx.Client]:
    with api_client(folder) as client:
        yield client


def annotate(client: httpx.Client, episode: object, info: Any) -> httpx.Response:
    return client.patch(f"{RUN}/{episode}", json={"info": info})


def test_facts_are_merged(client: httpx.Client) -> None:
    facts = {"flag": True, "note": "<script>\"'\u202e", "self": 1, "episode_id": {"a": []}}
    assert annotate(client, 1, facts).json() == {"episode_id": 1, "info": {"site": "lab"} | facts}
    again = annotate(client, 1, {"site": None, "flag": False, "episode_id": None}).json()["info"]
    assert again == {"flag": False, "note": "<script>\"'\u202e", "self": 1}
    assert annotate(client, 2, {}).json()["info"] == {"site": "lab"}
    assert annotate(client, 3, {"site": None}).json()["info"] == {}
    for episode in (0, 4, 1 << 62):
        assert refusal_of(annotate(client, episode, {"flag": True})) == (404, "not_found")


def test_facts_that_are_refused_change_nothing(client: httpx.Client) -> None:
    before = client.get(RUN).json()
    deep: list[Any] = []
    for _ in range(30):
        deep = [deep]
    assert annotate(client, 1, {"x": deep}).json()["info"]["x"] == deep
    assert annotate(client, 1, {"x": [deep]}).status_code == 422
    annotate(client, 1, {"x": None}).raise_for_status()
    for body in (
        "{}", '{"info": []}', '{"info": {"x": NaN}}', '{"info": {"x": "\\ud800"}}', '{"info": {}, "more": 1}',
        '{"info": {"x": ' + "[" * 700 + "]" * 700 + "}}", '{"info": {"x": ' + "[" * 9000 + "]" * 9000 + "}}",
    ):  # fmt: skip
        answer = client.patch(f"{RUN}/1", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code in (400, 422), (body[:40], answer.text)
    assert refusal_of(annotate(client, 1, {"x": "x" * 70_000})) == (413, "too_large")
    assert client.get(RUN).json() == before


@pytest.mark.guarantee("server/rows")
@pytest.mark.slow
def test_facts_survive_a_kill(folder: Path) -> None:
    with serving(folder) as (child, told), httpx.Client(base_url=told["listening"], timeout=60) as client:
        assert annotate(client, 2, {"flag": True}).status_code == 200
        child.kill()
        child.wait(60)
    with expstore.open(folder / "run.exp") as rb:
        (row,) = rb.sql("SELECT info FROM episodes WHERE episode_id = 2").fetchall()
        assert json.loads(row[0]) == {"site": "lab", "flag": True}
