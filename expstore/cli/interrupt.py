"""Work that Ctrl-C ends between two pieces.

Used by the commands that make files: what they were making goes, whatever comes after the first Ctrl-C.
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
        show: Is told bytes done and bytes in all.

    Yields:
        What does that, and raises KeyboardInterrupt after a Ctrl-C.
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
        if not seen:  # else the process is about to end, and nothing interrupts that
            signal.signal(signal.SIGINT, former)
