"""Samplers behave like TorchRL's: the same programs report the same with both libraries.

Sampled rows differ, so their properties are compared: number of rows, fields, flags.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tests.support.batches import whole_trajectories
from tests.support.torchrl_pair import OURS, Teller, same

episodes = partial(whole_trajectories, traj_key="episode", x=lambda number: number)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("batch_size", [5, 9, 11, 16])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("size", [10, 15, 20])
def test_passes_without_replacement(
    tmp_path: Path, size: int, drop_last: bool, batch_size: int, prefetch: int
) -> None:
    if drop_last and batch_size > size:
        pytest.skip("there is no such batch: see test_torchrl_parity_buffers")

    def program(lib: Any, tell: Teller) -> None:
        rb = lib.ReplayBuffer(
            storage=lib.LazyTensorStorage(size),
            sampler=lib.SamplerWithoutReplacement(drop_last=drop_last),
            batch_size=batch_size,
            prefetch=prefetch,
        )
        rb.extend(torch.arange(size))
        lengths = [len(rb.sample()) for _ in range(12)]
        tell(sorted(lengths) if prefetch else lengths)

    same(program, tmp_path)


def test_without_shuffling_rows_come_in_order(tmp_path: Path) -> None:
    def program(lib: Any, tell: Teller) -> None:
        rb = lib.ReplayBuffer(
            storage=lib.LazyTensorStorage(10),
            sampler=lib.SamplerWithoutReplacement(shuffle=False),
            batch_size=4,
        )
        rb.extend(torch.arange(10))
        tell([rb.sample().tolist() for _ in range(6)])

    same(program, tmp_path)


def test_replacement_chooses_the_class(tmp_path: Path) -> None:
    def program(lib: Any, tell: Teller) -> None:
        tell(type(lib.RandomSampler(replacement=False, drop_last=True)).__name__)
        tell(type(lib.SliceSampler(replacement=False, num_slices=2)).__name__)
        tell(type(lib.RandomSampler(replacement=True)).__name__)
        tell(type(lib.SamplerWithoutReplacement(replacement=False)).__name__)
        tell.fails(lambda: lib.ConsumingSampler(replacement=False), "no without-replacement variant")

    same(program, tmp_path)


def test_rows_are_consumed(tmp_path: Path) -> None:
    def program(lib: Any, tell: Teller) -> None:
        rb = lib.ReplayBuffer(storage=lib.ListStorage(5), batch_size=3, consume_after_n_samples=1)
        rb.extend(list(torch.arange(5)))
        first, info = rb.sample(return_info=True)
        tell(len(first), len(rb), bool((first == info["index"]).all()))
        second = rb.sample()
        tell(len(second), len(rb), sorted(torch.cat([first, second]).tolist()))
        tell.fails(rb.sample, "Cannot sample")
        rb.extend(list(torch.arange(10, 12)))
        tell(len(rb), sorted(rb.sample(10).tolist()), len(rb))
        twice = lib.ReplayBuffer(storage=lib.ListStorage(4), batch_size=4, consume_after_n_samples=2)
        twice.extend(list(torch.arange(4)))
        tell(sorted(twice.sample().tolist()), len(twice), sorted(twice.sample().tolist()), len(twice))
        ends = lib.ReplayBuffer(storage=lib.ListStorage(5), batch_size=2, sampler=lib.ConsumingSampler())
        ends.extend(list(torch.arange(5)))
        tell([len(batch) for batch in ends], len(ends))

    same(program, tmp_path)


def test_consuming_that_cannot_be(tmp_path: Path) -> None:
    def program(lib: Any, tell: Teller) -> None:
        def buffer(**more: Any) -> Any:
            return lambda: lib.ReplayBuffer(storage=lib.ListStorage(10), batch_size=2, **more)

        tell.fails(buffer(consume_after_n_samples=1, prefetch=1), "Prefetching is not supported")
        tell.fails(buffer(sampler=lib.ConsumingSampler(), prefetch=1), "Prefetching is not supported")
        tell.fails(
            buffer(sampler=lib.SamplerWithoutReplacement(), consume_after_n_samples=1),
            "only supports the default RandomSampler",
        )

    same(program, tmp_path)


@pytest.mark.parametrize("kind", ["SliceSampler", "SliceSamplerWithoutReplacement"])
@pytest.mark.parametrize("by", [{"num_slices": 4}, {"slice_len": 5}])
@pytest.mark.parametrize("buffer", ["ReplayBuffer", "TensorDictReplayBuffer"])
def test_slices(tmp_path: Path, buffer: str, by: dict[str, int], kind: str) -> None:
    def program(lib: Any, tell: Teller) -> None:
        rb = getattr(lib, buffer)(
            storage=lib.LazyTensorStorage(100), sampler=getattr(lib, kind)(traj_key="episode", **by)
        )
        rb.extend(episodes(20, 7, 30, 12, 9, 8, 14))
        batch, info = rb.sample(20, return_info=True)
        tell(batch.shape, sorted(batch.keys(True, True), key=str))
        x = batch["x"].reshape(4, 5)
        tell((x.diff(dim=1) == 1).all(), (batch["episode"].reshape(4, 5).diff(dim=1) == 0).all())
        flags = info if buffer == "ReplayBuffer" else batch
        truncated = flags["next", "truncated"]
        tell(truncated, truncated.shape)
        tell(sorted((key for key in info if key != "id"), key=str))
        tell.fails(lambda: rb.sample(21))

    same(program, tmp_path)


def test_slices_that_cannot_be(tmp_path: Path) -> None:
    def program(lib: Any, tell: Teller) -> None:
        for more in ({}, {"num_slices": 2, "slice_len": 3}):
            tell.fails(lambda more=more: lib.SliceSampler(**more))
        rb = lib.ReplayBuffer(
            storage=lib.LazyTensorStorage(100), sampler=lib.SliceSampler(slice_len=10, traj_key="episode")
        )
        rb.extend(episodes(4, 5, 3))
        tell.fails(lambda: rb.sample(20), "Did not find a single trajectory with sufficient length")

    same(program, tmp_path)


def test_short_trajectories_make_short_batches(tmp_path: Path) -> None:
    def program(lib: Any, tell: Teller) -> None:
        def sampler(**more: Any) -> Any:
            return lib.SliceSampler(slice_len=10, traj_key="episode", strict_length=False, **more)

        rb = lib.TensorDictReplayBuffer(storage=lib.LazyTensorStorage(100), sampler=sampler())
        rb.extend(episodes(4, 4, 4))
        tell(rb.sample(20).shape)
        rb = lib.TensorDictReplayBuffer(storage=lib.LazyTensorStorage(100), sampler=sampler(pad_output=True))
        rb.extend(episodes(4, 4, 4))
        batch = rb.sample(20)
        tell(batch.shape, batch["collector", "mask"], batch["next", "truncated"])

    same(program, tmp_path)


def test_staleness_is_returned(tmp_path: Path) -> None:
    def program(lib: Any, tell: Teller) -> None:
        sampler = lib.StalenessAwareSampler(max_staleness=5)
        rb = lib.TensorDictReplayBuffer(storage=lib.LazyTensorStorage(20), sampler=sampler, batch_size=32)
        version = torch.arange(20) // 2
        rb.extend(TensorDict({"x": torch.arange(20), "policy_version": version}, [20]))
        sampler.consumer_version = 9
        batch, info = rb.sample(return_info=True)
        tell(batch.shape, bool((batch["policy_version"] >= 4).all()))
        tell(bool((info["staleness"].reshape(-1) == 9 - batch["policy_version"]).all()))
        sampler.consumer_version = 100
        tell.fails(rb.sample)

    same(program, tmp_path)


class Newest:
    """What a user's sampler for TorchRL looks like: the base is each library's own."""

    @staticmethod
    def of(lib: Any) -> Any:
        class Chosen(lib.Sampler):  # type: ignore[misc,name-defined]
            def __init__(self) -> None:
                super().__init__()
                self.written: list[int] = []

            def sample(self, storage: Any, batch_size: int) -> tuple[torch.Tensor, dict[str, Any]]:
                index = torch.arange(len(storage))[-batch_size:]
                return index, {"age": torch.arange(len(index)).flip(0)}

            def extend(self, index: torch.Tensor) -> None:
                self.written += torch.as_tensor(index).tolist()

            def add(self, index: int) -> None:
                self.written.append(int(index))

            def dumps(self, path: Path) -> None: ...

            def loads(self, path: Path) -> None: ...

            def state_dict(self) -> dict[str, Any]:
                return {"written": list(self.written)}

            def load_state_dict(self, state_dict: dict[str, Any]) -> None:
                self.written = list(state_dict["written"])

            def _empty(self) -> None:
                self.written = []

        return Chosen()


@pytest.mark.parametrize("buffer", ["ReplayBuffer", "TensorDictReplayBuffer"])
def test_samplers_of_users(tmp_path: Path, buffer: str) -> None:
    def program(lib: Any, tell: Teller) -> None:
        sampler = Newest.of(lib)
        rb = getattr(lib, buffer)(storage=lib.LazyTensorStorage(6), sampler=sampler, batch_size=3)
        rb.extend(episodes(2, 3))
        rb.add(episodes(7)[6])
        batch, info = rb.sample(return_info=True)
        tell(batch["x"], info["age"], info["index"], sampler.written, rb.sampler is sampler)
        tell(rb.sample(2)["x"])
        rb.empty()
        tell(sampler.written)

    same(program, tmp_path)


def test_priorities_by_torchrls_rule(tmp_path: Path) -> None:
    """What TorchRL's documents say of them; its compiled trees are not on every machine."""
    rb = OURS.TensorDictPrioritizedReplayBuffer(
        alpha=0.7, beta=0.9, storage=OURS.LazyTensorStorage(8), batch_size=4000, priority_key="td_error"
    )
    rb.extend(TensorDict({"x": torch.arange(8), "td_error": torch.arange(1.0, 9.0)}, [8]))
    batch = rb.sample()
    p = torch.arange(1.0, 9.0) ** 0.7
    p /= p.sum()
    found = torch.bincount(batch["x"], minlength=8) / 4000
    assert torch.allclose(found, p, atol=0.04)
    weights = (p / p.min()) ** -0.9
    assert torch.allclose(batch["priority_weight"], weights[batch["x"]], atol=1e-5)
    batch["td_error"] = torch.full((4000,), 3.0)
    rb.update_tensordict_priority(batch)
    assert torch.allclose(rb.sample()["priority_weight"], torch.ones(4000))
    rb.update_priority(torch.tensor([0, 1, -1]), torch.tensor([1e6, 0.0, 7.0]))
    assert (rb.sample()["x"] == 0).float().mean() > 0.9


