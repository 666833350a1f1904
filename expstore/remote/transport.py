"""Requests to a server, sent until they are answered: connections, repetitions, errors by their kind.

Used by the client. It knows addresses, bytes and errors, never rows; proxies that the environment names are
not asked.

A write carries an `Idempotency-Key`, by which the server knows it again: however often it is sent, it is
done once. So every request may be repeated when its answer is lost.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
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

from expstore import errors
from expstore.core import tuning
from expstore.errors import ExpStoreError, RemoteError, StateError

__all__ = ["ARROW", "JSON", "Address", "Answer", "Connection", "Download", "Retries"]

ARROW = "application/vnd.apache.arrow.stream"
JSON = "application/json"
_Found = TypeVar("_Found")
#: What becomes of an error whose kind is none of a class, by its status.
_CLASSES: Mapping[int, type[ExpStoreError]] = {
    404: errors.NotFoundError,
    409: errors.StateError,
    413: errors.SchemaError,
    422: errors.SchemaError,
    423: errors.LockedError,
    504: errors.QueryError,
    507: errors.StorageError,
}
#: So long may telling the server take that a session is over.
_FAREWELL_SECONDS = 2.0
#: The server is there and asks to come again.
_AGAIN = (429, 503)
#: Of an answer that is an error: more of it is not read.
_MOST = 64 * 1024


@dataclass(frozen=True, kw_only=True)
class Retries:
    """Say how long a request that gets no answer, or 429 or 503, is sent again.

    Args:
        seconds: From its first time on; 0: it is sent once.
        first: Pause before the second time, about; each is twice as long as that before.
        longest: Longest pause. What the server asks for (`Retry-After`) is waited for at least.
        seed: Of the part of each pause (half of it) that is random, so that clients which lost their server
            together do not all come back together; None: another one in every process.
    """

    seconds: float = 60.0
    first: float = 0.05
    longest: float = 2.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not (self.seconds >= 0 and 0 < self.first <= self.longest):
            raise ValueError(f"seconds from 0 on and 0 < first <= longest, not {self}")


@dataclass(frozen=True)
class Address:
    """Say where a store is served.

    Args:
        root: URL of the server.
        name: The store's name there.
    """

    root: str
    name: str

    @classmethod
    def of(cls, url: str) -> Address:
        """Read `http://host:8420/name`.

        Raises:
            ValueError: It is no such URL.
        """
        parts = urlsplit(url)
        before, _, name = parts.path.rstrip("/").rpartition("/")
        known = parts.scheme in ("http", "https") and parts.hostname and name
        if not known or parts.query or parts.fragment or parts.username is not None:
            raise ValueError(f"{url!r} is no address of a store; give one such as http://host:8420/name")
        return cls(f"{parts.scheme}://{parts.netloc}{before}", unquote(name))

    def __str__(self) -> str:
        return f"{self.root}/{quote(self.name)}"

    def path(self, route: str) -> str:
        """Return the path of one of the store's routes."""
        base = f"{urlsplit(self.root).path}/v1/stores/{quote(self.name, safe='')}"
        return f"{base}/{route}" if route else base


@dataclass(frozen=True)
class Answer:
    """Hold what the server has answered.

    Args:
        body: Its bytes, which may be written to.
        headers: By name, in lower case.
    """

    body: bytearray
    headers: Mapping[str, str]

    def json(self) -> Any:
        """Return what its JSON says.

        Raises:
            RemoteError: It is none.
        """
        try:
            return json.loads(self.body)
        except ValueError as exc:
            raise RemoteError(f"the answer is no JSON: {exc}", kind="answer") from exc


class Download:
    """Read a long answer as it comes.

    Not by httpx: it hands out 64 KiB at a time, each through a parser in Python; this fills the caller's
    memory.

    Threads: one opens and reads; any may close.
    """

    def __init__(self) -> None:
        self.ended = threading.Event()
        self._sock: socket.socket | None = None
        self._response: http.client.HTTPResponse | None = None

    def began(self, sock: socket.socket) -> None:
        """Be told where the answer will come from.

        Raises:
            StateError: Nobody waits for it any more.
        """
        self._release()
        self._sock = sock
        self.check()

    def came(self, response: http.client.HTTPResponse) -> None:
        """Be told that it begins."""
        self._response = response

    def check(self) -> None:
        """Raise StateError if it is closed."""
        if self.ended.is_set():
            self._release()
            raise StateError("the stream of batches is closed", hint="begin another one")

    def readinto(self, memory: Any) -> int:
        """Fill memory, and return how many bytes; fewer at the end.

        Raises:
            OSError, http.client.HTTPException: The connection broke.
        """
        assert self._response is not None
        return self._response.readinto(memory)

    def close(self) -> None:
        """End the connection; who opens or reads is woken."""
        self.ended.set()
        self._release()

    def _release(self) -> None:
        sock = self._sock
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


