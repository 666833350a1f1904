"""Routes that read stores: batches, rows, episodes, facts.

Used by the application.
"""

from __future__ import annotations

from typing import Annotated, Any

import anyio.to_thread
from fastapi import APIRouter, Path, Request
from fastapi.responses import Response
from pydantic import Field

from expstore.api.bodies import JSON, accepted, compression_of
from expstore.api.dependencies import ARROW_ANSWER, Known, Limits, Store, problems
from expstore.api.request_models import RequestModel
from expstore.api.rows import answer_rows, checked_ids
from expstore.buffers.read_limits import limit_reads

router = APIRouter(tags=["reading"])


@router.get("/stores", responses=problems())
async def stores(known: Known) -> dict[str, list[str]]:
    """List the stores."""
    return {"stores": await anyio.to_thread.run_sync(known.names)}


@router.get("/stores/{name}", responses=problems())
async def info(store: Store) -> dict[str, Any]:
    """Say what a store's rows are."""
    rb = store.rb
    schema = None if rb.schema is None else rb.schema.to_json()
    return {
        "name": store.name, "rows": len(rb), "capacity": rb.storage.capacity, "fields": schema,
        "generation": store.generation, "meta": rb.meta,
    }  # fmt: skip


class Ids(RequestModel):
    """Which rows."""

    ids: list[int] = Field(max_length=1_000_000)


@router.post("/stores/{name}/rows", responses=ARROW_ANSWER | problems(406, 408, 413, 415))
async def rows(request: Request, store: Store, limits: Limits, asked: Ids) -> Response:
    """Read rows by id, in the order in which they are asked for; all must be there."""
    kind, compression = accepted(request), compression_of(request)
    ids = checked_ids(asked.ids)

    def read() -> Response:
        with limit_reads(limits.max_answer, text=kind == JSON):
            return answer_rows(store.rb.by_id(ids), kind, compression, store.encoder)

    return await store.run(read)


@router.get("/stores/{name}/episodes/{episode}", responses=ARROW_ANSWER | problems(406))
async def trajectory(
    request: Request, store: Store, limits: Limits, episode: Annotated[int, Path(ge=0, lt=1 << 63)]
) -> Response:
    """Read the rows of an episode that are still there, in the order of its steps."""
    kind, compression = accepted(request), compression_of(request)

    def read() -> Response:
        with limit_reads(limits.max_answer, text=kind == JSON):
            return answer_rows(store.rb.trajectory(episode), kind, compression, store.encoder)

    return await store.run(read)


@router.get("/stores/{name}/stats", responses=problems())
async def stats(store: Store) -> dict[str, Any]:
    """Return figures; where the store lies is the server's affair."""
    found = await store.run(store.rb.stats)
    return {name: value for name, value in found.items() if name != "path"}
