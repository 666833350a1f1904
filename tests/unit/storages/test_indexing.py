"""Rows by index: which rows a change addresses, and which of several values for one row counts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import expstore

pytestmark = pytest.mark.usefixtures("no_syncs")  # nothing here is about what a power cut leaves


@pytest.mark.parametrize("kind", ["memory", "zarr"])
def test_a_row_given_twice_gets_the_last_value(tmp_path: Path, kind: str) -> None:
    """Whatever the order in which rows are named, each gets its own value."""
    storage = expstore.MemoryStorage(20) if kind == "memory" else expstore.ZarrStorage(tmp_path / "a.exp", 20)
    with expstore.TensorDictReplayBuffer(storage=storage) as rb:
        rb.extend(TensorDict({"x": torch.arange(10), "y": torch.arange(10)[:, None] * 0.5}, [10]))
        index = torch.tensor([7, 2, 7, 9, 2, 7, 0])
        values = torch.arange(100, 107)
        rb[index] = TensorDict({"x": values, "y": values[:, None] + 0.25}, [7])
        expected = [106, 1, 104, 3, 4, 5, 6, 105, 8, 103]
        assert rb[:]["x"].tolist() == expected
        assert rb[:]["y"].flatten().tolist() == [n + 0.25 if n >= 100 else n * 0.5 for n in expected]


def _long_batches(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in caplog.messages if "lost at once" in text]


@pytest.mark.parametrize("kind", ["memory", "zarr"])
def test_a_batch_longer_than_the_capacity_warns_once(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    storage = expstore.MemoryStorage(10) if kind == "memory" else expstore.ZarrStorage(tmp_path / "a.exp", 10)
    with caplog.at_level("WARNING", "expstore"), expstore.TensorDictReplayBuffer(storage=storage) as rb:
        for _ in range(3):
            rb.extend(TensorDict({"x": torch.arange(10)}, [10]))
        assert not _long_batches(caplog)
        for _ in range(3):
            rb.extend(TensorDict({"x": torch.arange(12)}, [12]))
        assert rb[:]["x"].sort().values.tolist() == list(range(2, 12))
    (text,) = _long_batches(caplog)
    assert "a batch of 12 rows was written to a store with capacity=10: its first 2 rows are lost" in text


@pytest.mark.parametrize("kind", ["memory", "zarr"])
def test_better_rows_are_changes_of_the_rows_that_they_replace(tmp_path: Path, kind: str) -> None:
    """What is computed from rows, such as weights of samplers, is computed again for them."""
    storage = expstore.MemoryStorage(10) if kind == "memory" else expstore.ZarrStorage(tmp_path / "a.exp", 10)
    writer = expstore.TensorDictMaxValueWriter(rank_key="x")
    with expstore.TensorDictReplayBuffer(storage=storage, writer=writer) as rb:
        rb.extend(TensorDict({"x": torch.arange(10)}, [10]))
        before = storage.changes.number
        rb.extend(TensorDict({"x": torch.tensor([100, -5])}, [2]))
        changed = storage.changes.since(before)
        assert changed is not None
        assert changed.tolist() == [0]
