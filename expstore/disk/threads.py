"""The threads that sync and write files: one pool for all stores of the process.

Used by stores that are open for writing, and by snapshots. A caller that waits for its jobs runs those that
no thread has begun. So no job needs the pool: an fsync that never returns holds the threads that wait for it,
and delays no other store.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TypeAlias

#: The pool has at most this many threads, besides those that `Threads.grow` starts.
MOST_THREADS = 16
#: A thread without work ends after this time: longer than the interval between two checkpoints.
IDLE_SECONDS = 2.0


_Calls: TypeAlias = "SimpleQueue[Callable[[], object]]"


class Job:
    """A call that a thread of the pool makes, or the thread that waits for it.

    Args:
        act: The function. It must be possible to call it again if it was interrupted.
    """

    __slots__ = ("_act", "_end", "_owner", "done", "error")

    def __init__(self, act: Callable[[], object]) -> None:
        self._act: Callable[[], object] | None = act
        self._owner: dict[None, int] = {}  # the thread that runs it
        self._end = threading.Lock()
        self._end.acquire()
        #: Whether the call has ended.
        self.done = False
        #: What the call raised.
        self.error: BaseException | None = None

    @property
    def begun(self) -> bool:
        """Whether a thread runs it, or has run it."""
        return bool(self._owner)

    @property
    def is_own(self) -> bool:
        """Whether the calling thread runs it, or has run it."""
        return self._owner.get(None) == threading.get_ident()

    def run(self) -> None:
        """Make the call, unless another thread has begun it."""
        act, me = self._act, threading.get_ident()
        # `setdefault` lets one thread win; after Ctrl-C right behind it, the same thread runs the job again.
        if act is None or self.done or self._owner.setdefault(None, me) != me:
            return
        try:
            act()
        except BaseException as exc:
            self.error = exc
        self.done, self._act = True, None  # what the call refers to may be garbage-collected
        self._end.release()

    def wait(self) -> None:
        """Make the call, unless another thread has begun it; then wait until it has ended."""
        while not self.done:
            self.run()
            if not self.is_own:
                with self._end:
                    pass


def finish(jobs: Sequence[Job]) -> None:
    """Wait for all jobs, even if the wait is interrupted; raise the first failure."""
    interruption: BaseException | None = None
    while not all(job.done for job in jobs):
        try:
            for job in jobs:  # all that no thread has begun, before it waits for the first of the others
                job.run()
            for job in jobs:
                job.wait()
        # A write that continues unnoticed would overwrite later rows, and a failure would be lost.
        except BaseException as exc:
            interruption = exc
    errors = [job.error for job in jobs if job.error is not None]
    failures = [error for error in errors if isinstance(error, Exception)]
    for error in (*failures[:1], *errors[:1], interruption):
        if error is not None:
            raise error


class Threads:
    """A share of the process's pool, for one store or one operation.

    No method takes a lock that is not reentrant: the garbage collector, which may close a store, runs at any
    allocation. Threads: any number may use it. Forks: a child starts threads of its own.

    Args:
        most: How many threads of the pool may work for it at the same time.
    """

    def __init__(self, most: int = 7) -> None:
        self._waiting: deque[Job] = deque()
        self._permits = deque([None] * most)
        self._refuses = False

    def refuse(self) -> None:
        """Use no thread of the pool from now on: callers run their jobs themselves."""
        self._refuses = True

    def submit(self, act: Callable[[], object]) -> Job:
        """Call a function in a free thread of the pool; the caller passes the job to `finish`."""
        job = Job(act)
        self.add(job)
        return job

    def add(self, job: Job) -> None:
        """Let a thread of the pool run a job if one is free."""
        if self._refuses:
            return
        with suppress(IndexError):
            while self._waiting[0].done:  # its caller has run it
                self._waiting.popleft()
        self._waiting.append(job)
        with suppress(IndexError):
            self._permits.pop()
            if not _pool.call(self._work):
                self._permits.append(None)

    def grow(self) -> None:
        """Let one more thread work for it until no job waits, however many do already."""
        _pool.call(self._run_waiting, beyond=True)

    def _work(self) -> None:
        self._run_waiting()
        self._permits.append(None)

    def _run_waiting(self) -> None:
        with suppress(IndexError):
            while True:
                self._waiting.popleft().run()


class _Pool:
    """Threads that call functions, each of them until it has had nothing to do for a while."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget all threads: a forked child has none of them."""
        # Of the threads that wait, the last one gets the next call, so that the first ones can end.
        self._idle: deque[_Calls] = deque()
        self._permits = deque([None] * MOST_THREADS)

    def call(self, act: Callable[[], object], *, beyond: bool = False) -> bool:
        """Call a function in a thread that waits, or in a new one; return False if no thread is free.

        Args:
            act: The function; it raises nothing.
            beyond: Whether a thread may be started even if there are `MOST_THREADS`.
        """
        with suppress(IndexError):
            self._idle.pop().put(act)
            return True
        ends = self._return_permit
        try:
            self._permits.pop()
        except IndexError:
            if not beyond:
                return False
            ends = _do_nothing
        try:
            threading.Thread(target=self._run, name="expstore-sync", args=(act, ends), daemon=True).start()
        except RuntimeError:  # there are too many threads, or the interpreter is shutting down
            ends()
            return False
        return True

    def _return_permit(self) -> None:
        self._permits.append(None)

    def _run(self, act: Callable[[], object] | None, ends: Callable[[], None]) -> None:
        calls: _Calls = SimpleQueue()
        while act is not None:
            act()
            act = None  # it may refer to a store
            self._idle.append(calls)
            try:
                act = calls.get(timeout=IDLE_SECONDS)
            except Empty:
                try:
                    self._idle.remove(calls)
                except ValueError:  # `call` has just chosen this thread
                    with suppress(Empty):
                        act = calls.get(timeout=IDLE_SECONDS)
        ends()


def _do_nothing() -> None:
    pass


_pool = _Pool()
os.register_at_fork(after_in_child=_pool.restart)
