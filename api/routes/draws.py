"""The route that draws batches over one connection, each when the client asks for it.

Used by the application. Python's client uses it for all but its first draws: a request of its own for each
batch takes several times as much time, most of it for HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

from pydantic import ValidationError
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from expstore.api.bodies import ARROW, NDJSON
from expstore.api.dependencies import BATCHES_ANSWER, Limits, Store, create_router, problems
from expstore.api.errors import Refusal
from expstore.api.routes.sample import PART_BYTES, ArrowBatches, StreamRequest, check_request, make_draw
from expstore.api.settings import Settings
from expstore.api.stores import Served
from expstore.buffers.local_member import Drawn
from expstore.errors import ExpStoreError

router = create_router("sampling")

#: Longest line of a request in bytes.
_LINE_BYTES = 64 * 1024
#: Seconds between two looks at whether the server shuts down or the store is deleted.
_LOOK_SECONDS = 0.5
#: The message that a client has disconnected.
_GONE = "http.disconnect"


@router.post(
    "/stores/{name}/draws",
    summary="Draw batches as they are asked for",
    response_class=StreamingResponse,
    responses=problems()
    | {
        200: {
            "description": "An Arrow record batch each.",
            "content": {ARROW: BATCHES_ANSWER[200]["content"][ARROW]},
        }
    },
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                NDJSON: {
                    "schema": {
                        "type": "string",
                        "description": "Lines of JSON, as bodies of `sample/stream`.",
                    },
                    "example": '{"batch_size": 2}\n{"batch_size": 2}\n',
                }
            },
        }
    },
)
async def draws(store: Store, limits: Limits) -> Response:
    """Draw a batch, or several, for each line of the body when the line arrives.

    The answer begins at once. It is one Arrow stream, with a record batch for each line in their order, or
    `batches` of them. So a client sends a line when it wants batches, and needs no request for each. The
    answer ends with the body; when a batch cannot be drawn, of which `sample` says why; when the fields of
    the store change; and after a time without a line.
    """
    return _Draws(store, limits)


class _Draws(Response):
    """Answer lines of a body while they arrive.

    Args:
        store: The store.
        limits: The server's settings.
    """

    media_type = ARROW

    def __init__(self, store: Served, limits: Settings) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._store, self._limits = store, limits
        self._batches = ArrowBatches(store, None)
        #: Draws batches of the request that is being answered, and how many it has drawn.
        self._draw: Callable[[int], Drawn] | None = None
        self._drawn = 0
        #: The next part of the body.
        self._arriving: asyncio.Future[Any] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read lines, and send batches, until the client or this server ends it."""
        scope["expstore.idle_seconds"] = self._limits.idle_seconds
        scope["expstore.rows_out"] = 0
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        with contextlib.suppress(ExpStoreError, ValidationError):
            async for lines in self._read_lines(receive):
                asked = [StreamRequest.model_validate_json(line) for line in lines]
                while asked and not self._is_over(receive):
                    seconds = check_request(asked[0], self._limits)
                    part, rows = await self._store.run_patiently(partial(self._answer, asked), seconds)
                    scope["expstore.rows_out"] += rows
                    await send({"type": "http.response.body", "body": bytes(part), "more_body": True})
        self._batches.end()
        await send({"type": "http.response.body", "body": bytes(self._batches.take())})

    def _answer(self, asked: list[StreamRequest]) -> tuple[bytes | memoryview, int]:
        """Draw a part of the answer: one batch at least; take its batches out of the requests.

        If a later batch cannot be drawn, the part ends before it, and the next call raises the error.
        """
        rows = 0
        while asked and self._batches.pending < PART_BYTES:
            try:
                if self._draw is None:
                    check_request(asked[0], self._limits)
                    self._draw, self._drawn = make_draw(self._store, asked[0], self._limits, ARROW), 0
                drawn = self._draw(self._drawn)
                self._batches.write(drawn)
            except ExpStoreError:
                if not rows:
                    raise
                break
            rows += drawn.batch.numel()
            self._drawn += 1
            if self._drawn == (asked[0].batches or 1):
                self._draw = None
                del asked[0]
        return self._batches.take(), rows

    def _is_over(self, receive: Receive) -> bool:
        """Return whether the client has gone, or the server ends the answer; otherwise await more lines."""
        arriving = self._arriving
        if arriving is None:
            self._arriving = asyncio.ensure_future(receive())
            return self._store.is_over
        has_gone = arriving.done() and not arriving.exception() and arriving.result()["type"] == _GONE
        return has_gone or self._store.is_over

    async def _read_lines(self, receive: Receive) -> AsyncIterator[list[bytes]]:
        rest = bytearray()
        try:
            while not self._is_over(receive):
                arriving = self._arriving
                assert arriving is not None, "it has begun"
                done, _ = await asyncio.wait([arriving], timeout=_LOOK_SECONDS)
                if not done:
                    continue
                message, self._arriving = arriving.result(), None
                rest += message.get("body", b"")
                *lines, rest = rest.split(b"\n")
                if lines:
                    yield [bytes(line) for line in lines]
                if not message.get("more_body", False) or len(rest) > _LINE_BYTES:
                    return
        finally:
            if self._arriving is not None:
                self._arriving.cancel()
                with contextlib.suppress(asyncio.CancelledError, Refusal):
                    await self._arriving
