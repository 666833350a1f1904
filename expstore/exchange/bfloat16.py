"""bfloat16, which NumPy, Arrow and the formats have not: its bits, as stores hold them, and float32."""

from __future__ import annotations

import numpy as np

from expstore.core.values import Array

__all__ = ["narrowed", "widened"]


def widened(bits: Array) -> Array:
    """Return the float32 values that bits of bfloat16 stand for.

    >>> widened(np.array([0x3F80, 0xC000], np.uint16)).tolist()
    [1.0, -2.0]
    """
    values: Array = (np.ascontiguousarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values


def narrowed(values: Array) -> Array:
    """Return the bits of bfloat16 that float32 values begin with."""
    return (np.ascontiguousarray(values).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
