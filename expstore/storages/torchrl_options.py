"""What TorchRL's storages may be asked for: checked, made usable, or refused with the reason.

Used by the storages that bear TorchRL's names. It knows no storage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["find_device", "find_seed", "refuse"]

#: Option -> why it has no meaning here.
_REASONS = {
    "compilable": "torch.compile does not look into a storage: call extend and sample outside of what it "
    "compiles",
    "consolidated": "every field lies in one array already",
    "shared_init": "one process writes to a storage: open a store on disk by expstore.open(path), and in the "
    "others with mode='r'",
    "cleanup_memmap": "it speaks of shared_init, which there is not",
}  # fmt: skip


def refuse(**asked: bool) -> None:
    """Raise ValueError for an option that is set though it has no meaning here.

    Args:
        asked: Which ones are set, by name.
    """
    for name, is_set in asked.items():
        if is_set:
            raise ValueError(f"{name} cannot be set: {_REASONS[name]}")


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
