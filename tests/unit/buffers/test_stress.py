"""Four threads sample while one writes: no torn row, no deadlock, and at least half of the sampling rate.

Every row is a function of its id. The short form runs with other tests on busy machines and requires a sixth
of the rate; the long form is `make torture` and requires half.
"""

from __future__ import annotations

import faulthandler
import itertools
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore import (
    PrioritizedSampler,
    RandomSampler,
    RecencySampler,
    SamplerWithoutReplacement,
    StalenessAwareSampler,
    TensorDictReplayBuffer,
)

pytestmark = pytest.mark.usefixtures("checked_locks")

CAPACITY, BATCH, SAMPLERS = 1000, 128, 4
#: Bytes of the wide field: above 512, where rows are gathered in another way than below.
WIDE = 2048
SLOTS = CAPACITY + 4096
#: Most extends go into spare slots; a long one writes over half of the rows that can be read.
SIZES = itertools.cycle([*[150, 300, 20] * 8, SLOTS - CAPACITY // 2])
LIMIT = 60

MAKE: dict[str, Callable[[], Any]] = {
    "random": RandomSampler,
    "prioritized": lambda: PrioritizedSampler(CAPACITY, 0.7, 0.5),
    "without-replacement": SamplerWithoutReplacement,
    "staleness": StalenessAwareSampler,
    "recency": lambda: RecencySampler(half_life=100),
}

# What a row holds follows from its id modulo 251, a prime: no two rows that share a slot are alike.
_NUMBER = np.arange(251)
_FRAMES = (_NUMBER[:, None] * 31 + np.arange(WIDE)).astype(np.uint8)
_OBSERVATIONS = (_NUMBER[:, None] / np.array([1, 3, 7])).astype(np.float32)


def fields(ids: np.ndarray) -> dict[Any, np.ndarray]:
    kind = ids % 251
    return {
        "number": ids,
        "frame": _FRAMES[kind],
        "policy_version": ids // 500,
        ("next", "observation"): _OBSERVATIONS[kind],
        ("next", "reward"): kind[:, None].astype(np.float32),
        ("next", "terminated"): (ids % 25 == 0)[:, None],
    }


def rows(first_id: int, count: int) -> TensorDict:
    """The rows of these ids."""
    found = TensorDict({}, [count])
    for key, values in fields(np.arange(first_id, first_id + count)).items():
        found[key] = torch.from_numpy(values)
    return found


def faults(batch: TensorDict) -> str:
    """Say what is wrong with a batch; nothing if all is well."""
    ids = batch["id"].numpy()
    if not np.array_equal(batch["index"].numpy(), (ids - 1) % CAPACITY):
        return f"index {batch['index'].tolist()} with ids {ids.tolist()}"
    for key, values in fields(ids).items():
        if not np.array_equal(batch[key].numpy(), values):
            return f"{key} is not that of ids {ids.tolist()}"
    return ""


class Crowd:
    """Threads on one buffer; the writer works only in the busy phases, which take turns with quiet ones."""

    def __init__(self, rb: TensorDictReplayBuffer) -> None:
        self.rb = rb
        self.stop, self.busy, self.paused = threading.Event(), threading.Event(), threading.Event()
        self.paused.set()
        self.wrong: list[str] = []
        self.drawn = np.zeros((2, SAMPLERS), np.int64)  # batches in quiet and in busy phases, per thread
        self.seconds = [0.0, 0.0]
        work = [lambda number=number: self.sample(number) for number in range(SAMPLERS)]
        self.threads = [
            threading.Thread(target=self.run, args=(act,), daemon=True) for act in [*work, self.write]
        ]

    def run(self, act: Callable[[], None]) -> None:
        try:
            act()
        except BaseException as exc:
            self.wrong.append(repr(exc))
        finally:
            if self.wrong:
                self.stop.set()
                self.busy.set()

    def sample(self, number: int) -> None:
        rb, rng = self.rb, np.random.default_rng(number)
        while not self.stop.is_set():
            busy = self.busy.is_set()
            batch = rb.sample()
            if fault := faults(batch):
                self.wrong.append(fault)
                return
            if rb.sampler.prioritized:
                ids = batch["id"]
                rb.update_priority(id=ids, priority=rng.random(ids.numel()) + 0.1)
            self.drawn[int(busy), number] += 1

    def write(self) -> None:
        while not self.stop.is_set():
            self.paused.set()
            self.busy.wait()
            self.paused.clear()
            while self.busy.is_set() and not self.stop.is_set():
                self.rb.extend(rows(self.rb.storage.last + 1, next(SIZES)))
        self.paused.set()

    def phase(self, seconds: float, *, busy: bool) -> None:
        if busy:
            self.busy.set()
        started = time.monotonic()
        self.stop.wait(seconds)
        if busy:
            self.busy.clear()
        self.seconds[int(busy)] += time.monotonic() - started
        if not self.paused.wait(LIMIT):
            self.wrong.append(f"an extend has taken more than {LIMIT} s")

    def live(self, seconds: float) -> None:
        """Go on for so long, and until the writer has come round all slots three times."""
        for thread in self.threads:
            thread.start()
        limit = time.monotonic() + LIMIT + seconds
        until = time.monotonic() + seconds
        while time.monotonic() < until or self.rb.storage.last < 3 * SLOTS:
            self.phase(min(0.5, seconds / 4), busy=False)
            self.phase(min(0.5, seconds / 4), busy=True)
            if self.wrong or time.monotonic() > limit:
                break
        self.stop.set()
        self.busy.set()
        until = time.monotonic() + LIMIT
        for thread in self.threads:
            thread.join(max(0.0, until - time.monotonic()))
        stuck = sum(thread.is_alive() for thread in self.threads)
        if stuck:
            faulthandler.dump_traceback(sys.__stderr__)
            self.wrong.append(f"{stuck} threads have not come to an end within {LIMIT} s")

    def pace(self) -> float:
        """Return batches per second beside the writer, as a share of those without it."""
        quiet, busy = self.drawn.sum(axis=1) / self.seconds
        return float(busy / quiet)


@pytest.mark.guarantee(
    "draw/whole",
    "A batch is never torn, whatever threads and processes write meanwhile, and its memory is not reused "
    "while anything refers to it.",
)
@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("seconds", "least"),
    [(1.0, 1 / 6), pytest.param(60.0, 0.5, marks=[pytest.mark.torture, pytest.mark.timeout(300)])],
    ids=["short", "long"],
)
@pytest.mark.parametrize(("name", "layout"), [*((name, "flat") for name in MAKE), ("random", "auto")])
def test_sampling_while_a_writer_writes(
    name: str, layout: Any, seconds: float, least: float, store_path: Path
) -> None:
    settings = {"capacity": CAPACITY, "batch_size": BATCH, "layout": layout}
    with expstore.open(store_path, sampler=MAKE[name](), **settings) as rb:
        rb.extend(rows(1, CAPACITY))
        rb.sample()
        slots = rb.storage.geometry.slots or 0
        assert 0 <= rb.storage.geometry.depth - SLOTS < (64 if layout == "auto" else 1)  # whole chunks
        assert slots % 251, "rows that share a slot would be alike"
        crowd = Crowd(rb)
        crowd.live(seconds)
        assert not crowd.wrong, crowd.wrong[0]
        assert rb.storage.last >= 3 * SLOTS
        assert crowd.drawn.min() > 0, f"a thread has drawn nothing: {crowd.drawn.tolist()}"
        assert crowd.pace() >= least, f"{crowd.drawn.tolist()} batches in {crowd.seconds} s"


def test_the_check_detects_wrong_rows() -> None:
    ids = torch.arange(500, 600)
    good = rows(500, 100)
    good["id"], good["index"] = ids, (ids - 1) % CAPACITY
    assert faults(good) == ""
    for key in ("number", "frame", "index", ("next", "reward")):
        torn = good.clone()
        torn[key].view(-1)[-1] += 1
        assert faults(torn)
    torn = good.clone()
    torn["frame"][3, WIDE // 2 :] = rows(503 + SLOTS, 1)["frame"][0, WIDE // 2 :]
    assert "frame" in faults(torn)
