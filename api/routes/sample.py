"""Routes that draw batches, one at a time or as a stream, and routes for named samplers.

Used by the application.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Annotated

from fastapi import Path, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from expstore.api.bodies import ARROW, NDJSON, choose_type, compression_of, rows_to_json
from expstore.api.dependencies import BATCHES_ANSWER, ROWS_ANSWER, Limits, Store, create_router, problems
from expstore.api.errors import Refusal
from expstore.api.page.preview import Preview, preview
from expstore.api.request_models import RequestModel
from expstore.api.rows import answer_rows, write_batch
from expstore.api.samplers import AnySpec, Limited, Spec, describe_mass, describe_sampler
from expstore.api.settings import Settings
from expstore.api.stores import Served
from expstore.buffers.local_member import Drawn
from expstore.buffers.member import Draw
from expstore.buffers.read_limits import limit_reads
from expstore.errors import ExpStoreError
from expstore.wire.stream import StreamWriter

router = create_router("sampling")

#: Approximate size of a part of a stream, in bytes: small, because a part is made while the previous one is
#: sent.
PART_BYTES = 1 << 20
#: Most rows of a preview.
_PREVIEW_ROWS = 200_000
SamplerName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
# Fields that several requests have.
ChosenSampler = Annotated[
    Spec | SamplerName | None,
    Field(description="A sampler, or the name of one that PUT has made; null: uniform."),
]
Where = Annotated[
    str | None,
    Field(max_length=1000, description="Only rows that match this SQL condition, which has no functions."),
]
BatchSize = Annotated[int, Field(ge=1, le=1_000_000, description="Rows of a batch.")]


class SampleRequest(RequestModel):
    """A request for a batch."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {"batch_size": 2, "sampler": {"kind": "prioritized", "alpha": 0.6}, "seed": 7, "draw": 0}
            ]
        },
    )

    batch_size: BatchSize = 256
    sampler: ChosenSampler = None
    where: Where = None
    seed: int | None = Field(
        None, ge=0, lt=1 << 63, description="Seed of your own draws; null: the store's draws."
    )
    draw: int | None = Field(
        None,
        ge=0,
        lt=1 << 63,
        description="Number of the draw of this seed: equal numbers give equal batches; null: the next one.",
    )
    wait: float = Field(0.0, ge=0, description="Seconds to wait until there are enough rows.")


class StreamRequest(SampleRequest):
    """A request for a stream of batches."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"batch_size": 2, "batches": 10}]})

    batches: int | None = Field(None, ge=1, description="Number of batches; null: no end.")


def check_request(asked: SampleRequest, limits: Settings) -> float:
    """Return how many seconds the request may wait for rows."""
    if asked.batch_size > limits.max_rows:
        raise Refusal(422, f"batch_size is at most {limits.max_rows}")
    if asked.draw is not None and asked.seed is None:
        raise Refusal(422, "draw counts the draws of a seed", hint="pass seed, too")
    return min(asked.wait, limits.wait_seconds)


def make_draw(store: Served, asked: SampleRequest, limits: Settings, kind: str) -> Callable[[int], Drawn]:
    """Return a function that draws a batch, given its number from 0."""

    first = Draw(describe_sampler(asked.sampler, asked.where), asked.where, asked.seed, asked.draw)

    def draw(number: int) -> Drawn:
        wanted = first if asked.draw is None else first._replace(number=asked.draw + number)
        with limit_reads(limits.max_answer, text=kind != ARROW) as limit:
            limit.check_count(store.rb.schema, asked.batch_size)  # before anything is drawn or counted
            return store.member.sample(wanted, asked.batch_size)

    return draw


@router.post(
    "/stores/{name}/sample", summary="Sample a batch", responses=ROWS_ANSWER | problems(406, 408, 413, 415)
)
async def sample(request: Request, store: Store, limits: Limits, asked: SampleRequest) -> Response:
    """Draw a batch of rows.

    The batch has the fields, `id` and `index`; prioritized samplers add `priority_weight`. `drawn_from` says
    what the rows were drawn from, as `mass` does; it is `expstore.draw` in the metadata of Arrow messages.
    Status 409 with kind `not_ready`: there are too few rows, even after `wait` seconds.
    """
    kind, compression = choose_type(request), compression_of(request)
    seconds, draw = check_request(asked, limits), make_draw(store, asked, limits, kind)

    def answer() -> Response:
        batch, mass = draw(0)
        facts = describe_mass(mass, store.member.read_status())
        return answer_rows(batch, kind, compression, store.encoder, facts)

    return await store.run_patiently(answer, seconds)


class MassRequest(RequestModel):
    """A request for the mass of a sampler."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"sampler": {"kind": "uniform"}, "batch_size": 2}]}
    )

    batch_size: BatchSize = 256
    sampler: ChosenSampler = None
    where: Where = None
    seed: int | None = Field(
        None, ge=0, lt=1 << 63, description="Seed of the draws that will follow; null: the store's draws."
    )


