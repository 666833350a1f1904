"""Folders of TensorDict and dumps of TorchRL's buffers are read in place."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, TensorDict

from expstore.datasets import TensorDictReader
from expstore.errors import NotFoundError, SchemaError, StorageError
from tests.support.batches import same
from tests.support.imported_stores import import_rows
from tests.support.refusals import check_refusals
from tests.support.torchrl_names import module

LazyMemmapStorage = module("torchrl.data").LazyMemmapStorage
TensorDictReplayBuffer = module("torchrl.data").TensorDictReplayBuffer


def rows(first: int, count: int, *, every: int = 5) -> TensorDict:
    """Return rows of TorchRL's layout; every fifth one ends an episode."""
    at = torch.arange(first, first + count)
    done = (at % every == every - 1)[:, None]
    state = at[:, None].float() + torch.zeros(3)
    return TensorDict(
        {
            "observation": state,
            "action": at % 4,
            "next": {
                "observation": state + 1,
                "reward": at[:, None].float(),
                "done": done,
                "terminated": done & (at[:, None] % 2 == 0),
                "truncated": done & (at[:, None] % 2 == 1),
            },
        },
        [count],
    )


def test_a_memory_map_folder(tmp_path: Path) -> None:
    data = rows(0, 12)
    data[11:12] = rows(90, 1)  # a seam that no flag says
    data["where"] = NonTensorData("here", batch_size=[12])
    data["what"] = NonTensorData("x", batch_size=[12])
    data.memmap(tmp_path / "td")
    about = tmp_path / "td" / "what" / "meta.json"  # as objects are kept that JSON cannot hold
    said = json.loads(about.read_text())
    del said["data"]
    about.write_text(json.dumps(said))
    (about.parent / "other.pickle").write_bytes(b"never read")
    found, episodes, _, meta = import_rows(TensorDictReader(tmp_path / "td"), tmp_path)
    assert same(found, data.exclude("where", "what"))
    assert episodes == [(5, "terminated"), (5, "truncated"), (1, "cut"), (1, "cut")]
    assert meta["tensordict"] == {"values": {"where": "here"}, "left_out": ["what"]}


def test_rows_of_any_keys(tmp_path: Path) -> None:
    data = TensorDict({"X": torch.randn(7, 2), "deep": {"y": torch.arange(7), "z": torch.rand(7) > 0.5}}, [7])
    data.memmap(tmp_path / "td")
    found, episodes, *_ = import_rows(TensorDictReader(tmp_path / "td"), tmp_path)
    assert same(found, data)
    assert episodes == [(7, "cut")]


@pytest.mark.parametrize("count", [4, 10, 23])
def test_a_dump_of_torchrls_buffer(tmp_path: Path, count: int) -> None:
    rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(10))
    data = rows(0, count)
    for first in range(0, count, 3):
        rb.extend(data[first : first + 3])
    rb.dumps(tmp_path / "dump")
    found, episodes, *_ = import_rows(TensorDictReader(tmp_path / "dump"), tmp_path)
    assert same(found, data[-10:])  # the oldest row first, as it was written
    assert sum(length for length, _ in episodes) == min(10, count)


def test_interleaved_trajectories(tmp_path: Path) -> None:
    data = torch.stack([rows(0, 10, every=100), rows(50, 10, every=100)], 1).reshape(-1)
    data["collector", "traj_ids"] = torch.arange(20) % 2
    data.memmap(tmp_path / "td")
    found, episodes, *_ = import_rows(TensorDictReader(tmp_path / "td"), tmp_path)
    assert same(found, data)
    assert episodes == [(10, "cut"), (10, "cut")]


def test_bad_folders_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "td"
    rows(0, 12).memmap(folder)
    file, about = folder / "observation.memmap", folder / "meta.json"
    good, said = file.read_bytes(), json.loads(about.read_text())

    def load(data: bytes | None = good, text: str = "", **changed: Any) -> Callable[[], object]:
        def act() -> object:
            file.unlink(missing_ok=True)
            if data is not None:
                file.write_bytes(data)
            field = {"observation": {**said["observation"], **changed}}
            about.write_text(text or json.dumps({**said, **field}))
            return TensorDictReader(folder)

        return act

    size = r"observation.memmap has 143 bytes; \[12, 3\] float32 needs 144"
    strange = json.dumps({**said, "../../x": said["observation"]})
    check_refusals(
        [
            (load(good[:-1]), StorageError, size),
            (load(None), NotFoundError, "there is no file"),
            (load(dtype="torch.bfloat16"), SchemaError, "'observation' is torch.bfloat16"),
            (load(shape=[6, 6]), SchemaError, "different lengths"),
            (load(shape=[-1, 1]), SchemaError, r"has the invalid shape \[-1, 1\]"),
            (load(shape="x"), SchemaError, "has the invalid shape 'x'"),
            # The product overflows 64 bits.
            (load(shape=[2**40, 2**40]), StorageError, f"float32 needs {2**82}"),
            (load(text=strange), SchemaError, "which is not a valid field name"),
            (load(text="{"), SchemaError, "is neither a memory-map folder"),
            (lambda: TensorDictReader(tmp_path / "nothing"), NotFoundError, "there is no folder"),
        ]
    )


def test_bad_dumps_are_refused(tmp_path: Path) -> None:
    rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(5))
    rb.extend(rows(0, 5))
    rb.dumps(tmp_path / "dump")
    for cursor in (99, -1, "x", 2.5):
        (tmp_path / "dump/writer/metadata.json").write_text(json.dumps({"cursor": cursor}))
        with pytest.raises(SchemaError, match="a number from 0 to 5 is expected"):
            TensorDictReader(tmp_path / "dump")
    rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(20, ndim=2))
    rb.extend(torch.stack([rows(0, 3), rows(50, 3)]))
    rb.dumps(tmp_path / "lanes")
    with pytest.raises(SchemaError, match="a storage with 2 dims"):
        TensorDictReader(tmp_path / "lanes")
