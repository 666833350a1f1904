"""Run calls in another thread, so that the main thread can handle Ctrl-C meanwhile.

Used by the index: DuckDB blocks signal handlers while it works in the main thread. No call is left running,
and no exception of a call is lost.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar, cast

_Answer = TypeVar("_Answer")
#: Interval at which `stop` is called again, because a call that has not really begun cannot be stopped.
_AGAIN_SECONDS = 0.02
#: Interval at which the main thread wakes up to run signal handlers.
_LISTEN_SECONDS = 0.1


class InterruptibleCalls:
    """Run calls of the main thread in a second thread, which is reused.

    Calls of other threads, which signals do not interrupt, run directly. A call costs the main thread 50 us;
    in a new thread for each call DuckDB would take 300 us longer. A forked child may not use it.

    Example:
        >>> import duckdb
        >>> from expstore.disk.interruptible_calls import InterruptibleCalls
        >>> cursor = duckdb.connect()
        >>> InterruptibleCalls().run(lambda: cursor.sql("SELECT 1").fetchall(), cursor.interrupt)
        [(1,)]
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="expstore-aside")

    def run(self, act: Callable[[], _Answer], stop: Callable[[], None]) -> _Answer:
        """Run a call and return its result; raise its exception, or the exception of a signal handler.

        Args:
            act: The call.
            stop: Makes the call end early. It is called, repeatedly until the call has ended, if a signal
                handler (such as Ctrl-C's) raises.
        """
        if threading.current_thread() is not threading.main_thread():
            return act()
        made: Future[None] = Future()
        box: list[Any] = [act]
        try:
            try:
                self._pool.submit(_make, made, box)
            except RuntimeError:  # the interpreter is shutting down and has ended its threads
                return act()
            while not made.done():
                # If the system delivers the signal to another thread, this thread is not woken up, although
                # only it can run the handler. Therefore it wakes up regularly.
                with contextlib.suppress(TimeoutError):
                    made.result(_LISTEN_SECONDS)
        except BaseException:
            _end(made, stop)
            raise
        answer, error = box.pop()
        try:
            if error is not None:
                raise error
            return cast(_Answer, answer)
        finally:
            del error  # the exception refers to this frame

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown()


def _make(made: Future[None], box: list[Any]) -> None:
    """Run the call in the box and replace it by its result or exception; keep no other reference to it."""
    if not made.set_running_or_notify_cancel():
        return
    act = box.pop()
    try:
        box.append((act(), None))
    except BaseException as exc:
        box.append((None, exc))
    del act
    made.set_result(None)


def _end(made: Future[None], stop: Callable[[], None]) -> None:
    """Stop a call and wait until it has ended, or was cancelled before it began."""
    ended = False
    while not ended:
        with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C again: the call is being stopped already
            ended = made.cancel() or made.done()
            if not ended:
                stop()
                wait([made], _AGAIN_SECONDS)
