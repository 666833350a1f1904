"""Sizes of rows of Arrow columns in bytes, computed from their offsets alone.

Used to bound a read before its values are copied.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from expstore.core.values import IntArray


def row_sizes(column: Any) -> IntArray:
    """Return the size of each row of a pyarrow Array in bytes, offsets included. Shape `(n,)`, int64."""
    starts = np.arange(len(column))
    return _sizes(column, starts, starts + 1)


def _sizes(column: Any, starts: IntArray, stops: IntArray) -> IntArray:
    """Return the sizes of runs of values in bytes. Shapes `(n,)`."""
    import pyarrow as pa

    kind, is_a = column.type, pa.types
    if is_a.is_struct(kind):
        parts = [_sizes(column.field(number), starts, stops) for number in range(kind.num_fields)]
        return sum(parts, np.zeros(starts.size, np.int64))
    if is_a.is_fixed_size_list(kind):
        first, each = column.offset, kind.list_size
        return _sizes(column.values, (first + starts) * each, (first + stops) * each)
    own: IntArray = stops - starts
    if is_a.is_list(kind) or is_a.is_large_list(kind) or is_a.is_map(kind):
        if not len(column):
            return np.zeros(starts.size, np.int64)
        own = own * (8 if is_a.is_large_list(kind) else 4)
        offsets = column.offsets.to_numpy().astype(np.int64)
        parts = [column.keys, column.items] if is_a.is_map(kind) else [column.values]
        return sum((_sizes(part, offsets[starts], offsets[stops]) for part in parts), own)
    wide = is_a.is_large_string(kind) or is_a.is_large_binary(kind)
    if wide or is_a.is_string(kind) or is_a.is_binary(kind):
        buffer = column.buffers()[1]
        own = own * (8 if wide else 4)
        if buffer is None or not len(column):
            return own
        offsets = np.frombuffer(buffer, np.int64 if wide else np.int32)[column.offset :].astype(np.int64)
        own = own + offsets[stops] - offsets[starts]
        return own
    if is_a.is_null(kind):
        return np.zeros(starts.size, np.int64)
    own = own * max(1, kind.bit_width // 8)
    return own
