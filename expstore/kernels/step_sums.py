"""Compiled sums over consecutive steps.

Used by transforms, which import it, and thereby numba, when they read the steps of rows. The loops use
positions in arrays, not ids.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.kernels.file_loops import compiled

Floats = NDArray[np.float64]


@compiled("void(float64[:, ::1], boolean[::1], float64)")
def _sum_from_each(values: Floats, ends: Any, gamma: float) -> None:
    for row in range(values.shape[0] - 2, -1, -1):
        if not ends[row]:
            for item in range(values.shape[1]):
                values[row, item] += gamma * values[row + 1, item]


@compiled("void(boolean[:, ::1], boolean[:, ::1], int64[::1])")
def _count_steps(there: Any, ends: Any, steps: Any) -> None:
    for row in range(there.shape[0]):
        count = 0
        while count < there.shape[1] and there[row, count]:
            count += 1
            if ends[row, count - 1]:
                break
        steps[row] = count


def count_steps(there: NDArray[np.bool_], ends: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the number of consecutive existing steps of each row, up to and including an end. Shape `(n,)`.

    Args:
        there: Whether each step exists. Shape `(n, k)`.
        ends: Whether each step is an end. Shape `(n, k)`.
    """
    steps = np.empty(there.shape[0], np.int64)
    _count_steps(there, ends, steps)
    return steps


_SUM = "void({}[:, :, ::1], int64[::1], float64, float64[:, ::1])"


@compiled([_SUM.format("float32"), _SUM.format("float64")])
def _sum_steps(values: Any, steps: Any, gamma: float, totals: Floats) -> None:
    for row in range(values.shape[0]):
        factor = 1.0
        for step in range(steps[row]):
            for item in range(values.shape[2]):
                totals[row, item] += factor * values[row, step, item]
            factor *= gamma


def sum_steps(values: NDArray[Any], steps: NDArray[np.int64], gamma: float) -> Floats:
    """Return the discounted sum of the first steps of each row, float64. Shape `(n, *row shape)`.

    Args:
        values: float32 or float64. Shape `(n, k, *row shape)`.
        steps: Number of steps of each row that are summed. Shape `(n,)`.
        gamma: Discount factor per step.
    """
    values = np.ascontiguousarray(values)
    totals = np.zeros((values.shape[0], *values.shape[2:]))
    flat = values.reshape(*values.shape[:2], math.prod(values.shape[2:]))
    _sum_steps(flat, steps, gamma, totals.reshape(flat.shape[0], flat.shape[2]))
    return totals


def sum_from_each(values: Floats, ends: NDArray[np.bool_], gamma: float) -> Floats:
    """Return the discounted sum from each row on, up to and including the next end; `values` is overwritten.

    Args:
        values: The value of each row. Shape `(n, items)`, C-contiguous.
        ends: Rows that are the last ones of a sum. Shape `(n,)`.
        gamma: Discount factor per row.
    """
    _sum_from_each(values, ends, gamma)
    return values
