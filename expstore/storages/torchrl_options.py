"""Arguments of the storages that have TorchRL's names, made usable.

Used by the storages that bear TorchRL's names. It knows no storage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["find_device", "find_seed"]


def find_device(device: torch.device | str | int | None) -> torch.device | None:
    """Return where rows are to be handed out; "auto" is where they lie, which is host memory."""
    if device is None:
        return None
    import torch

    return torch.device("cpu" if device == "auto" else device)


def find_seed(seed: int | None) -> int:
    """Return the key of all draws: what was asked for, or a number from torch's generator.

    So `torch.manual_seed` decides what is drawn, as it does in TorchRL, and no two storages draw alike.
    """
    if seed is not None:
        return seed
    import torch

    return int(torch.randint(2**63 - 1, ()).item())
