"""Sampling by recency: ages, limits, deleted rows, and errors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from expstore import MemoryStorage, RecencySampler
from expstore.core.draws import Draws
from expstore.core.id_set import IdSet
from expstore.core.values import Runs, Window


class Readable(MemoryStorage):
    """A storage that only says which ids can be read."""

    def __init__(self, low: int, last: int, deleted: Runs = ()) -> None:
        super().__init__()
        self._state.stored = Window(low, last, IdSet.of(deleted))


def ages(storage: Readable, size: int = 100_000, **keywords: Any) -> np.ndarray:
    """Ages of rows of one draw, counted among the readable ones."""
    ids = RecencySampler(**keywords).sample(storage, size, Draws(1).generator(0)).ids
    readable = storage.window.ids()
    places = np.searchsorted(readable, ids)
    np.testing.assert_array_equal(readable[places], ids)
    return readable.size - 1 - places


def test_half_as_often_after_a_half_life() -> None:
    for deleted in [(), ((100, 149), (180, 189))]:
        counts = np.bincount(ages(Readable(40, 240, deleted), half_life=10), minlength=30)
        for age in range(10):
            assert counts[age + 10] / counts[age] == pytest.approx(0.5, abs=0.06)


def test_only_the_newest() -> None:
    for keywords in ({"newest": 7}, {"newest": 7.9}, {"newest": 7, "half_life": 2}):
        assert set(ages(Readable(40, 240), **keywords).tolist()) == set(range(7))
    assert set(ages(Readable(40, 50), newest=1000).tolist()) == set(range(10))
    assert set(ages(Readable(40, 60, ((58, 59),)), newest=2).tolist()) == {0, 1}


def test_extreme_half_lives() -> None:
    for half_life in [1e-308, 1e-3, 1e15, 1e300]:
        found = ages(Readable(40, 240), half_life=half_life)
        if half_life < 1:
            assert not found.any()
        else:  # all ages are as likely
            assert abs(np.bincount(found, minlength=200) - 500).max() < 6 * math.sqrt(500)


def test_one_row_and_a_store_of_trillions() -> None:
    assert not ages(Readable(40, 41), half_life=3).any()
    low, last = 2**40, 2**41
    ids = RecencySampler(half_life=1e11).sample(Readable(low, last), 10_000, Draws(1).generator(0)).ids
    assert ((ids > low) & (ids <= last)).all()
    assert np.median(last - ids) == pytest.approx(1e11, rel=0.1)
