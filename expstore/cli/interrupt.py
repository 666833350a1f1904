"""Let Ctrl-C end work between two pieces.

Used by the commands that create files: after the first Ctrl-C the unfinished files are removed, and further
Ctrl-C do not prevent it.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["stoppable"]


@contextmanager
def stoppable(show: Callable[[int, int], None]) -> Iterator[Callable[[int, int], None]]:
    """Let Ctrl-C end the work between two pieces, and only there.

    Args:
        show: Called with the bytes done and the bytes in total.

    Yields:
        A function that calls `show`, and raises KeyboardInterrupt after a Ctrl-C.
    """
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
