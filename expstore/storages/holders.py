"""The buffers that use a storage, which are notified when its content is replaced.

Used by storages. The references to the buffers are weak.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol


class Holder(Protocol):
    """An object that uses a storage and caches data about its rows."""

    def _note_renewal(self, storage: Any) -> None:
        """Drop cached data: the content of the storage was replaced."""


class Holders:
    """Notify the buffers that use a storage when its content is replaced.

    The storage's lock is held during calls. References to buffers are weak, so that a dropped buffer can be
    garbage-collected.
    """

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: weakref.WeakSet[Holder] = weakref.WeakSet()

    def add(self, holder: Holder) -> None:
        """Notify an object from now on."""
        self._known.add(holder)

    def tell(self, storage: Any) -> None:
        """Notify all objects that the content of the storage was replaced."""
        for holder in list(self._known):
            holder._note_renewal(storage)
