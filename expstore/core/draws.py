"""The random numbers of each draw: those of draw k do not depend on earlier draws.

Buffers and samplers get a NumPy generator for each draw. This module chooses no rows.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from expstore.core.draw_state import DrawState

#: The two upper words of the counter, which identify a draw.
DrawNumber = tuple[int, int]

_MASK64 = (1 << 64) - 1


class Draws:
    """Generators of random numbers for draws, in any order.

    Philox is counter-based (Salmon et al. 2011): the numbers of draw k are the same after a restart, and
    whatever was drawn before. The draw number is in the upper half of the counter, so that draws never
    overlap. Each thread has its own generator.

    Args:
        seed: First word of the key of all draws; only the lower 64 bits are used.
        stream: Second word of the key, of which only the lower 64 bits are used. The writer has 0. Readers of
            the same store have other values, so that no reader repeats the batches of another one.
    """

    def __init__(self, seed: int, stream: int = 0) -> None:
        self._key = (seed & _MASK64, stream & _MASK64)
        self._own = threading.local()

    def generator(self, draw: int, redraw: int = 0) -> np.random.Generator:
        """Return a generator for draw number `draw`; the thread's next call resets the same generator."""
        return self.numbers((draw, 0), redraw)

    def numbers(self, draw: DrawNumber, redraw: int = 0) -> np.random.Generator:
        """Return a generator for a draw; the thread's next call resets the same generator."""
        own = self._own
        if not hasattr(own, "generator"):
            own.bits = np.random.Philox(key=np.zeros(2, np.uint64))
            own.state = own.bits.state  # resetting it takes a tenth of the time of a new generator
            own.generator = np.random.Generator(own.bits)
        state = own.state["state"]
        state["key"][:] = self._key
        state["counter"][:] = (0, redraw, *draw)
        own.bits.state = own.state
        generator: np.random.Generator = own.generator
        return generator

    # -- draws ahead of time: by one thread at a time, which then returns all of them or none -------------

    def next(self, draws: DrawState) -> DrawNumber:
        """Count a batch and return the words that identify its draw."""
        return draws.next(), 0

    def ahead(self, draws: DrawState, number: int) -> DrawNumber:
        """Return the words of a draw ahead of time, after `number` draws taken ahead and not returned yet."""
        return draws.number + number, 0

    def hand_out(self, draws: DrawState) -> None:
        """Count the oldest draw taken ahead as returned."""
        draws.next()

    def give_back(self) -> None:
        """Discard the draws that were taken ahead and not returned."""

    @property
    def in_step(self) -> bool:
        """Whether the draws taken ahead are still those that would be taken now."""
        return True


def next_numbers(seed: int, state: DrawState) -> np.random.Generator:
    """Count one more draw from a store, and return a generator with its random numbers.

    The store's buffer would have used the same numbers for its next batch.

    Args:
        seed: First word of the key of all draws from the store.
        state: The state of the store's draws.
    """
    source = state.source
    draws = source if isinstance(source, Draws) else Draws(seed, state.stream())
    return draws.numbers(draws.next(state))
