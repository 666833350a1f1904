"""Remember which slots were changed since a moment.

Used by storages whose changes are captured from time to time. It contains no values and uses no files.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import numpy as np

from expstore.core.values import IntArray

#: Slots that are remembered before equal ones are joined.
_JOIN = 1 << 16
#: Up to so many flags for each slot that was added, flags are used instead of sorting.
_FLAGS = 64
_NONE = np.zeros(0, np.int64)


class Touched:
    """The slots that were changed, by the moment after which they were changed.

    Not locked: the lock under which slots are changed also guards this object. Memory: at most a few
    numbers per slot. Nothing survives the process: a new object has another token.

    Args:
        token: Names the object and others that began at the same time; None: a new token.

    Example:
        >>> from expstore.core.touched import Touched
        >>> touched = Touched()
        >>> touched.add(np.array([7, 3]))
        >>> moment = touched.advance()
        >>> touched.add(np.array([3]))
        >>> touched.since(0).tolist(), touched.since(moment).tolist()
        ([3, 7], [3])
    """

    __slots__ = ("_added", "_count", "_due", "moment", "token")

    def __init__(self, token: str | None = None) -> None:
        self.token = token or uuid.uuid4().hex
        #: How often `advance` was called.
        self.moment = 0
        self._added: dict[int, list[IntArray]] = {0: []}
        self._count, self._due = 0, _JOIN

    def add(self, slots: IntArray) -> None:
        """Record changed slots. Shape `(n,)`."""
        self._added[self.moment].append(slots)
        self._count += slots.size
        if self._count > self._due:
            self._join()

    def _join(self) -> None:
        """Forget how often slots were added; and, of many moments, when: the newest one gets all slots."""
        noted = {moment: [_unite(parts)] for moment, parts in self._added.items() if parts}
        found = self.since(-1)
        if sum(parts[0].size for parts in noted.values()) > 2 * found.size:
            noted = {self.moment: [found]}
        self._added = {self.moment: []} | noted
        self._count = sum(parts[0].size for parts in noted.values())
        self._due = max(_JOIN, 2 * self._count)  # so that the cost of joining is spread

    def advance(self) -> int:
        """Begin a new moment; return it. Slots that are added from now on were changed since it."""
        self.moment += 1
        self._added[self.moment] = []
        return self.moment

    def since(self, moment: int) -> IntArray:
        """Return the slots that were changed since a moment, ascending, each once. Shape `(n,)`."""
        parts = [slots for known, noted in self._added.items() if known >= moment for slots in noted]
        return _unite(parts) if parts else _NONE

    def forget(self, moment: int) -> None:
        """Forget what was changed before a moment."""
        self._added = {known: parts for known, parts in self._added.items() if known >= moment}
        self._count = sum(slots.size for parts in self._added.values() for slots in parts)


def _unite(parts: Sequence[IntArray]) -> IntArray:
    """Return the numbers in some arrays, ascending, each once."""
    slots = np.concatenate(parts)
    if not slots.size or (most := int(slots.max())) > _FLAGS * slots.size:
        return np.unique(slots)
    flags = np.zeros(most + 1, bool)  # faster than sorting
    flags[slots] = True
    return np.flatnonzero(flags)
