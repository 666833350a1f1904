"""Create the ASGI application from settings.

Used by `expstore serve`, and by programs that mount it into their own application.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import anyio.to_thread
from fastapi import APIRouter, Depends, FastAPI
from starlette.routing import NoMatchFound
from starlette.types import Receive, Scope, Send

import expstore
from expstore.api import docs_page, errors
from expstore.api.auth import Guard
from expstore.api.body_limits import Incoming
from expstore.api.dependencies import check_query
from expstore.api.metrics import Metrics
from expstore.api.openapi import TAGS, RouteTable, add_security, outline
from expstore.api.page import files as page_files
from expstore.api.request_log import RequestLog
from expstore.api.routes import events, health, query, read, sample, snapshots, write
from expstore.api.settings import Settings
from expstore.api.stores import Stores

#: Routers with the prefixes of their paths: those of every server, and those of servers that write.
_READING = (
    ("", health.router),
    *(("/v1", part.router) for part in (read, events, sample, query, snapshots)),
)
_CHANGING = (("/v1", write.router), ("/v1", snapshots.changing))


class _Upkeep:
    """End silent sessions and idle processes for SQL, and remove leftovers of deleted stores.

    Starlette does not run the lifespan of a mounted application. Therefore the first request starts what the
    lifespan has not started.

    Args:
        stores: The application's stores.
        settings: Its settings.
    """

    def __init__(self, stores: Stores, settings: Settings) -> None:
        self._stores, self._settings = stores, settings
        self._is_clean = settings.read_only
        self._running: tuple[asyncio.Task[None], anyio.CancelScope] | None = None

    def start(self) -> None:
        """Start in this event loop, unless it runs there already or has nothing to do."""
        if self._stores.is_ending:
            return
        loop = asyncio.get_running_loop()
        if self._running is None or self._running[0].get_loop() is not loop:
            scope = anyio.CancelScope()
            self._running = loop.create_task(self._run(scope)), scope

    async def remove_leftovers(self) -> None:
        """Remove leftovers once."""
        if not self._is_clean:
            self._is_clean = True
            await anyio.to_thread.run_sync(self._stores.remove_leftovers)

    async def stop(self) -> None:
        """Stop, then flush and close the stores."""
        if self._running is not None and self._running[0].get_loop() is asyncio.get_running_loop():
            task, scope = self._running
            scope.cancel()
            await task  # waits for the thread that ends sessions and processes
        await anyio.to_thread.run_sync(self._stores.close)

    async def _run(self, scope: anyio.CancelScope) -> None:
        with scope:
            await self.remove_leftovers()
            while True:
                await anyio.sleep(min(60.0, self._settings.session_timeout / 4))
                await anyio.to_thread.run_sync(self._stores.end_idle)


class _Api(FastAPI):
    """A FastAPI application whose OpenAPI document states which token each route needs.

    Args:
        upkeep: Started by the first request, if not before; None: there are no stores.
        kwargs: Arguments of FastAPI.
    """

    def __init__(self, upkeep: _Upkeep | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._upkeep = upkeep

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] == "http" and self._upkeep is not None:
            self._upkeep.start()
        await super().__call__(scope, receive, send)

    def openapi(self) -> dict[str, Any]:
        """Return the document; it is built once."""
        if self.openapi_schema is None:
            add_security(super().openapi())
        return super().openapi()


def create_app(settings: Settings) -> FastAPI:
    """Return an application that serves stores.

    Stores are opened at their first request, and closed when the application ends. A write that was
    acknowledged is in the store even if the server is killed.

    Mounted into another application, it works below any prefix, but Starlette does not run its lifespan: its
    stores are closed when the process exits. To close them when the outer application ends, enter
    `app.router.lifespan_context(app)` in the outer lifespan.

    Args:
        settings: What is served, and within which limits.

    Raises:
        StateError: Two folders of stores have the same name but for `.exp`.

    Example:
        >>> from contextlib import asynccontextmanager
        >>> from fastapi import FastAPI
        >>> from pathlib import Path
        >>> from expstore.api.app import create_app
        >>> from expstore.api.settings import Settings
        >>> app = create_app(Settings(path=Path("runs")))
        >>> @asynccontextmanager
        ... async def lifespan(outer):
        ...     async with app.router.lifespan_context(app):
        ...         yield
        >>> outer = FastAPI(lifespan=lifespan)
        >>> outer.mount("/experience", app)
    """
    stores = Stores(settings)
    upkeep = _Upkeep(stores, settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await upkeep.remove_leftovers()
        upkeep.start()
        yield
        await upkeep.stop()

    app = _Api(
        upkeep,
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
    metrics = Metrics(stores.open_now, stores.root)
    app.state.settings, app.state.stores, app.state.metrics = settings, stores, metrics
    errors.install(app)
    docs_page.install(app)
    if settings.ui:
        page_files.install(app)
    # The last middleware is the outermost.
    app.add_middleware(Incoming, settings=settings)
    app.add_middleware(Guard, settings=settings)
    routers = _READING if settings.read_only else _READING + _CHANGING
    for prefix, router in routers:
        app.include_router(router, prefix=prefix, dependencies=[Depends(check_query)] if prefix else None)
    # Recent FastAPI builds included routes when they are first searched, and changes the filters of warnings
    # of the whole process meanwhile. Searched here, they are built before there are requests.
    with suppress(NoMatchFound):
        app.url_path_for("")
    open_folder = page_files.PATH if settings.ui else None
    table = RouteTable(lambda: _outline(routers, app.routes), open_folder)
    app.state.routes = table
    app.add_middleware(RequestLog, routes=table, metrics=metrics)
    return app


def reading_routes() -> RouteTable:
    """Return the routes of a read-only server with the page."""
    return RouteTable(lambda: _outline(_READING), page_files.PATH)


def describe_reading() -> dict[str, Any]:
    """Return the OpenAPI document of a read-only server; takes half a second of CPU."""
    app = _Api(title="expstore", version=expstore.__version__, openapi_tags=TAGS)
    for prefix, router in _READING:
        app.include_router(router, prefix=prefix)
    return app.openapi()


def _outline(routers: Sequence[tuple[str, APIRouter]], own: Sequence[object] = ()) -> dict[str, Any]:
    included = ((prefix, route) for prefix, router in routers for route in router.routes)
    return outline([*(("", route) for route in own), *included])
