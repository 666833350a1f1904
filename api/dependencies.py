"""What routes have in common: the store of a request, and descriptions for the OpenAPI document.

Used by the routes.
"""

from __future__ import annotations

from typing import Annotated, Any

import anyio.to_thread
from fastapi import Depends, Request

from expstore.api.bodies import ARROW
from expstore.api.settings import Settings
from expstore.api.stores import Served, Stores
from expstore.buffers.episodes import remote_session

__all__ = ["ARROW_ANSWER", "ARROW_BODY", "Known", "Limits", "Session", "Store", "problems"]


def _stores(request: Request) -> Stores:
    stores: Stores = request.app.state.stores
    return stores


def _settings(request: Request) -> Settings:
    settings: Settings = request.app.state.settings
    return settings


def _session(request: Request) -> str | None:
    """Return the id of the session that a request belongs to; None: it names none.

    Raises:
        SchemaError: It is no id.
    """
    name = request.headers.get("x-session")
    return None if name is None else remote_session(name).id


async def _store(request: Request, name: str) -> Served:
    stores, session = _stores(request), _session(request)
    known = stores.known(name)
    served = await anyio.to_thread.run_sync(stores.served, name) if known is None else known
    if session is not None:
        served.heard.note(session)
    return served


Known = Annotated[Stores, Depends(_stores)]
Limits = Annotated[Settings, Depends(_settings)]
Store = Annotated[Served, Depends(_store)]
Session = Annotated[str | None, Depends(_session)]

_BINARY = {"schema": {"type": "string", "format": "binary"}}
#: Of routes whose body is rows.
ARROW_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {ARROW: _BINARY, "application/json": {"schema": {"type": "object"}}},
    }
}
#: Of routes that answer with rows.
ARROW_ANSWER: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Rows.",
        "content": {ARROW: _BINARY, "application/json": {"schema": {"type": "object"}}},
    }
}
_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {name: {"type": "string"} for name in ("kind", "message", "hint")},
            "required": ["kind", "message", "hint"],
        }
    },
    "required": ["error"],
}
_MEANINGS = {
    400: "The request cannot be read.",
    401: "No token, or none that is known.",
    403: "The token does not allow it, or the request comes from another site's page.",
    404: "There is no such store, row, episode or version.",
    406: "None of the types that are accepted.",
    408: "The body did not come in time.",
    409: "The store is not in a state for it; `kind` says why.",
    413: "Too large.",
    415: "The body is of another type.",
    422: "The body does not fit the store, or a parameter has no meaning.",
    423: "Another process writes to the store.",
    429: "Too many requests of this client.",
    500: "The server failed.",
    503: "Too many requests.",
    504: "It took too long.",
    507: "The disk is full.",
}
_COMMON = (400, 401, 403, 404, 408, 409, 413, 422, 423, 429, 500, 503)


def problems(*more: int, only: bool = False) -> dict[int | str, dict[str, Any]]:
    """Return what the OpenAPI document says of a route's errors.

    Args:
        more: Statuses beside those of every route that has to do with a store.
        only: Leave those out.
    """
    content = {"application/json": {"schema": _ERROR}}
    statuses = {*more} if only else {*_COMMON, *more}
    return {status: {"description": _MEANINGS[status], "content": content} for status in sorted(statuses)}
