"""Make batches ahead of time, while the user's program works with the one before.

A `Prefetcher` keeps the order and the numbers of batches; its source makes them, and says whether one may
still be returned. It never returns a batch twice, nor one that a call at that moment would not have made.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from expstore.buffers.rng import DrawNumber
from expstore.core.values import Selection

__all__ = ["Batches", "Made", "Prefetcher", "Request"]


class Request(NamedTuple):
    """Say what batch is asked for.

    Args:
        size: How many rows.
        as_numpy: Whether it is to be of NumPy arrays.
    """

    size: int
    as_numpy: bool = False


@dataclass(frozen=True, slots=True)
class Made:
    """A batch that is ready.

    Args:
        batch: What the user gets.
        selection: The rows.
        changes: A token that changes when the batch becomes stale: when rows were changed in place, say.
    """

    batch: Any
    selection: Selection
    changes: object


class Batches(Protocol):
    """What makes batches."""

    def draw_ahead(self, number: int) -> DrawNumber:
        """Return the draw after `number` others that are not handed out yet."""

    def make(self, draw: DrawNumber, request: Request, instead: Selection | None = None) -> Made:
        """Make a batch, if need be instead of one whose rows have left."""

    def stands(self, made: Made | None) -> bool:
        """Return whether batches made when this one was (None: any) may still be handed out."""

    def readable(self, made: Made) -> bool:
        """Return whether none of its rows, nor of those that were looked at for it, has left."""

    def hand_out(self, made: Made) -> None:
        """Count the oldest batch made ahead as handed out."""

    def give_back(self) -> None:
        """Take draws and sampler back to the last batch that was returned."""


class Prefetcher:
    """Make the next batches in a thread of its own.

    Threads: any number may ask; they are served one after another, so that batches go out in the order of
    their numbers. It holds no buffer, so that a forgotten one can go; its thread ends with it.

    Args:
        count: How many batches are made ahead.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._lock = threading.Lock()
        self._request: Request | None = None
        self._queue: deque[tuple[DrawNumber, Future[Made]]] = deque()
        # One thread: samplers that keep a place must be asked in the order of the batches.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="expstore-prefetch")

    def next(self, source: Batches, request: Request) -> Made:
        """Return the next batch."""
        with self._lock:
            try:
                if request != self._request or not source.stands(None):
                    self._drop(source)
                    self._request = request
                self._fill(source, request, self.count + 1)
                draw, future = self._queue[0]
                # What failed then may go well now: rows may have come.
                made = None if future.exception() else future.result()
                if made is None or not source.stands(made):
                    self._drop(source)
                    made = source.make(source.draw_ahead(0), request)
                else:
                    self._queue.popleft()
                    if not source.readable(made):
                        made = source.make(draw, request, made.selection)
                source.hand_out(made)
                self._fill(source, request, self.count)
            except BaseException:
                self._drop(source)
                raise
            return made

    def _fill(self, source: Batches, request: Request, count: int) -> None:
        while len(self._queue) < count:
            draw = source.draw_ahead(len(self._queue))
            self._queue.append((draw, self._pool.submit(source.make, draw, request)))

    def _drop(self, source: Batches) -> None:
        futures = [future for _, future in self._queue]
        for future in futures:
            future.cancel()
        wait(futures)
        self._queue.clear()
        source.give_back()

    def drop(self, source: Batches) -> None:
        """Forget what was made ahead."""
        with self._lock:
            self._drop(source)

    def __len__(self) -> int:
        return len(self._queue)

    def close(self, source: Batches) -> None:
        """Forget what was made ahead, and end the thread."""
        self.drop(source)
        self._pool.shutdown(wait=True)
