"""Slices sampled by the priorities of their first rows, compared with NumPy."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import expstore
from expstore import TensorDictReplayBuffer
from expstore.errors import NotReadyError
from expstore.samplers import PrioritizedSliceSampler
from expstore.storages.memory import MemoryStorage
from tests.support.batches import memory_buffer, trajectory_rows

ALPHA, BETA = 0.7, 0.5


def distribution(rb: TensorDictReplayBuffer, least: int, *, strict: bool = True) -> dict[int, float]:
    """Return the chance of each first row's x, from what the buffer holds."""
    storage = rb.storage
    ids = storage.window.ids()
    (x,) = storage.read(ids, [storage.require_schema().place_of(("x",))])
    weights = dict(
        zip(
            x.tolist(),
            (storage.priorities.values[storage.geometry.slot_of(ids)].astype(float) + 1e-8) ** ALPHA,
            strict=True,
        )
    )
    chances = {
        first: weight
        for first, weight in weights.items()
        if first + least - 1 in weights or (not strict and first - 1 not in weights)
    }
    total = sum(chances.values())
    return {first: weight / total for first, weight in chances.items()}


def check(rb: TensorDictReplayBuffer, length: int, least: int, *, strict: bool = True) -> None:
    """Draw often; compare how often each first row comes, and the weights."""
    expected = distribution(rb, least, strict=strict)
    smallest = min(expected.values())
    counts = dict.fromkeys(expected, 0)
    for _ in range(25):
        batch = rb.sample()
        ends = np.flatnonzero(batch["next", "truncated"].numpy().reshape(-1)) + 1
        x, weights = batch["x"].numpy(), batch["priority_weight"].numpy()
        for begin, end in zip([0, *ends[:-1]], ends, strict=True):
            one = x[begin:end]
            assert (np.diff(one) == 1).all()
            assert len(one) == length or one[-1] + 1 not in rb.storage.read(rb.storage.window.ids())[1]
            counts[int(one[0])] += 1
            np.testing.assert_allclose(
                weights[begin:end], (expected[int(one[0])] / smallest) ** -BETA, rtol=1e-5
            )
    total = sum(counts.values())
    for first, chance in expected.items():
        assert abs(counts[first] - total * chance) < 5 * (total * chance) ** 0.5 + 1


def prioritise(rb: TensorDictReplayBuffer, seed: int) -> None:
    """Give every row a priority of its own."""
    ids = rb.storage.window.ids()
    values = np.random.default_rng(seed).random(ids.size).astype(np.float32) * 3
    rb.update_priority(id=torch.from_numpy(ids), priority=torch.from_numpy(values))


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("options", "least"),
    [
        ({}, 4),
        ({"strict_length": False}, 4),
        ({"span": (False, True)}, 1),
        ({"span": (0, 2)}, 2),
        ({"strict_length": False, "span": (0, 1)}, 3),
    ],
)
def test_first_rows_come_by_their_priorities(options: dict[str, Any], least: int) -> None:
    rb = memory_buffer(
        1000, sampler=PrioritizedSliceSampler(1000, ALPHA, BETA, slice_len=4, **options), batch_size=400
    )
    strict = options.get("strict_length", True)
    for trajectory, count in enumerate((2, 4, 9, 5), start=1):
        rb.extend(trajectory_rows(trajectory, count))
    check(rb, 4, least, strict=strict)
    prioritise(rb, 1)
    check(rb, 4, least, strict=strict)
    rb.extend(trajectory_rows(1, 3, 2))  # one that was too short goes on
    rb.extend(trajectory_rows(3, 1, 9))
    check(rb, 4, least, strict=strict)
    prioritise(rb, 2)
    check(rb, 4, least, strict=strict)


