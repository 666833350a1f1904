"""Random numbers of draws: draw k does not depend on earlier draws, and all draws differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore.core.draws import Draws
from expstore.core.id_set import IdSet
from expstore.core.values import Runs, Window
from expstore.errors import NotReadyError, QueryError, StateError
from expstore.samplers import (
    ConsumingSampler,
    PrioritizedSampler,
    RandomSampler,
    RecencySampler,
    Sampler,
    SamplerWithoutReplacement,
)
from expstore.storages.memory import MemoryStorage
from tests.support.threads import in_threads

MakeBatch = Callable[..., TensorDict]


class Readable(MemoryStorage):
    """A storage that only says which ids can be read."""

    def __init__(self, low: int, last: int) -> None:
        super().__init__()
        self._state.stored = Window(low, last)


def draw(
    seed: int, number: int, redraw: int = 0, size: int = 256, low: int = 0, last: int = 1000
) -> np.ndarray:
    generator = Draws(seed).generator(number, redraw)
    return RandomSampler().sample(Readable(low, last), size, generator).ids


def test_rows_of_a_batch_and_of_neighbouring_draws_are_independent() -> None:
    first, second = draw(7, 0, size=100_000), draw(7, 1, size=100_000)
    for one, other in ((first, second), (first[:-1], first[1:]), (first, draw(7, 0, 1, size=100_000))):
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.015


def test_a_draw_depends_on_seed_draw_and_redraw_only() -> None:
    expected = draw(3, 17)
    draws = Draws(3)
    for number, redraw in ((0, 0), (17, 1), (2**40, 0), (17, 0)):  # one generator, moved about
        ids = RandomSampler().sample(Readable(0, 1000), 256, draws.generator(number, redraw)).ids
        draws.generator(number).random(3, np.float32)  # half a word is left over
        same = (number, redraw) == (17, 0)
        assert (ids.tolist() == expected.tolist()) == same
    for other in (draw(4, 17), draw(3, 18), draw(3, 17, 1), draw(3, 17 + 2**32)):
        assert other.tolist() != expected.tolist()


def test_the_numbers_are_those_of_philox() -> None:
    """So that any NumPy can repeat a run from its seed and its draw number."""
    bits = np.random.Philox(key=np.array([3, 0], np.uint64), counter=np.array([0, 2, 17, 0], np.uint64))
    expected = np.random.Generator(bits).integers(1, 1001, 256)
    np.testing.assert_array_equal(draw(3, 17, 2), expected)


@pytest.mark.parametrize("seed", [0, 2**63, 2**64 - 1, -1])
def test_any_seed_of_64_bits(seed: int) -> None:
    np.testing.assert_array_equal(draw(seed, 5), draw(seed % 2**64, 5))
    assert draw(seed, 5).tolist() != draw(seed + 1, 5).tolist()


def test_threads_do_not_disturb_one_another() -> None:
    draws = Draws(3)
    storage, sampler = Readable(0, 1000), RandomSampler()
    expected = {number: draw(3, number).tolist() for number in range(64)}
    wrong: list[int] = []

    def work(part: int) -> None:
        for number in range(part, 64, 4):
            generator = draws.generator(number)
            for _ in range(20):  # others come in between
                found = sampler.sample(storage, 256, draws.generator(number)).ids.tolist()
            if found != expected[number] or generator is not draws.generator(0):
                wrong.append(number)

    in_threads(4, work)
    assert wrong == []


@pytest.mark.parametrize("deleted", [(), ((4, 9),)])
def test_a_store_whose_rows_leave_at_this_moment(deleted: Runs) -> None:
    """The buffer has looked before; then `empty` or a very long extend has given them up."""
    storage = Readable(5, 5 + 4 * len(deleted))
    storage._state.stored = replace(storage.window, deleted=IdSet.of(deleted))
    for sampler in (RandomSampler(), RecencySampler(half_life=3), RecencySampler(newest=3)):
        with pytest.raises(NotReadyError, match="empty storage"):
            sampler.sample(storage, 4, Draws(1).generator(0))


def test_a_sampler_must_say_how_it_chooses() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Sampler()  # type: ignore[abstract]
    assert repr(RandomSampler()) == "RandomSampler()"
    assert RandomSampler().on_write(None) is None  # type: ignore[arg-type]


# -- one sampler in the place of another -----------------------------------------------------------------


def test_another_sampler_draws_from_the_next_batch_on(store_path: Path, make_batch: MakeBatch) -> None:
    with expstore.open(store_path, capacity=50, batch_size=10, batches=expstore.Batches(prefetch=2)) as rb:
        rb.extend(make_batch(20))
        rb.sample()
        former = rb.set_sampler(SamplerWithoutReplacement())
        assert isinstance(former, RandomSampler)
        assert sorted(torch.cat([batch["index"] for batch in rb]).tolist()) == list(range(20))
        assert rb.storage.draws.number == 3
        rb.set_sampler(PrioritizedSampler(50, 1.0, 1.0, max_priority_within_buffer=True))
        rb.update_priority(torch.arange(20), torch.zeros(20))
        rb.update_priority(torch.tensor([7]), torch.tensor([1.0]))
        assert set(rb.sample()["index"].tolist()) == {7}
        rb.set_sampler(former)
        assert not rb.storage.priorities.within
        assert len(set(rb.sample()["index"].tolist())) > 3
    with pytest.raises(StateError, match="closed"):
        rb.set_sampler(former)


def test_a_sampler_that_does_not_fit_changes_nothing(store_path: Path, make_batch: MakeBatch) -> None:
    with expstore.open(store_path, capacity=50, batch_size=10, batches=expstore.Batches(prefetch=1)) as rb:
        rb.extend(make_batch(20))
        former = rb.sampler
        for sampler, error in (
            (ConsumingSampler(), ValueError),
            (RandomSampler(where="nobody > 0"), QueryError),
            (3, TypeError),
        ):
            with pytest.raises(error):
                rb.set_sampler(sampler)  # type: ignore[arg-type]
            assert rb.sampler is former
        assert rb.sample().shape == (10,)
