"""The state of a storage's draws: the number of the next draw, and the data that a restart needs to continue.

Storages keep this state; buffers and samplers give the numbers their meaning. This module draws nothing.
"""

from __future__ import annotations

import base64
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

from expstore.core.lock_order import LockOrder

#: The progress of a sampler that has none.
NO_PROGRESS = (0, 0, 0, 0)
#: The number of a draw, and the state of the generator before it.
Randomness = tuple[int, bytes]


class RandomnessSource(Protocol):
    """The interface of a buffer that draws with a generator of the user."""

    def state(self, draws: DrawState) -> Randomness:
        """Return the state that a loaded version needs to continue."""


class DrawSink(Protocol):
    """The interface of a storage on disk that stores the state of its draws between checkpoints.

    Each method stores plain words and takes no lock.
    """

    def note_draw(self, number: int) -> None:
        """Store the number of the next draw."""

    def note_progress(self, progress: Sequence[int]) -> None:
        """Store the progress of a sampler."""

    def note_limits(self, sampled: int, settings: int) -> None:
        """Store the counts of a rate limiter."""


class DrawState:
    """The state of the draws from one content of a storage.

    Invariant: each number is used once. Reopening a store after an interruption keeps this object, because
    another thread may be drawing meanwhile; loading other content replaces it by one assignment.

    Any number of threads may draw. The sink survives a crash of the process, a checkpoint also a power
    failure.

    Args:
        number: The number of the next draw.
        progress: The progress of a sampler: four numbers below 2^63, whose meaning the sampler defines.
        limits: The number of rows returned under a rate limiter, and a hash of the limiter's settings.
        randomness: The state of the user's generator in the version that was loaded; None: draws follow from
            the seed.
        order: The lock order of the storage; None: a new one.
        sink: Stores the numbers; None: they are not stored.
        stream: The second word of the key of all draws (the first is the seed); None: a random one for each
            buffer.
    """

    __slots__ = (
        "_lock",
        "_sink",
        "_source",
        "_stream",
        "limits",
        "number",
        "progress",
        "randomness",
        "replaced",
        "sets",
        "sets_kept",
    )

    def __init__(
        self,
        number: int = 0,
        progress: tuple[int, ...] = NO_PROGRESS,
        limits: tuple[int, int] = (0, 0),
        randomness: Randomness | None = None,
        *,
        order: LockOrder | None = None,
        sink: DrawSink | None = None,
        stream: int | None = 0,
    ) -> None:
        self.number = number
        self.progress = progress
        self.limits = limits
        self.randomness = randomness
        #: Whether the storage's content was replaced by other content, whose draws are not known yet.
        self.replaced = False
        #: How often `set` was called, and how many of these calls a checkpoint has stored.
        self.sets = self.sets_kept = 0
        self._lock = (order or LockOrder()).rank_lock("draw", threading.Lock())
        self._sink = sink
        self._stream = stream
        self._source: Callable[[], RandomnessSource | None] = _no_source

    def stream(self) -> int:
        """Return the second word of the key of a buffer's draws."""
        return int.from_bytes(os.urandom(8), "little") if self._stream is None else self._stream

    def next(self) -> int:
        """Count a batch and return its number, from 0."""
        with self._lock:
            number = self.number
            self.number = number + 1
            if self._sink is not None:
                self._sink.note_draw(number + 1)
        return number

    def note_progress(self, progress: tuple[int, ...]) -> None:
        """Store the progress of a sampler, for a restart."""
        self.progress = progress
        if self._sink is not None:
            self._sink.note_progress(progress)

    def note_limits(self, sampled: int, settings: int) -> None:
        """Store the rows returned under a rate limiter, and its settings; (0, 0) without a limiter."""
        self.limits = (sampled, settings)
        if self._sink is not None:
            self._sink.note_limits(sampled, settings)

    def set(self, number: int, progress: Sequence[int]) -> None:
        """Continue with another draw number, which may be an earlier one; the next checkpoint stores it."""
        with self._lock:
            self.number = number
            self.sets += 1
            if self._sink is not None:
                self._sink.note_draw(number)
        self.note_progress(tuple(progress))

    def note_replaced(self) -> None:
        """Record that the storage's content was replaced, and the new content's draws are not known yet."""
        self.replaced = True

    def watch(self, source: RandomnessSource | None) -> None:
        """Store the state of a user's generator in versions; None: draws follow from the seed.

        The reference to the source is weak, so that a dropped buffer can be garbage-collected.
        """
        if source is None:
            self.randomness, self._source = None, _no_source
        else:
            self._source = weakref.ref(source)

    @property
    def source(self) -> RandomnessSource | None:
        """The object that draws with a generator of the user; None: draws follow from the seed."""
        return self._source()

    def note_randomness(self) -> Randomness | None:
        """Fetch the state of the user's generator, and return it for a version."""
        source = self._source()
        if source is not None:
            self.randomness = source.state(self)
        return self.randomness


def _no_source() -> RandomnessSource | None:
    return None


def to_json(randomness: Randomness | None) -> list[int | str] | None:
    """Return the JSON value for a base record."""
    if randomness is None:
        return None
    return [randomness[0], base64.b85encode(randomness[1]).decode()]


def from_json(kept: list[int | str] | None) -> Randomness | None:
    """Parse the value that `to_json` returned."""
    return None if kept is None else (int(kept[0]), base64.b85decode(str(kept[1])))
