"""The batches that were drawn together and not returned yet, in the order of their numbers."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from expstore.cluster.many import Drawn
from expstore.remote.forks import copy_in_child
from expstore.remote.worker import Worker


class BatchQueue:
    """Return batches one by one, and draw several at once when they run out, or in a thread before that.

    Batches that are drawn together begin at a multiple of `ahead`: batch k is the same, whichever batch was
    the first of this process. A sampler that a server keeps has no such numbers, so they begin anywhere.

    Threads: any number may take batches. Processes: a copy in another process, and a forked child, draw
    batches again that were drawn and not returned.

    Args:
        fetch: Draws batches, given the number of the first one.
        ahead: Number of batches that are drawn together.
        draw: Number of the first batch.
        is_aligned: Whether batches are drawn together from a multiple of `ahead` on.
    """

    def __init__(
        self, fetch: Callable[[int], list[Drawn]], *, ahead: int, draw: int, is_aligned: bool
    ) -> None:
        self._fetch, self._ahead, self._is_aligned = fetch, ahead, is_aligned
        #: Number of the next batch.
        self.draw = draw
        self._start()

    def _start(self) -> None:
        self._lock, self._worker = threading.Lock(), Worker("expstore-batches")
        self._ready: deque[Drawn] = deque()
        self._pending: Future[list[Drawn]] | None = None
        copy_in_child(self)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which has no batches yet."""
        names = ("_fetch", "_ahead", "_is_aligned", "draw")
        return {name: self.__dict__[name] for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore what `__getstate__` returned."""
        self.__dict__.update(state)
        self._start()

    def take(self, *, prefetch: Callable[[], bool] = lambda: False) -> Drawn:
        """Return the next batch.

        Args:
            prefetch: Returns whether to draw the batches after those that are ready in a thread.

        Raises:
            ExpStoreError: The batches cannot be drawn; the next call tries again.
        """
        with self._lock:
            if not self._ready:
                pending, self._pending = self._pending, None
                first = self.draw // self._ahead * self._ahead if self._is_aligned else self.draw
                batches = self._fetch(first) if pending is None else pending.result()
                self._ready.extend(batches[self.draw - first :])
            found = self._ready.popleft()
            self.draw += 1
            if self._pending is None and len(self._ready) <= self._ahead // 2 and prefetch():
                first = self.draw + len(self._ready)
                self._pending = self._worker.submit(lambda: self._fetch(first))
            return found

    def reset(self, draw: int) -> None:
        """Continue with a batch; drop those that are ready."""
        with self._lock:
            if self._pending is not None:
                self._pending.exception()  # one at a time draws
            self._ready.clear()
            self._pending, self.draw = None, draw

    def close(self) -> None:
        """Drop the batches that are ready, and end the thread."""
        self._ready.clear()
        self._worker.close()
