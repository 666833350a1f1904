"""HTTP requests to a server: connections, retries, and conversion of error answers to exceptions.

Used by the client. It handles addresses, bytes and errors, but no rows. It ignores proxies that the
environment names.

A write has an `Idempotency-Key`, by which the server recognizes a repetition and does the write only once. So
every request can be repeated when its answer is lost.
"""

from __future__ import annotations

import contextlib
import datetime
import http.client
import itertools
import json
import logging
import os
import random
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar
from urllib.parse import quote, unquote, urlsplit

import httpx
import numpy as np

from expstore import errors
from expstore.core import tuning
from expstore.errors import ArgumentError, ExpStoreError, RemoteError, StateError

_logger = logging.getLogger("expstore")

ARROW = "application/vnd.apache.arrow.stream"
JSON = "application/json"
#: Lines of JSON, one for each draw.
DRAWS = "application/x-ndjson"
_Found = TypeVar("_Found")
#: The class of an error by its HTTP status, if the server names no class and none has its kind.
_CLASSES: Mapping[int, type[ExpStoreError]] = {
    404: errors.NotFoundError,
    409: errors.StateError,
    413: errors.SchemaError,
    422: errors.SchemaError,
    423: errors.LockedError,
    504: errors.QueryError,
    507: errors.StorageError,
}
#: Time limit of the request that ends a session.
_FAREWELL_SECONDS = 2.0
#: Seconds without an answer after which a warning says what is waited for.
_NOTICE_SECONDS = 2.0
#: Statuses with which a server asks for a retry.
_AGAIN = (429, 503)
#: The most bytes to read of an error answer.
_MOST = 64 * 1024


@dataclass(frozen=True, kw_only=True)
class Retries:
    """How long to repeat a request that gets no answer, or the status 429 or 503.

    Args:
        seconds: Seconds since the first attempt during which a request is repeated; 0 for a single attempt.
        first: Approximate pause in seconds before the second attempt; each pause is twice as long as the
            one before.
        longest: Longest pause in seconds. A longer `Retry-After` of the server is respected.
        seed: Seed of the random half of each pause, which prevents clients that lost their server together
            from returning together; None for a different seed in every process.
    """

    seconds: float = 60.0
    first: float = 0.05
    longest: float = 2.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not (self.seconds >= 0 and 0 < self.first <= self.longest):
            raise ArgumentError(f"seconds must be at least 0, and 0 < first <= longest, got {self}")


def check_retries(retries: object) -> None:
    """Check the argument `retries` of a connection.

    Raises:
        ArgumentError: It is neither None nor `Retries`.
    """
    if not isinstance(retries, Retries | None):
        raise ArgumentError(
            f"retries must be an expstore.remote.Retries, got {retries!r}",
            hint="pass expstore.remote.Retries(seconds=10)",
        )


@dataclass(frozen=True)
class Address:
    """The address of a served store.

    Args:
        root: URL of the server.
        name: The store's name on the server.
    """

    root: str
    name: str

    @classmethod
    def of(cls, url: str) -> Address:
        """Parse an address such as `http://host:8420/name`.

        Raises:
            ArgumentError: It is not the URL of a store.
        """
        if not isinstance(url, str):
            raise ArgumentError(
                f"{url!r} is not the address of a store; pass one such as http://host:8420/name"
            )
        if "://" not in url:
            raise ArgumentError(
                f"{url!r} is not the address of a store",
                hint="pass one such as http://host:8420/name; expstore.open takes a path of this machine",
            )
        parts = urlsplit(url)
        try:
            parts.port  # noqa: B018
        except ValueError as exc:
            raise ArgumentError(f"{url!r} is not the address of a store: {exc}") from exc
        before, _, name = parts.path.rstrip("/").rpartition("/")
        known = parts.scheme in ("http", "https") and parts.hostname and name
        if not known or parts.query or parts.fragment or parts.username is not None:
            raise ArgumentError(
                f"{url!r} is not the address of a store; pass one such as http://host:8420/name"
            )
        return cls(f"{parts.scheme}://{parts.netloc}{before}", unquote(name))

    def __str__(self) -> str:
        return f"{self.root}/{quote(self.name)}"

    def path(self, route: str) -> str:
        """Return the path of one of the store's routes."""
        base = f"{urlsplit(self.root).path}/v1/stores/{quote(self.name, safe='')}"
        return f"{base}/{route}" if route else base

    def url(self, route: str) -> str:
        """Return the URL of one of the store's routes."""
        parts = urlsplit(self.root)
        return f"{parts.scheme}://{parts.netloc}{self.path(route)}"


