"""Connections to the server of a language model: HTTP/1.1, kept open between requests.

Used by the proxy, whose calls must not become slower: httpx takes a millisecond more for each than httpcore,
on which it is built. It changes no bytes, follows no redirects, keeps no cookies, and uses no proxies.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import httpcore

#: Seconds until a connection must be open.
_CONNECT_SECONDS = 10.0
#: Seconds after which a connection without requests is not used again: servers close them, uvicorn after 5.
_IDLE_SECONDS = 4.0
_FAILURES = (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException)

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
        self._scheme, self._host = parts.scheme, parts.hostname or ""
        self._port, self._name = parts.port, parts.netloc.encode()
        self._pool = httpcore.AsyncConnectionPool(
            ssl.create_default_context() if parts.scheme == "https" else None,
            max_connections=None,
            max_keepalive_connections=None,
            keepalive_expiry=_IDLE_SECONDS,
        )

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
        url = httpcore.URL(scheme=self._scheme, host=self._host, port=self._port, target=target)
        every, limits = [(b"host", self._name), *headers], {"timeout": {"connect": _CONNECT_SECONDS}}
        request = httpcore.Request(method, url, headers=every, content=body, extensions=limits)
        try:
            return Answer(await self._pool.handle_async_request(request))
        except _FAILURES as exc:
            raise UpstreamError(f"{type(exc).__name__} {exc}".strip()) from exc

    async def close(self) -> None:
        """Close all connections."""
        await self._pool.aclose()


class Answer:
    """An answer whose body is read while it arrives.

    Args:
        answer: Status, headers and the body that arrives.
    """

    def __init__(self, answer: httpcore.Response) -> None:
        self._answer = answer
        self.status = answer.status
        #: Names are in lower case.
        self.headers: list[Header] = [(name.lower(), value) for name, value in answer.headers]

    def header(self, name: bytes) -> str:
        """Return the value of a header; "" without it."""
        return next((value.decode("latin-1") for known, value in self.headers if known == name), "")

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield the bytes of the body.

        Raises:
            UpstreamError: The body ended early.
        """
        try:
            async for part in self._answer.aiter_stream():
                yield part
        except _FAILURES as exc:
            raise UpstreamError(f"{type(exc).__name__}: {exc}") from exc

    async def close(self) -> None:
        """Close the connection, unless the whole body was read."""
        await self._answer.aclose()
