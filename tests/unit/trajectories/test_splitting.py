"""Splitting rollouts and rings into trajectories, compared with TorchRL and plain loops."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorDict, lazy_stack
from torchrl.data import DEFAULT_DONE_KEYS as THEIR_DONE_KEYS
from torchrl.data import find_start_stop_traj as their_find

import expstore
from expstore import DEFAULT_DONE_KEYS, find_start_stop_traj, split_trajectories
from expstore.errors import SchemaError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # a module beside it uses what another one calls deprecated
    from torchrl.collectors.utils import split_trajectories as their_split

flags = st.lists(st.booleans(), min_size=1, max_size=12)


def rollout(done: list[bool] | list[list[bool]]) -> TensorDict:
    """Steps whose field x says which they are."""
    ends = torch.tensor(done)
    steps = torch.arange(1, ends.numel() + 1).reshape(ends.shape)
    return TensorDict(
        {
            "x": steps,
            "wide": steps[..., None] * torch.ones(3),
            "next": {"done": ends[..., None], "deep": {"y": -steps}},
        },
        [*ends.shape],
    )


def assert_same(made: Any, other: Any) -> None:
    assert made.batch_size == other.batch_size
    assert set(made.keys(True, True)) == set(other.keys(True, True))
    for key in other.keys(True, True):
        assert made[key].dtype == other[key].dtype, key
        assert torch.equal(made[key], other[key]), key


# -- splitting ----------------------------------------------------------------------------------------


@given(flags, st.integers(0, 4))
def test_rollouts_and_lanes_are_split_as_torchrl_does(done: list[bool], lanes: int) -> None:
    data = rollout([done[lane:] + done[:lane] for lane in range(lanes)] if lanes else done)
    assert_same(split_trajectories(data), their_split(data))
    assert "mask" not in data.keys()  # noqa: SIM118


def test_names_are_found_where_they_are() -> None:
    for place, keywords, mask in [
        (("collector", "traj_ids"), {}, ("collector", "mask")),
        (("agents", "traj_ids"), {"prefix": "agents"}, ("agents", "mask")),
        ("name", {"trajectory_key": "name"}, "mask"),
        (("next", "name"), {"trajectory_key": ("next", "name")}, ("next", "mask")),
        ("traj_ids", {"prefix": ()}, "mask"),
    ]:
        data = rollout([False] * 7).set(place, torch.tensor([5, 5, 5, 2, 2, 9, 9]))
        made = split_trajectories(data, **keywords)
        assert made["x"].tolist() == [[1, 2, 3], [4, 5, 0], [6, 7, 0]]
        assert made[mask].tolist() == [[True] * 3, [True, True, False], [True, True, False]]
        if keywords != {"prefix": ()}:  # which TorchRL does not take
            assert_same(made, their_split(data, **keywords))


def test_flags_of_another_name_split() -> None:
    data = rollout([False] * 5).set(("next", "lost"), torch.tensor([0, 1, 0, 0, 0]).bool())
    assert split_trajectories(data, done_key="lost")["x"].tolist() == [[1, 2, 0], [3, 4, 5]]
    assert_same(split_trajectories(data, done_key="lost"), their_split(data, done_key="lost"))


def test_trajectories_of_two_lanes_are_never_one() -> None:
    # TorchRL takes equal names for one trajectory wherever they stand.
    data = rollout([[False] * 4] * 2).set("traj_ids", torch.tensor([[0, 0, 1, 1], [1, 1, 0, 0]]))
    made = split_trajectories(data)
    assert made["x"].tolist() == [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert made["traj_ids"].tolist() == [[0, 0], [1, 1], [1, 1], [0, 0]]


def test_lanes_in_two_dims_have_names_of_their_own() -> None:
    data = rollout([[False, True, False]] * 4).reshape(2, 2, 3)
    made = split_trajectories(data)
    assert made["x"][:, 0].tolist() == [1, 3, 4, 6, 7, 9, 10, 12]
    assert made["traj_ids"].max(1).values.tolist() == list(range(8))


def test_trajectories_as_long_as_the_batch_stay() -> None:
    data = rollout([[False] * 3] * 2)
    assert split_trajectories(data).shape == (2, 3)
    assert split_trajectories(data)["mask"].all()
    assert split_trajectories(rollout([False] * 3)).shape == (1, 3)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [True, torch.strided, torch.jagged])
def test_nested_tensors_have_no_zeros(layout: Any) -> None:
    data = rollout([False, True, False, False])
    made = split_trajectories(data, as_nested=layout)
    assert made.batch_size == (2, -1)
    parts = [part.tolist() for part in made["x"].unbind()]
    assert parts == [[1, 2], [3, 4]]
    data = rollout([True, False, False])
    made = split_trajectories(data, as_nested=layout)
    assert made["x"].layout is (torch.strided if layout is True else layout)
    assert [part.tolist() for part in made["next", "deep", "y"].unbind()] == [[-1], [-2, -3]]
    assert_same(made.to_padded_tensor(mask_key="mask"), split_trajectories(data))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_objects_are_split_too() -> None:
    data = rollout([False, True, False])
    data["word"] = NonTensorStack("a", "b", "c")
    data["run"] = NonTensorData("r", batch_size=[3])
    made = split_trajectories(data)
    assert [list(row) for row in made["word"]] == [["a", "b"], ["c", None]]
    assert made["run"] == "r"
    nested = split_trajectories(data, as_nested=True)
    assert [list(row) for row in nested["word"]] == [["a", "b"], ["c"]]
    assert nested["run"] == "r"


def test_stacked_batches_are_split() -> None:
    data = rollout([False, True, False])
    assert_same(split_trajectories(lazy_stack(list(data.unbind(0)))), split_trajectories(data))


def test_unsplittable_data_is_refused() -> None:
    with pytest.raises(SchemaError, match=r"no field 'next\.done'.*trajectory_key"):
        split_trajectories(TensorDict({"x": torch.zeros(3)}, [3]))
    with pytest.raises(SchemaError, match="no steps"):
        split_trajectories(rollout([False])[:0])
    agents = TensorDict({"next": {"done": torch.zeros(3, 2, dtype=torch.bool)}}, [3])
    with pytest.raises(SchemaError, match=r"'next\.done' has shape \[3, 2\].*one value per step"):
        split_trajectories(agents)


# -- finding ------------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=24),
    st.sampled_from([(1,), (2,), (3, 2), (2, 1, 2)]),
    st.booleans(),
    st.sampled_from(["none", "int", "tensor", "range"]),
    st.booleans(),
)
def test_trajectories_in_rings_are_torchrls(
    values: list[int], lanes: tuple[int, ...], full: bool, kind: str, by_name: bool
) -> None:
    width = torch.Size(lanes).numel()
    given_rows = torch.tensor(values).repeat_interleave(width)
    given_rows = torch.roll(given_rows, 1).reshape(-1, *lanes) if lanes != (1,) else given_rows
    last = len(values) // 2
    cursor: Any = {"none": None, "int": last, "tensor": torch.tensor([0, last]), "range": range(last + 1)}[
        kind
    ]
    signal = {"trajectory": given_rows} if by_name else {"end": given_rows == 0}
    made = find_start_stop_traj(**signal, at_capacity=full, cursor=cursor)
    other = their_find(**signal, at_capacity=full, cursor=cursor)
    for own, their in zip(made, other, strict=True):
        assert own.dtype == their.dtype
        assert torch.equal(own, their)


def test_data_without_trajectories_raises_torchrls_errors() -> None:
    end = torch.tensor([False, True])
    wrong: list[dict[str, Any]] = [
        {},
        {"end": end, "trajectory": end},
        {"end": torch.tensor(True)},
        {"end": end[:0]},
        {"end": end, "cursor": torch.zeros(0, dtype=torch.int64)},
        {"end": end, "cursor": range(0)},
        {"end": end, "cursor": "last"},
    ]
    for keywords in wrong:
        with pytest.raises((TypeError, RuntimeError)) as theirs:
            their_find(**keywords, at_capacity=True)
        with pytest.raises(theirs.type) as ours:
            find_start_stop_traj(**keywords, at_capacity=True)
        assert str(ours.value) == str(theirs.value)


def test_flags_given_stay_as_they_are() -> None:
    end = torch.tensor([False, False, True, False])
    find_start_stop_traj(end=end, at_capacity=True, cursor=0, device="cpu")
    assert end.tolist() == [False, False, True, False]


def test_names_are_those_of_torchrl() -> None:
    assert DEFAULT_DONE_KEYS == THEIR_DONE_KEYS
    assert expstore.split_trajectories is split_trajectories


def test_invalid_batches_and_keys_are_refused() -> None:
    with pytest.raises(TypeError, match="takes steps as a TensorDict.*NoneType"):
        split_trajectories(None)  # type: ignore[arg-type]
    steps = TensorDict({("next", "done"): torch.zeros(3, dtype=torch.bool)}, [3])
    for name in ("trajectory_key", "done_key", "prefix"):
        with pytest.raises(TypeError, match=f"{name} is the key of a field"):
            split_trajectories(steps, **{name: 3})  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_unsigned_integers_are_split(dtype: torch.dtype) -> None:
    largest = int(torch.iinfo(dtype).max)
    data = rollout([False, True, False])
    data["x"] = torch.tensor([1, largest, 3], dtype=dtype)
    data["pairs"] = torch.tensor([[1, 2], [3, 4], [5, largest]], dtype=dtype)
    made = split_trajectories(data)
    assert made["x"].dtype is made["pairs"].dtype is dtype
    assert made["x"].tolist() == [[1, largest], [3, 0]]
    nested = split_trajectories(data, as_nested=True)
    assert nested["x"].layout is torch.strided
    assert [part.tolist() for part in nested["x"].unbind()] == [[1, largest], [3]]
    assert [part.tolist() for part in nested["pairs"].unbind()] == [[[1, 2], [3, 4]], [[5, largest]]]
