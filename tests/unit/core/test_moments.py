"""Moments of rows and of subsets of rows."""

from __future__ import annotations

import numpy as np
import pytest

from expstore.core.moments import Moments


@pytest.mark.some(4)
@pytest.mark.parametrize("dtype", ["bool", "uint8", "int64", "uint64", "float16", "float32", "float64"])
@pytest.mark.parametrize("shape", [(), (1,), (3, 2)])
def test_parts_merge_to_the_whole(dtype: str, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 2 if dtype == "bool" else 200, (50, *shape)).astype(dtype)
    parts = [Moments.of(part) for part in np.split(rows, [1, 2, 30])]
    found = Moments.merge([Moments.merge(parts[:3]), parts[3]])
    assert found.count == 50
    values = rows.astype(np.float64)
    np.testing.assert_allclose(found.mean, values.mean(axis=0), rtol=1e-13)
    np.testing.assert_allclose(found.squares, values.var(axis=0) * 50, rtol=1e-12)
    np.testing.assert_array_equal(found.smallest, rows.min(axis=0))
    np.testing.assert_array_equal(found.largest, rows.max(axis=0))
    assert found.smallest.dtype == found.largest.dtype == rows.dtype
    assert found.mean.shape == found.squares.shape == found.largest.shape == shape


def test_a_large_mean_does_not_hide_the_spread() -> None:
    rows = 1e9 + np.array([0.0, 1.0, 2.0, 3.0] * 25)
    found = Moments.merge([Moments.of(part) for part in np.split(rows, 10)])
    assert found.squares / 100 == pytest.approx(1.25, rel=1e-6)  # sums of squares would give 0 or 128


def test_nan_and_infinity_stay() -> None:
    rows = np.array([[np.nan, np.inf, 1.0], [0.0, 2.0, 3.0]])
    for found in (Moments.of(rows), Moments.merge([Moments.of(rows[:1]), Moments.of(rows[1:])])):
        assert np.isnan([*found.mean[:2], *found.squares[:2], found.smallest[0], found.largest[0]]).all()
        assert (found.mean[2], found.squares[2]) == (2.0, 2.0)
        assert (found.smallest[1], found.largest[1]) == (2.0, np.inf)
