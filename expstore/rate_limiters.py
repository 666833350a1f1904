"""Rate limiters of the ratio of sampled to inserted rows, with Reverb's rules and terms.

Buffers call them before they draw and before they write; a server can call them without waiting. A limiter
counts rows but never reads them; the storage stores its counts.
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
from typing import Any, NamedTuple, Protocol

from expstore.core.arguments import check_whole
from expstore.core.draw_state import DrawState
from expstore.errors import ArgumentError, NotReadyError, StateError

__all__ = ["Counts", "Limited", "MinSize", "RateLimiter", "SampleToInsertRatio"]

#: Poll interval of waiting threads: removed rows and signals do not notify them.
_LOOK_SECONDS = 0.1


class Limited(Protocol):
    """The part of a storage that a limiter uses."""

    @property
    def capacity(self) -> int | None:
        """The largest number of readable rows; None: unbounded."""

    @property
    def write_count(self) -> int:
        """Number of rows that were ever inserted."""

    @property
    def draws(self) -> DrawState:
        """The state of the draws, which stores a limiter's counts."""

    @property
    def closed(self) -> bool:
        """Whether the storage is closed."""

    def __len__(self) -> int: ...


class Counts(NamedTuple):
    """What a limiter compares.

    Args:
        rows: Number of readable rows.
        inserted: Number of rows that were ever inserted.
        sampled: Number of rows that were sampled under the limiter's settings.
    """

    rows: int
    inserted: int
    sampled: int


