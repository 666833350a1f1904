"""Count, mean, spread and range of values, merged from those of parts.

Pure arithmetic, used for the statistics of fields: parts with unchanged values need not be read again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from expstore.core.values import Array


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """Count, mean, squared deviations, minimum and maximum of rows, for each element of a row.

    Args:
        count: Number of rows; at least 1.
        mean: Mean of each element. Shape of a row, float64.
        squares: Sum of the squared deviations from the mean. Shape of a row, float64.
        smallest: Minimum of each element. Shape and dtype of a row.
        largest: Maximum of each element. Shape and dtype of a row.

    Example:
        >>> from expstore.core.moments import Moments
        >>> halves = [Moments.of(np.array([1.0, 2.0])), Moments.of(np.array([3.0]))]
        >>> whole = Moments.merge(halves)
        >>> whole.count, float(whole.mean), float(whole.squares), float(whole.largest)
        (3, 2.0, 2.0, 3.0)
    """

    count: int
    mean: NDArray[np.float64]
    squares: NDArray[np.float64]
    smallest: Array
    largest: Array

    @classmethod
    def of(cls, rows: Array) -> Self:
        """Compute the moments of rows in float64.

        A NaN makes all of them NaN; an infinity makes mean and squares NaN.

        Args:
            rows: At least one row of numbers or bools. Shape `(n, *row shape)`.
        """
        count, shape = len(rows), rows.shape[1:]
        rows = rows.reshape(count, -1)
        with np.errstate(invalid="ignore", over="ignore"):
            # Use deviations from the first row: the mean of equal values is then exact, and large values
            # cancel.
            deviations = rows.astype(np.float64)
            first = deviations[0].copy()
            deviations -= first
            offset = deviations.mean(axis=0)
            deviations -= offset
            squares = np.einsum("ij,ij->j", deviations, deviations)
        return cls(
            count,
            (first + offset).reshape(shape),
            squares.reshape(shape),
            rows.min(axis=0).reshape(shape),
            rows.max(axis=0).reshape(shape),
        )

    @classmethod
    def merge(cls, parts: Sequence[Self]) -> Self:
        """Return the moments of all rows of the parts, by the formula of Chan, Golub and LeVeque.

        Args:
            parts: At least one, all of the same row shape and dtype.
        """
        if len(parts) == 1:
            return parts[0]
        counts = np.array([part.count for part in parts])
        total = int(counts.sum())
        weights = counts.reshape(-1, *(1,) * parts[0].mean.ndim)
        means = np.stack([part.mean for part in parts])
        with np.errstate(invalid="ignore", over="ignore"):
            deviations = means - means[0]
            offset = (weights * deviations).sum(axis=0) / total
            deviations -= offset
            between = (weights * deviations * deviations).sum(axis=0)
        return cls(
            total,
            np.asarray(means[0] + offset),
            np.asarray(np.sum([part.squares for part in parts], axis=0) + between),
            np.min([part.smallest for part in parts], axis=0),
            np.max([part.largest for part in parts], axis=0),
        )
