"""Sampling by staleness: versions follow rows through all changes, and draws follow from the rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore import MemoryStorage, StalenessAwareSampler, TensorDictReplayBuffer
from expstore.errors import NotReadyError


def rows(versions: Any, first: int = 0) -> TensorDict:
    versions = torch.as_tensor(versions)
    count = versions.shape[0]
    return TensorDict({"policy_version": versions, "number": torch.arange(first, first + count)}, [count])


def buffer(storage: Any, size: int = 8, consumer: int = 0, **keywords: Any) -> TensorDictReplayBuffer:
    sampler = StalenessAwareSampler(**keywords)
    sampler.consumer_version = consumer
    return TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=size, with_ids=True)


def sampler_of(rb: TensorDictReplayBuffer) -> StalenessAwareSampler:
    assert isinstance(rb.sampler, StalenessAwareSampler)
    return rb.sampler


def test_batches_say_how_stale_their_rows_are() -> None:
    rb = buffer(MemoryStorage(20), size=9, consumer=7)
    rb.extend(rows([[5], [5], [5], [2], [2], [2], [7], [7], [7]]))  # of shape (1,), as collectors write
    batch = rb.sample()
    assert batch["staleness"].dtype == torch.float32
    assert batch["staleness"].tolist() == (7 - batch["policy_version"][:, 0]).tolist()
    assert sorted(batch["number"].tolist()) == list(range(9)), "no row comes twice where there are enough"
    assert rb.sample(10)["number"].unique().numel() < 10


def test_stale_rows_are_left_out() -> None:
    rb = buffer(MemoryStorage(20), size=100, consumer=9, max_staleness=3)
    rb.extend(rows([9, 5, 6, 5, 7, 4]))
    assert set(rb.sample()["policy_version"].tolist()) == {9, 6, 7}
    sampler_of(rb).max_staleness = 0
    assert set(rb.sample()["policy_version"].tolist()) == {9}
    sampler_of(rb).max_staleness = -1
    assert set(rb.sample(1000)["policy_version"].tolist()) == {9, 5, 6, 7, 4}
    sampler_of(rb).max_staleness = 3
    for _ in range(4):
        sampler_of(rb).increment_consumer_version()
    with pytest.raises(
        NotReadyError,
        match=r"All 6 entries in the buffer exceed max_staleness=3 \(consumer_version=13\).* Increase",
    ):
        rb.sample()


def test_a_version_ahead_of_the_consumer_is_as_fresh_as_can_be() -> None:
    rb = buffer(MemoryStorage(20), size=300, consumer=1, max_staleness=0)
    rb.extend(rows([0, 1, 2, 50]))
    batch = rb.sample()
    assert set(batch["policy_version"].tolist()) == {1, 2, 50}
    assert batch["staleness"].tolist() == [0.0] * 300


def test_custom_weights() -> None:
    seen: list[torch.Tensor] = []

    def weights(staleness: torch.Tensor) -> torch.Tensor:
        seen.append(staleness)
        return torch.where(staleness == 2, 0.0, 1e200 * (staleness + 1).double())

    rb = buffer(MemoryStorage(9), size=4, consumer=3, staleness_weight_fn=weights)
    rb.extend(rows([3, 3, 1, 0, 0]))
    assert sorted(rb.sample()["policy_version"].tolist()) == [0, 0, 3, 3]
    assert seen[0].dtype == torch.float32
    assert seen[0].tolist() == [0, 2, 3], "once per run of rows of one version"
    rb.sample()
    assert len(seen) == 2, "it is asked anew: its answer may be another one"


class Counting(MemoryStorage):
    """Counts the rows whose versions are read, and lets something happen meanwhile."""

    taken = 0
    meanwhile: Callable[[], object] | None = None
    late = True  # what is read is what is in the slots afterwards

    def read(self, ids: Any, places: Any = None) -> Any:
        found = super().read(ids, places)
        if places is not None:
            self.taken += ids.size
            if self.meanwhile is not None:
                act, self.meanwhile = self.meanwhile, None
                act()
                found = super().read(ids, places) if self.late else found
        return found


def test_every_version_is_read_once() -> None:
    storage = Counting(1000)
    rb = buffer(storage)
    for step in range(30):
        rb.extend(rows(torch.full((100,), step), 100 * step))
        for _ in range(3):
            rb.sample()
    assert storage.taken == 3000
    assert sampler_of(rb)._known.versions.first.size == 10


def test_versions_of_rows_that_are_overwritten_while_they_are_read_are_not_used() -> None:
    storage = Counting(5000)
    rb = buffer(storage, size=200, consumer=9)
    rb.extend(rows(torch.ones(5000)))

    def overwrite() -> None:
        for step in range(4):
            rb.extend(rows(torch.full((2000,), 8.0), 5000 + 2000 * step))

    storage.meanwhile = overwrite
    batch = rb.sample()
    assert storage.counters.redraws == 1
    assert storage.meanwhile is None
    assert batch["id"].tolist() == (batch["number"] + 1).tolist()
    assert batch["staleness"].tolist() == (9 - batch["policy_version"]).tolist()


def test_a_change_while_versions_are_read_is_seen_by_the_next_batch() -> None:
    storage = Counting(10)
    storage.late = False
    rb = buffer(storage, size=10, consumer=9)
    rb.extend(rows([1] * 10))

    def change() -> None:
        rb[3:6] = rows([5, 5, 5])

    storage.meanwhile = change
    rb.sample()
    batch = rb.sample()
    assert batch["staleness"].tolist() == (9 - batch["policy_version"]).tolist()
    assert batch["staleness"].unique().tolist() == [4, 8]


def test_few_fresh_rows_among_many_stale_ones() -> None:
    """A batch that takes nearly all of the weight, and far more rows than have it."""
    rb = buffer(MemoryStorage(3000), size=500, consumer=1, staleness_weight_fn=lambda s: 1e-12**s)
    rb.extend(rows([0] * 1490 + [1] * 20 + [0] * 1490))
    for _ in range(5):
        batch = rb.sample()
        assert batch["id"].unique().numel() == 500
        assert batch["staleness"].tolist() == [0] * 20 + [1] * 480


# -- across restarts ------------------------------------------------------------------------------------


def opened(path: Path, **keywords: Any) -> TensorDictReplayBuffer:
    sampler = StalenessAwareSampler(max_staleness=30)
    return expstore.open(path, sampler=sampler, batch_size=16, seed=5, **keywords)


def live(path: Path, capacity: int | None) -> TensorDictReplayBuffer:
    rb = opened(path, capacity=capacity)
    for step in range(12):
        rb.extend(rows(torch.full((9,), step // 2), 9 * step))
        sampler_of(rb).consumer_version = step // 2 + 1
        rb.sample()
    return rb


def test_a_snapshot_brings_its_version_and_one_that_was_set_before_opening_counts(tmp_path: Path) -> None:
    with live(tmp_path / "a.exp", 50) as rb:
        rb.dumps(tmp_path / "versions")
        expected = [rb.sample()["number"].tolist() for _ in range(20)]
        sampler_of(rb).consumer_version = 40
        rb.extend(rows([40] * 20))
        rb.sample()
        rb.loads(tmp_path / "versions")
        assert sampler_of(rb).consumer_version == 6
        assert [rb.sample()["number"].tolist() for _ in range(20)] == expected
    ahead = StalenessAwareSampler()
    ahead.consumer_version = 9
    with expstore.open(tmp_path / "a.exp", sampler=ahead, batch_size=4) as rb:
        assert ahead.consumer_version == 9
        rb.loads(tmp_path / "versions")
        assert ahead.consumer_version == 6
        ahead.consumer_version = 9
    with opened(tmp_path / "a.exp") as rb:
        assert sampler_of(rb).consumer_version == 9
