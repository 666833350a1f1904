"""What a priority may be.

Used by storages and buffers. It keeps nothing.
"""

from __future__ import annotations

import numpy as np

from expstore.core.values import Array
from expstore.errors import PriorityError

__all__ = ["check_priorities"]


_LARGEST = float(np.finfo(np.float32).max)


def check_priorities(values: Array) -> Array:
    """Return priorities as float32. Shapes `(n,)`.

    Raises:
        PriorityError: One is negative, NaN or infinite.
    """
    # Of NaN neither comparison is true.
    if values.size and values.min() >= 0 and values.max() <= _LARGEST:
        return values.astype(np.float32, copy=False)
    with np.errstate(over="ignore"):
        values = np.asarray(values, np.float32)
    bad = ~np.isfinite(values) | (values < 0)
    if bad.any():
        at = int(np.argmax(bad))
        raise PriorityError(
            f"priority number {at} of {values.size} is {values[at]}", hint="give finite values >= 0"
        )
    return values
