"""Trajectories by condition, from buffers and plain data, and which rows are read for it."""

from __future__ import annotations

import threading
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict, lazy_stack
from torchrl.data import replay_buffers as theirs

import expstore
from expstore import ListStorage, MemoryStorage, ReplayBuffer, TensorDictReplayBuffer
from expstore.errors import NotFoundError
from expstore.storages.base import Storage
from expstore.trajectories import Trajectory, filter_trajectories, iter_trajectories, traj
from tests.support.batches import memory_buffer, whole_trajectories

LENGTHS = (5, 3, 7)


steps = partial(
    whole_trajectories,
    observation=lambda number: torch.stack([2.0 * number, 2.0 * number + 1], 1),
    action=lambda number: number % 2,
)


def lengths_of(found: Any) -> list[int]:
    return [one.length for one in found]


# -- a trajectory -------------------------------------------------------------------------------------


def test_entries_are_found_at_the_root_or_below_next() -> None:
    one = Trajectory(steps(4))
    assert one.observation.shape == (4, 2)
    assert one.reward.shape == (4, 1)
    assert one.done[-1]
    assert one.length == len(one) == 4
    assert one.total_reward == 4
    assert one["next", "reward"].shape == (4, 1)
    assert one.get("missing", 7) == 7
    assert "action" in one.keys()  # noqa: SIM118
    with pytest.raises(AttributeError, match="no entry 'pixels'"):
        _ = one.pixels
    with pytest.raises(ValueError, match="single batch dimension"):
        Trajectory(steps(4).reshape(2, 2))


def test_parts_and_copies_are_trajectories() -> None:
    one, two = Trajectory(steps(5)), Trajectory(steps(3))
    for part, length in ((one[1:3], 2), (one.clone(), 5), (one.to("cpu"), 5)):
        assert isinstance(part, Trajectory)
        assert part.length == length
    assert isinstance(one[0], Trajectory)
    stacked = lazy_stack([one, two])
    assert isinstance(stacked, Trajectory)
    assert stacked[1].length == 3
    assert "length=5" in repr(one)
    assert "batch_size" in repr(stacked)


# -- conditions ---------------------------------------------------------------------------------------

CONDITIONS = {
    "sum": (lambda t: t.reward.sum() > 6.0, [7]),
    "length": (lambda t: t.length >= 5, [5, 7]),
    "and": (lambda t: (t.length >= 5) & (t.reward.mean() > 2), [7]),
    "or": (lambda t: (t.length < 5) | (t.reward.mean() > 2), [3, 7]),
    "not": (lambda t: ~(t.length >= 5), [3]),
    "any": (lambda t: (t.reward > 2.5).any(), [7]),
    "all": (lambda t: (t.reward >= 1).all(), [5, 3, 7]),
    "first": (lambda t: t.reward.first() == 2, [3]),
    "last": (lambda t: t.reward.last() != 2, [5, 7]),
    "least": (lambda t: t.reward.min() <= 1, [5]),
    "most": (lambda t: t.reward.max() < 3, [5, 3]),
    "nested": (lambda t: (t[("collector", "traj_ids")] == 1).all(), [3]),
    "total": (lambda t: t.total_reward > 6.0, [7]),
}


def test_conditions_are_true_of_the_same_trajectories_as_in_torchrl() -> None:
    for name in CONDITIONS:
        condition, expected = CONDITIONS[name]
        assert lengths_of(filter_trajectories(steps(*LENGTHS), condition(traj))) == expected
        assert lengths_of(memory_buffer(rows=steps(*LENGTHS)).query(condition(traj))) == expected
        assert lengths_of(theirs.filter_trajectories(steps(*LENGTHS), condition(theirs.traj))) == expected
        assert condition(traj).required_keys() == condition(theirs.traj).required_keys()


def test_expressions_compare_with_one_another() -> None:
    condition = traj.reward.sum() > traj.length
    assert lengths_of(filter_trajectories(steps(*LENGTHS), condition)) == [3, 7]
    assert condition.required_keys() == {"reward"}
    assert repr(condition) == "TrajectoryPredicate((traj.reward.sum() > traj.length))"


