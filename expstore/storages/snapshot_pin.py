"""What makes a writer wait while rows are being copied.

Used by storages for snapshots: whoever copies says which rows it still needs, oldest first, and a writer
that would overwrite one of them waits. It knows ids only, no slots and no files.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from expstore.core.lock_order import LockOrder
from expstore.storages.stats import Counters

__all__ = ["Hold"]


class Hold:
    """Keep rows as they are until they are copied.

    Threads: one copies at a time, the next one waits; any number may wait for it. Processes: a forked
    child, in which nobody copies, never waits.

    Args:
        order: Of the storage's locks.
        counters: Where waits are counted.
    """

    def __init__(self, order: LockOrder, counters: Counters) -> None:
        self._order, self._counters = order, counters
        self._begin()

    def _begin(self) -> None:
        #: The oldest id that must stay as it is; 0: none. Read without a lock.
        self.first = 0
        self._moved = threading.Condition(self._order.ranked("hold", threading.Lock()))
        self._turn = self._order.ranked("dump", threading.Lock())
        self._pid = os.getpid()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Be the only one who copies; let everybody go on at the end, whatever has happened."""
        if os.getpid() != self._pid:
            self._begin()
        with self._turn:
            try:
                yield
            finally:
                self.move(0)

    def move(self, first: int) -> None:
        """Say that ids below `first` are copied; 0: all of them."""
        with self._moved:
            self.first = first
            self._moved.notify_all()

    def wait(self, through: int | None = None) -> None:
        """Wait until the ids up to `through` are copied, or all (None)."""
        if not self.first:
            return
        if os.getpid() != self._pid:
            self._begin()
        started, waited = time.monotonic(), False
        with self._moved:
            while self.first and (through is None or through >= self.first):
                waited = True
                self._moved.wait()
        if waited:
            self._counters.note_wait(started)