class MassOf(BaseModel):
    """What a sampler draws from."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "mass": 2.0,
                    "rows": 2,
                    "smallest": 1.0,
                    "beta": None,
                    "unit": 1,
                    "left": None,
                    "largest_priority": 1.0,
                    "limits": None,
                }
            ]
        }
    )

    mass: float | None = Field(
        description="Sum of the weights of everything that can be drawn: a row of weight w is drawn with "
        "probability w / mass. Null: draws of this sampler do not follow from weights alone."
    )
    rows: int | None = Field(None, description="Number of readable rows.")
    smallest: float | None = Field(None, description="The smallest weight above 0.")
    beta: float | None = Field(
        None, description="Exponent of `priority_weight`: (w / smallest)^-beta; null: there are no weights."
    )
    unit: int | None = Field(
        None,
        description="Rows that are drawn together: the length of a slice, or 1. Null: a named sampler has "
        "`num_slices`, so the length depends on the size of each batch.",
    )
    left: int | None = Field(
        None,
        description="Rows that can be drawn before any comes again: the rest of a pass, or rows that are not "
        "used up; 0 at the end of a pass. Null: every draw chooses from all rows.",
    )
    largest_priority: float = Field(description="The priority that new rows of the store get.")
    limits: Limited | None = Field(None, description="What the rate limiter counts; null: there is none.")


@router.post(
    "/stores/{name}/mass", summary="Weigh what a sampler draws from", responses=problems(408, 413, 415)
)
async def mass(store: Store, asked: MassRequest) -> MassOf:
    """Return what a batch would be drawn from now, for clients that draw from several stores as from one."""
    wanted = Draw(describe_sampler(asked.sampler, asked.where), asked.where, asked.seed)
    weight = await store.run(lambda: store.member.weigh(wanted, asked.batch_size))
    return MassOf(**describe_mass(weight.mass, weight.status) | {"unit": weight.unit})


@router.post(
    "/stores/{name}/sample/stream",
    summary="Sample a stream of batches",
    response_class=StreamingResponse,
    responses=BATCHES_ANSWER | problems(406, 408, 413, 415),
)
async def stream(request: Request, store: Store, limits: Limits, asked: StreamRequest) -> Response:
    """Draw batch after batch in one answer: as lines of JSON, or as record batches of one Arrow stream.

    The server's limit of bytes applies to each batch, not to the stream.
    """
    kind = choose_type(request, (NDJSON, ARROW))
    seconds = check_request(asked, limits)
    drawing = make_draw(store, asked, limits, kind)
    batches = ArrowBatches(store, compression_of(request)) if kind == ARROW else _JsonBatches(store)
    parts = _Parts(asked.batches, drawing, batches)
    if store.streams.available_tokens < 1:
        raise Refusal(503, f"too many streams read from store {store.name!r}", hint="ask again later")
    first = await store.run_patiently(parts.next, seconds)  # an error must come before the status is sent
    sent = _send_parts(request, store, parts, first, limits.wait_seconds)
    return StreamingResponse(sent, media_type=kind)


class PreviewRequest(RequestModel):
    """A request for a preview of a sampler."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"sampler": {"kind": "prioritized", "alpha": 0.6}, "batch_size": 2, "batches": 10}]
        }
    )

    sampler: Spec | SamplerName | None = Field(
        None, description="A sampler, or the name of a kind with its default parameters; null: uniform."
    )
    where: Where = None
    batch_size: int = Field(256, ge=1, le=100_000, description="Rows of a batch.")
    batches: int = Field(20, ge=1, le=1000, description="Number of batches.")
    seed: int = Field(0, ge=0, lt=1 << 63, description="Seed of the draws: equal seeds give equal previews.")


@router.post("/stores/{name}/sample/preview", summary="Preview a sampler", responses=problems(408, 413, 415))
async def preview_sampler(store: Store, asked: PreviewRequest) -> Preview:
    """Draw batches without sending them, and tell what they are made of.

    Nothing changes: neither the store's draws and counts, nor its limiter and named samplers. At most 200,000
    rows are drawn. Status 409 with kind `not_ready`: there are too few rows.
    """
    if (rows := asked.batch_size * asked.batches) > _PREVIEW_ROWS:
        raise Refusal(422, f"a preview draws {rows:,} rows, and {_PREVIEW_ROWS:,} are allowed",
                      hint="preview fewer or smaller batches")  # fmt: skip
    return await store.run(
        lambda: preview(
            store.rb,
            store.member,
            Draw(describe_sampler(asked.sampler, asked.where), asked.where, asked.seed),
            asked.batch_size,
            asked.batches,
        )
    )


class ArrowBatches:
    """Write batches as one Arrow stream, and return its bytes piece by piece."""

    def __init__(self, store: Served, compression: str | None) -> None:
        self._store, self._packed = store, compression is not None
        self._writer = StreamWriter(compression)
        self.end, self.take = self._writer.end, self._writer.take

    @property
    def pending(self) -> int:
        """Number of bytes that have not been taken."""
        return self._writer.pending

    def write(self, drawn: Drawn) -> None:
        """Append a batch."""
        facts = describe_mass(drawn.mass, self._store.member.read_status())
        write_batch(self._writer, self._store.encoder, drawn.batch, facts, is_packed=self._packed)


