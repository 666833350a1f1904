"""Prioritized replay buffers, under TorchRL's names.

Each is a buffer with a prioritized sampler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from expstore.buffers.arguments import resolve_part_of
from expstore.buffers.replay_buffer import ReplayBuffer
from expstore.buffers.tensordict import TensorDictReplayBuffer
from expstore.errors import ArgumentError
from expstore.samplers.prioritized import PrioritizedSampler, Reduction
from expstore.storages.memory import MemoryStorage
from expstore.storages.read_view import ReadView


class PrioritizedReplayBuffer(ReplayBuffer):
    """Sample by priority; `sample(return_info=True)` also returns the rows' indices and weights.

    Threads, processes and crashes as `ReplayBuffer`.

    Args:
        alpha: Exponent of priorities; see `PrioritizedSampler`.
        beta: Exponent of the importance weights; see `PrioritizedSampler`.
        eps: Added to priorities.
        dtype: Dtype of the weights.
        storage: Where rows are stored; `MemoryStorage(1000)` by default.
        keywords: As in `ReplayBuffer`.

    Example:
        >>> from expstore import MemoryStorage, PrioritizedReplayBuffer
        >>> rb = PrioritizedReplayBuffer(alpha=0.7, beta=0.9, storage=MemoryStorage(10), batch_size=5)
        >>> rb.extend(TensorDict({"observation": torch.zeros(10, 3)}, [10]))
        >>> batch, info = rb.sample(return_info=True)
        >>> rb.update_priority(info["index"], torch.ones(5) * 5)
    """

    def __init__(
        self,
        *,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float32,
        storage: ReadView | Callable[[], ReadView] | None = None,
        **keywords: Any,
    ) -> None:
        storage = (
            MemoryStorage(1000) if storage is None else resolve_part_of(storage, ReadView, "get", "storage")
        )
        sampler = _sampler(keywords, storage.capacity, alpha, beta, eps, dtype)
        super().__init__(storage=storage, sampler=sampler, **keywords)


class TensorDictPrioritizedReplayBuffer(TensorDictReplayBuffer):
    """Sample by priority; batches carry `index` and `priority_weight`.

    Rows that have `priority_key` when they are appended start with that priority. Threads, processes and
    crashes: as `ReplayBuffer`.

    Args:
        alpha: Exponent of priorities; see `PrioritizedSampler`.
        beta: Exponent of the importance weights; see `PrioritizedSampler`.
        priority_key: The field from which `extend` and `update_tensordict_priority` read priorities.
        eps: Added to priorities.
        dtype: Dtype of the weights.
        reduction: How several priorities of one row are reduced to one.
        storage: Where rows are stored; `MemoryStorage(1000)` by default.
        keywords: As in `TensorDictReplayBuffer`.

    Example:
        >>> from expstore import MemoryStorage, TensorDictPrioritizedReplayBuffer
        >>> storage = MemoryStorage(10)
        >>> rb = TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.9, storage=storage, batch_size=5)
        >>> rb.extend(TensorDict({"observation": torch.zeros(10, 3)}, [10]))
        >>> batch = rb.sample()
        >>> batch["td_error"] = torch.ones(5)
        >>> rb.update_tensordict_priority(batch)
        5
    """

    def __init__(
        self,
        *,
        alpha: float,
        beta: float,
        priority_key: str = "td_error",
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float32,
        reduction: Reduction = "max",
        storage: ReadView | Callable[[], ReadView] | None = None,
        **keywords: Any,
    ) -> None:
        storage = (
            MemoryStorage(1000) if storage is None else resolve_part_of(storage, ReadView, "get", "storage")
        )
        sampler = _sampler(keywords, storage.capacity, alpha, beta, eps, dtype, reduction)
        super().__init__(storage=storage, sampler=sampler, priority_key=priority_key, **keywords)


def _sampler(keywords: dict[str, Any], *settings: Any) -> PrioritizedSampler:
    if keywords.pop("sampler", None) is not None:
        raise ArgumentError(
            "a prioritized buffer builds its sampler from alpha, beta and eps; use a ReplayBuffer for others"
        )
    return PrioritizedSampler(*settings)
