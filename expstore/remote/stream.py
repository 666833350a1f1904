"""Batches of one long answer, read and made in a thread, a few ahead of who takes them.

Used by the client. What breaks off is asked for again, from the batch that would have come; it never hands
out a batch twice.
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

__all__ = ["Feed"]

#: Seconds that closing waits for the thread, which may be connecting to a host that says nothing.
_PATIENCE = 1.0


class Feed:
    """Take batches of a stream.

    Threads: one takes; any may close. Processes: it stays in the one that made it.

    Args:
        connection: To the server.
        ask: Returns the body that asks for batches, given how many have come already.
        make: Makes a batch of a record batch; in the feed's thread.
        count: How many batches there are; None: no end.
        ahead: How many are made ahead, at least 1.
        wait: Seconds that the server was asked to wait.
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
        """Return the next batch; None: there are no more.

        Raises:
            RemoteError: The server is gone, and does not come back.
            ExpStoreError: What the store has raised there.
            StateError: The feed is of another process, or closed.
        """
        if os.getpid() != self._pid:
            raise StateError("these batches come to another process", hint="begin a new iteration here")
        with self._change:
            self._change.wait_for(lambda: self._ready or self._end is not None or self._closed)
            if self._closed:
                raise StateError("the stream of batches is closed", hint="begin a new iteration")
            if self._ready:
                batch = self._ready.popleft()
                if len(self._ready) <= self._ahead // 2:  # not for every batch: threads that take turns wait
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
                        f"the batches of {self._connection.address} break off: {exc}", kind="unreachable"
                    ) from exc
                self._download.ended.wait(pause)

    def _put(self, batch: Any) -> bool:
        """Hand a batch over when there is room; False: nobody takes any more."""
        with self._change:
            self._change.wait_for(lambda: len(self._ready) < self._ahead or self._closed)
            if not self._closed:
                self._ready.append(batch)
                if len(self._ready) == 1:
                    self._change.notify_all()
            return not self._closed
