"""Shared parts of the routes: the store of a request, and descriptions for the OpenAPI document.

Used by the routes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Path, Query, Request
from fastapi.dependencies.models import Dependant

from expstore.api import examples
from expstore.api.bodies import ARROW, NDJSON
from expstore.api.errors import Refusal
from expstore.api.settings import Settings
from expstore.api.stores import Served, Stores
from expstore.buffers.episodes import remote_session
from expstore.core.nearest import suggest
from expstore.errors import StateError


def _stores(request: Request) -> Stores:
    stores: Stores = request.app.state.stores
    return stores


def _settings(request: Request) -> Settings:
    settings: Settings = request.app.state.settings
    return settings


SessionId = Annotated[
    str | None,
    Header(
        description="Id of the client's session: one writer's life. Rows of two sessions never share an "
        "episode. Writes without it share one session per run of the server. 1 to 128 printable ASCII "
        "characters.",
        examples=["actor-7"],
    ),
]
StoreId = Annotated[
    str | None,
    Header(
        description="Uuid of the store that the client means: status 409 with kind `other_store` if another "
        "store has its name by now.",
        examples=["0b9f4c1e5d7a4f6f8a3c2b1d0e9f8a7b"],
    ),
]
StoreName = Annotated[
    str, Path(description="Name of the store: its folder's name, without `.exp`.", examples=["demo"])
]


def _session(x_session: SessionId = None) -> str | None:
    """Return the id of the session that a request names, or None.

    Raises:
        SchemaError: The header is not a valid id.
    """
    return None if x_session is None else remote_session(x_session).id


async def _store(
    request: Request, name: StoreName, x_session: SessionId = None, x_store: StoreId = None
) -> Served:
    stores, session = _stores(request), _session(x_session)
    served = await stores.reach(name)
    if x_store is not None and x_store != served.uuid:
        raise StateError(
            f"store {name!r} is {served.uuid}, but the request is for {x_store[:64]!r}", kind="other_store",
            hint="the folder was replaced: restore the store, or connect again",
        )  # fmt: skip
    if session is not None:
        served.heard.note(session)
    return served


Known = Annotated[Stores, Depends(_stores)]
Limits = Annotated[Settings, Depends(_settings)]
Store = Annotated[Served, Depends(_store)]
Session = Annotated[str | None, Depends(_session)]

EpisodeId = Annotated[int, Path(ge=0, lt=1 << 63, description="Id of the episode.", examples=[1])]
#: A condition of a client over the relation `episodes`; only the SQL sandbox may evaluate it.
EpisodeCondition = Annotated[
    str | None,
    Query(
        min_length=1,
        max_length=4000,
        description="Only episodes that meet this SQL condition over the columns of `episodes`, such as "
        "`info->>'site' = 'lab 3'`. It is evaluated in the sandbox of `/sql`.",
        examples=["length > 100"],
    ),
]


def _query_names(route: Dependant) -> Iterator[str]:
    """Yield the query parameters of a route and of what it depends on."""
    yield from (one.alias for one in route.query_params)
    for part in route.dependencies:
        yield from _query_names(part)


async def check_query(request: Request) -> None:
    """Raise Refusal (422) for a query parameter that the route does not have."""
    if not request.query_params:
        return
    known = list(_query_names(request.scope["route"].dependant))
    name = next((name for name in request.query_params if name not in known), None)
    if name is not None:
        listed = suggest(name, known, "the parameters are") if known else "this route takes none"
        raise Refusal(422, f"there is no query parameter {name[:80]!r}", hint=listed)


def create_router(tag: str) -> APIRouter:
    """Return a router below `/v1`, whose routes reject unknown query parameters.

    Args:
        tag: Tag of its routes, which says what token they need.
    """
    return APIRouter(prefix="/v1", tags=[tag], dependencies=[Depends(check_query)])


def check_sql(limits: Settings) -> None:
    """Raise Refusal (403) if the server does not answer SQL."""
    if not limits.sql:
        raise Refusal(403, "this server does not answer SQL", hint="it was started with --no-sql")


_STREAM = "An Arrow IPC stream, one column per field. Nested keys are joined by dots: `next.reward`."
_COLUMNS = {
    "type": "object",
    "description": "A list per field, a value per row. Nested keys are joined by dots: `next.reward`.",
    "additionalProperties": {"type": "array", "items": {}},
}


def rows_body(count: int) -> dict[str, Any]:
    """Return the OpenAPI description of a body of rows, with an example of `count` rows."""
    json_rows = {name: values[:count] for name, values in examples.ROWS.items()}
    return {
        "requestBody": {
            "required": True,
            "description": f"Rows, as `{ARROW}` or `application/json`. Variable-length fields, bfloat16 "
            "and complex numbers need Arrow.",
            "content": {
                ARROW: {
                    "schema": {"type": "string", "format": "binary", "description": _STREAM},
                    "examples": examples.arrow_examples(count),
                },
                "application/json": {"schema": _COLUMNS, "example": json_rows},
            },
        }
    }


def annotations_body() -> dict[str, Any]:
    """Return the OpenAPI description of a body of annotations, with an example."""
    content: dict[str, Any] = {
        ARROW: {
            "schema": {
                "type": "string",
                "format": "binary",
                "description": "An Arrow IPC stream: a column `id`, and one for each field. Values of any "
                "length are lists.",
            },
            "examples": examples.arrow_annotations(),
        },
        "application/json": {"schema": _ANNOTATIONS, "example": examples.ANNOTATIONS},
    }
    told = f"Ids of rows and a value for each, as `{ARROW}` or `application/json`."
    return {"requestBody": {"required": True, "description": told, "content": content}}


_ANNOTATIONS = {
    "type": "object",
    "properties": {
        "ids": {"type": "array", "items": {"type": "integer"}, "description": "Ids of the rows."},
        "values": _COLUMNS
        | {
            "description": "A list per field, with a number or, for values of any length, a list per row. "
            "New fields get the dtype `float32`, `int64` or `bool`."
        },
        "by": {"type": "string", "description": "Name of what has computed the values; it can be missing."},
        "like": {
            "type": "string",
            "description": "For new fields of any length: the field with as many values in each row.",
        },
    },
    "required": ["ids", "values"],
}
_ROWS = {
    "type": "object",
    "properties": {
        "rows": _COLUMNS
        | {
            "description": "A list per field, a value per row; null for NaN and infinity. `id` is the "
            "permanent id of a row, `index` its position in the store.",
        }
    },
    "required": ["rows"],
}
_TABLE = {
    "type": "object",
    "properties": {
        "columns": {"type": "array", "items": {"type": "string"}, "description": "Names of the columns."},
        "rows": {
            "type": "array",
            "items": {"type": "array", "items": {}},
            "description": "Rows of the result: a value per column; null for NaN and infinity.",
        },
    },
    "required": ["columns", "rows"],
}


def _two_formats(
    description: str, json_type: str, schema: Any, example: Any, headers: dict[str, str]
) -> dict[int | str, dict[str, Any]]:
    return {
        200: {
            "description": f"{description} `{json_type}` unless the Accept header asks for `{ARROW}`; add "
            "`;compression=lz4` or `;compression=zstd` to compress rows.",
            "headers": {
                name: {"description": text, "schema": {"type": "string"}} for name, text in headers.items()
            },
            "content": {
                json_type: {"schema": schema, "example": example},
                ARROW: {
                    "schema": {"type": "string", "format": "binary", "description": _STREAM},
                    "examples": examples.arrow_examples(2),
                },
            },
        }
    }


#: For routes that return rows of the store.
ROWS_ANSWER = _two_formats(
    "Rows.", "application/json", _ROWS, examples.BATCH, {"X-Rows": "Number of rows in the answer."}
)
#: For the route that returns rows of an episode.
EPISODE_ANSWER = _two_formats(
    "Rows.", "application/json", _ROWS, examples.BATCH,
    {"X-Rows": "Number of rows in the answer.",
     "X-First-Step": "Step of the first row; only if `fields`, `start` or `count` is given."},
)  # fmt: skip
#: For the route that returns a stream of batches.
BATCHES_ANSWER = _two_formats(
    "Batches: a line of JSON or an Arrow record batch each.", NDJSON, _ROWS, examples.BATCH, {}
)


def table_answer(description: str, headers: dict[str, str]) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI description of an answer with a table."""
    return _two_formats(description, "application/json", _TABLE, examples.EPISODES, headers)


