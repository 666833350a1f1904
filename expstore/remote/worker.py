"""A daemon thread that runs functions one after another: shards have one each, and do not wait for others.

`concurrent.futures` is not used because its threads are joined at the exit of the interpreter, which would
then wait for shards that do not answer.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from expstore.remote.forks import copy_in_child

_Found = TypeVar("_Found")
_Task = tuple["Future[Any]", Callable[[], Any]]


class Worker:
    """Run functions in a thread of its own.

    Threads: any number may submit. Processes: a copy in another process, and a forked child, start a
    thread of their own.

    Args:
        name: Name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name, self._lock = name, threading.Lock()
        self._tasks: queue.SimpleQueue[_Task | None] | None = None
        copy_in_child(self)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which has no thread yet."""
        return {"_name": self._name}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore what `__getstate__` returned."""
        self.__init__(state["_name"])  # type: ignore[misc]

    def submit(self, act: Callable[[], _Found]) -> Future[_Found]:
        """Run a function after those submitted before."""
        with self._lock:
            if self._tasks is None:
                self._tasks = queue.SimpleQueue()
                threading.Thread(target=_run, args=(self._tasks,), name=self._name, daemon=True).start()
                weakref.finalize(self, self._tasks.put, None)
            future: Future[_Found] = Future()
            self._tasks.put((future, act))
        return future

    def close(self) -> None:
        """End the thread after the functions submitted before."""
        with self._lock:
            tasks, self._tasks = self._tasks, None
            if tasks is not None:
                tasks.put(None)


def run_together(acts: Sequence[Callable[[], _Found]]) -> list[_Found]:
    """Run functions in a thread each, and return their results.

    Raises:
        BaseException: The error of the first function that failed, after all have ended.
    """
    workers = [Worker("expstore-together") for _ in acts]
    futures = [worker.submit(act) for worker, act in zip(workers, acts, strict=True)]
    for worker in workers:
        worker.close()
    errors = [future.exception() for future in futures]
    for error in errors:
        if error is not None:
            raise error
    return [future.result() for future in futures]


def _run(tasks: queue.SimpleQueue[_Task | None]) -> None:
    while (task := tasks.get()) is not None:
        future, act = task
        try:
            future.set_result(act())
        except BaseException as exc:
            future.set_exception(exc)
        del task, future, act
