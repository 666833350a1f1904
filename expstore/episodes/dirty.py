"""Which episodes have changed lately.

Kept by `expstore.episodes.table`, for filters that speak of episodes. It knows no facts about them.
"""

from __future__ import annotations

from collections import deque
from itertools import islice

import numpy as np

from expstore.core.values import IntArray

__all__ = ["Touched"]


class Touched:
    """Remember which episodes have changed lately, by number in the order of the changes.

    Not locked: whoever calls holds the storage's `locks.episodes`.
    """

    def __init__(self) -> None:
        self._ids: deque[int] = deque(maxlen=1 << 16)
        self.count = 0

    def note(self, episode: int) -> None:
        """Remember that an episode has changed."""
        self._ids.append(episode)
        self.count += 1

    def since(self, count: int) -> IntArray | None:
        """Return the episodes changed since `count` had this value; None: too many to know. Shape `(n,)`."""
        new = self.count - count
        if new > len(self._ids):
            return None
        return np.unique(np.fromiter(islice(reversed(self._ids), new), np.int64, new))
