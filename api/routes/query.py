"""Routes that query episodes, and SQL routes, which run in a separate process.

Used by the application. No text of a client reaches the store's own database.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import Query, Request
from fastapi.responses import Response
from pydantic import ConfigDict, Field

from expstore.api.bodies import ARROW, JSON, arrow_answer, choose_type, json_answer, to_json
from expstore.api.dependencies import (
    SQL_ANSWER,
    EpisodeCondition,
    Limits,
    Store,
    check_sql,
    create_router,
    problems,
    table_answer,
)
from expstore.api.errors import Refusal
from expstore.api.page.episode_pages import ORDER_PATTERN, EpisodePage, Filters
from expstore.api.page.facets import Facets, count_facts, facets_of
from expstore.api.page.findings import Changes, OddEpisodes
from expstore.api.page.relations import Relations, describe_relations
from expstore.api.page.series import (
    BY_PATTERN,
    GROUPS,
    Y_PATTERN,
    Series,
    X,
    build_query,
    is_over_rows,
    series_of,
    throughput_of,
)
from expstore.api.request_models import RequestModel
from expstore.api.settings import Settings
from expstore.api.stores import Served
from expstore.buffers.read_limits import ReadLimit
from expstore.errors import NotReadyError, QueryError
from expstore.sql.result import table_stream
from expstore.trajectories.odd import THRESHOLD
from expstore.wire.json_sizes import json_bytes
from expstore.wire.stream import batches_of, read_table

router = create_router("asking")

#: Size of most results as JSON, relative to their size as Arrow; larger results are refused.
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
    if where is not None:
        check_sql(limits)
        limit = max(1, min(limit, limits.sql_rows - 1))  # a query asks for one more row
    found = EpisodePage(filters, order, limit, page)

    def ask() -> Response:
        table, truncated = _ask(store, limits, where is not None, *found.query(), rows=found.limit + 1)
        table, headers = found.cut(table, truncated=truncated)
        ReadLimit(limits.max_answer).check_bytes(table.nbytes)
        response = _answer(table_stream(table), kind, limits)
        total = _count(store, limits, filters)
        if total is not None:
            headers["X-Total"] = str(total)
        response.headers.update(headers)
        return response

    return await store.run(ask)


def _ask(
    store: Served, limits: Settings, is_limited: bool, sql: str, params: dict[str, Any], *, rows: int
) -> tuple[Any, bool]:
    """Return the result of a query over episodes, and whether rows are missing.

    A query with a condition of a client, or one that may take long, is limited: it runs in the sandbox.
    """
    if not is_limited:
        return store.rb.sql(sql, params).arrow(), False
    found = store.query(sql, params, rows=rows, size=limits.max_answer)
    return read_table(found.data), found.truncated


def _count(store: Served, limits: Settings, filters: Filters) -> int | None:
    """Return how many episodes match; None: counting them takes too long."""
    try:
        table, _ = _ask(store, limits, filters.where is not None, *filters.count(), rows=1)
    except (QueryError, NotReadyError) as exc:
        if exc.kind not in ("timeout", "memory", "busy"):
            raise
        return None
    total: int = table[0][0].as_py()
    return total


@router.get("/stores/{name}/series", summary="Chart episodes", response_model=Series, responses=problems(504))
async def series(
    store: Store,
    limits: Limits,
    y: Annotated[
        str,
        Query(
            pattern=Y_PATTERN,
            description="The values: `return` or `length` of ended episodes; `info.` and a fact; `measure.`, "
            "a measure and after a dot its field; `field.` and a number of the rows, such as `next.reward` "
            "or `state:0`, of which each episode has the mean; or rows written per second (`throughput`).",
            examples=["return"],
        ),
    ] = "return",
    x: Annotated[
        X,
        Query(
            description="The order of episodes: by id, by the time of their end, by the number of rows "
            "that were written until then, or by the fact or field `policy_version`. `throughput` is over "
            "`time`."
        ),
    ] = "episode",
    by: Annotated[
        str,
        Query(
            pattern=BY_PATTERN,
            description="What the episodes of a group have in common: `none`, `source`, `session`, `split`, "
            "`status`, or `info.` and the name of a fact.",
            examples=["source"],
        ),
    ] = "none",
    points: Annotated[int, Query(ge=1, le=2000, description="Most bins of a group.")] = 500,
    where: EpisodeCondition = None,
) -> Response:
    """Return values in bins of equal width, for charts: mean, quantiles, extremes and count of each bin.

    Only ended episodes with a finite value count, also those whose rows are not in the store any more. There
    are at most 20 groups; the smaller ones are together in the last one. With a condition, groups have fewer
    bins if the server's limit of SQL rows requires it. Fields of the rows are read within the limits of
    `/sql`. `throughput` comes from the times of the readable
    rows, and has neither groups nor a condition. Without a condition, an answer may be reused for 20 times
    the time that it took, at most 5 seconds.
    """
    is_limited = where is not None or is_over_rows(y)
    if is_limited:
        check_sql(limits)
    if y == "throughput" and (by != "none" or where is not None):
        raise Refusal(422, "throughput has neither groups nor a condition", hint="leave by and where out")

    def ask() -> bytes:
        if y == "throughput":
            return throughput_of(store.rb.storage, points).model_dump_json().encode()
        most = max(1, min(points, limits.sql_rows // GROUPS)) if is_limited else points
        sql, params = build_query(Filters(where), store.rb.schema, y, x, by, most)
        table, _ = _ask(store, limits, is_limited, sql, params, rows=GROUPS * most)
        return series_of(y, x, table).model_dump_json().encode()

    # A condition may run for long and fail: clients must not wait for one another's.
    find = ask if where is not None else lambda: store.charts.find((y, x, by, points), ask)
    return Response(await store.run(find), media_type=JSON)


_LIMIT = Annotated[int, Query(ge=1, le=1000, description="Most entries of the answer.")]


@router.get("/stores/{name}/changes", summary="List changes", response_model=Changes, responses=problems())
async def changes(store: Store, limit: _LIMIT = 20) -> Response:
    """Return since when which episodes differ from those before, and how; the strongest change first.

    Groups of episodes (of a source, split, lane or fact) are compared with their own past and with the other
    groups, policy versions with the episodes before and after them. An answer takes less than a second; it is
    kept for 20 times as long, at most a minute. Episodes that were not measured are measured by and by.
    """
    return Response(await store.run(lambda: store.findings.list_changes(limit)), media_type=JSON)


@router.get(
    "/stores/{name}/odd", summary="List odd episodes", response_model=OddEpisodes, responses=problems()
)
async def odd(
    store: Store,
    limit: _LIMIT = 20,
    threshold: Annotated[
        float, Query(ge=0, le=1e9, description="Smallest score of a listed episode; 0 lists all.")
    ] = THRESHOLD,
) -> Response:
    """Return the episodes that differ most from their peers, the oddest first, with the reason in words.

    An answer is kept for 20 times the time that it took, at most a minute. Episodes that were not measured
    are measured by and by.
    """
    return Response(await store.run(lambda: store.findings.list_odd(limit, threshold)), media_type=JSON)


@router.get("/stores/{name}/facets", summary="Count facts", response_model=Facets, responses=problems(504))
async def facets(
    store: Store,
    limits: Limits,
    where: EpisodeCondition = None,
    values: Annotated[int, Query(ge=1, le=100, description="Most values of each facet.")] = 10,
) -> Response:
    """Count the episodes by source, status, split and the values of their facts.

    Facts of the store itself, such as measures, and facts that are lists or objects are left out. A condition
    is evaluated in the sandbox of `/sql`, within its limits. Without a condition, an answer may be reused for
    20 times the time that it took, at most 5 seconds.
    """
    if where is not None:
        check_sql(limits)

    def ask() -> bytes:
        sql, params = count_facts(Filters(where), values)
        table, _ = _ask(store, limits, where is not None, sql, params, rows=limits.sql_rows)
        return facets_of(table).model_dump_json().encode()

    find = ask if where is not None else lambda: store.charts.find(("facets", values), ask)
    return Response(await store.run(find), media_type=JSON)


@router.get("/stores/{name}/relations", summary="Describe relations of SQL", responses=problems())
async def relations(store: Store, limits: Limits) -> Relations:
    """List the relations that SQL sees, with names, types and meanings of their columns."""
    check_sql(limits)
    return await store.run(lambda: describe_relations(store.rb))


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
    check_sql(limits)
    asked, kind = Question(query=q, params=None, limit=limit), choose_type(request)
    return await store.run(lambda: _run_query(store, limits, asked, kind))


def _run_query(store: Served, limits: Settings, asked: Question, kind: str) -> Response:
    rows = limits.sql_rows if asked.limit is None else min(asked.limit, limits.sql_rows)
    size = limits.max_answer if kind == ARROW else limits.max_answer // _JSON_TIMES
    found = store.query(asked.query, asked.params, rows=rows, size=size)
    answer = _answer(found.data, kind, limits)
    answer.headers["X-Truncated"] = "true" if found.truncated else "false"
    return answer


def _answer(data: Any, kind: str, limits: Settings) -> Response:
    """Return a table as a response.

    Raises:
        QueryError: It is too large as JSON (kind "too_large").
    """
    if kind == ARROW:
        return arrow_answer(data)
    names, batches = batches_of(data)
    size = sum(json_bytes(column) for batch in batches for column in batch.columns)
    ReadLimit(limits.max_answer).check_bytes(size)
    rows = [list(row) for batch in batches for row in zip(*to_json(batch), strict=True)]
    return json_answer({"columns": names, "rows": rows})