def test_invalid_conditions_are_refused() -> None:
    for act in (
        memory_buffer(rows=steps(*LENGTHS)).query,
        lambda condition: filter_trajectories(steps(*LENGTHS), condition),
    ):
        with pytest.raises(TypeError, match="any\\(\\) or .all\\(\\)"):
            act(traj.reward > 2.5)
        with pytest.raises(TypeError, match="built from traj or be a function"):
            act(3)
    with pytest.raises(TypeError, match="combine conditions with"):
        bool(traj.length > 3 and traj.length < 5)
    with pytest.raises(TypeError, match="any\\(\\) or .all\\(\\)"):
        _ = (traj.length > 3) & (traj.reward > 1)
    with pytest.raises(TypeError, match="both must be conditions"):
        _ = (traj.length > 3) & True
    with pytest.raises(KeyError, match="'pixels' not found in trajectory"):
        memory_buffer(rows=steps(*LENGTHS)).query(traj.pixels.sum() > 1)


# -- plain data ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [True, False])
@pytest.mark.filterwarnings("ignore:No field identifies")
def test_rows_are_split_by_names_or_ends(names: bool) -> None:
    data = steps(*LENGTHS, traj_key=("collector", "traj_ids") if names else None)
    data["next", "done"][-1] = False
    assert lengths_of(iter_trajectories(data)) == list(LENGTHS)
    assert list(iter_trajectories(data[:0])) == []


def test_names_part_without_a_warning_and_ends_with_one() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(iter_trajectories(steps(*LENGTHS)))
    with pytest.warns(UserWarning, match="end-of-episode"):
        list(iter_trajectories(steps(*LENGTHS, traj_key=None)))


def test_every_end_counts() -> None:
    data = steps(5, 3, ends=False, traj_key=None)
    flags = torch.zeros(8, 1, dtype=torch.bool)
    data["next", "terminated"], data["next", "truncated"] = flags.clone(), flags.clone()
    data["next", "terminated"][4] = data["next", "truncated"][7] = True
    with pytest.warns(UserWarning, match="end-of-episode"):
        assert lengths_of(iter_trajectories(data)) == [5, 3]


def test_the_field_of_names_can_be_said() -> None:
    data = steps(4, 6, ends=False)
    data["mine"] = data.pop("collector")["traj_ids"]
    assert lengths_of(iter_trajectories(data, trajectory_key="mine")) == [4, 6]
    with pytest.raises(KeyError, match="trajectory_key 'other' not found"):
        list(iter_trajectories(data, "other"))
    with pytest.raises(KeyError, match="Cannot split data into trajectories"):
        list(iter_trajectories(data))
    with pytest.raises(TypeError, match="TensorDictBase"):
        list(iter_trajectories(torch.zeros(3)))
    with pytest.raises(ValueError, match="single batch dimension"):
        list(iter_trajectories(data.reshape(2, 5)))


# -- buffers ------------------------------------------------------------------------------------------


def test_all_trajectories_come_whole_and_in_order() -> None:
    rb = memory_buffer(rows=steps(*LENGTHS))
    found = rb.query()
    assert lengths_of(found) == list(LENGTHS)
    assert all(isinstance(one, Trajectory) for one in found)
    assert torch.equal(torch.cat([one.observation for one in found]), rb[:]["observation"])
    assert TensorDictReplayBuffer(storage=MemoryStorage(3)).query() == []


def test_a_trajectory_is_followed_around_the_end_of_the_ring() -> None:
    rb = memory_buffer(10, rows=steps(5, 3))
    third = steps(4, first=2)
    rb.extend(third)
    assert lengths_of(rb.query()) == [3, 3, 4]
    (found,) = rb.query(traj["collector", "traj_ids"].first() == 2)
    assert torch.equal(found.observation, third["observation"])


def test_interleaved_trajectories_are_told_apart() -> None:
    rb = TensorDictReplayBuffer(storage=MemoryStorage(100, seed=1))
    both = torch.stack([steps(6), steps(6, first=1)], 1).reshape(-1)
    rb.extend(both)
    assert lengths_of(rb.query()) == [6, 6]
    assert lengths_of(rb.query(traj.reward.sum() == 12)) == [6]


