"""Transforms in buffers behave like TorchRL's: the same programs report the same."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.envs import Compose, DoubleToFloat, RenameTransform, RewardScaling, Transform

from tests.support.batches import numbered_rows
from tests.support.torchrl_pair import Teller, same

STORAGES = ("LazyTensorStorage", "LazyMemmapStorage")


numbers = partial(numbered_rows, key="x", y=torch.Tensor.double)


def plus(number: int) -> Any:
    # TorchRL hands out the storage's own rows.
    return lambda data: data.clone().set("x", data["x"] + number)


class Watched(Transform):  # type: ignore[misc]
    """Count the calls of both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards, self.inverses = 0, 0

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.forwards += 1
        return tensordict.set("seen", torch.ones(tensordict.batch_size))

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.inverses += 1
        return tensordict


class Doubling(Transform):  # type: ignore[misc]
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict.clone().set("x", tensordict["x"] * 2)


@pytest.mark.parametrize("storage", STORAGES)
def test_functions_act_on_what_is_sampled(tmp_path: Path, storage: str) -> None:
    def program(lib: Any, tell: Teller) -> None:
        rb = lib.ReplayBuffer(storage=getattr(lib, storage)(10), transform=plus(100), batch_size=4)
        rb.extend(numbers(10))
        tell(rb[:]["x"], rb[3]["x"], bool((rb.sample()["x"] >= 100).all()), len(rb))
        tell(rb.append_transform(plus(1000)) is rb)
        tell(rb[2:4]["x"], len(rb.transform))
        rb.insert_transform(0, Doubling())
        tell(rb[2:4]["x"], len(rb.transform))
        tell(rb.storage.get(range(2))["x"])

    same(program, tmp_path)


@pytest.mark.parametrize("storage", STORAGES)
def test_inverted_functions_act_on_what_is_written(tmp_path: Path, storage: str) -> None:
    def program(lib: Any, tell: Teller) -> None:
        rb = lib.ReplayBuffer(storage=getattr(lib, storage)(10), batch_size=4)
        rb.append_transform(plus(1), invert=True)
        rb.append_transform(plus(10))
        rb.extend(numbers(6))
        rb.add(numbers(7)[6])
        tell(rb[:]["x"], rb.storage.get(range(7))["x"])
        rb[0:2] = numbers(2)
        tell(rb[:]["x"])

    same(program, tmp_path)


@pytest.mark.parametrize("buffer", ["ReplayBuffer", "TensorDictReplayBuffer"])
def test_transforms_of_torchrl(tmp_path: Path, buffer: str) -> None:
    def program(lib: Any, tell: Teller) -> None:
        rb = getattr(lib, buffer)(
            storage=lib.LazyTensorStorage(10),
            transform=Compose(RewardScaling(1.0, 2.0, in_keys=["y"]), DoubleToFloat(in_keys=["y"])),
            batch_size=4,
        )
        rb.append_transform(RenameTransform(["x"], ["z"]))
        rb.extend(numbers(10))
        batch = rb.sample()  # of all rows TorchRL renames the field in the storage itself
        tell(str(batch["y"].dtype), (batch["z"] * 2 + 1 == batch["y"]).all())
        tell(sorted(set(batch.keys()) - {"index"}))
        tell(sorted(set(rb.storage.get(range(2)).keys()) - {"index"}), str(rb.storage.get(0)["y"].dtype))

    same(program, tmp_path)


def test_calls_of_transforms(tmp_path: Path) -> None:
    def program(lib: Any, tell: Teller) -> None:
        watched = Watched()
        rb = lib.TensorDictReplayBuffer(storage=lib.LazyTensorStorage(10), transform=watched, batch_size=2)
        rb.extend(numbers(5))
        tell(watched.forwards, watched.inverses)
        rb.add(numbers(1)[0])
        rb.sample()
        tell(watched.forwards, watched.inverses, "seen" in rb[:], rb[0]["seen"])
        rb[0] = numbers(1)[0]
        tell(watched.forwards, watched.inverses, len(rb))

    same(program, tmp_path)


def test_an_inverse_may_leave_nothing_to_write(tmp_path: Path) -> None:
    class Dropping(Transform):  # type: ignore[misc]
        def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase | None:
            return None

    def program(lib: Any, tell: Teller) -> None:
        rb = lib.ReplayBuffer(storage=lib.LazyTensorStorage(10), transform=Dropping(), batch_size=2)
        index = rb.extend(numbers(4))
        tell(index.numel(), len(rb), rb.write_count)

    same(program, tmp_path)


def test_batches_may_change_their_shape(tmp_path: Path) -> None:
    def program(lib: Any, tell: Teller) -> None:
        rb = lib.ReplayBuffer(
            storage=lib.LazyTensorStorage(10), transform=lambda data: data.reshape(-1), batch_size=3
        )
        rb.extend(TensorDict({"x": torch.arange(20).reshape(5, 4)}, [5, 4]))
        tell(len(rb), rb.sample().shape, rb.sample(2)["x"].shape, rb.storage.get(0).shape)

    same(program, tmp_path)


def test_rows_are_collated(tmp_path: Path) -> None:
    def program(lib: Any, tell: Teller) -> None:
        rb = lib.ReplayBuffer(
            storage=lib.ListStorage(10), collate_fn=lambda rows: torch.stack(rows) * 2, batch_size=4
        )
        rb.extend(list(torch.arange(6)))
        tell(rb[:], rb[1:3], rb.sample().shape)
        old = rb.set_storage(lib.ListStorage(5), collate_fn=tuple)
        tell(len(old), len(rb))
        if lib.name == "expstore":  # TorchRL's writer goes on writing into the storage before
            rb.extend(list(torch.arange(3)))
            assert rb[:] == tuple(torch.arange(3))

    same(program, tmp_path)
