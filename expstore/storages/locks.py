"""The locks of one storage, in the order in which a thread takes them.

Used by everything that reads or writes a storage. `expstore.core.lock_order` has the whole order, with the
locks that belong to a single part.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from expstore.core.lock_order import LockOrder
from expstore.disk.fair_lock import FairLock
from expstore.errors import StateError


class Locks:
    """The locks that more than one object takes.

    Threads: one that holds a lock takes only locks after it. Processes: a forked child has its own copies,
    which may be held forever; it opens the store again for reading.
    """

    __slots__ = ("episodes", "extend", "order", "reshaping", "sampled", "storage")

    def __init__(self) -> None:
        #: The lock order of this storage.
        self.order = LockOrder()
        #: Held for a whole `extend`, so that batches are appended one after the other; short operations do
        #: not take it.
        self.extend = self.order.rank_lock("extend", FairLock())
        #: Lets one field be added or dropped at a time.
        self.reshaping = Reshaping(self.order)
        #: Held by the thread that writes.
        self.storage = self.order.rank_lock("storage", threading.RLock())
        #: Held while rows are drawn by their sample counts, and while these counts change.
        self.sampled = self.order.rank_lock("sampled", threading.RLock())
        #: Held while a record is appended, and while episodes and window are updated for it.
        self.episodes = self.order.rank_lock("episodes", threading.Lock())


class Reshaping:
    """Let one thread at a time add or drop a field.

    Args:
        order: The lock order of the storage.
    """

    def __init__(self, order: LockOrder) -> None:
        self._lock = order.rank_lock("reshaping", threading.RLock())
        self._inside = False

    @contextmanager
    def act(self) -> Iterator[None]:
        """Hold the right to add or drop a field during the block; wait for another thread that has it.

        Raises:
            StateError: This thread is already adding or dropping a field.
        """
        with self._lock:
            if self._inside:
                raise StateError(
                    "this thread is already adding or dropping a field", hint="finish that change first"
                )
            self._inside = True
            try:
                yield
            finally:
                self._inside = False
