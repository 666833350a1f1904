"""Damaged packed columns: reading says so and nothing else, verify names the rows, repair costs them."""

from __future__ import annotations

import importlib
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from damaged import flip, in_child
from tensordict import TensorDict

import expstore
from expstore import files
from expstore.errors import CorruptionError
from expstore.storages import base, packing
from expstore.storages.layout import ColumnLayout
from expstore.storages.packedrows import PackedRows
from expstore.storages.settings import Settings
from expstore.storages.zarr import ZarrStorage
from expstore.tensordictbuffers import TensorDictReplayBuffer

#: 16 rows in a shard, 4 in a chunk; 110 slots are readable of 128: the ring has turned once.
CAPACITY, ROWS = 100, 150
LAYOUT = ColumnLayout(fields={"frame": {"layout": "packed", "rows": 4}})


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_sync_data", os.fstat)
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    shorten(monkeypatch)
    monkeypatch.setattr(packing, "ENDLESS_SHARD_ROWS", 16)


def shorten(patch: pytest.MonkeyPatch) -> None:
    """Let stores have short shards and a short ring."""
    patch.setattr(packing, "SHARD_ROWS", 16)
    patch.setattr(base, "spare_slots", lambda capacity, row_bytes: 28)


def frames(first: int, count: int) -> torch.Tensor:
    """Rows that follow from a running number; half of each is noise, half is flat."""
    noise = [
        np.random.default_rng(n).integers(0, 256, (4, 16), np.uint8) for n in range(first, first + count)
    ]
    return torch.from_numpy(np.concatenate([np.stack(noise), np.zeros((count, 4, 16), np.uint8)], axis=1))


def batch(first: int, count: int) -> TensorDict:
    return TensorDict({"frame": frames(first, count), "number": torch.arange(first, first + count)}, [count])


def buffer(path: Path, capacity: int | None = CAPACITY) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(
        storage=ZarrStorage(path, capacity, settings=Settings(flatten=True, seed=0, layout=LAYOUT)),
        batch_size=8,
    )


def fill(path: Path, capacity: int | None = CAPACITY) -> None:
    with buffer(path, capacity) as rb:
        for first in range(0, ROWS, 10):
            rb.extend(batch(first, 10))
            if first % 50 == 0:
                rb.flush()


def wanted(data: TensorDict) -> torch.Tensor:
    """What the frames of these rows must be, by their numbers."""
    return torch.cat([frames(n, 1) for n in data["number"].tolist()])


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sound") / "sound.exp"
    with pytest.MonkeyPatch.context() as patch:
        shorten(patch)
        fill(path)
    return path


def damage(store: Path, rng: random.Random) -> str:
    """Damage one file of the packed column; return what was done."""
    path = rng.choice(sorted((store / "columns/frame").iterdir()))
    size, act = path.stat().st_size, rng.random()
    if act < 0.1:
        path.unlink()
        return f"{path.name} removed"
    if act < 0.2:
        os.truncate(path, at := rng.randrange(size))
        return f"{path.name} cut to {at}"
    if act < 0.3:
        at, noise = rng.randrange(size), rng.randbytes(40)
        with path.open("r+b") as file:
            file.seek(at)
            file.write(noise)
        return f"noise in {path.name} at {at}"
    flip(path, at := rng.randrange(size), bit := rng.randrange(8))
    return f"bit {bit} of byte {at} of {path.name}"


def faults_of(sound: Path, folder: Path, count: int, seed: int) -> list[str]:
    """Damage copies and read every row of them, by each way of opening; return what went wrong."""
    found, refused, rng = [], 0, random.Random(seed)
    for number in range(count):
        broken = folder / f"broken-{number}.exp"
        shutil.copytree(sound, broken)
        done = damage(broken, rng)
        for mode in ("r", "a"):
            try:
                with expstore.open(broken, mode=mode) as rb:
                    for place in range(0, len(rb), 10):
                        try:
                            data = rb[place : place + 10]
                            if not torch.equal(data["frame"], wanted(data)):
                                found.append(f"{done}: rows read wrong with mode {mode}")
                        except CorruptionError:
                            refused += 1
            except CorruptionError:
                refused += 1
            except Exception as exc:
                found.append(f"{done}: mode {mode} raises {exc!r}")
        shutil.rmtree(broken)
    return found if refused > count // 4 else [*found, f"only {refused} reads were refused"]


@pytest.mark.parametrize("loop", ["compiled", "numcodecs"])
def test_damage_anywhere_is_an_error_and_never_other_rows(
    sound: Path, tmp_path: Path, loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_rows = importlib.import_module("expstore.unpacking").take_rows if loop == "compiled" else None
    monkeypatch.setattr(PackedRows, "warm", lambda column: setattr(column, "_take_rows", take_rows))
    init = PackedRows.__init__

    def make(column: PackedRows, *args: Any, **options: Any) -> None:
        init(column, *args, **options)
        column._take_rows = take_rows

    monkeypatch.setattr(PackedRows, "__init__", make)
    assert in_child(lambda: faults_of(sound, tmp_path, 60, 1)) == []