class _Lost(Exception):
    """The request has no answer; it may be sent again, unless it is final."""

    def __init__(
        self, why: str, error: ExpStoreError | None = None, pause: float = 0.0, *, final: bool = False
    ) -> None:
        super().__init__(why)
        self.error, self.pause, self.final = error, pause, final


class _InProcess:
    """What a connection has in one process: sockets, random numbers, keys of its own."""

    def __init__(self, make: Callable[[], httpx.Client], seed: int | None) -> None:
        self.client = make()
        self.random = random.Random(seed)
        self.ended = threading.Event()
        self.session, self.numbers = uuid.uuid4().hex, itertools.count(1)
        self.writes = False  # whether there is a session on the server
        self.beginning = threading.Lock()
        self.downloads: weakref.WeakSet[Download] = weakref.WeakSet()


class Connection:
    """Send requests to one server.

    Threads: any number may. Processes: in a forked child, and in a copy in another process, it opens sockets
    of its own when it is first used.

    Args:
        address: The store's.
        token: Who is asking; None: anybody.
        timeout: Seconds that connecting may take, and the answer, and each part of it.
        retries: How long a request is sent again.
    """

    def __init__(
        self, address: Address, token: str | None, *, timeout: float, retries: Retries | None = None
    ) -> None:
        if not timeout > 0:
            raise ValueError(f"timeout must be above 0, got {timeout!r}")
        if token is not None and not (token.isascii() and token.isprintable()):
            raise ValueError("the token holds characters that no header has")
        self.address, self.timeout, self.retries = address, timeout, retries or Retries()
        self._token, self._closed = token, False
        self._mine: dict[int, _InProcess] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs, which has a session of its own."""
        return self.__dict__ | {"_mine": {}}

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._closed

    def close(self) -> None:
        """Close the sockets of this process; who waits to send something again is woken.

        The session of its writes ends: the server is told once, without waiting for one that does not answer.
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

    def check(self) -> None:
        """Raise StateError if it is closed."""
        if self._closed:
            raise StateError(
                f"the connection to {self.address} is closed", hint="make another one: expstore.connect()"
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
        """Send a request, and return its answer.

        Args:
            method: HTTP's.
            route: One of the store's.
            body: What is sent: bytes, or what JSON can keep.
            kind: The body's type.
            accept: The answer's.
            params: Of the query.
            write: Whether it changes the store: it has a key then.
            once: Whether it is not sent again once the server may have begun with it.
            wait: Seconds that the server was asked to wait.

        Raises:
            RemoteError: The server cannot be reached, or refuses; of `status` it says.
            ExpStoreError: What the store has raised there: the same class.
            StateError: The connection is closed.
        """
        mine = self._here()
        headers = self._headers(accept, None if body is None else kind) | {"X-Session": mine.session}
        if write:
            headers["Idempotency-Key"] = f"{mine.session}-{next(mine.numbers)}"
        if write or once:
            self.begin_session()
        content = json.dumps(body).encode() if body is not None and kind == JSON else body
        timeout = httpx.Timeout(self.timeout, read=self.timeout + wait)
        url = self.address.path(route)

        def ask() -> Answer:
            sent = mine.client.build_request(
                method, url, content=content, headers=headers, params=params, timeout=timeout
            )
            try:
                answer = mine.client.send(sent, stream=True)
                with contextlib.closing(answer):
                    found = bytearray()
                    for part in answer.iter_raw():
                        found += part
            except (httpx.NetworkError, httpx.RemoteProtocolError, httpx.TimeoutException) as exc:
                reached = not isinstance(exc, (httpx.ConnectError, httpx.ConnectTimeout))
                raise _Lost(str(exc) or type(exc).__name__, final=once and reached) from exc
            except RuntimeError:  # another thread has closed it
                self.check()
                raise
            if not answer.is_success:
                _refuse(answer.status_code, answer.headers, found)
            return Answer(found, answer.headers)

        return self._until_answered(f"{method} {url}", mine, ask)

    def fetch(self, download: Download, route: str, body: Any, *, wait: float = 0.0) -> None:
        """Ask for a long answer of Arrow, over a socket of its own.

        Args:
            download: By which it is read; one that has broken off may be opened again.
            route: One of the store's.
            body: What JSON can keep.
            wait: Seconds that the server was asked to wait.

        Raises:
            RemoteError: The server cannot be reached, or refuses.
            ExpStoreError: What the store has raised there.
            StateError: The download is closed.
        """
        mine, content = self._here(), json.dumps(body).encode()
        headers = self._headers(ARROW, JSON) | {"Connection": "close"}
        parts, url = urlsplit(self.address.root), self.address.path(route)
        made = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection

        mine.downloads.add(download)

        def ask() -> None:
            download.check()
            link = made(parts.hostname or "", parts.port, timeout=self.timeout + wait)
            try:
                link.connect()
                download.began(link.sock)
                link.request("POST", url, content, headers)
                response = link.getresponse()
                if response.status != 200:
                    _refuse(response.status, response.headers, response.read(_MOST))
                download.came(response)
            except (OSError, http.client.HTTPException) as exc:
                link.close()
                if isinstance(exc, ExpStoreError):
                    raise
                raise _Lost(str(exc) or type(exc).__name__) from exc
            except BaseException:
                link.close()
                raise

        self._until_answered(f"POST {url}", mine, ask, download.ended)

    def begin_session(self) -> None:
        """Have the server hear of this process's session from now on, while the connection is open.

        Raises:
            StateError: The connection is closed.
        """
        mine = self._here()
        with mine.beginning:
            if mine.writes:
                return
            mine.writes = True
        beat = threading.Thread(
            target=_beat, args=(weakref.ref(self), mine.ended), name="expstore-heartbeat", daemon=True
        )
        beat.start()

    def beat(self) -> None:
        """Tell the server that the connection is open; what fails is tried again with the next beat."""
        with contextlib.suppress(ExpStoreError, httpx.HTTPError, RuntimeError):
            self._tell("session", self.timeout)

    def _end_session(self, mine: _InProcess) -> None:
        if mine.writes:
            with contextlib.suppress(ExpStoreError, httpx.HTTPError, RuntimeError):
                self._tell("session/end", min(self.timeout, _FAREWELL_SECONDS))

    def _tell(self, route: str, timeout: float) -> None:
        mine = self._here()
        headers = self._headers(JSON, None) | {"X-Session": mine.session}
        mine.client.post(self.address.path(route), headers=headers, timeout=timeout)

    def pauses(self) -> Iterator[float]:
        """Return pauses to make one after another, each about twice as long as that before."""
        mine, pause = self._here(), self.retries.first
        while True:
            yield pause * (0.5 + mine.random.random() / 2)
            pause = min(pause * 2, self.retries.longest)

    def _until_answered(
        self, what: str, mine: _InProcess, ask: Callable[[], _Found], ended: threading.Event | None = None
    ) -> _Found:
        began = time.monotonic()
        for times, pause in enumerate(self.pauses(), 1):
            self.check()
            try:
                return ask()
            except _Lost as lost:
                took, pause = time.monotonic() - began, max(pause, lost.pause)
                if lost.final or took + pause > self.retries.seconds:
                    if lost.error is not None:
                        raise lost.error from lost
                    raise RemoteError(
                        f"{self.address.root} does not answer {what}: {lost} "
                        f"(sent {times} times in {took:.1f} s)",
                        kind="unreachable",
                    ) from lost
            (ended or mine.ended).wait(pause)
        raise AssertionError("pauses do not end")

    def _here(self) -> _InProcess:
        self.check()
        mine = self._mine.get(os.getpid())
        if mine is None:  # the parent's sockets stay the parent's: they are neither used nor closed
            made = _InProcess(self._client, self.retries.seed)
            mine = self._mine.setdefault(os.getpid(), made)
            if mine is not made:
                made.client.close()
        return mine

    def _client(self) -> httpx.Client:
        parts = urlsplit(self.address.root)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=16)
        return httpx.Client(
            base_url=f"{parts.scheme}://{parts.netloc}", limits=limits, trust_env=False,
            follow_redirects=False, verify=parts.scheme == "https",
        )  # fmt: skip

    def _headers(self, accept: str, kind: str | None) -> dict[str, str]:
        headers = {"Accept": accept, "Accept-Encoding": "identity"}
        if kind is not None:
            headers["Content-Type"] = kind
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        return headers


