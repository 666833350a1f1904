"""A fair lock: threads acquire it in the order in which they asked for it.

Used by storages, so that threads that extend at the same time take turns, however soon one of them asks
again.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from typing import Any

_ReentrantLock: Any = type(threading.RLock())  # the name itself is a function in some versions
_acquire, _release = _ReentrantLock.acquire, _ReentrantLock.release


class FairLock(_ReentrantLock):  # type: ignore[misc]
    """A re-entrant lock that is acquired in first-in, first-out order.

    A plain RLock is acquired by the first thread that asks after its release. That is mostly the thread that
    has just released it, again and again, because the others take longer to wake up. Here waiting threads
    form a queue. The first one waits for the lock itself, each other one for its predecessor.

    Threads: any number; a thread that asks while n others wait for it or hold it gets it as the (n+1)th.
    Processes: not shared. Interrupts: a KeyboardInterrupt during an acquire leaves the lock unchanged.

    Example:
        >>> from expstore.disk.fair_lock import FairLock
        >>> lock = FairLock()
        >>> with lock, lock:
        ...     pass
    """

    def __init__(self) -> None:
        self._queue: deque[threading.Lock] = deque()

    # `release` is the base class's: before a release written in Python, an interrupt could be raised.

    def __enter__(self) -> bool:
        """Acquire the lock, after the threads that asked before."""
        if self._is_owned():
            try:
                return bool(_acquire(self))
            except BaseException:  # it does not wait: the interrupt was raised after the acquire
                _release(self)
                raise
        try:
            if not self._queue and _acquire(self, False):
                return True
            return self._wait(threading.Lock())
        except BaseException:
            if self._is_owned():
                _release(self)
            raise

    def acquire(self) -> bool:
        """Acquire the lock, after the threads that asked before."""
        return self.__enter__()

    def _wait(self, gate: threading.Lock) -> bool:
        """Queue this thread and acquire the lock when it is first."""
        gate.acquire()
        try:
            self._queue.append(gate)
            if self._queue[0] is not gate:
                gate.acquire()
            _acquire(self)
            self._leave(gate)
            return True
        except BaseException:
            self._leave(gate)  # also if `_leave` itself was interrupted
            raise

    def _leave(self, gate: threading.Lock) -> None:
        """Remove a thread from the queue, if it is still there, and wake the first thread of the queue."""
        with suppress(ValueError):
            self._queue.remove(gate)
        with suppress(IndexError, RuntimeError):  # the queue is empty, or its first thread is awake already
            self._queue[0].release()
