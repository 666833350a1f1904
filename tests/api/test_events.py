"""Streams of events: what they say, when they end, and that slow or many clients harm no one."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import expstore
from expstore.api import Settings
from expstore.api.routes import events
from tests.support.arrow_bodies import batch_of, post_rows
from tests.support.asgi import api_client, refusal_of
from tests.support.servers import Serving
from tests.support.waits import wait_until

RUN = "/v1/stores/run"
#: For what must happen; the machine may be busy.
PATIENCE = 60.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Serving]:
    with expstore.open(tmp_path / "run.exp") as rb:
        rb.extend(batch_of(20))
    with Serving(Settings(path=tmp_path)) as server:
        yield server
        wait_until(lambda: not listeners(server))


@pytest.fixture
def client(server: Serving) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
        yield client


def listeners(server: Serving) -> int:
    found: int = server.app.state.stores.listeners.borrowed_tokens
    return found


def read_events(answer: httpx.Response) -> Iterator[dict[str, int]]:
    """Yield the data of events as they come."""
    assert answer.status_code == 200
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    lines = answer.iter_lines()
    for line in lines:
        if line.startswith(":") or not line:
            continue
        assert line == "event: grew"
        yield json.loads(next(lines).removeprefix("data: "))


@pytest.mark.slow
def test_an_event_at_once_and_one_for_growth(client: httpx.Client) -> None:
    with client.stream("GET", f"{RUN}/events") as answer:
        found = read_events(answer)
        assert next(found) == {"rows": 20, "written": 20, "episodes": 2, "generation": 2}
        began = time.monotonic()
        for first in range(20, 40, 5):
            post_rows(client, 5, first).raise_for_status()
        told = next(found)
        while told["rows"] < 40:
            told = next(found)
        assert told == {"rows": 40, "written": 40, "episodes": 4, "generation": 2}
        client.post(f"{RUN}/dumps", json={"tag": "first"}).raise_for_status()
        post_rows(client, 10, 40).raise_for_status()
        assert next(found)["rows"] == 50
        assert time.monotonic() - began > 1.0


def test_a_stream_may_end_by_itself(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "run.exp") as rb:
        rb.extend(batch_of(20))
    with api_client(tmp_path) as client:
        answer = client.get(f"{RUN}/events", params={"count": 1})
        assert answer.text == (
            'event: grew\ndata: {"rows": 20, "written": 20, "episodes": 2, "generation": 2}\n\n'
        )
        assert answer.headers["Cache-Control"] == "no-store"
        assert client.get("/v1/stores/none/events").status_code == 404
        foreign = client.get(f"{RUN}/events", headers={"Sec-Fetch-Site": "cross-site"})
        assert refusal_of(foreign) == (403, "origin")


def test_comments_keep_a_quiet_stream_open(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_QUIET", 0.1)
    monkeypatch.setattr(events, "_PAUSE", 0.05)
    with client.stream("GET", f"{RUN}/events") as answer:
        lines = answer.iter_lines()
        found = [next(lines) for _ in range(6)]
        assert found[0] == "event: grew"
        assert found[3:] == [": nothing new", "", ": nothing new"]


@pytest.mark.slow
def test_a_reader_tells_what_another_process_writes(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "run.exp") as rb:
        rb.extend(batch_of(20))
        rb.flush()  # readers see small batches 0.1 s later otherwise
        with (
            Serving(Settings(path=tmp_path, read_only=True)) as server,
            httpx.Client(base_url=server.url, timeout=PATIENCE) as client,
            client.stream("GET", f"{RUN}/events") as answer,
        ):
            found = read_events(answer)
            assert next(found) == {"rows": 20, "written": 20, "episodes": 2, "generation": 1}
            rb.extend(batch_of(10, 20))
            assert next(found) == {"rows": 30, "written": 30, "episodes": 3, "generation": 1}


def test_streams_are_limited_and_others_go_on(server: Serving, client: httpx.Client) -> None:
    """A slow client, which reads nothing, takes its place and blocks no one."""
    head = f"GET {RUN}/events HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    with contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(socket.create_connection(("127.0.0.1", server.port))) for _ in range(32)]
        for one in crowd:
            one.sendall(head)
        wait_until(lambda: listeners(server) == 32)
        assert refusal_of(client.get(f"{RUN}/events")) == (503, "busy")
        assert post_rows(client, 10, 20).status_code == 200
        assert client.get(RUN).json()["rows"] == 30
        crowd[0].close()
        wait_until(lambda: listeners(server) == 31)
        assert client.get(f"{RUN}/events", params={"count": 1}).status_code == 200


def test_streams_end_when_the_store_is_deleted(client: httpx.Client) -> None:
    with client.stream("GET", f"{RUN}/events") as answer:
        found = read_events(answer)
        next(found)
        deleted = client.delete(RUN, params={"confirm": "run"})
        assert deleted.status_code == 200, deleted.text
        assert list(found) == []


def test_streams_end_with_the_server(server: Serving, client: httpx.Client) -> None:
    with client.stream("GET", f"{RUN}/events") as answer:
        found = read_events(answer)
        next(found)
        server.app.state.stores.end()  # as `serve` does when a signal arrives
        assert list(found) == []
