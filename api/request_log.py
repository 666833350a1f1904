"""Give each request an id, write the access log, and count requests for the metrics.

Used by the application, around everything else. It never logs a token, a query string or a body.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import re
import time
from datetime import UTC, datetime

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from expstore.api.bodies import ROWS
from expstore.api.docs_page import BROWSER_HEADERS
from expstore.api.errors import Refusal, answer, refuse
from expstore.api.metrics import Metrics
from expstore.api.openapi import RouteTable

_log = logging.getLogger("expstore.api")
_access = logging.getLogger("expstore.access")
_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
#: Known methods; any other method is counted as "other".
_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE"})


class RequestLog:
    """Number requests, record how they end, and respond if the application fails.

    Args:
        app: The application behind this middleware.
        routes: The application's routes.
        metrics: Counts the requests.
    """

    def __init__(self, app: ASGIApp, routes: RouteTable, metrics: Metrics) -> None:
        self._app, self._routes, self._metrics = app, routes, metrics
        self._prefix = os.urandom(4).hex()
        self._numbers = itertools.count(1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request to the application and record its end."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = Headers(scope=scope).get("x-request-id", "")
        scope["request_id"] = sent if _SANE_ID.fullmatch(sent) else f"{self._prefix}-{next(self._numbers)}"
        scope["expstore.route"] = self._routes.find(scope)
        scope["expstore.body_whole"] = False
        request = _Request(scope, send)
        self._metrics.in_flight.inc()
        try:
            await self._run_app(request, receive)
        finally:
            self._metrics.in_flight.dec()
            self._note(request)

    async def _run_app(self, request: _Request, receive: Receive) -> None:
        scope = request.scope
        try:
            await self._app(scope, receive, request.send)
        except asyncio.CancelledError:  # the server shuts down and does not wait any longer
            if request.status:
                return  # uvicorn closes the connection, so that the client notices the incomplete response
            await _build_stopped_answer(scope["expstore.body_whole"])(scope, receive, request.send)
        except Exception:
            _log.exception("request %s", scope["request_id"])
            if request.status:
                raise
            body = answer(500, "internal", "the server failed; its log has the details")
            await body(scope, receive, request.send)

    def _note(self, request: _Request) -> None:
        scope, route = request.scope, request.scope["expstore.route"]
        seconds = time.perf_counter() - request.began
        method = scope["method"] if scope["method"] in _METHODS else "other"
        amounts = {
            "bytes_in": scope.get("expstore.bytes_in", 0),
            "bytes_out": request.bytes_out,
            "rows_in": scope.get("expstore.rows_in", 0),
            "rows_out": scope.get("expstore.rows_out", request.rows_out),
        }
        self._metrics.count(route.path, method, request.status, seconds, amounts)
        if _access.isEnabledFor(logging.INFO):
            client = scope.get("client")
            facts = {
                "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "id": scope["request_id"],
                "client": client[0] if client else None,
                "may": scope.get("expstore.may"),
                "method": method,
                "path": scope["path"][:200],
                "route": route.path,
                "status": request.status,
                "seconds": round(seconds, 6),
            }
            _access.info(json.dumps(facts | amounts))


class _Request:
    """The state of a request while it is processed."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self.scope = scope
        self._send = send
        self.began = time.perf_counter()
        self.status = self.bytes_out = self.rows_out = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["X-Request-ID"] = self.scope["request_id"]
            for name, value in BROWSER_HEADERS.items():
                headers.setdefault(name, value)
            self.rows_out = int(headers.get(ROWS, 0))
        else:
            self.bytes_out += len(message.get("body", b""))
        await self._send(message)


def _build_stopped_answer(whole: bool) -> ASGIApp:
    """Return the response to a request that the shutdown interrupted."""
    if whole:
        message = "the server was stopped during the request, which may have been executed or not"
        return answer(500, "stopped", message, "retry with the same idempotency key")
    return refuse(Refusal(503, "the server is being shut down", headers={"Connection": "close"}))
