"""Whether the server lives and is ready, and its figures.

Used by orchestrators and by Prometheus.
"""

from __future__ import annotations

import anyio.to_thread
from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response

from expstore.api.dependencies import problems

router = APIRouter()


@router.get("/healthz", tags=["open"], responses=problems(400, 429, only=True))
async def healthz() -> dict[str, str]:
    """Say that the process answers; no token is needed."""
    return {"status": "ok"}


@router.get("/readyz", tags=["reading"], responses=problems())
async def readyz(request: Request) -> dict[str, object]:
    """Say that the stores can be asked; a single store is opened for it."""
    stores = request.app.state.stores
    if stores.single:
        name = stores.names()[0]
        served = await anyio.to_thread.run_sync(lambda: stores.served(name))
        return {"status": "ok", "stores": {name: len(served.rb)}}
    return {"status": "ok", "stores": {served.name: len(served.rb) for served in stores.open_now()}}


@router.get(
    "/metrics",
    tags=["reading"],
    response_class=PlainTextResponse,
    responses=problems(400, 401, 403, 429, only=True)
    | {200: {"content": {"application/openmetrics-text": {}}}},
)
async def metrics(request: Request) -> Response:
    """Return figures as Prometheus reads them."""
    text, media_type = request.app.state.metrics.render(request.headers.get("accept", ""))
    return Response(text, media_type=media_type)
