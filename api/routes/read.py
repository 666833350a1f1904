"""Routes that read stores: rows, episodes, facts about stores.

Used by the application.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import anyio.to_thread
from fastapi import Query, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from expstore.api.bodies import JSON, choose_type, compression_of
from expstore.api.dependencies import (
    EPISODE_ANSWER,
    ROWS_ANSWER,
    EpisodeId,
    Known,
    Limits,
    Session,
    Store,
    create_router,
    problems,
)
from expstore.api.errors import Refusal
from expstore.api.openapi import Need
from expstore.api.page.episode_rows import Steps, read_fields, read_frames
from expstore.api.page.messages import Conversation, read_conversation
from expstore.api.page.summary import Summary
from expstore.api.request_models import Items, RequestModel
from expstore.api.rows import answer_rows, check_ids
from expstore.api.samplers import Limited
from expstore.buffers.read_limits import limit_reads
from expstore.data.images import encode_png
from expstore.errors import NotFoundError

router = create_router("reading")


class StoreNames(BaseModel):
    """The stores of a server."""

    model_config = {"json_schema_extra": {"examples": [{"stores": ["demo"], "access": "write", "sql": True}]}}

    stores: list[str] = Field(description="Their names, sorted.")
    access: Literal["read", "write"] = Field(
        description="What this client may do: `read` if the server is read-only or the token only reads."
    )
    sql: bool = Field(description="Whether the server answers SQL.")


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
                    "limits": None,
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
    limits: Limited | None = Field(description="What the rate limiter counts; null: there is none.")
    meta: Any = Field(description="The store's `meta`: facts that were given when it was created.")


@router.get("/stores", summary="List stores", responses=problems())
async def stores(request: Request, known: Known, limits: Limits) -> StoreNames:
    """List the names of all stores in the served folder, and say what this client may do with them."""
    writes = request.scope["expstore.may"] == Need.WRITE and not limits.read_only
    names = await anyio.to_thread.run_sync(known.names)
    return StoreNames(stores=names, access="write" if writes else "read", sql=limits.sql)


@router.get("/stores/{name}", summary="Describe a store", responses=problems())
async def info(store: Store) -> StoreInfo:
    """Return the fields, the number of rows and the capacity of a store."""
    rb = store.rb
    schema = None if rb.schema is None else rb.schema.to_json()
    return StoreInfo(
        name=store.name, uuid=store.uuid, rows=len(rb), capacity=rb.storage.capacity, fields=schema,
        generation=store.generation, largest_priority=float(rb.storage.priorities.largest), meta=rb.meta,
        limits=Limited.of(store.member.read_limits()),
    )  # fmt: skip


@router.get("/stores/{name}/summary", summary="Summarize a store", responses=problems())
async def summary(store: Store) -> Summary:
    """Return size, fields, episodes, sessions, rates and histograms of a store; at most a second old."""
    return await store.run(store.summarizer.summarize)


class SourceRequest(RequestModel):
    """A source."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"source": "actor-7"}]})

    source: str | None = Field(
        max_length=200, description="Name of the source; null: the unnamed one of the session."
    )


class OpenEpisodes(BaseModel):
    """The open episodes of a source."""

    model_config = {"json_schema_extra": {"examples": [{"episodes": [12]}]}}

    episodes: list[int] = Field(description="Their ids.")


@router.post("/stores/{name}/episodes/open", summary="Find open episodes", responses=problems())
async def find_open(store: Store, asked: SourceRequest, session: Session = None) -> OpenEpisodes:
    """Return the open episodes of a source, of all sessions: of a source in a cluster, its shard has them."""
    found = await store.run(lambda: store.rb.episodes.find_open(asked.source, session=session))
    return OpenEpisodes(episodes=found.tolist())


