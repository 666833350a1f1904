"""Replacements for the compiled trees of TorchRL's prioritized samplers, which some machines lack.

They keep one number per leaf, and sum or compare all of them in each call.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torchrl.data.replay_buffers.samplers import prioritized


class _Tree:
    neutral = 0.0

    def __init__(self, size: int) -> None:
        self.leaves = np.full(size, self.neutral)

    def __getitem__(self, index: Any) -> Any:
        found = self.leaves[np.asarray(index)]
        return torch.from_numpy(found).float() if isinstance(index, torch.Tensor) else found

    def __setitem__(self, index: Any, value: Any) -> None:
        self.leaves[np.asarray(index)] = np.asarray(value)


class _SumTree(_Tree):
    def query(self, left: int, right: int) -> float:
        return float(self.leaves[left:right].sum())

    def scan_lower_bound(self, mass: Any) -> Any:
        return torch.from_numpy(np.searchsorted(self.leaves.cumsum(), np.asarray(mass)))


class _MinTree(_Tree):
    neutral = np.inf

    def query(self, left: int, right: int) -> float:
        return float(self.leaves[left:right].min())


def use_trees(patch: pytest.MonkeyPatch) -> None:
    """Let TorchRL's samplers use these trees if its own are missing."""
    if prioritized.SumSegmentTreeFp32 is None:
        for dtype in ("Fp32", "Fp64"):
            patch.setattr(prioritized, f"SumSegmentTree{dtype}", _SumTree)
            patch.setattr(prioritized, f"MinSegmentTree{dtype}", _MinTree)
