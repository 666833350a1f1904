"""Conversion of values that have no type in DuckDB."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from expstore.schema.arrow_types import Ragged, ragged_text, to_type, type_text
from expstore.schema.variable_tensors import join
from expstore.sql.arrow_values import SqlValues

HALF_FLOATS = [[0.5, 2.0], None, [], [-1.5]]


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.list_(pa.float16()), HALF_FLOATS),
        (pa.struct([("a", pa.list_(pa.float16())), ("b", pa.string())]), [{"a": [0.5], "b": None}, None]),
        (pa.list_(pa.list_(pa.float16(), 2)), [[[0.5, 1.0]], None, [], [[1.0, 2.0], [3.0, 4.0]]]),
        (pa.float16(), [0.5, None]),
        (pa.string(), ["a", None]),
    ],
    ids=str,
)
@pytest.mark.parametrize("start", [0, 1])
def test_16_bit_floats_are_32(kind: pa.DataType, values: list[Any], start: int) -> None:
    converter = SqlValues(type_text(kind))
    found = converter.of(pa.array(values, kind).slice(start))
    found.validate(full=True)
    assert found.type == converter.kind
    assert "halffloat" not in str(converter.kind)
    assert found.to_pylist() == values[start:]


@pytest.mark.parametrize("shape", [(None,), (None, 2), (None, None)])
def test_bits_of_bfloat16_are_numbers(shape: tuple[int | None, ...]) -> None:
    rows = [tuple(n if size is None else size for size in shape) for n in (2, 3)]
    shapes = np.array(rows, np.int64)
    items = int(shapes.prod(1).sum())
    bits = (np.arange(items, dtype=np.float32).view("u4") >> 16).astype("u2")
    column = join(Ragged("bfloat16", shape), bits, shapes)
    converter = SqlValues(ragged_text("bfloat16", shape))
    found = converter.of(column.slice(1))
    assert found.type == converter.kind
    flat = (found if shape != (None, None) else found.field("data")).flatten()
    while pa.types.is_fixed_size_list(flat.type):
        flat = flat.flatten()
    assert flat.to_pylist() == [float(n) for n in range(int(shapes[0].prod()), items)]


def test_what_duckdb_knows_is_not_touched() -> None:
    column = pa.array([["a"], None])
    converter = SqlValues(type_text(column.type))
    assert converter.of(column) is column
    assert converter.kind == to_type(type_text(column.type))
