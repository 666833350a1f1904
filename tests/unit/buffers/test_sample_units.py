"""Sequences around sampled rows equal torchrl's for one lane, and plain Python's for interleaved lanes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchrl.data as rl
from tensordict import TensorDict

import expstore
from expstore import (
    ReplayBuffer,
    SliceSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from expstore.buffers import SampleUnit, Sequence, Transition
from expstore.core.values import Selection
from expstore.errors import NotFoundError, SchemaError
from expstore.samplers import ConsumingSampler, PrioritizedSampler, RandomSampler, SamplerWithoutReplacement
from expstore.storages.memory import MemoryStorage
from tests.support.batches import trajectory_rows

UNITS = (
    {"length": 3},
    {"length": 2, "burn_in": 2, "bootstrap": 1},
    {"length": 3, "episode_boundary": "stop"},
    {"length": 2, "episode_boundary": "stop", "burn_in": 1, "bootstrap": 2, "dilation": 2},
    {"length": 1, "burn_in": 3, "dilation": 3},
)


@pytest.mark.parametrize("options", UNITS)
def test_windows_are_torchrls(options: dict[str, Any]) -> None:
    done = torch.zeros(12, 1, dtype=torch.bool)
    done[[3, 4, 9, 11]] = True
    data = TensorDict({"x": torch.arange(12), "next": {"done": done, "terminated": done}}, [12])
    theirs = rl.TensorDictReplayBuffer(
        storage=rl.LazyTensorStorage(12), sample_unit=rl.Sequence(**options), batch_size=12
    )
    theirs.extend(data)
    rb = ReplayBuffer(storage=MemoryStorage(12))
    rb.extend(data)
    expected, info = rl.Sequence(**options).expand(torch.arange(12), {}, theirs._storage)
    found = Sequence(**options).select(Selection(np.arange(12) + 1), rb.storage)
    assert found is not None
    assert (found.ids - 1).tolist() == expected.tolist()
    for name in ("sequence_id", "step_in_sequence", "learning_mask", "validity_mask", "anchor_index"):
        assert found.info[(name,)].tolist() == info[name].tolist(), name
    index, told = Sequence(**options).expand(torch.arange(12), {"weight": torch.arange(12)}, rb.storage)
    assert index.tolist() == expected.tolist()
    assert {name: values.tolist() for name, values in told.items() if name in info} == {
        name: values.tolist() for name, values in info.items()
    }
    assert told["weight"].tolist() == told["anchor_index"].tolist()


class Plain:
    """What windows are, written out for one anchor at a time."""

    def __init__(self, length: int, boundary: str, burn_in: int, bootstrap: int, dilation: int) -> None:
        self.length, self.boundary = length, boundary
        self.burn_in, self.bootstrap, self.dilation = burn_in, bootstrap, dilation

    def window(self, steps: list[int], anchor: int) -> list[tuple[int, bool]]:
        """Return step and whether it is there, of each row of a window, from an episode's readable steps."""
        begin = anchor
        if self.boundary == "stop":
            while begin > steps[0] and begin + self.dilation * (self.length + self.bootstrap - 1) > steps[-1]:
                begin -= 1
        wanted = [
            begin + self.dilation * place for place in range(-self.burn_in, self.length + self.bootstrap)
        ]
        return [(min(max(step, steps[0]), steps[-1]), steps[0] <= step <= steps[-1]) for step in wanted]


