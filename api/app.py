"""Create the ASGI application from settings.

Used by `expstore serve`, and by programs that mount it into their own application.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.to_thread
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

import expstore
from expstore.api import docs_page, errors
from expstore.api.capture.proxy import Proxy
from expstore.api.gateway import Gateway
from expstore.api.metrics import Metrics
from expstore.api.openapi import TAGS, add_security
from expstore.api.page import files as page_files
from expstore.api.routes import (
    consumers,
    draws,
    events,
    groups,
    health,
    query,
    read,
    sample,
    selections,
    snapshots,
    write,
)
from expstore.api.settings import Settings
from expstore.api.stores import Stores

#: Routes of every server, and those of servers that write. An application has them as its own: in a router
#: that it includes, FastAPI would search them twice for each request, and hide which one it finds.
READING = [
    route
    for part in (health, read, events, sample, draws, consumers, query, snapshots)
    for route in part.router.routes
]
_CHANGING = [
    *write.router.routes, *groups.router.routes, *selections.router.routes, *consumers.changing.routes,
    *snapshots.changing.routes,
]  # fmt: skip


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
    metrics = Metrics(stores.open_now, stores.root)
    proxy = None
    if settings.capture is not None:
        proxy = Proxy(stores, settings.capture, metrics.calls_lost.inc)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await upkeep.remove_leftovers()
        upkeep.start()
        yield
        if proxy is not None:
            await proxy.close()
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
    app.state.settings, app.state.stores, app.state.metrics = settings, stores, metrics
    app.state.proxy = proxy
    errors.install(app)
    app.routes.extend(READING if settings.read_only else READING + _CHANGING)
    docs_page.install(app)
    if settings.ui:
        page_files.install(app)
    if proxy is not None:
        proxy.add_to(app.routes)
    app.add_middleware(Gateway, routes=app.routes, settings=settings, metrics=metrics)
    return app


def describe_reading() -> dict[str, Any]:
    """Return the OpenAPI document of a read-only server; takes half a second of CPU."""
    app = _Api(title="expstore", version=expstore.__version__, openapi_tags=TAGS)
    app.routes.extend(READING)
    return app.openapi()
