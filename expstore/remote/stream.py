"""Background reader of a stream of batches: a thread prefetches a few batches of one long answer.

Used by the client. If the connection breaks, the stream is requested again from the next batch; no batch is
returned twice.
"""

from __future__ import annotations

import http.client
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from expstore.errors import ExpStoreError, RemoteError, StateError
from expstore.remote.transport import Connection, Download
from expstore.wire.frames import Frame
from expstore.wire.stream import read_each

#: Seconds that `close` waits for the thread, which may be connecting to a host that does not answer.
_PATIENCE = 1.0


class Feed:
    """Prefetch the batches of a stream.

    Threads: one takes batches; any may close. Processes: usable only in the process that created it.

    Args:
        connection: The connection to the server.
        ask: Returns the body of the request, given the number of batches received so far.
        make: Converts a frame to a batch; called in the feed's thread.
        count: Number of batches; None for an endless stream.
        ahead: Number of batches to prefetch, at least 1.
        wait: Seconds that the request asks the server to wait for rows.
    """

    def __init__(
        self,
        connection: Connection,
        ask: Callable[[int], dict[str, Any]],
        make: Callable[[Frame], Any],
        *,
        count: int | None,
        ahead: int,
        wait: float,
    ) -> None:
        self._connection, self._ask, self._make = connection, ask, make
        self._count, self._ahead, self._wait = count, ahead, wait
        self._ready: deque[Any] = deque()
        self._change = threading.Condition()
        self._end: BaseException | None = None
        self._closed = False
        self._download = Download()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="expstore-feed", daemon=True)
        self._thread.start()

    def take(self) -> Any:
        """Return the next batch; None at the end of the stream.

        Raises:
            RemoteError: The server does not answer, also after retries.
            ExpStoreError: The error that the store raised on the server.
            StateError: The feed belongs to another process, or is closed.
        """
        if os.getpid() != self._pid:
            raise StateError("this iteration belongs to another process", hint="begin a new iteration here")
        with self._change:
            self._change.wait_for(lambda: self._ready or self._end is not None or self._closed)
            if self._closed:
                raise StateError("the stream of batches is closed", hint="begin a new iteration")
            if self._ready:
                batch = self._ready.popleft()
                if len(self._ready) <= self._ahead // 2:  # not after each batch: switching threads takes time
                    self._change.notify_all()
                return batch
            if isinstance(self._end, StopIteration):
                return None
            assert self._end is not None
            raise self._end

    def close(self) -> None:
        """End the stream and its thread."""
        if os.getpid() != self._pid:
            return
        with self._change:
            self._closed = True
            self._ready.clear()
            self._change.notify_all()
        self._download.close()
        self._thread.join(_PATIENCE)

    def _run(self) -> None:
        end: BaseException = StopIteration()
        try:
            self._read()
        except BaseException as exc:
            end = exc
        finally:
            self._download.close()
        with self._change:
            self._end = end
            self._change.notify_all()

    def _read(self) -> None:
        came, began, pauses = 0, time.monotonic(), self._connection.pauses()
        while self._count is None or came < self._count:
            self._connection.fetch(self._download, "sample/stream", self._ask(came), wait=self._wait)
            before = came
            try:
                for frame in read_each(self._download.readinto):
                    if not self._put(self._make(frame)):
                        return
                    came += 1
                return
            except (OSError, EOFError, http.client.HTTPException) as exc:
                if isinstance(exc, ExpStoreError):
                    raise
                if self._closed:
                    return
                if came > before:
                    began, pauses = time.monotonic(), self._connection.pauses()
                pause, took = next(pauses), time.monotonic() - began
                if took + pause > self._connection.retries.seconds:
                    raise RemoteError(
                        f"the stream of batches from {self._connection.address} broke: {exc}",
                        kind="unreachable",
                    ) from exc
                self._download.ended.wait(pause)

    def _put(self, batch: Any) -> bool:
        """Queue a batch when there is room; return False if the feed was closed."""
        with self._change:
            self._change.wait_for(lambda: len(self._ready) < self._ahead or self._closed)
            if not self._closed:
                self._ready.append(batch)
                if len(self._ready) == 1:
                    self._change.notify_all()
            return not self._closed
