"""Sizes of rows computed from offsets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from expstore.schema.arrow_sizes import row_sizes

CASES: list[tuple[Any, list[Any], list[int]]] = [
    (pa.string(), ["abc", None, "", "ä"], [7, 4, 4, 6]),
    (pa.large_binary(), [b"abc", b""], [11, 8]),
    (pa.list_(pa.int16()), [[1, 2, 3], [], None], [10, 4, 4]),
    (pa.list_(pa.list_(pa.string())), [[["ab"], []], []], [4 + 8 + 6, 4]),
    (pa.list_(pa.float32(), 2), [[1, 2], [3, 4]], [8, 8]),
    (pa.struct([("a", pa.bool_()), ("b", pa.string())]), [{"a": True, "b": "xyz"}, None], [8, 5]),
    (pa.map_(pa.string(), pa.int8()), [[("k", 1)], []], [4 + 5 + 1, 4]),
    (pa.null(), [None, None], [0, 0]),
    (pa.timestamp("us"), [0, 1], [8, 8]),
    (pa.string(), [], []),
]


def test_rows_have_the_bytes_of_their_values_and_offsets() -> None:
    for kind, rows, sizes in CASES:
        column = pa.array(rows, kind)
        assert row_sizes(column).tolist() == sizes
        around = pa.concat_arrays([column, column, column]) if rows else column
        assert row_sizes(around.slice(len(rows), len(rows))).tolist() == sizes
        assert row_sizes(column).dtype == np.int64
