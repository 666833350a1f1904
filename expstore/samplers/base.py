"""What every sampler does: choose ids out of the readable ones.

Buffers call it with a generator that belongs to this one draw; it never reads rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import numpy as np

from expstore.types import Selection

if TYPE_CHECKING:
    from expstore.storages.base import Rows, Storage

__all__ = ["Sampler", "draw_generator"]


def draw_generator(seed: int, draw: int, redraw: int = 0) -> np.random.Generator:
    """Return the random numbers of draw number `draw`.

    Philox is counter-based (Salmon et al. 2011): draw k is the same after a restart, whatever came
    before. The draw stands in the upper half of the counter, so that draws never overlap.
    """
    key = np.array([seed & 0xFFFFFFFFFFFFFFFF, 0], np.uint64)
    counter = np.array([0, redraw, draw, 0], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


class Sampler(ABC):
    """Choose ids. Threads may sample at once."""

    @abstractmethod
    def sample(self, storage: Storage, batch_size: int, generator: np.random.Generator) -> Selection:
        """Choose `batch_size` readable rows.

        Args:
            storage: What holds the rows; at least one is readable.
            batch_size: How many.
            generator: The random numbers of this draw.
        """

    def on_write(self, rows: Rows) -> None:
        """Be told of rows that were just published."""
