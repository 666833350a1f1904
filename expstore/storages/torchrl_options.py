"""Convert arguments of the storages that have TorchRL's names.

Used by these storages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["find_device", "find_seed"]


def find_device(device: torch.device | str | int | None) -> torch.device | None:
    """Return the device on which rows are returned; "auto" is the CPU, because rows are in host memory."""
    if device is None:
        return None
    import torch

    return torch.device("cpu" if device == "auto" else device)


def find_seed(seed: int | None) -> int:
    """Return the key of all draws: the given seed, or a number from torch's generator.

    Therefore `torch.manual_seed` decides what is drawn, as in TorchRL, and no two storages draw the same
    rows.
    """
    if seed is not None:
        return seed
    import torch

    return int(torch.randint(2**63 - 1, ()).item())
