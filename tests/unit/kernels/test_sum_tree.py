"""The sum tree compared with plain sums: totals, lookups, growth, and no accumulated rounding errors."""

from __future__ import annotations

import numpy as np
import pytest

from expstore.kernels.sum_tree import SumTree, raise_priorities


@pytest.mark.parametrize("size", [1, 8, 9, 4097])
def test_places_lie_where_the_running_sum_passes_the_mass(size: int) -> None:
    rng = np.random.default_rng(size)
    weights = np.where(rng.random(size) < 0.3, 0.0, rng.random(size))
    weights[rng.integers(size)] = 0.5
    tree = SumTree(size)
    tree.fill(weights)
    assert tree.total == pytest.approx(weights.sum(), rel=1e-12)
    assert tree.smallest == weights[weights > 0].min()
    masses = rng.random(2000) * tree.total
    places, found = tree.find(masses)
    np.testing.assert_array_equal(found, weights[places])
    ends = np.cumsum(weights)
    assert (masses <= ends[places] * (1 + 1e-12)).all()
    assert (masses >= (ends - weights)[places] * (1 - 1e-12)).all()


def test_one_by_one_and_all_at_once_give_the_same_tree() -> None:
    rng = np.random.default_rng(3)
    weights = rng.random(5000)
    whole, single = SumTree(5000), SumTree(5000)
    whole.fill(weights)
    for places in np.array_split(rng.permutation(5000), 200):
        single.set(places, rng.random(places.size))
        single.set(places, weights[places])
    assert single.total == whole.total
    assert single.smallest == whole.smallest
    masses = rng.random(5000) * whole.total
    np.testing.assert_array_equal(single.find(masses)[0], whole.find(masses)[0])


def test_a_place_without_weight_is_never_found() -> None:
    tree = SumTree(4096)
    tree.set(np.array([17, 3000]), np.array([1e-300, 1.0]))
    edges = np.array([0.0, np.nextafter(tree.total, 0), tree.total, 2 * tree.total, 1e-301])
    assert set(tree.find(edges)[0].tolist()) <= {17, 3000}
    tree.set(np.array([17, 3000]), np.zeros(2))
    assert tree.total == 0.0
    assert tree.smallest == np.inf


def test_growing_keeps_weights() -> None:
    tree = SumTree(10)
    tree.set(np.arange(10), np.arange(1.0, 11.0))
    tree.grow(1000)
    assert tree.size >= 1000
    assert tree.total == 55.0
    assert tree.find(np.array([54.5]))[0].tolist() == [9]


def test_a_million_updates_carry_no_error() -> None:
    """Sums are made of their children each time; differences that are added up would drift."""
    rng = np.random.default_rng(5)
    tree = SumTree(2000)
    for _ in range(50):
        tree.set(rng.integers(0, 2000, 20_000), rng.random(20_000) ** 20)
    for _ in range(500):
        tree.set(rng.integers(0, 2000, 100), 10.0 ** rng.uniform(-12, 6, 100))
        tree.set(rng.integers(0, 2000, 10), np.zeros(10))
    assert abs(tree.total / tree.weights.sum() - 1) < 1e-9
    assert (tree.weights == 0).sum() > 100
    places, weights = tree.find(np.append(rng.random(100_000), [0, 1, 2]) * tree.total)
    assert (tree.weights[places] > 0).all()
    assert (weights > 0).all()
    tree.set(np.arange(1, 2000), np.zeros(1999))
    assert tree.total == tree.weights[0]


def test_powers_do_not_depend_on_how_many_are_made() -> None:
    priorities = np.random.default_rng(7).random(1000).astype(np.float32)
    places = np.arange(1000)
    whole = raise_priorities(priorities, places, eps=1e-8, alpha=0.6)
    single = [raise_priorities(priorities, places[i : i + 1], eps=1e-8, alpha=0.6)[0] for i in places]
    np.testing.assert_array_equal(whole, single)
    np.testing.assert_allclose(whole, (priorities.astype(np.float64) + 1e-8) ** 0.6, rtol=1e-14)


@pytest.mark.parametrize("size", [1, 9, 5000])
def test_a_draw_finds_the_places_at_shares_of_the_sum(size: int) -> None:
    """To the last bit what `find` returns: the batches of a store must stay the same."""
    rng = np.random.default_rng(size)
    tree = SumTree(size)
    assert tree.draw(rng.random(4)) is None
    tree.fill(rng.random(size) + 0.1)
    shares = rng.random(1000)
    places, weights = tree.find(shares * tree.total)
    drawn = tree.draw(shares)
    np.testing.assert_array_equal(drawn[0], places)
    np.testing.assert_array_equal(drawn[1], weights / tree.smallest)
    np.testing.assert_allclose(drawn[2], (tree.total, tree.smallest), rtol=1e-15)
