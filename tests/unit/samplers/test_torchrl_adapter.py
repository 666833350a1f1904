"""Samplers written for torchrl work in our buffers; `replacement=False` selects samplers without it."""

from __future__ import annotations

import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import replay_buffers as theirs

import expstore
from expstore.buffers.replay_buffer import ReplayBuffer
from expstore.buffers.tensordict import TensorDictReplayBuffer
from expstore.errors import NotFoundError, StateError
from expstore.samplers import (
    PrioritizedSampler,
    RandomSampler,
    Sampler,
    SliceSampler,
)
from expstore.samplers.torchrl_adapter import AdaptedSampler, adapt
from expstore.storages.memory import MemoryStorage
from tests.support.batches import numbered_rows


class Newest(Sampler):
    """As a user of torchrl writes one: no super().__init__(), index and info out."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def sample(self, storage: Any, batch_size: int) -> Any:
        self.asked.append(len(storage))
        index = torch.arange(len(storage))[-batch_size:]
        return index, {"age": torch.arange(len(index)), "asked": batch_size}


class Told:
    """An object of no class of ours that notes what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def sample(self, storage: Any, batch_size: int) -> Any:
        return torch.zeros(batch_size, dtype=torch.int64), {}

    def add(self, index: int) -> None:
        self.told.append(("add", index))

    def extend(self, index: torch.Tensor) -> None:
        self.told.append(("extend", index.tolist()))

    def update_priority(self, index: torch.Tensor, priority: torch.Tensor, *, storage: Any = None) -> None:
        self.told.append(("priority", index.tolist(), priority.tolist(), len(storage)))

    def _empty(self) -> None:
        self.told.append(("empty",))


class Passes:
    """Draw all rows in order, then say so; `ran_out` is set back by whoever iterates."""

    def __init__(self) -> None:
        self.at, self.ran_out = 0, False

    def sample(self, storage: Any, batch_size: int) -> Any:
        index = list(range(self.at, min(self.at + batch_size, len(storage))))
        self.at += len(index)
        if self.at == len(storage):
            self.at, self.ran_out = 0, True
        return index, {}

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Chance:
    """Draw by the generator that buffers hand to samplers."""

    _rng: torch.Generator | None = None

    def sample(self, storage: Any, batch_size: int) -> Any:
        return (torch.randint(len(storage), (batch_size,), generator=self._rng),), {}


rows = partial(numbered_rows, key="x", next=lambda number: {"reward": number[:, None].float()})


def make(sampler: Any, n: int = 5, kind: Any = ReplayBuffer, **more: Any) -> Any:
    rb = kind(storage=MemoryStorage(10, seed=1), sampler=sampler, batch_size=2, **more)
    if n:
        rb.extend(rows(n))
    return rb


def test_the_buffer_gives_back_what_it_was_given() -> None:
    sampler, other = Newest(), Told()
    rb = make(sampler)
    assert rb.sampler is sampler
    assert rb.set_sampler(other) is sampler
    assert rb.sampler is other
    assert rb.set_sampler(other) is other
    assert rb.set_sampler(RandomSampler()) is other
    assert "Newest" in repr(make(sampler))


def test_nested_info_is_written_where_it_belongs() -> None:
    class Cut(Newest):
        def sample(self, storage: Any, batch_size: int) -> Any:
            index, _ = super().sample(storage, batch_size)
            cut = torch.tensor([[False], [True]])
            return index, {("next", "truncated"): cut, ("collector", "turn"): torch.tensor([7, 8])}

    batch = make(Cut(), kind=TensorDictReplayBuffer).sample()
    assert batch["next", "truncated"].tolist() == [[False], [True]]
    assert batch["collector", "turn"].tolist() == [7, 8]
    assert "turn" not in batch


def test_an_index_follows_the_ring() -> None:
    class First(Newest):
        def sample(self, storage: Any, batch_size: int) -> Any:
            return [0, -1], {}

    rb = make(First())
    rb.extend(rows(7, start=5))  # 12 rows in a ring of 10
    assert rb.sample()["x"].tolist() == [10, 9]


def test_an_index_has_as_many_dims_as_the_storage() -> None:
    class Corner(Told):
        def sample(self, storage: Any, batch_size: int) -> Any:
            assert storage.ndim == 2
            return (torch.tensor([0, 1]), torch.tensor([2, 0])), {}

    sampler = Corner()
    rb = TensorDictReplayBuffer(storage=MemoryStorage(6, seed=1, ndim=2), sampler=sampler, batch_size=2)
    rb.extend(TensorDict({"x": torch.arange(6).reshape(3, 2)}, [3, 2]))  # lanes, time
    assert rb.sample()["x"].tolist() == [4, 1]
    assert sampler.told == [("extend", [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]])]


