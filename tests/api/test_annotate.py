"""Facts that clients attach to episodes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import expstore
from expstore.api import Settings
from tests.support.arrow_bodies import batch_of
from tests.support.servers import Serving, serving

RUN = "/v1/stores/run/episodes"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with expstore.open(tmp_path / "run.exp") as rb:
        rb.extend(batch_of(25), episode_info={"site": "lab"})
    return tmp_path


@pytest.fixture
def client(folder: Path) -> Iterator[httpx.Client]:
    with Serving(Settings(path=folder)) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def annotate(client: httpx.Client, episode: object, info: Any) -> httpx.Response:
    return client.patch(f"{RUN}/{episode}", json={"info": info})


def test_facts_are_merged(client: httpx.Client, folder: Path) -> None:
    first = annotate(
        client, 1, {"flag": True, "note": "<script>\"'\u202e", "self": 1, "episode_id": {"a": []}}
    )
    assert first.json() == {
        "episode_id": 1,
        "info": {
            "site": "lab",
            "flag": True,
            "note": "<script>\"'\u202e",
            "self": 1,
            "episode_id": {"a": []},
        },
    }
    again = annotate(client, 1, {"site": None, "flag": False, "episode_id": None}).json()["info"]
    assert again == {"flag": False, "note": "<script>\"'\u202e", "self": 1}
    assert annotate(client, 2, {}).json()["info"] == {"site": "lab"}
    assert annotate(client, 3, {"site": None}).json()["info"] == {}
    for episode in (0, 4, 1 << 62):
        refused = annotate(client, episode, {"flag": True})
        assert (refused.status_code, refused.json()["error"]["kind"]) == (404, "not_found")


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
    large = annotate(client, 1, {"x": "x" * 70_000})
    assert (large.status_code, large.json()["error"]["kind"]) == (413, "too_large")
    assert client.get(RUN).json() == before


def test_readers_do_not_annotate(folder: Path) -> None:
    with (
        Serving(Settings(path=folder, read_only=True)) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        assert annotate(client, 1, {"flag": True}).status_code == 405
    with (
        Serving(Settings(path=folder, token=b"w", read_token=b"r")) as server,
        httpx.Client(base_url=server.url, headers={"Authorization": "Bearer r"}, timeout=60) as client,
    ):
        assert annotate(client, 1, {"flag": True}).status_code == 403


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
