"""Draws over one connection that stays open: a line goes up for each, a record batch comes down.

Used by `HttpMember`. A request of its own for each draw takes several times as much of both processes' time,
most of it for HTTP. A draw that gets no answer here is requested again in the ordinary way, which also says
why it fails.
"""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Iterator
from typing import Any

from expstore.errors import ExpStoreError, RemoteError
from expstore.remote.forks import copy_in_child
from expstore.remote.transport import Connection, Download
from expstore.wire.frames import Frame
from expstore.wire.stream import read_each

#: The draw for which a connection is opened: a client that draws once or twice needs none.
_FIRST = 3
#: Seconds in which the answer must begin; a proxy that collects bodies would never let it begin.
_OPENING_SECONDS = 2.0
#: Seconds after which a server that did not open a connection for draws is asked again.
_REFUSED_SECONDS = 60.0


class DrawLink:
    """A connection for draws, which is opened when a draw is sent.

    Threads: one at a time; any may close.

    Args:
        connection: The connection to the server.
        wait: Seconds that draws ask the server to wait for rows.
    """

    def __init__(self, connection: Connection, *, wait: float) -> None:
        self._connection, self._wait = connection, wait
        self._download: Download | None = None
        self._frames: Iterator[Frame] = iter(())
        self._refused = float("-inf")

    def send(self, body: bytes) -> bool:
        """Ask for draws; answers come in their order.

        Args:
            body: A line of JSON for each.

        Returns:
            False if they must be requested in another way.
        """
        try:
            download = self._download or self._open()
            download.send(b"%x\r\n%b\n\r\n" % (len(body) + 1, body))
        except (ExpStoreError, OSError, http.client.HTTPException):
            self.close()
            return False
        return True

    def _open(self) -> Download:
        if time.monotonic() < self._refused:
            raise ConnectionRefusedError("the server has not opened a connection for draws")
        self._refused = time.monotonic() + _REFUSED_SECONDS
        download = Download()
        try:
            self._connection.open_draws(download, seconds=_OPENING_SECONDS, wait=self._wait)
        except BaseException:
            download.close()
            raise
        self._refused = float("-inf")
        self._download, self._frames = download, read_each(download.readinto)
        return download

    def read(self) -> Frame | None:
        """Return the next answer; None without one: the draws that were sent must be requested.

        Raises:
            RemoteError: There was no answer in time, and the connection does not repeat requests.
        """
        try:
            frame = next(self._frames, None)
        except TimeoutError as exc:
            frame = None
            if not self._connection.retries.seconds:
                self.close()
                raise RemoteError(
                    f"{self._connection.address.root} does not answer: {exc}", kind="unreachable"
                ) from exc
        except (OSError, EOFError, http.client.HTTPException):
            frame = None
        if frame is None:
            self.close()
        return frame

    def close(self) -> None:
        """Close the connection; the next draw opens another one. A thread that reads is woken."""
        download, self._download, self._frames = self._download, None, iter(())
        if download is not None:
            download.close()


class DrawStream:
    """Ask for single draws over one connection.

    Threads: any number may ask; while one waits for its answer, others are told to use a request. Processes:
    a copy in another process, and a forked child, open a connection of their own.

    Args:
        connection: The connection to the server.
        wait: Seconds that draws ask the server to wait for rows.
    """

    def __init__(self, connection: Connection, *, wait: float) -> None:
        self._connection, self._wait = connection, wait
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._link = DrawLink(self._connection, wait=self._wait)
        #: The thread that has asked and not taken its answer yet.
        self._asking: int | None = None
        self._draws = 0
        copy_in_child(self)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy."""
        return {"_connection": self._connection, "_wait": self._wait}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore what `__getstate__` returned."""
        self.__dict__.update(state)
        self._begin()

    def ask(self, body: bytes) -> bool:
        """Ask for a draw, whose answer `take` returns in the same thread.

        Args:
            body: The request, as JSON without line breaks.

        Returns:
            False if the draw must be requested in another way.
        """
        me = threading.get_ident()
        with self._lock:
            if self._asking not in (None, me):
                return False
            if self._asking == me:  # an exception kept it from taking the answer
                self._link.close()
            self._draws += 1
            self._asking = me if self._draws >= _FIRST and self._link.send(body) else None
            return self._asking == me

    def take(self) -> Frame | None:
        """Return the answer to the last `ask`; None if the draw must be requested in another way.

        Raises:
            RemoteError: There was no answer in time, and the connection does not repeat requests.
        """
        try:
            return self._link.read()
        finally:
            with self._lock:
                self._asking = None

    def close(self) -> None:
        """Close the connection; the next draw opens another one."""
        self._link.close()