@dataclass(frozen=True)
class Answer:
    """The answer of a server.

    Args:
        body: The body's bytes, which may be changed.
        headers: The headers by name, in lower case.
    """

    body: bytearray
    headers: Mapping[str, str]

    def json(self) -> Any:
        """Return the parsed JSON body.

        Raises:
            RemoteError: The body is not JSON.
        """
        try:
            return json.loads(self.body)
        except ValueError as exc:
            raise RemoteError(f"the server's answer is not JSON: {exc}", kind="answer") from exc


class Download:
    """Read a long answer incrementally, into the caller's memory.

    It does not use httpx, which returns 64 KiB at a time, each parsed in Python.

    Threads: one opens and reads; any may close.
    """

    def __init__(self) -> None:
        self.ended = threading.Event()
        self._sock: socket.socket | None = None
        self._response: http.client.HTTPResponse | None = None

    def began(self, sock: socket.socket) -> None:
        """Keep the socket after connecting, so that `close` can shut it down.

        Raises:
            StateError: The download was closed.
        """
        self._release()
        self._sock = sock
        self.check()

    def came(self, response: http.client.HTTPResponse) -> None:
        """Keep the response for `readinto`, when the answer begins."""
        self._response = response

    def check(self) -> None:
        """Raise StateError if the download was closed."""
        if self.ended.is_set():
            self._release()
            raise StateError("the stream of batches is closed", hint="begin a new iteration")

    def send(self, data: bytes) -> None:
        """Send more of the request.

        Raises:
            OSError: The connection broke.
        """
        assert self._sock is not None
        self._sock.sendall(data)

    def readinto(self, memory: Any) -> int:
        """Fill memory and return the number of bytes read; fewer than requested at the end.

        Raises:
            OSError, http.client.HTTPException: The connection broke.
        """
        assert self._response is not None
        return self._response.readinto(memory)

    def close(self) -> None:
        """Close the connection; a thread that opens or reads it is woken."""
        self.ended.set()
        self._release()

    def _release(self) -> None:
        sock = self._sock
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


class _Lost(Exception):
    """Raised when a request got no answer, or one that asks for a retry. It is repeated unless `final`."""

    def __init__(
        self, why: str, error: ExpStoreError | None = None, pause: float = 0.0, *, final: bool = False
    ) -> None:
        super().__init__(why)
        self.error, self.pause, self.final = error, pause, final


class _InProcess:
    """The state of a connection in one process: sockets, random numbers and idempotency keys."""

    def __init__(self, make: Callable[[], httpx.Client], seed: int | None) -> None:
        self.client = make()
        self.random = random.Random(seed)
        self.ended = threading.Event()
        self.session, self.numbers = uuid.uuid4().hex, itertools.count(1)
        self.writes = False  # whether there is a session on the server
        self.beginning = threading.Lock()
        self.downloads: weakref.WeakSet[Download] = weakref.WeakSet()

    def send(self, request: httpx.Request) -> tuple[httpx.Response, bytearray]:
        """Send a request, and return its answer and the body."""
        answer, body = self.client.send(request, stream=True), bytearray()
        with contextlib.closing(answer):
            for part in answer.iter_raw():
                body += part
        if self.ended.is_set():
            # A socket that was being connected while httpx closed all others is not known to it.
            answer.extensions["network_stream"].close()
        return answer, body


