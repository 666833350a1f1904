"""A `TensorStorage` over a memory-mapped TensorDict uses its memory."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import MemoryMappedTensor, TensorDict

import expstore
from expstore import TensorStorage
from tests.support.batches import same


def rows(first: int, count: int) -> TensorDict:
    at = torch.arange(first, first + count)
    return TensorDict(
        {
            "observation": at[:, None].float() + torch.zeros(3),
            "small": at.half(),
            "next": {"reward": at[:, None].double(), "done": (at % 5 == 4)[:, None]},
        },
        [count],
    )


@pytest.mark.parametrize("loaded", [False, True])
def test_the_memory_is_that_of_the_files(tmp_path: Path, loaded: bool) -> None:
    data = rows(0, 12).memmap(tmp_path / "td")
    if loaded:
        data = TensorDict.load_memmap(tmp_path / "td")
    storage = TensorStorage(data)
    schema = storage.require_schema()
    assert storage.geometry.slots == 12
    for place, entry in enumerate(schema.fields):
        (view,) = storage.views([place], 1, 12)[0]
        key = entry.key if len(entry.key) > 1 else entry.key[0]
        assert view.__array_interface__["data"][0] == data[key].data_ptr()
    assert same(storage.get(range(12)), rows(0, 12))
    data["observation"][3] = 77.0
    assert (storage.get(3)["observation"] == 77).all()


@pytest.mark.parametrize("count", [1, 11, 12, 30])
def test_later_rows_are_written_to_the_files(tmp_path: Path, count: int) -> None:
    data = rows(0, 12).memmap(tmp_path / "td")
    rb = expstore.TensorDictReplayBuffer(storage=TensorStorage(data), batch_size=4)
    written = rows(0, 12)
    for first in range(100, 100 + 2 * count, count):
        rb.extend(rows(first, count))
        written = torch.cat([written, rows(first, count)])
    found = rb[:]
    assert sorted(found["observation"][:, 0].tolist()) == sorted(written[-12:]["observation"][:, 0].tolist())
    assert same(found, TensorDict.load_memmap(tmp_path / "td"))
    assert rb.sample(64)["observation"].min() >= written[-12]["observation"].min()


def test_updates_reach_the_files_and_a_copy_is_apart(tmp_path: Path) -> None:
    data = rows(0, 12).memmap(tmp_path / "td")
    storage = TensorStorage(data)
    copy = pickle.loads(pickle.dumps(storage))
    storage.set(2, rows(50, 1)[0])
    assert (data["observation"][2] == 50).all()
    assert (copy.get(2)["observation"] == 2).all()


def test_a_mapped_tensor_and_rows_of_two_dims(tmp_path: Path) -> None:
    tensor = MemoryMappedTensor.from_tensor(torch.arange(24.0).reshape(4, 6), filename=tmp_path / "t")
    storage = TensorStorage(tensor)
    tensor[1, 2] = -1
    assert storage.get(1)[2] == -1
    grid = TensorDict({"a": torch.arange(12).reshape(4, 3)}, [4, 3]).memmap(tmp_path / "grid")
    stored = TensorStorage(grid, ndim=2)
    grid["a"][1, 1] = 99
    assert stored.get((1, 1))["a"] == 99


def test_a_part_of_the_rows_is_written_within_the_part(tmp_path: Path) -> None:
    data = rows(0, 12).memmap(tmp_path / "td")
    rb = expstore.TensorDictReplayBuffer(storage=TensorStorage(data[3:7]), batch_size=4)
    rb.extend(rows(100, 9))
    whole = TensorDict.load_memmap(tmp_path / "td")
    assert same(whole[:3], rows(0, 3))
    assert same(whole[7:], rows(7, 5))
    assert sorted(rb[:]["observation"][:, 0].tolist()) == [105, 106, 107, 108]


def test_other_rows_are_copied() -> None:
    data = rows(0, 12)
    storage = TensorStorage(data)
    data["observation"][3] = 77.0
    assert (storage.get(3)["observation"] == 3).all()
    np.testing.assert_equal(storage.get(3)["small"].item(), 3)
