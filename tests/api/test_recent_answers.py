"""Answers that are kept: for how long, how many, and that waiting clients share one computation."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from expstore.api.done_keys import DoneKeys
from expstore.api.recent_answers import RecentAnswers
from tests.support.waits import ManualClock, wait_until


class Clock(ManualClock):
    """A clock that computing an answer moves."""

    def __init__(self) -> None:
        super().__init__()
        self.computed: list[bytes] = []

    def compute(self, seconds: float, answer: bytes = b"x") -> bytes:
        self.now += seconds
        self.computed.append(answer)
        return answer


@pytest.mark.parametrize(("cost", "kept"), [(0.1, 2.0), (0.001, 0.02), (1.0, 5.0), (0.0, 0.0)])
def test_an_answer_is_kept_in_proportion_to_its_cost(cost: float, kept: float) -> None:
    clock = Clock()
    answers = RecentAnswers(clock)
    answers.find("a", lambda: clock.compute(cost))
    clock.now += kept * 0.99
    assert answers.find("a", lambda: clock.compute(cost, b"new")) == (b"x" if kept else b"new")
    clock.now += kept
    assert answers.find("a", lambda: clock.compute(cost, b"new")) == b"new"


def test_questions_do_not_mix_and_the_oldest_are_forgotten() -> None:
    clock = Clock()
    answers = RecentAnswers(clock)
    for number in range(65):
        answers.find(number, lambda number=number: clock.compute(0.01, b"%d" % number))  # type: ignore[misc]
    clock.now -= 0.6  # as if they had taken no time: all could still be kept
    assert answers.find(64, lambda: clock.compute(0.0, b"again")) == b"64"
    assert answers.find(0, lambda: clock.compute(0.0, b"again")) == b"again"


def test_a_failure_is_not_kept() -> None:
    clock = Clock()
    answers = RecentAnswers(clock)

    def fail() -> bytes:
        clock.now += 1
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        answers.find("a", fail)
    assert answers.find("a", lambda: clock.compute(1.0)) == b"x"


def test_threads_that_ask_the_same_wait_for_one_computation() -> None:
    clock = Clock()
    answers = RecentAnswers(clock)
    began, go = threading.Event(), threading.Event()

    def compute() -> bytes:
        began.set()
        assert go.wait(60)
        return clock.compute(1.0)

    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(answers.find, "a", compute)
        assert began.wait(60)
        others = [pool.submit(answers.find, "a", lambda: clock.compute(1.0, b"second")) for _ in range(3)]
        assert answers.find("b", lambda: b"does not wait") == b"does not wait"
        go.set()
        assert {future.result(30) for future in [first, *others]} == {b"x"}
    assert clock.computed == [b"x"]


def test_requests_with_one_key_at_the_same_time_are_done_once() -> None:
    keys = DoneKeys[int]()
    began, go, done = threading.Event(), threading.Event(), []

    def act() -> int:
        began.set()
        assert go.wait(60)
        done.append(1)
        return len(done)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(keys.once, b"key", act)
        assert began.wait(60)
        second = pool.submit(keys.once, b"key", act)
        wait_until(second.running)
        assert keys.once(b"another key", lambda: 7) == 7  # it does not wait
        go.set()
        assert (first.result(60), second.result(60)) == (1, 1)