#: For routes that run SQL.
SQL_ANSWER = table_answer(
    "The result.", {"X-Truncated": "`true` if the result was cut to its limits, otherwise `false`."}
)
_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "description": "What went wrong.",
            "properties": {
                "kind": {"type": "string", "description": "Stable word for programs."},
                "message": {"type": "string", "description": "What was asked and what was found."},
                "hint": {"type": "string", "description": "What to do about it; may be empty."},
                "class": {
                    "type": "string",
                    "description": "Its class in `expstore.errors`; only if the library has raised it.",
                },
            },
            "required": ["kind", "message", "hint"],
        }
    },
    "required": ["error"],
}
_ERROR_EXAMPLE = {
    "error": {"kind": "not_found", "message": "there is no store 'demo'", "hint": "GET /v1/stores lists them"}
}
_MEANINGS = {
    400: "The request cannot be read.",
    401: "The token is missing or unknown.",
    403: "The token does not allow it, or the request comes from another site's page.",
    404: "There is no such store, row, episode or snapshot.",
    406: "The server offers none of the accepted types.",
    408: "The body did not arrive in time.",
    409: "The store is not in a state for it; `kind` says why.",
    413: "Too large.",
    415: "The body has an unsupported type.",
    422: "The body does not match the store, or a parameter is invalid.",
    423: "Another process writes to the store.",
    429: "Too many requests from this client.",
    500: "The server failed.",
    503: "Too many requests.",
    504: "It took too long.",
    507: "The disk is full.",
}
_COMMON = (400, 401, 403, 404, 408, 409, 413, 422, 423, 429, 500, 503)


def problems(*more: int, only: bool = False) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI descriptions of a route's errors.

    Args:
        more: Statuses in addition to those of every route of a store.
        only: Return only the statuses in `more`.
    """
    content = {"application/json": {"schema": _ERROR, "example": _ERROR_EXAMPLE}}
    statuses = {*more} if only else {*_COMMON, *more}
    return {status: {"description": _MEANINGS[status], "content": content} for status in sorted(statuses)}
