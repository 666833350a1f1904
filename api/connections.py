"""Connections that end in time: what uvicorn's own lack.

Used by the server. A connection on which no whole request comes is closed, as is one whose answer nobody
takes; when there are too many, the one goes that has been idle for longest.

https://github.com/encode/uvicorn: `protocols/http/h11_impl.py`, whose connections wait for a head, for the
rest of a body that nobody reads, and for the reader of an answer, without end.
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

__all__ = ["connections_of"]

#: How long the rest of a body is read and thrown away behind an answer: closing at once could cost the client
#: the answer, as unread bytes have the kernel reset a connection.
_REST_SECONDS = 2.0
#: An answer must have been taken after so many looks.
_LOOKS = 16


def connections_of(settings: Settings) -> type[asyncio.Protocol]:
    """Return a class of connections that end as the settings say."""
    idle: dict[Connection, None] = {}

    class OfSettings(Connection):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(settings, idle, *args, **kwargs)

    return OfSettings


class Connection(H11Protocol):
    """One connection.

    Threads: the event loop's only.

    Args:
        settings: The server's.
        idle: The connections on which no request is being answered, the first of them for longest.
    """

    def __init__(self, settings: Settings, idle: dict[Connection, None], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._settings, self._idle = settings, idle
        self._phase = ""
        self._deadline: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._unread = self._least = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first head."""
        super().connection_made(transport)
        # Head and body of an answer are sent one after the other. For sockets whose protocol was not named
        # asyncio leaves the wait in between: an answer would take 40 ms.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._enter("head")
        if len(self.connections) > self._settings.connections:
            first = next(iter(self._idle))  # this one is the last of them
            first._enter("")
            first.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._enter("")
        self._watch_stall(False)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes; they put no deadline off."""
        super().data_received(data)
        self._enter(self._find_phase())

    def on_response_complete(self) -> None:
        """Wait for the next head, or for the rest of a body that nobody wants."""
        super().on_response_complete()
        self._enter(self._find_phase())
        self._watch_closing()

    def timeout_keep_alive_handler(self) -> None:
        """End a connection that nobody uses."""
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
        """Begin a phase; each has its deadline, but for that in which an answer is made."""
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
        """Begin to look whether the client takes its answer."""
        super().pause_writing()
        self._watch_stall(True)

    def resume_writing(self) -> None:
        """Be content: it does."""
        super().resume_writing()
        if not self.transport.is_closing():
            self._watch_stall(False)

    def _watch_closing(self) -> None:
        """Begin to look, if what is left of an answer keeps the connection from being closed."""
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
        """End the connection if too little was taken since the last look: the memory is wanted."""
        unread, self._unread = self._unread, self.transport.get_write_buffer_size()
        if unread - self._unread < min(self._least, unread):
            self.transport.abort()
        elif self._unread:
            self._look_later()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, in the form of all errors, unless another answer has begun."""
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
