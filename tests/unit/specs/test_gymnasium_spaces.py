"""gymnasium spaces become specs of the same values and back; a collector stores them.

Run with the other tests. Hypothesis draws the spaces.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

import expstore
from expstore import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    Unbounded,
)
from expstore.collectors.lanes import LaneCollector as Collector
from expstore.collectors.space_fields import fields_of, put_final, read_values
from expstore.errors import ArgumentError, SchemaError
from expstore.specs import Choice, NonTensor
from expstore.specs.gymnasium_spaces import from_space, to_space
from tests.support.flat_storages import flatten_dims

shapes = st.lists(st.integers(1, 3), min_size=1, max_size=2).map(tuple)


@st.composite
def boxes(draw: st.DrawFn) -> spaces.Box:
    dtype = draw(st.sampled_from([np.float32, np.float64, np.int8, np.uint8, np.int32, np.int64]))
    shape = draw(shapes)
    count = int(np.prod(shape))
    if np.dtype(dtype).kind == "f":
        number: st.SearchStrategy[Any] = st.floats(allow_nan=False, width=32)
    else:
        number = st.integers(np.iinfo(dtype).min, np.iinfo(dtype).max)
    sides = np.array(draw(st.lists(st.tuples(number, number), min_size=count, max_size=count)), dtype)
    return spaces.Box(sides.min(1).reshape(shape), sides.max(1).reshape(shape), dtype=dtype)


whole = st.sampled_from([np.int64, np.int32])
leaves = st.one_of(
    boxes(),
    st.builds(
        lambda n, start, dtype: spaces.Discrete(n, start=start, dtype=dtype),
        st.integers(1, 9),
        st.integers(-3, 3),
        whole,
    ),
    st.builds(
        lambda n, dtype: spaces.MultiDiscrete(n, dtype=dtype), st.lists(st.integers(1, 5), min_size=1), whole
    ),
    st.integers(1, 4).map(spaces.MultiBinary),
    st.just(spaces.MultiBinary((2, 3))),
)
anything = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from(["a", "b", "c"]), inner, min_size=1).map(spaces.Dict),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: spaces.Tuple(tuple(parts))),
    ),
    max_leaves=5,
)


def nested(value: Any) -> Any:
    """Return a space's value as specs take it: dicts."""
    if isinstance(value, dict):
        return {key: nested(part) for key, part in value.items()}
    if isinstance(value, tuple):
        return {str(place): nested(part) for place, part in enumerate(value)}
    return value


def unnested(space: spaces.Space[Any], value: Any) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: unnested(part, value[key]) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(unnested(part, value[str(place)]) for place, part in enumerate(space.spaces))
    return value


@given(anything)
def test_a_space_comes_back_as_it_was(space: spaces.Space[Any]) -> None:
    assert to_space(from_space(space)) == space


@given(anything, st.integers(0, 2**31))
def test_specs_and_spaces_contain_each_others_values(space: spaces.Space[Any], seed: int) -> None:
    spec = from_space(space)
    space.seed(seed)
    value = spec.encode(nested(space.sample()))
    assert spec.is_in(value)
    drawn = spec.rand(generator=torch.Generator().manual_seed(seed))
    assert space.contains(unnested(space, spec.to_numpy(drawn)))


def test_spaces_become_specs() -> None:
    assert from_space(spaces.Discrete(3)) == Categorical(3)
    assert from_space(spaces.Discrete(3, start=-1)) == Bounded(-1, 1, shape=(), dtype=torch.int64)
    assert from_space(spaces.MultiDiscrete([3, 2])) == MultiCategorical([3, 2])
    started = from_space(spaces.MultiDiscrete([3, 2], start=[1, 0]))
    assert started == Bounded(torch.tensor([1, 0]), torch.tensor([3, 1]), dtype=torch.int64)
    assert from_space(spaces.MultiBinary(3)) == Binary(shape=(3,))
    assert from_space(spaces.Tuple((spaces.Discrete(2), spaces.Dict(a=spaces.Discrete(3))))) == Composite(
        {"0": Categorical(2), ("1", "a"): Categorical(3)}
    )


def test_spaces_without_a_fixed_shape_are_refused() -> None:
    for space, reason in [
        (spaces.Text(5), "text of any length"),
        (spaces.Graph(spaces.Discrete(2), spaces.Discrete(2)), "graphs of any size"),
        (spaces.Sequence(spaces.Discrete(2)), "any length; pad them"),
        (spaces.OneOf((spaces.Discrete(2), spaces.Discrete(3))), "whose shape depends on the number"),
        (spaces.Dict(a=spaces.Text(5)), "text of any length"),
    ]:
        with pytest.raises(ValueError, match=reason):
            from_space(space)


def test_other_specs_become_the_space_of_their_arrays() -> None:
    for spec, space in [
        (OneHot(4), spaces.Discrete(4)),
        (OneHot(4, shape=(2, 4)), spaces.MultiDiscrete([4, 4])),
        (MultiOneHot([2, 3]), spaces.MultiDiscrete([2, 3])),
        (Binary(shape=()), spaces.Discrete(2)),
        (Categorical(3, shape=(2,)), spaces.MultiDiscrete([3, 3])),
        (Unbounded((2,)), spaces.Box(-np.inf, np.inf, (2,))),
        (Unbounded((2,), dtype=torch.uint8), spaces.Box(0, 255, (2,), np.uint8)),
        (Bounded(-(2**63), 2**63 - 1, shape=(), dtype=torch.int64), None),
    ]:
        made = to_space(spec)
        assert space is None or made == space
        assert made.contains(spec.to_numpy(spec.rand()))