@pytest.mark.some(3)
@pytest.mark.parametrize("options", UNITS)
@pytest.mark.parametrize("sampler", [RandomSampler, SamplerWithoutReplacement, PrioritizedSampler])
def test_windows_follow_interleaved_episodes(options: dict[str, Any], sampler: type[Any]) -> None:
    unit = Sequence(**options)
    plain = Plain(unit.length, unit.episode_boundary, unit.burn_in, unit.bootstrap, unit.dilation)
    rb = TensorDictReplayBuffer(storage=MemoryStorage(40), sampler=sampler(), sample_unit=unit, batch_size=16)
    at = {1: 0, 2: 0, 3: 0}
    for cycle in range(60):
        trajectory, count = 1 + cycle % 3, 1 + cycle % 4
        rb.extend(trajectory_rows(trajectory, count, at[trajectory]))
        at[trajectory] += count
        if cycle < 10:
            continue
        (held,) = rb.storage.read(rb.storage.window.ids(), [rb.storage.require_schema().place_of(("x",))])
        batch = rb.sample()
        count = batch.shape[0] // unit.rows  # without replacement the end of a pass is shorter
        assert batch.shape == (count * unit.rows,)
        anchors = rb[batch["anchor_index"]]["x"].view(count, -1)[:, 0]
        for anchor, found, valid in zip(
            anchors.tolist(), batch["x"].view(count, -1), batch["validity_mask"].view(count, -1), strict=True
        ):
            steps = sorted(x % 1000 for x in held.tolist() if x // 1000 == anchor // 1000)
            expected = plain.window(steps, anchor % 1000)
            assert [
                (x - anchor // 1000 * 1000, v) for x, v in zip(found.tolist(), valid.tolist(), strict=True)
            ] == expected
        assert batch["sequence_id"].view(count, -1)[:, 0].tolist() == list(range(count))
        learned = [unit.burn_in <= place < unit.burn_in + unit.length for place in range(unit.rows)]
        assert batch["learning_mask"].view(count, -1).tolist() == [learned] * count


def test_priorities_go_to_anchors() -> None:
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, storage=MemoryStorage(20), sample_unit=Sequence(3, burn_in=1), batch_size=6
    )
    rb.extend(trajectory_rows(1, 8))
    batch = rb.sample()
    assert batch["priority_weight"].shape == (24,)
    batch["td_error"] = (batch["x"] * 7 % 11).float() + 100 * (~batch["validity_mask"]).float()
    anchors = set(batch["anchor_index"].tolist())
    assert rb.update_tensordict_priority(batch) == len(anchors)
    for index in range(8):
        window = range(max(0, index - 1), min(8, index + 3))
        expected = max((1000 + step) * 7 % 11 for step in window) if index in anchors else 1.0
        assert rb.storage.priorities.values[index] == expected


def test_windows_are_not_taken_in_again() -> None:
    rb = TensorDictReplayBuffer(storage=MemoryStorage(20), sample_unit=Sequence(2), batch_size=2)
    rb.extend(trajectory_rows(1, 8))
    assert rb.extend(rb.sample()).tolist() == [8, 9, 10, 11]


def test_plain_buffers_report_it_in_the_info() -> None:
    rb = ReplayBuffer(storage=MemoryStorage(20), sample_unit=Sequence(2), batch_size=2)
    rb.extend(trajectory_rows(1, 8))
    batch, info = rb.sample(return_info=True)
    assert sorted(batch.keys()) == ["episode", "x"]
    assert {"anchor_index", "anchor_id", "learning_mask", "validity_mask", "sequence_id"} <= info.keys()
    assert (info["anchor_id"] - 1 == info["anchor_index"]).all()


def test_a_field_may_end_sequences() -> None:
    cut = torch.tensor([[False], [True], [False], [False], [True], [False]])
    rb = TensorDictReplayBuffer(
        storage=MemoryStorage(20), sample_unit=Sequence(6, done_key="cut"), batch_size=60
    )
    rb.extend(trajectory_rows(1, 6).set("cut", cut))
    batch = rb.sample()
    ends = {
        (int(anchor), int(x[valid].max()))
        for anchor, x, valid in zip(
            batch["anchor_index"].view(60, -1)[:, 0],
            batch["x"].view(60, -1) - 1000,
            batch["validity_mask"].view(60, -1),
            strict=True,
        )
    }
    assert ends == {(0, 1), (1, 1), (2, 4), (3, 4), (4, 4), (5, 5)}
    rb = TensorDictReplayBuffer(storage=rb.storage, sample_unit=Sequence(6, done_key="nobody"), batch_size=2)
    with pytest.raises(SchemaError, match="nobody"):
        rb.sample()


def test_the_one_row_unit_changes_nothing() -> None:
    one, other = (
        TensorDictReplayBuffer(storage=MemoryStorage(20), batch_size=8, sample_unit=unit)
        for unit in (None, Transition())
    )
    for rb in (one, other):
        rb.extend(trajectory_rows(1, 20))
    assert one.sample()["x"].tolist() == other.sample()["x"].tolist()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_restart_and_prefetching_draw_the_same(store_path: Path, prefetch: int) -> None:
    def opened(ahead: int, **options: Any) -> TensorDictReplayBuffer:
        unit = Sequence(2, burn_in=1, bootstrap=1)
        return expstore.open(
            store_path, batch_size=8, batches=expstore.Batches(prefetch=ahead, sample_unit=unit), **options
        )

    with opened(0, capacity=50, seed=4) as rb:
        for first in range(0, 30, 3):
            rb.extend(trajectory_rows(1, 3, first), source="a")
            rb.extend(trajectory_rows(2, 3, first), source="b")
        expected = [rb.sample() for _ in range(12)]
        assert {"id", "anchor_id", "anchor_index"} <= set(expected[0].keys())
        rb.storage.draws.set(0, rb.storage.draws.progress)
    with opened(prefetch) as rb:
        for batch in expected:
            assert (rb.sample() == batch).all()
        rb.update_tensordict_priority(batch.set("td_error", torch.rand(32)))


def test_anchors_that_have_left_are_drawn_again() -> None:
    unit = Sequence(2)
    rb = TensorDictReplayBuffer(storage=MemoryStorage(4), sample_unit=unit, batch_size=2)
    rb.extend(trajectory_rows(1, 9))
    assert unit.select(Selection(np.array([9, 1])), rb.storage) is None
    drawn = rb.sampler.sample
    tries = []

    def stale(*arguments: Any) -> Selection:
        tries.append(1)
        return Selection(np.array([1, 2])) if len(tries) == 1 else drawn(*arguments)

    rb.sampler.sample = stale  # type: ignore[method-assign]
    assert (rb.sample()["x"] >= 1005).all()
    assert len(tries) == 2
    assert rb.stats()["redraws"] == 1


def test_anchors_that_are_overwritten_while_they_are_looked_up_are_drawn_again() -> None:
    rb = TensorDictReplayBuffer(storage=MemoryStorage(10))
    rb.extend(trajectory_rows(1, 20))
    unit, anchors = Sequence(2), Selection(np.array([12, 15]))
    assert unit.select(anchors, rb.storage) is not None
    rb.storage._state.horizon = 12 + (rb.storage.geometry.slots or 0)  # as an extend does before it writes
    assert unit.select(anchors, rb.storage) is None


def test_rows_that_are_consumed_are_the_anchors() -> None:
    rb = TensorDictReplayBuffer(
        storage=MemoryStorage(10), sampler=ConsumingSampler(), sample_unit=Sequence(3), batch_size=5
    )
    rb.extend(trajectory_rows(1, 10))
    found = [rb.sample()["anchor_index"].view(5, 3)[:, 0].tolist() for _ in range(2)]
    assert sorted(found[0] + found[1]) == list(range(10))


def test_settings_that_make_no_sense() -> None:
    for wrong in ({"length": 3.5}, {"length": 2, "burn_in": 1.5}, {"length": True}):
        with pytest.raises(TypeError, match="must be a whole number"):
            Sequence(**wrong)  # type: ignore[arg-type]
    for options, match in (
        ({"length": 0}, "length must be strictly positive"),
        ({"burn_in": -1}, "burn_in must be non-negative"),
        ({"bootstrap": -1}, "bootstrap must be non-negative"),
        ({"dilation": 0}, "dilation must be strictly positive"),
        ({"episode_boundary": "include_reset"}, "never cross the end of an episode"),
        ({"done_key": None}, "cross the ends of episodes"),
    ):
        with pytest.raises(ValueError, match=match):
            Sequence(**({"length": 1} | options))  # type: ignore[arg-type]


def test_units_that_do_not_fit_are_refused(store_path: Path) -> None:
    with pytest.raises(ValueError, match="draws slices"):
        expstore.open(
            store_path, sampler=SliceSampler(slice_len=2), batches=expstore.Batches(sample_unit=Sequence(2))
        )
    assert not store_path.exists()
    with pytest.raises(TypeError, match="must be a SampleUnit"):
        ReplayBuffer(storage=MemoryStorage(5), sample_unit=3)  # type: ignore[arg-type]


class Doubled(SampleUnit):
    """A unit as one writes it for TorchRL: every row, and the one at the same place from the end."""

    def expand(self, index: torch.Tensor, info: dict[str, Any], storage: Any) -> tuple[torch.Tensor, Any]:
        both = torch.stack([index, len(storage) - 1 - index], 1).reshape(-1)
        told = {name: values.repeat_interleave(2, 0) for name, values in info.items()}
        return both, told | {"anchor": index.repeat_interleave(2), "size": len(storage)}


def test_units_written_for_torchrl_make_batches() -> None:
    rb = TensorDictReplayBuffer(
        storage=MemoryStorage(10, seed=0), sampler=PrioritizedSampler(10, 0.7, 0.9), sample_unit=Doubled()
    )
    rb.extend(TensorDict({"x": torch.arange(10)}, [10]))
    batch, info = rb.sample(4, return_info=True)
    pairs = batch["x"].reshape(4, 2)
    assert (pairs.sum(1) == 9).all()
    assert batch["anchor"].tolist() == pairs[:, :1].expand(4, 2).reshape(-1).tolist()
    assert batch["index"].tolist() == batch["x"].tolist()
    assert batch["priority_weight"].shape == (8,)
    assert info["size"] == 10


def test_units_must_choose_rows_that_are_there() -> None:
    class Beyond(SampleUnit):
        def expand(self, index: torch.Tensor, info: dict[str, Any], storage: Any) -> tuple[Any, Any]:
            return index + len(storage), info

    rb = ReplayBuffer(storage=MemoryStorage(10), sample_unit=Beyond())
    rb.extend(TensorDict({"x": torch.arange(4)}, [4]))
    with pytest.raises(NotFoundError, match="no row with index"):
        rb.sample(2)


class Declining(Transition):
    """A unit that never finds its rows."""

    def select(self, anchors: Selection, storage: Any) -> Any:
        return None

    def __repr__(self) -> str:
        return "Declining()"


def test_a_unit_that_never_returns_rows_is_named() -> None:
    rb = expstore.TensorDictReplayBuffer(storage=MemoryStorage(100), sample_unit=Declining(), batch_size=4)
    rb.extend(trajectory_rows(0, 10))
    with pytest.raises(
        expstore.errors.StateError, match=r"the sample unit Declining\(\) returned None 1,000 times"
    ):
        rb.sample()
