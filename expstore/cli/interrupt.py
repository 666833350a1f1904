"""What Ctrl-C does to a command.

There is one handler, `handle_interrupts`: `expstore.cli.app` uses it around all commands, `collect` around
its loop, and `stoppable` around commands that create files.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupts:
    """Counts Ctrl-C.

    Threads: signals arrive in the main thread; others may read.
    """

    def __init__(self) -> None:
        self.count = 0

    @property
    def seen(self) -> bool:
        """Whether there was any."""
        return self.count > 0


@contextmanager
def handle_interrupts(raise_from: int | None) -> Iterator[Interrupts]:
    """Count Ctrl-C.

    A library in C may replace the KeyboardInterrupt by an error of its own, as DuckDB does while it is
    imported: the count tells what the cause was.

    Args:
        raise_from: Which Ctrl-C is the first that the former handler gets, which raises KeyboardInterrupt;
            None: none, and none may interrupt what follows the first one, as the process is about to end.

    Yields:
        The count. It stays 0 in other threads than the main one, and if the process ignores Ctrl-C, as in the
        background of a shell.
    """
    interrupts = Interrupts()
    former = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(former):
        yield interrupts
        return

    def handle(number: int, frame: FrameType | None) -> None:
        interrupts.count += 1
        if raise_from is not None and interrupts.count >= raise_from:
            former(number, frame)

    signal.signal(signal.SIGINT, handle)
    try:
        yield interrupts
    finally:
        if signal.getsignal(signal.SIGINT) is handle and not (interrupts.seen and raise_from is None):
            signal.signal(signal.SIGINT, former)


@contextmanager
def stoppable(show: Callable[[int, int], None]) -> Iterator[Callable[[int, int], None]]:
    """Let Ctrl-C end the work between two pieces, and only there: unfinished files are removed.

    Args:
        show: Called with the bytes done and the bytes in total.

    Yields:
        A function that calls `show`, and raises KeyboardInterrupt after a Ctrl-C.
    """
    with handle_interrupts(None) as interrupts:

        def progress(done: int, total: int) -> None:
            show(done, total)
            if interrupts.seen:
                raise KeyboardInterrupt

        yield progress


def end_at_once() -> None:
    """Let Ctrl-C end the process from now on, without the traceback of what Python does at its exit."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
