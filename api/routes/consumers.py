"""Routes for consumers: open one, draw by number, commit.

Used by the application. A request that records or removes something needs the write token, draws too.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import Path, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from expstore.api.bodies import ARROW, choose_type, compression_of
from expstore.api.consumers import ConsumerClient
from expstore.api.dependencies import ROWS_ANSWER, Limits, Store, create_router, problems
from expstore.api.errors import Refusal
from expstore.api.routes.sample import BatchSize, Where
from expstore.api.rows import answer_rows
from expstore.api.samplers import ConsumerSpec, WholeGroups, describe_sampler
from expstore.buffers.read_limits import limit_reads

router = create_router("reading")
changing = create_router("writing")

_Name = Annotated[
    str,
    Path(
        pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}$",
        description="Name of the consumer.",
        examples=["learner"],
    ),
]
_Count = Annotated[int, Field(ge=0, lt=1 << 63)]


class OpenRequest(ConsumerClient):
    """What a consumer draws."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [{"sampler": {"kind": "without_replacement"}, "batch_size": 2, "seed": 1}]
        },
    )

    sampler: ConsumerSpec | None = Field(None, description="A sampler; null: uniform.")
    where: Where = None
    batch_size: BatchSize = 256
    seed: _Count | None = Field(None, description="Seed of a new consumer's draws; null: the store's.")
    keep: Literal["uncommitted", "all"] | _Count = Field(
        "uncommitted",
        description="Draws that the log keeps: those since the last commit, all, or also the last so many.",
    )
    missing: Literal["raise", "skip"] = Field(
        "raise", description="Whether a recorded draw fails if a row was deleted, or comes without it."
    )
    at: Literal["committed", "end"] | _Count | None = Field(
        None,
        description="Place whose position is returned, if the draws after it are kept: the last commit, "
        "after the last recorded draw, or before a draw. Null: the last commit, kept or not.",
    )
    lease_rows: _Count | None = Field(
        None,
        description="Rows that are drawn and not committed which a retention policy keeps; null: a tenth.",
    )


class DrawRequest(ConsumerClient):
    """A request for the batch of a draw."""

    wait: float = Field(0.0, ge=0, description="Seconds to wait until there are enough rows.")


class CommitRequest(ConsumerClient):
    """A commit of a client."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"draws": 1}]})

    draws: _Count = Field(description="Number of draws that a safe checkpoint of the client covers.")


_STATE: dict[str, Any] = {
    "id": "5f0c1d2e3a4b5968", "draws": 10, "committed": 8,
    "position": {"consumer": "learner", "id": "5f0c1d2e3a4b5968", "draw": 8}, "world": 1, "generation": 0,
}  # fmt: skip


class ConsumerState(BaseModel):
    """Where a consumer is."""

    model_config = ConfigDict(json_schema_extra={"examples": [_STATE]})

    id: str = Field(description="Distinguishes it from others that had its name before.")
    draws: int = Field(description="Number of recorded draws, which is the number of the next new one.")
    committed: int = Field(description="Number of draws that all ranks have committed.")
    position: dict[str, str | int] = Field(
        description="Position of the place that was asked for, or of the last commit."
    )
    world: int = Field(description="Number of clients that share the batches.")
    generation: int = Field(description="Changes when the number of clients changes.")


class ConsumerList(BaseModel):
    """The consumers of a store."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"consumers": []}]})

    consumers: list[dict[str, Any]] = Field(
        description="Each consumer, by name: `name`, `draws` (recorded), `committed`, `first` (the oldest "
        "draw in its log), `log_bytes`, `is_open` (whether a process draws for it), `leased` (rows that a "
        "retention policy keeps for it), `damage` (what cannot be read of it, or null), `world`, and "
        "`sampler` if it is open on this server."
    )


@router.get("/stores/{name}/consumers", summary="List consumers", responses=problems())
async def consumers(store: Store) -> ConsumerList:
    """List the consumers of a store, whichever process has opened them."""
    return ConsumerList(consumers=await store.run(store.consumers.list))


@changing.put(
    "/stores/{name}/consumers/{consumer}", summary="Open a consumer", responses=problems(408, 413, 415)
)
async def open_consumer(store: Store, limits: Limits, consumer: _Name, asked: OpenRequest) -> ConsumerState:
    """Open a consumer, and create it if it is new. Repeating the same request changes nothing.

    Other settings of rank 0 open it again with them. Another `world` begins a new generation: clients of the
    former one can neither draw nor commit. Status 409 with kind `not_ready`: rank 0 has not opened it with
    this `world`.
    """
    if asked.batch_size > limits.max_rows:
        raise Refusal(422, f"batch_size is at most {limits.max_rows}")
    wanted = asked.model_dump(exclude={"rank", "id", "generation", "at"})
    wanted["sampler"] = describe_sampler(asked.sampler, asked.where)
    if isinstance(asked.sampler, WholeGroups):
        if "batch_size" in asked.model_fields_set:
            raise Refusal(422, "sampler 'groups' decides how many rows a batch has", hint="omit batch_size")
        wanted["batch_size"] = None
    return ConsumerState(**await store.run(lambda: store.consumers.put(consumer, wanted, asked.at, asked)))


@changing.post(
    "/stores/{name}/consumers/{consumer}/draws/{number}",
    summary="Draw for a consumer",
    responses=ROWS_ANSWER | problems(406, 408, 413, 415),
)
async def draw_for_consumer(
    request: Request,
    store: Store,
    limits: Limits,
    consumer: _Name,
    number: Annotated[int, Path(ge=0, lt=1 << 63, description="Number of the draw, from 0.", examples=[0])],
    asked: DrawRequest,
) -> Response:
    """Return the batch of a draw, or the part of it of a rank. A new draw is recorded first.

    The same number gives the same rows. `drawn_from` has `draw`, and `ends`: whether iteration ends with this
    draw, because it completed a pass or used up the rows. Status 409 with kind `not_open`: the consumer was
    not opened since the server started. With kind `not_ready`: there are too few rows, even after `wait`
    seconds.
    """
    kind, compression = choose_type(request), compression_of(request)

    def answer() -> Response:
        with limit_reads(limits.max_answer, text=kind != ARROW):
            batch, ends = store.consumers.draw(consumer, number, asked)
        return answer_rows(batch, kind, compression, store.encoder, {"draw": number, "ends": ends})

    return await store.run_patiently(answer, min(asked.wait, limits.wait_seconds))


@changing.post(
    "/stores/{name}/consumers/{consumer}/commit",
    summary="Commit draws of a consumer",
    responses=problems(408, 413, 415, 507),
)
async def commit_consumer(store: Store, consumer: _Name, asked: CommitRequest) -> ConsumerState:
    """Record that a checkpoint of the client covers the first draws, so that they are not needed again."""
    return ConsumerState(**await store.run(lambda: store.consumers.commit(consumer, asked.draws, asked)))


@changing.post(
    "/stores/{name}/consumers/{consumer}/close",
    status_code=204,
    summary="Close a consumer",
    responses=problems(408, 413, 415),
)
async def close_consumer(store: Store, consumer: _Name, asked: ConsumerClient) -> None:
    """Let another process draw for a consumer. Its log does not change."""
    await store.run(lambda: store.consumers.close(consumer, asked))


@changing.delete(
    "/stores/{name}/consumers/{consumer}",
    status_code=204,
    summary="Drop a consumer",
    responses=problems(),
)
async def drop_consumer(store: Store, consumer: _Name) -> None:
    """End a consumer, and remove its log. The rows of the store do not change."""
    await store.run(lambda: store.consumers.drop(consumer))
