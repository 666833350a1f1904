"""The random numbers of every draw: draw k of a store is the same whatever came before it.

Buffers and samplers get a NumPy generator for one draw out of it. It never chooses rows.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from expstore.core.draw_state import DrawState

__all__ = ["DrawNumber", "Draws", "next_numbers"]

#: The two upper words of the counter of one draw: what tells it from every other one.
DrawNumber = tuple[int, int]

_MASK64 = (1 << 64) - 1


class Draws:
    """Give the random numbers of any draw, in the order of the draws' numbers or any other.

    Philox is counter-based (Salmon et al. 2011): draw k is the same after a restart, whatever came
    before. The draw is the upper half of the counter, so that draws never overlap. Threads have
    a generator each.

    Args:
        seed: Key of all draws; its lower 64 bits count.
        stream: The key's second word. 0 is the writer's; readers that draw from one store each have
            another, so that none repeats the batches of another. Its lower 64 bits count.
    """

    def __init__(self, seed: int, stream: int = 0) -> None:
        self._key = (seed & _MASK64, stream & _MASK64)
        self._own = threading.local()

    def generator(self, draw: int, redraw: int = 0) -> np.random.Generator:
        """Return the numbers of draw number `draw`; this thread's next call moves the same generator."""
        return self.numbers((draw, 0), redraw)

    def numbers(self, draw: DrawNumber, redraw: int = 0) -> np.random.Generator:
        """Return the random numbers of a draw; this thread's next call moves the same generator."""
        own = self._own
        if not hasattr(own, "generator"):
            own.bits = np.random.Philox(key=np.zeros(2, np.uint64))
            own.state = own.bits.state  # set again, it takes a tenth of the time of a new generator
            own.generator = np.random.Generator(own.bits)
        state = own.state["state"]
        state["key"][:] = self._key
        state["counter"][:] = (0, redraw, *draw)
        own.bits.state = own.state
        generator: np.random.Generator = own.generator
        return generator

    # -- draws ahead of time: one thread at a time, which then hands out every draw it took, or none ------

    def next(self, draws: DrawState) -> DrawNumber:
        """Count a batch handed out, and return its draw number."""
        return draws.next(), 0

    def ahead(self, draws: DrawState, number: int) -> DrawNumber:
        """Return the draw after `number` others that were taken ahead and are not handed out yet."""
        return draws.number + number, 0

    def hand_out(self, draws: DrawState) -> None:
        """Count the oldest draw taken ahead as handed out."""
        draws.next()

    def give_back(self) -> None:
        """Drop the draws that were taken ahead and not returned."""

    @property
    def in_step(self) -> bool:
        """Whether draws taken ahead are still those that would be taken now."""
        return True


def next_numbers(seed: int, state: DrawState) -> np.random.Generator:
    """Count one more draw from a store, and return its random numbers.

    They are those that the next batch of the store's buffer would have been drawn by.

    Args:
        seed: Key of all draws from the store.
        state: The draws so far.
    """
    source = state.source
    draws = source if isinstance(source, Draws) else Draws(seed, state.stream())
    return draws.numbers(draws.next(state))
