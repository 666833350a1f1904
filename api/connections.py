"""Connections with deadlines, which uvicorn's own connections lack.

Used by the server. A connection is closed if no complete request arrives on it, or if its client does not
read the response. If there are too many connections, the one that was idle longest is closed.

https://github.com/encode/uvicorn: `protocols/http/h11_impl.py`, whose connections wait without a limit for a
head, for the rest of a body that is not read, and for the client to read a response.
"""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from expstore.api.docs_page import BROWSER_HEADERS
from expstore.api.errors import body_of
from expstore.api.settings import Settings

#: Seconds during which the rest of a body is read and dropped after the response. Closing the connection at
#: once could lose the response, because unread bytes make the kernel reset the connection.
_REST_SECONDS = 2.0
#: A response must have been read after this many checks.
_LOOKS = 16


def connections_of(settings: Settings) -> type[asyncio.Protocol]:
    """Return a connection class with the deadlines of the settings."""
    idle: dict[Connection, None] = {}

    class OfSettings(Connection):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(settings, idle, *args, **kwargs)

    return OfSettings


class Connection(H11Protocol):
    """One connection.

    Threads: the event loop's only.

    Args:
        settings: The server's settings.
        idle: The connections without a request in progress, the longest idle first.
    """

    def __init__(self, settings: Settings, idle: dict[Connection, None], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._settings, self._idle = settings, idle
        self._phase = ""
        self._deadline: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._unread = self._least = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the deadline of the first head."""
        super().connection_made(transport)
        # Head and body of a response are sent separately. asyncio sets TCP_NODELAY only for sockets created
        # with an explicit protocol; without it a response would take 40 ms.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._enter("head")
        if len(self.connections) > self._settings.connections:
            first = next(iter(self._idle))  # the new connection is the last of them
            first._enter("")
            first.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all deadlines."""
        self._enter("")
        self._watch_stall(False)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Process bytes; they do not extend the deadline of the current phase."""
        super().data_received(data)
        self._enter(self._find_phase())

    def on_response_complete(self) -> None:
        """Start the deadline of the next head, or of the rest of an unread body."""
        super().on_response_complete()
        self._enter(self._find_phase())
        self._watch_closing()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection."""
        super().timeout_keep_alive_handler()
        self._watch_closing()

    def _find_phase(self) -> str:
        if self.transport.is_closing():
            return ""
        if self.cycle is not None and not self.cycle.response_complete:
            return "answer"
        if self.conn.their_state is not h11.IDLE:
            return "rest"
        fresh = self.timeout_keep_alive_task is not None
        return "kept" if fresh else "head"

    def _enter(self, phase: str) -> None:
        """Start a phase and its deadline; the phase in which a response is computed has none."""
        if phase == self._phase:
            return
        self._phase = phase
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self._idle.pop(self, None)
        if phase in ("head", "kept"):
            self._idle[self] = None
        seconds = {"head": self._settings.head_seconds, "rest": _REST_SECONDS}.get(phase)
        if seconds is not None:
            self._deadline = self.loop.call_later(seconds, self.transport.abort)

    def pause_writing(self) -> None:
        """Start checking whether the client reads its response."""
        super().pause_writing()
        self._watch_stall(True)

    def resume_writing(self) -> None:
        """Stop the stall timer: the client reads its response."""
        super().resume_writing()
        if not self.transport.is_closing():
            self._watch_stall(False)

    def _watch_closing(self) -> None:
        """Start checking if the unread rest of a response keeps the connection from closing."""
        if self.transport.is_closing():
            self._watch_stall(self.transport.get_write_buffer_size() > 0)

    def _watch_stall(self, wanted: bool) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
        if wanted:
            self._unread = self.transport.get_write_buffer_size()
            self._least = self._unread // _LOOKS + 1
            self._look_later()

    def _look_later(self) -> None:
        self._stall = self.loop.call_later(self._settings.answer_seconds, self._look)

    def _look(self) -> None:
        """Close the connection if too little was read since the last check, to free the memory."""
        unread, self._unread = self._unread, self.transport.get_write_buffer_size()
        if unread - self._unread < min(self._least, unread):
            self.transport.abort()
        elif self._unread:
            self._look_later()

    def send_400_response(self, msg: str) -> None:
        """Respond to invalid HTTP with an error in the usual format, unless a response has begun."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(body_of("bad_request", "the request cannot be read as HTTP", "")).encode()
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"connection", b"close"),
                *((name.encode(), value.encode()) for name, value in BROWSER_HEADERS.items()),
            ]
            response = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
        self._watch_closing()
