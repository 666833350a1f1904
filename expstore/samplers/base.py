"""What every sampler does: choose ids out of the readable ones.

Buffers call it with a generator that belongs to this one draw; it never reads rows.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import numpy as np

from expstore.types import Array, Selection

if TYPE_CHECKING:
    from expstore.storages.base import Rows, Storage

__all__ = ["Draws", "Sampler"]


class Draws:
    """Give the random numbers of any draw.

    Philox is counter-based (Salmon et al. 2011): draw k is the same after a restart, whatever came
    before. The draw stands in the upper half of the counter, so that draws never overlap. Threads have
    a generator each.

    Args:
        seed: Key of all draws; its lower 64 bits count.
        stream: The key's second word. 0 is the writer's; readers that draw from one store each have
            another, so that none repeats the batches of another. Its lower 64 bits count.
    """

    def __init__(self, seed: int, stream: int = 0) -> None:
        self._key = (seed & 0xFFFFFFFFFFFFFFFF, stream & 0xFFFFFFFFFFFFFFFF)
        self._own = threading.local()

    def generator(self, draw: int, redraw: int = 0) -> np.random.Generator:
        """Return the numbers of draw number `draw`; this thread's next call moves the same generator."""
        own = self._own
        if not hasattr(own, "generator"):
            own.bits = np.random.Philox(key=np.array(self._key, np.uint64))
            own.state = own.bits.state  # set again, it takes a tenth of the time of a new generator
            own.generator = np.random.Generator(own.bits)
        own.state["state"]["counter"][:] = (0, redraw, draw, 0)
        own.bits.state = own.state
        generator: np.random.Generator = own.generator
        return generator


class Sampler(ABC):
    """Choose ids. Threads may sample at once."""

    #: Whether priorities that come with new rows are to be taken in.
    prioritized = False

    def attach(self, storage: Storage) -> None:
        """Be told which storage it will sample from; a buffer does it once."""

    def reduce(self, priorities: Array) -> Array:
        """Return one priority per row. Shapes `(n, ...)` in, `(n,)` out."""
        return priorities.reshape(-1)

    @abstractmethod
    def sample(self, storage: Storage, batch_size: int, generator: np.random.Generator) -> Selection:
        """Choose `batch_size` readable rows.

        Args:
            storage: What holds the rows; at least one is readable.
            batch_size: How many.
            generator: The random numbers of this draw.
        """

    def sample_again(
        self, storage: Storage, selection: Selection, generator: np.random.Generator
    ) -> Selection:
        """Choose rows in the place of some that were overwritten while they were read."""
        return self.sample(storage, selection.ids.size, generator)

    @property
    def ran_out(self) -> bool:
        """Whether every row has been drawn that is to be drawn: iteration ends here."""
        return False

    def on_write(self, rows: Rows) -> None:
        """Be told of rows that were just published."""
