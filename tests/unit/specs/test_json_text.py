"""Specs become text, and TorchRL's specs, and back unchanged, bit by bit; Hypothesis draws the specs.

Run with the other tests.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchrl.data
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorData
from torchrl.envs import GymEnv, SerialEnv, StepCounter, TransformedEnv

import expstore
import expstore.specs
from expstore.errors import CorruptionError, SchemaError
from expstore.schema.spec_text import describe, leaves_of, same_specs, unpack_specs
from expstore.specs import (
    Binary,
    Bounded,
    Categorical,
    Choice,
    Composite,
    MultiCategorical,
    MultiOneHot,
    NonTensor,
    OneHot,
    StackedComposite,
    TensorSpec,
    Unbounded,
)
from expstore.specs.json_text import from_text, to_text
from expstore.specs.torchrl_specs import from_env, from_torchrl, to_torchrl
from tests.support.flat_storages import flatten_dims
from tests.support.spec_recipes import FLOATS as FINITE
from tests.support.spec_recipes import WHOLE, recipes, shapes

FLOATS = (*FINITE, torch.bfloat16)


@st.composite
def bounded(draw: st.DrawFn) -> TensorSpec:
    shape, dtype = draw(shapes), draw(st.sampled_from((*FLOATS, *WHOLE)))
    count = math.prod(shape)
    if dtype in WHOLE:
        info = torch.iinfo(dtype)
        numbers: st.SearchStrategy[Any] = st.integers(info.min, info.max)
    else:
        numbers = st.floats(allow_nan=False, width=16 if dtype == torch.float16 else 64)
    pairs = draw(st.lists(st.tuples(numbers, numbers), min_size=count, max_size=count))
    sides = [[pick(pair) for pair in pairs] for pick in (min, max)]
    low, high = (torch.tensor(side, dtype=dtype).reshape(shape) for side in sides)
    return Bounded(torch.minimum(low, high), torch.maximum(low, high), shape=shape, dtype=dtype)


@st.composite
def others(draw: st.DrawFn) -> TensorSpec:
    """Draw a spec that is not made as TorchRL's is."""
    n, lead = draw(st.integers(2, 4)), draw(shapes)
    made: list[Callable[[], Any]] = [
        lambda: MultiCategorical([n, 2], shape=(*lead, 2), remove_singleton=draw(st.booleans())),
        lambda: NonTensor(lead, example_data=draw(st.sampled_from([None, "a", 3, [1, {"b": 0.5}]]))),
        lambda: Choice([Bounded(0, 1, shape=lead), Bounded(5, n + 5, shape=lead)]),
        lambda: Choice([NonTensorData("a"), NonTensorData(n)]),
    ]
    spec: TensorSpec = draw(st.sampled_from(made))()
    return spec


leaves = st.one_of(bounded(), recipes.map(lambda recipe: recipe.here()), others(), st.none())
names = st.sampled_from(["a", "b", "next", "x.y", "0"])
trees = st.recursive(
    st.dictionaries(names, leaves, max_size=3).map(Composite),
    lambda inner: st.dictionaries(names, st.one_of(leaves, inner), max_size=3).map(Composite),
    max_leaves=6,
)
stacks = st.tuples(trees, trees).map(lambda two: StackedComposite(*two, dim=0))
anything = st.one_of(trees, leaves.filter(lambda spec: spec is not None), stacks)


def bits(spec: Any) -> Any:
    """Return everything that a spec says, bounds as bytes."""
    if isinstance(spec, StackedComposite):
        return [spec.dim, *map(bits, spec.parts)]
    if isinstance(spec, Composite):
        return {key: bits(part) for key, part in spec.items()}
    if spec is None:
        return None
    facts = [type(spec).__name__, spec.shape, spec.dtype, spec.domain]
    facts += [spec.space.n] if isinstance(spec, Categorical | OneHot) and hasattr(spec.space, "n") else []
    sides = [spec.low, spec.high] if isinstance(spec, Bounded) else []
    facts += [side.tolist() if spec.dtype in WHOLE else side.double().numpy().tobytes() for side in sides]
    facts += [torch.as_tensor(spec.nvec).tolist()] if hasattr(spec, "nvec") else []
    facts += [spec.remove_singleton] if isinstance(spec, MultiCategorical) else []
    facts += [spec.example_data, spec.feature_dims] if isinstance(spec, NonTensor) else []
    if isinstance(spec, Choice):
        facts += [bits(one) if isinstance(one, TensorSpec) else one.data for one in spec.choices]
    mask = getattr(spec, "mask", None)
    return [*map(repr, facts), None if mask is None else mask.tolist()]


