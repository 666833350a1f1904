"""The route that streams events of a store: clients learn when it has grown without asking again and again.

Used by the application. A stream is a response of server-sent events
(https://html.spec.whatwg.org/multipage/server-sent-events.html).
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Annotated

import anyio
from fastapi import Query, Request
from fastapi.responses import Response, StreamingResponse

from expstore.api.dependencies import Known, Store, create_router, problems
from expstore.api.errors import Refusal
from expstore.api.stores import Pulse, Served, Stores
from expstore.errors import ExpStoreError

router = create_router("reading")

#: Seconds from an event to the next at least, seconds without an event after which a comment is sent, and
#: seconds between two checks whether the server shuts down.
_PAUSE, _QUIET, _LOOK = 1.0, 15.0, 0.25
_EXAMPLE = 'event: grew\ndata: {"rows": 1000, "written": 5000, "episodes": 12, "generation": 1}\n\n'


@router.get(
    "/stores/{name}/events",
    summary="Stream events of a store",
    response_class=StreamingResponse,
    responses=problems()
    | {
        200: {
            "description": "Server-sent events.",
            "content": {
                "text/event-stream": {
                    "schema": {"type": "string", "description": "Events, and comments to keep it open."},
                    "example": _EXAMPLE,
                }
            },
        }
    },
)
async def events(
    request: Request,
    store: Store,
    stores: Known,
    count: Annotated[
        int | None,
        Query(ge=1, le=1_000_000, description="Number of events; without it, no end.", examples=[1]),
    ] = None,
) -> Response:
    """Send an event `grew` at once, and whenever the store has grown since, at most one a second.

    Its data are the numbers of readable rows, of rows and of episodes ever written, and the generation. A
    comment is sent every 15 seconds without an event. A server has at most 32 streams (503 otherwise). They
    end when the server is shut down or the store is deleted.
    """
    if stores.listeners.available_tokens < 1:
        raise Refusal(503, f"there are already {stores.listeners.total_tokens:.0f} streams of events",
                      hint="ask again later")  # fmt: skip
    first = await store.feel_pulse()  # an error must come before the status is sent
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(
        _send_events(stores, store, first, count), media_type="text/event-stream", headers=headers
    )


async def _send_events(
    stores: Stores, store: Served, pulse: Pulse, count: int | None
) -> AsyncIterator[bytes]:
    """Yield events until the client has as many as it wanted, or the store cannot be read any more."""
    borrower = object()
    try:
        stores.listeners.acquire_on_behalf_of_nowait(borrower)
    except anyio.WouldBlock:  # others came first
        return
    try:
        sent, known, spoke = 0, None, 0.0
        while not store.is_over:
            if pulse != known:
                known, spoke, sent = pulse, anyio.current_time(), sent + 1
                yield f"event: grew\ndata: {json.dumps(pulse._asdict())}\n\n".encode()
                if sent == count:
                    return
            elif anyio.current_time() - spoke >= _QUIET:
                spoke = anyio.current_time()
                yield b": nothing new\n\n"
            until = anyio.current_time() + _PAUSE
            while not store.is_over and (left := until - anyio.current_time()) > 0:
                await anyio.sleep(min(_LOOK, left))
            try:
                pulse = await store.feel_pulse()
            except ExpStoreError:  # closed, or its files cannot be read: the client connects again
                return
    finally:
        stores.listeners.release_on_behalf_of(borrower)
