"""Which slots were changed in place lately.

Kept by storages for filters, which look again at what has changed and at nothing else. It knows no values.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

import numpy as np

from expstore.core.values import IntArray

__all__ = ["ChangeLog", "Changes"]

#: A larger change is looked at as if everything had changed; so many are remembered.
_ROWS, _KEPT = 4096, 256


class Changes(Protocol):
    """Tell readers which slots were changed in place."""

    @property
    def number(self) -> int:
        """A number that moves when a change begins and when it ends; odd meanwhile."""

    def since(self, before: int, /) -> IntArray | None:
        """Return the slots changed since `number` was this even number; None: that is not known.

        A change that is going on is not among them. Shape `(n,)`, int64; a slot may come twice.
        """


class ChangeLog:
    """Count changes in place, and remember the last ones by their numbers.

    Threads: not locked. The storage changes rows under its lock, and a reader gets all of a change or knows
    that it does not. Crashes: nothing is kept.

    Example:
        >>> changed = ChangeLog()
        >>> changed.begin()
        >>> changed.number
        1
        >>> changed.end(np.array([7]))
        >>> changed.number, changed.since(0)
        (2, array([7]))
    """

    __slots__ = ("_noted", "number")

    def __init__(self) -> None:
        #: Moves when a change begins and when it ends; odd meanwhile.
        self.number = 0
        self._noted: deque[tuple[int, IntArray | None]] = deque(maxlen=_KEPT)

    def begin(self) -> None:
        """Note that rows are about to be changed."""
        self.number += 1

    def end(self, slots: IntArray | None) -> None:
        """Note that the change is over, and which slots it may have changed; None: whichever."""
        self._note(self.number + 1, slots)
        self.number += 1

    def note(self, slots: IntArray) -> None:
        """Note a change that readers see as a whole: it is never half done."""
        self.number += 2
        self._note(self.number, slots)

    def since(self, before: int) -> IntArray | None:
        """Return the slots changed since `number` was this even number; None: that is not known.

        A change that is going on is not among them. Shape `(n,)`, int64; a slot may come twice.
        """
        now = self.number & ~1
        found = [slots for number, slots in tuple(self._noted) if before < number <= now]
        if 2 * len(found) != now - before:
            return None
        known = [slots for slots in found if slots is not None]
        return np.concatenate(known) if known and len(known) == len(found) else None

    def _note(self, number: int, slots: IntArray | None) -> None:
        self._noted.append((number, slots if slots is None or slots.size <= _ROWS else None))
