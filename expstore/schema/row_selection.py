"""Select and join rows of a column: an array, or an Arrow array.

Used wherever columns of a batch are cut or joined. The rows are copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from expstore.core.values import Array
from expstore.schema.arrow_types import to_type
from expstore.schema.schema import Field


def pick(column: Any, rows: Array) -> Any:
    """Return some rows of a column.

    Args:
        column: An array of shape `(n, *row shape)`, or a pyarrow Array of n rows.
        rows: Positions of shape `(m,)`, or flags of shape `(n,)`.
    """
    if isinstance(column, np.ndarray):
        return column[rows]
    numbers = np.flatnonzero(rows) if rows.dtype == np.bool_ else rows
    return column.take(numbers)


def concatenate(parts: Sequence[Any]) -> Any:
    """Return columns of a field one after another.

    Args:
        parts: Arrays of shape `(n, *row shape)`, or pyarrow Arrays; at least one.
    """
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    import pyarrow as pa

    return pa.concat_arrays(parts)


def no_rows(entry: Field) -> Any:
    """Return an empty column of a field."""
    if entry.variable:
        import pyarrow as pa

        return pa.array([], to_type(entry.arrow))
    return np.empty((0, *entry.shape), entry.numpy_dtype)


def in_shape(columns: Sequence[Any], shape: tuple[int, ...]) -> list[Any]:
    """Return columns with their rows reshaped; Arrow columns stay flat.

    Args:
        columns: Shapes `(n, *row shape)`.
        shape: New shape of the n rows.
    """
    return [
        column.reshape((*shape, *column.shape[1:])) if isinstance(column, np.ndarray) else column
        for column in columns
    ]
