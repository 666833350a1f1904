"""Track when remote sessions last sent a request; a session that is silent for too long is ended.

Used by `expstore.api.stores`. It knows session ids and times, never rows.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable


class SessionActivity:
    """Record when each live session of a store last sent a request.

    For sessions that were live when the server opened the store, the time counts from that moment, so that
    their clients can reconnect. Ids of sessions that have written nothing are not kept, so their number does
    not matter.

    Threads: any number may use it.

    Args:
        clock: Returns seconds of a monotonic clock.
        sessions: Ids of the sessions that are live now.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, sessions: Iterable[str] = ()) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._last = dict.fromkeys(sessions, clock())

    def note(self, session: str, *, has_written: bool = False) -> None:
        """Record a request of a session.

        Args:
            session: Its id.
            has_written: Whether it has written rows and is therefore live.
        """
        with self._lock:
            if has_written or session in self._last:
                self._last[session] = self._clock()

    def silent(self, sessions: Iterable[str], seconds: float) -> list[str]:
        """Return the sessions that have been silent for at least some time.

        Args:
            sessions: Ids of the live sessions; other sessions are forgotten.
            seconds: The time in seconds.
        """
        with self._lock:
            now = self._clock()
            # The time of a session that writes for the first time now counts from now.
            self._last = {name: self._last.get(name, now) for name in sessions}
            return [name for name, last in self._last.items() if now - last >= seconds]
