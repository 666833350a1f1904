"""Metrics of a server, for Prometheus.

Used by the application: requests are counted when they end; stores are read when metrics are requested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from expstore.api.stores import Served

__all__ = ["Metrics"]

#: Upper bounds of the histogram, in seconds.
_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_AMOUNTS = {
    "bytes_in": "Bytes of request bodies.",
    "bytes_out": "Bytes of response bodies.",
    "rows_in": "Rows that were written.",
    "rows_out": "Rows that were sent.",
}


class Metrics:
    """Count the requests of one server; servers in the same process share nothing.

    Threads: the event loop's only.

    Args:
        stores: Returns the open stores.
    """

    def __init__(self, stores: Callable[[], Iterable[Served]]) -> None:
        self._stores = stores
        self._registry = registry = CollectorRegistry()
        self.in_flight = Gauge(
            "expstore_requests_in_flight", "Requests that are being processed.", registry=registry
        )
        self._requests = Counter(
            "expstore_requests", "Requests that have ended; status 0: no response.",
            ("route", "method", "status"), registry=registry,
        )  # fmt: skip
        self._durations = Histogram(
            "expstore_request_seconds", "Seconds from a request's head to the end of its response.",
            ("route",), registry=registry, buckets=_BOUNDS,
        )  # fmt: skip
        self._amounts = {
            name: Counter(f"expstore_{name}", meaning, ("route",), registry=registry)
            for name, meaning in _AMOUNTS.items()
        }

    def count(self, route: str, method: str, status: int, seconds: float, amounts: Mapping[str, int]) -> None:
        """Count a request that has ended.

        Args:
            route: Path of its route; one fixed word for requests without a route.
            method: Its method.
            status: Status of the response; 0: there was none.
            seconds: Seconds from its head to the end of the response.
            amounts: `bytes_in`, `bytes_out`, `rows_in`, `rows_out`.
        """
        self._requests.labels(route, method, status).inc()
        self._durations.labels(route).observe(seconds)
        for name, amount in amounts.items():
            if amount:
                self._amounts[name].labels(route).inc(amount)

    def render(self, accept: str) -> tuple[bytes, str]:
        """Return all metrics and their media type: text format 0.0.4 unless another format is preferred.

        Args:
            accept: The request's Accept header; "" if it has none.
        """
        try:
            encode, media_type = choose_encoder(accept)
        except TypeError:  # a version that is not a number, such as version=1.x
            encode, media_type = choose_encoder("")
        return encode(self), media_type

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics, as prometheus_client's encoders expect."""
        for metric in self._registry.collect():
            # Without the time at which each series began, which would double the number of series.
            metric.samples = [one for one in metric.samples if not one.name.endswith("_created")]
            yield metric
        stores = sorted(self._stores(), key=lambda one: one.name)
        yield GaugeMetricFamily("expstore_stores_open", "Stores that are open.", len(stores))
        rows = GaugeMetricFamily("expstore_store_rows", "Readable rows.", labels=["store"])
        for store in stores:
            rows.add_metric([store.name], len(store.rb))
        yield rows
