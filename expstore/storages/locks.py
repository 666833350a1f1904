"""The locks of one storage, in the order in which a thread takes them.

Used by everything that reads or writes a storage. `expstore.core.lock_order` has the whole order, with the
locks that belong to a single part.
"""

from __future__ import annotations

import threading

from expstore.core.lock_order import LockOrder
from expstore.disk.fair_lock import FairLock

__all__ = ["Locks"]


class Locks:
    """Hold the locks that more than one object takes.

    Threads: one that holds a lock takes only those behind it. Processes: a forked child has locks of its own,
    which may be held for ever; it opens the store again for reading.
    """

    __slots__ = ("episodes", "extend", "order", "sampled", "storage")

    def __init__(self) -> None:
        #: Ranks the locks of this storage.
        self.order = LockOrder()
        #: Held for a whole `extend`, so that batches come one after the other; brief acts do not take it.
        self.extend = self.order.rank_lock("extend", FairLock())
        #: Held by the thread that writes.
        self.storage = self.order.rank_lock("storage", threading.RLock())
        #: Held while rows are drawn by how often they were handed out, and while these counts change.
        self.sampled = self.order.rank_lock("sampled", threading.RLock())
        #: Held while a record is appended and while episodes and window follow it.
        self.episodes = self.order.rank_lock("episodes", threading.Lock())
