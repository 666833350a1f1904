"""Who holds a storage, and must hear of another content.

Used by storages. It holds them weakly.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

__all__ = ["Holder", "Holders"]


class Holder(Protocol):
    """What holds a storage, and remembers how its rows are made."""

    def _note_renewal(self, storage: Any) -> None:
        """Note that a storage has another content."""


class Holders:
    """Tell the buffers over a storage of every content that takes the place of the former one.

    Threads: the storage's lock is held. Holders are kept weakly, so that a forgotten buffer is collected.
    """

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: weakref.WeakSet[Holder] = weakref.WeakSet()

    def add(self, holder: Holder) -> None:
        """Tell an object of every content that takes this one's place."""
        self._known.add(holder)

    def tell(self, storage: Any) -> None:
        """Tell all of them that a storage has another content."""
        for holder in list(self._known):
            holder._note_renewal(storage)
