"""Metrics of a server, for Prometheus.

Used by the application: requests are counted when they end; stores are read when metrics are requested.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from expstore.api.stores import Served
from expstore.disk.files import Disk
from expstore.errors import ExpStoreError
from expstore.storages.capabilities import Shipping

#: Upper bounds of the histogram, in seconds.
_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_AMOUNTS = {
    "bytes_in": "Bytes of request bodies.",
    "bytes_out": "Bytes of response bodies.",
    "rows_in": "Rows that were written.",
    "rows_out": "Rows that were sent.",
}

#: Figures of stores that are shipped, since they were opened.
_SHIPPED = {
    "rows_behind": "Rows that are not shipped.",
    "seconds_behind": "Seconds since the last upload, or since nothing was to upload.",
    "bytes": "Bytes that were shipped.",
    "requests": "Requests to the object storage.",
    "failures": "Uploads that failed.",
}


class Metrics:
    """Count the requests of one server; servers in the same process share nothing.

    Threads: any number may use it.

    Args:
        stores: Returns the open stores.
        folder: The served folder, whose disk is measured.
    """

    def __init__(self, stores: Callable[[], Iterable[Served]], folder: Path) -> None:
        self._stores, self._folder = stores, folder
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
        self.calls_lost = Counter(
            "expstore_calls_lost", "Calls to a language model that could not be recorded.", registry=registry
        )
        ProcessCollector(registry=registry)  # of Linux only: RSS, descriptors, CPU time, start time

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
        readers: Mapping[str, tuple[str, Callable[[Served], float | None]]] = {
            "rows": ("Readable rows.", lambda store: len(store.rb)),
            "bytes": ("Disk space of all files.", lambda store: store.summarizer.measure_bytes()),
            "last_write_timestamp_seconds": (
                "When the newest readable row was written, since 1970.", lambda store: store.last_write()
            ),
        }  # fmt: skip
        for name, (meaning, read) in readers.items():
            yield _read_stores(f"expstore_store_{name}", meaning, stores, read)
        shipped = [store for store in stores if _shipping_of(store) is not None]
        for name, meaning in _SHIPPED.items() if shipped else ():
            yield _read_stores(f"expstore_store_ship_{name}", meaning, shipped, partial(_read_shipped, name))
        disk = Disk()
        for name, meaning, measure in (
            ("free", "Free bytes of the disk with the stores.", disk.free),
            ("size", "Size of the disk with the stores, free or not.", disk.space),
        ):
            with contextlib.suppress(ExpStoreError):  # the folder is gone; /readyz says so
                yield GaugeMetricFamily(f"expstore_disk_{name}_bytes", meaning, measure(self._folder))
        yield GaugeMetricFamily("process_threads", "Threads of the process.", disk.count_threads())


def _shipping_of(store: Served) -> Shipping | None:
    storage = store.rb.storage
    return storage.writer().holders.shipping if storage.can_write else None


def _read_shipped(name: str, store: Served) -> float | None:
    """Return a figure of `rb.stats()["shipped"]`; None if the store is not shipped."""
    shipping = _shipping_of(store)
    return None if shipping is None else float(shipping.stats()[name])


def _read_stores(
    name: str, meaning: str, stores: Iterable[Served], read: Callable[[Served], float | None]
) -> GaugeMetricFamily:
    """Return a figure of each store that has it; a store that cannot be read has none."""
    family = GaugeMetricFamily(name, meaning, labels=["store"])
    for store in stores:
        with contextlib.suppress(ExpStoreError):
            value = read(store)
            if value is not None:
                family.add_metric([store.name], value)
    return family
