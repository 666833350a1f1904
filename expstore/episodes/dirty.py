"""Track which episodes have changed recently.

Used by `expstore.episodes.table`, for filters with conditions on episodes. It stores ids only.
"""

from __future__ import annotations

from collections import deque
from itertools import islice

import numpy as np

from expstore.core.values import IntArray


class Touched:
    """The ids of recently changed episodes, in the order of the changes.

    Not locked: the caller holds the storage's `locks.episodes`.
    """

    def __init__(self) -> None:
        self._ids: deque[int] = deque(maxlen=1 << 16)
        self.count = 0

    def note(self, episode: int) -> None:
        """Record that an episode has changed."""
        self._ids.append(episode)
        self.count += 1

    def since(self, count: int) -> IntArray | None:
        """Return the episodes changed since `count` had this value. Shape `(n,)`; None if too many."""
        new = self.count - count
        if new > len(self._ids):
            return None
        return np.unique(np.fromiter(islice(reversed(self._ids), new), np.int64, new))
