"""Rows that are TensorDicts, copied by generated code: exactly those that need no conversion."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict

from expstore.data.row_cells import compile_put_tensordict

DTYPES = (
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "float32", "float64", "complex64"),
)


@pytest.mark.some(6)
@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (1, 1)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_copied_bit_by_bit(dtype: str, shape: tuple[int, ...]) -> None:
    column = np.zeros((3, *shape), dtype)
    put = compile_put_tensordict({("a",): column})
    bits = np.random.default_rng(0).integers(0, 256, column[1].nbytes, np.uint8)
    values = (bits % 2 if dtype == "bool" else bits).view(dtype).reshape(shape)
    assert put(1, TensorDict({"a": torch.from_numpy(values.copy())}))
    assert column[1].tobytes() == values.tobytes()
    assert not column[0].any()
    assert not column[2].any()


@pytest.mark.parametrize("offset", [0, 1])
def test_columns_may_lie_at_any_address_and_tensors_have_any_strides(offset: int) -> None:
    memory = np.zeros(offset + 6 * 8 + 8, np.uint8)[offset:]
    columns = {
        ("a",): memory[:48].view(np.float64).reshape(1, 2, 3),
        ("next", "b"): memory[48:].view(np.int64).reshape(1, 1),
    }
    given = torch.arange(6.0, dtype=torch.float64).reshape(3, 2).T
    put = compile_put_tensordict(columns)
    assert put(0, TensorDict({"a": given, "next": {"b": torch.tensor([-(2**62)])}}))
    assert columns["a",][0].tolist() == given.tolist()
    assert columns["next", "b"].item() == -(2**62)


NUMBER = torch.tensor([3])
VECTOR = torch.ones(2)


def test_what_needs_a_closer_look_is_refused() -> None:
    for row in [
        TensorDict({"a": VECTOR.double(), "next": {"b": NUMBER}}),
        TensorDict({"a": torch.ones(3), "next": {"b": NUMBER}}),
        TensorDict({"a": torch.ones(1, 2), "next": {"b": NUMBER}}),
        TensorDict({"a": VECTOR.clone().requires_grad_(), "next": {"b": NUMBER}}),
        TensorDict({"a": VECTOR.to("meta"), "next": {"b": NUMBER}}),
        TensorDict({"a": VECTOR.to_sparse(), "next": {"b": NUMBER}}),
        TensorDict({"a": VECTOR, "next": {"b": NUMBER.int()}}),
        TensorDict({"a": VECTOR, "next": {"b": NUMBER[0]}}),
        TensorDict({"a": VECTOR, "next": {"b": NUMBER.expand(2)}}),
        TensorDict({"a": VECTOR, "next": {"b": NUMBER.to("meta")}}),
        TensorDict({"a": VECTOR, "next": {"b": {"c": NUMBER}}}),
        TensorDict({"a": VECTOR, "next": {"b": NonTensorData(3)}}),
        TensorDict({"a": VECTOR, "next": {"b": NUMBER, "c": NUMBER}}),
        TensorDict({"a": VECTOR, "next": {"c": NUMBER}}),
        TensorDict({"a": VECTOR, "next": NUMBER}),
        TensorDict({"a": VECTOR}),
        TensorDict({"a": {"x": VECTOR}, "next": {"b": NUMBER}}),
        TensorDict({"a": VECTOR, "next": {"b": NUMBER}, "c": NUMBER}),
        TensorDict({"a": VECTOR[None], "next": {"b": NUMBER[None]}}, [1]),
        TensorDict({}),
        LazyStackedTensorDict(TensorDict({"a": VECTOR, "next": {"b": NUMBER}})),
    ]:
        columns = {("a",): np.zeros((1, 2), np.float32), ("next", "b"): np.zeros((1, 1), np.int64)}
        put = compile_put_tensordict(columns)
        assert put(0, TensorDict({"a": VECTOR, "next": {"b": NUMBER}}))
        assert not put(0, row)


def test_conjugates_and_negatives_that_are_not_computed_yet_are_refused_or_right() -> None:
    number = torch.tensor([1 + 2j])
    column = np.zeros((1, 1), np.complex64)
    assert not compile_put_tensordict({("a",): column})(0, TensorDict({"a": number.conj()}))
    floats = np.zeros((1, 1), np.float32)
    assert not compile_put_tensordict({("a",): floats})(0, TensorDict({"a": number.conj().imag}))
