"""`rb.loads` of a folder that `dumps` of a TorchRL buffer wrote."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, TensorDict

from expstore import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from expstore.errors import SchemaError, SnapshotError, StateError, StorageError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of importing torchrl's collectors
    import torchrl.data as torchrl


def rows(first: int, count: int) -> TensorDict:
    """Return rows in episodes of five steps."""
    at = torch.arange(first, first + count)
    done = (at % 5 == 4)[:, None]
    state = at[:, None].float() + torch.zeros(3)
    after = {"observation": state + 1, "reward": at[:, None].float(), "done": done, "terminated": done}
    return TensorDict({"observation": state, "action": at % 4, "next": after}, [count])


def lengths(rb: ReplayBuffer) -> list[int]:
    return [length for (length,) in rb.sql("SELECT length FROM episodes ORDER BY episode_id").fetchall()]


def write_dump(path: Path, count: int = 12, *, capacity: int = 20, **parts: Any) -> Path:
    rb = torchrl.TensorDictReplayBuffer(storage=torchrl.LazyMemmapStorage(capacity), batch_size=4, **parts)
    for first in range(0, count, 3):
        rb.extend(rows(first, 3))
    rb.dumps(path)
    return path


@pytest.mark.parametrize("piece", [100, 16 << 20])
@pytest.mark.parametrize("storage", [LazyMemmapStorage, LazyTensorStorage])
def test_rows_are_loaded_oldest_first(
    tmp_path: Path, storage: Any, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("expstore.buffers.torchrl_dump._PIECE_BYTES", piece)
    dump = write_dump(tmp_path / "dump", 24)
    rb = TensorDictReplayBuffer(storage=storage(100), batch_size=4, transform=lambda batch: batch)
    rb.loads(dump)
    wanted = rows(4, 20)
    assert all(torch.equal(rb[:][key], wanted[key]) for key in wanted.keys(True, True))
    assert lengths(rb) == [1, 5, 5, 5, 4]
    rb.extend(rows(24, 1))
    assert lengths(rb)[-1] == 5


def test_the_newest_rows_that_fit_are_kept(tmp_path: Path) -> None:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(5))
    rb.load(write_dump(tmp_path / "dump"))
    assert rb[:]["next", "reward"].flatten().tolist() == [7, 8, 9, 10, 11]
    assert rb.write_count == 5


def test_a_warning_names_what_is_not_loaded(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    dump = write_dump(tmp_path / "dump", sampler=torchrl.SamplerWithoutReplacement(), generator=generator)
    data = rows(0, 12)
    data["where"] = NonTensorData("here", batch_size=[12])
    data.memmap(dump / "storage")
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(20))
    with pytest.warns(
        UserWarning,
        match="its 12 rows were loaded, but not the sampler's state .*generator, the field 'where'",
    ):
        rb.loads(dump)
    assert len(rb) == 12


def test_what_cannot_be_loaded_is_refused(tmp_path: Path) -> None:
    dump = write_dump(tmp_path / "dump")
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(20))
    rb.extend(rows(0, 3))
    with pytest.raises(StateError, match="only into a buffer without rows; this one has 3; call rb.empty"):
        rb.loads(dump)
    with pytest.raises(SnapshotError, match="has no version 3"):
        rb.loads(dump, 3)
    with pytest.raises(SnapshotError, match=r"loads\(\) of a buffer, or import it"):
        rb.storage.loads(dump)
    rb.empty()
    with pytest.raises(SchemaError):
        ReplayBuffer(storage=_store_of_other_rows()).loads(dump)
    (dump / "storage" / "action.memmap").write_bytes(b"x")
    with pytest.raises(StorageError, match=r"action.memmap has 1 bytes"):
        rb.loads(dump)
    assert len(rb) == 0


def _store_of_other_rows() -> LazyTensorStorage:
    storage = LazyTensorStorage(20)
    rb = TensorDictReplayBuffer(storage=storage)
    rb.extend(TensorDict({"observation": torch.zeros(2, 7)}, [2]))
    rb.empty()
    return storage


def test_rows_of_several_dims_and_plain_tensors_are_refused(tmp_path: Path) -> None:
    lanes = torchrl.TensorDictReplayBuffer(storage=torchrl.LazyMemmapStorage(20, ndim=2))
    lanes.extend(TensorDict({"x": torch.zeros(3, 2)}, [3, 2]))
    lanes.dumps(tmp_path / "lanes")
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(20))
    with pytest.raises(SchemaError, match=r"2 dims.*load it with torchrl"):
        rb.loads(tmp_path / "lanes")
    plain = torchrl.ReplayBuffer(storage=torchrl.LazyMemmapStorage(20))
    plain.extend(torch.arange(3))
    plain.dumps(tmp_path / "plain")
    with pytest.raises(SnapshotError, match=r"not TensorDicts; load it into a buffer of torchrl"):
        rb.loads(tmp_path / "plain")
