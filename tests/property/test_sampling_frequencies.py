"""Frequencies of sampled rows match the distribution of each sampler, in every kind of store.

Each check is a chi-square test over rows that detects a row or weight that is off by 5 % (`chances`). Weights
are compared with the same probabilities, computed from priorities.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from expstore import (
    MemoryStorage,
    PrioritizedSampler,
    RandomSampler,
    RecencySampler,
    SamplerWithoutReplacement,
    StalenessAwareSampler,
    TensorDictReplayBuffer,
)
from expstore.core.draws import Draws
from expstore.core.id_set import IdSet
from expstore.samplers import Sampler
from expstore.samplers.without_replacement import permute
from tests.support.batches import memory_buffer, numbered_rows
from tests.support.chi_square import (
    ERROR,
    Floats,
    below,
    below_when_off,
    chi_square,
    draws_needed,
    limit_of,
    one_off,
)

ROWS = 16
BATCH = 1 << 16


# -- the chi-square distribution ------------------------------------------------------------------------


def test_the_distribution() -> None:
    """Values from tables (Abramowitz and Stegun 26.8; Pearson and Hartley for power)."""
    assert below(18.307, 10) == pytest.approx(0.95, abs=1e-5)
    assert below(37.697, 15) == pytest.approx(0.999, abs=1e-5)
    assert limit_of(2) == pytest.approx(15.137, abs=1e-3)
    assert below_when_off(3.8415, 1, 7.849) == pytest.approx(0.2, abs=1e-4)
    assert below_when_off(18.307, 10, 16.241) == pytest.approx(0.2, abs=1e-4)


# -- the shapes of a store ------------------------------------------------------------------------------


# The version is of use to one sampler only.
rows = partial(numbered_rows, policy_version=lambda number: number % 5)


def filling(sampler: Sampler) -> TensorDictReplayBuffer:
    return memory_buffer(50, seed=1, sampler=sampler, rows=rows(ROWS))


def wrapped(sampler: Sampler) -> TensorDictReplayBuffer:
    rb = memory_buffer(ROWS, seed=1, sampler=sampler)
    for count in (10, ROWS + 5, 2 * ROWS, 7, 4110):  # round the spare slots, too
        rb.extend(rows(count))
        rb.sample(1)
    return rb


def emptied(sampler: Sampler) -> TensorDictReplayBuffer:
    rb = memory_buffer(50, seed=1, sampler=sampler, rows=rows(30))
    rb.sample(1)
    rb.empty()
    rb.extend(rows(ROWS))
    return rb


def with_deleted_rows(sampler: Sampler) -> TensorDictReplayBuffer:
    """As a repair leaves it, in a ring that is full: the oldest ids and two runs in the middle are gone."""
    rb = memory_buffer(24, seed=1, sampler=sampler)
    storage: Any = rb.storage
    rb.extend(rows(30))
    storage._state.stored = replace(storage.window, deleted=IdSet.of([(3, 8), (11, 11), (20, 24)]))
    return rb


def unbounded(sampler: Sampler) -> TensorDictReplayBuffer:
    rb = memory_buffer(None, seed=1, sampler=sampler, rows=rows(50))
    rb.storage._retire(50 + 7 - ROWS)
    rb.extend(rows(7))
    return rb


SHAPES = {shape.__name__: shape for shape in (filling, wrapped, emptied, with_deleted_rows, unbounded)}


# -- the laws -------------------------------------------------------------------------------------------


@dataclass
class Case:
    """A sampler, and the chances that it promises.

    Args:
        make: Makes it.
        weigh: Chances of the readable rows, oldest first, up to a factor.
        prepare: Is called with the buffer when its rows are there.
        beta: Of the weights in batches; None: they have none.
    """

    make: Callable[[], Sampler]
    weigh: Callable[[TensorDictReplayBuffer], Floats]
    prepare: Callable[[TensorDictReplayBuffer], object] = lambda rb: None
    beta: float | None = None

    def chances(self, rb: TensorDictReplayBuffer) -> Floats:
        weights = self.weigh(rb)
        assert weights.size == ROWS
        return weights / weights.sum()


PRIORITIES = np.random.default_rng(9).uniform(0.3, 2.0, ROWS).astype(np.float32)


def set_priorities(rb: TensorDictReplayBuffer) -> None:
    """In three steps, of which some come before the first batch and some after."""
    ids = rb.storage.window.ids()
    rb.update_priority(id=ids[:7], priority=PRIORITIES[:7] * 3)
    rb.sample(1)
    rb.update_priority(id=ids[5:], priority=PRIORITIES[5:])
    rb.update_priority(id=ids[:5], priority=PRIORITIES[:5])


def prioritized(alpha: float, beta: float, eps: float, **keywords: Any) -> Case:
    return Case(
        lambda: PrioritizedSampler(None, alpha, beta, eps, **keywords),
        lambda rb: (PRIORITIES.astype(np.float64) + eps) ** alpha,
        set_priorities,
        beta,
    )


def reweighed(rb: TensorDictReplayBuffer) -> None:
    set_priorities(rb)
    rb.sample(1)
    rb.sampler.alpha, rb.sampler.beta = 0.4, 0.8  # type: ignore[attr-defined]


def staleness(rb: TensorDictReplayBuffer) -> Floats:
    ids = rb.storage.window.ids()
    return np.maximum(6 - rb[rb.storage.geometry.index_of(ids)]["policy_version"].numpy(), 0).astype(
        np.float64
    )


def consume(rb: TensorDictReplayBuffer) -> None:
    rb.sample(1)
    rb.sampler.consumer_version = 6  # type: ignore[attr-defined]


def newest_first(half_life: float, newest: int = ROWS) -> Callable[[TensorDictReplayBuffer], Floats]:
    ages = np.arange(ROWS)[::-1]
    return lambda rb: np.where(ages < newest, 0.5 ** (ages / half_life), 0.0)


CASES = {
    "random": Case(RandomSampler, lambda rb: np.ones(ROWS)),
    "prioritized": prioritized(0.6, 0.4, 1e-8),
    "prioritized-flat": prioritized(0.0, 1.0, 1e-8, dtype=torch.float64),
    "prioritized-steep": prioritized(1.3, 1.0, 0.5, dtype=torch.float64, reduction="mean"),
    "prioritized-within": prioritized(0.7, 0.0, 0.0, max_priority_within_buffer=True),
    "prioritized-reset": replace(
        prioritized(0.4, 0.8, 1e-8), make=lambda: PrioritizedSampler(None, 1.0, 0.1), prepare=reweighed
    ),
    "staleness": Case(StalenessAwareSampler, lambda rb: 1 / (staleness(rb) + 1), consume),
    "staleness-cut": Case(
        lambda: StalenessAwareSampler(max_staleness=4, staleness_weight_fn=lambda s: torch.exp(-s / 3)),
        lambda rb: np.where(staleness(rb) <= 4, np.exp(-staleness(rb) / 3), 0.0),
        lambda rb: setattr(rb.sampler, "consumer_version", 6),
    ),
    "recency": Case(lambda: RecencySampler(half_life=7), newest_first(7)),
    "recency-newest": Case(lambda: RecencySampler(half_life=9, newest=11), newest_first(9, 11)),
    "recency-uniform": Case(lambda: RecencySampler(newest=10), newest_first(1e9, 10)),
}


def drawn(rb: TensorDictReplayBuffer, size: int) -> tuple[NDArray[np.int64], NDArray[Any] | None]:
    """Return how often each readable row comes, oldest first, and the weights of one batch by row."""
    ids = rb.storage.window.ids()
    counts = np.zeros(ROWS, np.int64)
    weights = None
    for _ in range(-(-size // BATCH)):
        _, info = rb.sample(BATCH, return_info=True)
        places = np.searchsorted(ids, info["id"].numpy())
        assert (ids[places] == info["id"].numpy()).all()
        counts += np.bincount(places, minlength=ROWS)
        if "priority_weight" in info:
            weights = np.full(ROWS, np.nan)
            weights[places] = info["priority_weight"].numpy()
    return counts, weights


@pytest.mark.some(2)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", CASES)
def test_frequencies_and_weights(name: str, shape: str) -> None:
    case = CASES[name]
    rb = SHAPES[shape](case.make())
    case.prepare(rb)
    chances = case.chances(rb)
    some = chances > 0
    size = draws_needed(chances[some], one_off(chances[some]))
    counts, weights = drawn(rb, size)
    assert not counts[~some].any()
    assert chi_square(counts[some], chances[some]) < limit_of(int(some.sum()))
    if case.beta is not None:
        expected = (chances / chances.min()) ** -case.beta
        np.testing.assert_allclose(weights, expected, rtol=1e-6)


class Leaning(RandomSampler):
    """A sampler that is wrong by 5 % in one row, the newest."""

    def sample(self, storage: Any, batch_size: int, generator: np.random.Generator) -> Any:
        found = super().sample(storage, batch_size, generator)
        moved = generator.random(batch_size) < ERROR / (ROWS - 1)
        return replace(found, ids=np.where(moved, storage.last, found.ids))


def test_an_error_of_five_percent_in_one_row_is_seen() -> None:
    """In a sampler that leans, and in one that is told a priority too high for that."""
    for name, off in (("random", None), ("prioritized", 7), ("prioritized-steep", int(PRIORITIES.argmin()))):
        case = CASES[name]
        rb = wrapped(Leaning() if off is None else case.make())
        case.prepare(rb)
        chances = case.chances(rb)
        size = draws_needed(chances, one_off(chances))
        if off is not None:
            alpha, eps = {"prioritized": (0.6, 1e-8), "prioritized-steep": (1.3, 0.5)}[name]
            factor = (1 + ERROR / (1 - chances[off])) ** (1 / alpha)
            raised = (float(PRIORITIES[off]) + eps) * factor - eps
            rb.update_priority(id=rb.storage.window.ids()[off : off + 1], priority=raised)
        assert chi_square(drawn(rb, size)[0], chances) > limit_of(ROWS), name


# -- without replacement --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize("shape", SHAPES)
def test_each_place_of_a_pass_is_as_likely_for_every_row(shape: str) -> None:
    """Every pass holds every row once; which half of the rows comes first, second and last is the law.

    The rows are halved in four ways, by a bit of their number each.
    """
    rb = SHAPES[shape](SamplerWithoutReplacement())
    ids, places, even_chances = rb.storage.window.ids(), [0, 1, ROWS - 1], np.full(2, 1 / 2)
    passes = draws_needed(even_chances, one_off(even_chances))
    generator = Draws(1).generator(0)  # of passes it is only asked for its key
    chosen = np.empty((passes, ROWS), np.int64)
    sampler: Any = rb.sampler
    while sampler._position:  # to the end of a pass that may have begun
        sampler.sample(rb.storage, ROWS, generator)
    for number in range(passes):
        chosen[number] = sampler.sample(rb.storage, ROWS, generator).ids
    found = np.searchsorted(ids, chosen)
    assert (ids[found] == chosen).all()
    assert (np.sort(found, axis=1) == np.arange(ROWS)).all()
    for place in places:
        for bit in range(4):
            counts = np.bincount(found[:, place] >> bit & 1, minlength=2)
            assert chi_square(counts, even_chances) < limit_of(2)


def test_the_first_rows_of_a_long_pass() -> None:
    """A pass over so many rows is not written down; a batch is a small part of it."""
    size, batch = 20_000, 400
    chances = np.full(8, 1 / 8)
    found = [
        permute(np.arange(batch), size, key=(1, number))
        for number in range(-(-draws_needed(chances, one_off(chances)) // batch))
    ]
    counts = np.bincount(np.concatenate(found) * 8 // size, minlength=8)
    assert chi_square(counts, chances) < limit_of(8)


# -- by weight, and no row twice in a batch -------------------------------------------------------------


def distribution_without_replacement(
    rows_of: list[int], weights: list[float], size: int
) -> dict[tuple[int, ...], float]:
    """Return the chance of so many rows of each class among `size`, drawn one by one (Wallenius 1963)."""
    case = {(0,) * len(rows_of): 1.0}
    for _ in range(size):
        then: dict[tuple[int, ...], float] = {}
        for taken, chance in case.items():
            mass = [w * (n - k) for w, n, k in zip(weights, rows_of, taken, strict=True)]
            for place, share in enumerate(mass):
                if share > 0:
                    key = tuple(k + (place == at) for at, k in enumerate(taken))
                    then[key] = then.get(key, 0.0) + chance * share / math.fsum(mass)
        case = then
    return case


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("rows_of", "weights", "size"),
    [
        pytest.param([20, 20, 5], [1.0, 0.5, 0.25], 12, id="few-of-many"),
        # After the five heavy rows come too few others in a few rounds: the rest is drawn otherwise.
        pytest.param([5, 20, 20], [1.0, 0.02, 0.01], 20, id="most-of-the-weight"),
        pytest.param([3, 4, 5], [1.0, 0.7, 0.4], 9, id="most-rows"),
    ],
)
def test_batches_without_repeated_rows(rows_of: list[int], weights: list[float], size: int) -> None:
    def find_distribution(given: list[float]) -> Floats:
        case = distribution_without_replacement(rows_of, given, size)
        found = [math.fsum(chance for key, chance in case.items() if key[1] == n) for n in range(size + 1)]
        return np.array(found)

    chances = find_distribution(weights)
    off = find_distribution([weights[0], weights[1] * (1 + ERROR), weights[2]])
    common = np.flatnonzero(chances > 1e-3)  # rare numbers make one class with the next common one

    def merged(values: NDArray[Any]) -> NDArray[Any]:
        parts = np.add.reduceat(values, common)
        parts[0] += values[: common[0]].sum()
        return parts

    needed = draws_needed(merged(chances), [merged(off)])
    table = torch.tensor(weights)
    sampler = StalenessAwareSampler(staleness_weight_fn=lambda s: table[s.long()])
    sampler.consumer_version = 2
    rb = TensorDictReplayBuffer(storage=MemoryStorage(100), sampler=sampler)
    versions = torch.cat([torch.full((n,), 2 - place) for place, n in enumerate(rows_of)])
    order = torch.randperm(versions.numel(), generator=torch.Generator().manual_seed(4))
    rb.extend(TensorDict({"policy_version": versions[order]}, [versions.numel()]))
    draws, counts = Draws(3), np.zeros(size + 1, np.int64)
    for number in range(needed):
        found = sampler.sample(rb.storage, size, draws.generator(number))
        assert np.unique(found.ids).size == size
        counts[int((found.info[("staleness",)] == 1).sum())] += 1
    assert chi_square(merged(counts), merged(chances)) < limit_of(common.size)