def test_specs_without_a_space_are_refused() -> None:
    for spec, reason in [
        (None, "unknown spec"),
        (NonTensor(), "not tensors"),
        (Composite(a=None), "unknown spec"),
        (Bounded(0, 1, shape=(-1,)), "a dim of any size"),
        (Unbounded((1,), dtype=torch.bfloat16), "no bfloat16"),
        (Categorical(2, mask=torch.tensor([True, False])), "no masks"),
        (torch.stack([Categorical(2), Categorical(3)]), "convert its parts"),
        (Choice([Categorical(2), Categorical(3)]), "convert its parts"),
    ]:
        with pytest.raises(ValueError, match=reason):
            to_space(spec)


def test_invalid_spaces_are_refused() -> None:
    with pytest.raises(TypeError, match="not a supported gymnasium space"):
        from_space(3)


def test_keys_of_the_same_text_are_refused() -> None:
    space = spaces.Dict({1: spaces.Discrete(2), "1": spaces.Discrete(3)})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="two keys of a Dict space have the same text"):
        from_space(space)
    with pytest.raises(ArgumentError, match="two parts that would have the name '1'"):
        fields_of(space, ("observation",))


def test_values_that_the_dtype_of_a_space_cannot_represent_are_refused() -> None:
    for dtype, good, bad in ((np.int8, 3, 300), (np.float32, 0.1, 1e300)):
        fields = fields_of(spaces.Box(-1, 9, (1,), dtype), ("observation",))
        columns = {("observation",): np.zeros((2, 1), dtype)}
        finals = [{"final_obs": np.array([None, np.array([value])], object)} for value in (good, bad)]
        read = read_values(np.array([good]), fields, None, "the environment")
        assert read["observation",] == dtype(good)
        merged = put_final(columns, fields, np.array([False, True]), finals[0])
        assert merged["observation",].tolist() == [[0], [dtype(good)]]
        with pytest.raises(SchemaError, match="the environment returned 'observation' .* cannot hold"):
            read_values(np.array([bad]), fields, None, "the environment")
        with pytest.raises(SchemaError, match="final_obs.* returned 'observation' .* cannot hold"):
            put_final(columns, fields, np.array([False, True]), finals[1])


# -- the collector ---------------------------------------------------------------------------------


def test_a_collector_has_its_environments_specs_kept(tmp_path: Path) -> None:
    envs = gymnasium.make_vec("CartPole-v1", num_envs=2)
    with expstore.open(tmp_path / "a.exp") as rb:
        with Collector(envs, None, rb, seed=0) as collector:
            collector.collect(20)
        assert rb.specs is not None
        assert rb.specs["action"] == Categorical(2)
        assert rb.specs["observation"] == rb.specs["next", "observation"]
        assert rb.specs["observation"] == from_space(envs.single_observation_space)
        assert rb.specs["next", "reward"] == Unbounded((1,))
        fields = {tuple(entry.key) for entry in rb.schema.fields}  # type: ignore[union-attr]
        keys = {(key,) if isinstance(key, str) else key for key in rb.specs.keys(True, True)}
        assert keys == fields
        row = rb[0].exclude("index", "id")
        rb.add(row, validate="domain")
        row["action"] += 7
        with pytest.raises(expstore.errors.SchemaError, match="'action' is"):
            rb.add(row, validate="domain")
    with expstore.open(tmp_path / "a.exp", mode="r") as rb:
        assert rb.specs is not None


def test_a_collector_leaves_specs_that_are_there(tmp_path: Path) -> None:
    mine = Composite(action=Categorical(2, mask=torch.tensor([True, True])))
    envs = gymnasium.make_vec("CartPole-v1", num_envs=2)
    with expstore.open(tmp_path / "a.exp", schema=mine) as rb:
        with Collector(envs, None, rb, seed=0) as collector:
            collector.collect(20)
        assert rb.specs == mine
        rb.set_specs(None)
        with Collector(envs, None, rb, seed=0) as collector:
            collector.collect(20)
            rb.set_specs(mine)
            collector.collect(20)
        assert rb.specs == mine, "they are kept once, not with every block"


def test_a_collector_keeps_specs_of_what_transforms_leave_as_it_is() -> None:
    class Narrow(torch.nn.Module):
        def forward(self, td: TensorDict) -> TensorDict:
            return td

        def inv(self, td: TensorDict) -> TensorDict:
            td = td.set("observation", td["observation"][..., :2])
            return td.exclude(("next", "observation"))

    rb = expstore.TensorDictReplayBuffer(storage=expstore.MemoryStorage(100), transform=Narrow())
    flatten_dims(rb.storage)
    with Collector(gymnasium.make_vec("CartPole-v1", num_envs=2), None, rb, seed=0) as collector:
        collector.collect(20)
    assert rb.specs is not None
    assert "action" in rb.specs
    assert "observation" not in rb.specs
    assert ("next", "observation") not in rb.specs
