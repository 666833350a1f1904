"""Chi-square tests, and the number of draws that detects a probability that is off by 5 %.

Used by tests of samplers. Each test has a false alarm rate of 1 in 10,000 and detects a class that is off by
5 % with probability 0.99; the number of draws follows from the non-central distribution. This module draws
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

FALSE_ALARM, POWER, ERROR = 1e-4, 0.99, 0.05


def below(x: float, degrees: float) -> float:
    """Return the probability of a chi-square value below x: the series of the incomplete gamma function."""
    shape, half = degrees / 2, x / 2
    if half <= 0:
        return 0.0
    term = total = 1 / shape
    n = shape
    while term > total * 1e-17:
        n += 1
        term *= half / n
        total += term
    return total * math.exp(shape * math.log(half) - half - math.lgamma(shape))


def below_when_off(x: float, degrees: float, off: float) -> float:
    """Return the same for the non-central distribution: a Poisson mixture with mean off / 2."""
    return math.fsum(
        math.exp(j * math.log(off / 2) - off / 2 - math.lgamma(j + 1)) * below(x, degrees + 2 * j)
        for j in range(int(off / 2 + 12 * math.sqrt(off) + 20))
    )


def solve(rises: Callable[[float], float], goal: float, high: float) -> float:
    low = 1e-9
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if rises(middle) < goal else (low, middle)
    return high


def limit_of(classes: int) -> float:
    """Return the value that chi-square exceeds by chance once in 10,000 times."""
    return solve(lambda x: below(x, classes - 1), 1 - FALSE_ALARM, 20.0 * classes + 100)


def draws_needed(expected: Floats, when_off: list[Floats]) -> int:
    """Return the number of draws that detects each alternative in `when_off` with the required power."""
    limit, degrees = limit_of(expected.size), expected.size - 1
    needed = solve(lambda off: 1 - below_when_off(limit, degrees, off), POWER, 1000.0)
    return math.ceil(needed / min(float(((other - expected) ** 2 / expected).sum()) for other in when_off))


def one_off(chances: Floats) -> list[Floats]:
    """Return for each class the probabilities if it were 5 % more likely."""
    found = []
    for place in range(chances.size):
        other = chances * (1 - chances[place] * (1 + ERROR)) / (1 - chances[place])
        other[place] = chances[place] * (1 + ERROR)
        found.append(other)
    return found


def chi_square(counts: NDArray[Any], chances: Floats) -> float:
    expected = counts.sum() * chances
    return float(((counts - expected) ** 2 / expected).sum())