def _beat(connection: weakref.ref[Connection], ended: threading.Event) -> None:
    """Tell the server every minute that a connection is open, until it is closed or forgotten."""
    while not ended.wait(tuning.CONNECTION_HEARTBEAT_SECONDS):
        known = connection()
        if known is None:
            return
        known.beat()
        del known


def _refuse(status: int, headers: Any, body: bytes | bytearray) -> NoReturn:
    """Raise what the server has raised; `_Lost` if it asks to come again."""
    error = _error_of(status, body)
    if status in _AGAIN:
        asked = headers.get("Retry-After", "")
        raise _Lost(str(error), error, float(asked) if asked.isdigit() else 0.0)
    raise error


def _error_of(status: int, body: bytes | bytearray) -> ExpStoreError:
    try:
        told = json.loads(body)["error"]
        kind, message, hint = (str(told[name]) for name in ("kind", "message", "hint"))
    except (ValueError, KeyError, TypeError):
        kind, message, hint = "answer", f"the server answers {status} {bytes(body[:200])!r}", ""
    made = next((cls for cls in _tree(ExpStoreError) if cls.default_kind == kind), None)
    error = (made or _CLASSES.get(status, RemoteError))(message, kind=kind, hint=hint)
    error.status = status
    return error


def _tree(cls: type[ExpStoreError]) -> Iterator[type[ExpStoreError]]:
    for name in errors.__all__:
        found = getattr(errors, name)
        if issubclass(found, cls):
            yield found
