"""What every request passes before and after its route: id, permission, limits of its body, log, metrics.

Used by the application, around everything else. It never logs a token, a query string or a body, and keeps
no bytes.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import re
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import NamedTuple

from fastapi.routing import APIRoute
from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from expstore.api.auth import Access
from expstore.api.bodies import ROWS
from expstore.api.docs_page import BROWSER_HEADERS
from expstore.api.errors import Refusal, answer, refuse
from expstore.api.metrics import Metrics
from expstore.api.openapi import SAFE, Need, find_need
from expstore.api.page import files as page_files
from expstore.api.settings import Settings

_log = logging.getLogger("expstore.api")
_access = logging.getLogger("expstore.access")
_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
#: Known methods; any other method is counted as "other".
_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE"})
#: Stands for all unknown paths: otherwise arbitrary paths from clients could fill the memory.
_UNKNOWN = "(none)"
#: Maximum size of a body that is parsed in the event loop, which blocks other requests for up to 0.1 s.
JSON_BYTES = 16 << 20
#: Name of the routes whose requests are passed on to the server of a language model.
RELAY = "relay"
#: A Content-Length with more digits exceeds any limit; Python does not parse numbers of any length.
_DIGITS = 18


class Gateway:
    """Check a request, pass it to the application, and record how it ends.

    Args:
        app: The application behind this middleware.
        routes: Routes in which each request is looked up; later additions count, too.
        settings: The server's settings.
        metrics: Counts the requests.
    """

    def __init__(
        self, app: ASGIApp, *, routes: Iterable[BaseRoute], settings: Settings, metrics: Metrics
    ) -> None:
        self._app, self._routes, self._settings, self._metrics = app, routes, settings, metrics
        self._access = Access(settings)
        self._prefix = os.urandom(4).hex()
        self._numbers = itertools.count(1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        headers = Headers(scope=scope)
        sent = headers.get("x-request-id", "")
        scope["request_id"] = sent if _SANE_ID.fullmatch(sent) else f"{self._prefix}-{next(self._numbers)}"
        route = find_route(self._routes, scope)
        most = self._settings.max_body
        limit = min(most, JSON_BYTES) if route.is_parsed else most
        exchange = _Exchange(scope, receive, send, limit, self._settings.body_seconds)
        self._metrics.in_flight.inc()
        try:
            try:
                self._access.check(scope, headers, route.need, is_relayed=route.is_relayed)
                exchange.check_length()
                await self._app(scope, exchange.receive, exchange.send)
            except Exception as exc:
                if isinstance(exc, Refusal) and exchange.refusal is None:
                    exchange.refusal = exc
                if exchange.refusal is None or exchange.status:
                    raise
            if exchange.refusal is not None and not exchange.status:
                await exchange.end(refuse(exchange.refusal))
        except asyncio.CancelledError:  # the server shuts down and does not wait any longer
            # uvicorn closes the connection, so that the client notices an incomplete response.
            if not exchange.status:
                await exchange.end(_build_stopped_answer(exchange.is_whole))
        except Exception:
            _log.exception("request %s", scope["request_id"])
            if exchange.status:
                raise
            await exchange.end(answer(500, "internal", "the server failed; its log has the details"))
        finally:
            self._metrics.in_flight.dec()
            self._record(exchange, route.path, time.perf_counter() - began)

    def _record(self, exchange: _Exchange, route: str, seconds: float) -> None:
        scope = exchange.scope
        method = scope["method"] if scope["method"] in _METHODS else "other"
        amounts = {
            "bytes_in": exchange.bytes_in,
            "bytes_out": exchange.bytes_out,
            "rows_in": scope.get("expstore.rows_in", 0),
            "rows_out": scope.get("expstore.rows_out", exchange.rows_out),
        }
        self._metrics.count(route, method, exchange.status, seconds, amounts)
        if _access.isEnabledFor(logging.INFO):
            client = scope.get("client")
            facts = {
                "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "id": scope["request_id"],
                "client": client[0] if client else None,
                "may": scope.get("expstore.may"),
                "method": method,
                "path": scope["path"][:200],
                "route": route,
                "status": exchange.status,
                "seconds": round(seconds, 6),
            }
            _access.info(json.dumps(facts | amounts))


class RouteInfo(NamedTuple):
    """What is known about a request before its route is called.

    Args:
        path: The path of its route with names in braces, as in the OpenAPI document.
        need: The permission that a client needs.
        is_parsed: Whether its body is parsed in the event loop before the route is called.
        is_relayed: Whether it is passed on to the server of a language model.
    """

    path: str
    need: str
    is_parsed: bool = False
    is_relayed: bool = False


def find_route(routes: Iterable[BaseRoute], scope: Scope) -> RouteInfo:
    """Return what is known about a request, by the route that the application's router will choose.

    Args:
        routes: The application's routes.
        scope: The request's ASGI scope.
    """
    partial = None
    for route in routes:
        match, _ = route.matches(scope)
        if match is Match.FULL:
            return _describe(route, scope["method"], has_method=True)
        if match is Match.PARTIAL and partial is None:
            partial = route
    return _describe(partial, scope["method"], has_method=False)


def _describe(route: BaseRoute | None, method: str, *, has_method: bool) -> RouteInfo:
    if method in SAFE and getattr(route, "name", "") == page_files.NAME:
        return RouteInfo(page_files.PATH, Need.NOTHING)
    if route is not None and getattr(route, "name", "") == RELAY:
        return RouteInfo(getattr(route, "path_format", _UNKNOWN), Need.WRITE, is_relayed=True)
    need = Need.READ if method in SAFE else Need.WRITE
    if not (isinstance(route, APIRoute) and route.include_in_schema):
        return RouteInfo(_UNKNOWN, need)
    if not has_method:
        return RouteInfo(route.path_format, need)
    return RouteInfo(route.path_format, find_need(method, route.tags), route.body_field is not None)


class _Exchange:
    """A request's body, within its limits, and the response.

    All readers of the body, FastAPI too, obey the same limits. After a refusal of the body, the refusal is
    sent in place of the route's response.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, limit: int, seconds: float) -> None:
        self.scope = scope
        self._receive, self._send = receive, send
        self._limit, self._seconds = limit, seconds
        self._deadline: float | None = None
        self.refusal: Refusal | None = None
        self.is_whole = False
        self.status = self.bytes_in = self.bytes_out = self.rows_out = 0

    def check_length(self) -> None:
        """Raise Refusal if the headers do not state one length (400), or one above the limit (413).

        uvicorn's own parser checks most of this; other servers pass headers as they come.
        """
        sent = self.scope["headers"]
        lengths = {value.strip() for name, value in sent if name == b"content-length"}
        if not lengths:
            return
        length = lengths.pop()
        if lengths or not length.isdigit():
            text = b", ".join((length, *lengths))[:40].decode("latin-1")
            raise Refusal(400, f"Content-Length is {text!r}, not a number of bytes")
        if any(name == b"transfer-encoding" for name, _ in sent):
            text = "the request has both Content-Length and Transfer-Encoding"
            raise Refusal(400, text, hint="send one of them", headers={"Connection": "close"})
        digits = length.lstrip(b"0")
        if len(digits) > _DIGITS or int(digits or b"0") > self._limit:
            raise _build_size_refusal(self._limit)

    async def receive(self) -> Message:
        if self.is_whole:
            return await self._receive()
        if self.refusal is not None:
            raise self.refusal
        message = await self._next()
        if message["type"] == "http.disconnect":
            if self.status:  # a route that left the body unread asks whether its client has gone
                return message
            raise self._note_refusal(Refusal(400, "the body ended early"))
        self.bytes_in += len(message.get("body", b""))
        if self.bytes_in > self._limit:
            raise self._note_refusal(_build_size_refusal(self._limit))
        self.is_whole = not message.get("more_body", False)
        return message

    async def _next(self) -> Message:
        """Return the next part; the whole body has a deadline, and each part has a tenth of that time.

        A route whose body asks for more while it is answered gives each part `expstore.idle_seconds` instead.
        """
        now, idle = asyncio.get_running_loop().time(), self.scope.get("expstore.idle_seconds")
        if self._deadline is None:
            self._deadline = now + self._seconds
        left = min(self._seconds / 10, self._deadline - now) if idle is None else idle
        try:
            async with asyncio.timeout(max(0.0, left)):
                return await self._receive()
        except TimeoutError:
            raise self._note_refusal(Refusal(408, "the body did not arrive in time")) from None

    def _note_refusal(self, refusal: Refusal) -> Refusal:
        self.refusal = refusal
        return refusal

    async def send(self, message: Message) -> None:
        if self.refusal is not None and not self.status:
            return
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if not self.scope.get("expstore.is_relayed"):  # headers of another server stay as they are
                headers = MutableHeaders(scope=message)
                headers["X-Request-ID"] = self.scope["request_id"]
                for name, value in BROWSER_HEADERS.items():
                    headers.setdefault(name, value)
                self.rows_out = int(headers.get(ROWS, 0))
        else:
            self.bytes_out += len(message.get("body", b""))
        await self._send(message)

    async def end(self, response: ASGIApp) -> None:
        """Send a response of the server itself; the route has not begun any."""
        self.refusal = None
        await response(self.scope, self._receive, self.send)


def _build_size_refusal(limit: int) -> Refusal:
    return Refusal(413, f"the body has more than {limit:,} bytes", hint="send less at once")


def _build_stopped_answer(is_whole: bool) -> ASGIApp:
    """Return the response to a request that the shutdown interrupted."""
    if is_whole:
        message = "the server was stopped during the request, which may have been executed or not"
        return answer(500, "stopped", message, "retry with the same idempotency key")
    return refuse(Refusal(503, "the server is being shut down", headers={"Connection": "close"}))
