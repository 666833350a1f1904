"""Replay buffers.

Names load when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from expstore.buffers.ensemble import ReplayBufferEnsemble
    from expstore.buffers.hindsight import HERReplayBuffer, HindsightStrategy
    from expstore.buffers.offline_to_online import OfflineToOnlineReplayBuffer, prefill_replay_buffer
    from expstore.buffers.prioritized import PrioritizedReplayBuffer, TensorDictPrioritizedReplayBuffer
    from expstore.buffers.replay_buffer import ReplayBuffer
    from expstore.buffers.tensordict import TensorDictReplayBuffer

__all__ = [
    "HERReplayBuffer",
    "HindsightStrategy",
    "OfflineToOnlineReplayBuffer",
    "PrioritizedReplayBuffer",
    "ReplayBuffer",
    "ReplayBufferEnsemble",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
    "prefill_replay_buffer",
]

_HOME = {
    "HERReplayBuffer": "hindsight",
    "HindsightStrategy": "hindsight",
    "OfflineToOnlineReplayBuffer": "offline_to_online",
    "PrioritizedReplayBuffer": "prioritized",
    "ReplayBuffer": "replay_buffer",
    "ReplayBufferEnsemble": "ensemble",
    "TensorDictPrioritizedReplayBuffer": "prioritized",
    "TensorDictReplayBuffer": "tensordict",
    "prefill_replay_buffer": "offline_to_online",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
