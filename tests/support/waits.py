"""Wait for what another thread or process does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import expstore

#: How long a test waits, seconds: far longer than any of them takes on a busy machine.
_LONGEST = 60.0


class ManualClock:
    """A clock that stands still until a test moves it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def wait_until(check: Callable[[], object]) -> None:
    """Return once `check` returns something true.

    Raises:
        AssertionError: It did not for a minute.
    """
    due = time.monotonic() + _LONGEST
    while not check():
        assert time.monotonic() < due, "it has not happened for a minute"
        threading.Event().wait(0.005)


def wait_for_workers(rb: expstore.ReplayBuffer) -> None:
    """Return once no process writes through a shared buffer any more, and all open episodes were cut.

    The owner learns of the end of a process after that process has ended.
    """
    server = rb._sharing._server
    assert server is not None, "it is shared"
    wait_until(lambda: not server._loop._workers)
    wait_until(lambda: rb.sql("SELECT count(*) FROM episodes WHERE status = 'open'").fetchall() == [(0,)])
