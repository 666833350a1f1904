"""Routes that list changes and odd episodes, and the same lists over a connection."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import expstore
from expstore.api import Settings
from expstore.api.page import findings
from expstore.buffers.changes import ChangeList
from tests.support.asgi import api_client
from tests.support.servers import Serving
from tests.unit.buffers.test_changes import fill

pytestmark = pytest.mark.index
RUN = "/v1/stores/run"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("runs")
    with expstore.open(found / "run.exp") as rb:
        fill(rb, "sign")
    return found


@pytest.fixture(scope="module")
def expected(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    with expstore.open(folder / "run.exp", mode="r") as rb:
        return rb.episodes.changes().arrow().to_pylist(), rb.episodes.odd(5).arrow().to_pylist()


@pytest.fixture(params=[False, True], ids=["writer", "reader"])
def client(
    request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[httpx.Client]:
    monkeypatch.setattr(findings, "_KEEP_SECONDS", 0.0)
    with api_client(folder, read_only=request.param) as client:
        yield client


def test_changes_are_those_of_the_library(client: httpx.Client, expected: Any) -> None:
    found = client.get(f"{RUN}/changes").json()
    while found["measured"] < found["compared"]:  # each answer measures some episodes
        measured = found["measured"]
        found = client.get(f"{RUN}/changes").json()
        assert found["measured"] > measured
    assert found["compared"] == 240
    (one,), (local, *more) = found["changes"], expected[0]
    assert more == []
    assert {name: one[name] for name in one if name not in ("since", "until")} == {
        name: local[name] for name in one if name not in ("since", "until")
    }
    assert one["until"] is None
    odd = client.get(f"{RUN}/odd", params={"limit": 5}).json()
    assert odd["compared"] == 240
    assert odd["episodes"] == expected[1]


def test_limits(client: httpx.Client) -> None:
    for route in ("changes", "odd"):
        for limit in ("0", "1001", "x"):
            assert client.get(f"{RUN}/{route}", params={"limit": limit}).status_code == 422
        assert client.get(f"{RUN}/{route}", params={"where": "true"}).status_code == 422  # no text of clients
    assert client.get(f"{RUN}/odd", params={"threshold": 1e6}).json()["episodes"] == []


def test_answers_are_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    find = ChangeList.find
    monkeypatch.setattr(ChangeList, "find", lambda *args: calls.append(1) or find(*args))
    monkeypatch.setattr("expstore.api.recent_answers._TIMES", 1e9)
    with api_client(folder) as client:
        assert len({client.get(f"{RUN}/changes").content for _ in range(3)}) == 1
    assert len(calls) == 1


def test_a_connection_has_both(folder: Path, expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "_KEEP_SECONDS", 0.0)
    monkeypatch.setattr(findings, "_MEASURE_SECONDS", 60.0)
    with (
        Serving(Settings(path=folder, read_only=True)) as server,
        expstore.connect(f"{server.url}/run") as rb,
    ):
        assert rb.episodes.changes().arrow().to_pylist() == expected[0]
        assert rb.episodes.odd(5).arrow().to_pylist() == expected[1]
        with pytest.raises(expstore.errors.ExpStoreError):
            rb.episodes.changes(limit=-1)
