"""Prepare batches in a background thread while the program uses the previous one.

A `Prefetcher` keeps the order and the numbers of batches; its source makes them, and says whether they are
still valid. It never returns a batch twice, and returns only batches that a direct call
would return at that moment.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from expstore.core.draws import DrawNumber
from expstore.core.values import Selection


class Request(NamedTuple):
    """A request for a batch.

    Args:
        size: Number of rows.
        as_numpy: Whether to return NumPy arrays.
    """

    size: int
    as_numpy: bool = False


@dataclass(frozen=True, slots=True)
class Made:
    """A batch that is ready.

    Args:
        batch: The batch as the user gets it.
        selection: Its rows.
        changes: A token that changes when the batch becomes stale, for instance because rows were changed in
            place.
    """

    batch: Any
    selection: Selection
    changes: object


class Batches(Protocol):
    """Source of batches."""

    def draw_ahead(self, number: int) -> DrawNumber:
        """Return the draw of the batch after `number` prefetched batches."""

    def make(self, draw: DrawNumber, request: Request, instead: Selection | None = None) -> Made:
        """Make the batch of a turn; `instead` is an earlier selection for it whose rows were overwritten."""

    def stands(self, made: Made | None) -> bool:
        """Return whether batches of the same age as this one (None: any batches) may still be returned."""

    def readable(self, made: Made) -> bool:
        """Return whether all rows that were read for the batch are still readable."""

    def hand_out(self, made: Made) -> None:
        """Count the oldest prefetched batch as returned."""

    def give_back(self) -> None:
        """Reset draws and sampler to the state after the last returned batch."""


class Prefetcher:
    """Prepare the next batches in a background thread.

    Threads: any number may call `next`; calls are served one after another, so batches are returned in the
    order of their numbers. It has no reference to the buffer, so an unused buffer can be collected; the
    thread ends with the prefetcher.

    Args:
        count: Number of batches to prepare.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._lock = threading.Lock()
        self._request: Request | None = None
        self._queue: deque[tuple[DrawNumber, Future[Made]]] = deque()
        # A single thread: samplers with a position must be called in the order of the batches.
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
                # Try again after a failure: rows may have been appended since.
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
        """Drop the prefetched batches."""
        with self._lock:
            self._drop(source)

    def __len__(self) -> int:
        return len(self._queue)

    def close(self, source: Batches) -> None:
        """Drop the prefetched batches and end the thread."""
        self.drop(source)
        self._pool.shutdown(wait=True)
