"""The fair lock: order, re-entry, and interrupts at any moment."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from expstore import MemoryStorage, TensorDictReplayBuffer
from expstore.disk.fair_lock import FairLock

SECONDS = 30


def start(act: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


def wait_for(lock: FairLock, waiting: int) -> None:
    """Return when so many threads wait for the lock."""
    until = time.monotonic() + SECONDS
    while len(lock._queue) != waiting:
        assert time.monotonic() < until, f"{len(lock._queue)} threads wait, not {waiting}"


def test_a_releasing_thread_does_not_overtake_waiting_ones() -> None:
    lock, order = FairLock(), []

    def take() -> None:
        with lock:
            order.append("other")

    for _ in range(100):
        order.clear()
        with lock:
            thread = start(take)
            wait_for(lock, 1)
        with lock:
            order.append("again")
        thread.join(SECONDS)
        assert order == ["other", "again"]


@pytest.mark.guarantee("process/turns")
def test_rows_come_in_the_order_in_which_threads_asked() -> None:
    rb = TensorDictReplayBuffer(storage=MemoryStorage(1000))
    expected = []
    for _ in range(10):
        with rb.storage.locks.extend:
            threads = []
            for waiting in range(6):
                number = len(expected)
                expected.append(number)
                batch = TensorDict({"number": torch.tensor([number])}, [1])
                threads.append(start(lambda batch=batch: rb.extend(batch)))
                wait_for(rb.storage.locks.extend, waiting + 1)
        for thread in threads:
            thread.join(SECONDS)
    assert rb[:]["number"].tolist() == expected


def test_it_belongs_to_one_thread_and_as_often_as_it_was_taken() -> None:
    lock, inside, most, count = FairLock(), 0, 0, 0

    def work() -> None:
        nonlocal inside, most, count
        for number in range(500):
            with lock:
                inside += 1
                most = max(most, inside)
                seen = count
                with lock:
                    lock.acquire()
                    lock.release()
                if number % 50 == 0:
                    time.sleep(0)  # somebody else runs
                count = seen + 1
                inside -= 1

    threads = [start(work) for _ in range(4)]
    for thread in threads:
        thread.join(SECONDS)
    assert (most, count) == (1, 2000)
    with pytest.raises(RuntimeError, match="un-acquired"):
        lock.release()


def test_an_interrupt_at_any_moment_leaves_it_free() -> None:
    lock, rng, stop = FairLock(), random.Random(1), threading.Event()

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    def disturb() -> None:
        while not stop.is_set():
            with lock:
                pass

    def work(seconds: float) -> None:
        # Python drops what a signal raises while a finalizer runs: then the next one comes a second later.
        signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
        try:
            while True:
                with lock, lock:
                    pass
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    former = signal.signal(signal.SIGALRM, interrupt)
    other = None
    try:
        for number in range(1500):
            if number == 750:
                other = start(disturb)  # from now on it is waited for
            with pytest.raises(KeyboardInterrupt):
                work(rng.uniform(2e-5, 4e-4))
            assert not lock._is_owned(), f"interrupt number {number} left it taken"
            assert len(lock._queue) <= 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
        stop.set()
    other.join(SECONDS)
    assert not other.is_alive()
    assert not lock._queue