class _JsonBatches:
    """Write batches as lines of JSON, and return their bytes piece by piece."""

    def __init__(self, store: Served) -> None:
        self._store, self._lines = store, bytearray()

    @property
    def pending(self) -> int:
        """Number of bytes that have not been taken."""
        return len(self._lines)

    def write(self, drawn: Drawn) -> None:
        """Append a batch."""
        facts = describe_mass(drawn.mass, self._store.member.read_status())
        rows = rows_to_json(self._store.encoder.encode(drawn.batch), facts)
        self._lines += json.dumps(rows, separators=(",", ":")).encode()
        self._lines += b"\n"

    def end(self) -> None:
        """Do nothing: lines of JSON need no end mark."""

    def take(self) -> bytes:
        """Return the bytes written since the last call."""
        taken, self._lines = bytes(self._lines), bytearray()
        return taken


class _Parts:
    """Produce the bytes of a stream, one part at a time.

    Threads: one at a time.

    Args:
        count: Number of batches; None: no end.
        draw: Returns a batch, given its number in the stream.
        batches: Encodes batches.
    """

    def __init__(
        self, count: int | None, draw: Callable[[int], Drawn], batches: ArrowBatches | _JsonBatches
    ) -> None:
        self._count, self._draw, self._batches = count, draw, batches
        self._number = 0
        self.rows = 0
        self.ended = False

    @property
    def endless(self) -> bool:
        """Whether the stream has no end because the client gave no number of batches."""
        return self._count is None

    def next(self) -> bytes | memoryview:
        """Return the next part: at least one batch, or the end of the stream.

        If a later batch of the part cannot be drawn, the part ends before it, and the next call tries again:
        batches that are drawn count, so they must be sent.
        """
        while not self.ended and self._batches.pending < PART_BYTES:
            if self._number == self._count:
                self._batches.end()
                self.ended = True
                break
            try:
                drawn = self._draw(self._number)
                self._batches.write(drawn)
            except ExpStoreError:
                if self._batches.pending == 0:
                    raise
                break
            self.rows += drawn.batch.numel()
            self._number += 1
        return self._batches.take()


async def _send_parts(
    request: Request, store: Served, parts: _Parts, first: bytes | memoryview, seconds: float
) -> AsyncIterator[bytes | memoryview]:
    """Yield the parts of a stream; the next part is made while one is sent.

    At shutdown an endless stream stops without an end mark, so that its client requests a new one.
    """
    async with store.streams:
        part: bytes | memoryview | None = first
        while part is not None:
            rows, over = parts.rows, parts.ended or (parts.endless and store.ending)
            pending = None if over else asyncio.ensure_future(store.run_patiently(parts.next, seconds))
            try:
                yield part
            except BaseException:
                if pending is not None:
                    pending.cancel()
                raise
            request.scope["expstore.rows_out"] = rows
            part = None if pending is None else await pending


# -- named samplers ------------------------------------------------------------------------------------


class NamedSampler(RequestModel):
    """A sampler to keep under a name."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"sampler": {"kind": "without_replacement"}, "seed": 1}]},
    )

    sampler: AnySpec = Field(description="The sampler and its parameters.")
    where: Where = None
    seed: int | None = Field(None, ge=0, lt=1 << 63, description="Seed of its draws; null: a random one.")


class Samplers(BaseModel):
    """The named samplers of a store."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"samplers": {"pass": '{"kind":"without_replacement"}'}}]}
    )

    samplers: dict[str, str] = Field(description="Each sampler as JSON text, by name.")


class SamplerOf(BaseModel):
    """A named sampler."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"name": "pass"}]})

    name: str = Field(description="Its name.")


_Named = Annotated[
    str,
    Path(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$", description="Name of the sampler.", examples=["pass"]),
]


@router.get("/stores/{name}/samplers", summary="List named samplers", responses=problems())
async def samplers(store: Store) -> Samplers:
    """List the samplers that PUT has made since the server opened the store."""
    return Samplers(samplers={name: json.dumps(one) for name, one in store.member.samplers().items()})


@router.put(
    "/stores/{name}/samplers/{sampler}",
    status_code=201,
    summary="Make a named sampler",
    responses=problems(408, 413, 415),
)
async def name_sampler(store: Store, sampler: _Named, asked: NamedSampler) -> SamplerOf:
    """Make a sampler that all clients share by its name. Repeating the same request changes nothing."""
    description = asked.sampler.describe(asked.where)
    await store.run(lambda: store.member.name_sampler(sampler, description, asked.where, asked.seed))
    return SamplerOf(name=sampler)


@router.delete("/stores/{name}/samplers/{sampler}", summary="Delete a named sampler", responses=problems())
async def forget_sampler(store: Store, sampler: _Named) -> SamplerOf:
    """Delete a named sampler. The rows of the store do not change."""
    await store.run(lambda: store.member.forget_sampler(sampler))
    return SamplerOf(name=sampler)
