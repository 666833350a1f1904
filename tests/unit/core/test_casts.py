"""Numbers that a cast to floats has lost are found."""

from __future__ import annotations

import numpy as np
import pytest

from expstore.core.casts import cast_floats, find_lost


@pytest.mark.guarantee(
    "rows/refused",
    "Values that a field would round, overflow or lose are refused, and a refused `extend` has written "
    "nothing.",
)
def test_lost_numbers_are_found() -> None:
    for values, dtype, lost in [
        (np.array([1, 2**53 + 1, 2**53 + 3]), "float64", 2**53 + 1),
        (np.array([-(2**53) - 1]), "float64", -(2**53) - 1),
        (np.array([2**63 - 1]), "float64", 2**63 - 1),
        (np.array([2**64 - 1], np.uint64), "float64", 2**64 - 1),
        (np.array([[2**24], [2**24 + 1]], np.int32), "float32", 2**24 + 1),
        (np.array([70000]), "float16", 70000),
        (np.array([2**24 + 1]), "complex64", 2**24 + 1),
        (np.array([0.1, -1e300]), "float32", -1e300),
        (np.array([1e5], np.float32), "float16", 1e5),
    ]:
        assert find_lost(values, cast_floats(values, dtype)) == lost


def test_rounded_floats_and_exact_integers_are_not_lost() -> None:
    for values, dtype in [
        (np.array([2**53, 2**62, -(2**63), 0]), "float64"),
        (np.array([2**63], np.uint64), "float64"),
        (np.array([-(2**15)], np.int16), "float32"),
        (np.array([0.1, np.inf, -np.inf, np.nan, 1e-300]), "float32"),
        (np.array([True]), "float16"),
        (np.array([1.5]), "int64"),
        (np.array([], np.int64), "float64"),
    ]:
        assert find_lost(values, cast_floats(values, dtype)) is None