@given(anything)
def test_text_holds_every_bit(spec: Any) -> None:
    text = to_text(spec)
    read = from_text(text)
    assert bits(read) == bits(spec)
    assert read == spec
    assert to_text(read) == text
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_signs_of_zero_stay() -> None:
    spec = from_text(to_text(Bounded(torch.tensor([-0.0, 0.0]), 1.0)))
    assert torch.signbit(spec.low).tolist() == [True, False]
    assert torch.signbit(from_text(to_text(Bounded(-0.0, 1.0, shape=(2,)))).low).all()


def test_bounds_that_are_all_the_same_are_one_number() -> None:
    text = to_text(Composite(pixels=Bounded(0, 255, shape=(84, 84, 4), dtype=torch.uint8)))
    assert len(text) < 250
    assert from_text(text)["pixels"].high.shape == (84, 84, 4)


def test_more_of_a_composite_stays() -> None:
    inner = Composite(shape=(2, 3))
    spec = Composite(a=inner, shape=(2,), names=["lane"], step_mdp_static=True, device="cpu")
    read = from_text(to_text(spec))
    assert read.names == ["lane"]
    assert read.shape == (2,)
    assert read["a"].shape == (2, 3)
    assert read.step_mdp_static


#: As version 1 writes it: this must be read for ever.
FIRST = """{"version":1,"spec":{"kind":"Composite","shape":[],"specs":{
"number":{"kind":"Bounded","shape":[2],"dtype":"float32","low":"-inf","high":[0.10000000149011612,"inf"],"domain":"continuous"},
"pixels":{"kind":"Bounded","shape":[2,2],"dtype":"uint8","low":0,"high":255,"domain":"discrete"},
"any":{"kind":"Unbounded","shape":[-1],"dtype":"bfloat16","domain":"continuous"},
"act":{"kind":"Categorical","shape":[],"dtype":"int64","n":3,"mask":[true,true,false]},
"hot":{"kind":"OneHot","shape":[3],"dtype":"bool","n":3},
"many":{"kind":"MultiCategorical","shape":[2],"dtype":"int64","nvec":[3,2],"remove_singleton":false},
"hots":{"kind":"MultiOneHot","shape":[5],"dtype":"bool","nvec":[3,2]},
"bits":{"kind":"Binary","shape":[4],"dtype":"int8"},
"text":{"kind":"NonTensor","shape":[],"example_data":{"data":"a"},"feature_dims":0},
"one":{"kind":"Choice","shape":[],"choices":[{"data":"a"},{"data":3}]},
"none":null,
"agents":{"kind":"StackedComposite","dim":0,"parts":[
{"kind":"Composite","shape":[],"specs":{"x":{"kind":"Categorical","shape":[],"dtype":"int64","n":2}}},
{"kind":"Composite","shape":[],"specs":{"x":{"kind":"Categorical","shape":[],"dtype":"int64","n":5}}}]}}}}"""


def test_texts_of_the_first_version_are_read() -> None:
    spec = Composite(
        number=Bounded(-math.inf, torch.tensor([0.1, math.inf])),
        pixels=Bounded(0, 255, shape=(2, 2), dtype=torch.uint8),
        any=Unbounded((-1,), dtype=torch.bfloat16),
        act=Categorical(3, mask=torch.tensor([True, True, False])),
        hot=OneHot(3),
        many=MultiCategorical([3, 2], remove_singleton=False),
        hots=MultiOneHot([3, 2]),
        bits=Binary(4),
        text=NonTensor((), example_data="a"),
        one=Choice([NonTensorData("a"), NonTensorData(3)]),
        none=None,
        agents=torch.stack([Composite(x=Categorical(2)), Composite(x=Categorical(5))]),
    )
    assert from_text(FIRST) == spec
    assert to_text(spec) == FIRST.replace("\n", "")


def test_masks_that_were_set_later_stay() -> None:
    spec = Binary(shape=(2,))
    spec.update_mask(torch.tensor([True, False]))
    assert from_text(to_text(spec)).mask.tolist() == [[True, False], [True, False]]
    assert to_torchrl(spec).mask.tolist() == [[True, False], [True, False]]


def test_specs_without_json_form_are_refused() -> None:
    for data in (object(), math.nan, {1: 2}, [torch.zeros(2)], (1, 2)):
        with pytest.raises(SchemaError, match="JSON cannot represent"):
            to_text(NonTensor(example_data=data))
        with pytest.raises(SchemaError, match="JSON cannot represent"):
            to_text(Choice([NonTensorData(data)]))
    with pytest.raises(SchemaError, match="data_cls"):
        to_text(Composite(data_cls=dict))
    with pytest.raises(SchemaError, match="not a supported spec"):
        to_text(3)  # type: ignore[arg-type]


