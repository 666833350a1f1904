"""The buffer over the shards of a cluster on Ray, which collectors of TorchRL accept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from expstore.cluster.buffer import ShardedReplayBuffer


class RayShardedReplayBuffer(ShardedReplayBuffer):
    """The buffer over the shards of a cluster on Ray; TorchRL's RayCollector accepts it.

    It is a `ShardedReplayBuffer`: rows go over HTTP between this process and the shards. Pass it to tasks and
    actors as it is: each copy opens its own connections and is a session of its own.
    """

    @property
    def service_backend(self) -> str:
        """Always "ray": TorchRL's collectors on Ray may write to it."""
        return "ray"

    def client(self) -> Self:  # type: ignore[override]
        """Return the buffer: its copies in other processes are clients."""
        return self

    def clients(self, count: int) -> Sequence[Self]:
        """Return the buffer for each of `count` workers; each worker's copy is a session of its own."""
        return [self] * count
