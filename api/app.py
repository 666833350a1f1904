"""Create the ASGI application from settings.

Used by `expstore serve`, and by programs that mount it into their own application.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import anyio.to_thread
from fastapi import APIRouter, FastAPI
from starlette.routing import NoMatchFound

import expstore
from expstore.api import docs_page, errors, page
from expstore.api.auth import Guard
from expstore.api.body_limits import Incoming
from expstore.api.metrics import Metrics
from expstore.api.openapi import TAGS, RouteTable, add_security, outline
from expstore.api.request_log import Watch
from expstore.api.routes import events, health, query, read, sample, snapshots, write
from expstore.api.settings import Settings
from expstore.api.stores import Stores

__all__ = ["create_app", "describe_reading", "reading_routes"]

#: Routers with the prefixes of their paths: those of every server, and those of servers that write.
_READING = (
    ("", health.router),
    *(("/v1", part.router) for part in (read, events, sample, query, snapshots)),
)
_CHANGING = (("/v1", write.router), ("/v1", snapshots.changing))


class _Api(FastAPI):
    """A FastAPI application whose OpenAPI document states which token each route needs."""

    def openapi(self) -> dict[str, Any]:
        """Return the document; it is built once."""
        if self.openapi_schema is None:
            add_security(super().openapi())
        return super().openapi()


def create_app(settings: Settings) -> FastAPI:
    """Return an application that serves stores.

    Stores are opened at their first request, and closed when the application ends. A write that was
    acknowledged is in the store even if the server is killed.

    Args:
        settings: What is served, and within which limits.

    Example:
        >>> app = create_app(Settings(path=Path("runs")))
    """
    stores = Stores(settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with anyio.create_task_group() as tasks:
            if not settings.read_only:
                await anyio.to_thread.run_sync(stores.remove_leftovers)
                tasks.start_soon(_end_silent, stores, min(60.0, settings.session_timeout / 4))
            yield
            tasks.cancel_scope.cancel()
        await anyio.to_thread.run_sync(stores.close)

    app = _Api(
        title="expstore",
        version=expstore.__version__,
        summary="Experience stores for reinforcement learning.",
        description="Write rows, sample batches, query SQL. Bodies and answers are JSON or Arrow streams: "
        "`Content-Type` is the type of a body, `Accept` that of the answer; the default is JSON. Errors are "
        '`{"error": {"kind", "message", "hint", "class"}}`. Every answer has the header `X-Request-ID`.',
        openapi_tags=TAGS,
        lifespan=lifespan,
        docs_url=None,  # FastAPI's own pages load scripts from other sites
        redoc_url=None,
        redirect_slashes=False,  # a name that ends with a slash is another name
    )
    metrics = Metrics(stores.open_now)
    app.state.settings, app.state.stores, app.state.metrics = settings, stores, metrics
    errors.install(app)
    docs_page.install(app)
    if settings.ui:
        page.install(app)
    # The last middleware is the outermost.
    app.add_middleware(Incoming, settings=settings)
    app.add_middleware(Guard, settings=settings)
    routers = _READING if settings.read_only else _READING + _CHANGING
    for prefix, router in routers:
        app.include_router(router, prefix=prefix)
    # Recent FastAPI builds included routes when they are first searched, and changes the filters of warnings
    # of the whole process meanwhile. Searched here, they are built before there are requests.
    with suppress(NoMatchFound):
        app.url_path_for("")
    open_folder = page.PATH if settings.ui else None
    table = RouteTable(lambda: _outline(routers, app.routes), open_folder)
    app.add_middleware(Watch, routes=table, metrics=metrics)
    return app


def reading_routes() -> RouteTable:
    """Return the routes of a read-only server with the page."""
    return RouteTable(lambda: _outline(_READING), page.PATH)


def describe_reading() -> dict[str, Any]:
    """Return the OpenAPI document of a read-only server; takes half a second of CPU."""
    app = _Api(title="expstore", version=expstore.__version__, openapi_tags=TAGS)
    for prefix, router in _READING:
        app.include_router(router, prefix=prefix)
    return app.openapi()


def _outline(routers: Sequence[tuple[str, APIRouter]], own: Sequence[object] = ()) -> dict[str, Any]:
    included = ((prefix, route) for prefix, router in routers for route in router.routes)
    return outline([*(("", route) for route in own), *included])


async def _end_silent(stores: Stores, seconds: float) -> None:
    """End silent sessions at regular intervals."""
    while True:
        await anyio.sleep(seconds)
        await anyio.to_thread.run_sync(stores.end_silent)
