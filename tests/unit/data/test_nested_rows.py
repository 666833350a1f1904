"""Rows of TensorDicts with nested tensors are indexed and joined as in torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from expstore.data.nested_rows import join_rows, split_rows, take_rows
from expstore.errors import SchemaError
from tests.support.variable_length import buffer, jagged, plain, rollouts


def test_rows_are_those_of_indexing() -> None:
    for rows in [
        slice(2, 7), slice(None, None, 3), slice(5, 5), torch.tensor([5, 0, 5]), np.array([], np.int64),
        [9, -1], torch.arange(10) % 3 == 0,
    ]:  # fmt: skip
        batch = buffer()[:10]
        numbers = torch.arange(10)[rows].tolist()
        found = take_rows(batch, rows)
        assert found.batch_size == (len(numbers),)
        assert (plain(found) if numbers else []) == [plain(rollouts(n, 1))[0] for n in numbers]
        assert found["tokens"].size(0) == len(numbers)
        if numbers:
            assert found["tokens"].to_padded_tensor(0).shape[1] == max(n % 6 for n in numbers)


def test_every_row_is_in_one_run() -> None:
    batch = buffer()[:10]
    parts = split_rows(batch, [3, 0, 7])
    assert [part.batch_size[0] for part in parts] == [3, 0, 7]
    assert plain(parts[0]) + plain(parts[2]) == plain(batch)
    for lengths in ([3, 6], [3, 8], [11, -1], []):
        with pytest.raises(SchemaError, match="10 rows cannot be split"):
            split_rows(batch, lengths)


def test_rows_without_nested_tensors_are_indexed_as_before() -> None:
    batch = TensorDict({"a": torch.arange(4)}, [4])
    assert take_rows(batch, slice(1, 3))["a"].tolist() == [1, 2]
    assert join_rows([batch, batch])["a"].tolist() == [0, 1, 2, 3] * 2
    with pytest.raises(IndexError):
        take_rows(buffer()[:3], [7])


def test_batches_are_joined() -> None:
    rb = buffer()
    parts = [rb[:3], rb[5:5], take_rows(rb[:], slice(8, 12)), rb[39:]]
    joined = join_rows(parts)
    assert plain(joined) == [plain(rollouts(n, 1))[0] for n in (0, 1, 2, 8, 9, 10, 11, 39)]
    assert joined["tokens"].to_padded_tensor(0).shape == (8, 5)


def test_tensors_that_are_no_longer_in_one_piece() -> None:
    narrow = torch.nested.narrow(
        torch.arange(21.0).reshape(3, 7),
        1,
        torch.tensor([0, 1, 2]),
        torch.tensor([2, 3, 1]),
        layout=torch.jagged,
    )
    batch = TensorDict({"a": narrow}, [3])
    assert [one.tolist() for one in take_rows(batch, [2, 0])["a"].unbind()] == [[16.0], [0.0, 1.0]]
    found = join_rows([batch, TensorDict({"a": jagged([torch.ones(1)])}, [1])])["a"]
    assert [one.tolist() for one in found.unbind()] == [[0.0, 1.0], [8.0, 9.0, 10.0], [16.0], [1.0]]


def test_batches_of_different_kinds_are_not_joined() -> None:
    one = TensorDict({"a": jagged([torch.ones(1), torch.ones(2)])}, [2])
    with pytest.raises(SchemaError, match="in some batches only"):
        join_rows([one, TensorDict({"a": torch.ones(2, 2)}, [2])])
    with pytest.raises(SchemaError, match="different kinds"):
        join_rows([one, TensorDict({"a": jagged([torch.ones(1, dtype=torch.int64)])}, [1])])
