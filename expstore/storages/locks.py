"""The locks of one storage, in the order in which a thread takes them.

Used by everything that reads or writes a storage. `expstore.core.lock_order` has the whole order, with the
locks that belong to a single part.
"""

from __future__ import annotations

import threading

from expstore.core.lock_order import LockOrder
from expstore.disk.fair_lock import FairLock


class Locks:
    """The locks that more than one object takes.

    Threads: one that holds a lock takes only locks after it. Processes: a forked child has its own copies,
    which may be held forever; it opens the store again for reading.
    """

    __slots__ = ("episodes", "extend", "order", "sampled", "storage")

    def __init__(self) -> None:
        #: The lock order of this storage.
        self.order = LockOrder()
        #: Held for a whole `extend`, so that batches are appended one after the other; short operations do
        #: not take it.
        self.extend = self.order.rank_lock("extend", FairLock())
        #: Held by the thread that writes.
        self.storage = self.order.rank_lock("storage", threading.RLock())
        #: Held while rows are drawn by their sample counts, and while these counts change.
        self.sampled = self.order.rank_lock("sampled", threading.RLock())
        #: Held while a record is appended, and while episodes and window are updated for it.
        self.episodes = self.order.rank_lock("episodes", threading.Lock())
