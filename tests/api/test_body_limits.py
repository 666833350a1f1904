"""The limits of bodies for routes that leave the body unread."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from expstore.api import Settings
from expstore.api.gateway import Gateway
from expstore.api.metrics import Metrics
from tests.support.asgi import call

HOST = (b"host", b"127.0.0.1")


async def pass_request(
    app: Any, tmp_path: Path, headers: tuple[tuple[bytes, bytes], ...] = ((b"content-length", b"10"),)
) -> tuple[list[Message], list[Message]]:
    """Return what a route received, and what was sent, of a request whose client leaves before its body."""
    received: list[Message] = []
    gateway = Gateway(
        lambda *args: app(*args, received),
        routes=[],
        settings=Settings(path=tmp_path),
        metrics=Metrics(lambda: [], tmp_path),
    )
    return received, await call(gateway, method="POST", path="/", headers=[HOST, *headers], incoming=())


def test_a_response_that_has_begun_hears_that_its_client_has_gone(tmp_path: Path) -> None:
    """Such as a stream of events that was asked for with a body: the connection stays usable."""

    async def stream(scope: Scope, receive: Receive, send: Send, received: list[Message]) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"data", "more_body": False})
        received.append(await receive())

    received, sent = asyncio.run(pass_request(stream, tmp_path))
    assert received == [{"type": "http.disconnect"}]
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]


def test_a_body_that_ends_early_is_refused_before_the_response(tmp_path: Path) -> None:
    async def read(scope: Scope, receive: Receive, send: Send, received: list[Message]) -> None:
        received.append(await receive())

    received, sent = asyncio.run(pass_request(read, tmp_path))
    assert received == []
    assert sent[0]["status"] == 400
    assert b"the body ended early" in sent[1]["body"]


def test_lengths_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    """uvicorn refuses most of these itself; other servers pass them on."""
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
        _, sent = asyncio.run(pass_request(respond, tmp_path, tuple(headers)))
        assert sent[0]["status"] == status, headers


async def respond(scope: Scope, receive: Receive, send: Send, received: list[Message]) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})
