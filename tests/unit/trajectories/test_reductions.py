"""Reductions of many trajectories at once equal torch's of each, to the last bit."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from expstore.trajectories.search import reduce_runs

ONE_BY_ONE = {
    "sum": torch.sum,
    "mean": lambda values: values.double().mean(),
    "max": torch.max,
    "min": torch.min,
    "first": lambda values: values[0],
    "last": lambda values: values[-1],
}


def lay_out(lengths: list[int], shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(lengths))
    values = torch.randn((sum(lengths), *shape), generator=generator) * 100
    return values > 0 if dtype == torch.bool else values.to(dtype)


def test_equals_what_torch_computes() -> None:
    lengths = [1, 7, 250, 7, 999, 1, 64, 250, 250, 2000]
    starts = np.cumsum(lengths) - lengths
    dtypes = [torch.float32, torch.float64, torch.float16, torch.int64, torch.uint8, torch.bool]
    for dtype, shape, word in itertools.product(dtypes, [(), (1,), (3,)], ONE_BY_ONE):
        values = lay_out(lengths, shape, dtype)
        reduced = reduce_runs(values, starts, np.array(lengths), word)
        if word in ("first", "last") and shape == (3,):
            assert reduced is None
            continue
        expected = [
            ONE_BY_ONE[word](values[start : start + n]).reshape(())
            for start, n in zip(starts, lengths, strict=True)
        ]
        np.testing.assert_array_equal(reduced, torch.stack(expected).numpy(), f"{word} {shape} {dtype}")


def test_many_runs_of_one_length_are_computed_in_parts() -> None:
    lengths = [250] * 500
    values = lay_out(lengths, (1,), torch.float32)
    starts = np.arange(0, values.shape[0], 250)
    found = reduce_runs(values, starts, np.array(lengths), "sum")
    np.testing.assert_array_equal(found, [values[s : s + 250].sum().item() for s in starts])


@pytest.mark.parametrize(
    ("values", "lengths"),
    [(torch.zeros(40_000), [40_000]), (torch.zeros(4, dtype=torch.bfloat16), [4]), (torch.zeros(4, 0), [4])],
)
def test_leaves_to_torch_what_only_torch_knows(values: torch.Tensor, lengths: list[int]) -> None:
    assert reduce_runs(values, np.zeros(1, np.int64), np.array(lengths), "sum") is None


def test_nan_is_the_largest_and_the_smallest_as_in_torch() -> None:
    values = torch.tensor([1.0, float("nan"), 2.0])
    for word in ("max", "min"):
        found = reduce_runs(values, np.zeros(1, np.int64), np.array([3]), word)
        assert found is not None
        assert np.isnan(found[0])
