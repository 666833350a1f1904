"""Masks of choices: which of n are allowed.

Used by the specs of choices. This module does not depend on how a choice is represented.
"""

from __future__ import annotations

from typing import Any

import torch


def as_mask(given: Any, size: torch.Size, device: torch.device) -> torch.Tensor:
    """Return a mask with a shape; raise RuntimeError if it does not expand to that shape."""
    mask: torch.Tensor = torch.as_tensor(given, device=device).bool()
    if mask.numel() == size[-1] and mask.shape != size:
        mask = mask.reshape(size[-1])
    try:
        return mask.expand(size).clone()
    except RuntimeError as exc:
        raise RuntimeError(
            f"Cannot expand mask to the desired shape: it has {tuple(mask.shape)}, {tuple(size)} is needed."
        ) from exc


def same_mask(mine: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Return whether two masks hide the same choices."""
    if mine is None or other is None:
        return mine is other
    return torch.equal(mine, other)


def draw_allowed(mask: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    """Draw, for each row, one of the positions along the last dim where the mask is True.

    Returns int64 with the mask's shape without the last dim.

    Raises:
        RuntimeError: A row of the mask has no True.
    """
    if not mask.any(-1).all():
        raise RuntimeError(f"cannot draw a choice: the mask hides all {mask.shape[-1]} choices")
    flat: torch.Tensor = mask.reshape(-1, mask.shape[-1]).float()
    if not flat.numel():
        return torch.zeros(mask.shape[:-1], dtype=torch.int64, device=mask.device)
    return torch.multinomial(flat, 1, generator=generator).reshape(mask.shape[:-1])


def list_allowed(mask: torch.Tensor) -> torch.Tensor:
    """Return the choices that all rows of a mask allow alike. Shape `(mask.shape[-1],)`, bool.

    Raises:
        ValueError: The rows differ.
    """
    rows = mask.reshape(-1, mask.shape[-1])
    if (rows != rows[0]).any():
        raise ValueError(
            "enumerate(use_mask=True) needs the same mask for all elements, and these differ: enumerate each "
            "spec of unbind()"
        )
    return rows[0]
