"""Limit the size of request bodies, and the time in which they must arrive.

Used by the application around every route, so that all readers of a body, FastAPI too, obey the same limits.
It keeps no bytes.
"""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from expstore.api.errors import Refusal, refuse
from expstore.api.settings import Settings

#: Maximum size of a body that is parsed in the event loop, which blocks other requests for up to 0.1 s.
JSON_BYTES = 16 << 20
#: A Content-Length with more digits exceeds any limit; Python does not parse numbers of any length.
_DIGITS = 18


class Incoming:
    """Pass bodies within their limits; respond with 413, 408 or 400 otherwise.

    Args:
        app: The application behind this middleware.
        settings: The server's settings.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request with a limited body to the application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limit = self._settings.max_body
        if scope["expstore.route"].parsed:
            limit = min(limit, JSON_BYTES)
        body = _Body(scope, receive, send, limit, self._settings.body_seconds)
        try:
            body.check_length()
            await self._app(scope, body.receive, body.send)
        except Exception:
            if body.refusal is None or body.answered:
                raise
        if body.refusal is not None and not body.answered:
            await refuse(body.refusal)(scope, receive, send)


class _Body:
    """The body of one request. After a refusal, the refusal is sent in place of the route's response."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, limit: int, seconds: float) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._limit, self._seconds = limit, seconds
        self._deadline: float | None = None
        self._found = 0
        self.refusal: Refusal | None = None
        self.answered = False

    def check_length(self) -> None:
        """Raise Refusal if the headers do not state one length (400), or one above the limit (413).

        uvicorn's own parser checks most of this; other servers pass headers as they come.
        """
        sent = self._scope["headers"]
        lengths = {value.strip() for name, value in sent if name == b"content-length"}
        if not lengths:
            return
        length = lengths.pop()
        if lengths or not length.isdigit():
            text = b", ".join((length, *lengths))[:40].decode("latin-1")
            raise self._note_refusal(Refusal(400, f"Content-Length is {text!r}, not a number of bytes"))
        if any(name == b"transfer-encoding" for name, _ in sent):
            text = "the request has both Content-Length and Transfer-Encoding"
            headers = {"Connection": "close"}
            raise self._note_refusal(Refusal(400, text, hint="send one of them", headers=headers))
        digits = length.lstrip(b"0")
        if len(digits) > _DIGITS or int(digits or b"0") > self._limit:
            raise self._note_refusal(_build_size_refusal(self._limit))

    async def receive(self) -> Message:
        if self._scope["expstore.body_whole"]:
            return await self._receive()
        if self.refusal is not None:
            raise self.refusal
        message = await self._next()
        if message["type"] == "http.disconnect":
            if self.answered:  # a route that left the body unread asks whether its client has gone
                return message
            raise self._note_refusal(Refusal(400, "the body ended early"))
        self._found += len(message.get("body", b""))
        self._scope["expstore.bytes_in"] = self._found
        if self._found > self._limit:
            raise self._note_refusal(_build_size_refusal(self._limit))
        self._scope["expstore.body_whole"] = not message.get("more_body", False)
        return message

    async def _next(self) -> Message:
        """Return the next part; the whole body has a deadline, and each part has a tenth of that time."""
        now = asyncio.get_running_loop().time()
        if self._deadline is None:
            self._deadline = now + self._seconds
        try:
            async with asyncio.timeout(max(0.0, min(self._seconds / 10, self._deadline - now))):
                return await self._receive()
        except TimeoutError:
            raise self._note_refusal(Refusal(408, "the body did not arrive in time")) from None

    async def send(self, message: Message) -> None:
        if self.refusal is not None and not self.answered:
            return
        self.answered = True
        await self._send(message)

    def _note_refusal(self, refusal: Refusal) -> Refusal:
        self.refusal = refusal
        return refusal


def _build_size_refusal(limit: int) -> Refusal:
    return Refusal(413, f"the body has more than {limit:,} bytes", hint="send less at once")
