"""Run an act in several threads at once, in tests."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


def in_threads(count: int, act: Callable[[int], object]) -> None:
    """Call `act(0)`, `act(1)`, ... at once, wait for all, and raise what the first of them raised."""
    with ThreadPoolExecutor(count) as pool:
        for called in [pool.submit(act, number) for number in range(count)]:
            called.result()
