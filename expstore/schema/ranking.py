"""Compute the number by which a store that keeps the best rows ranks a row.

Used by `TensorDictMaxValueWriter` and by deletion of all but the best rows. This module handles arrays only.
"""

from __future__ import annotations

import numpy as np

from expstore.core.bfloat16 import widen_bfloat16
from expstore.core.values import Array
from expstore.schema.schema import Field


def rank_rows(entry: Field, column: Array, reduction: str) -> Array:
    """Return the rank of each row as a number; -inf for NaN.

    Args:
        entry: The field by which rows are ranked.
        column: Its values. Shape `(n, *row shape)`.
        reduction: How several values of a row become one: sum, max, min, mean or median.

    Returns:
        Shape `(n,)`, float64.
    """
    if entry.dtype == "bfloat16":
        column = widen_bfloat16(column)
    return reduce_values(column.reshape(column.shape[0], -1).astype(np.float64), reduction)


def reduce_values(values: Array, reduction: str) -> Array:
    """Return one number per row; -inf for NaN. Shapes `(n, values)` and `(n,)`, float64."""
    if values.shape[1] == 1:
        ranks = values[:, 0]
    elif reduction == "median":
        ranks = np.sort(values, axis=1)[:, (values.shape[1] - 1) // 2]
        ranks[np.isnan(values).any(axis=1)] = np.nan
    else:
        ranks = getattr(values, reduction)(axis=1)
    ranks[np.isnan(ranks)] = -np.inf
    return np.ascontiguousarray(ranks)
