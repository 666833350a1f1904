"""The processes that answer SQL, of few stores at a time: an idle store has none.

Used by the stores of a server. Each `SqlWorker` has up to three processes of 100 MB, so a server of many
stores cannot keep one for every store that was ever asked.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator

from expstore.core.per_key import PerKey
from expstore.sql.sandbox.pool import SqlWorker

#: Number of stores that have processes at a time; more only while more than these are asked at once.
_MOST = 8
#: Seconds after its last query in which a store keeps its processes.
_IDLE_SECONDS = 60.0


class _Kept:
    """A worker, how many threads use it, and when the last use ended."""

    def __init__(self, worker: SqlWorker) -> None:
        self.worker, self.users, self.ended = worker, 0, 0.0


class SqlWorkers:
    """Keep the SQL workers of the stores that were asked last.

    Threads: any number may use it.

    Args:
        clock: Returns seconds of a monotonic clock.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        #: Held while the worker of one store starts.
        self._starting = PerKey(threading.Lock)
        self._kept: OrderedDict[object, _Kept] = OrderedDict()

    @contextlib.contextmanager
    def use(self, key: object, make: Callable[[], SqlWorker]) -> Iterator[SqlWorker]:
        """Yield the worker of a store; it is started if the store has none.

        Args:
            key: Identifies the store.
            make: Starts a worker, which takes about a second.
        """
        kept = self._take(key)
        if kept is None:
            with self._starting.use(key) as starting, starting:
                kept = self._take(key) or self._add(key, make())
        try:
            yield kept.worker
        finally:
            with self._lock:
                kept.users -= 1
                kept.ended = self._clock()

    def _take(self, key: object) -> _Kept | None:
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None:
                kept.users += 1
                self._kept.move_to_end(key)
            return kept

    def _add(self, key: object, worker: SqlWorker) -> _Kept:
        made = _Kept(worker)
        with self._lock:
            made.users += 1
            self._kept[key] = made
            surplus = len(self._kept) - _MOST
            idle = [other for other, kept in self._kept.items() if not kept.users]
            ended = [self._kept.pop(other) for other in idle[: max(0, surplus)]]
        for kept in ended:
            kept.worker.close()
        return made

    def end_idle(self) -> None:
        """End the processes of stores whose last query was a minute ago."""
        until = self._clock() - _IDLE_SECONDS
        with self._lock:
            idle = [key for key, kept in self._kept.items() if not kept.users and kept.ended <= until]
            ended = [self._kept.pop(key) for key in idle]
        for kept in ended:
            kept.worker.close()

    def end(self, key: object) -> None:
        """End the processes of a store, also those that answer a query."""
        with self._lock:
            kept = self._kept.pop(key, None)
        if kept is not None:
            kept.worker.close()