def test_priorities_of_rows_that_have_left_are_not_told() -> None:
    sampler = Told()
    rb = make(sampler, n=0)
    ids = rb.extend(rows(10), return_ids=True)
    rb.extend(rows(4))
    rb.update_priority(id=ids[[0, 9]], priority=torch.tensor([1.0, 2.0]))
    assert sampler.told[-1] == ("priority", [9], [2.0], 10)


def test_iteration_ends_at_the_same_batch_when_batches_are_made_ahead() -> None:
    rb = make(Passes(), prefetch=2)
    assert [batch["x"].tolist() for batch in rb] == [[0, 1], [2, 3], [4]]


def test_draws_by_rng_are_the_same_after_a_restart(tmp_path: Path) -> None:
    def open_again() -> Any:
        return expstore.open(tmp_path / "run.exp", capacity=100, seed=5, sampler=Chance(), batch_size=8)

    rb = open_again()
    rb.extend(rows(50))
    rb.sample()
    expected = [rb.sample()["x"].tolist() for _ in range(3)]
    rb.close()
    (tmp_path / "again").mkdir()
    rb = expstore.open(tmp_path / "again" / "run.exp", capacity=100, seed=5, sampler=Chance(), batch_size=8)
    rb.extend(rows(50))
    rb.sample()
    assert rb.sample()["x"].tolist() == expected[0]
    rb.close()
    rb = expstore.open(tmp_path / "again" / "run.exp", sampler=Chance(), batch_size=8)
    assert [rb.sample()["x"].tolist() for _ in range(2)] == expected[1:]
    rb.close()


@pytest.mark.parametrize(
    ("drawn", "error", "text"),
    [
        (torch.zeros(2), StateError, "returned Tensor, not a pair"),
        ((torch.zeros(2), {}), StateError, "must be integers"),
        (([17], {}), NotFoundError, "no row with index 17"),
    ],
)
def test_invalid_results_of_a_sampler_are_refused(drawn: Any, error: type[Exception], text: str) -> None:
    class Wrong(Newest):
        def sample(self, storage: Any, batch_size: int) -> Any:
            return drawn

    with pytest.raises(error, match=text):
        make(Wrong()).sample()


def test_invalid_samplers_are_refused() -> None:
    with pytest.raises(TypeError, match="must be a name, or an object with a method sample; got int"):
        make(3)
    rb = make(None)
    with pytest.raises(
        TypeError, match="there is no sampler 'random'; .*the samplers are uniform, prioritized, "
    ):
        rb.set_sampler("random")
    with pytest.raises(TypeError, match="use the sampler of the same name"):
        make(theirs.RandomSampler())


def test_a_copy_asks_a_copy() -> None:
    copied = pickle.loads(pickle.dumps(adapt(Passes())))
    assert isinstance(copied, AdaptedSampler)
    assert make(copied).sample()["x"].tolist() == [0, 1]


# -- replacement=False ----------------------------------------------------------------------------------


def test_samplers_without_that_variant_refuse_it() -> None:
    class Mine(RandomSampler):
        pass

    for kind in (PrioritizedSampler, Mine):
        with pytest.raises(TypeError, match="has no without-replacement variant"):
            kind(replacement=False)


class Warm(PrioritizedSampler):
    """As a user of torchrl extends a sampler: whatever arguments come, more info out."""

    def sample(self, storage: Any, batch_size: int, *more: Any) -> Any:
        index, info = super().sample(storage, batch_size, *more)
        return index, info | {"temperature": 3.0}


def test_a_subclass_that_adds_to_the_info_keeps_its_kind_of_draw() -> None:
    rb = TensorDictReplayBuffer(
        storage=MemoryStorage(10), sampler=Warm(10, 1.0, 1.0), batch_size=4, priority_key="p"
    )
    rows = numbered_rows(6).set("p", torch.tensor([0.0, 0, 0, 0, 0, 1]))
    rb.extend(rows)
    batch, info = rb.sample(return_info=True)
    assert info["temperature"] == 3.0
    assert batch["index"].tolist() == [5] * 4  # by the priorities that came with the rows
    rb.update_priority(torch.arange(6), torch.tensor([1.0, 0, 0, 0, 0, 0]))
    assert rb.sample()["index"].tolist() == [0] * 4


def test_every_sampler_of_slices_is_a_slice_sampler() -> None:
    # Without sum trees TorchRL's prioritized sampler cannot be constructed: compare the classes.
    for name in ("SliceSamplerWithoutReplacement", "PrioritizedSliceSampler", "StreamingSliceSampler"):
        assert issubclass(getattr(expstore, name), SliceSampler), name
        assert issubclass(getattr(theirs, name), theirs.SliceSampler), name
    assert isinstance(SliceSampler(slice_len=5, replacement=False), SliceSampler)
    assert not isinstance(RandomSampler(), SliceSampler)
