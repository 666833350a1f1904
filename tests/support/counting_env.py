"""A TorchRL environment whose observations identify their rows.

Used by tests of TorchRL's collectors.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from tensordict import TensorDict

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # some modules of torchrl use deprecated names of others
    from torchrl.data import Categorical, Composite, Unbounded
    from torchrl.envs import EnvBase

#: Length of an episode of workers 0, 1, 2.
EPISODES = (3, 4, 7)


class Counting(EnvBase):
    """Return worker, episode and step as observation; episodes end after `length` steps."""

    def __init__(self, worker: int) -> None:
        super().__init__(device="cpu", batch_size=[])
        self.worker, self.length = worker, EPISODES[worker]
        self.episode, self.at = -1, 0
        self.observation_spec = Composite(observation=Unbounded((3,), dtype=torch.int64))
        self.action_spec = Categorical(2)
        self.reward_spec = Unbounded((1,))
        flags = ("done", "terminated", "truncated")
        self.done_spec = Composite({flag: Categorical(2, shape=(1,), dtype=torch.bool) for flag in flags})

    def _observe(self) -> torch.Tensor:
        return torch.tensor([self.worker, self.episode, self.at])

    def _reset(self, tensordict: Any = None, **_: Any) -> TensorDict:
        self.episode, self.at = self.episode + 1, 0
        return TensorDict({"observation": self._observe()}, [])

    def _step(self, tensordict: Any) -> TensorDict:
        self.at += 1
        ended = torch.tensor([self.at == self.length])
        return TensorDict(
            {
                "observation": self._observe(),
                "reward": torch.ones(1),
                "done": ended,
                "terminated": ended.clone(),
                "truncated": torch.zeros(1, dtype=torch.bool),
            },
            [],
        )

    def _set_seed(self, seed: Any) -> None:
        pass


class Make:
    """Create the environment of a worker, in the worker."""

    def __init__(self, worker: int) -> None:
        self.worker = worker

    def __call__(self) -> Counting:
        return Counting(self.worker)
