"""Random crops of trajectories: steps, probabilities, and reproducible draws."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from expstore import (
    MemoryStorage,
    RandomCropTensorDict,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    TensorDictReplayBuffer,
    ZarrStorage,
)
from expstore.errors import SchemaError
from tests.support.batches import memory_buffer
from tests.support.chi_square import chi_square, draws_needed, limit_of, one_off


def trajectories(rows: int, steps: int, *, first: int = 0) -> TensorDict:
    """Rows of 1000 * row + step."""
    x = torch.arange(first, first + rows)[:, None] * 1000 + torch.arange(steps)
    return TensorDict({"x": x, "image": x[..., None, None].expand(rows, steps, 2, 2)}, [rows, steps])


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@given(st.integers(1, 6), st.integers(1, 12), st.data())
def test_stretches_are_steps_in_order(rows: int, steps: int, data: Any) -> None:
    length = data.draw(st.integers(1, steps))
    given_rows = trajectories(rows, steps)
    made = RandomCropTensorDict(length, generator=seeded(steps))(given_rows)
    assert made.shape == (rows, length)
    assert (made["x"].diff(dim=1) == 1).all()
    assert (made["x"] // 1000 == torch.arange(rows)[:, None]).all()
    assert torch.equal(made["image"][..., 0, 0], made["x"])
    assert given_rows.shape == (rows, steps)


def test_another_dim_is_cropped() -> None:
    data = trajectories(3, 8).unsqueeze(-1).expand(3, 8, 2)
    made = RandomCropTensorDict(5, sample_dim=-2, generator=seeded())(data)
    assert made.shape == (3, 5, 2)
    assert (made["x"].diff(dim=1) == 1).all()
    with pytest.warns(UserWarning, match="positive shape"):
        crop = RandomCropTensorDict(5, 1, generator=seeded())
    assert torch.equal(crop(data)["x"], made["x"])


def test_masked_steps_are_left_out() -> None:
    lengths = torch.tensor([3, 4, 9])
    data = trajectories(3, 9).set("mask", torch.arange(9) < lengths[:, None])
    crop = RandomCropTensorDict(3, mask_key="mask", generator=seeded())
    for _ in range(50):
        made = crop(data)
        assert made["mask"].all()
        assert ((made["x"] % 1000)[:, -1] < lengths).all()
    assert (crop(data.exclude("mask"))["x"] % 1000).max() > 3


@pytest.mark.parametrize("masked", [False, True])
def test_every_start_has_the_same_chance(masked: bool) -> None:
    length, stretch = 7, 3
    chances = np.full(length - stretch + 1, 1 / (length - stretch + 1))
    draws = draws_needed(chances, one_off(chances))
    data = trajectories(1, 9 if masked else length)
    data = data.exclude("image").expand(draws, *data.shape[1:]).clone()
    if masked:
        data["mask"] = (torch.arange(9) < length).expand(draws, 9)
    crop = RandomCropTensorDict(stretch, mask_key="mask" if masked else None, generator=seeded(3))
    counts = np.bincount(crop(data)["x"][:, 0].numpy(), minlength=chances.size)
    assert counts.size == chances.size
    assert chi_square(counts, chances) < limit_of(chances.size)


def test_uncroppable_data_is_refused() -> None:
    with pytest.raises(RuntimeError, match="Cannot sub-sample from a tensordict with an empty shape"):
        RandomCropTensorDict(2)(TensorDict({"x": torch.zeros(3)}, []))
    with pytest.raises(RuntimeError, match=r"Cannot sample trajectories of length 5 along dimension -1"):
        RandomCropTensorDict(5)(trajectories(2, 4))
    data = trajectories(2, 4).set("mask", torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]]).bool())
    with pytest.raises(RuntimeError, match="length 2 when the minimum trajectory length is 1"):
        RandomCropTensorDict(2, mask_key="mask")(data)
    with pytest.raises(SchemaError, match=r"mask of the same shape.*'mask' must have one flag"):
        RandomCropTensorDict(2, mask_key="mask")(data.set("mask", torch.ones(2, 4, 1).bool()))
    with pytest.raises(RuntimeError, match="sample_dim=-3 is out of range"):
        RandomCropTensorDict(2, sample_dim=-3)(data)
    for wrong in (0, 2.5, True):
        with pytest.raises(ValueError, match="sub_seq_len"):
            RandomCropTensorDict(wrong)  # type: ignore[arg-type]


# -- in buffers ---------------------------------------------------------------------------------------


@pytest.mark.guarantee("draw/next")
@pytest.mark.parametrize("prefetch", [0, 2])
def test_stretches_follow_from_the_draw(tmp_path: Path, prefetch: int) -> None:
    def samples(rb: Any, count: int) -> list[list[list[int]]]:
        return [rb.sample()["x"].tolist() for _ in range(count)]

    def opened() -> TensorDictReplayBuffer:
        storage, crop = ZarrStorage(tmp_path / "run.exp", 50), RandomCropTensorDict(3)
        return TensorDictReplayBuffer(storage=storage, batch_size=4, transform=crop, prefetch=prefetch)

    rb = opened()
    rb.extend(trajectories(20, 10))
    state = rb.state_dict()
    wanted = samples(rb, 6)
    assert len({str(sample) for sample in wanted}) == 6
    rb.load_state_dict(state)
    assert samples(rb, 3) == wanted[:3]
    assert rb[:2].shape == (2, 3)  # by torch's own numbers: no draw is used up
    rb.close()
    rb = opened()
    assert samples(rb, 3) == wanted[3:]
    rb.close()


def test_copies_continue_with_the_next_stretches() -> None:
    rb = memory_buffer(50, seed=7, batch_size=4, transform=RandomCropTensorDict(3), generator=seeded(5))
    rb.extend(trajectories(20, 10))
    rb.sample()
    other = copy.deepcopy(rb)
    assert torch.equal(rb.sample()["x"], other.sample()["x"])


def test_stretches_are_not_tied_to_the_rows_drawn() -> None:
    # Rows are drawn here by real numbers from 0 to 1, as stretches are.
    rb = ReplayBuffer(
        storage=MemoryStorage(10, seed=3),
        sampler=RandomSampler(weight="1"),
        batch_size=4000,
        transform=RandomCropTensorDict(1),
    )
    rb.extend(trajectories(10, 10))
    row, step = (part[:, 0].numpy() for part in (lambda x: (x // 1000, x % 1000))(rb.sample()["x"]))
    counts = np.bincount(row * 10 + step, minlength=100)
    assert chi_square(counts, np.full(100, 0.01)) < limit_of(100)


def test_custom_transforms_receive_the_generator_of_the_draw() -> None:
    class Noise:
        draws = True

        def __call__(self, batch: Any, numbers: np.random.Generator | None) -> Any:
            drawn = 0.0 if numbers is None else torch.from_numpy(numbers.random(batch.shape))
            return batch.set("noise", torch.zeros(batch.shape) + drawn)

    def made() -> Any:
        rb = ReplayBuffer(storage=MemoryStorage(5, seed=2), batch_size=3, transform=Noise())
        rb.extend(TensorDict({"x": torch.arange(5)}, [5]))
        return rb

    one, other = made(), made()
    noises = [one.sample()["noise"] for _ in range(2)]
    assert not torch.equal(*noises)
    assert all(torch.equal(other.sample()["noise"], noise) for noise in noises)
    assert (one[:]["noise"] == 0).all()


def test_an_ensembles_stretches_follow_from_its_draw() -> None:
    def made() -> Any:
        members = [ReplayBuffer(storage=MemoryStorage(9, seed=n), batch_size=2) for n in (1, 2)]
        for member in members:
            member.extend(trajectories(9, 10))
        crop = RandomCropTensorDict(3)
        return ReplayBufferEnsemble(*members, batch_size=8, sample_from_all=True, transform=crop)

    one, other = made(), made()
    for _ in range(3):
        sample = one.sample()
        assert sample.shape == (2, 4, 3)
        assert torch.equal(sample["x"], other.sample()["x"])
