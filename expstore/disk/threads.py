"""Threads that write and sync files, and can be done without.

Used by stores that are open for writing.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

__all__ = ["Threads"]

_Result = TypeVar("_Result")


class Threads(ThreadPoolExecutor):
    """A thread pool for a store, which may be closed by the garbage collector.

    The collector runs at any allocation, also inside `submit` of another pool, where this thread holds a lock
    that all pools share and that is not reentrant. After `refuse`, `submit` takes no lock.

    Args:
        count: How many threads.
        name: What their names begin with.
    """

    def __init__(self, count: int, name: str) -> None:
        super().__init__(count, thread_name_prefix=name)
        self._refuses = False

    def refuse(self) -> None:
        """Take no jobs any more; callers run theirs on their own thread."""
        self._refuses = True

    def submit(self, fn: Callable[..., _Result], /, *args: Any, **kwargs: Any) -> Future[_Result]:
        """Have a thread call a function.

        Raises:
            RuntimeError: No jobs are taken any more: `refuse` was called, or the interpreter is going.
        """
        if self._refuses:
            raise RuntimeError("no jobs are taken any more")
        return super().submit(fn, *args, **kwargs)