def test_other_text_is_damage() -> None:
    for text in [
        "",
        "3",
        "{}",
        '{"version": 1, "spec": null}',
        '{"version": 1, "spec": {"kind": "Composite"}}',
        '{"version": 1, "spec": {"kind": "open", "path": "/etc"}}',
        '{"version": 1, "spec": {"kind": "Categorical", "n": 3, "shape": [], "dtype": "load"}}',
        '{"version": 1, "spec": {"kind": "Categorical", "n": "x", "shape": [], "dtype": "int64"}}',
        '{"version": 1, "spec": {"kind": "TensorSpec", "shape": []}}',
    ]:
        with pytest.raises(CorruptionError):
            from_text(text)


def test_fields_of_a_spec_text() -> None:
    one = Composite(a=Categorical(2, shape=(3,)), b=Categorical(2))
    stack = torch.stack([one, Composite(a=Categorical(2, shape=(4,)))])
    text = to_text(Composite({"x": Bounded(0, 1, shape=(2,)), ("n", "y"): None, "s": stack}, shape=()))
    assert leaves_of(text) == {("x",): ("float32", (2,)), ("s", "a"): ("int64", (2, -1))}
    assert leaves_of("") == {}
    both = to_text(Composite(a=Categorical(2), b=Categorical(3)))
    assert same_specs(both, to_text(Composite(b=Categorical(3), a=Categorical(2))))
    assert not same_specs(both, to_text(Composite(a=Categorical(2))))
    assert not same_specs(both, "")
    assert describe(unpack_specs(both)) == "a Categorical(n=2), b Categorical(n=3)"
    with pytest.raises(CorruptionError):
        leaves_of('{"version": 1, "spec": {"specs": {"a": {"kind": "Bounded"}}}}')


# -- TorchRL's -------------------------------------------------------------------------------------


@given(anything)
def test_torchrls_specs_are_the_same_ones(spec: Any) -> None:
    there = to_torchrl(spec)
    assert type(there).__module__.startswith("torchrl.")
    assert there.shape == spec.shape
    assert bits(from_torchrl(there)) == bits(spec)
    assert from_torchrl(there) == spec


@given(trees, st.integers(0, 2**31))
def test_both_draw_the_same(spec: Composite, seed: int) -> None:
    there = to_torchrl(spec)
    for key, leaf in spec.items(True, True):
        if leaf is None or leaf.dtype is None or getattr(leaf, "mask", None) is not None:
            continue
        torch.manual_seed(seed)
        value = leaf.rand()
        assert leaf.is_in(value)
        assert there[key].is_in(value), (key, value)


def test_an_environments_specs() -> None:
    there = torchrl.data.Composite(
        observation=torchrl.data.Bounded(-1, 1, shape=(4, 3)), shape=(4,), names=["lane"], device="cpu"
    )
    spec = from_torchrl(there)
    assert spec.names == ["lane"]
    assert spec.device == torch.device("cpu")
    assert repr(spec) == repr(there)
    assert from_torchrl(None) is None
    assert to_torchrl(None) is None
    with pytest.raises(TypeError, match="not a supported spec"):
        from_torchrl(torch.zeros(3))
    with pytest.raises(ValueError, match="use_register"):
        from_torchrl(torchrl.data.OneHot(3, use_register=True))


def test_rows_of_torchrls_collectors_fit_the_specs_of_their_environment() -> None:
    def make() -> Any:
        return TransformedEnv(GymEnv("CartPole-v1"), StepCounter(5))

    for env in (make(), SerialEnv(2, make)):
        rb = expstore.TensorDictReplayBuffer(storage=expstore.MemoryStorage(200))
        flatten_dims(rb.storage)
        rb.set_specs(from_env(env))
        env.set_seed(0)
        rb.extend(env.rollout(20, break_when_any_done=False), validate="domain")
        assert rb.specs == from_env(env)
        assert len(rb) == 20 * max(1, env.batch_size.numel())
        fields = {entry.key for entry in rb.schema.fields}  # type: ignore[union-attr]
        assert {(key,) if isinstance(key, str) else key for key in rb.specs.keys(True, True)} == fields
        row = rb[3].exclude("index")
        row["observation"] = row["observation"] * math.nan
        with pytest.raises(SchemaError, match="'observation' is .nan"):
            rb.add(row, validate="domain")
