"""Samplers that get priorities before they have a storage, as programs for TorchRL use them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import expstore
from expstore import (
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    ReplayBuffer,
)
from expstore.errors import PriorityError, StateError


def prioritized(**options: Any) -> PrioritizedSampler:
    return PrioritizedSampler(10, 0.7, 0.9, **options)


def slices(**options: Any) -> PrioritizedSliceSampler:
    return PrioritizedSliceSampler(10, 0.7, 0.9, slice_len=2, **options)


BOTH = pytest.mark.parametrize("make", [prioritized, slices])


@BOTH
def test_new_rows_get_the_largest_priority_so_far(make: Any) -> None:
    sampler = make()
    assert sampler.default_priority == 1
    sampler.update_priority(torch.tensor([0]), torch.tensor([0.5]))
    assert sampler.default_priority == 0.5
    sampler.update_priority(torch.tensor([0, -1, 1]), torch.tensor([100.0, 900.0, 10.0]))
    sampler.mark_update(torch.tensor([2]))
    sampler.update_priority(0, 50.0)
    assert sampler.default_priority == 100
    storage = LazyTensorStorage(10)
    storage.set(range(4), torch.arange(4))
    sampler.attach(storage)
    np.testing.assert_array_equal(storage.priorities.values[:4], [50, 10, 100, 1])
    assert sampler.default_priority == 100


@BOTH
def test_within_the_buffer_overwritten_rows_do_not_count(make: Any) -> None:
    sampler = make(max_priority_within_buffer=True)
    sampler.update_priority(torch.tensor([0, 1]), torch.tensor([100.0, 10.0]))
    sampler.update_priority(torch.tensor([0]), torch.tensor([50.0]))
    assert sampler.default_priority == 50
    sampler.extend(torch.tensor([0]))
    assert sampler.default_priority == 10
    sampler.add(1)
    assert sampler.default_priority == 1


def test_a_storage_is_sampled_by_the_priorities_that_were_set_before() -> None:
    sampler, storage = prioritized(), ListStorage(10)
    sampler.extend(torch.arange(5))
    sampler.update_priority(torch.arange(5), torch.tensor([0.0, 0.0, 0.0, 1.0, 0.0]))
    storage.set(range(5), [str(number) for number in range(5)])
    index, info = sampler.sample(storage, 200)
    assert (index == 3).double().mean() > 0.9  # a priority of 0 is drawn once in a hundred thousand times
    assert info["priority_weight"].shape == (200,)


def test_a_buffer_begins_with_the_largest_priority_set_before(tmp_path: Path) -> None:
    sampler = prioritized()
    sampler.update_priority(3, 7.0)
    copied = pickle.loads(pickle.dumps(sampler))
    rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler, batch_size=3)
    rb.extend(torch.arange(4))
    assert rb.storage.priorities.values[:4].tolist() == [7, 7, 7, 7]
    rb = expstore.open(tmp_path / "a.exp", sampler=copied)
    rb.extend({"number": np.arange(2)})
    rb.close()
    rb = expstore.open(tmp_path / "a.exp", sampler=prioritized())
    assert rb.storage.priorities.values[:2].tolist() == [7, 7]
    assert rb.sampler.default_priority == 7
    reader = expstore.open(tmp_path / "a.exp", mode="r")
    sampler = prioritized()
    sampler.update_priority(0, 2.0)
    with pytest.raises(StateError, match="reading"):
        reader.set_sampler(sampler)
    reader.close()
    rb.close()


def test_wrong_priorities_are_refused_and_change_nothing() -> None:
    sampler = prioritized()
    sampler.update_priority(torch.arange(2), 3.0)
    with pytest.raises(PriorityError, match="number 1 of 2"):
        sampler.update_priority(torch.arange(2), torch.tensor([9.0, -1.0]))
    with pytest.raises(StateError, match="got 3 priorities for 2 rows"):
        sampler.update_priority(torch.arange(2), torch.ones(3))
    with pytest.raises(StateError, match="pass storage="):
        sampler.update_priority(torch.zeros(3, 2, dtype=torch.int64), 1.0)
    assert sampler.default_priority == 3
