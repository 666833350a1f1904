"""Routes for liveness, readiness and metrics.

Used by orchestrators and by Prometheus.
"""

from __future__ import annotations

import logging

import anyio.to_thread
from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from expstore.api.dependencies import Known, problems
from expstore.api.errors import Refusal
from expstore.errors import ExpStoreError

router = APIRouter()

_log = logging.getLogger("expstore.api")


class Health(BaseModel):
    """The server process responds."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"status": "ok"}]})

    status: str = Field(description="Always `ok`.")


@router.get(
    "/healthz",
    tags=["open"],
    summary="Check that the server answers",
    responses=problems(400, 429, only=True),
)
async def healthz() -> Health:
    """Respond while the process runs, for liveness probes. Needs no token."""
    return Health(status="ok")


@router.get(
    "/readyz",
    tags=["open"],
    summary="Check that stores can be read",
    responses=problems(400, 429, 503, only=True),
)
async def readyz(known: Known) -> Health:
    """Respond while stores can be read, for readiness probes; 503 otherwise. Needs no token.

    A server of one store opens it, a server of a folder looks for the folder. The answer tells nothing about
    them; the server's log says why they cannot be read.
    """
    try:
        await known.check_readiness()
    except ExpStoreError as exc:
        _log.warning("the server is not ready: %s", exc)
        raise Refusal(503, "the server is not ready", kind="not_ready", hint="ask again later") from exc
    return Health(status="ok")


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
    """Return figures of requests, of the disk, of open stores and of the server's process."""
    render, accept = request.app.state.metrics.render, request.headers.get("accept", "")
    text, media_type = await anyio.to_thread.run_sync(render, accept)
    return Response(text, media_type=media_type)
