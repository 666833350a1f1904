"""Requests to an application in this process: no socket, no server, no lifespan unless a test enters it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

import httpx
from starlette.types import ASGIApp, Message

_Result = TypeVar("_Result")


def client(app: Any, root_path: str = "", **kwargs: Any) -> httpx.AsyncClient:
    """Return a client of an application, as a server with this `root_path` would pass requests to it."""
    transport = httpx.ASGITransport(app, root_path=root_path)
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", **kwargs)


def ask(app: Any, act: Callable[[httpx.AsyncClient], Awaitable[_Result]], **kwargs: Any) -> _Result:
    """Run a coroutine function with a client of an application, in an event loop of its own."""

    async def run() -> _Result:
        async with client(app, **kwargs) as asking:
            return await act(asking)

    return asyncio.run(run())


async def call(
    app: ASGIApp,
    *,
    method: str = "GET",
    path: str,
    server: str = "127.0.0.1",
    headers: Iterable[tuple[bytes, bytes]] = ((b"host", b"127.0.0.1"),),
    incoming: Iterable[Message] = ({"type": "http.request", "body": b"", "more_body": False},),
) -> list[Message]:
    """Pass a request to an application as a server would, and return what it sends.

    Args:
        app: The application.
        method: The method.
        path: The path.
        server: The address that the client has connected to.
        headers: All headers.
        incoming: What the application receives; after it, that the client has disconnected.
    """
    scope = {
        "type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"",
        "root_path": "", "scheme": "http", "http_version": "1.1", "server": (server, 80),
        "client": ("10.9.9.9", 1), "headers": list(headers),
    }  # fmt: skip
    messages = iter(incoming)
    sent: list[Message] = []

    async def receive() -> Message:
        return next(messages, {"type": "http.disconnect"})

    async def send(message: Message) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return sent
