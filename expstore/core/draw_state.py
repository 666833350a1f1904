"""The state of the draws from a storage: the number of the next one, and what a restart needs to continue.

Buffers and samplers give the numbers their meaning; a storage keeps them. Nothing here draws.
"""

from __future__ import annotations

import base64
import os
import struct
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

from expstore.core.lock_order import LockOrder

__all__ = [
    "NO_PROGRESS",
    "DrawSink",
    "DrawState",
    "Randomness",
    "RandomnessSource",
    "from_bytes",
    "from_json",
    "to_bytes",
    "to_json",
]

#: Of a sampler that keeps none.
NO_PROGRESS = (0, 0, 0, 0)
#: The number of a draw, and the generator's state before it.
Randomness = tuple[int, bytes]

_DRAW = struct.Struct("<Q")


class RandomnessSource(Protocol):
    """What a `DrawState` needs of a buffer that draws with a generator of the user's."""

    def state(self, draws: DrawState) -> Randomness:
        """Return what a restart needs to continue."""


class DrawSink(Protocol):
    """Where a storage on disk keeps the state of its draws between checkpoints.

    Each method stores plain words and takes no lock.
    """

    def note_draw(self, number: int) -> None:
        """Keep the number of the next draw."""

    def note_progress(self, progress: Sequence[int]) -> None:
        """Keep how far a sampler has come."""

    def note_limits(self, sampled: int, settings: int) -> None:
        """Keep what a rate limiter has counted."""


class DrawState:
    """The draws from one content of a storage.

    Invariant: a number is handed out once. Reopening a store after an interruption keeps this object, since
    another thread may be drawing meanwhile; loading another content replaces it by one assignment.

    Threads: any number may draw. Crashes: the sink survives the process, a checkpoint the machine.

    Args:
        number: The number of the next draw.
        progress: How far a sampler has come: four numbers below 2^63, with a meaning of its own.
        limits: The rows handed out under a rate limiter, and a number that stands for its settings.
        randomness: The user's generator as of the last checkpoint; None: draws follow from the seed.
        order: The lock order of the storage; None: a lock of its own.
        sink: Where the numbers are kept; None: nowhere.
        stream: The second word of the key of all draws, behind the seed; None: one by chance for each buffer.
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
        #: Whether the storage has another content by now, whose draws are not known yet.
        self.replaced = False
        #: How often the number was set, and how many of these a checkpoint has kept.
        self.sets = self.sets_kept = 0
        self._lock = (order or LockOrder()).rank_lock("draw", threading.Lock())
        self._sink = sink
        self._stream = stream
        self._source: Callable[[], RandomnessSource | None] = _no_source

    def stream(self) -> int:
        """Return the second word of the key of one buffer's draws."""
        return int.from_bytes(os.urandom(8), "little") if self._stream is None else self._stream

    def next(self) -> int:
        """Count a batch that is handed out and return its number, from 0."""
        with self._lock:
            number = self.number
            self.number = number + 1
            if self._sink is not None:
                self._sink.note_draw(number + 1)
        return number

    def note_progress(self, progress: tuple[int, ...]) -> None:
        """Keep how far a sampler has come, for a restart."""
        self.progress = progress
        if self._sink is not None:
            self._sink.note_progress(progress)

    def note_limits(self, sampled: int, settings: int) -> None:
        """Keep the rows handed out under a rate limiter's settings; (0, 0): there is no limiter."""
        self.limits = (sampled, settings)
        if self._sink is not None:
            self._sink.note_limits(sampled, settings)

    def set(self, number: int, progress: Sequence[int]) -> None:
        """Continue with another draw, possibly an earlier one; the next checkpoint keeps it."""
        with self._lock:
            self.number = number
            self.sets += 1
            if self._sink is not None:
                self._sink.note_draw(number)
        self.note_progress(tuple(progress))

    def note_replaced(self) -> None:
        """Note that the storage has another content, whose draws are not known yet."""
        self.replaced = True

    def watch(self, source: RandomnessSource | None) -> None:
        """Keep the state of a user's generator with each checkpoint; None: draws follow from the seed.

        The source is held weakly, so that a forgotten buffer is collected.
        """
        if source is None:
            self.randomness, self._source = None, _no_source
        else:
            self._source = weakref.ref(source)

    @property
    def source(self) -> RandomnessSource | None:
        """What draws with a generator of the user's; None: draws follow from the seed."""
        return self._source()

    def note_randomness(self) -> Randomness | None:
        """Ask for the state of the user's generator, and return what a restart needs."""
        source = self._source()
        if source is not None:
            self.randomness = source.state(self)
        return self.randomness


def _no_source() -> RandomnessSource | None:
    return None


def to_json(randomness: Randomness | None) -> list[int | str] | None:
    """Return what a base record keeps."""
    if randomness is None:
        return None
    return [randomness[0], base64.b85encode(randomness[1]).decode()]


def from_json(kept: list[int | str] | None) -> Randomness | None:
    """Read what `to_json` returned."""
    return None if kept is None else (int(kept[0]), base64.b85decode(str(kept[1])))


def to_bytes(randomness: Randomness | None) -> bytes:
    """Return what a mark keeps."""
    return b"" if randomness is None else _DRAW.pack(randomness[0]) + randomness[1]


def from_bytes(kept: bytes) -> Randomness | None:
    """Read what `to_bytes` returned."""
    return (_DRAW.unpack_from(kept)[0], kept[_DRAW.size :]) if kept else None
