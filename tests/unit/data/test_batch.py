"""Batches: TensorDicts become columns and back; lanes, ends, starts and dropped rows are recognised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchrl.data as rl
from tensordict import TensorDict

import expstore
from expstore.data.batch import Batch, Builder, Layout, StepReader, flatten
from expstore.errors import SchemaError
from expstore.schema.field_roles import find_keys
from expstore.schema.schema import Field, Schema
from tests.support.tensor_bits import DTYPES, bits, random_bits


@pytest.mark.some(4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (2, 3)], ids=str)
def test_a_tensor_comes_back_bit_for_bit(
    dtype: torch.dtype, shape: tuple[int, ...], rng: np.random.Generator
) -> None:
    data = TensorDict({"a": {"b": random_bits(dtype, (5, *shape), rng)}}, [5])
    batch = flatten(data, Layout(all_dims=True))
    assert batch.keys == [("a", "b")]
    assert batch.dtypes == [str(dtype).removeprefix("torch.")]
    schema = Schema.infer(batch.signature())
    columns = [np.array(c) for c in schema.arrange(batch.keys, batch.dtypes, batch.arrays)]
    found = Builder(schema).build(columns, torch.Size([5]), {})
    assert found.batch_size == found["a"].batch_size == torch.Size([5])
    assert found["a", "b"].dtype is dtype
    assert found["a", "b"].shape == (5, *shape)
    assert bits(found["a", "b"]) == bits(data["a", "b"])
    one = [c[2:3].reshape(c.shape[1:]) for c in columns]
    row = Builder(schema).build(one, torch.Size([]), {})
    assert row.batch_size == torch.Size([])
    assert row["a", "b"].shape == shape
    assert bits(row["a", "b"]) == bits(data["a", "b"][2])


def test_layouts_that_are_not_plain() -> None:
    base = torch.arange(24.0).reshape(4, 6)
    data = TensorDict(
        {
            "strided": base[:, ::2],
            "expanded": torch.ones(1, 3).expand(4, 3),
            "needs_gradient": base.clone().requires_grad_() * 2,
            "half": base.to(torch.bfloat16)[:, 1::2],
        },
        [4],
    )
    batch = flatten(data, Layout(all_dims=True))
    for key, array in zip(batch.keys, batch.arrays, strict=True):
        expected = data[key].detach()
        if key == ("half",):
            expected = expected.contiguous().view(torch.uint16)
        np.testing.assert_array_equal(array, expected.numpy())


def test_dims_become_rows_and_lanes() -> None:
    value = torch.arange(24).reshape(2, 3, 4)
    batch = flatten(TensorDict({"a": value[..., None]}, [2, 3, 4]), Layout(all_dims=True))
    assert batch.arrays[0].shape == (24, 1)
    assert (batch.count, batch.lane_count) == (24, 6)
    np.testing.assert_array_equal(batch.arrays[0][:, 0], range(24))
    np.testing.assert_array_equal(batch.lanes, np.repeat(range(6), 4))

    named = TensorDict({"a": value}, [2, 3, 4], names=["env", "time", "agent"])
    batch = flatten(named, Layout(all_dims=True))
    np.testing.assert_array_equal(batch.lanes.reshape(2, 3, 4)[:, 0], [[0, 1, 2, 3], [4, 5, 6, 7]])
    assert (batch.lanes.reshape(2, 3, 4) == batch.lanes.reshape(2, 3, 4)[:, :1]).all()

    first = flatten(TensorDict({"a": value}, [4 // 2, 3], names=["time", None]), Layout(all_dims=True))
    np.testing.assert_array_equal(first.lanes, [0, 1, 2, 0, 1, 2])
    assert first.arrays[0].shape == (6, 4)

    flat = flatten(TensorDict({"a": value}, [2, 3]), Layout())
    assert (flat.count, flat.lanes, flat.arrays[0].shape) == (2, None, (2, 3, 4))
    one_lane = flatten(TensorDict({"a": value[0, 0]}, [4]), Layout(all_dims=True))
    assert (one_lane.count, one_lane.lanes, one_lane.lane_count) == (4, None, 1)


def test_one_row() -> None:
    data = TensorDict({"a": torch.arange(3), "n": {"b": torch.tensor(1.5)}}, [])
    batch = flatten(data, Layout(all_dims=True), single=True)
    assert batch.count == 1
    assert [array.shape for array in batch.arrays] == [(1, 3), (1,)]
    with pytest.raises(
        SchemaError, match=r"add\(\) takes one transition, got batch size \[3\]; use extend\(\)"
    ):
        flatten(TensorDict({"a": torch.arange(3)}, [3]), Layout(all_dims=True), single=True)
    whole = flatten(TensorDict({"a": torch.zeros(3, 2)}, [3]), Layout(), single=True)
    assert whole.arrays[0].shape == (1, 3, 2)  # a row may be a whole trajectory


def test_root_keys_are_skipped_at_the_root_only() -> None:
    data = TensorDict({"index": torch.zeros(2), "a": {"index": torch.zeros(2)}}, [2])
    assert flatten(data, Layout(all_dims=True), skip=frozenset({"index"})).keys == [("a", "index")]


def test_invalid_batches_are_refused() -> None:
    for data, message in [
        (TensorDict({"a": torch.tensor(0)}, []), r"got one row without batch dims; use add\(\)"),
        (
            TensorDict({"a": {"b": torch.zeros(2, dtype=torch.complex128)}}, [2]),
            "'a.b' has dtype torch.complex128",
        ),
        (TensorDict({"a": torch.zeros(2, dtype=torch.float8_e4m3fn)}, [2]), "'a' has dtype torch.float8"),
    ]:
        with pytest.raises(SchemaError, match=message):
            flatten(data, Layout(all_dims=True))


# ---------------------------------------------------------------------------------------------------
# What rows are to their episodes.


def read(**fields: Any) -> tuple[StepReader, list[np.ndarray], Batch]:
    data = TensorDict({}, [4])
    for name, values in fields.items():
        tensor = values if isinstance(values, torch.Tensor) else torch.tensor(values)
        data[tuple(name.split("__"))] = tensor
    batch = flatten(data, Layout(all_dims=True))
    schema = Schema.infer(batch.signature())
    columns = schema.arrange(batch.keys, batch.dtypes, batch.arrays)
    return StepReader(schema, find_keys(schema)), columns, batch


def steps(**fields: Any) -> dict[str, Any]:
    reader, columns, batch = read(**fields)
    found = reader.read(columns, batch)
    names = ("terminated", "truncated", "starts", "trajectories", "rewards")
    return {n: v.tolist() for n in names if (v := getattr(found, n)) is not None}


T, F = True, False


def test_ends_are_read_from_next() -> None:
    found = steps(
        a=[0.0] * 4,
        terminated=[[T]] * 4,  # speaks of the observation before the step
        next__terminated=[[F], [T], [F], [F]],
        next__truncated=[[F], [F], [T], [F]],
        next__done=[[F], [T], [T], [T]],
    )
    assert found == {"terminated": [F, T, F, F], "truncated": [F, F, T, T]}


def test_an_end_that_is_not_terminated_is_truncated() -> None:
    found = steps(next__terminated=[F, T, F, F], next__done=[F, T, T, F])
    assert found == {"terminated": [F, T, F, F], "truncated": [F, F, T, F]}
    found = steps(next__terminated=[F, T, F, F], next__truncated=[F, F, F, T], next__done=[F, F, T, F])
    assert found == {"terminated": [F, T, F, F], "truncated": [F, F, T, T]}
    assert steps(next__terminated=[F, T, F, F]) == {"terminated": [F, T, F, F]}


def test_done_alone_ends() -> None:
    assert steps(next__done=[F, T, F, F]) == {"terminated": [F, T, F, F]}
    assert steps(next__done=[F, T, T, F], next__truncated=[F, F, T, F]) == {
        "terminated": [F, T, F, F],
        "truncated": [F, F, T, F],
    }
    assert steps(next__done=[0, 2, 0, 1]) == {"terminated": [F, T, F, T]}


def test_without_next_the_root_speaks() -> None:
    assert steps(terminated=[F, T, F, F], reward=[1, 2, 3, 4]) == {
        "terminated": [F, T, F, F],
        "rewards": [1, 2, 3, 4],
    }


def test_starts_and_trajectories() -> None:
    assert steps(is_init=[[T], [F], [F], [T]])["starts"] == [T, F, F, T]
    assert steps(step_count=[0, 1, 2, 0])["starts"] == [T, F, F, T]
    assert steps(collector__traj_ids=[5, 5, 6, 6], episode=[1, 1, 1, 1])["trajectories"] == [5, 5, 6, 6]
    assert steps(episode=torch.tensor([1, 1, 2, 2], dtype=torch.uint8))["trajectories"] == [1, 1, 2, 2]


def test_rewards_of_any_dtype_are_numbers() -> None:
    for dtype in [torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.bool]:
        values = torch.tensor([[1.0], [0.0], [1.0], [0.0]]).to(dtype)
        assert steps(next__reward=values)["rewards"] == [1, 0, 1, 0]
        if dtype.is_floating_point:
            assert steps(next__reward=values * -1.5)["rewards"] == [-1.5, 0, -1.5, 0]


def test_rewards_that_are_not_numbers_are_left_out() -> None:
    assert steps(next__reward=torch.zeros(4, dtype=torch.complex64)) == {}
    assert steps(next__reward=torch.zeros(4, 2)) == {}


def test_rows_that_are_not_transitions_are_masked() -> None:
    reader, columns, batch = read(
        a=[0, 1, 2, 3], collector__traj_ids=[0, -1, 0, 0], collector__mask=[T, T, F, T]
    )
    kept = reader.transitions(columns)
    assert kept.tolist() == [T, F, F, T]
    assert batch.keep(kept).count == 2
    for fields in ({"a": [0, 1, 2, 3]}, {"collector__mask": [T] * 4}, {"episode": [0, 1, 2, -2]}):
        reader, columns, _ = read(**fields)
        assert reader.transitions(columns) is None
    reader, columns, _ = read(episode=[[-1], [1], [2], [-1]])
    assert reader.transitions(columns).tolist() == [F, T, T, F]


# ---------------------------------------------------------------------------------------------------
# Dims of TensorDicts within the batch.


def nested(*size: int, names: tuple[str | None, ...] = ()) -> TensorDict:
    """A batch with TensorDicts in it that have dims of their own, named if those of the batch are."""

    def inner(fields: dict[str, Any], more: list[int], named: list[str | None]) -> TensorDict:
        return TensorDict(fields, [*size, *more], names=[*names, *named] if names else None)

    count = int(np.prod(size))
    deep = inner({"x": torch.arange(count * 6.0).reshape(*size, 3, 2)}, [3, 2], ["agent", None])
    agents = inner({"reward": torch.zeros(*size, 3, 1), "deep": deep}, [3], ["agent"])
    plain = inner({"y": torch.zeros(*size, 2)}, [], [])
    return inner({"n": torch.arange(count).reshape(size), "agents": agents, "plain": plain}, [], [])


def dims(data: Any) -> dict[Any, Any]:
    found = {(): (tuple(data.batch_size), list(data.names))}
    for key in ("agents", "plain", ("agents", "deep")):
        found[key] = (tuple(data[key].batch_size), list(data[key].names))
    return found


@pytest.mark.parametrize("names", [(), ("time",)])
def test_nested_dims_come_back_as_from_torchrl(tmp_path: Path, names: tuple[str | None, ...]) -> None:
    theirs = rl.TensorDictReplayBuffer(storage=rl.LazyTensorStorage(20), batch_size=4)
    theirs.extend(nested(6, names=names))
    folder = tmp_path / "b.exp"
    made = (
        lambda: expstore.open(tmp_path / "a.exp", batch_size=4),
        lambda: expstore.TensorDictReplayBuffer(
            storage=expstore.LazyMemmapStorage(20, scratch_dir=folder, existsok=True),
            batch_size=4,
        ),
    )
    for make in made:
        with make() as rb:
            rb.extend(nested(6, names=names))
            rb.extend(nested(2))  # the first batch has said it
            rb.dumps(tmp_path / "versions")
            if not names:
                rb.columns.add(("agents", "wide"), fill=0.0)  # a field that lacks the agents' dim
                assert rb.sample()["agents"].batch_size == (4,)
                rb.columns.drop(("agents", "wide"))
        with make() as rb:
            for ours, wanted in ((rb.sample(), theirs.sample()), (rb[:6], theirs[:]), (rb[0], theirs[0])):
                assert dims(ours) == dims(wanted)
            assert torch.equal(rb[:6]["agents", "deep", "x"], theirs[:]["agents", "deep", "x"])
            rb.extend(rb[:2])
    with expstore.TensorDictReplayBuffer(storage=expstore.MemoryStorage(20), batch_size=4) as rb:
        rb.loads(tmp_path / "versions")
        assert dims(rb.sample()) == dims(theirs.sample())


def test_dims_that_rows_have_themselves_keep_their_names() -> None:
    theirs = rl.TensorDictReplayBuffer(storage=rl.LazyTensorStorage(20), batch_size=2)
    ours = expstore.TensorDictReplayBuffer(storage=expstore.MemoryStorage(20), batch_size=2)
    for rb in (theirs, ours):
        rb.extend(nested(4, 3, names=("time", "step")))
    assert dims(ours[:]) == dims(theirs[:])
    assert dims(ours[1]) == dims(theirs[1])
    assert dims(ours.sample().exclude("index", "id")) == dims(theirs.sample().exclude("index"))
    assert dims(ours[:])["agents"] == ((4, 3, 3), [None, "step", "agent"])


def test_rows_along_all_dims_keep_those_of_nested_tensordicts(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "a.exp", batch_size=5) as rb:
        rb.extend(nested(2, 4, names=("env", "time")))
        assert dims(rb.sample()) == {
            (): ((5,), [None]),
            "plain": ((5,), [None]),
            "agents": ((5, 3), [None, "agent"]),
            ("agents", "deep"): ((5, 3, 2), [None, "agent", None]),
        }


def test_a_damaged_form_is_refused() -> None:
    for form in [
        "[",
        "7",
        '{"nested": 3}',
        '{"nested": [3]}',
        '{"nested": [["a", [3], []]]}',
        '{"nested": [[["a"], [3], [4]]]}',
        '{"nested": [[["a"], [3, 3], ["x", "x"]]]}',
        '{"batch_size": 3}',
        "[" * 50_000,
    ]:
        with pytest.raises(SchemaError, match="nested TensorDicts cannot be read"):
            Builder(Schema([Field(("a", "x"), "float32", (3,))], form))
