"""Answers that several clients ask for at about the same time: each is computed once, and kept briefly.

Used by routes whose queries read all episodes of a store: ten open pages cost about as much as one.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable

#: An answer is kept for this many times the time that computing it took, and at most this many
#: seconds, unless another limit is passed.
_TIMES, _SECONDS = 20.0, 5.0
#: Number of answers that are kept.
_KEPT = 64


class _Answer:
    """One answer, or a place for it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.value = b""
        self.until = float("-inf")


class RecentAnswers:
    """Keep the last answers of one store.

    An answer that took 100 ms is kept for 2 s, one that took 1 ms for 20 ms. So a question that is repeated
    without a pause takes about 5% of one core, more only if computing it takes longer than 250 ms.

    Threads: any number may use it. Of those that ask for the same answer, one computes and the others wait.

    Args:
        clock: Returns seconds of a monotonic clock.
        seconds: An answer is kept for at most this long; None: 5 seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, seconds: float | None = None) -> None:
        self._clock, self._seconds = clock, seconds
        self._lock = threading.Lock()
        self._answers: OrderedDict[Hashable, _Answer] = OrderedDict()

    def find(self, question: Hashable, compute: Callable[[], bytes]) -> bytes:
        """Return the answer to a question.

        Args:
            question: Everything that the answer depends on, except for the rows of the store.
            compute: Computes the answer. If it raises an error, the next client computes it again.
        """
        with self._lock:
            answer = self._answers.setdefault(question, _Answer())
            self._answers.move_to_end(question)
            while len(self._answers) > _KEPT:
                self._answers.popitem(last=False)
        with answer.lock:
            began = self._clock()
            if began >= answer.until:
                answer.value = compute()
                now = self._clock()
                answer.until = now + min(
                    _SECONDS if self._seconds is None else self._seconds, _TIMES * (now - began)
                )
            return answer.value
