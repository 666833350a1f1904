"""Batches by number: a store that another buffer has open, sampled by a seed of the reader's own.

Used by the HTTP layer, whose clients ask for draw k of a seed. All of them get the same batch, as long as the
store has the same rows. It writes nothing, counts nothing, and does not move the store's own draws.
"""

from __future__ import annotations

import itertools
from typing import Any

from expstore.buffers.arguments import check_batch_size
from expstore.buffers.batch_builder import BatchBuilder
from expstore.buffers.prefetch import Request
from expstore.buffers.rng import Draws
from expstore.buffers.sampling import Sampling
from expstore.buffers.store_handle import StoreHandle
from expstore.buffers.tensordict import TensorDictRows
from expstore.samplers.base import Sampler
from expstore.storages.read_view import ReadView
from expstore.transforms import Compose

__all__ = ["SeededReplayBuffer"]

#: The stream of draws of readers with a seed of their own: followers have it, too.
_READERS = 1


class SeededReplayBuffer:
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
        style = TensorDictRows(type(self).__name__, priority_key="td_error", with_ids=True)
        self._store = StoreHandle(storage)
        self._batches = BatchBuilder(style, Compose(), collate_fn=None, device=None, pin_memory=False)
        self._sampling = Sampling(self._store, self._batches, style, sampler, draws=Draws(seed, _READERS))
        self._count = itertools.count()
        self._store.add_part(self._batches)
        self._store.add_part(self._sampling)

    @property
    def sampler(self) -> Sampler:
        """What makes up a batch."""
        return self._sampling.sampler

    def draw(self, number: int | None, batch_size: int) -> Any:
        """Return a batch, as `sample` does.

        Args:
            number: Which draw, from 0 on; None: the next one that no caller has been given in this way.
            batch_size: How many rows.

        Raises:
            NotReadyError: There are no rows that may be drawn.
        """
        batch_size = check_batch_size(batch_size)
        self._sampling.check_readable(self._store.storage)
        if number is None:
            number = next(self._count)
        return self._sampling.make((number, 0), Request(batch_size)).batch
