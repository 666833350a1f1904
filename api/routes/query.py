"""Routes that query episodes, and SQL routes, which run in a separate process.

Used by the application. No text of a client reaches the store's own database.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from pydantic import ConfigDict, Field

from expstore.api.auth import check_origin
from expstore.api.bodies import ARROW, JSON, arrow_answer, choose_type, json_answer, to_json
from expstore.api.dependencies import (
    SQL_ANSWER,
    EpisodeCondition,
    Limits,
    Store,
    check_sql,
    problems,
    table_answer,
)
from expstore.api.episode_pages import ORDER_PATTERN, EpisodePage, Filters
from expstore.api.request_models import RequestModel
from expstore.api.settings import Settings
from expstore.api.stores import Served
from expstore.buffers.read_limits import ReadLimit
from expstore.errors import NotReadyError, QueryError
from expstore.wire.stream import batches_of, read_table, table_stream

router = APIRouter(tags=["asking"])

#: Approximate size of a result as JSON, relative to its size as Arrow.
_JSON_TIMES = 6


_PAGE_HEADERS = {
    "X-Next": "Cursor of the next page; absent on the last page.",
    "X-Previous": "Cursor of the previous page; absent on the first page.",
    "X-Total": "Number of episodes that match; absent if counting them takes too long.",
}


@router.get(
    "/stores/{name}/episodes",
    summary="List episodes",
    responses=table_answer("A table.", _PAGE_HEADERS) | problems(406, 504),
)
async def episodes(
    request: Request,
    store: Store,
    limits: Limits,
    after: Annotated[int, Query(ge=0, lt=1 << 63, description="Only episodes with higher ids.")] = 0,
    limit: Annotated[int, Query(ge=1, le=100_000, description="Most episodes of the answer.")] = 1000,
    source: Annotated[
        str | None, Query(max_length=200, description="Only episodes of this source.", examples=["actor-7"])
    ] = None,
    status: Annotated[
        Literal["open", "terminated", "truncated", "cut"] | None,
        Query(description="Only episodes with this status.", examples=["terminated"]),
    ] = None,
    where: EpisodeCondition = None,
    order: Annotated[
        str,
        Query(
            pattern=ORDER_PATTERN,
            description="A column of `episodes`, or `info.` and the name of a fact (facts are ordered as "
            "numbers); after `-` descending. NULL comes last, equal values are ordered by id.",
            examples=["-return"],
        ),
    ] = "episode_id",
    page: Annotated[
        str | None, Query(max_length=4000, description="`X-Next` or `X-Previous` of an earlier answer.")
    ] = None,
) -> Response:
    """List episodes, also those whose rows are not in the store any more.

    The headers `X-Next` and `X-Previous` have cursors of the pages around this one, `X-Total` the number of
    matches. Pages neither repeat nor skip episodes while a writer adds some. A condition is evaluated in the
    sandbox of `/sql`, within its limits of time and rows.
    """
    kind = choose_type(request)
    filters = Filters(where, after, source, status)
    found = EpisodePage(filters, order, limit, page)
    if where is not None:
        check_sql(limits)

    def ask() -> Response:
        limit = ReadLimit(limits.max_answer, text=kind == JSON)
        total: int | None
        if where is None:
            table, headers = found.cut(store.rb.sql(*found.query()).arrow())
            total = store.rb.sql(*filters.count()).fetchall()[0][0]
        else:
            sql, params = found.query()
            rows, size = (
                min(found.limit + 1, limits.sql_rows),
                limits.max_answer // (_JSON_TIMES if limit.text else 1),
            )
            answer = store.sql.query(sql, params, rows=rows, size=size)
            table, headers = found.cut(read_table(answer.data), truncated=answer.truncated)
            total = _count(store, filters)
        limit.check_bytes(table.nbytes)
        if total is not None:
            headers["X-Total"] = str(total)
        response = _answer(table_stream(table), kind)
        response.headers.update(headers)
        return response

    return await store.run(ask)


def _count(store: Served, filters: Filters) -> int | None:
    """Return how many episodes match; None: counting them takes too long."""
    try:
        answer = store.sql.query(*filters.count())
    except (QueryError, NotReadyError) as exc:
        if exc.kind not in ("timeout", "memory", "busy"):
            raise
        return None
    total: int = read_table(answer.data)[0][0].as_py()
    return total


class Question(RequestModel):
    """An SQL query."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {
                    "query": "SELECT episode_id, length FROM episodes WHERE length > $least",
                    "params": {"least": 100},
                }
            ]
        },
    )

    query: str = Field(min_length=1, max_length=16_384, description="One SELECT statement.")
    params: list[Any] | dict[str, Any] | None = Field(
        None, description="Values for `?` (a list) or `$name` (an object)."
    )
    limit: int | None = Field(None, ge=1, description="Most rows of the answer; null: the server's limit.")


@router.post(
    "/stores/{name}/sql", summary="Query SQL", responses=SQL_ANSWER | problems(406, 408, 413, 415, 504)
)
async def sql(request: Request, store: Store, limits: Limits, asked: Question) -> Response:
    """Run one SELECT over the store's `transitions`, `episodes` and other relations.

    The query runs in a process that can read this store and nothing else. Its time, rows and bytes are
    limited; the header `X-Truncated` says whether the result was cut.
    """
    check_sql(limits)
    kind = choose_type(request)
    return await store.run(lambda: _run_query(store, limits, asked, kind))


@router.get("/stores/{name}/sql", summary="Query SQL by a URL", responses=SQL_ANSWER | problems(406, 504))
async def sql_by_url(
    request: Request,
    store: Store,
    limits: Limits,
    q: Annotated[
        str,
        Query(
            min_length=1,
            max_length=16_384,
            description="One SELECT statement.",
            examples=["SELECT count(*) FROM transitions"],
        ),
    ],
    limit: Annotated[
        int | None, Query(ge=1, description="Most rows of the answer; without it, the server's limit.")
    ] = None,
) -> Response:
    """Run one SELECT within the same sandbox and limits as POST, for browsers and `curl -G`."""
    # Without this, a page of another site could measure how long queries take, and learn about rows.
    check_origin(request.headers, request.headers["host"])
    check_sql(limits)
    asked, kind = Question(query=q, params=None, limit=limit), choose_type(request)
    return await store.run(lambda: _run_query(store, limits, asked, kind))


def _run_query(store: Served, limits: Settings, asked: Question, kind: str) -> Response:
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
