"""How many requests a client may make: a bucket per client, which fills steadily.

Used by `expstore.api.auth`. It sleeps for nobody: who comes too early is told when to come again.
"""

from __future__ import annotations

from collections import OrderedDict

__all__ = ["Rates"]

#: Clients that are remembered; who has not come for longest is forgotten, and begins with a full bucket.
_CLIENTS = 10_000


class Rates:
    """Count requests by client.

    Threads: the event loop's only.

    Args:
        rate: Requests per second, on average; a second's worth, at least one, may come at once.
    """

    def __init__(self, rate: float) -> None:
        self._rate, self._burst = rate, max(1.0, rate)
        self._clients: OrderedDict[object, tuple[float, float]] = OrderedDict()

    def wait(self, client: object, now: float) -> float:
        """Take one request in; return 0, or after how many seconds to come again.

        Args:
            client: Whose request it is.
            now: Seconds of a clock that never goes back.
        """
        filled, at = self._clients.pop(client, (self._burst, now))
        filled = min(self._burst, filled + (now - at) * self._rate)
        allowed = filled >= 1
        self._clients[client] = (filled - 1 if allowed else filled, now)
        if len(self._clients) > _CLIENTS:
            self._clients.popitem(last=False)
        return 0.0 if allowed else (1 - filled) / self._rate
