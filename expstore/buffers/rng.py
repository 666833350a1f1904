"""Random numbers of draws: by the store's seed, or by a generator of the user.

The sampling part has one `Draws`; samplers get a NumPy generator from it for each draw.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

import torch

from expstore.core.draws import DrawNumber, Draws
from expstore.errors import StateError

if TYPE_CHECKING:
    from expstore.core.draw_state import DrawState

_MASK64 = (1 << 64) - 1
#: Second word of the random key of a given generator; no stream of a storage uses it.
_GIVEN = 1 << 63


class GivenDraws(Draws):
    """Derive every draw's random numbers from a torch.Generator.

    Two 64-bit words of the generator are the draw's counter. The generator advances by the same step for
    every batch, whatever its size. `state_dict` and versions of the store carry its state; an opening draws
    by the generator as it is.

    Threads: any number may draw. Processes: a forked or pickled buffer draws by the store's seed.

    Args:
        given: The generator; on any device.
        draws: The draws of the storage.
        resume: Whether to continue from the state in the version that the storage has loaded.

    Raises:
        StateError: The stored state is of another kind of generator.
    """

    def __init__(self, given: torch.Generator, draws: DrawState, *, resume: bool) -> None:
        self._given = given
        self._lock = threading.Lock()
        self._ahead: deque[tuple[int, torch.Tensor]] = deque()  # draw numbers, and the states before them
        self._after: torch.Tensor | None = None  # the state after the newest of them
        super().__init__(0, _GIVEN)
        if resume and draws.randomness is not None:
            self._resume(draws, *draws.randomness)
        self._key = (given.initial_seed() & _MASK64, _GIVEN)

    def _resume(self, draws: DrawState, draw: int, state: bytes) -> None:
        set_state(self._given, torch.frombuffer(bytearray(state), dtype=torch.uint8))
        for _ in range(draws.number - draw):
            self._words()

    def _words(self) -> DrawNumber:
        self._key = (self._given.initial_seed() & _MASK64, _GIVEN)
        bounds = (-(1 << 63), (1 << 63) - 1)
        words = torch.randint(*bounds, (2,), generator=self._given, device=self._given.device).tolist()
        return words[0] & _MASK64, words[1] & _MASK64

    def next(self, draws: DrawState) -> DrawNumber:
        """Count a batch as returned, and return its draw number."""
        with self._lock:
            draws.next()
            return self._words()

    def ahead(self, draws: DrawState, number: int) -> DrawNumber:
        """Return the draw after `number` turns that were taken ahead and are not returned yet."""
        with self._lock:
            before = self._given.get_state()
            words = self._words()
            self._ahead.append((draws.number + number, before))
            self._after = self._given.get_state()
            return words

    def hand_out(self, draws: DrawState) -> None:
        """Count the oldest draw taken ahead as returned."""
        with self._lock:
            self._ahead.popleft()
            draws.next()

    def give_back(self) -> None:
        """Reset the generator to the oldest draw taken ahead, unless it was seeded or used since."""
        with self._lock:
            if self._ahead and self._is_unmoved():
                self._given.set_state(self._ahead[0][1])
            self._ahead.clear()
            self._after = None

    @property
    def in_step(self) -> bool:
        """Whether the generator was neither seeded nor used since draws were taken ahead."""
        with self._lock:
            return not self._ahead or self._is_unmoved()

    def _is_unmoved(self) -> bool:
        return self._after is not None and torch.equal(self._after, self._given.get_state())

    def state(self, draws: DrawState) -> tuple[int, bytes]:
        """Return the state for a version: the next draw's number, and the generator's state before it."""
        with self._lock:
            if self._ahead and self._is_unmoved():
                draw, state = self._ahead[0]
            else:
                draw, state = draws.number, self._given.get_state()
            return draw, state.numpy().tobytes()

    def state_now(self, draws: DrawState) -> torch.Tensor:
        """Return the generator's state before the next returned batch. Shape `(n,)`, uint8."""
        return torch.frombuffer(bytearray(self.state(draws)[1]), dtype=torch.uint8)


def set_state(generator: torch.Generator, state: torch.Tensor) -> None:
    """Set a generator's state. Shape `(n,)`, uint8.

    Raises:
        StateError: The state is of another kind of generator.
    """
    try:
        generator.set_state(state)
    except (RuntimeError, TypeError) as exc:
        raise StateError(
            f"the stored state is of another kind of generator than the given one ({exc})",
            hint="give one for the same device, or call set_rng(generator) on a store opened without one",
        ) from exc
