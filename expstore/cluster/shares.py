"""How many rows of a batch each shard draws, and how their weights are corrected.

The number of rows of shard k is multinomial with probability m_k / M, where m_k is the mass in the last
answer of shard k, and M their sum. The shard draws row i with probability w_i / n_k, where n_k is its mass by
then. So a row is drawn with probability (m_k / M) (w_i / n_k), also if masses have changed meanwhile, and
weights follow from this probability. This module sends no requests.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from expstore.core.draws import Draws
from expstore.core.values import IntArray, Mass

#: Second word of the random key that divides batches among shards; no stream of a storage uses it.
_SHARES = (1 << 62) + 1


def derive_seed(seed: int, *path: int) -> int:
    """Return the seed of a shard's own draws: different shards never use the same random numbers."""
    return int(np.random.SeedSequence([seed, *path]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def draw_counts(
    seed: int, number: tuple[int, int], batches: int, units: int, totals: NDArray[np.float64]
) -> IntArray:
    """Draw how many units of each batch every shard draws. Shape `(batches, shards)`.

    Args:
        seed: Seed of the draws.
        number: The number of the first batch, as a pair of words.
        batches: Number of batches.
        units: Number of units of a batch: of rows, or of slices.
        totals: Mass of each shard, of which at least one is above 0. Shape `(shards,)`.
    """
    # Only shards with mass: the last entry of a multinomial gets what rounding leaves.
    draws, some = Draws(seed, _SHARES), np.flatnonzero(totals)
    chances = totals[some] / totals.sum()
    counts = np.zeros((batches, totals.size), np.int64)
    counts[:, some] = draws.numbers(number).multinomial(units, chances, batches)
    return counts


def draw_rest(seed: int, number: tuple[int, int], rows: int, left: IntArray) -> IntArray:
    """Draw how many rows of a batch every shard draws, if no row is drawn twice. Shape `(shards,)`.

    They are multivariate hypergeometric: the batch is a sample without replacement of what all have left.

    Args:
        seed: Seed of the draws.
        number: The number of the batch, as a pair of words.
        rows: Rows of the batch; fewer are drawn if fewer are left.
        left: Rows that each shard has left. Shape `(shards,)`.
    """
    numbers, wanted = Draws(seed, _SHARES).numbers(number), min(rows, int(left.sum()))
    counts: IntArray = numbers.multivariate_hypergeometric(left, wanted, method="marginals")
    return counts


def find_factors(assumed: NDArray[np.float64], masses: Sequence[Mass | None]) -> NDArray[np.float64] | None:
    """Return the factor of each shard's `priority_weight`; None if there are no weights. Shape `(shards,)`.

    A shard's weights are relative to its own least probable row. The factors make them relative to the least
    probable row of all shards, so that the largest possible weight is 1.

    Args:
        assumed: The mass of each shard by which the batch was divided; 0 if it took no part. Shape
            `(shards,)`.
        masses: What each shard has drawn from; None if it took no part.
    """
    beta = next((mass.beta for mass in masses if mass is not None), None)
    if beta is None:
        return None
    chances = np.full(
        assumed.size, np.inf
    )  # of the least probable row of each shard, times the sum of masses
    for number, mass in enumerate(masses):
        if mass is not None and assumed[number] > 0 and mass.total > 0:
            chances[number] = assumed[number] / mass.total * mass.smallest
    factors = np.ones(assumed.size)
    known = np.isfinite(chances)
    factors[known] = (chances[known] / chances[known].min()) ** -beta
    return factors
