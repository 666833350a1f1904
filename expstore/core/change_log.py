"""Record which slots were changed in place recently.

Used by storages. Filters read the record to evaluate only the rows that have changed. It contains no values.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from expstore.core.touched import Touched
from expstore.core.values import IntArray

#: A change of more slots than the first number is recorded as "all slots"; the second number is how many
#: changes are remembered.
_ROWS, _KEPT = 4096, 256


class Changes(Protocol):
    """The read side of a record of in-place changes."""

    @property
    def number(self) -> int:
        """Incremented when a change begins and when it ends; odd during a change."""

    def since(self, before: int, /) -> IntArray | None:
        """Return the slots changed since `number` had this even value; None if that is unknown.

        A change that has not ended is not included. Shape `(n,)`, int64; a slot may occur more than once.
        """

    @property
    def seen(self) -> int:
        """Number of the newest change whose values reads return: that of its record in the journal.

        0 in RAM, where changes have no numbers.
        """

    @property
    def newest_record(self) -> int | None:
        """Number of the last record of a journal without a writer; None: a writer has it open."""

    @property
    def pending(self) -> Sequence[tuple[int, IntArray]] | None:
        """Changes that the file `changes` may lack, as numbers and ids; None: it lacks none."""


class ChangeLog:
    """Count in-place changes, and remember the slots of the most recent ones.

    Not locked: the storage changes rows under its own lock. A reader gets all slots of a change, or None.
    Nothing is stored on disk.

    Example:
        >>> from expstore.core.change_log import ChangeLog
        >>> changed = ChangeLog()
        >>> changed.begin()
        >>> changed.number
        1
        >>> changed.end(np.array([7]))
        >>> changed.number, changed.since(0)
        (2, array([7]))
    """

    __slots__ = ("_noted", "number", "seen", "tracked")
    newest_record = pending = None

    def __init__(self) -> None:
        #: Incremented when a change begins and when it ends; odd during a change.
        self.number = 0
        #: Number of the newest change whose values reads return; 0 in RAM.
        self.seen = 0
        #: The slots changed since a capture; None: nothing was captured, or any slot may have changed.
        self.tracked: Touched | None = None
        self._noted: deque[tuple[int, IntArray | None]] = deque(maxlen=_KEPT)

    def begin(self) -> None:
        """Record the beginning of a change."""
        self.number += 1

    def end(self, slots: IntArray | None) -> None:
        """Record the end of a change, and the slots that it may have changed; None if it may be any slot."""
        self._note(self.number + 1, slots)
        self.number += 1

    def note(self, slots: IntArray) -> None:
        """Record a change that readers see completely or not at all."""
        self.number += 2
        self._note(self.number, slots)

    def since(self, before: int) -> IntArray | None:
        """Return the slots changed since `number` had this even value; None if that is unknown.

        A change that has not ended is not included. Shape `(n,)`, int64; a slot may occur more than once.
        """
        now = self.number & ~1
        found = [slots for number, slots in tuple(self._noted) if before < number <= now]
        if 2 * len(found) != now - before:
            return None
        known = [slots for slots in found if slots is not None]
        return np.concatenate(known) if known and len(known) == len(found) else None

    def _note(self, number: int, slots: IntArray | None) -> None:
        if slots is None:
            self.tracked = None
        elif self.tracked is not None:
            self.tracked.add(slots)
        self._noted.append((number, slots if slots is None or slots.size <= _ROWS else None))
