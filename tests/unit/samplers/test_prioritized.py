"""Prioritized sampling: frequencies and weights, through all kinds of changes of rows."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore import (
    MemoryStorage,
    PrioritizedSampler,
    RandomSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    ZarrStorage,
)
from expstore.core.draws import Draws
from tests.support.batches import numbered_rows

ALPHA, BETA, EPS = 0.7, 0.5, 1e-8


def buffer(storage: Any, size: int = 64, **keywords: Any) -> TensorDictReplayBuffer:
    sampler = PrioritizedSampler(storage.capacity, ALPHA, BETA, EPS, **keywords)
    return TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=size, with_ids=True)


def distribution(priorities: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities and weights, from the paper."""
    raised = (priorities.astype(np.float64) + EPS) ** ALPHA
    return raised / raised.sum(), (raised / raised.min()) ** -BETA


def z_scores(counts: np.ndarray, chances: np.ndarray) -> np.ndarray:
    total = counts.sum()
    scores: np.ndarray = (counts - total * chances) / np.sqrt(
        np.maximum(total * chances * (1 - chances), 1e-9)
    )
    return scores


def expect_distribution(rb: TensorDictReplayBuffer, priorities: dict[int, float]) -> None:
    """Hold one large batch against the law: only these rows, with these weights and about these shares."""
    numbers = np.array(sorted(priorities))
    chances, weights = distribution(np.array([priorities[n] for n in numbers.tolist()], np.float32))
    batch = rb.sample(20_000)
    places = np.searchsorted(numbers, batch["number"].numpy())
    np.testing.assert_array_equal(numbers[places], batch["number"].numpy())
    np.testing.assert_allclose(batch["priority_weight"].numpy(), weights[places], rtol=1e-5)
    assert np.abs(z_scores(np.bincount(places, minlength=numbers.size), chances)).max() < 5


STORAGES: dict[str, Callable[[Path], Any]] = {
    "memory": lambda path: MemoryStorage(20),
    "zarr": lambda path: ZarrStorage(path / "a.exp", 20),
    "unbounded": lambda path: ZarrStorage(path / "a.exp"),
}


@pytest.mark.parametrize("kind", STORAGES)
def test_rows_come_change_and_leave(kind: str, tmp_path: Path) -> None:
    rb = buffer(STORAGES[kind](tmp_path))
    bounded = kind != "unbounded"
    known: dict[int, float] = {}
    largest, rng = 1.0, np.random.default_rng(1)
    for step in range(30):
        count, first = int(rng.integers(1, 8)), rb.storage.last  # every row's number is its id less 1
        if step % 10 == 5:
            rb.empty()
            known.clear()
            first = rb.storage.last
        rb.extend(numbered_rows(count, first))
        known |= dict.fromkeys(range(first, first + count), largest)
        if bounded:
            known = {n: p for n, p in known.items() if n >= first + count - 20}
        ids = rng.choice(sorted(known), 3) + 1
        values = rng.random(3).astype(np.float32) * 3
        rb.update_priority(id=ids, priority=values)
        known |= {int(i) - 1: float(v) for i, v in zip(ids, values, strict=True)}
        largest = max(largest, float(values.max()))
        expect_distribution(rb, known)
    rb.close()


def test_a_tree_that_grew_draws_as_one_that_was_made_at_once(tmp_path: Path) -> None:
    """An unbounded store passes the tree's first size in small steps, and in one that is twice too long."""
    rb = buffer(ZarrStorage(tmp_path / "a.exp"), size=500)
    rng = np.random.default_rng(2)
    for count in (4000, 90, 20, 13_000, 700):
        rb.extend(numbered_rows(count, rb.storage.last))
        rb.update_priority(id=rng.integers(1, rb.storage.last + 1, 200), priority=rng.random(200))
        rb.sample()
    other = PrioritizedSampler(None, ALPHA, BETA, EPS)
    grown: Any = rb.sampler
    for number in range(20):
        one = grown.sample(rb.storage, 500, Draws(1).generator(number))
        two = other.sample(rb.storage, 500, Draws(1).generator(number))
        np.testing.assert_array_equal(one.ids, two.ids)
    assert other._weights.tree is not None
    assert grown._weights.tree.size == other._weights.tree.size == 1 << 15
    rb.close()


def test_several_priorities_for_one_row() -> None:
    for reduction, expected in [("max", 4.0), ("min", 1.0), ("mean", 2.5), ("median", 2.5)]:
        rb = buffer(MemoryStorage(2), reduction=reduction)
        rb.extend(numbered_rows(2))
        rb.update_priority([0, 1], torch.tensor([[1.0, 2.0, 3.0, 4.0], [2.0, 2.0, 2.0, 2.0]]))
        expect_distribution(rb, {0: expected, 1: 2.0})


def test_alpha_beta_and_dtype() -> None:
    rb = buffer(MemoryStorage(4), dtype=torch.float64)
    rb.extend(numbered_rows(4))
    rb.update_priority([0, 1, 2, 3], [1.0, 2.0, 3.0, 4.0])
    sampler: Any = rb.sampler
    sampler.alpha, sampler.beta = 0.0, 1.0
    batch = rb.sample(20_000)
    assert batch["priority_weight"].dtype == torch.float64
    assert (batch["priority_weight"] == 1).all()
    assert np.abs(z_scores(np.bincount(batch["number"].numpy()), np.full(4, 0.25))).max() < 5
    sampler.load_state_dict(buffer(MemoryStorage(1)).sampler.state_dict())
    expect_distribution(rb, {0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0})


