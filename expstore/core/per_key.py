"""Objects by key, such as a lock per name, which exist only while they are used.

Used by the server and by local members: what waits for one name does not delay another one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

_Object = TypeVar("_Object")


class PerKey(Generic[_Object]):
    """Share one object per key among all who use it at the same time.

    The number of objects is the number of keys in use, however many keys there have been.

    Threads: any number may use it.

    Args:
        make: Makes an object.
    """

    def __init__(self, make: Callable[[], _Object]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._used: dict[Hashable, tuple[_Object, int]] = {}

    @contextlib.contextmanager
    def use(self, key: Hashable) -> Iterator[_Object]:
        """Yield the object of a key; the last user drops it."""
        with self._lock:
            shared, users = self._used.get(key) or (self._make(), 0)
            self._used[key] = shared, users + 1
        try:
            yield shared
        finally:
            with self._lock:
                users = self._used.pop(key)[1] - 1
                if users:
                    self._used[key] = shared, users

    def keys(self) -> list[Hashable]:
        """Return the keys in use."""
        with self._lock:
            return list(self._used)
