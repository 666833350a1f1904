"""What happens to every request before and after its route: permissions, records, bodies, shutdown."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from expstore.api import Settings, create_app
from expstore.api.errors import Refusal
from expstore.api.gateway import JSON_BYTES
from expstore.api.shards_app import create_shards_app
from expstore.cluster.members import FixedMembers
from tests.support.asgi import ask, call, refusal_of

READ, WRITE = ({"Authorization": f"Bearer {token}"} for token in ("reads", "writes"))
HOST = (b"host", b"127.0.0.1")
#: The first half of a body.
HALF: Message = {"type": "http.request", "body": b"12345", "more_body": True}
REST: Message = {"type": "http.request", "body": b"67890", "more_body": False}
#: A route that the tests replace by an ASGI application.
PATH = "/of-the-test"


def create(folder: Path, *, is_of_shards: bool = False, **settings: Any) -> FastAPI:
    """Return an application with two tokens."""
    known = Settings(path=folder, token=b"writes", read_token=b"reads", **settings)
    return (
        create_shards_app(FixedMembers(["http://127.0.0.1:9/run"]), known)
        if is_of_shards
        else create_app(known)
    )


@pytest.fixture
def access(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """Return a function that returns the lines of the access log."""
    with caplog.at_level(logging.INFO, "expstore.access"):
        yield lambda: [
            json.loads(one.getMessage()) for one in caplog.records if one.name == "expstore.access"
        ]


# -- routes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "/exp"])
def test_a_method_that_a_path_lacks(tmp_path: Path, prefix: str) -> None:
    """Allow names the methods of all routes of the path, below a prefix too."""
    usual, reading, shards = (
        create(tmp_path),
        create(tmp_path, read_only=True),
        create(tmp_path, is_of_shards=True),
    )
    for app, path, allowed in (
        (usual, "/v1/stores/run", {"DELETE", "GET", "PUT"}),
        (reading, "/v1/stores/run", {"GET"}),
        (usual, "/v1/stores/run/samplers/mine", {"DELETE", "PUT"}),
        (usual, "/v1/stores/run/sql", {"GET", "POST"}),
        (usual, "/v1/stores/run/extend", {"POST"}),
        (usual, "/v1/stores/run/episodes/1", {"GET", "PATCH"}),
        (reading, "/v1/stores/run/episodes/1", {"GET"}),
        (usual, "/v1/stores/run/episodes/end", {"POST"}),
        (usual, "/healthz", {"GET"}),
        (usual, "/", {"GET"}),
        (usual, "/docs", {"GET"}),
        (usual, "/ui/app.js", {"GET", "HEAD"}),
        (usual, "/openapi.json", {"GET", "HEAD"}),
        (shards, "/v1/stores/run/sql", {"GET", "POST"}),
        (shards, "/v1/stores", {"GET"}),
    ):

        async def request(client: httpx.AsyncClient, path: str = path) -> httpx.Response:
            return await client.request("BREW", f"{prefix}{path}", headers=WRITE)

        answer = ask(app, request, root_path=prefix)
        assert refusal_of(answer) == (405, "method"), path
        assert set(answer.headers["Allow"].split(", ")) == allowed, path
        error = answer.json()["error"]
        assert error["message"] == f"{prefix}{path} does not take BREW"
        assert error["hint"].startswith(f"use {answer.headers['Allow'].replace(', ', ' or ')}")
        assert error["hint"].endswith("; this server only reads its stores") is (app is reading)


#: Requests: method, path, headers, status, and the route that is noted.
REQUESTS = [
    ("GET", "/nowhere", READ, 404, "(none)"),
    ("HEAD", "/nowhere", READ, 404, "(none)"),
    ("OPTIONS", "/nowhere", READ, 404, "(none)"),
    ("GET", "/nowhere", {}, 401, "(none)"),
    ("POST", "/nowhere", READ, 403, "(none)"),
    ("BREW", "/nowhere", READ, 403, "(none)"),
    ("POST", "/nowhere", WRITE, 404, "(none)"),
    ("GET", "/docs", {}, 401, "(none)"),
    ("GET", "/docs", READ, 200, "(none)"),
    ("GET", "/openapi.json", READ, 200, "(none)"),
    ("GET", "/docs-assets/favicon.png", READ, 200, "(none)"),
    ("GET", "/v1/stores/", READ, 404, "(none)"),
    ("GET", "/healthz/", {}, 401, "(none)"),
    ("HEAD", "/v1/stores", READ, 405, "/v1/stores"),
    ("OPTIONS", "/v1/stores/run/extend", READ, 405, "/v1/stores/{name}/extend"),
    ("PATCH", "/v1/stores/run", READ, 403, "/v1/stores/{name}"),
    ("PATCH", "/v1/stores/run", WRITE, 405, "/v1/stores/{name}"),
    ("HEAD", "/healthz", READ, 405, "/healthz"),
    ("HEAD", "/healthz", {}, 401, "/healthz"),
    ("GET", "/", {}, 307, "/ui"),
    ("GET", "/ui", {}, 307, "/ui"),
    ("GET", "/ui/", {}, 200, "/ui"),
    ("HEAD", "/ui/app.js", {}, 200, "/ui"),
    ("GET", "/ui/none", {}, 404, "/ui"),
    ("HEAD", "/", {}, 405, "/ui"),
    ("POST", "/ui/app.js", {}, 401, "(none)"),
    ("POST", "/", READ, 403, "(none)"),
    ("GET", "/uix", {}, 401, "(none)"),
]
#: As `REQUESTS`, of the page over shards: they need the token of a server that only reads.
REQUESTS_OF_SHARDS = [
    ("GET", "/", {}, 307, "/ui"),
    ("GET", "/v1/stores", {}, 401, "/v1/stores"),
    ("POST", "/v1/stores/shard-0/sql", {}, 401, "/v1/stores/{name}/sql"),
    ("POST", "/v1/stores/shard-1/sql", READ, 404, "/v1/stores/{name}/sql"),
    ("POST", "/v1/stores/shard-0/sample", READ, 403, "/v1/stores/{name}/sample"),
    ("GET", "/v1/stores/shard-1/episodes/7", READ, 404, "/v1/stores/{name}/episodes/{episode}"),
    ("POST", "/v1/stores/shard-0/extend", READ, 403, "(none)"),
    ("GET", "/v1/stores/shard-1/new/route", READ, 404, "(none)"),
    ("DELETE", "/v1/stores/shard-0", READ, 403, "/v1/stores/{name}"),
    ("PUT", "/v1/stores/shard-0/samplers/mine", READ, 403, "/v1/stores/{name}/samplers/{sampler}"),
    ("GET", "/openapi.json", READ, 200, "(none)"),
    ("GET", "/healthz", {}, 200, "/healthz"),
]


@pytest.mark.parametrize(("is_of_shards", "prefix"), [(False, ""), (False, "/exp"), (True, "")])
def test_who_may_ask_and_what_is_noted(
    tmp_path: Path, access: Callable[[], list[dict[str, Any]]], is_of_shards: bool, prefix: str
) -> None:
    app = create(tmp_path, is_of_shards=is_of_shards, read_only=is_of_shards)
    requests = REQUESTS_OF_SHARDS if is_of_shards else REQUESTS

    async def check(client: httpx.AsyncClient) -> None:
        for method, path, token, status, _ in requests:
            answer = await client.request(method, f"{prefix}{path}", headers=token)
            assert answer.status_code == status, (method, path)

    ask(app, check, root_path=prefix)
    counts = Counter[str]()
    for line, (method, path, _, status, route) in zip(access(), requests, strict=True):
        named = method if method != "BREW" else "other"
        assert (line["route"], line["status"], line["method"]) == (route, status, named)
        assert line["path"] == f"{prefix}{path}"
        counts[f'method="{named}",route="{route}",status="{status}"'] += 1
    figures = app.state.metrics.render("")[0].decode().splitlines()
    assert {f"expstore_requests_total{{{labels}}} {n}.0" for labels, n in counts.items()} <= {*figures}


def test_only_probes_may_omit_the_host(tmp_path: Path, access: Callable[[], list[dict[str, Any]]]) -> None:
    """As clients that speak HTTP/1.0 do."""
    app = create(tmp_path)
    for path, status in (("/healthz", 200), ("/readyz", 200), ("/", 307), ("/v1/stores", 400), ("/x", 400)):
        (start, *_) = asyncio.run(call(app, path=path, headers=[]))
        assert start["status"] == status, path
    assert [line["may"] for line in access()] == ["nothing"] * 3 + [None] * 2
    (start, *_) = asyncio.run(call(app, path="/healthz", headers=[(b"host", b"evil.example")]))
    assert start["status"] == 400


def test_a_newline_after_a_path_changes_nothing(
    tmp_path: Path, access: Callable[[], list[dict[str, Any]]]
) -> None:
    """Starlette routes such a path like the one without it, so the same limits and permission hold."""
    app = create(tmp_path)
    for token, length, status in (("writes", JSON_BYTES + 1, 413), ("reads", 2, 404), ("none", 2, 401)):
        headers = [
            HOST,
            (b"authorization", f"Bearer {token}".encode()),
            (b"content-length", str(length).encode()),
        ]
        incoming: list[Message] = [{"type": "http.request", "body": b'{"ids": [1]}', "more_body": False}]
        path = "/v1/stores/run/rows\n"
        (start, *_) = asyncio.run(call(app, method="POST", path=path, headers=headers, incoming=incoming))
        assert start["status"] == status, token
    assert {line["route"] for line in access()} == {"/v1/stores/{name}/rows"}


# -- bodies --------------------------------------------------------------------------------------------


def run(
    folder: Path,
    act: Callable[[Receive, Send], Awaitable[None]],
    *,
    incoming: tuple[Message, ...],
    headers: Iterable[tuple[bytes, bytes]] = (),
    **settings: Any,
) -> list[Message]:
    """Return what is sent for a POST that a function answers."""
    app = create(folder, **settings)

    class Endpoint:
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            await act(receive, send)

    app.router.routes.append(Route(PATH, Endpoint()))  # type: ignore[arg-type]
    sent = [HOST, (b"authorization", b"Bearer writes"), *headers]
    return asyncio.run(call(app, method="POST", path=PATH, headers=sent, incoming=incoming))


START: Message = {"type": "http.response.start", "status": 200, "headers": []}
FIRST: Message = {"type": "http.response.body", "body": b"first", "more_body": True}
LAST: Message = {"type": "http.response.body", "body": b"last", "more_body": False}


def test_a_body_is_too_long_while_the_route_answers(
    tmp_path: Path, access: Callable[[], list[dict[str, Any]]]
) -> None:
    """A response that has begun cannot become a refusal: it ends as the route ends it."""

    async def act(receive: Receive, send: Send) -> None:
        await send(START)
        await send(FIRST)
        assert (await receive())["more_body"]
        with pytest.raises(Refusal, match="more than 8 bytes"):
            await receive()
        with pytest.raises(Refusal, match="more than 8 bytes"):  # and no part after it
            await receive()
        await send(LAST)

    sent = run(tmp_path, act, incoming=(HALF, REST), max_body=8)
    assert [message["type"].rpartition(".")[2] for message in sent] == ["start", "body", "body"]
    assert (sent[0]["status"], sent[1]["body"], sent[2]["body"]) == (200, b"first", b"last")
    (line,) = access()
    assert (line["status"], line["bytes_in"], line["bytes_out"]) == (200, 10, 9)


def test_a_refusal_replaces_the_response_of_the_route(
    tmp_path: Path, access: Callable[[], list[dict[str, Any]]]
) -> None:
    """A route, or FastAPI, may make an error of its own of a body that it could not read."""

    async def act(receive: Receive, send: Send) -> None:
        assert (await receive())["more_body"]
        with pytest.raises(Refusal, match="more than 8 bytes"):
            await receive()
        await send(START)
        await send(LAST)

    sent = run(tmp_path, act, incoming=(HALF, REST), max_body=8)
    assert len(sent) == 2
    assert sent[0]["status"] == 413
    assert json.loads(sent[1]["body"])["error"]["kind"] == "too_large"
    assert access()[0]["status"] == 413


def test_a_route_fails_after_its_response_has_begun(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, access: Callable[[], list[dict[str, Any]]]
) -> None:
    """The server hears of it, and ends the connection."""

    async def act(receive: Receive, send: Send) -> None:
        await send(START)
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        run(tmp_path, act, incoming=(REST,))
    assert access()[0]["status"] == 200
    assert any(record.exc_info and record.name == "expstore.api" for record in caplog.records)


# -- shutdown ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reads", "starts", "status", "kind"),
    [(False, False, 503, "busy"), (True, False, 500, "stopped"), (True, True, 200, None)],
)
def test_a_request_that_the_shutdown_cancels(
    tmp_path: Path,
    access: Callable[[], list[dict[str, Any]]],
    reads: bool,
    starts: bool,
    status: int,
    kind: str | None,
) -> None:
    """What a client hears depends on whether its request may have been executed."""

    async def act(receive: Receive, send: Send) -> None:
        if reads:
            await receive()
        if starts:
            await send(START)
        raise asyncio.CancelledError

    sent = run(tmp_path, act, incoming=(REST,))
    assert sent[0]["status"] == status
    assert len(sent) == (1 if kind is None else 2)
    if kind is not None:
        error = json.loads(sent[1]["body"])["error"]
        assert error["kind"] == kind
        assert ("idempotency" in error["hint"]) is (kind == "stopped")
        assert ((b"connection", b"close") in sent[0]["headers"]) is (kind == "busy")
    assert access()[0]["status"] == status


# -- bodies that a route leaves unread ------------------------------------------------------------------


def test_a_response_that_has_begun_hears_that_its_client_has_gone(tmp_path: Path) -> None:
    """Such as a stream of events that was asked for with a body: the connection stays usable."""
    received: list[Message] = []

    async def act(receive: Receive, send: Send) -> None:
        await send(START)
        await send(LAST)
        received.append(await receive())

    sent = run(tmp_path, act, incoming=(), headers=[(b"content-length", b"10")])
    assert received == [{"type": "http.disconnect"}]
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]


def test_a_body_that_ends_early_is_refused_before_the_response(tmp_path: Path) -> None:
    received: list[Message] = []

    async def act(receive: Receive, send: Send) -> None:
        received.append(await receive())

    sent = run(tmp_path, act, incoming=(), headers=[(b"content-length", b"10")])
    assert received == []
    assert sent[0]["status"] == 400
    assert b"the body ended early" in sent[1]["body"]


def test_lengths_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    """uvicorn refuses most of these itself; other servers pass them on."""

    async def act(receive: Receive, send: Send) -> None:
        await send(START)
        await send(LAST)

    for status, lengths, others in (
        *((400, [length], []) for length in (b"ten", b"", b"-1", b"+1", b"1_0", b"1, 2")),
        (400, [b"\xb2"], []),  # a digit of Latin-1 to str.isdigit
        (400, [b"5"], [b"chunked"]),
        (413, [b"9" * 5000], []),
        (200, [b"0" * 5000 + b"5"], []),
        (200, [b" 5 "], []),
        (200, [], [b"chunked"]),
        (200, [b"5", b"5"], []),
        (400, [b"5", b"6"], []),
    ):
        headers = [(b"content-length", one) for one in lengths]
        headers += [(b"transfer-encoding", one) for one in others]
        assert run(tmp_path, act, incoming=(), headers=headers)[0]["status"] == status, headers
