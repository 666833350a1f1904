"""Requests to an application in this process: no socket, no server, no lifespan unless a test enters it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
from anyio.from_thread import BlockingPortal, start_blocking_portal
from fastapi import FastAPI
from starlette.types import ASGIApp, Message

from expstore.api import Settings, create_app

_Result = TypeVar("_Result")


class _InProcess(httpx.BaseTransport):
    """Passes requests of a synchronous client to an application, which runs in another thread."""

    def __init__(self, app: FastAPI, portal: BlockingPortal) -> None:
        self._transport, self._portal = httpx.ASGITransport(app), portal

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.read()
        return self._portal.call(self._pass_on, request)

    async def _pass_on(self, request: httpx.Request) -> httpx.Response:
        answer = await self._transport.handle_async_request(request)
        parts = [part async for part in answer.aiter_raw()]
        return httpx.Response(
            answer.status_code, headers=answer.headers, stream=httpx.ByteStream(b"".join(parts))
        )


@contextmanager
def api_client(
    served: Path | FastAPI, *, headers: dict[str, str] | None = None, **settings: Any
) -> Iterator[httpx.Client]:
    """Run an application in this process within the block, and yield a client of it.

    Any number of threads may use the client. An answer arrives when it is complete: streams that do not end
    need a server.

    Args:
        served: Folder of stores, or an application.
        headers: Headers of every request.
        settings: Settings of the application that serves the folder. Queries have a minute by default: on a
            busy machine the process that runs them starts slowly.
    """
    settings = {"sql_seconds": 60.0} | settings
    app = create_app(Settings(path=served, **settings)) if isinstance(served, Path) else served
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(app.router.lifespan_context(app)),
        httpx.Client(
            transport=_InProcess(app, portal), base_url="http://127.0.0.1:8420", headers=headers
        ) as client,
    ):
        yield client


def routes_of(document: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    """Return method, path and description of the routes of an OpenAPI document, with names filled in."""
    names = {"{name}": "run", "{episode}": "1", "{sampler}": "mine", "{": "", "}": ""}
    found = []
    for path, acts in document["paths"].items():
        for name, value in names.items():
            path = path.replace(name, value)
        found += [(method.upper(), path, act) for method, act in acts.items()]
    return found


def refusal_of(answer: httpx.Response) -> tuple[int, str]:
    """Return the status and the kind of the error of an answer."""
    error = answer.json()["error"]
    assert {"kind", "message", "hint"} <= set(error)
    return answer.status_code, error["kind"]


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