class RateLimiter:
    """Block inserts and samples so that their ratio stays within bounds.

    Stage 1, while fewer than `min_size_to_sample` rows can be read: rows may be inserted but not sampled.
    Stage 2: with `error = inserted * samples_per_insert - sampled`, rows may be sampled if the error is at
    least `min_diff` afterwards, and inserted if it is at most `max_diff` afterwards (the rule of
    reverb/cc/rate_limiter.cc, for batches of rows). `inserted` counts all rows that were ever written to the
    store. `sampled` counts the rows that were returned under these settings; of a sequence only its anchor
    counts. The error begins at its target if the store had no limiter before, or one with other settings, or
    was written to without it.

    Threads: any number may wait, each until its call is allowed; Ctrl-C ends a wait, `close` of the buffer
    ends all waits. Processes: only the writer counts; readers neither count nor wait. Crashes: after a kill
    both counts continue; after a power cut `sampled` is the count at the last sync.

    Args:
        samples_per_insert: How often each row is sampled on average.
        min_size_to_sample: Number of rows that must be readable before any row is sampled.
        min_diff: The smallest error; -inf for no bound.
        max_diff: The largest error; inf for no bound.
        timeout: Seconds that a call waits; 0 to fail at once; None to wait without a limit.

    Raises:
        ArgumentError: The bounds could block both sides forever, or an argument is out of range.
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
        min_size_to_sample = check_whole("min_size_to_sample", min_size_to_sample)
        if min_size_to_sample < 1:
            raise ArgumentError(f"min_size_to_sample must be at least 1, got {min_size_to_sample}")
        if not 0 < samples_per_insert < math.inf:
            raise ArgumentError(f"samples_per_insert must be above 0, got {samples_per_insert}")
        if timeout is not None and not timeout >= 0:
            raise ArgumentError(f"timeout must be at least 0 seconds, or None for no limit, got {timeout}")
        if not max_diff - min_diff >= 2 * max(1.0, samples_per_insert):
            raise ArgumentError(
                f"error_buffer spans {max_diff - min_diff:g}; below 2 * max(1, samples_per_insert) = "
                f"{2 * max(1.0, samples_per_insert):g} it could block both sides forever"
            )
        if min_diff > samples_per_insert * min_size_to_sample:
            raise ArgumentError(
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
        self._inserting = self._sampling = 0  # rows of calls that are allowed and have not finished
        self._waived = 0  # contexts of `allow_inserts` that last
        self._newest = (0, 0)  # rows of the newest insert and the newest sample

    # -- called by buffers -----------------------------------------------------------------------

    def check(self, capacity: int | None) -> None:
        """Raise ValueError if no row could ever be sampled from a store of this capacity."""
        if capacity is not None and self.min_size_to_sample > capacity:
            raise ArgumentError(
                f"min_size_to_sample is {self.min_size_to_sample}, the store never holds more than {capacity}"
            )

    def attach(self, storage: Limited) -> None:
        """Limit a storage from now on.

        Raises:
            ArgumentError: No row could ever be sampled from the storage.
            StateError: The limiter already limits another open storage.
        """
        self.check(storage.capacity)
        with self._changed:
            former = self._storage()
            if former is not None and former is not storage and not self._closed:
                raise StateError(
                    "this limiter already belongs to another store", hint="create a limiter for each buffer"
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
        """A hash of the settings; never 0."""
        numbers = self.samples_per_insert, self.min_size_to_sample, self.min_diff, self.max_diff
        return zlib.crc32(struct.pack("<dqdd", *numbers)) or 1

    def close(self) -> None:
        """End all waits: they raise StateError, which says that the store is closed."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @contextmanager
    def wait_to_insert(self, rows: int, *, needless: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Wait until a number of rows may be inserted, as a context manager around the insert.

        The storage counts inserted rows itself.

        Args:
            rows: The number of rows.
            needless: Returns True if the insert turns out to be unnecessary, which ends the wait.

        Raises:
            NotReadyError: The timeout passed (kind "rate_limited").
            ArgumentError: This number of rows can never be inserted at once.
            StateError: The store is closed.
        """
        with self._changed:
            if len(self._open_storage()) >= self.min_size_to_sample and not needless():
                self.check_insert(rows)
            self._newest = rows, self._newest[1]
            self._wait(rows, lambda *args: needless() or self._may_insert(*args), self.refuse_insert)
            self._inserting += rows
        try:
            yield
        finally:
            with self._changed:
                self._inserting -= rows
                self._changed.notify_all()

    @contextmanager
    def allow_inserts(self) -> Iterator[None]:
        """Allow all inserts while this context lasts, also those that wait; they are counted as always.

        A program that waits for its writers to end uses it, since it does not sample meanwhile.
        """
        with self._changed:
            self._waived += 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._waived -= 1

    @contextmanager
    def sampling(self, rows: int) -> Iterator[Callable[[int], None]]:
        """Wait until a number of rows may be sampled, as a context manager around the sampling.

        Yields:
            A function to call with the number of rows that were sampled.

        Raises:
            NotReadyError: The timeout passed (kind "rate_limited").
            ArgumentError: This number of rows can never be sampled at once.
            StateError: The store is closed.
        """
        with self._changed:
            self.check_sample(rows)
            self._newest = self._newest[0], rows
            self._wait(rows, self._may_sample, self.refuse_sample)
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

    # -- queries ---------------------------------------------------------------------------------

    def can_sample(self, rows: int = 1) -> bool:
        """Return whether a number of rows may be sampled now."""
        with self._changed:
            return self._may_sample(self._open_storage(), rows)

    def can_insert(self, rows: int = 1) -> bool:
        """Return whether a number of rows may be inserted now."""
        with self._changed:
            return self._may_insert(self._open_storage(), rows)

    def count(self) -> Counts:
        """Return the counts of the storage."""
        with self._changed:
            return _read_counts(self._open_storage())

    def describe(self) -> dict[str, Any]:
        """Return the settings, the counts and the error, as JSON values."""
        counts = self.count()
        return {
            "limiter": repr(self),
            "inserted": counts.inserted,
            "sampled": counts.sampled,
            "error": self.error_of(counts),
        }

    # -- the rules, which need no storage: for counts of one, or sums over several ------------------

    @property
    def is_bounded(self) -> bool:
        """Whether the error has a bound; otherwise only the number of readable rows matters."""
        return self.min_diff > -math.inf or self.max_diff < math.inf

    def error_of(self, counts: Counts) -> float:
        """Return `inserted * samples_per_insert - sampled`."""
        return counts.inserted * self.samples_per_insert - counts.sampled

    def allows_sample(self, counts: Counts, rows: int) -> bool:
        """Return whether `rows` more rows may be sampled after what `counts` counts."""
        return counts.rows >= self.min_size_to_sample and self.error_of(counts) - rows >= self.min_diff

    def allows_insert(self, counts: Counts, rows: int) -> bool:
        """Return whether `rows` more rows may be inserted after what `counts` counts."""
        if counts.rows < self.min_size_to_sample:
            return True
        return self.error_of(counts._replace(inserted=counts.inserted + rows)) <= self.max_diff

    def check_sample(self, rows: int) -> None:
        """Raise ValueError if this number of rows could never be sampled at once."""
        self._check_rows(rows, f"a sample of {rows} rows")

    def check_insert(self, rows: int) -> None:
        """Raise ValueError if this number of rows could never be inserted at once."""
        self._check_rows(rows * self.samples_per_insert, f"an insert of {rows} rows")

    def refuse_sample(self, counts: Counts, rows: int) -> NotReadyError:
        """Return the error that says why `rows` more rows may not be sampled after what `counts` counts."""
        if counts.rows < self.min_size_to_sample:
            reason = f"the store has {counts.rows} of min_size_to_sample = {self.min_size_to_sample} rows"
        else:
            reason = f"{self._describe(counts)}, and min_diff is {self.min_diff:g}"
        return self._refusal(f"cannot sample {rows} rows yet: {reason}", "extend() the store first")

    def refuse_insert(self, counts: Counts, rows: int) -> NotReadyError:
        """Return the error that says why `rows` more rows may not be inserted after what `counts` counts."""
        reason = f"{self._describe(counts)}, and max_diff is {self.max_diff:g}"
        return self._refusal(f"cannot insert {rows} rows yet: {reason}", "sample() first")

    # -- with the lock held ----------------------------------------------------------------------

    def _open_storage(self) -> Limited:
        storage = self._storage()
        if storage is None or self._closed or storage.closed:
            raise StateError("the store is closed", hint="open it again with expstore.open()")
        return storage

    def _may_sample(self, storage: Limited, rows: int) -> bool:
        counts = _read_counts(storage)
        return self.allows_sample(counts._replace(sampled=counts.sampled + self._sampling), rows)

    def _may_insert(self, storage: Limited, rows: int) -> bool:
        counts, own = _read_counts(storage), self._inserting
        if self._waived:
            return True
        return self.allows_insert(
            counts._replace(rows=counts.rows + own, inserted=counts.inserted + own), rows
        )

    def _wait(
        self,
        rows: int,
        may: Callable[[Limited, int], bool],
        refusal: Callable[[Counts, int], NotReadyError],
    ) -> None:
        due = None if self.timeout is None else time.monotonic() + self.timeout
        while not may(storage := self._open_storage(), rows):
            self._check_stuck(storage)
            left = math.inf if due is None else due - time.monotonic()
            if left <= 0:
                raise refusal(_read_counts(storage), rows)
            del storage  # do not keep a buffer alive that was dropped meanwhile
            self._changed.wait(min(left, _LOOK_SECONDS))

    def _check_rows(self, rows: float, what: str) -> None:
        """Raise ValueError if a batch of this number of rows could never be allowed."""
        span = self.max_diff - self.min_diff
        if rows > span:
            raise ArgumentError(
                f"{what} moves the error by {rows:g}, more than the {span:g} that error_buffer spans: it "
                f"would wait forever; use fewer rows at once, or a larger error_buffer"
            )

    def _check_stuck(self, storage: Limited) -> None:
        """Raise ValueError if inserts and samples of the latest sizes would wait for each other forever."""
        inserts, samples = self._newest
        if not (inserts and samples) or self._inserting or self._sampling:
            return
        if len(storage) < self.min_size_to_sample:
            return
        if not (self._may_insert(storage, inserts) or self._may_sample(storage, samples)):
            raise ArgumentError(
                f"inserts of {inserts} rows and samples of {samples} wait for one another: error_buffer "
                f"spans {self.max_diff - self.min_diff:g}, rows * samples_per_insert + batch size is "
                f"{inserts * self.samples_per_insert + samples:g}; use a larger error_buffer"
            )

    def _describe(self, counts: Counts) -> str:
        return (
            f"with {counts.inserted} rows inserted and {counts.sampled} sampled at "
            f"{self.samples_per_insert:g} samples per insert the error is {self.error_of(counts):g}"
        )

    def _refusal(self, text: str, act: str) -> NotReadyError:
        waited = f" (waited {self.timeout:g} s)" if self.timeout else ""
        return NotReadyError(
            f"{text}{waited}", kind="rate_limited", hint=f"{act}, or give the limiter a longer timeout"
        )

    # -- copies in other processes, which do not limit anything ----------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings, without the storage and the waiting threads."""
        names = ("samples_per_insert", "min_size_to_sample", "min_diff", "max_diff", "timeout")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the settings; the copy limits no storage."""
        self.__dict__.update(state)
        self._begin()


def _read_counts(storage: Limited) -> Counts:
    return Counts(len(storage), storage.write_count, storage.draws.limits[0])


class MinSize(RateLimiter):
    """Allow samples only while a minimum of rows can be read; allow inserts at any time.

    Threads, processes, crashes: as `RateLimiter`.

    Args:
        min_size_to_sample: Number of rows that must be readable.
        timeout: Seconds that `sample` waits; 0 to fail at once; None to wait without a limit.

    Example:
        >>> from expstore import MinSize
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
        samples_per_insert: How often each row is sampled on average.
        min_size_to_sample: Number of rows that must be readable before any row is sampled; until then every
            insert is allowed.
        error_buffer: How far the number of sampled rows may differ from the number that the ratio requires,
            counted from the moment at which `min_size_to_sample` rows were readable; or a pair, the smallest
            and the largest `inserted * samples_per_insert - sampled`. A batch moves this error at once, so it
            must be at least half of (rows per extend) * samples_per_insert + batch size; otherwise both sides
            may wait for one another.
        timeout: Seconds that `sample`, `extend` and `add` wait; 0 to fail at once; None to wait without a
            limit.

    Raises:
        ArgumentError: The bounds could block both sides forever.

    Example:
        >>> from expstore import SampleToInsertRatio
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
