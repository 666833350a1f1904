"""Find rows whose next observation is not the observation of the following row.

Used by readers of files that have next observations but do not mark all ends of episodes.
"""

from __future__ import annotations

import numpy as np

from expstore.core.values import Array

__all__ = ["rows_differ"]


def rows_differ(one: Array, other: Array) -> Array:
    """Return a mask of the rows in which two arrays differ; NaN equals NaN. Shape `(n,)`, bool."""
    differing = (one != other) & ~((one != one) & (other != other))
    return np.asarray(differing.any(axis=tuple(range(1, one.ndim))))
