"""Tensors of different shapes as columns and back, and as entries of TensorDicts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from expstore.data.nested_tensors import (
    JaggedLayouts,
    from_nested,
    from_tensors,
    make_jagged,
    stack_values,
    to_entry,
    to_tensor,
    to_values,
)
from expstore.data.to_arrays import to_arrays, to_ragged_rows
from expstore.errors import SchemaError
from expstore.schema.arrow_types import Ragged, ragged_text, to_type
from tests.support.variable_length import jagged

KEY = ("next", "tokens")
ROWS = [torch.arange(n) for n in (3, 0, 2, 5)]


def parts(nested: torch.Tensor) -> list[Any]:
    return [one.tolist() for one in nested.unbind()]


@pytest.mark.parametrize("start", [0, 1, 2])
def test_slices_of_columns_are_tensors(start: int) -> None:
    found, column = from_tensors(KEY, ROWS)
    nested = to_tensor(column.slice(start, 2), found)
    assert parts(nested) == [row.tolist() for row in ROWS[start : start + 2]]
    images = [torch.arange(n * 2).reshape(n, 2) for n in (3, 1, 2, 5)]
    found, column = from_tensors(KEY, images)
    assert found == Ragged("int64", (None, 2))
    assert parts(to_tensor(column.slice(start, 2), found)) == [
        one.tolist() for one in images[start : start + 2]
    ]
    images = [torch.arange(n * (n + 1)).reshape(n, n + 1) for n in (3, 1, 2, 5)]
    found, column = from_tensors(KEY, images)
    assert found == Ragged("int64", (None, None))
    nested = to_tensor(column.slice(start, 2), found)
    assert parts(nested) == [one.tolist() for one in images[start : start + 2]]


def test_the_memory_of_a_column_is_that_of_its_tensor() -> None:
    found, column = from_tensors(KEY, ROWS)
    nested = to_tensor(column, found)
    assert nested.values().data_ptr() == column.values.buffers()[1].address
    assert nested.offsets().dtype is torch.int64


@pytest.mark.some(4)
@pytest.mark.parametrize("shape", [(None,), (None, 3), (None, None), (2, None)])
@pytest.mark.parametrize("rows", [0, 3])
def test_columns_without_values(shape: tuple[int | None, ...], rows: int) -> None:
    text = ragged_text("float32", shape)
    sizes = tuple(0 if size is None else size for size in shape)
    column = pa.array([], to_type(text))
    if rows:
        found, column = from_tensors(KEY, [torch.zeros(sizes)] * rows)
        assert found.shape == shape
    nested = to_entry(column, text, (rows,))
    assert nested.size(0) == rows
    assert [tuple(one.shape) for one in nested.unbind()] == [sizes] * rows


def test_nested_tensors_of_no_rows() -> None:
    found, column = from_nested(KEY, _no_rows())
    assert found == Ragged("float32", (None, 3))
    assert len(column) == 0


def _no_rows() -> torch.Tensor:
    return torch.nested.nested_tensor_from_jagged(torch.zeros(0, 3), torch.zeros(1, dtype=torch.int64))


def test_tensors_that_make_no_column() -> None:
    for rows in [
        [torch.zeros(1), torch.zeros(2, dtype=torch.int64)],
        [torch.zeros(1), torch.zeros(2, 2)],
        [torch.zeros(1, dtype=torch.complex128), torch.zeros(2, dtype=torch.complex128)],
    ]:
        with pytest.raises(SchemaError, match=r"next\.tokens"):
            from_tensors(KEY, rows)


def test_gradients_and_later_changes_stay_outside() -> None:
    rows = [torch.ones(2, requires_grad=True), torch.ones(1, requires_grad=True)]
    found, column = from_tensors(KEY, rows)
    single = torch.ones(2)
    _, other = from_tensors(KEY, [single])
    single += 1
    assert column.to_pylist() == [[1.0, 1.0], [1.0]]
    assert other.to_pylist() == [[1.0, 1.0]]
    packed = jagged([torch.ones(2), torch.ones(1)])
    _, kept = from_nested(KEY, packed)
    packed.values().add_(1)
    assert kept.to_pylist() == [[1.0, 1.0], [1.0]]
    assert found.dtype == "float32"


def same(first: Any, second: Any) -> bool:
    """Say whether two objects of tensordict have the same parts, whatever they are."""
    if type(first) is not type(second):
        return False
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[name], second[name]) for name in first)
    if isinstance(first, list):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, (NonTensorStack, NonTensorData, TensorDict)):
        return same(first.__dict__, second.__dict__)
    return bool(first == second)


def test_stacks_are_made_as_tensordict_makes_them() -> None:
    values = ["a", None, {"n": [1]}, 2.5]
    assert same(stack_values(values), NonTensorStack(*values))
    assert not same(stack_values(values), NonTensorStack(*values[:3], 2.0))
    assert stack_values([]).batch_size == (0,)


def test_entries_of_batches_and_of_rows() -> None:
    texts = pa.array(["a", None])
    assert to_entry(texts, '"string"', (2,)).tolist() == ["a", None]
    assert to_entry(texts.slice(1), '"string"', ()).data is None
    assert to_values(texts, '"string"') == ["a", None]
    found, column = from_tensors(KEY, ROWS)
    text = ragged_text(found.dtype, found.shape)
    assert to_entry(column.slice(3), text, ()).tolist() == ROWS[3].tolist()
    assert parts(to_values(column, text)) == [row.tolist() for row in ROWS]
    assert np.array_equal(to_entry(column, text, (4,)).offsets().numpy(), [0, 3, 3, 5, 10])


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int32", "float32", "bfloat16", "complex64"])
@pytest.mark.parametrize("shapes", [[(2,), (0,), (3,)], [(2, 3), (0, 3), (1, 3)], [(2, 1), (1, 3), (0, 0)]])
def test_rows_are_arrays_of_the_nested_tensor(dtype: str, shapes: list[tuple[int, ...]]) -> None:
    rows = [
        torch.arange(6)[: int(np.prod(shape))].reshape(shape).to(getattr(torch, dtype)) for shape in shapes
    ]
    found, column = from_tensors(KEY, rows)
    text = ragged_text(found.dtype, found.shape)
    for some in (column, column.slice(1), column.slice(0, 0)):
        arrays = to_ragged_rows(some, text, (len(some),))
        expected = to_arrays(to_values(some, text))
        assert arrays.shape == (len(some),)
        for array, other in zip(arrays, expected, strict=True):
            assert (array.dtype, array.shape, array.tolist()) == (other.dtype, other.shape, other.tolist())
            assert array.flags.writeable
    assert to_ragged_rows(column.slice(0, 2), text, (1, 2)).shape == (1, 2)


def test_jagged_tensors_are_those_of_torch() -> None:
    values, offsets = torch.arange(6.0), np.array([0, 2, 2, 6])
    made = make_jagged(values, offsets)
    expected = torch.nested.nested_tensor_from_jagged(
        values, torch.from_numpy(offsets), min_seqlen=0, max_seqlen=4
    )
    for name in ("dtype", "layout", "device", "ndim", "requires_grad"):
        assert getattr(made, name) == getattr(expected, name)
    assert made.to_padded_tensor(-1).equal(expected.to_padded_tensor(-1))
    assert (made._get_min_seqlen(), made._get_max_seqlen()) == (0, 4)
    assert parts(made * 2) == parts(expected * 2)
    assert made.values().data_ptr() == values.data_ptr()
    assert make_jagged(values[:0], np.zeros(1, np.int64)).size(0) == 0


def test_jagged_tensors_of_equal_lengths_share_their_offsets() -> None:
    layouts, offsets = JaggedLayouts(), np.array([0, 2, 3])
    first, second = (layouts.view(torch.arange(3) + n, offsets.copy()) for n in (0, 10))
    assert parts(first + second) == [[10, 12], [14]]
    assert second.to_padded_tensor(-1).tolist() == [[10, 11], [12, -1]]
    other = layouts.view(torch.arange(3), np.array([0, 1, 3]))
    assert parts(other) == [[0], [1, 2]]
    with pytest.raises(RuntimeError):
        first + other


def test_jagged_tensors_pass_gradients_on() -> None:
    values = torch.ones(3, requires_grad=True)
    (make_jagged(values, np.array([0, 1, 3])) * 2).values().sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [2.0] * 3
