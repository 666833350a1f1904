"""Timing of calls: in blocks, with the sides taking turns, without garbage collection.

Used by the scripts here. This module does not depend on buffers.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class Series:
    """Hold the times of calls in seconds, block by block."""

    blocks: list[list[float]] = field(default_factory=list)

    @property
    def calls(self) -> int:
        return sum(map(len, self.blocks))

    @property
    def median(self) -> float:
        return self._quantile(0.5)

    @property
    def low(self) -> float:
        """The 10th percentile."""
        return self._quantile(0.1)

    @property
    def high(self) -> float:
        """The 90th percentile."""
        return self._quantile(0.9)

    @property
    def mean(self) -> float:
        return statistics.fmean(itertools.chain(*self.blocks))

    def _quantile(self, part: float) -> float:
        times = sorted(itertools.chain(*self.blocks))
        return times[min(len(times) - 1, int(part * len(times)))]

    def to_json(self) -> dict[str, Any]:
        return {
            "calls": self.calls,
            "median": self.median,
            "p10": self.low,
            "p90": self.high,
            "mean": self.mean,
            "max": max(map(max, self.blocks)),
            "block_medians": [statistics.median(block) for block in self.blocks],
        }


@dataclass(frozen=True)
class Case:
    """Describe one side's turn.

    Args:
        act: The call that is timed; its result is freed inside of the timed section.
        inputs: One input per call, created outside of the timed section.
        calls: Number of calls per block.
        settle: Run before each block, so that no side has background work during the turn of another.
        around: Context that is active during the block.
    """

    act: Callable[[Any], object]
    inputs: Iterator[Any]
    calls: int
    settle: Callable[[], object] = lambda: None
    around: Callable[[], AbstractContextManager[None]] = nullcontext


def alternate(cases: Sequence[Case], *, rounds: int, warm: int) -> list[Series]:
    """Let the sides take turns for `rounds` blocks each, every second round in reverse order."""
    found = [Series() for _ in cases]
    for case in cases:
        case.settle()
        _block(case, min(warm, case.calls))
    for number in range(rounds):
        order = range(len(cases)) if number % 2 == 0 else range(len(cases) - 1, -1, -1)
        for place in order:
            cases[place].settle()
            found[place].blocks.append(_block(cases[place], cases[place].calls))
    return found


def _block(case: Case, calls: int) -> list[float]:
    act, clock = case.act, time.perf_counter
    times = []
    gc.disable()
    try:
        with case.around():
            for item in itertools.islice(case.inputs, calls):
                started = clock()
                act(item)
                times.append(clock() - started)
    finally:
        gc.enable()
    return times


@contextmanager
def busy_thread() -> Iterator[None]:
    """Run Python code in another thread while the context is active."""
    stop: list[None] = []

    def spin() -> None:
        number = 0
        while not stop:
            number += 1

    thread = threading.Thread(target=spin, name="busy", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.append(None)
        thread.join()


def touch_memory(size: int) -> None:
    """Allocate and free `size` bytes, so that free memory has been touched.

    A virtual machine gets memory from its host when it first touches it, at milliseconds per megabyte. This
    cost would fall on whichever side grows its files first.
    """
    memory = np.ones(size, np.uint8)
    del memory


def each_threads(numbers: Sequence[int]) -> Iterator[str]:
    """Set each of these numbers of torch threads in turn; yield the suffix for names.

    The suffix is empty for the first number, with which everything else is measured too. Without numbers
    torch keeps its default.
    """
    if not numbers:
        yield ""
        return
    import torch

    try:
        for place, number in enumerate(numbers):
            torch.set_num_threads(number)
            yield f"@{number}" if place else ""
    finally:
        torch.set_num_threads(numbers[0])
