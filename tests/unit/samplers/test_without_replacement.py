"""Sampling without replacement: each row once per pass, through any operations."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from expstore import SamplerWithoutReplacement, TensorDictReplayBuffer
from expstore.core.draws import Draws
from expstore.samplers.without_replacement import permute
from tests.support.batches import memory_buffer, numbered_rows
from tests.support.threads import in_threads


def numbers(rb: TensorDictReplayBuffer) -> list[list[int]]:
    return [batch["number"].tolist() for batch in rb]


def test_every_order_is_as_likely() -> None:
    rb = memory_buffer(4, sampler=SamplerWithoutReplacement(), batch_size=4)
    rb.extend(numbered_rows(4))
    counts: dict[tuple[int, ...], int] = {}
    for _ in range(4800):
        order = tuple(rb.sample()["number"].tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 24
    chi_square = sum((count - 200) ** 2 / 200 for count in counts.values())
    assert chi_square < 53, "23 degrees of freedom: the 99.97 % quantile"


def test_large_passes_are_permutations_too() -> None:
    for size in [1, 2, 3, 64, 65, 1000, 20_000]:
        whole = permute(np.arange(size), size, key=(1, 2))
        np.testing.assert_array_equal(np.sort(whole), np.arange(size))
        part = np.random.default_rng(0).integers(0, size, 50)
        np.testing.assert_array_equal(permute(part, size, key=(1, 2)), whole[part])


def test_large_passes_are_shuffled_well() -> None:
    size, classes = 40_000, 20
    orders = [permute(np.arange(size), size, key=(3, number)) for number in range(6)]
    for order in orders:
        table = np.zeros((classes, classes))
        np.add.at(table, (np.arange(size) * classes // size, order * classes // size), 1)
        expected = size / classes**2
        assert 260 < ((table - expected) ** 2 / expected).sum() < 480, "361 degrees of freedom"
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02
    for one, other in itertools.combinations(orders, 2):
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.02


def test_a_pass_restarts_when_the_number_of_rows_changes() -> None:
    rb = memory_buffer(10, sampler=SamplerWithoutReplacement(), batch_size=4)
    rb.extend(numbered_rows(6))
    rb.sample()
    rb.extend(numbered_rows(2, 6))
    assert sorted(itertools.chain(*numbers(rb))) == list(range(8))


def test_in_a_full_ring_an_index_stands_for_its_newest_row() -> None:
    rb = memory_buffer(10, sampler=SamplerWithoutReplacement(), batch_size=5)
    rb.extend(numbered_rows(10))
    first = rb.sample()["index"].tolist()
    rb.extend(numbered_rows(5, 10))
    second = rb.sample()
    assert sorted(first + second["index"].tolist()) == list(range(10))
    assert (second["number"] == torch.where(second["index"] < 5, second["index"] + 10, second["index"])).all()


def test_rows_given_up_before_others_take_their_places() -> None:
    """A long extend does so: who has drawn such rows draws others, of those that are left."""
    rb = memory_buffer(10, sampler=SamplerWithoutReplacement(), batch_size=4)
    rb.extend(numbered_rows(10))
    generator = Draws(1).generator(0)
    selection = rb.sampler.sample(rb.storage, 4, generator)
    rb.storage._retire(6)
    again = rb.sampler.sample_again(rb.storage, selection, generator)
    assert sorted(again.ids.tolist()) == [7, 8, 9, 10]


def test_threads_share_a_pass() -> None:
    rb = memory_buffer(3000, sampler=SamplerWithoutReplacement(), batch_size=10)
    rb.extend(numbered_rows(3000))
    drawn: list[int] = []

    def work(_: int) -> None:
        for _ in range(75):
            drawn.extend(rb.sample()["number"].tolist())

    in_threads(4, work)
    assert sorted(drawn) == list(range(3000))