@pytest.mark.parametrize("strict", [True, False])
def test_they_do_in_a_ring_that_wraps(strict: bool) -> None:
    rb = memory_buffer(
        40,
        sampler=PrioritizedSliceSampler(40, ALPHA, BETA, slice_len=4, strict_length=strict),
        batch_size=400,
    )
    rng = np.random.default_rng(5)
    at = {1: 0, 2: 0, 3: 0}
    for cycle in range(60):
        trajectory, count = int(rng.integers(1, 4)), int(rng.integers(1, 6))
        rb.extend(trajectory_rows(trajectory, count, at[trajectory]))
        at[trajectory] += count
        if len(rb) >= 8:
            rb.sample(8)
        if cycle % 20 == 19:
            prioritise(rb, cycle)
            check(rb, 4, 4, strict=strict)
    rb.empty()
    with pytest.raises(NotReadyError, match="Cannot sample from an empty storage"):
        rb.sample(8)
    rb.extend(trajectory_rows(9, 6))
    check(rb, 4, 4, strict=strict)


def test_another_length_finds_other_first_rows() -> None:
    rb = memory_buffer(
        1000, sampler=PrioritizedSliceSampler(1000, ALPHA, BETA, num_slices=100), batch_size=400
    )
    rb.extend(trajectory_rows(1, 6))
    rb.extend(trajectory_rows(2, 3))
    prioritise(rb, 4)
    for length in (4, 2, 4):
        rb._batch_size = 100 * length
        check(rb, length, length)


def test_there_may_be_nothing_to_draw() -> None:
    rb = memory_buffer(1000, sampler=PrioritizedSliceSampler(1000, ALPHA, BETA, slice_len=4), batch_size=400)
    rb.extend(trajectory_rows(1, 3))
    with pytest.raises(NotReadyError, match=r"length range: 3 - 3 / required=4"):
        rb.sample()
    none = TensorDictReplayBuffer(
        storage=MemoryStorage(10), sampler=PrioritizedSliceSampler(10, 1.0, 1.0, eps=0.0, slice_len=2)
    )
    none.extend(trajectory_rows(1, 3))
    none.update_priority(torch.arange(3), torch.zeros(3))
    with pytest.raises(NotReadyError, match="all priorities are 0"):
        none.sample(2)


def test_a_left_span_is_turned_off_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="Left spanning is disabled"):
        sampler = PrioritizedSliceSampler(10, 1.0, 1.0, slice_len=2, span=True)
    assert sampler.slicing.span == (False, True)


def test_a_copy_finds_rows_by_itself() -> None:
    rb = memory_buffer(1000, sampler=PrioritizedSliceSampler(1000, ALPHA, BETA, slice_len=3), batch_size=400)
    rb.extend(trajectory_rows(1, 9))
    rb.sample(6)
    copied = pickle.loads(pickle.dumps(rb.sampler))
    assert repr(copied) == "PrioritizedSliceSampler(slice_len=3, alpha=0.7, beta=0.5, strict_length=True)"
    other = TensorDictReplayBuffer(storage=rb.storage, sampler=copied, batch_size=402)
    check(other, 3, 3)


def test_a_restart_continues_with_the_next_batch(store_path: Path) -> None:
    def opened(**options: Any) -> TensorDictReplayBuffer:
        sampler = PrioritizedSliceSampler(60, ALPHA, BETA, slice_len=3, traj_key="episode")
        return expstore.open(store_path, sampler=sampler, batch_size=12, **options)

    with opened(capacity=60, seed=3) as rb:
        for first in range(0, 40, 4):
            for trajectory in (1, 2, 3):
                rb.extend(trajectory_rows(trajectory, 4, first), source=f"w{trajectory}")
                rb.sample()
        prioritise(rb, 3)
        rb.extend(trajectory_rows(1, 2, 40), source="w1")
        draw = rb.storage.draws.number
        expected = [rb.sample()["x"].tolist() for _ in range(20)]
        rb.storage.draws.set(draw, rb.storage.draws.progress)
    with opened() as rb:
        assert [rb.sample()["x"].tolist() for _ in range(20)] == expected
