"""Lists of single rows: the short path of TensorDicts reads what the general one does."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from expstore.data import containers
from expstore.data.batch import Layout
from expstore.data.leaves import column_of_rows, leaves_of_plain
from expstore.data.mappings import take_mapping
from expstore.data.nested_tensors import make_strided
from expstore.errors import SchemaError
from tests.support.variable_length import jagged

TYPED = Layout(all_dims=True, typed=True)
DTYPES = [torch.int32, torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.uint8]
#: Values that a row may have instead of a tensor of shape `(2,)`.
ODD: dict[str, Any] = {
    "none": NonTensorData(None),
    "text": NonTensorData("text"),
    "list": NonTensorData([1, 2]),
    "stack": NonTensorStack("a", "b"),
    "texts": NonTensorData("x", batch_size=[2]),
    "empty": torch.zeros(0),
    "scalar": torch.tensor(1.0),
    "matrix": torch.zeros(3, 2),
    "double": torch.zeros(2, dtype=torch.float64),
    "integers": torch.zeros(3, dtype=torch.int64),
    "gradient": torch.ones(3, requires_grad=True),
    "conjugate": torch.ones(2, dtype=torch.complex64).conj(),
    "sparse": torch.ones(3).to_sparse(),
    "nested": make_strided(torch.ones(4), np.array([[2, 2]]), np.array([0])),
    "jagged": jagged([torch.ones(2), torch.ones(1)]),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "strided": torch.ones(6)[::2],
    "group": TensorDict({"x": torch.ones(2)}),
    "batch": TensorDict({"x": torch.ones(2)}, [2]),
    "nothing": TensorDict({}),
    "missing": None,
}


def columns_of(batch: Any) -> Any:
    """Return the columns of a batch as Python values, with everything else that it says."""
    columns = [
        column.to_pylist() if isinstance(column, pa.Array) else (column.dtype, column.tolist())
        for column in batch.arrays
    ]
    return batch.keys, batch.dtypes, columns, batch.count, batch.lane_count, batch.form


def read(rows: list[Any], *, shortly: bool) -> Any:
    """Return what becomes of rows, by the short path or without it: their columns, or the error."""
    found = leaves_of_plain if shortly else lambda *_: None
    with patch.object(containers, "leaves_of_plain", found):
        try:
            return columns_of(containers.take(rows, TYPED, skip=frozenset({"index"})))
        except Exception as exc:  # some are TensorDict's own
            return type(exc), str(exc)


def make_rows(count: int, rng: np.random.Generator) -> list[TensorDict]:
    """Return rows of random fields: some of one shape, some of different shapes."""
    fields = [
        (f"f{place}", DTYPES[int(rng.integers(len(DTYPES)))], int(rng.integers(0, 3)), bool(rng.integers(2)))
        for place in range(3)
    ]
    rows = []
    for number in range(count):
        values: dict[str, Any] = {"next": TensorDict({}), "index": torch.tensor(number)}
        for name, dtype, dims, is_fixed in fields:
            sizes = [2] * dims if is_fixed else rng.integers(0, 3, dims).tolist()
            values[name] = torch.from_numpy(rng.integers(0, 9, sizes)).to(dtype)
        values["next"] = TensorDict({"text": f"row {number}", "value": values.pop("f0")})
        rows.append(TensorDict(values))
    return rows


@pytest.mark.parametrize("seed", range(40))
def test_both_paths_read_the_same_rows(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = make_rows(int(rng.integers(1, 6)), rng)
    assert leaves_of_plain(rows) is not None
    assert read(rows, shortly=True) == read(rows, shortly=False)


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("group", ["", "next"])
@pytest.mark.parametrize("longer", [0, 1])
def test_both_paths_treat_odd_rows_alike(name: str, group: str, longer: int) -> None:
    for places in ([0], [1], [2], [0, 1, 2]):
        rows = []
        for number in range(3):
            inner: dict[str, Any] = {"b": torch.ones(2 + longer * number), "a": torch.ones(2)}
            if number in places:
                inner["a"] = ODD[name]
                if name == "missing":
                    del inner["a"]
            rows.append(TensorDict({group: TensorDict(inner)} if group else inner))
        assert read(rows, shortly=True) == read(rows, shortly=False)


def test_rows_of_other_kinds_take_the_general_path() -> None:
    plain = TensorDict({"a": torch.ones(1), "b": TensorDict({"c": torch.ones(1)})})
    assert leaves_of_plain([plain, plain.clone()]) is not None
    for other in (
        {"a": torch.ones(1), "b": {"c": torch.ones(1)}},
        TensorDict({"a": torch.ones(1, 1), "b": TensorDict({"c": torch.ones(1, 1)})}, [1]),
        plain.clone().del_("a"),
        plain.clone().set("more", torch.ones(1)),
        plain.clone().set(("b", "more"), torch.ones(1)),
        plain.clone().set("a", torch.ones(1, dtype=torch.float64)),
        plain.clone().set("a", "text"),
        plain.clone().set("b", TensorDict({"c": torch.ones(1, 1)}, [1])),
    ):
        assert leaves_of_plain([plain, other]) is None
        assert leaves_of_plain([other, plain]) is None
    assert leaves_of_plain([TensorDict({})]) is None
    assert leaves_of_plain([plain], frozenset({"a", "c"})) == ([("b", "c")], [[plain["b", "c"]]])


def test_a_row_in_the_middle_without_a_field_is_named() -> None:
    rows = [TensorDict({"a": torch.ones(number + 1), "b": torch.ones(1)}) for number in range(5)]
    del rows[3]["b"]
    with pytest.raises(SchemaError, match="row 3 of the batch has no field 'b', row 0 has one"):
        containers.take(rows, TYPED)


# -- arrays instead of tensors ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int32", "uint64", "float16", "float64", "complex64"])
@pytest.mark.parametrize("shapes", [[(2,), (3,), (0,)], [(2, 2), (1, 2)], [(2, 1), (1, 3)], [(2,), (2,)]])
def test_arrays_and_tensors_become_the_same_column(dtype: str, shapes: list[tuple[int, ...]]) -> None:
    arrays = [np.arange(np.prod(shape)).reshape(shape).astype(dtype) for shape in shapes]
    tensors = [torch.from_numpy(array) for array in arrays]
    expected, name = column_of_rows(("a",), tensors, typed=True)
    for rows in (
        arrays,
        [tensors[0], *arrays[1:]],
        [array.astype(array.dtype.newbyteorder()) for array in arrays],
        [array[::-1].copy()[::-1] for array in arrays],
        [array.T.copy().T for array in arrays],
    ):
        column, found = column_of_rows(("a",), rows, typed=True)
        assert found == name
        is_equal = column.equals if isinstance(column, pa.Array) else partial(np.array_equal, column)
        assert is_equal(expected)


def test_arrays_of_other_dtypes_are_refused() -> None:
    with pytest.raises(SchemaError, match="'a' has dtype torch.complex128, which cannot be stored"):
        column_of_rows(("a",), [np.ones(1, complex), np.ones(2, complex)], typed=True)
    with pytest.raises(
        SchemaError, match=r"tensors of different kinds in one batch: float32\[1\], int32\[2\]"
    ):
        column_of_rows(("a",), [np.ones(1, np.float32), np.ones(2, np.int32)], typed=True)


@pytest.mark.parametrize("kind", [torch.from_numpy, np.asarray])
def test_columns_are_copies_of_rows(kind: Any) -> None:
    for shapes in ([1, 2], [2, 2]):
        rows = [np.zeros(size, np.float32) for size in shapes]
        column, _ = column_of_rows(("a",), [kind(row) for row in rows], typed=True)
        for row in rows:
            row += 1
        assert column.tolist() == [[0.0] * size for size in shapes]


# -- numbers in lists ----------------------------------------------------------------------------------


def test_masks_are_found_in_nested_lists() -> None:
    masked = np.ma.masked_array([1, 2], [False, True])
    for values in ([np.ones(2), masked], [[np.ones(2)], [masked]], [(1,), (2, (masked,))]):
        with pytest.raises(SchemaError, match="'a' has a NumPy array with masked elements"):
            take_mapping({"a": values}, TYPED)


def test_numbers_of_numpy_in_nested_lists_keep_their_dtype() -> None:
    kept: list[Any] = [[1.0, np.float64(2)], [[1.0], [np.float64(2)]], ((1.0,), (np.float64(2),))]
    plain: list[Any] = [[[1.0], (2.0,)], ((1.0,), (2.0,))]
    assert [take_mapping({"a": values}, TYPED).dtypes for values in kept] == [["float64"]] * 3
    assert [take_mapping({"a": values}, TYPED).dtypes for values in plain] == [["float32"]] * 2
