"""Columns are widened to the types of fields without loss, or refused with the field's name.

`test_arrow_types` has more tests of types.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from expstore.errors import SchemaError
from expstore.schema.arrow_types import Ragged, ragged_text, to_type, type_text
from expstore.schema.casting import fit_arrow
from expstore.schema.schema import arrow_dtype
from expstore.schema.variable_tensors import join

KEY = ("next", "field")


def tensors(dtype: str, shape: tuple[int | None, ...], rows: list[tuple[int, ...]]) -> tuple[Any, str]:
    """Return tensors of these shapes that count from 0, and the name of their dtype."""
    shapes = np.array(rows, np.int64)
    flat = np.arange(shapes.prod(1).sum()).astype("u2" if dtype == "bfloat16" else dtype)
    return join(Ragged(dtype, shape), flat, shapes), arrow_dtype(ragged_text(dtype, shape))


def test_tensors_are_widened() -> None:
    for given, wanted, values in [
        (tensors("int32", (None,), [(2,), (0,)]), ("int64", (None,)), [[0, 1], []]),
        (tensors("int32", (None,), [(2,), (0,)]), ("float64", (None,)), [[0.0, 1.0], []]),
        (tensors("bool", (None,), [(2,), (0,)]), ("uint8", (None,)), [[0, 1], []]),
        (
            tensors("int8", (None, 2), [(1, 2), (2, 2)]),
            ("int16", (None, None)),
            [{"data": [0, 1], "shape": [1, 2]}, {"data": [2, 3, 4, 5], "shape": [2, 2]}],
        ),
        (tensors("int8", (None, None), [(1, 2), (2, 2)]), ("int8", (None, 2)), [[[0, 1]], [[2, 3], [4, 5]]]),
    ]:
        column, dtype = given
        assert fit_arrow(KEY, ragged_text(*wanted), column, dtype).to_pylist() == values


def test_tensors_that_may_lose_something_are_refused() -> None:
    for given, wanted in [
        (tensors("int64", (None,), [(2,), (0,)]), ("int32", (None,))),
        (tensors("float64", (None,), [(2,), (0,)]), ("float32", (None,))),
        (tensors("uint16", (None,), [(2,), (0,)]), ("bfloat16", (None,))),
        (tensors("bfloat16", (None,), [(2,), (0,)]), ("float32", (None,))),
        (tensors("complex64", (None,), [(2,), (0,)]), ("float32", (None, 2))),
        (tensors("int8", (None, 2), [(1, 2), (2, 2)]), ("int8", (None,))),
        (tensors("int8", (None, 2), [(1, 2), (2, 2)]), ("int8", (None, 3))),
        (tensors("int8", (None, None), [(1, 2), (2, 3)]), ("int8", (None, 2))),
        (tensors("int8", (None, None), [(1, 2), (2, 3)]), ("int8", (1, None))),
    ]:
        column, dtype = given
        with pytest.raises(SchemaError, match=r"next\.field'?: expected .*got"):
            fit_arrow(KEY, ragged_text(*wanted), column, dtype)


def test_integers_that_floats_would_round_are_refused() -> None:
    shapes = np.array([[2], [1]])
    for last, fits in ((2**60, True), (2**53 + 1, False)):
        column = join(Ragged("int64", (None,)), np.array([1, 2, last]), shapes)
        given = arrow_dtype(ragged_text("int64", (None,)))
        if fits:
            fitted = fit_arrow(KEY, ragged_text("float64", (None,)), column, given)
            assert fitted.to_pylist() == [[1.0, 2.0], [2.0**60]]
        else:
            with pytest.raises(SchemaError, match="float64 would round 9007199254740993"):
                fit_arrow(KEY, ragged_text("float64", (None,)), column, given)


@pytest.mark.parametrize("dtype", ["bfloat16", "complex64"])
def test_tensor_types_unknown_to_arrow_are_not_lists_of_numbers(dtype: str) -> None:
    column, name = tensors(dtype, (None,), [(2,), (1,)])
    with pytest.raises(SchemaError, match=dtype):
        fit_arrow(KEY, type_text(column.type), column, name)


def test_values_fit_where_each_does() -> None:
    for values, kind, expected in [
        ([1, None], pa.float32(), [1.0, None]),
        ([1, 2], pa.int8(), [1, 2]),
        ([0.1, None], pa.float32(), [float(np.float32(0.1)), None]),
        ([float("inf"), 1e-300], pa.float32(), [float("inf"), 0.0]),
        ([2048, None], pa.float16(), [2048.0, None]),
        (["a", None], pa.large_string(), ["a", None]),
        ([{"b": 1}, None], pa.struct([("a", pa.string()), ("b", pa.int64())]), [{"a": None, "b": 1}, None]),
        ([[], [None]], pa.list_(pa.binary()), [[], [None]]),
        ([None, None], pa.string(), [None, None]),
    ]:
        objects = np.empty(len(values), object)
        objects[:] = values
        for column in (pa.array(values), objects):
            assert fit_arrow(KEY, type_text(kind), column).to_pylist() == expected


def test_values_that_do_not_fit_are_refused() -> None:
    for values, kind in [
        ([300], pa.int8()),
        ([2**24 + 1], pa.float32()),
        ([2049], pa.float16()),
        ([70000], pa.float16()),
        ([1e300], pa.float32()),
        ([0.5, -1e5], pa.float16()),
        ([None, [1.0, 1e300]], pa.list_(pa.float32())),
        ([[1e300, 1.0]], pa.list_(pa.float32(), 2)),
        ([{"a": [{"b": 1e300}]}], pa.struct([("a", pa.list_(pa.struct([("b", pa.float32())])))])),
        ([1], pa.string()),
        (["1"], pa.int64()),
        (["a"], pa.binary()),
        ([{"b": 1, "new": 2}], pa.struct([("b", pa.int64())])),
        ([1.0], pa.int64()),
        ([True], pa.int64()),
        ([[1, None]], None),
    ]:
        text = ragged_text("int64", (None,)) if kind is None else type_text(kind)
        with pytest.raises(SchemaError, match=r"next\.field'?: expected .*got"):
            fit_arrow(KEY, text, pa.array(values))


def test_a_column_may_have_no_tensor_at_all() -> None:
    text = ragged_text("bfloat16", (None, None))
    column = pa.nulls(2, to_type(text))
    assert fit_arrow(KEY, text, column).to_pylist() == [None, None]


def test_rows_of_one_shape_are_copied() -> None:
    rows = np.arange(6, dtype=np.int32).reshape(2, 3)
    fitted = fit_arrow(KEY, ragged_text("int32", (None,)), rows, "int32")
    rows += 100
    assert fitted.to_pylist() == [[0, 1, 2], [3, 4, 5]]
    numbers = np.arange(2.0)
    fitted = fit_arrow(KEY, type_text(pa.float64()), numbers, "float64")
    numbers += 1
    assert fitted.to_pylist() == [0.0, 1.0]


def test_rows_of_one_shape_may_have_no_values() -> None:
    fitted = fit_arrow(KEY, ragged_text("int32", (None, None)), np.zeros((2, 3, 0), np.int32), "int32")
    assert fitted.to_pylist() == [{"data": [], "shape": [3, 0]}] * 2