@pytest.mark.parametrize("capacity", [None, 50])
def test_a_storage_may_have_more_rows_than_max_capacity(capacity: int | None) -> None:
    rb = TensorDictReplayBuffer(
        storage=MemoryStorage(capacity), sampler=PrioritizedSampler(5), batch_size=500
    )
    rb.extend(numbered_rows(40))
    rb.update_priority(range(40), torch.tensor([0.0] * 30 + [1.0] * 10))
    assert set(rb.sample()["number"].tolist()) == set(range(30, 40))


def test_an_interrupted_write_and_another_buffer_leave_the_tree_right(tmp_path: Path) -> None:
    storage = ZarrStorage(tmp_path / "a.exp", 100)
    rb = buffer(storage)
    rb.extend(numbered_rows(50))
    rb.sample()
    storage.health.note_interruption()
    rb.update_priority(id=[50], priority=2.0)
    other = TensorDictReplayBuffer(storage=storage, sampler=RandomSampler(), batch_size=4)
    other.extend(numbered_rows(10, 50))
    other.update_priority([3], 0.25)
    known = dict.fromkeys(range(50), 1.0) | dict.fromkeys(range(50, 60), 2.0) | {49: 2.0, 3: 0.25}
    expect_distribution(rb, known)
    rb.close()


def test_a_reader_samples_by_the_priorities_on_the_disk(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "a.exp", capacity=100) as writer:
        writer.extend(numbered_rows(50))
        writer.update_priority(id=[7], priority=3.0)
        writer.flush()
        sampler = PrioritizedSampler(None, ALPHA, BETA)
        with expstore.open(tmp_path / "a.exp", mode="r", sampler=sampler, batch_size=8) as reader:
            known = dict.fromkeys(range(50), 1.0) | {6: 3.0}
            expect_distribution(reader, known)
            copy = pickle.loads(pickle.dumps(reader))
            expect_distribution(copy, known)
            copy.close()
            writer.update_priority(id=[9], priority=0.5)
            writer.extend(numbered_rows(60, 50))
            writer.flush()
            reader.refresh()
            known = dict.fromkeys(range(10, 50), 1.0) | dict.fromkeys(range(50, 110), 3.0)
            expect_distribution(reader, known)


def test_versions_keep_alpha_and_beta(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "a.exp", sampler=PrioritizedSampler(alpha=0.7, beta=0.4), seed=3) as rb:
        rb.extend(numbered_rows(50))
        rb.update_priority(id=np.arange(1, 51), priority=np.arange(1.0, 51.0))
        rb.sampler.beta, rb.sampler.alpha = 0.9, 0.5  # as a schedule does
        rb.dumps(tmp_path / "versions")
        rb.snapshots.tag("here")
        wanted = rb.sample(8)
    for path in (tmp_path / "versions", tmp_path / "a.exp"):
        sampler = PrioritizedSampler(alpha=0.7, beta=0.4)
        with TensorDictReplayBuffer(storage=MemoryStorage(50), sampler=sampler) as rb:
            rb.loads(path)
            assert (sampler.alpha, sampler.beta) == (0.5, 0.9)
            found = rb.sample(8)
            assert torch.equal(found["number"], wanted["number"])
            assert torch.equal(found["priority_weight"], wanted["priority_weight"])
    sampler = PrioritizedSampler(alpha=0.7, beta=0.4)
    with TensorDictReplayBuffer(storage=MemoryStorage(50)) as rb:
        rb.loads(tmp_path / "versions")  # a sampler that has no such settings
        rb.dumps(tmp_path / "plain")
    with TensorDictReplayBuffer(storage=MemoryStorage(50), sampler=sampler) as rb:
        rb.loads(tmp_path / "plain")
        assert (sampler.alpha, sampler.beta) == (0.7, 0.4)


def test_priorities_may_be_bfloat16() -> None:
    """With new rows, on samples, by index, and to the sampler; NumPy has only the bits of this dtype."""
    given = torch.tensor([1.0, 2.0, 0.5], dtype=torch.bfloat16)
    rb = TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=MemoryStorage(10), batch_size=3)
    index = rb.extend(TensorDict({"number": torch.arange(3), "td_error": given}, [3]))
    assert rb.storage.priorities.values[:3].tolist() == [1.0, 2.0, 0.5]
    assert rb.update_priority(index, given * 2) == 3
    assert rb.storage.priorities.values[:3].tolist() == [2.0, 4.0, 1.0]
    rb.sampler.update_priority(index, given * 4)
    assert rb.storage.priorities.values[:3].tolist() == [4.0, 8.0, 2.0]
    rows = rb.sample()
    rows["td_error"] = torch.full((3,), 16.0, dtype=torch.bfloat16)
    rb.update_tensordict_priority(rows)
    assert (rb.storage.priorities.values[rows["index"].numpy()] == 16).all()
