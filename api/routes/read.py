"""Routes that read stores: rows, episodes, facts about stores.

Used by the application.
"""

from __future__ import annotations

from typing import Annotated, Any

import anyio.to_thread
from fastapi import APIRouter, Path, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from expstore.api.bodies import JSON, choose_type, compression_of
from expstore.api.dependencies import ROWS_ANSWER, Known, Limits, Store, problems
from expstore.api.request_models import RequestModel
from expstore.api.rows import answer_rows, check_ids
from expstore.buffers.read_limits import limit_reads

router = APIRouter(tags=["reading"])


class StoreNames(BaseModel):
    """The stores of a server."""

    model_config = {"json_schema_extra": {"examples": [{"stores": ["demo"]}]}}

    stores: list[str] = Field(description="Their names, sorted.")


class StoreInfo(BaseModel):
    """Facts about a store."""

    model_config = {
        "json_schema_extra": {
            "examples": [
                {
                    "name": "demo",
                    "uuid": "0b9f4c1e5d7a4f6f8a3c2b1d0e9f8a7b",
                    "rows": 2,
                    "capacity": 1000,
                    "fields": [],
                    "generation": 1,
                    "largest_priority": 1.0,
                    "meta": {},
                }
            ]
        }
    }

    name: str = Field(description="Its name.")
    uuid: str = Field(description="Its uuid, which no other store has.")
    rows: int = Field(description="Number of readable rows.")
    capacity: int | None = Field(description="Most readable rows; null: no bound.")
    fields: Any = Field(description="The schema: key, dtype and row shape of each field; null: no rows yet.")
    generation: int = Field(
        description="Number of times the store was opened for writing. Ids name the same rows within one "
        "generation."
    )
    largest_priority: float = Field(description="The priority that new rows get.")
    meta: Any = Field(description="The store's `meta`: facts that were given when it was created.")


@router.get("/stores", summary="List stores", responses=problems())
async def stores(known: Known) -> StoreNames:
    """List the names of all stores in the served folder."""
    return StoreNames(stores=await anyio.to_thread.run_sync(known.names))


@router.get("/stores/{name}", summary="Describe a store", responses=problems())
async def info(store: Store) -> StoreInfo:
    """Return the fields, the number of rows and the capacity of a store."""
    rb = store.rb
    schema = None if rb.schema is None else rb.schema.to_json()
    return StoreInfo(
        name=store.name, uuid=store.uuid, rows=len(rb), capacity=rb.storage.capacity, fields=schema,
        generation=store.generation, largest_priority=float(rb.storage.priorities.largest), meta=rb.meta,
    )  # fmt: skip


class Ids(RequestModel):
    """A selection of rows."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"ids": [1, 2]}]})

    ids: list[int] = Field(max_length=1_000_000, description="Ids of the rows.")


@router.post(
    "/stores/{name}/rows", summary="Read rows by id", responses=ROWS_ANSWER | problems(406, 408, 413, 415)
)
async def rows(request: Request, store: Store, limits: Limits, asked: Ids) -> Response:
    """Return the rows with these ids, in the same order; 404 if one of them is not in the store."""
    kind, compression = choose_type(request), compression_of(request)
    ids = check_ids(asked.ids)

    def read() -> Response:
        with limit_reads(limits.max_answer, text=kind == JSON):
            return answer_rows(store.rb.by_id(ids), kind, compression, store.encoder)

    return await store.run(read)


@router.get(
    "/stores/{name}/episodes/{episode}", summary="Read an episode", responses=ROWS_ANSWER | problems(406)
)
async def trajectory(
    request: Request,
    store: Store,
    limits: Limits,
    episode: Annotated[int, Path(ge=0, lt=1 << 63, description="Id of the episode.", examples=[1])],
) -> Response:
    """Return the rows of an episode that are in the store, ordered by step."""
    kind, compression = choose_type(request), compression_of(request)

    def read() -> Response:
        with limit_reads(limits.max_answer, text=kind == JSON):
            return answer_rows(store.rb.trajectory(episode), kind, compression, store.encoder)

    return await store.run(read)


@router.get(
    "/stores/{name}/stats",
    summary="Return statistics of a store",
    responses=problems() | {200: {"content": {"application/json": {"example": {"length": 2}}}}},
)
async def stats(store: Store) -> dict[str, Any]:
    """Return the result of `rb.stats()`, without the store's path."""
    found = await store.run(store.rb.stats)
    return {name: value for name, value in found.items() if name != "path"}