def test_lanes_come_one_after_another() -> None:
    name = torch.tensor([[0, 0, 0, 1, 1, 1], [2, 2, 2, 2, 3, 3]])
    data = TensorDict({"collector": {"traj_ids": name}, "x": name.float()}, [2, 6])
    rb = TensorDictReplayBuffer(storage=MemoryStorage(12, seed=1, ndim=2))
    rb.extend(data)
    assert lengths_of(rb.query()) == [3, 3, 4, 2]
    assert [one.x[0].item() for one in rb.query()] == [0, 1, 2, 3]
    assert lengths_of(rb.query(traj.x.first() == 2)) == [4]


def test_the_field_of_names_can_be_said_to_a_buffer() -> None:
    rb = TensorDictReplayBuffer(storage=MemoryStorage(100, seed=1))
    data = steps(4, 6, ends=False)
    data["mine"] = data.pop("collector")["traj_ids"]
    rb.extend(data)
    assert lengths_of(rb.query(trajectory_key="mine")) == [4, 6]
    with pytest.raises(KeyError, match="trajectory_key 'other' not found"):
        rb.query(trajectory_key="other")
    with pytest.raises(NotFoundError, match="Cannot split data into trajectories"):
        rb.query()


def test_root_traj_ids_name_trajectories() -> None:
    rb = TensorDictReplayBuffer(storage=MemoryStorage(100, seed=1))
    rb.extend(TensorDict({"traj_ids": torch.tensor([4, 4, 5])}, [3]))
    assert lengths_of(rb.query()) == [2, 1]


def test_rows_of_other_kinds_have_no_trajectories() -> None:
    rb = ReplayBuffer(storage=MemoryStorage(10))
    rb.extend(torch.zeros(3, 2))
    with pytest.raises(TypeError, match="tensordict-backed"):
        rb.query()


def test_rows_that_are_objects_have_trajectories_if_they_are_tensordicts() -> None:
    rb = ReplayBuffer(storage=ListStorage(12), transform=Double("next", "reward"))
    rb.extend(list(steps(5, 3).unbind(0)))
    rb.extend(list(steps(6, first=2).unbind(0)))  # the first two rows have left
    assert lengths_of(rb.query()) == [3, 3, 6]
    assert lengths_of(rb.query(traj.reward.sum() > 11)) == [3, 6]
    assert rb.storage[0]["next", "reward"].item() == 3  # what is stored stays as it is
    other = ReplayBuffer(storage=ListStorage(4))
    other.extend([1, 2])
    with pytest.raises(TypeError, match="tensordict-backed"):
        other.query()
    pairs = ReplayBuffer(storage=ListStorage(4))
    pairs.extend([steps(2)])
    with pytest.raises(TypeError, match="single-transition"):
        pairs.query()


@pytest.mark.parametrize("length", [2, 5])
def test_a_condition_sees_what_a_function_of_the_trajectory_sees(tmp_path: Path, length: int) -> None:
    """Also where a field is a nested tensor or text, and where it stands at the root and below `next`."""
    words = [["a", "bb", "ccc"][n % 3] for n in range(15)]
    with expstore.open(tmp_path / "a.exp", layout="arrow", batch_size=4) as rb:
        data = steps(5, 3, 7)
        data["score"] = torch.arange(15.0)
        data["next", "score"] = -data["score"]
        data["tokens"] = torch.nested.as_nested_tensor(
            [torch.full((1 + n % 4,), n) for n in range(15)], layout=torch.jagged
        )
        data["word"] = NonTensorStack(*words)
        rb.extend(data)
        for condition, function in (
            (traj.score.sum() > 20, lambda t: t.score.sum() > 20),
            (traj["next", "score"].min() < -5, lambda t: t["next", "score"].min() < -5),
            (traj.tokens.max() > 7, lambda t: t.tokens.values().max() > 7),
            (traj.length > length, lambda t: t.length > length),
            (traj.total_reward > 10, lambda t: t.total_reward > 10),
            (~(traj.word.last() == "bb"), lambda t: t["word"][-1] != "bb"),
            ((traj.reward > 1).all() & (traj.done.last() == True), lambda t: (t.reward > 1).all()),  # noqa: E712
        ):
            found, wanted = rb.query(condition), rb.query(function)
            assert 0 < len(wanted) <= 3, condition
            assert [one["score"].tolist() for one in found] == [one["score"].tolist() for one in wanted]
            assert found[0]["word"] == wanted[0]["word"]
        with pytest.raises(NotFoundError, match="'missing' not found"):
            rb.query(traj.missing.sum() > 1)
    rb = TensorDictReplayBuffer(storage=MemoryStorage(9))
    rb.extend(steps(*LENGTHS).exclude(("next", "reward")))
    with pytest.raises(AttributeError, match="no entry 'reward'"):
        rb.query(traj.total_reward > 1)


