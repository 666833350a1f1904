"""The limits of bodies for routes that leave the body unread."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from expstore.api import Settings
from expstore.api.body_limits import Incoming


class Route:
    """What the limits read of a route."""

    parsed = False


async def pass_request(app: Any, tmp_path: Path) -> tuple[list[Message], list[Message]]:
    """Return what a route received, and what was sent, of a request whose client leaves before its body."""
    received: list[Message] = []
    sent: list[Message] = []
    scope: dict[str, Any] = {
        "type": "http", "headers": [(b"content-length", b"10")], "expstore.route": Route,
        "expstore.body_whole": False,
    }  # fmt: skip

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    await Incoming(lambda *args: app(*args, received), Settings(path=tmp_path))(scope, receive, send)
    return received, sent


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
