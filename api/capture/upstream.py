"""Connections to the server of a language model: HTTP/1.1, kept open between requests.

Used by the proxy, whose calls must not become slower: httpx takes a millisecond of CPU for each, this module
half of it. It changes no bytes, follows no redirects and keeps no cookies.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import h11

#: Seconds until a connection must be open.
_CONNECT_SECONDS = 10.0
#: Seconds after which a connection without requests is not used again: servers close them, uvicorn after 5.
_IDLE_SECONDS = 4.0
_READ_BYTES = 1 << 16
#: Most bytes of the head of an answer.
_HEAD_BYTES = 1 << 17

Header = tuple[bytes, bytes]


class UpstreamError(Exception):
    """The upstream gave no answer, or not all of it."""


class Upstream:
    """Send requests to one server.

    Threads: the event loop's only.

    Args:
        url: Its address, of which only scheme, host and port are used.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        is_secure = parts.scheme == "https"
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if is_secure else 80)
        self._name = parts.netloc.encode()
        self._tls = ssl.create_default_context() if is_secure else None
        self._idle: list[_Connection] = []

    async def ask(
        self, method: str, target: bytes, headers: list[Header], body: AsyncIterator[bytes] | bytes
    ) -> Answer:
        """Send a request, and return its answer when the head has arrived.

        Args:
            method: The method.
            target: Path and query.
            headers: All headers but Host.
            body: The body; an iterator for one that is sent as it comes.

        Raises:
            UpstreamError: There is no answer.
        """
        connection = self._take_idle() or await self._connect()
        try:
            event = await connection.send([(b"host", self._name), *headers], method, target, body)
        except BaseException:
            connection.close()
            raise
        return Answer(event, connection, self._idle)

    def close(self) -> None:
        """Close the connections without a request."""
        while self._idle:
            self._idle.pop().close()

    def _take_idle(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable:
                return connection
            connection.close()
        return None

    async def _connect(self) -> _Connection:
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                streams = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
        except OSError as exc:
            raise UpstreamError(f"no connection: {type(exc).__name__} {exc}".strip()) from exc
        return _Connection(*streams)


class Answer:
    """An answer whose body is read while it arrives.

    Args:
        head: Status and headers.
        connection: The connection.
        idle: Takes the connection when the body has been read.
    """

    def __init__(self, head: h11.Response, connection: _Connection, idle: list[_Connection]) -> None:
        self.status = head.status_code
        #: Names are in lower case.
        self.headers: list[Header] = list(head.headers)
        self._connection, self._idle = connection, idle
        self._has_ended = False

    def header(self, name: bytes) -> str:
        """Return the value of a header; "" without it."""
        return next((value.decode("latin-1") for known, value in self.headers if known == name), "")

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield the bytes of the body.

        Raises:
            UpstreamError: The body ended early.
        """
        while not isinstance(event := await self._connection.receive(), h11.EndOfMessage):
            if isinstance(event, h11.Data):
                yield bytes(event.data)
        if self._connection.renew():
            self._has_ended = True  # from now on the connection may belong to another request
            self._idle.append(self._connection)

    def close(self) -> None:
        """Close the connection, unless the whole body was read."""
        if not self._has_ended:
            self._connection.close()


class _Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._protocol = h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEAD_BYTES)
        self._last = time.monotonic()

    @property
    def is_usable(self) -> bool:
        return not self._reader.at_eof() and time.monotonic() - self._last < _IDLE_SECONDS

    async def send(
        self, headers: list[Header], method: str, target: bytes, body: AsyncIterator[bytes] | bytes
    ) -> h11.Response:
        """Send a request, and return the head of its answer."""
        send = self._protocol.send
        data = send(h11.Request(method=method, target=target, headers=headers)) or b""
        try:
            if isinstance(body, bytes):
                self._writer.write(data + (send(h11.Data(data=body)) or b"" if body else b""))
            else:
                self._writer.write(data)
                async for part in body:
                    self._writer.write(send(h11.Data(data=part)) or b"")
                    await self._writer.drain()
            self._writer.write(send(h11.EndOfMessage()) or b"")
            await self._writer.drain()
        except OSError as exc:
            raise UpstreamError(f"the connection broke: {type(exc).__name__} {exc}".strip()) from exc
        while not isinstance(event := await self.receive(), h11.Response):
            pass  # informational
        return event

    async def receive(self) -> h11.Event:
        """Return the next event of the answer."""
        try:
            while (event := self._protocol.next_event()) is h11.NEED_DATA:
                self._protocol.receive_data(await self._reader.read(_READ_BYTES))
        except (OSError, h11.RemoteProtocolError) as exc:
            raise UpstreamError(f"{type(exc).__name__}: {exc}") from exc
        if isinstance(event, h11.ConnectionClosed) or event is h11.PAUSED:
            raise UpstreamError("the connection was closed without an answer")
        assert isinstance(event, h11.Event)
        return event

    def renew(self) -> bool:
        """Make the connection ready for another request; return whether it can have one."""
        if self._protocol.our_state is self._protocol.their_state is h11.DONE:
            self._protocol.start_next_cycle()
            self._last = time.monotonic()
            return True
        return False

    def close(self) -> None:
        self._writer.transport.abort()
