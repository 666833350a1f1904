"""Make writers wait while rows are being copied for a snapshot.

Used by storages. The copier reports which rows it still needs, oldest first. A writer that would overwrite
one of them waits. This module knows only ids, no slots and no files.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from expstore.core.counters import Counters
from expstore.core.lock_order import LockOrder


class SnapshotPin:
    """Keep rows unchanged until they are copied.

    Threads: one copies at a time, the next one waits; any number of writers may wait. Processes: a forked
    child never waits, because the copying thread does not exist there.

    Args:
        order: The lock order of the storage.
        counters: Counts the waits.
    """

    def __init__(self, order: LockOrder, counters: Counters) -> None:
        self._order, self._counters = order, counters
        self._begin()

    def _begin(self) -> None:
        #: The oldest id that must not change; 0: no id is pinned. Read without a lock.
        self.first = 0
        self._moved = threading.Condition(self._order.rank_lock("pin", threading.Lock()))
        self._copying = self._order.rank_lock("dump", threading.Lock())
        self._pid = os.getpid()

    @contextmanager
    def acquire(self) -> Iterator[None]:
        """Let only the caller copy during the block; release all rows at its end, also after an error."""
        if os.getpid() != self._pid:
            self._begin()
        with self._copying:
            try:
                yield
            finally:
                self.move(0)

    def move(self, first: int) -> None:
        """Record that ids below `first` are copied; 0: all ids are."""
        with self._moved:
            self.first = first
            self._moved.notify_all()

    def wait(self, through: int | None = None) -> None:
        """Wait until the ids up to `through` are copied, or all ids (None)."""
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
