"""What Ctrl-C does to a command.

`stoppable` is used by the commands that create files: after the first Ctrl-C the unfinished files are
removed, and further Ctrl-C do not prevent it. `expstore.cli.app` uses the others for all commands.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stoppable(show: Callable[[int, int], None]) -> Iterator[Callable[[int, int], None]]:
    """Let Ctrl-C end the work between two pieces, and only there.

    Args:
        show: Called with the bytes done and the bytes in total.

    Yields:
        A function that calls `show`, and raises KeyboardInterrupt after a Ctrl-C, unless the process ignores
        Ctrl-C, as in the background of a shell.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield show
        return
    seen: list[int] = []

    def progress(done: int, total: int) -> None:
        show(done, total)
        if seen:
            raise KeyboardInterrupt

    former = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    try:
        yield progress
    finally:
        if not seen:  # after a Ctrl-C the process is about to end, and nothing may interrupt that
            signal.signal(signal.SIGINT, former)


@contextmanager
def record_interrupts() -> Iterator[list[int]]:
    """Record Ctrl-C, which raises KeyboardInterrupt as it does without this.

    A library in C may replace the KeyboardInterrupt by an error of its own, as DuckDB does while it is
    imported: the record tells what the cause was.

    Yields:
        The signals so far. It stays empty if the process ignores Ctrl-C, or has another handler.
    """
    seen: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        signal.default_int_handler(number, frame)

    if not _is_default():
        yield seen
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        if signal.getsignal(signal.SIGINT) is note:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def end_at_once() -> None:
    """Let Ctrl-C end the process from now on, without the traceback of what Python does at its exit."""
    if _is_default():
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _is_default() -> bool:
    """Return whether Ctrl-C raises KeyboardInterrupt here."""
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
