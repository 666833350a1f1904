"""Convert between float32 and the bits of bfloat16, which NumPy, Arrow and most file formats do not have."""

from __future__ import annotations

import numpy as np

from expstore.core.values import Array


def widen_bfloat16(bits: Array) -> Array:
    """Return bfloat16 numbers, stored as uint16 bits, as float32. Any shape.

    >>> from expstore.core.bfloat16 import widen_bfloat16
    >>> widen_bfloat16(np.array([0x3F80, 0xC000], np.uint16)).tolist()
    [1.0, -2.0]
    """
    values: Array = (np.ascontiguousarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values


def narrow_to_bfloat16(values: Array) -> Array:
    """Return the upper halves of float32 numbers: the bits of bfloat16. Any shape, uint16."""
    return (np.ascontiguousarray(values).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
