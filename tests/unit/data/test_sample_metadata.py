"""Metadata comes back from JSON as it was given, or is refused."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from expstore.data.sample_metadata import decode_metadata, encode_metadata
from expstore.errors import ArgumentError, SchemaError


def through_json(metadata: Any) -> Any:
    return decode_metadata(json.loads(json.dumps(encode_metadata(metadata))))


def test_tensors_keep_dtype_and_shape() -> None:
    for tensor in [
        torch.zeros(0, 3),
        torch.zeros(2, 0, 4, dtype=torch.int16),
        torch.zeros(0, dtype=torch.complex64),
        torch.tensor(1.5),
        torch.tensor([1 + 2j, -0.5j]).conj(),
        torch.tensor(3j, dtype=torch.complex128),
        torch.tensor([1.5], dtype=torch.bfloat16),
        torch.tensor([2**64 - 1], dtype=torch.uint64),
        torch.tensor([[True], [False]]),
        torch.tensor([float("inf"), -0.0]),
    ]:
        found = through_json({"a": [tensor]})["a"][0]
        assert (found.dtype, found.shape, found.tolist()) == (tensor.dtype, tensor.shape, tensor.tolist())


def test_arrays_become_tensors() -> None:
    assert through_json(np.arange(3)[::-1]).tolist() == [2, 1, 0]
    assert through_json(np.array([1, 2], ">i4")).tolist() == [1, 2]
    assert through_json(np.float32(0.5)).dtype is torch.float32


def test_other_values_are_refused() -> None:
    for metadata, error in [
        (np.ma.masked_array([1, 2], [True, False]), SchemaError),
        (np.array(["text"]), ArgumentError),
        ({"__tensor__": "int64", "values": [1]}, ArgumentError),
        ({1: 2}, ArgumentError),
        ({"a": object()}, ArgumentError),
    ]:
        with pytest.raises(error):
            encode_metadata(metadata)
