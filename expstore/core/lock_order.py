"""The order in which threads take the locks of one storage, and a check of it for tests.

Two threads that take two locks in opposite orders can deadlock. Therefore the locks of a storage are ordered:
a thread that holds one takes only locks after it in `LOCK_ORDER`. With `tuning.CHECK_LOCK_ORDER` a storage
wraps its locks to assert this; otherwise they are plain locks, and nothing is checked.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar, cast

from expstore.core import tuning

_Lock = TypeVar("_Lock")

#: The names of the locks of a storage, in the order in which they are taken.
LOCK_ORDER = (
    "retention",  # a policy is applied
    "reshaping",  # a field is added or dropped
    "dump",  # a snapshot is copied
    "extend",  # a batch is appended
    "storage",  # anything is written
    "cut",  # the journal's oldest segments are removed; only tried, never waited for
    "sync",
    "groups",  # the groups of episodes are followed
    "catalog",
    "sampled",
    "runs",  # the index of episodes' steps
    "pin",  # which rows a snapshot still needs
    "episodes",
    "tail",
    "priorities",
    "values",  # priorities of rows are set, or rows get their first ones
    "draw",
    "journal",
)
_RANKS = {name: rank for rank, name in enumerate(LOCK_ORDER)}


class LockOrderError(AssertionError):
    """A thread takes a lock while it holds one that comes after it in the order, which can deadlock."""


class LockOrder:
    """Check the order in which threads take the locks of one storage.

    The order is checked per thread. Locks of another storage have their own order. Not checked
    are a lock that its thread already holds, and a lock that is tried without waiting.

    Example:
        >>> import threading
        >>> from expstore.core.lock_order import LockOrder
        >>> order = LockOrder()
        >>> lock = order.rank_lock("storage", threading.RLock())
        >>> with lock:
        ...     pass
    """

    def __init__(self) -> None:
        self._threads: threading.local | None = threading.local() if tuning.CHECK_LOCK_ORDER else None

    def rank_lock(self, name: str, lock: _Lock) -> _Lock:
        """Return a lock unchanged, or wrapped so that it checks the order.

        Args:
            name: Its name in `LOCK_ORDER`.
            lock: A lock, re-entrant or not, that no thread holds yet.
        """
        rank = _RANKS[name]
        return lock if self._threads is None else cast(_Lock, _RankedLock(name, rank, lock, self._threads))


class _RankedLock:
    """A lock that checks the order before it is taken."""

    def __init__(self, name: str, rank: int, lock: Any, threads: threading.local) -> None:
        self._name, self._rank, self._lock, self._threads = name, rank, lock, threads

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take the lock; return whether this succeeded."""
        if blocking:
            self._check()
        options = {"timeout": timeout} if timeout >= 0 else {}
        taken = bool(self._lock.acquire(**options) if blocking else self._lock.acquire(blocking=False))
        if taken:
            self._held.append(self)
        return taken

    def release(self) -> None:
        """Release the lock."""
        self._lock.release()
        held = self._held
        del held[len(held) - 1 - held[::-1].index(self)]

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    @property
    def _held(self) -> list[_RankedLock]:
        """The locks that this thread holds, in the order in which it took them."""
        held: list[_RankedLock] = self._threads.__dict__.setdefault("held", [])
        return held

    def _check(self) -> None:
        held = self._held
        if self in held:
            return
        behind = [other._name for other in held if other._rank >= self._rank]
        if behind:
            raise LockOrderError(
                f"a thread that holds the lock {behind[0]!r} takes {self._name!r}; "
                f"the order is {', '.join(LOCK_ORDER)}"
            )
