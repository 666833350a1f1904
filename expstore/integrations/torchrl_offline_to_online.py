"""A buffer of a data set and new rows, as an instance of TorchRL's class, too.

TorchRL's OfflineToOnlineTrainer checks by `isinstance` that it gets TorchRL's `OfflineToOnlineReplayBuffer`.
Needs torchrl.
"""

from __future__ import annotations

from expstore.datasets import offline_to_online

try:
    from torchrl.data.replay_buffers.offline_to_online import OfflineToOnlineReplayBuffer
except ModuleNotFoundError as exc:
    raise ModuleNotFoundError(
        "to_torchrl needs TorchRL, which is not installed; pip install torchrl", name=exc.name
    ) from exc

__all__ = ["TorchRLOfflineToOnline"]


class TorchRLOfflineToOnline(
    offline_to_online.OfflineToOnlineReplayBuffer,
    OfflineToOnlineReplayBuffer,  # type: ignore[misc]
):
    """Do what expstore's `OfflineToOnlineReplayBuffer` does, in the type hierarchy of TorchRL.

    Created by `expstore.trainers.to_torchrl`, with the state of a buffer.

    Example:
        >>> type(expstore.trainers.to_torchrl(rb)).__name__
        'TorchRLOfflineToOnline'
    """
