"""Selection of rows of any kind of column."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from expstore.schema.row_selection import in_shape, no_rows, pick
from expstore.schema.schema import ARROW, Field


@pytest.mark.some(4)
@pytest.mark.parametrize("column", [np.arange(5), pa.array([0, 1, 2, 3, 4])])
@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (np.array([3, 0, 3]), [3, 0, 3]),
        (np.array([], np.int64), []),
        (np.array([True, False, False, True, False]), [0, 3]),
        (np.zeros(5, bool), []),
    ],
)
def test_rows_by_number_and_by_flag(column: Any, rows: Any, expected: list[int]) -> None:
    found = pick(column, rows)
    assert type(found) is type(column)
    assert found.tolist() == expected


def test_shapes_and_no_rows() -> None:
    flat, texts = in_shape([np.zeros((6, 2)), pa.array(["a"] * 6)], (2, 3))
    assert flat.shape == (2, 3, 2)
    assert len(texts) == 6
    assert no_rows(Field(("a",), "int8", (3,))).shape == (0, 3)
    assert no_rows(Field(("a",), ARROW, (), '"string"')).type == pa.string()
