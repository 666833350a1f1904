"""Calls that run in another thread, so that the main thread hears of Ctrl-C meanwhile.

Used by the index: DuckDB keeps signals to itself while it works in the main thread. It never leaves a
call running behind, and never swallows what it raises.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar, cast

__all__ = ["Aside"]

_Answer = TypeVar("_Answer")
#: A call that has not begun yet what can be stopped is told again after so long.
_AGAIN_SECONDS = 0.02
#: So often the main thread looks up.
_LISTEN_SECONDS = 0.1


class Aside:
    """Make calls of the main thread in a second one, which is kept for the next.

    Threads: those of others, which no signal interrupts, are simply made. A call costs the main thread
    50 us; in a new thread each time DuckDB would take 300 us longer. A forked child may not use it.

    Example:
        >>> Aside().run(lambda: cursor.sql(query).to_arrow_table(), cursor.interrupt)
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="expstore-aside")

    def run(self, act: Callable[[], _Answer], stop: Callable[[], None]) -> _Answer:
        """Return what a call returns; raise what it raises, or what a signal's handler does.

        Args:
            act: The call.
            stop: Makes it end early; asked until it has, when a handler (of Ctrl-C, say) raises.
        """
        if threading.current_thread() is not threading.main_thread():
            return act()
        made: Future[None] = Future()
        box: list[Any] = [act]
        try:
            try:
                self._pool.submit(_make, made, box)
            except RuntimeError:  # the interpreter is about to end and has ended its threads
                return act()
            while not made.done():
                # Where another thread is told of the signal, nobody wakes this one, whose handler it is.
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
            del error  # which holds this frame

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown()


def _make(made: Future[None], box: list[Any]) -> None:
    """Put what came of a call in the place of the call; nothing else of it stays here."""
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
    """Wait until the call has ended, or will never begin."""
    ended = False
    while not ended:
        with contextlib.suppress(KeyboardInterrupt):  # pressed again: it is being stopped
            ended = made.cancel() or made.done()
            if not ended:
                stop()
                wait([made], _AGAIN_SECONDS)
