"""Where the draws of a storage are: which number comes next, and what else a restart needs to go on.

Base of every storage. A backend keeps the numbers; what they mean, buffers and samplers know. It never
draws.
"""

from __future__ import annotations

import base64
import struct
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from expstore.core.lock_order import LockOrder

__all__ = [
    "NO_PROGRESS",
    "DrawPosition",
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
    """What a storage needs of whoever draws by such a generator."""

    def state(self, position: DrawPosition) -> Randomness:
        """Return what a restart needs."""


def _no_source() -> RandomnessSource | None:
    return None


@dataclass(slots=True)
class DrawState:
    """Hold where the draws from one content are.

    An opening that fails never takes it back: a batch that was handed out meanwhile would come again.
    Another content (`loads`) has another one, put in its place by one assignment.

    Args:
        number: Of the next draw; changed under `lock` alone.
        progress: How far a sampler has come.
        limits: Rows handed out while a rate limiter counted them, and a number that stands for its settings.
        randomness: As of the last sync; None: draws follow from the seed.
        source: Returns whose state is kept with the rows, if anyone's.
        replaced: The content is no longer there; set where the next one is found, before it has draws.
    """

    number: int = 0
    progress: tuple[int, ...] = NO_PROGRESS
    limits: tuple[int, int] = (0, 0)
    randomness: Randomness | None = None
    source: Callable[[], RandomnessSource | None] = _no_source
    replaced: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note_randomness(self, storage: DrawPosition) -> Randomness | None:
        """Ask for the state of the user's generator, and return what a restart is to find."""
        source = self.source()
        if source is not None:
            self.randomness = source.state(storage)
        return self.randomness


class DrawPosition:
    """Count batches, and keep how far a sampler has come.

    Threads: any number may draw. Crashes: as the backend keeps it.
    """

    def __init__(self) -> None:
        self.lock_order = LockOrder()
        self.draws = self._new_draws()

    def _new_draws(
        self,
        number: int = 0,
        progress: tuple[int, ...] = NO_PROGRESS,
        limits: tuple[int, int] = (0, 0),
        randomness: Randomness | None = None,
    ) -> DrawState:
        """Return where draws from a content begin; see `DrawState`."""
        lock = self.lock_order.ranked("draw", threading.Lock())
        return DrawState(number, progress, limits, randomness, lock=lock)

    @property
    def draw(self) -> int:
        """How many batches have been handed out."""
        return self.draws.number

    @property
    def progress(self) -> tuple[int, ...]:
        """How far a sampler has come, as it has noted."""
        return self.draws.progress

    @property
    def limits(self) -> tuple[int, int]:
        """Rows handed out while a rate limiter counted them, and a number that stands for its settings."""
        return self.draws.limits

    def next_draw(self) -> int:
        """Count a batch handed out and return its number, from 0."""
        draws = self.draws
        with draws.lock:
            number = draws.number
            draws.number = number + 1
            self._note_draw(number + 1)
        return number

    def note_progress(self, progress: tuple[int, ...]) -> None:
        """Keep how far a sampler has come, for a restart: four numbers below 2^63, of its own meaning."""
        self.draws.progress = progress
        self._note_progress(progress)

    def note_limits(self, sampled: int, settings: int) -> None:
        """Keep how many rows were handed out under a rate limiter's settings; (0, 0): there is none."""
        self.draws.limits = (sampled, settings)
        self._note_limits(sampled, settings)

    def watch_draws(self, draws: RandomnessSource | None) -> None:
        """Be told whose state is to be kept with the rows; None: nobody's, draws follow from the seed.

        It is held weakly: a buffer that is forgotten is to go at once.
        """
        if draws is None:
            self.draws.randomness, self.draws.source = None, _no_source
        else:
            self.draws.source = weakref.ref(draws)

    def set_draws(self, draw: int, progress: Sequence[int]) -> None:
        """Go on with another draw, also with an earlier one; a restart does so, too, when this returns.

        Args:
            draw: Its number.
            progress: How far the sampler was then.
        """
        with self.draws.lock:
            self.draws.number = draw
            self._note_draw(draw)
        self.note_progress(tuple(progress))
        self._settle_draws()

    # -- what a backend may want to know ---------------------------------------------------------

    def _note_draw(self, draw: int) -> None:
        """Keep the draw number."""

    def _note_progress(self, progress: Sequence[int]) -> None:
        """Keep how far a sampler has come."""

    def _note_limits(self, sampled: int, settings: int) -> None:
        """Keep what a rate limiter has counted."""

    def _settle_draws(self) -> None:
        """Bring the number of the next draw to the disk, though it may be smaller than before."""


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