def test_a_condition_is_asked_without_making_trajectories(monkeypatch: pytest.MonkeyPatch) -> None:
    """Making one takes several times as long."""
    made: list[Any] = []
    monkeypatch.setattr(
        "expstore.trajectories.search.Trajectory",
        lambda data, **more: made.append(data) or Trajectory(data, **more),
    )
    rb = memory_buffer(rows=steps(*LENGTHS))
    for condition, count in (
        (traj.reward.sum() > 6, 1),
        (~(traj.reward.sum() > 6) & (traj.length > 1), 2),
        (lambda t: t.length > 100, 3),
    ):
        made.clear()
        rb.query(condition)
        assert len(made) == count


def test_only_the_fields_that_are_named_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    rb = memory_buffer(rows=steps(*LENGTHS))
    asked: list[tuple[str, ...]] = []
    read = Storage.read

    def note(self: Storage, ids: Any, places: Any = None) -> Any:
        fields = self.require_schema().fields
        asked.append(
            tuple(fields[place].key[-1] for place in (range(len(fields)) if places is None else places))
        )
        return read(self, ids, places)

    monkeypatch.setattr(Storage, "read", note)
    assert rb.query(traj.reward.sum() > 100) == []
    assert asked == [("reward",)]
    asked.clear()
    assert rb.query(traj.length > 100) == []
    assert asked == [()]
    asked.clear()
    assert lengths_of(rb.query(traj.reward.sum() > 6)) == [7]
    assert [len(fields) for fields in asked] == [1, 5]


class Double:
    """Double a field, and count."""

    def __init__(self, *key: str) -> None:
        self.in_keys = self.out_keys = [key]
        self.calls = 0

    def forward(self, data: TensorDict) -> TensorDict:
        self.calls += 1
        key = self.in_keys[0]
        return data.set(key, data[key] * 2)


def test_conditions_see_what_transforms_make() -> None:
    rb = memory_buffer(rows=steps(*LENGTHS), transform=Double("next", "reward"))
    found = rb.query(traj.reward.sum() > 11)  # 5, 6 and 21 before
    assert lengths_of(found) == [3, 7]
    assert found[1].reward.sum() == 42


def test_transforms_that_do_not_matter_are_left_out() -> None:
    rb = memory_buffer(rows=steps(*LENGTHS), transform=Double("observation"))
    (double,) = rb.transform
    assert rb.query(traj.reward.sum() > 100) == []
    assert double.calls == 0
    (found,) = rb.query(traj.reward.sum() > 6)
    assert double.calls == 1
    assert torch.equal(found.observation, rb.storage[:]["observation"][8:] * 2)
    assert len(rb.query(lambda t: bool(t.observation.sum()))) == 3
    assert double.calls == 2


def test_a_transform_of_which_nothing_is_known_is_done_first() -> None:
    rb = memory_buffer(
        rows=steps(*LENGTHS), transform=lambda data: data.set("bonus", data["next", "reward"] + 1)
    )
    assert lengths_of(rb.query(traj.bonus.last() > 3)) == [7]


def test_a_query_during_fast_writes_never_mixes_rows() -> None:
    rb = TensorDictReplayBuffer(storage=MemoryStorage(64, seed=1))
    rb.extend(steps(*(8,) * 8))
    stop = threading.Event()

    def write() -> None:
        number = 8
        while not stop.is_set():
            rb.extend(steps(8, first=number))
            number += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(50):
            for one in rb.query(traj.reward.first() > 2):
                assert len(one["collector", "traj_ids"].unique()) == 1
                assert (one.reward[:, 0] == one["collector", "traj_ids"] + 1).all()
    finally:
        stop.set()
        writer.join()
