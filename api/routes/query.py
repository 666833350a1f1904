"""Routes that ask about a store: episodes, and SQL, which runs in a process of its own.

Used by the application. No text of a client reaches the store's own database.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from expstore.api.auth import check_origin
from expstore.api.bodies import ARROW, JSON, accepted, arrow_answer, json_answer, to_json
from expstore.api.dependencies import ARROW_ANSWER, Limits, Store, problems
from expstore.api.errors import Refusal
from expstore.api.settings import Settings
from expstore.api.stores import Served
from expstore.buffers.read_limits import ReadLimit
from expstore.wire.stream import batches_of, table_stream

router = APIRouter(tags=["asking"])

#: As JSON a result takes about so many times the bytes that it has as Arrow.
_JSON_TIMES = 6


@router.get("/stores/{name}/episodes", responses=ARROW_ANSWER | problems(406))
async def episodes(
    request: Request,
    store: Store,
    limits: Limits,
    after: Annotated[int, Query(ge=0, lt=1 << 63, description="Only those of higher ids.")] = 0,
    limit: Annotated[int, Query(ge=1, le=100_000)] = 1000,
    source: Annotated[str | None, Query(max_length=200)] = None,
    status: Annotated[Literal["open", "terminated", "truncated", "cut"] | None, Query()] = None,
) -> Response:
    """List episodes in the order of their ids, those whose rows have left, too."""
    kind = accepted(request)
    where = ["episode_id > $after"]
    params: dict[str, Any] = {"after": after}
    for name, value in (("source", source), ("status", status)):
        if value is not None:
            where.append(f"{name} = ${name}")
            params[name] = value

    def ask() -> Response:
        found = store.rb.episodes(" AND ".join(where), "episode_id", limit, params=params)
        table = found.arrow()
        ReadLimit(limits.max_answer, text=kind == JSON).check_bytes(table.nbytes)
        return _answer(table_stream(table), kind)

    return await store.run(ask)


class Question(BaseModel):
    """A question in SQL."""

    model_config = ConfigDict(extra="forbid")

    query: str = Field(min_length=1, max_length=16_384, description="One SELECT.")
    params: list[Any] | dict[str, Any] | None = Field(None, description="Values for ? or $name.")
    limit: int | None = Field(None, ge=1, description="Rows of the answer, if fewer than the server allows.")


@router.post("/stores/{name}/sql", responses=ARROW_ANSWER | problems(406, 408, 413, 415, 504))
async def sql(request: Request, store: Store, limits: Limits, asked: Question) -> Response:
    """Ask in SQL; an answer that was cut to its limits says so in the header `X-Truncated`."""
    _check(limits)
    kind = accepted(request)
    return await store.run(lambda: _asked(store, limits, asked, kind))


@router.get("/stores/{name}/sql", responses=ARROW_ANSWER | problems(406, 504))
async def sql_by_url(
    request: Request,
    store: Store,
    limits: Limits,
    q: Annotated[str, Query(min_length=1, max_length=16_384)],
    limit: Annotated[int | None, Query(ge=1)] = None,
) -> Response:
    """Ask in SQL by a URL."""
    # A page of another site could learn about rows from how long its questions take.
    check_origin(request.headers, request.headers["host"])
    _check(limits)
    asked, kind = Question(query=q, params=None, limit=limit), accepted(request)
    return await store.run(lambda: _asked(store, limits, asked, kind))


def _check(limits: Settings) -> None:
    if not limits.sql:
        raise Refusal(403, "this server answers no SQL", hint="it was started with --no-sql")


def _asked(store: Served, limits: Settings, asked: Question, kind: str) -> Response:
    rows = limits.sql_rows if asked.limit is None else min(asked.limit, limits.sql_rows)
    size = limits.max_answer if kind == ARROW else limits.max_answer // _JSON_TIMES
    found = store.sql.query(asked.query, asked.params, rows=rows, size=size)
    answer = _answer(found.data, kind)
    answer.headers["X-Truncated"] = "true" if found.truncated else "false"
    return answer


def _answer(data: Any, kind: str) -> Response:
    if kind == ARROW:
        return arrow_answer(data)
    names, batches = batches_of(data)
    rows = [list(row) for batch in batches for row in zip(*to_json(batch), strict=True)]
    return json_answer({"columns": names, "rows": rows})
