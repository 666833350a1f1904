"""Writers: those that accept rows, those that refuse them, and replacing one by another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore import (
    ImmutableDatasetWriter,
    LazyTensorStorage,
    ReplayBuffer,
    RoundRobinWriter,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)
from expstore.errors import NotFoundError, StateError
from expstore.storages.memory import MemoryStorage

MakeBatch = Callable[..., TensorDict]


@pytest.mark.parametrize("writer", [RoundRobinWriter, TensorDictRoundRobinWriter])
def test_the_newest_rows_take_the_places_of_the_oldest(writer: type[RoundRobinWriter]) -> None:
    rb = ReplayBuffer(storage=MemoryStorage(4), writer=writer())
    assert rb.extend(TensorDict({"x": torch.arange(3)}, [3])).tolist() == [0, 1, 2]
    assert rb.extend(TensorDict({"x": torch.arange(3, 6)}, [3])).tolist() == [3, 0, 1]
    assert rb["x"].tolist() == [4, 5, 2, 3]
    assert repr(rb.writer) == f"{writer.__name__}()"


def test_a_data_set_that_is_complete_takes_nothing(store_path: Path, make_batch: MakeBatch) -> None:
    with expstore.open(store_path, capacity=50) as rb:
        rb.extend(make_batch(20))
        former = rb.set_writer(ImmutableDatasetWriter())
        assert isinstance(former, RoundRobinWriter)
        row = rb[3]
        for act in (lambda: rb.extend(make_batch(5)), lambda: rb.add(row), rb.empty):
            with pytest.raises(StateError, match="This dataset doesn't allow writing"):
                act()
        assert (len(rb), rb.write_count) == (20, 20)
        assert rb.sample(4).shape == (4,)
        assert repr(rb.set_writer(former)) == "ImmutableDatasetWriter()"
        rb.extend(make_batch(5))
        assert len(rb) == 25


def test_it_does_not_even_fix_the_fields() -> None:
    rb = TensorDictReplayBuffer(storage=MemoryStorage(4), writer=ImmutableDatasetWriter())
    with pytest.raises(StateError, match="doesn't allow writing"):
        rb.extend(TensorDict({"x": torch.arange(3)}, [3]))
    assert rb.schema is None


def test_only_a_writer_is_taken() -> None:
    rb = ReplayBuffer(storage=MemoryStorage(4))
    with pytest.raises(TypeError, match="the writer must be a Writer, got a str"):
        rb.set_writer("round robin")  # type: ignore[arg-type]


def test_write_at_replaces_rows_and_leaves_the_cursor() -> None:
    writer = RoundRobinWriter()
    with pytest.raises(StateError, match="has no storage"):
        writer.write_at(0, torch.tensor(1))
    rb = ReplayBuffer(storage=LazyTensorStorage(4), writer=writer)
    rb.extend(torch.arange(3))
    assert writer.write_at(torch.tensor([1, 2]), torch.tensor([9, 8])).tolist() == [1, 2]
    assert writer.write_at(0, torch.tensor(7)).tolist() == 0
    with pytest.raises(NotFoundError):
        writer.write_at(torch.tensor([3]), torch.tensor([5]))
    rb.add(torch.tensor(6))
    assert rb[:].tolist() == [7, 9, 8, 6]


def test_write_at_is_refused_where_generations_are_tracked() -> None:
    """TorchRL counts the replaced row; here generations follow from ids, which rows keep."""
    writer = RoundRobinWriter(track_generations=True)
    rb = ReplayBuffer(storage=LazyTensorStorage(4), writer=writer)
    rb.extend(torch.arange(3))
    with pytest.raises(StateError, match=r"replace rows by rb\[index\] = data"):
        writer.write_at(torch.tensor([1]), torch.tensor([9]))
    assert rb[:].tolist() == [0, 1, 2]
