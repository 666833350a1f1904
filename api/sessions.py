"""Which remote sessions are heard of: one that is silent for long enough is over.

Used by `expstore.api.stores`. It knows ids and times, never rows.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

__all__ = ["Heard"]


class Heard:
    """Note when each live session of a store was heard of.

    Sessions that were live when the server opened the store count from that moment: their clients have time
    to come back. Ids that have written nothing are not kept, however many come.

    Threads: any number may.

    Args:
        clock: Seconds on a clock that never goes back.
        sessions: Those that are live now.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, sessions: Iterable[str] = ()) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._last = dict.fromkeys(sessions, clock())

    def note(self, session: str, *, has_written: bool = False) -> None:
        """Note that a session was heard of.

        Args:
            session: Its id.
            has_written: It is live, if it was not before.
        """
        with self._lock:
            if has_written or session in self._last:
                self._last[session] = self._clock()

    def silent(self, sessions: Iterable[str], seconds: float) -> list[str]:
        """Return the sessions that were not heard of for so long.

        Args:
            sessions: Those that are live; others are forgotten.
            seconds: How long.
        """
        with self._lock:
            now = self._clock()
            # One that writes at this moment counts from now.
            self._last = {name: self._last.get(name, now) for name in sessions}
            return [name for name, last in self._last.items() if now - last >= seconds]
