"""Batches by number: a store that another buffer has open, drawn from by a seed of one's own.

Used by the HTTP layer, whose clients ask for draw k of a seed and get the same rows as anybody else who does,
as long as the rows are the same. It writes nothing, counts nothing, and leaves the store's own draws alone.
"""

from __future__ import annotations

import itertools
from functools import cached_property
from typing import Any

from expstore.buffers.prefetch import Request
from expstore.buffers.rng import Draws
from expstore.buffers.tensordict import TensorDictReplayBuffer
from expstore.samplers.base import Sampler
from expstore.storages.read_view import ReadView

__all__ = ["SeededReplayBuffer"]

#: The stream of draws of readers with a seed of their own: followers have it, too.
_READERS = 1


class SeededReplayBuffer(TensorDictReplayBuffer):
    """Draw batches by number.

    Threads: any number may draw. Processes and crashes: nothing is kept; draw k follows from seed and rows.

    Args:
        storage: What another buffer has open; that one closes it.
        sampler: What makes up a batch; one that keeps nothing from draw to draw.
        seed: Key of all draws.

    Example:
        >>> expstore.open(path, mode="r", seed=7).sample(32)  # the same rows as
        >>> SeededReplayBuffer(rb.storage, RandomSampler(), seed=7).draw(0, 32)
    """

    def __init__(self, storage: ReadView, sampler: Sampler, *, seed: int) -> None:
        self._seed = seed
        self._count = itertools.count()
        super().__init__(storage=storage, sampler=sampler, with_ids=True)

    @cached_property
    def _draws(self) -> Draws:
        return Draws(self._seed, _READERS)

    def draw(self, number: int | None, batch_size: int) -> Any:
        """Return a batch, as `sample` does.

        Args:
            number: Which draw, from 0 on; None: the next one that nobody has been given in this way.
            batch_size: How many rows.

        Raises:
            NotReadyError: There are no rows that may be drawn.
        """
        self._check_readable()
        if number is None:
            number = next(self._count)
        return self._make((number, 0), Request(self._wanted(batch_size)))[0]
