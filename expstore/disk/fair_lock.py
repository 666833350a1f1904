"""A lock that is taken in turn.

Used by storages: threads that extend at once take turns, however soon one of them comes again. It knows
nothing of what it guards.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from typing import Any

__all__ = ["FairLock"]

_ReentrantLock: Any = type(threading.RLock())  # the name itself is a function in some versions
_acquire, _release = _ReentrantLock.acquire, _ReentrantLock.release


class FairLock(_ReentrantLock):  # type: ignore[misc]
    """A re-entrant lock that nobody takes while another thread waits for it.

    A plain one goes to whoever asks first after its release. That is mostly the thread that has just
    released it, again and again, since the others take longer to wake up. Here threads that have to wait
    form a queue; its head waits for the lock itself, the others for their predecessor.

    Threads: any number; who comes while n others wait or hold it is the (n+1)th to get it. Processes: not
    across them. Interrupts: a KeyboardInterrupt while it is being taken leaves it as it was.

    Example:
        >>> lock = FairLock()
        >>> with lock, lock:
        ...     pass
    """

    def __init__(self) -> None:
        self._queue: deque[threading.Lock] = deque()

    # What gives the lock back is the base class's own: written in Python, an interrupt could come before it.

    def __enter__(self) -> bool:
        """Take the lock, in turn."""
        if self._is_owned():
            try:
                return bool(_acquire(self))
            except BaseException:  # it does not wait: an interrupt came after it was taken
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
        """Take the lock, in turn; `release` gives it back."""
        return self.__enter__()

    def _wait(self, gate: threading.Lock) -> bool:
        """Take the lock when all who came before have had it."""
        gate.acquire()
        try:
            self._queue.append(gate)
            if self._queue[0] is not gate:
                gate.acquire()
            _acquire(self)
            self._leave(gate)
            return True
        except BaseException:
            self._leave(gate)  # also where that was interrupted
            raise

    def _leave(self, gate: threading.Lock) -> None:
        """Leave the queue, if need be, and tell its head that it is the head."""
        with suppress(ValueError):
            self._queue.remove(gate)
        with suppress(IndexError, RuntimeError):  # nobody waits, or it knows already
            self._queue[0].release()