class Connection:
    """A connection to a served store.

    Threads: any number may use it. Processes: in a forked child, and in a copy in another process, it opens
    new sockets when it is first used.

    Args:
        address: The store's address.
        token: The access token; None to send none.
        timeout: Seconds that connecting, the answer, and each part of it may take.
        retries: How long requests are repeated; None for the default.
    """

    def __init__(
        self, address: Address, token: str | None, *, timeout: float, retries: Retries | None = None
    ) -> None:
        given: Any = timeout
        if not isinstance(given, int | float | np.number) or not given > 0:
            raise ArgumentError(f"timeout must be a number above 0, got {timeout!r}")
        check_retries(retries)
        if token is not None and not isinstance(token, str):
            raise ArgumentError(f"token must be a string, got a {type(token).__name__}")
        if token is not None and not (token.isascii() and token.isprintable()):
            raise ArgumentError("the token has characters that an HTTP header cannot contain")
        self.address, self.timeout, self.retries = address, timeout, retries or Retries()
        self._token, self._closed = token, False
        self._has_warned = False  # that the server does not answer, since its last answer
        #: Uuid of the store; the server refuses requests if another store has its name. "": not checked.
        self.store = ""
        self._mine: dict[int, _InProcess] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy, which begins a session of its own."""
        return self.__dict__ | {"_mine": {}}

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._closed

    def close(self) -> None:
        """Close the sockets of this process; threads that wait for a retry are woken.

        This ends the session of its writes. The request that tells the server is not repeated if it fails.
        """
        mine = self._mine.get(os.getpid())
        if mine is not None and not self._closed:
            self._end_session(mine)
        self._closed = True
        if mine is not None:
            mine.ended.set()
            mine.client.close()
            for download in list(mine.downloads):
                download.close()

    def move(self, address: Address, token: str | None) -> None:
        """Send requests to another address of the same store from now on, with its token, also repeated ones.

        The session and the idempotency keys remain. Downloads that are running end by themselves.

        Raises:
            ArgumentError: One address uses TLS, and the other does not.
        """
        if urlsplit(address.root).scheme != urlsplit(self.address.root).scheme:
            raise ArgumentError(
                f"a connection to {self.address} cannot move to {address}: use the same scheme"
            )
        self.address, self._token = address, token

    def check(self) -> None:
        """Raise StateError if the connection is closed."""
        if self._closed:
            raise StateError(
                f"the connection to {self.address} is closed", hint="open a new one: expstore.connect()"
            )

    def request(
        self,
        method: str,
        route: str,
        *,
        body: Any = None,
        kind: str = JSON,
        accept: str = JSON,
        params: Mapping[str, str] | None = None,
        write: bool = False,
        once: bool = False,
        wait: float = 0.0,
    ) -> Answer:
        """Send a request and return its answer.

        Args:
            method: The HTTP method.
            route: One of the store's routes.
            body: The body: bytes, or a value that is sent as JSON.
            kind: Content type of the body.
            accept: Content type of the answer.
            params: Parameters of the query.
            write: Whether it changes the store: then it is sent with an idempotency key.
            once: Whether not to repeat it if the server may have received it.
            wait: Seconds that the request asks the server to wait for rows.

        Raises:
            ArgumentError: The body has a value that JSON cannot represent.
            RemoteError: The server cannot be reached, or refuses the request; see `status`.
            ExpStoreError: The error that the store raised on the server, of the same class.
            StateError: The connection is closed.
        """
        mine = self._get_in_process()
        headers = self._headers(accept, None if body is None else kind) | {"X-Session": mine.session}
        if write:
            headers["Idempotency-Key"] = f"{mine.session}-{next(mine.numbers)}"
        if write or once:
            self.begin_session()
        is_value = body is not None and kind == JSON and not isinstance(body, bytes)
        content = encode_json(body) if is_value else body
        timeout = httpx.Timeout(self.timeout, read=self.timeout + wait)

        def ask() -> Answer:
            sent = mine.client.build_request(
                method, self.address.url(route), content=content, headers=headers, params=params,
                timeout=timeout,
            )  # fmt: skip
            try:
                answer, found = mine.send(sent)
            except (httpx.NetworkError, httpx.RemoteProtocolError, httpx.TimeoutException) as exc:
                reached = not isinstance(exc, (httpx.ConnectError, httpx.ConnectTimeout))
                raise _Lost(str(exc) or type(exc).__name__, final=once and reached) from exc
            except RuntimeError:  # another thread closed the connection
                self.check()
                raise
            if not answer.is_success:
                _refuse(answer.status_code, answer.headers, found)
            return Answer(found, answer.headers)

        return self._retry(f"{method} {self.address.path(route)}", mine, ask)

    def open_draws(self, download: Download, *, seconds: float, wait: float) -> None:
        """Begin a request whose body asks for draws one by one, over a socket of its own.

        Args:
            download: Sends chunks of the body, and reads the answer.
            seconds: Seconds in which the answer must begin.
            wait: Seconds that draws ask the server to wait for rows.

        Raises:
            OSError, http.client.HTTPException: The server did not answer in time.
            ExpStoreError: The server refuses.
        """
        mine = self._get_in_process()
        link, url = self._make_link(seconds), self.address.path("draws")
        mine.downloads.add(download)
        try:
            link.connect()
            sock = link.sock
            download.began(sock)
            headers = self._headers(ARROW, DRAWS) | {"Transfer-Encoding": "chunked"}
            link.putrequest("POST", url, skip_accept_encoding=True)
            for name, value in headers.items():
                link.putheader(name, value)
            link.endheaders()
            response = link.getresponse()
            if response.status != 200:
                raise _error_of(response.status, response.read(_MOST))
            sock.settimeout(self.timeout + wait)
            download.came(response)
        except BaseException:
            link.close()
            raise

    def _make_link(self, timeout: float) -> http.client.HTTPConnection:
        secure, parts = self.address.root.startswith("https:"), urlsplit(self.address.root)
        made = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        return made(parts.hostname or "", parts.port, timeout=timeout)

    def begin_session(self) -> None:
        """Start a thread that tells the server about this process's session, until the connection is closed.

        Raises:
            StateError: The connection is closed.
        """
        mine = self._get_in_process()
        with mine.beginning:
            if mine.writes:
                return
            mine.writes = True
        beat = threading.Thread(
            target=_beat, args=(weakref.ref(self), mine.ended), name="expstore-heartbeat", daemon=True
        )
        beat.start()

    def beat(self) -> None:
        """Tell the server that the connection is open. Failures are ignored: the next beat tries again."""
        with contextlib.suppress(ExpStoreError, httpx.HTTPError, RuntimeError):
            self._tell("session", self.timeout)

    def _end_session(self, mine: _InProcess) -> None:
        if mine.writes:
            with contextlib.suppress(ExpStoreError, httpx.HTTPError, RuntimeError):
                self._tell("session/end", min(self.timeout, _FAREWELL_SECONDS))

    def _tell(self, route: str, timeout: float) -> None:
        mine = self._get_in_process()
        headers = self._headers(JSON, None) | {"X-Session": mine.session}
        mine.send(
            mine.client.build_request("POST", self.address.url(route), headers=headers, timeout=timeout)
        )

    def pauses(self) -> Iterator[float]:
        """Yield the pauses between attempts in seconds, each about twice as long as the one before."""
        mine, pause = self._get_in_process(), self.retries.first
        while True:
            yield pause * (0.5 + mine.random.random() / 2)
            pause = min(pause * 2, self.retries.longest)

    def _retry(self, what: str, mine: _InProcess, ask: Callable[[], _Found]) -> _Found:
        began = time.monotonic()
        for times, pause in enumerate(self.pauses(), 1):
            self.check()
            try:
                found = ask()
                self._has_warned = False
                return found
            except _Lost as lost:
                took, pause = time.monotonic() - began, max(pause, lost.pause)
                if lost.final or took + pause > self.retries.seconds:
                    if lost.error is not None:
                        raise lost.error from lost
                    raise RemoteError(
                        f"{self.address.root} does not answer {what}: {lost} "
                        f"(sent {times} times in {took:.1f} s)",
                        kind="unreachable",
                        hint="check the address, and that `expstore serve` runs there",
                    ) from lost
                if lost.error is None and took > _NOTICE_SECONDS and not self._has_warned:
                    self._has_warned = True
                    _logger.warning(
                        f"{self.address.root} does not answer: {lost}; requests are repeated for "
                        f"{self.retries.seconds:g} s (retries=), so start `expstore serve` there, or check "
                        "the address"
                    )
            mine.ended.wait(pause)
        raise AssertionError("pauses do not end")

    def _get_in_process(self) -> _InProcess:
        self.check()
        mine = self._mine.get(os.getpid())
        if mine is None:  # a forked child neither uses nor closes its parent's sockets
            made = _InProcess(self._client, self.retries.seed)
            mine = self._mine.setdefault(os.getpid(), made)
            if mine is not made:
                made.client.close()
        return mine

    def _client(self) -> httpx.Client:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=16)
        secure = self.address.root.startswith("https:")
        return httpx.Client(limits=limits, trust_env=False, follow_redirects=False, verify=secure)

    def _headers(self, accept: str, kind: str | None) -> dict[str, str]:
        headers = {"Accept": accept, "Accept-Encoding": "identity"}
        if kind is not None:
            headers["Content-Type"] = kind
        if self.store:
            headers["X-Store"] = self.store
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        return headers


def _beat(connection: weakref.ref[Connection], ended: threading.Event) -> None:
    """Tell the server every minute that a connection is open, until it is closed or garbage-collected."""
    while not ended.wait(tuning.CONNECTION_HEARTBEAT_SECONDS):
        known = connection()
        if known is None:
            return
        known.beat()
        del known


def encode_json(body: Any) -> bytes:
    """Return a body as JSON; NaN and infinities, which SQL parameters may be, as Python's json writes them.

    Raises:
        ArgumentError: A value cannot be represented.
    """
    return json.dumps(body, default=_to_json).encode()


def _to_json(value: Any) -> Any:
    """Return a value that JSON lacks as one that it has: NumPy's as Python's, dates and times as text."""
    if isinstance(value, np.datetime64):
        return str(value)
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, datetime.date | datetime.time):  # a datetime is a date
        return value.isoformat()
    raise ArgumentError(
        f"a {type(value).__name__} cannot be sent to a server: {value!r:.80}",
        hint="pass numbers, text, dates, times, or lists and dicts of them",
    )


def _refuse(status: int, headers: Any, body: bytes | bytearray) -> NoReturn:
    """Raise the server's error; `_Lost` if the server asks for a retry."""
    error = _error_of(status, body)
    if status in _AGAIN:
        asked = headers.get("Retry-After", "")
        raise _Lost(str(error), error, float(asked) if asked.isdigit() else 0.0)
    raise error


def _error_of(status: int, body: bytes | bytearray) -> ExpStoreError:
    try:
        told = json.loads(body)["error"]
        kind, message, hint = (str(told[name]) for name in ("kind", "message", "hint"))
        name = told.get("class")
    except (ValueError, KeyError, TypeError):
        kind, message, hint = "answer", f"the server answers {status} {bytes(body[:200])!r}", ""
        name = None
    classes: list[type[ExpStoreError]] = [getattr(errors, each) for each in errors.__all__]
    named = [cls for cls in classes if cls.__name__ == name]
    kinds = [cls for cls in classes if cls.default_kind == kind]
    cls = next(iter(named + kinds), _CLASSES.get(status, RemoteError))
    error = cls(message, kind=kind, hint=hint)
    error.status = status
    return error
