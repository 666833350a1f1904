"""Hold one client's draws and writes to a rate limiter over all shards.

The shards count: every answer of a shard has the counts of its own limiter. Clients add up what the shards
told last, and wait while the sum forbids a draw or a write.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from typing import Any

from expstore.cluster.shard_set import ShardSet
from expstore.errors import NotReadyError, StateError
from expstore.rate_limiters import Counts, RateLimiter
from expstore.remote.forks import copy_in_child

#: A writer uses counts of a shard that are at most this old, in seconds, unless the shard does not answer.
_STALE_SECONDS = 1.0
#: First and longest pause between two looks at the counts.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.5


class ClusterLimit:
    """Wait until the rows of all shards permit a draw or a write of this client.

    Threads: any number may wait. Processes: a copy, and a forked child, wait by themselves;
    the counts are in the shards.

    Args:
        limiter: The rules; it is not attached to a store.
        shards: The shards, whose servers must count by the same ratio.

    Raises:
        StateError: A shard does not count, or counts by another ratio.
    """

    def __init__(self, limiter: RateLimiter, shards: ShardSet) -> None:
        self._limiter, self._shards = limiter, shards
        self._start()
        self._sum()

    def _start(self) -> None:
        self._lock, self._inserting = threading.Lock(), 0
        copy_in_child(self)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy."""
        return {"_limiter": self._limiter, "_shards": self._shards}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore what `__getstate__` returned."""
        self.__dict__.update(state)
        self._start()

    def wait_to_sample(self, rows: int) -> None:
        """Wait until a number of rows may be drawn. One thread at a time draws.

        Raises:
            NotReadyError: The limiter's timeout passed (kind "rate_limited").
            ValueError: This number of rows can never be drawn at once.
            StateError: The buffer was closed, or a shard does not count.
        """
        limiter = self._limiter
        limiter.check_sample(rows)
        self._wait(
            lambda counts: limiter.allows_sample(counts, rows),
            lambda counts: limiter.refuse_sample(counts, rows),
        )

    @contextmanager
    def inserting(self, rows: int) -> Iterator[None]:
        """Wait until a number of rows may be written, as a context manager around the write.

        Raises:
            NotReadyError: The limiter's timeout passed (kind "rate_limited").
            ValueError: This number of rows can never be written at once.
            StateError: The buffer was closed, or a shard does not count.
        """
        limiter = self._limiter
        if self._sum().rows >= limiter.min_size_to_sample:
            limiter.check_insert(rows)
        asked = [shard.refresh(_STALE_SECONDS) for shard in self._shards.all]
        wait([future for future in asked if future is not None], _STALE_SECONDS)

        def allows(counts: Counts) -> bool:
            own = self._inserting
            counts = counts._replace(rows=counts.rows + own, inserted=counts.inserted + own)
            if not limiter.allows_insert(counts, rows):
                return False
            self._inserting += rows
            return True

        self._wait(allows, lambda counts: limiter.refuse_insert(counts, rows))
        try:
            yield
        finally:
            with self._lock:
                self._inserting -= rows

    def _wait(self, allows: Callable[[Counts], bool], refuse: Callable[[Counts], NotReadyError]) -> None:
        seconds = math.inf if self._limiter.timeout is None else self._limiter.timeout
        until, pause = time.monotonic() + seconds, _FIRST_PAUSE
        while True:
            with self._lock:
                counts = self._sum()
                if allows(counts):
                    return
            left = until - time.monotonic()
            if left <= 0:
                raise refuse(counts)
            for shard in self._shards.all:
                shard.refresh(0.0)
            if self._shards.ended.wait(min(pause, left)):
                raise StateError("the buffer is closed", hint="connect again: expstore.connect()")
            self._shards.look()
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _sum(self) -> Counts:
        """Return the sums of what the shards told last.

        Raises:
            StateError: A shard does not count, or counts by another ratio.
        """
        rows = inserted = sampled = 0
        ratio = self._limiter.samples_per_insert
        for shard in self._shards.all:
            limits = shard.limits
            if limits is None and shard.answered == -math.inf:
                continue  # it is new, or this process is
            if limits is None or (self._limiter.is_bounded and limits.samples_per_insert != ratio):
                found = (
                    "nothing" if limits is None else f"for {limits.samples_per_insert:g} samples per insert"
                )
                raise StateError(
                    f"shard {shard.number} ({shard.place}) counts {found}, and rate_limiter= needs counts "
                    f"for {ratio:g} samples per insert",
                    kind="limits",
                    hint=f"serve it with --samples-per-insert {ratio:g} --error-buffer inf",
                )
            rows += limits.counts.rows
            inserted += limits.counts.inserted
            sampled += limits.counts.sampled
        return Counts(rows, inserted, sampled)
