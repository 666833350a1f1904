"""Idempotency keys of requests that were done: a repeated one gets the answer of the first.

Used for changes that the store does not record with a key, such as priorities and annotations. The store
itself recognizes repeated writes of rows, also after a restart; these keys are in the server's memory.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from expstore.core.per_key import PerKey

_Answer = TypeVar("_Answer")
#: Number of answers that are kept: clients repeat a request for a minute.
_KEPT = 100_000


class DoneKeys(Generic[_Answer]):
    """Do each request with a key once, and keep its answer.

    Threads: any number may use it; of two requests with the same key one waits for the other. Crashes: after
    a restart of the server a repeated request is done again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._doing = PerKey(threading.Lock)
        self._answers: OrderedDict[bytes, _Answer] = OrderedDict()

    def once(self, key: bytes | None, act: Callable[[], _Answer]) -> _Answer:
        """Return the result of a function, or of the former call with the same key.

        Args:
            key: The key; None: the request has none, and is done.
            act: Does the request. If it raises an error, a repeated request is done.
        """
        if key is None:
            return act()
        with self._doing.use(key) as doing, doing:
            with self._lock:
                if key in self._answers:
                    return self._answers[key]
            answer = act()
            with self._lock:
                self._answers[key] = answer
                if len(self._answers) > _KEPT:
                    self._answers.popitem(last=False)
            return answer
