"""Which slots were changed in place lately.

Kept by storages for filters, which look again at what has changed and at nothing else. It knows no values.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from expstore.core.values import IntArray

__all__ = ["Changed"]

#: A larger change is looked at as if everything had changed; so many are remembered.
_ROWS, _KEPT = 4096, 256


class Changed:
    """Remember changes by their numbers, which are even and ascending.

    Not locked: the storage calls `note` under its lock, and whoever reads gets all of a change or knows
    that it does not. Crashes: nothing is kept.

    Example:
        >>> changed = Changed()
        >>> changed.note(2, np.array([7]))
        >>> changed.since(0, 2), changed.since(0, 4)
        (array([7]), None)
    """

    def __init__(self) -> None:
        self._noted: deque[tuple[int, IntArray | None]] = deque(maxlen=_KEPT)

    def note(self, number: int, slots: IntArray | None) -> None:
        """Remember the slots of a change, after which `number` stands; None: whichever."""
        self._noted.append((number, slots if slots is None or slots.size <= _ROWS else None))

    def since(self, before: int, now: int) -> IntArray | None:
        """Return the slots changed between two numbers; None: that is not known, it may be any.

        Shape `(n,)`, int64; a slot may come twice.
        """
        found = [slots for number, slots in tuple(self._noted) if before < number <= now]
        if 2 * len(found) != now - before:
            return None
        known = [slots for slots in found if slots is not None]
        return np.concatenate(known) if known and len(known) == len(found) else None
