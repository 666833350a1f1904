"""Tensors of any bits, and their bytes, for tests that check that values come back unchanged."""

from __future__ import annotations

import numpy as np
import torch

#: Every dtype that a field may have.
DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
]


def random_bits(dtype: torch.dtype, shape: tuple[int, ...], rng: np.random.Generator) -> torch.Tensor:
    """Return a tensor of any bits that the dtype has: NaN, infinities and negative zero too."""
    if dtype is torch.bool:
        return torch.from_numpy(rng.random(shape) < 0.5)
    size = torch.empty((), dtype=dtype).element_size()
    raw = rng.integers(0, 256, (*shape, size), np.uint8)
    return torch.from_numpy(raw).view(dtype).reshape(shape) if raw.size else torch.empty(shape, dtype=dtype)


def bits(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor's values."""
    flat = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
