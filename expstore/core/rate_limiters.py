"""How fast a store may be sampled from while it is written to: rate limiters with Reverb's laws and words.

Given to buffers, which ask before they draw and before they write; a server can ask without waiting. It
counts rows; it never touches any, and what it has counted the storage keeps.
"""

from __future__ import annotations

import math
import struct
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from expstore.core.draw_state import DrawState
from expstore.errors import NotReadyError, StateError

__all__ = ["Limited", "MinSize", "RateLimiter", "SampleToInsertRatio"]

#: Who waits looks up so often: rows may leave, and a signal may come, without a word.
_LOOK_SECONDS = 0.1


class Limited(Protocol):
    """What a limiter needs of a storage."""

    @property
    def capacity(self) -> int | None:
        """The largest number of readable rows; None: unbounded."""

    @property
    def write_count(self) -> int:
        """How many rows were ever inserted."""

    @property
    def draws(self) -> DrawState:
        """The state of the draws, which keeps what a limiter has counted."""

    @property
    def closed(self) -> bool:
        """Whether it is closed."""

    def __len__(self) -> int: ...


class RateLimiter:
    """Let rows in and out as long as the ratio of both stays within bounds.

    Stage 1, while fewer than `min_size_to_sample` rows can be read: rows may be inserted, none sampled.
    Stage 2: with `error = inserted * samples_per_insert - sampled`, rows may be sampled if the error is at
    least `min_diff` afterwards, and inserted if it is at most `max_diff` afterwards (the law of
    reverb/cc/rate_limiter.cc, for batches of rows). Inserted are all rows that were ever written to the
    store, sampled those that were handed out under these settings, of sequences their anchors. A store that
    was not limited before, or by other settings, or was written to without, begins without an error.

    Threads: any number wait, each until its call may go on; Ctrl-C ends a wait, `close` of the buffer all
    of them. Processes: counts are the writer's; followers neither count nor wait. Crashes: after a kill
    both counts go on; after a power cut `sampled` is that of the last sync.

    Args:
        samples_per_insert: How often each row is to be sampled on average.
        min_size_to_sample: So many rows must be readable before any is sampled.
        min_diff: The least error; -inf: any.
        max_diff: The largest error; inf: any.
        timeout: Seconds that a call waits; 0: it fails at once; None: it waits for ever.

    Raises:
        ValueError: The bounds could keep both sides waiting for ever, or an argument has no meaning.
    """

    def __init__(
        self,
        samples_per_insert: float,
        min_size_to_sample: int,
        min_diff: float,
        max_diff: float,
        *,
        timeout: float | None = None,
    ) -> None:
        if min_size_to_sample < 1:
            raise ValueError(f"min_size_to_sample must be at least 1, got {min_size_to_sample}")
        if not 0 < samples_per_insert < math.inf:
            raise ValueError(f"samples_per_insert must be above 0, got {samples_per_insert}")
        if timeout is not None and not timeout >= 0:
            raise ValueError(f"timeout must be at least 0 seconds, or None for no end, got {timeout}")
        if not max_diff - min_diff >= 2 * max(1.0, samples_per_insert):
            raise ValueError(
                f"error_buffer spans {max_diff - min_diff:g}; below 2 * max(1, samples_per_insert) = "
                f"{2 * max(1.0, samples_per_insert):g} it could block both sides for ever"
            )
        if min_diff > samples_per_insert * min_size_to_sample:
            raise ValueError(
                f"error_buffer begins at {min_diff:g}, above samples_per_insert * min_size_to_sample = "
                f"{samples_per_insert * min_size_to_sample:g}: no row could ever be sampled"
            )
        self.samples_per_insert = float(samples_per_insert)
        self.min_size_to_sample = int(min_size_to_sample)
        self.min_diff, self.max_diff = float(min_diff), float(max_diff)
        self.timeout = timeout
        self._begin()

    def _begin(self) -> None:
        self._changed = threading.Condition()
        self._storage: Callable[[], Limited | None] = lambda: None
        self._closed = False
        self._inserting = self._sampling = 0  # rows of calls that may go on and have not come back
        self._newest = (0, 0)  # rows asked for by the newest insert and the newest sample

    # -- what a buffer does ----------------------------------------------------------------------

    def check(self, capacity: int | None) -> None:
        """Raise ValueError if no row could ever be sampled from a store of this capacity."""
        if capacity is not None and self.min_size_to_sample > capacity:
            raise ValueError(
                f"min_size_to_sample is {self.min_size_to_sample}, the store never holds more than {capacity}"
            )

    def attach(self, storage: Limited) -> None:
        """Limit a storage from now on.

        Raises:
            ValueError: No row could ever be sampled from it.
            StateError: Another one that is open is limited already.
        """
        self.check(storage.capacity)
        with self._changed:
            former = self._storage()
            if former is not None and former is not storage and not self._closed:
                raise StateError(
                    "this limiter is another store's already", hint="give each buffer a limiter of its own"
                )
            self._storage, self._closed = weakref.ref(storage), False
            sampled, settings = storage.draws.limits
            if settings != self._settings:
                target = min(
                    max(self.samples_per_insert * self.min_size_to_sample, self.min_diff), self.max_diff
                )
                sampled = round(storage.write_count * self.samples_per_insert - target)
                storage.draws.note_limits(max(0, sampled), self._settings)

    @property
    def _settings(self) -> int:
        """A number that other settings do not have; never 0."""
        numbers = self.samples_per_insert, self.min_size_to_sample, self.min_diff, self.max_diff
        return zlib.crc32(struct.pack("<dqdd", *numbers)) or 1

    def close(self) -> None:
        """End all waits; who waited is told that the store is closed."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @contextmanager
    def inserting(self, rows: int, *, needless: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Wait until so many rows may be inserted, which the block does; the storage counts them itself.

        Args:
            rows: How many.
            needless: Says that they will not be, after all: then nothing is waited for.

        Raises:
            NotReadyError: They may not, and the time is over (kind "rate_limited").
            ValueError: So many may never be inserted at once.
            StateError: The store is closed.
        """
        with self._changed:
            if len(self._open_storage()) >= self.min_size_to_sample and not needless():
                self._check_rows(rows * self.samples_per_insert, f"an insert of {rows} rows")
            self._newest = rows, self._newest[1]
            self._wait(rows, lambda *args: needless() or self._may_insert(*args), self._refuse_insert)
            self._inserting += rows
        try:
            yield
        finally:
            with self._changed:
                self._inserting -= rows
                self._changed.notify_all()

    @contextmanager
    def sampling(self, rows: int) -> Iterator[Callable[[int], None]]:
        """Wait until so many rows may be sampled, which the block does; it says how many by what it is given.

        Raises:
            NotReadyError: They may not, and the time is over (kind "rate_limited").
            ValueError: So many may never be sampled at once.
            StateError: The store is closed.
        """
        with self._changed:
            self._check_rows(rows, f"a sample of {rows} rows")
            self._newest = self._newest[0], rows
            self._wait(rows, self._may_sample, self._refuse_sample)
            self._sampling += rows
        try:
            yield self._count
        finally:
            with self._changed:
                self._sampling -= rows
                self._changed.notify_all()

    def _count(self, rows: int) -> None:
        with self._changed:
            storage = self._open_storage()
            storage.draws.note_limits(storage.draws.limits[0] + rows, self._settings)

    # -- what may be asked at any time -----------------------------------------------------------

    def can_sample(self, rows: int = 1) -> bool:
        """Return whether so many rows may be sampled now."""
        with self._changed:
            return self._may_sample(self._open_storage(), rows)

    def can_insert(self, rows: int = 1) -> bool:
        """Return whether so many rows may be inserted now."""
        with self._changed:
            return self._may_insert(self._open_storage(), rows)

    def describe(self) -> dict[str, Any]:
        """Return settings, counts and who waits, in a form that JSON can keep."""
        with self._changed:
            storage = self._open_storage()
            inserted, sampled = storage.write_count, storage.draws.limits[0]
        return {
            "limiter": repr(self),
            "inserted": inserted,
            "sampled": sampled,
            "error": inserted * self.samples_per_insert - sampled,
        }

    # -- with the lock held ----------------------------------------------------------------------

    def _open_storage(self) -> Limited:
        storage = self._storage()
        if storage is None or self._closed or storage.closed:
            raise StateError("the store is closed", hint="open it again with expstore.open()")
        return storage

    def _may_sample(self, storage: Limited, rows: int) -> bool:
        if len(storage) < self.min_size_to_sample:
            return False
        sampled = storage.draws.limits[0] + self._sampling + rows
        return storage.write_count * self.samples_per_insert - sampled >= self.min_diff

    def _may_insert(self, storage: Limited, rows: int) -> bool:
        if len(storage) + self._inserting < self.min_size_to_sample:
            return True
        inserted = storage.write_count + self._inserting + rows
        return inserted * self.samples_per_insert - storage.draws.limits[0] <= self.max_diff

    def _wait(
        self,
        rows: int,
        may: Callable[[Limited, int], bool],
        refusal: Callable[[Limited, int], NotReadyError],
    ) -> None:
        due = None if self.timeout is None else time.monotonic() + self.timeout
        while not may(storage := self._open_storage(), rows):
            self._check_stuck(storage)
            left = math.inf if due is None else due - time.monotonic()
            if left <= 0:
                raise refusal(storage, rows)
            del storage  # a buffer that is forgotten meanwhile is to go
            self._changed.wait(min(left, _LOOK_SECONDS))

    def _check_rows(self, rows: float, what: str) -> None:
        """Raise ValueError if no error is small or large enough for so many rows at once."""
        span = self.max_diff - self.min_diff
        if rows > span:
            raise ValueError(
                f"{what} moves the error by {rows:g}, more than the {span:g} that error_buffer spans: it "
                f"would wait for ever; take fewer rows at once, or a larger error_buffer"
            )

    def _check_stuck(self, storage: Limited) -> None:
        """Raise ValueError if inserts and samples of the newest sizes wait for one another."""
        inserts, samples = self._newest
        if not (inserts and samples) or self._inserting or self._sampling:
            return
        if len(storage) < self.min_size_to_sample:
            return
        if not (self._may_insert(storage, inserts) or self._may_sample(storage, samples)):
            raise ValueError(
                f"inserts of {inserts} rows and samples of {samples} wait for one another: error_buffer "
                f"spans {self.max_diff - self.min_diff:g}, rows * samples_per_insert + batch size is "
                f"{inserts * self.samples_per_insert + samples:g}; take a larger error_buffer"
            )

    def _refuse_sample(self, storage: Limited, rows: int) -> NotReadyError:
        have = len(storage)
        if have < self.min_size_to_sample:
            reason = f"the store has {have} of min_size_to_sample = {self.min_size_to_sample} rows"
        else:
            reason = f"{self._counts(storage)}, and min_diff is {self.min_diff:g}"
        return self._refusal(f"cannot sample {rows} rows yet: {reason}", "extend() the store first")

    def _refuse_insert(self, storage: Limited, rows: int) -> NotReadyError:
        reason = f"{self._counts(storage)}, and max_diff is {self.max_diff:g}"
        return self._refusal(f"cannot insert {rows} rows yet: {reason}", "sample() first")

    def _counts(self, storage: Limited) -> str:
        inserted, sampled = storage.write_count, storage.draws.limits[0]
        error = inserted * self.samples_per_insert - sampled
        return (
            f"with {inserted} rows inserted and {sampled} sampled at {self.samples_per_insert:g} samples per "
            f"insert the error is {error:g}"
        )

    def _refusal(self, text: str, act: str) -> NotReadyError:
        waited = f" (waited {self.timeout:g} s)" if self.timeout else ""
        return NotReadyError(f"{text}{waited}", kind="rate_limited", hint=f"{act}, or give a longer timeout")

    # -- copies in other processes, which are not limited ------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings; what is limited, and who waits, stays here."""
        names = ("samples_per_insert", "min_size_to_sample", "min_diff", "max_diff", "timeout")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over settings."""
        self.__dict__.update(state)
        self._begin()


class MinSize(RateLimiter):
    """Sample only while so many rows can be read; insert at any time.

    Threads, processes, crashes: as `RateLimiter`.

    Args:
        min_size_to_sample: So many rows.
        timeout: Seconds that `sample` waits; 0: it fails at once; None: it waits for ever.

    Example:
        >>> rb = expstore.open("run.exp", batch_size=32, batches={"rate_limiter": MinSize(1000)})
    """

    def __init__(self, min_size_to_sample: int, *, timeout: float | None = None) -> None:
        super().__init__(1.0, min_size_to_sample, -math.inf, math.inf, timeout=timeout)

    def __repr__(self) -> str:
        return f"MinSize({self.min_size_to_sample})"


class SampleToInsertRatio(RateLimiter):
    """Keep the ratio of rows sampled to rows inserted.

    Threads, processes, crashes: as `RateLimiter`.

    Args:
        samples_per_insert: How often each row is to be sampled on average.
        min_size_to_sample: So many rows must be readable before any is sampled; until then all inserts go on.
        error_buffer: How far the number of rows sampled may be from what the ratio asks for, counted from
            the moment at which `min_size_to_sample` rows were there; or a pair, the least and the largest
            `inserted * samples_per_insert - sampled`. Batches move it as a whole: it takes at least half of
            (rows per extend) * samples_per_insert + batch size, or both sides may wait for one another.
        timeout: Seconds that `sample`, `extend` and `add` wait; 0: they fail at once; None: for ever.

    Raises:
        ValueError: The bounds could keep both sides waiting for ever.

    Example:
        >>> limiter = SampleToInsertRatio(4.0, min_size_to_sample=1000, error_buffer=2000)
        >>> rb = expstore.open("run.exp", batch_size=256, batches={"rate_limiter": limiter})
    """

    def __init__(
        self,
        samples_per_insert: float,
        min_size_to_sample: int,
        error_buffer: float | tuple[float, float],
        *,
        timeout: float | None = None,
    ) -> None:
        if isinstance(error_buffer, tuple | list):
            low, high = error_buffer
        else:
            middle = samples_per_insert * min_size_to_sample
            low, high = middle - error_buffer, middle + error_buffer
        super().__init__(samples_per_insert, min_size_to_sample, low, high, timeout=timeout)

    def __repr__(self) -> str:
        bounds = f"({self.min_diff:g}, {self.max_diff:g})"
        return f"SampleToInsertRatio({self.samples_per_insert:g}, {self.min_size_to_sample}, {bounds})"
