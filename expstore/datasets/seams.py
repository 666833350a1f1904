"""Where the next observation of a row is not the observation of the row that follows.

Used by readers of files that have next observations and do not mark all ends of episodes.
"""

from __future__ import annotations

import numpy as np

from expstore.core.values import Array

__all__ = ["rows_differ"]


def rows_differ(one: Array, other: Array) -> Array:
    """Return in which rows two arrays differ; NaN equals NaN. Shape `(n,)`, bool."""
    differing = (one != other) & ~((one != one) & (other != other))
    return np.asarray(differing.any(axis=tuple(range(1, one.ndim))))
