"""Uniform sampling with replacement.

The default sampler of every buffer; it keeps no state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from expstore.samplers.base import Sampler, readable
from expstore.types import Selection

if TYPE_CHECKING:
    from expstore.storages.base import Storage

__all__ = ["RandomSampler"]


class RandomSampler(Sampler):
    """Draw every readable row with the same probability, with replacement.

    Example:
        >>> rb = TensorDictReplayBuffer(storage=MemoryStorage(100), sampler=RandomSampler(), batch_size=8)
    """

    def sample(self, storage: Storage, batch_size: int, generator: np.random.Generator) -> Selection:
        """Choose `batch_size` readable rows.

        Raises:
            NotReadyError: There is none.
        """
        window = readable(storage)
        if window.gaps:
            return Selection(window.nth(generator.integers(0, window.rows, batch_size)))
        return Selection(generator.integers(window.low + 1, window.last + 1, batch_size))

    def __repr__(self) -> str:
        return "RandomSampler()"
