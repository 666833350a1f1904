"""Convert errors to responses: one JSON format, and a status for every class of the error tree.

Used by the application. Details of internal failures go to the log only, with the request's id.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.routing import Match

from expstore import errors
from expstore.api.request_models import explain_request

_log = logging.getLogger("expstore.api")

#: The status of each class; subclasses that are not listed have their parent's.
STATUS: Mapping[type[errors.ExpStoreError], int] = {
    errors.ExpStoreError: 500,
    errors.ArgumentError: 422,
    errors.SchemaError: 422,
    errors.PriorityError: 422,
    errors.QueryError: 422,
    errors.NotFoundError: 404,
    errors.NotReadyError: 409,
    errors.StateError: 409,
    errors.LockedError: 423,
    errors.StorageError: 500,
    errors.CorruptionError: 500,
    errors.MigrationError: 409,
    errors.SnapshotError: 409,
}
#: Statuses for some kinds of errors, whatever their class.
KINDS: Mapping[str, int] = {
    "too_large": 413,
    "disk_full": 507,
    "not_shipped": 504,
    "timeout": 504,
    "busy": 503,
    "sandbox": 500,
    "rate_limited": 429,
}
#: Statuses after which the same request may be retried, and after how many seconds.
_AGAIN = {409: 1, 429: 1, 503: 1}
_WORDS = {
    400: "bad_request",
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    405: "method",
    408: "timeout",
    413: "too_large",
    415: "media_type",
    422: "request",
    429: "too_many",
    503: "busy",
}


class Refusal(errors.ExpStoreError):
    """An error with an explicit HTTP status, for cases without an error class in the library.

    Args:
        status: The HTTP status.
        message: What was asked and what was found.
        kind: Stable word for programs.
        hint: What to do about it.
        headers: Additional headers of the response.
    """

    default_kind = "request"
    status: int

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str | None = None,
        hint: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, kind=kind or _WORDS.get(status), hint=hint)
        self.status = status
        self.headers = dict(headers or {})


def status_of(exc: errors.ExpStoreError) -> int:
    """Return the status of an error."""
    if isinstance(exc, Refusal):
        return exc.status
    known = KINDS.get(exc.kind)
    return known or next(STATUS[kind] for kind in type(exc).__mro__ if kind in STATUS)


def answer(
    status: int,
    kind: str,
    message: str,
    hint: str = "",
    headers: Any = None,
    error: type[errors.ExpStoreError] | None = None,
) -> Response:
    """Return the response for an error, with its class in `expstore.errors` if it has one."""
    more = dict(headers or {})
    if status in _AGAIN and kind in ("not_ready", "busy", "rate_limited", "too_many"):
        more.setdefault("Retry-After", str(_AGAIN[status]))
    body = body_of(kind, message, hint)
    if error is not None:
        body["error"]["class"] = error.__name__
    return JSONResponse(body, status, more)


def body_of(kind: str, message: str, hint: str) -> dict[str, dict[str, str]]:
    """Return the body of an error response."""
    return {"error": {"kind": kind, "message": message, "hint": hint}}


def refuse(refusal: Refusal) -> Response:
    """Return the response for a refusal."""
    return answer(refusal.status, refusal.kind, refusal.message, refusal.hint, refusal.headers)


def _of_tree(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, errors.ExpStoreError)
    status = status_of(exc)
    if isinstance(exc, Refusal):
        headers, error = exc.headers, None
    else:
        headers, error = None, type(exc)
    if status == 500:
        _log.error("request %s: %s", request.scope.get("request_id", "-"), exc)
        what = "SQL cannot be run" if exc.kind == "sandbox" else "the store cannot be read or written"
        message = f"{what}; the server's log has the details"
        return answer(status, exc.kind, message, error=error)
    root = str(request.app.state.stores.root)
    message, hint = _remove_root(root, exc.message), _remove_root(root, exc.hint)
    return answer(status, exc.kind, message, hint, headers, error)


def _remove_root(root: str, text: str) -> str:
    """Remove the path of the stores' folder from a message of the library: clients must not see it."""
    return text.replace(f"{root}/", "") if root != "." else text


def _of_framework(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    kind = _WORDS.get(exc.status_code, HTTPStatus(exc.status_code).phrase.lower().replace(" ", "_"))
    message, hint = str(exc.detail), ""
    if exc.status_code == 404 and message == HTTPStatus.NOT_FOUND.phrase:
        message = "there is no such route"
        hint = "/docs lists the routes; expstore.connect takes http://HOST:PORT/STORE"
    headers = dict(exc.headers or {})
    if exc.status_code == 405:
        # Starlette's Allow has the methods of one route, even of `episodes/{episode}` for `episodes/end`.
        routes = [one for one in request.app.routes if isinstance(one, APIRoute) and one.include_in_schema]
        routes = [one for one in routes if one.matches(request.scope)[0] is Match.PARTIAL]
        path = min((one.path_format for one in routes), key=lambda path: path.count("{"), default="")
        allowed = sorted(
            {method for one in routes if one.path_format == path for method in one.methods or ()}
        )
        headers["Allow"] = ", ".join(allowed) or headers.get("Allow", "")
        message = f"{request.url.path} does not take {request.method}"
        hint = f"use {headers['Allow'].replace(', ', ' or ')}"
        if request.method not in ("GET", "HEAD") and request.app.state.settings.read_only:
            hint += "; this server only reads its stores"
    return answer(exc.status_code, kind, message, hint, headers=headers)


def _of_request(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, RequestValidationError)
    route = request.scope.get("route")
    known = route.dependant.query_params if isinstance(route, APIRoute) else ()
    parameters = {one.alias: one.field_info.description or "" for one in known}
    return answer(422, "request", *explain_request(exc.errors(), exc.body, parameters))


def _of_others(request: Request, exc: Exception) -> Response:
    # Starlette raises the error again after this response, and the server logs the traceback.
    return answer(500, "internal", "the server failed; its log has the details")


def install(app: FastAPI) -> None:
    """Install handlers so that an application returns all errors in this format."""
    app.add_exception_handler(errors.ExpStoreError, _of_tree)
    app.add_exception_handler(HTTPException, _of_framework)
    app.add_exception_handler(RequestValidationError, _of_request)
    app.add_exception_handler(Exception, _of_others)
