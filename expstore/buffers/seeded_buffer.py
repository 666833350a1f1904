"""Batches by number: sample a store that another buffer has open, by the reader's own seed.

Used by the HTTP layer, whose clients request draw k of a seed. All clients get the same batch while the store
has the same rows. It writes and counts nothing, and does not advance the store's own draws.
"""

from __future__ import annotations

import itertools
from typing import Any

from expstore.buffers.arguments import check_batch_size
from expstore.buffers.batch_builder import BatchBuilder
from expstore.buffers.prefetch import Request
from expstore.buffers.sampling import Sampling
from expstore.buffers.store_handle import StoreHandle
from expstore.buffers.tensordict import TensorDictRows
from expstore.core.draws import Draws
from expstore.core.values import Selection
from expstore.samplers.base import Sampler
from expstore.storages.read_view import ReadView, read_stable
from expstore.transforms import Compose

#: Number of the stream of draws for readers with their own seed; followers use it too.
_READERS = 1


class SeededReplayBuffer:
    """Draw batches by number.

    Threads: any number may draw. Processes and crashes: there is no state; draw k follows from seed and rows.

    Args:
        storage: Storage that another buffer has open; that buffer closes it.
        sampler: How the rows of a batch are chosen; a sampler without state between draws.
        seed: Seed of all draws.

    Example:
        >>> from expstore import RandomSampler
        >>> from expstore.buffers.seeded_buffer import SeededReplayBuffer
        >>> SeededReplayBuffer(storage, RandomSampler(), seed=7).draw(0, 32).batch_size
        torch.Size([32])
    """

    def __init__(self, storage: ReadView, sampler: Sampler, *, seed: int) -> None:
        style = TensorDictRows(type(self).__name__, priority_key="td_error", with_ids=True)
        self._store = StoreHandle(storage)
        self._batches = BatchBuilder(style, Compose(), collate_fn=None, device=None, pin_memory=False)
        self._draws = Draws(seed, _READERS)
        self._sampling = Sampling(self._store, self._batches, style, sampler, draws=self._draws)
        self._count = itertools.count()
        self._store.add_part(self._batches)
        self._store.add_part(self._sampling)

    @property
    def sampler(self) -> Sampler:
        """The sampler."""
        return self._sampling.sampler

    def draw(self, number: int | None, batch_size: int) -> Any:
        """Return a batch, as `sample` does.

        Args:
            number: Number of the draw, from 0. None: the next number, counted over all calls without one.
            batch_size: Number of rows.

        Raises:
            NotReadyError: No rows may be drawn.
        """
        batch_size = check_batch_size(batch_size)
        self._sampling.check_readable(self._store.storage)
        if number is None:
            number = next(self._count)
        return self._sampling.make((number, 0), Request(batch_size)).batch

    def choose(self, number: int, batch_size: int) -> Selection:
        """Return the rows of a draw without reading them; some may be overwritten meanwhile.

        Args:
            number: Number of the draw, from 0.
            batch_size: Number of rows.

        Raises:
            NotReadyError: No rows may be drawn.
        """
        storage, size = self._store.storage, check_batch_size(batch_size)
        self._sampling.check_readable(storage)
        numbers = self._draws.numbers((number, 0), 0)
        return read_stable(storage, lambda: self._sampling.sampler.sample(storage, size, numbers))