SAMPLERS: dict[str, Any] = {
    "random": OURS.RandomSampler,
    "without": OURS.SamplerWithoutReplacement,
    "prioritized": lambda: OURS.PrioritizedSampler(100, 0.7, 0.9),
    "slices": lambda: OURS.SliceSampler(slice_len=2),
    "slices without": lambda: OURS.SliceSamplerWithoutReplacement(slice_len=2),
    "prioritized slices": lambda: OURS.PrioritizedSliceSampler(100, 0.7, 0.9, slice_len=2),
    "staleness": OURS.StalenessAwareSampler,
    "consuming": OURS.ConsumingSampler,
}


@pytest.mark.guarantee("torchrl/keywords")
@pytest.mark.parametrize("kind", SAMPLERS)
def test_torchrls_fault_generator_ignored(kind: str) -> None:
    """There PrioritizedSampler draws by NumPy's global generator, StalenessAwareSampler by torch's."""

    def drawn(seed: int, others: int) -> list[list[int]]:
        torch.manual_seed(others)
        np.random.seed(others)
        rb = OURS.ReplayBuffer(
            storage=OURS.LazyTensorStorage(100),
            sampler=SAMPLERS[kind](),
            batch_size=8,
            generator=torch.Generator().manual_seed(seed),
        )
        rb.extend(episodes(25, 25, 25, 25).set("policy_version", torch.zeros(100)))
        return [rb.sample()["x"].tolist() for _ in range(3)]

    assert drawn(1, 2) == drawn(1, 3) != drawn(2, 2)
