"""Routes for liveness, readiness and metrics.

Used by orchestrators and by Prometheus.
"""

from __future__ import annotations

import anyio.to_thread
from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from expstore.api.dependencies import problems

router = APIRouter()


class Health(BaseModel):
    """The server process responds."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"status": "ok"}]})

    status: str = Field(description="Always `ok`.")


class Readiness(BaseModel):
    """The stores can be read."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"status": "ok", "stores": {"demo": 1000}}]})

    status: str = Field(description="Always `ok`.")
    stores: dict[str, int] = Field(description="Number of rows of each open store, by name.")


@router.get(
    "/healthz",
    tags=["open"],
    summary="Check that the server answers",
    responses=problems(400, 429, only=True),
)
async def healthz() -> Health:
    """Respond while the process runs, for liveness probes. Needs no token."""
    return Health(status="ok")


@router.get("/readyz", tags=["reading"], summary="Check that stores can be read", responses=problems())
async def readyz(request: Request) -> Readiness:
    """List open stores, for readiness probes. A server of one store opens it."""
    stores = request.app.state.stores
    if stores.single:
        name = stores.names()[0]
        served = await anyio.to_thread.run_sync(lambda: stores.get(name))
        return Readiness(status="ok", stores={name: len(served.rb)})
    return Readiness(status="ok", stores={served.name: len(served.rb) for served in stores.open_now()})


@router.get(
    "/metrics",
    tags=["reading"],
    summary="Return metrics for Prometheus",
    response_class=PlainTextResponse,
    responses=problems(400, 401, 403, 429, only=True)
    | {
        200: {
            "description": "Metrics.",
            "content": {
                "text/plain": {"example": "expstore_stores_open 1.0\n"},
                "application/openmetrics-text": {"example": "expstore_stores_open 1.0\n# EOF\n"},
            },
        }
    },
)
async def metrics(request: Request) -> Response:
    """Return counts and durations of requests, rows and bytes, and the rows of open stores."""
    text, media_type = request.app.state.metrics.render(request.headers.get("accept", ""))
    return Response(text, media_type=media_type)
