"""The limits of bodies for routes that leave the body unread."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
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


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({b"content-length": b"ten"}, 400),
        ({b"content-length": b""}, 400),
        ({b"content-length": b"-1"}, 400),
        ({b"content-length": b"+1"}, 400),
        ({b"content-length": b"1_0"}, 400),
        ({b"content-length": b"1, 2"}, 400),
        ({b"content-length": b"\xb2"}, 400),  # a digit of Latin-1 to str.isdigit
        ({b"content-length": b"5", b"transfer-encoding": b"chunked"}, 400),
        ({b"content-length": b"9" * 5000}, 413),
        ({b"content-length": b"0" * 5000 + b"5"}, 200),
        ({b"content-length": b" 5 "}, 200),
        ({b"transfer-encoding": b"chunked"}, 200),
    ],
)
def test_lengths_that_are_no_numbers_are_refused(
    tmp_path: Path, headers: dict[bytes, bytes], status: int
) -> None:
    """uvicorn refuses most of these itself; other servers pass them on."""
    assert asyncio.run(pass_request(respond, tmp_path, tuple(headers.items())))[1][0]["status"] == status


def test_two_different_lengths_are_refused(tmp_path: Path) -> None:
    for second, status in ((b"5", 200), (b"6", 400)):
        headers = ((b"content-length", b"5"), (b"content-length", second))
        assert asyncio.run(pass_request(respond, tmp_path, headers))[1][0]["status"] == status


async def respond(scope: Scope, receive: Receive, send: Send, received: list[Message]) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})
