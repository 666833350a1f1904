"""Limit the requests of each client with a token bucket.

Used by `expstore.api.auth`. It never blocks; it returns the delay after which a client may retry.
"""

from __future__ import annotations

from collections import OrderedDict

#: Number of clients that are tracked; the least recent one is forgotten and starts again with a full bucket.
_CLIENTS = 10_000


class Rates:
    """Count requests by client.

    Threads: the event loop's only.

    Args:
        rate: Average requests per second; up to one second's worth, at least one, may arrive at once.
    """

    def __init__(self, rate: float) -> None:
        self._rate, self._burst = rate, max(1.0, rate)
        self._clients: OrderedDict[object, tuple[float, float]] = OrderedDict()

    def wait(self, client: object, now: float) -> float:
        """Count a request; return 0, or the number of seconds after which the client may retry.

        Args:
            client: Identifies the client.
            now: Seconds of a monotonic clock.
        """
        filled, at = self._clients.pop(client, (self._burst, now))
        filled = min(self._burst, filled + (now - at) * self._rate)
        allowed = filled >= 1
        self._clients[client] = (filled - 1 if allowed else filled, now)
        if len(self._clients) > _CLIENTS:
            self._clients.popitem(last=False)
        return 0.0 if allowed else (1 - filled) / self._rate
