"""Generated code copies values of single rows, but only those that need no conversion."""

from __future__ import annotations

import numpy as np

from expstore.data.row_cells import Cells, compile_put, nest

DTYPES = ("bool", "int8", "uint8", "int64", "uint64", "float16", "float32", "float64", "complex64")


def test_numbers_are_stored_as_numpy_does_it() -> None:
    for dtype in DTYPES:
        rows, wanted = np.zeros(3, dtype), np.zeros(3, dtype)
        put = compile_put([Cells.of(rows, takes_numbers=True)])
        kind = np.dtype(dtype).kind
        numbers = [np.dtype(dtype).type(1), np.array(1, dtype)]
        numbers += {"b": [True, False], "i": [0, -5], "u": [5], "f": [0.1, -2.0, float("inf")]}.get(kind, [])
        for number in numbers:
            if number == float("inf"):
                assert not put(1, number)  # it takes a closer look
                continue
            assert put(1, number)
            wanted[1] = number
            assert rows.tobytes() == wanted.tobytes()


def test_values_that_need_checks_are_refused() -> None:
    for dtype, value in [
        ("int8", 200),
        ("uint8", -1),
        ("int64", 2**63),
        ("int64", 1.0),
        ("int64", True),
        ("int64", np.int32(1)),
        ("bool", 1),
        ("float32", 1),
        ("float32", 1e39),
        ("float32", float("nan")),
        ("float32", np.float32("nan")),
        ("float32", np.array(0x7F800001, np.uint32).view(np.float32)),
        ("float32", np.float64(1)),
        ("float32", np.zeros(1, np.float32)),
        ("float32", "1"),
        ("float32", None),
    ]:
        assert not compile_put([Cells.of(np.zeros(2, dtype), takes_numbers=True)])(0, value)


def test_an_array_of_one_value_may_have_any_shape() -> None:
    for dtype in DTYPES:
        rows = np.zeros(3, dtype)
        put = compile_put([Cells.of(rows, takes_numbers=True, any_shape=True)])
        for row, shape in enumerate([(), (1,), (1, 1)]):
            assert put(row, np.ones(shape, dtype))
        assert rows.tolist() == np.ones(3, dtype).tolist()
        for wrong in (np.ones(2, dtype), np.ones(0, dtype), np.ones(1, ">i2")):
            assert not put(0, wrong)


def test_arrays_have_just_the_dtype_and_shape() -> None:
    rows = np.zeros((2, 2, 3), np.float32)
    put = compile_put([Cells.of(rows, takes_numbers=False)])
    given = np.arange(6, dtype=np.float32).reshape(3, 2).T
    assert put(1, given)  # whatever its strides are
    assert (rows == [np.zeros((2, 3)), given]).all()
    for other in (given.T, given[:, :2], given.astype(np.float64), given.astype(">f4"), given.tolist(), 1.0):
        assert not put(0, other)


def test_dicts_have_just_the_names_of_the_fields() -> None:
    rows = {("a",): np.zeros(1), ("next", "it's"): np.zeros((1, 2)), ("next", "b"): np.zeros(1, np.int64)}
    cells = {key: Cells.of(one, takes_numbers=one.ndim == 1) for key, one in rows.items()}
    put = compile_put([nest(cells)])
    assert put(0, {"a": 1.0, "next": {"b": 2, "it's": np.ones(2)}})
    assert [one.tolist() for one in rows.values()] == [[1.0], [[1.0, 1.0]], [2]]
    for wrong in (
        {"a": 1.0, "next": {"b": 2}},
        {"a": 1.0, "next": {"b": 2, "it's": np.ones(2), "c": 1}},
        {"a": 1.0, "next": {"b": 2, "its": np.ones(2)}},
        {"a": 1.0, "next": 2, "b": 3},
        {"a": 1.0, "next": [1, 2]},
        {"a": 1.0},
        {},
    ):
        assert not put(0, wrong)
