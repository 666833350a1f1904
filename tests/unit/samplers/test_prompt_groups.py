"""Sampling of whole prompt groups: which groups, how many rows of each, by which strategy."""

from __future__ import annotations

import random
import warnings
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore import LazyStackStorage, MemoryStorage, PromptGroupSampler, ReplayBuffer, TensorDictReplayBuffer
from tests.support.batches import memory_buffer

REWARDS = [3.0, 1.0, 9.0, 5.0]


def rows(groups: int, each: int = 4, **more: Any) -> TensorDict:
    name = torch.arange(groups * each) % groups
    reward = torch.tensor(REWARDS).repeat(groups * each)[: groups * each][
        torch.arange(groups * each) // groups
    ]
    return TensorDict(
        {"query": name, "next": {"reward": reward[:, None]}, "n": torch.arange(len(name)), **more},
        [len(name)],
    )


def buffer(groups: int = 5, each: int = 4, *, size: int | None = None, **options: Any) -> Any:
    sampler = PromptGroupSampler(**options)
    return memory_buffer(seed=2, sampler=sampler, rows=rows(groups, each), batch_size=size)


def test_a_batch_is_group_after_group() -> None:
    batch = buffer(num_groups=3, size=12).sample()
    names = batch["query"].reshape(3, 4)
    assert (names == names[:, :1]).all()
    assert len(names[:, 0].unique()) == 3
    assert len(batch["n"].unique()) == 12
    assert buffer(samples_per_group=2).sample(8)["query"].reshape(4, 2).unique(dim=1).shape == (4, 1)


def test_groups_and_rows_have_the_same_chance() -> None:
    rb = buffer(5, 4, num_groups=2)
    groups, numbers = np.zeros(5), np.zeros(20)
    for _ in range(1500):
        batch = rb.sample(4)
        groups += np.bincount(batch["query"][::2].numpy(), minlength=5)
        numbers += np.bincount(batch["n"].numpy(), minlength=20)
    assert groups / groups.sum() == pytest.approx([0.2] * 5, abs=0.03)
    assert numbers / numbers.sum() == pytest.approx([0.05] * 20, abs=0.012)


def test_strategies_choose_rows() -> None:
    for strategy, count, expected in [
        ("recency", 2, {2, 3}),  # of a group's four rows, in the order in which they came
        ("reward", 2, {2, 3}),
        ("reward", 1, {2}),
        ("variance", 2, {1, 2}),
        ("variance", 3, {0, 1, 2}),
    ]:
        batch = buffer(num_groups=2, strategy=strategy).sample(2 * count)
        for numbers in batch["n"].reshape(2, count):
            assert {int(number) // 5 for number in numbers} == expected


def test_the_most_varied_rows_are_found_among_all_subsets(rng: np.random.Generator) -> None:
    for count in (1, 2, 3, 5):
        rewards = rng.normal(size=8)
        rb = TensorDictReplayBuffer(
            storage=MemoryStorage(10), sampler=PromptGroupSampler(num_groups=1, strategy="variance")
        )
        zeros = torch.zeros(8, dtype=torch.int64)
        rb.extend(TensorDict({"query": zeros, "next": {"reward": torch.tensor(rewards)}}, [8]))
        best = max(np.var(some) for some in combinations(rewards, count))
        assert np.var(rb.sample(count)["next", "reward"].numpy()) == pytest.approx(best)


def test_too_few_are_drawn_again_and_said_once() -> None:
    rb = buffer(2, 2, samples_per_group=3)
    with pytest.warns(UserWarning, match="completing the draw with replacement"):
        batch = rb.sample(9)
    names = batch["query"].reshape(3, 3)
    assert (names == names[:, :1]).all()
    assert len(names[:, 0].unique()) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rb.sample(9)


def test_new_and_changed_rows_are_noticed() -> None:
    rb = buffer(2, 2, num_groups=3, strategy="reward")
    rb.extend(
        TensorDict(
            {"query": torch.full((2,), 7), "next": {"reward": torch.ones(2, 1)}, "n": torch.tensor([50, 51])},
            [2],
        )
    )
    assert 7 in rb.sample(3)["query"].tolist()
    assert 51 in rb.sample(3)["n"].tolist()
    changed = rb[4].clone()
    changed["next", "reward"] = torch.tensor([99.0])
    rb[4] = changed
    assert 50 in rb.sample(3)["n"].tolist()
    changed["query"] = torch.tensor(8)
    rb[torch.tensor([4, 5])] = torch.stack([changed, changed])
    assert 8 in rb.sample(3)["query"].tolist()
    assert 7 not in rb.sample(3)["query"].tolist()


def test_groups_by_several_numbers_and_by_text() -> None:
    pairs = TensorDict({"query": torch.tensor([[0, 1], [0, 2], [0, 1], [0, 2]]), "n": torch.arange(4)}, [4])
    rb = TensorDictReplayBuffer(storage=MemoryStorage(10), sampler=PromptGroupSampler(num_groups=1))
    rb.extend(pairs)
    assert sorted(rb.sample(2)["n"].tolist()) in ([0, 2], [1, 3])
    rb = ReplayBuffer(
        storage=LazyStackStorage(10), sampler=PromptGroupSampler(num_groups=2, strategy="reward")
    )
    rb.extend(
        [
            TensorDict({"query": text, "next": TensorDict({"reward": torch.tensor([value])})})
            for text, value in (("a", 1.0), ("b", 2.0), ("a", 3.0), ("b", 0.0))
        ]
    )
    batch = rb.sample(2)
    assert sorted(batch["next", "reward"].flatten().tolist()) == [2.0, 3.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rewards_may_be_negative_in_all_dtypes(dtype: torch.dtype) -> None:
    reward = torch.tensor([-1.0, 3.0, -5.0, 2.0], dtype=dtype)
    data = TensorDict({"query": torch.zeros(4, dtype=torch.int64), "next": {"reward": reward}}, [4])
    sampler = PromptGroupSampler(samples_per_group=2, strategy="reward")
    rb = memory_buffer(seed=2, sampler=sampler, rows=data, batch_size=2)
    assert sorted(rb.sample()["next", "reward"].tolist()) == [2.0, 3.0]


@pytest.mark.filterwarnings("ignore:A group")
@pytest.mark.parametrize("capacity", [None, 60])
def test_groups_that_are_followed_are_those_of_all_rows(capacity: int | None, tmp_path: Path) -> None:
    """New rows, rows that are overwritten, changed and deleted; two samplers with the same random numbers."""
    chance = random.Random(3)

    def make() -> PromptGroupSampler:
        return PromptGroupSampler(num_groups=2, strategy="reward")

    sampler = make()
    with expstore.open(tmp_path / "a.exp", capacity=capacity, sampler=sampler, layout="flat") as rb:
        for number in range(150):
            count = chance.randint(1, 9)
            query = np.array([chance.randint(0, 20) for _ in range(count)])
            rb.extend({"query": query, "next": {"reward": np.arange(count) * 0.1 + number}})
            if chance.random() < 0.1:
                rb[chance.randrange(len(rb))] = {"query": np.int64(5), "next": {"reward": np.float64(1e9)}}
            if capacity is None and chance.random() < 0.1:
                rb.episodes.delete(f"episode_id = {chance.randint(1, number + 1)}")
            if chance.random() < 0.6:
                found, fresh = (
                    one.select(rb.storage, 4, np.random.default_rng(number)).ids.tolist()
                    for one in (sampler, make())
                )
                assert found == fresh
