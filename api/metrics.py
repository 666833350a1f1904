"""Figures of a server, as Prometheus reads them.

Used by the application: requests are counted as they end, stores are looked at when somebody asks.

The format is Prometheus' text exposition format, version 0.0.4
(https://prometheus.io/docs/instrumenting/exposition_formats).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from expstore.api.stores import Served

__all__ = ["MEDIA_TYPE", "Metrics"]

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
#: Upper bounds of the histogram, in seconds.
_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

_Labels = tuple[tuple[str, str], ...]


@dataclass(slots=True)
class _Durations:
    """How long the requests of one route took."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(_BOUNDS) + 1))
    total: float = 0.0

    def samples(self, name: str, labels: _Labels) -> Iterator[str]:
        below = 0
        for bound, count in zip((*map(str, _BOUNDS), "+Inf"), self.counts, strict=True):
            below += count
            yield _sample(f"{name}_bucket", (*labels, ("le", bound)), below)
        yield _sample(f"{name}_sum", labels, self.total)
        yield _sample(f"{name}_count", labels, below)


class Metrics:
    """Count what a server does.

    Threads: the event loop's only.
    """

    def __init__(self) -> None:
        self.in_flight = 0
        self._requests: Counter[tuple[str, str, int]] = Counter()
        self._durations: dict[str, _Durations] = {}
        self._amounts: Counter[tuple[str, str]] = Counter()

    def count(self, route: str, method: str, status: int, seconds: float, amounts: Mapping[str, int]) -> None:
        """Count a request that has ended.

        Args:
            route: Its route's path; of none, a word that stands for all of these.
            method: Its method.
            status: Of the answer; 0: there was none.
            seconds: From its head to the end of the answer.
            amounts: `bytes_in`, `bytes_out`, `rows_in`, `rows_out`.
        """
        self._requests[route, method, status] += 1
        durations = self._durations.setdefault(route, _Durations())
        durations.counts[bisect_left(_BOUNDS, seconds)] += 1
        durations.total += seconds
        for name, amount in amounts.items():
            if amount:
                self._amounts[name, route] += amount

    def text(self, stores: Iterable[Served]) -> str:
        """Return all figures.

        Args:
            stores: The stores that are open.
        """
        return "".join(f"{line}\n" for line in self._lines(sorted(stores, key=lambda one: one.name)))

    def _lines(self, stores: list[Served]) -> Iterator[str]:
        yield from _head("expstore_requests_in_flight", "gauge", "Requests that are being answered.")
        yield _sample("expstore_requests_in_flight", (), self.in_flight)
        yield from _head(
            "expstore_requests_total", "counter", "Requests that have ended; status 0: unanswered."
        )
        for (route, method, status), count in sorted(self._requests.items()):
            labels = (("route", route), ("method", method), ("status", str(status)))
            yield _sample("expstore_requests_total", labels, count)
        yield from _head(
            "expstore_request_seconds", "histogram", "From a request's head to its answer's end."
        )
        for route, durations in sorted(self._durations.items()):
            yield from durations.samples("expstore_request_seconds", (("route", route),))
        for name, meaning in _AMOUNTS.items():
            yield from _head(f"expstore_{name}_total", "counter", meaning)
            for (kind, route), amount in sorted(self._amounts.items()):
                if kind == name:
                    yield _sample(f"expstore_{name}_total", (("route", route),), amount)
        yield from _head("expstore_stores_open", "gauge", "Stores that are open.")
        yield _sample("expstore_stores_open", (), len(stores))
        yield from _head("expstore_store_rows", "gauge", "Rows that can be read.")
        for store in stores:
            yield _sample("expstore_store_rows", (("store", store.name),), len(store.rb))


_AMOUNTS = {
    "bytes_in": "Bytes of bodies that came.",
    "bytes_out": "Bytes of bodies that went.",
    "rows_in": "Rows that were taken in.",
    "rows_out": "Rows that were handed out.",
}


def _head(name: str, kind: str, meaning: str) -> Iterator[str]:
    yield f"# HELP {name} {meaning}"
    yield f"# TYPE {name} {kind}"


def _sample(name: str, labels: _Labels, value: float) -> str:
    told = ",".join(f'{key}="{_quoted(text)}"' for key, text in labels)
    return f"{name}{{{told}}} {value!r}" if told else f"{name} {value!r}"


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
