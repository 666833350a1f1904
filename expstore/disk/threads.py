"""A thread pool that writes and syncs files; callers also work without it.

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
        count: Number of threads.
        name: Prefix of the threads' names.
    """

    def __init__(self, count: int, name: str) -> None:
        super().__init__(count, thread_name_prefix=name)
        self._refuses = False

    def refuse(self) -> None:
        """Accept no more jobs; callers then run their jobs in their own thread."""
        self._refuses = True

    def submit(self, fn: Callable[..., _Result], /, *args: Any, **kwargs: Any) -> Future[_Result]:
        """Call a function in a thread of the pool.

        Raises:
            RuntimeError: The pool accepts no more jobs: `refuse` was called, or the interpreter is shutting
                down.
        """
        if self._refuses:
            raise RuntimeError("the pool accepts no more jobs")
        return super().submit(fn, *args, **kwargs)