class Ids(RequestModel):
    """A selection of rows."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"ids": [1, 2]}]})

    ids: Items[int] = Field(description="Ids of the rows.")


@router.post(
    "/stores/{name}/rows", summary="Read rows by id", responses=ROWS_ANSWER | problems(406, 408, 413, 415)
)
async def rows(request: Request, store: Store, limits: Limits, asked: Ids) -> Response:
    """Return the rows with these ids, in the same order; 404 if one of them is not in the store."""
    kind, compression = choose_type(request), compression_of(request)
    if len(asked.ids) > limits.max_rows:
        raise Refusal(
            422, f"a request reads at most {limits.max_rows} rows, and {len(asked.ids)} ids are given"
        )
    ids = check_ids(asked.ids)

    def read() -> Response:
        with limit_reads(limits.max_answer, text=kind == JSON):
            return answer_rows(store.rb.by_id(ids), kind, compression, store.encoder)

    return await store.run(read)


Start = Annotated[int, Query(ge=0, lt=1 << 62, description="The first step.")]


@router.get(
    "/stores/{name}/episodes/{episode}", summary="Read an episode", responses=EPISODE_ANSWER | problems(406)
)
async def trajectory(
    request: Request,
    store: Store,
    limits: Limits,
    episode: EpisodeId,
    fields: Annotated[
        str | None,
        Query(
            max_length=4000,
            description="Names of the fields, with commas between them; without it, all fields.",
            examples=["action,next.reward"],
        ),
    ] = None,
    start: Start = 0,
    count: Annotated[
        int | None, Query(ge=1, lt=1 << 62, description="Number of steps from `start`; without it, all.")
    ] = None,
) -> Response:
    """Return the rows of an episode that are in the store, ordered by step; or some fields of some steps.

    The header `X-First-Step` of a part has the step of its first row.
    """
    kind, compression = choose_type(request), compression_of(request)
    names = None if fields is None else fields.split(",")

    def read() -> Response:
        with limit_reads(limits.max_answer, text=kind == JSON) as limit:
            if names is None and count is None and not start:
                return answer_rows(store.rb.trajectory(episode), kind, compression, store.encoder)
        data, steps = read_fields(store.rb.storage, episode, names, Steps(start, count), limit)
        answer = answer_rows(data, kind, compression, store.encoder)
        if steps.size:
            answer.headers["X-First-Step"] = str(steps[0])
        return answer

    return await store.run(read)


@router.get("/stores/{name}/episodes/{episode}/messages", summary="Read a conversation", responses=problems())
async def messages(
    store: Store,
    episode: EpisodeId,
    field: Annotated[
        str, Query(max_length=1000, description="Name of the field, which has lists of texts.")
    ] = "messages",
    start: Start = 0,
    count: Annotated[int, Query(ge=1, le=1024, description="Most rows of the answer.")] = 256,
    known: Annotated[
        int | None,
        Query(ge=0, lt=1 << 62, description="A step before `start` whose messages are not sent again."),
    ] = None,
) -> Conversation:
    """Return the messages of an episode once: of each row, those that no earlier row of the answer has.

    An answer ends with the row that reaches 4 MB; `next` says where the next one starts.
    """
    return await store.run(lambda: read_conversation(store.rb.storage, episode, field, start, count, known))


_FRAME_HEADERS = {
    "X-Shape": "Number of frames, height, width, channels: `2,64,64,3`.",
    "X-Layout": "How rows became pictures: `HWC`, `CHW`, `HW`, or `stacked`: the last frame of each row.",
    "X-Steps": "Steps of the frames, with commas between them.",
}


@router.get(
    "/stores/{name}/episodes/{episode}/frames",
    summary="Read frames of an episode",
    response_class=Response,
    responses=problems()
    | {
        200: {
            "description": "Frames.",
            "headers": {
                name: {"description": text, "schema": {"type": "string"}}
                for name, text in _FRAME_HEADERS.items()
            },
            "content": {
                "application/octet-stream": {
                    "schema": {
                        "type": "string",
                        "format": "binary",
                        "description": "uint8 values in C order.",
                    },
                    "example": "",
                },
                "image/png": {
                    "schema": {"type": "string", "format": "binary", "description": "A PNG file."},
                    "example": "",
                },
            },
        }
    },
)
async def frames(
    store: Store,
    limits: Limits,
    episode: EpisodeId,
    field: Annotated[
        str, Query(max_length=1000, description="Name of the image field.", examples=["pixels"])
    ],
    start: Start = 0,
    count: Annotated[
        int | None,
        Query(ge=1, le=1024, description="Number of steps from `start`; without it, 32, and 1 of a PNG."),
    ] = None,
    steps: Annotated[
        str | None,
        Query(
            pattern=r"^-?[0-9]{1,18}(,-?[0-9]{1,18}){0,1023}$",
            description="These steps instead of `start` and `count`, with commas between them; -1 is the "
            "newest row.",
            examples=["0,-1"],
        ),
    ] = None,
    max_side: Annotated[
        int | None,
        Query(
            ge=1,
            le=4096,
            description="Most pixels of the longer side: larger frames are reduced by a whole factor. "
            "Without it, frames have their size.",
        ),
    ] = None,
    format: Annotated[
        Literal["raw", "png"], Query(description="`raw`: uint8 values; `png`: one frame as a PNG file.")
    ] = "raw",
) -> Response:
    """Return frames of an image field, as uint8 `[frames, height, width, 1 or 3]` or as one PNG file.

    Steps whose rows are not in the store are left out. Images are uint8 fields of shape `[height, width]`, or
    with a dim of channels or frames first or last, and float fields with 1 or 3 channels. An answer has at
    most 32 MB; status 413 says how many frames fit.
    """
    if steps is not None:
        chosen = Steps(listed=[int(step) for step in steps.split(",")])
    else:
        chosen = Steps(start, count or (1 if format == "png" else 32))
    if format == "png" and (chosen.count or len(chosen.listed or ())) != 1:
        raise Refusal(422, "a PNG file has one frame", hint="ask for one step, or with format=raw")

    def read() -> Response:
        found = read_frames(store.rb.storage, episode, field, chosen, max_side, limits.max_answer)
        if format == "png":
            if not found.steps.size:
                raise NotFoundError(f"this step of episode {episode} is not in the store")
            answer = Response(encode_png(found.pixels[0]), media_type="image/png")
        else:
            answer = Response(found.pixels.tobytes(), media_type="application/octet-stream")
        answer.headers["X-Shape"] = ",".join(map(str, found.pixels.shape))
        answer.headers["X-Layout"] = found.layout.name
        answer.headers["X-Steps"] = ",".join(map(str, found.steps.tolist()))
        return answer

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
