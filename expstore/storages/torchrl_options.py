"""Convert arguments of the storages that have TorchRL's names.

Used by these storages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from expstore.core.arguments import check_whole
from expstore.errors import StateError

if TYPE_CHECKING:
    import torch


def find_device(device: torch.device | str | int | None) -> torch.device | None:
    """Return the device on which rows are returned; "auto" is the CPU, because rows are in host memory.

    Raises:
        StateError: torch cannot use the device on this machine.
    """
    if device is None:
        return None
    import torch

    if device == "auto":
        return torch.device("cpu")
    check_device(device, "rows")
    return torch.device(device)


def check_device(device: torch.device | str | int, things: str) -> None:
    """Check that torch can use a device on this machine.

    Args:
        device: The device.
        things: What is to be returned on it, for the message: "batches".

    Raises:
        StateError: torch cannot use it.
    """
    import torch

    try:
        torch.empty(0, device=device)
    # Which one depends on torch's build.
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as exc:
        raise StateError(
            f"{things} cannot be returned on device {str(device)!r}: {str(exc).splitlines()[0]}",
            kind="device",
            hint="leave device out, or choose one that torch finds here",
        ) from exc


def find_seed(seed: int | None) -> int:
    """Return the key of all draws: the given seed, or a number from torch's generator.

    Therefore `torch.manual_seed` decides what is drawn, as in TorchRL, and no two storages draw the same
    rows.

    Raises:
        ArgumentError: The seed is not an integer.
    """
    if seed is not None:
        return check_whole("seed", seed, hint="leave it out, or use a number such as 0")
    import torch

    return int(torch.randint(2**63 - 1, ()).item())
