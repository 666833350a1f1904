"""Timing of calls: in blocks, the sides alternating, without garbage collection.

Used by the programs of this folder. This module does not depend on buffers.
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
    """Times of calls in seconds, block by block."""

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
    def last(self) -> float:
        """The 99th percentile."""
        return self._quantile(0.99)

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
    """The calls of one side in a block.

    Args:
        act: The call that is timed; its result is freed inside the timed section.
        inputs: One input per call, created outside the timed section.
        calls: Number of calls per block.
        settle: Run before each block, so that no side has background work during another side's block.
        around: Context that is active during the block.
    """

    act: Callable[[Any], object]
    inputs: Iterator[Any]
    calls: int
    settle: Callable[[], object] = lambda: None
    around: Callable[[], AbstractContextManager[None]] = nullcontext


def alternate(cases: Sequence[Case], *, rounds: int, warm: int = 20) -> list[Series]:
    """Time `rounds` blocks of each case, the cases alternating, every second round in reverse order."""
    series = [Series() for _ in cases]
    for case in cases:
        case.settle()
        _time_block(case, min(warm, case.calls))
    for number in range(rounds):
        for place in range(len(cases))[:: -1 if number % 2 else 1]:
            cases[place].settle()
            series[place].blocks.append(_time_block(cases[place], cases[place].calls))
    return series


def offer(case: Case, *, rate: float, warm: int = 20) -> Series:
    """Make the calls of a block at a fixed rate, and time each from when it was due.

    A call that takes long delays the calls after it, and their times say so; calls made one after the other
    would hide it.

    Args:
        case: The calls.
        rate: Calls per second.
        warm: Calls before.
    """
    case.settle()
    _time_block(case, min(warm, case.calls))
    act, clock, times = case.act, time.perf_counter, []
    started = clock()
    for number, item in enumerate(itertools.islice(case.inputs, case.calls)):
        due = started + number / rate
        while (left := due - clock()) > 0:
            time.sleep(left)
        act(item)
        times.append(clock() - due)
    return Series([times])


def _time_block(case: Case, calls: int) -> list[float]:
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

    A virtual machine gets memory from its host when it first touches it, at milliseconds per megabyte. The
    side that grows its files first would pay for it.
    """
    memory = np.ones(size, np.uint8)
    del memory


def each_threads() -> Iterator[str]:
    """Set two torch threads, then one; yield the suffix of names: "", then "@1"."""
    import torch

    try:
        for number, suffix in ((2, ""), (1, "@1")):
            torch.set_num_threads(number)
            yield suffix
    finally:
        torch.set_num_threads(2)
