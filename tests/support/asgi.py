"""Requests to an application in this process: no socket, no server, no lifespan unless a test enters it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import httpx

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
