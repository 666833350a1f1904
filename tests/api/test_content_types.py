"""Format of responses: JSON unless the Accept header asks for Arrow."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest

import expstore
from expstore.api import Settings
from tests.support.arrow_bodies import ACCEPT_ARROW, ARROW, post_rows, rows_of
from tests.support.asgi import api_client, refusal_of
from tests.support.servers import Serving

pytestmark = pytest.mark.index

RUN = "/v1/stores/run"
NDJSON = "application/x-ndjson"
#: What curl sends, a browser, clients that send no Accept header or an empty one, and httpx.
JSON_CLIENTS: list[dict[str, str]] = [
    {"Accept": "*/*"},
    {"Accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"},
    {},
    {"Accept": ""},
    {"Accept": "application/*"},
]
ARROW_CLIENTS = [
    ACCEPT_ARROW,
    {"Accept": f"*/*, {ARROW['Content-Type']}"},
    {"Accept": f"{ARROW['Content-Type']};compression=lz4, application/json;q=0.5"},
    {"Accept": "application/json;q=0, */*"},
]
#: Every route whose answer has two forms.
ROUTES: list[tuple[str, str, Any]] = [
    ("POST", f"{RUN}/sample", {"batch_size": 4, "seed": 1, "draw": 0}),
    ("POST", f"{RUN}/rows", {"ids": [3, 1]}),
    ("GET", f"{RUN}/episodes/1", None),
    ("GET", f"{RUN}/episodes", None),
    ("POST", f"{RUN}/sql", {"query": "SELECT 1 AS one"}),
    ("GET", f"{RUN}/sql?q=SELECT+1+AS+one", None),
]
STREAM = f"{RUN}/sample/stream"
BATCHES = {"batch_size": 4, "batches": 3, "seed": 1, "draw": 0}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder: Path = tmp_path_factory.mktemp("runs")
    with Serving(Settings(path=folder)) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        client.put(RUN, json={"seed": 3}).raise_for_status()
        post_rows(client, 30).raise_for_status()
        yield client


def ask(client: httpx.Client, method: str, path: str, body: Any, headers: dict[str, str]) -> httpx.Response:
    """Send a request with these headers, and no Accept header of httpx's."""
    request = client.build_request(method, path, json=body, headers=headers)
    if "Accept" not in headers:
        del request.headers["Accept"]
    return client.send(request)


def test_arrow_is_the_answer_for_those_who_ask_and_json_for_others(client: httpx.Client) -> None:
    for method, path, body in ROUTES:
        for headers in (*JSON_CLIENTS, *ARROW_CLIENTS):
            answer = ask(client, method, path, body, headers)
            assert answer.status_code == 200, (path, headers, answer.text)
            if headers in JSON_CLIENTS:
                assert answer.headers["Content-Type"] == "application/json", (path, headers)
                assert "rows" in answer.json()
            else:
                assert answer.headers["Content-Type"] == ARROW["Content-Type"], (path, headers)
                assert pa.ipc.open_stream(answer.content).read_all().num_rows > 0


def test_both_formats_have_the_same_rows(client: httpx.Client) -> None:
    method, path, body = ROUTES[0]
    told = ask(client, method, path, body, {}).json()["rows"]
    rows = rows_of(ask(client, method, path, body, ACCEPT_ARROW).content)
    assert told["id"] == rows["id"].tolist()
    assert told["next.observation"] == rows["next", "observation"].tolist()


@pytest.mark.slow
def test_streams_are_lines_of_json(client: httpx.Client) -> None:
    with pa.ipc.open_stream(ask(client, "POST", STREAM, BATCHES, ACCEPT_ARROW).content) as reader:
        wanted = [batch.column("id").to_pylist() for batch in reader]
    for headers in (*JSON_CLIENTS, {"Accept": NDJSON}):
        answer = ask(client, "POST", STREAM, BATCHES, headers)
        assert answer.headers["Content-Type"] == NDJSON
        assert answer.text.endswith("\n")
        assert [json.loads(line)["rows"]["id"] for line in answer.text.splitlines()] == wanted
    with client.stream("POST", STREAM, json={"batch_size": 4}) as endless:
        lines = endless.iter_lines()
        assert [len(json.loads(next(lines))["rows"]["id"]) for _ in range(1000)] == [4] * 1000


def test_batches_of_a_stream_are_bounded_as_json_is(tmp_path: Path) -> None:
    with api_client(tmp_path, max_answer=10_000) as client:
        client.put(RUN, json={}).raise_for_status()
        post_rows(client, 30).raise_for_status()
        asked = {"batch_size": 100, "batches": 1}
        assert client.post(STREAM, json=asked, headers=ACCEPT_ARROW).status_code == 200
        assert client.post(STREAM, json=asked).status_code == 413


def test_other_types_are_refused(client: httpx.Client) -> None:
    for method, path, body in [*ROUTES, ("POST", STREAM, BATCHES)]:
        for headers in ({"Accept": "text/csv"}, {"Accept": "*/*;q=0"}):
            assert refusal_of(ask(client, method, path, body, headers)) == (406, "accept")


def test_connect_continues_with_arrow(client: httpx.Client) -> None:
    """Rows that JSON has no form for arrive; JSON would have null."""
    body = {"fields": {"x": "float32"}}
    client.put("/v1/stores/nan", json=body).raise_for_status()
    with expstore.connect(f"{client.base_url}/nan", batch_size=2) as rb:
        rb.extend({"x": [float("inf"), float("-inf")]})
        assert rb.sample()["x"].isinf().all()
        assert next(iter(rb))["x"].isinf().all()
        assert rb.by_id([1])["x"].item() == float("inf")
