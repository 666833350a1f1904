"""Composite and stacked specs behave like TorchRL's.

Run with the other tests. Hypothesis draws trees of specs. Intended differences have separate tests.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torchrl.data
from hypothesis import given
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, TensorDict, tensorclass

import expstore
import expstore.specs
from expstore.specs import Bounded, Categorical, Composite, Stacked, StackedComposite
from tests.support.batches import same

#: Makes a spec out of one library's classes.
Recipe = Callable[[Any], Any]
BATCH = (2, 3)


def leaf(kind: str, shape: tuple[int, ...], size: int) -> Recipe:
    if kind == "categorical":
        return lambda lib: lib.Categorical(size, shape=shape)
    if kind == "whole":
        return lambda lib: lib.Bounded(-size, size, shape=shape, dtype=torch.int32)
    return lambda lib: lib.Bounded(-1.5, float(size), shape=shape)


leaves = st.builds(
    lambda kind, shape, size: leaf(kind, (*BATCH, *shape), size),
    st.sampled_from(["categorical", "whole", "number"]),
    st.lists(st.integers(1, 3), max_size=2),
    st.integers(2, 6),
)


def composite(entries: dict[str, Recipe]) -> Recipe:
    return lambda lib: lib.Composite({key: make(lib) for key, make in entries.items()}, shape=BATCH)


names = st.sampled_from(["a", "b", "next", "observation", "z"])
trees = st.recursive(
    st.dictionaries(names, leaves, min_size=1, max_size=3).map(composite),
    lambda inner: st.dictionaries(names, st.one_of(leaves, inner), min_size=1, max_size=3).map(composite),
    max_leaves=6,
)


def both(make: Recipe) -> tuple[Any, Any]:
    return make(expstore.specs), make(torchrl.data)


# -- beside TorchRL's ------------------------------------------------------------------------------


@given(trees)
def test_keys_and_descriptions_are_torchrls(make: Recipe) -> None:
    here, there = both(make)
    for nested in (False, True):
        for only in (False, True):
            assert list(here.keys(nested, only)) == list(there.keys(nested, only))
            assert len(here.keys(nested, only)) == len(there.keys(nested, only))
            assert [key for key, _ in here.items(nested, only)] == list(here.keys(nested, only))
            assert [repr(spec) for spec in here.values(nested, only)] == [
                repr(spec) for spec in there.values(nested, only)
            ]
    assert repr(here) == repr(there)
    assert list(here) == list(there)
    assert here.shape == here.batch_size == there.shape
    assert here.ndim == there.ndim


@given(trees, st.integers(0, 2**31))
def test_draws_zeros_and_ones_are_torchrls(make: Recipe, seed: int) -> None:
    here, there = both(make)
    torch.manual_seed(seed)
    drawn = here.rand((4,))
    torch.manual_seed(seed)
    assert same(drawn, there.rand(torch.Size([4])))
    assert same(here.zero(), there.zero())
    assert same(here.zeros((2,)), there.zeros((2,)))
    assert here.is_in(drawn)
    assert there.is_in(drawn)
    assert bool((here.one() == torch.ones(())).all())


@given(trees, st.integers(0, 2**31), st.data())
def test_values_are_judged_and_projected_as_by_torchrl(make: Recipe, seed: int, data: st.DataObject) -> None:
    here, there = both(make)
    torch.manual_seed(seed)
    value = here.rand()
    for key in data.draw(st.lists(st.sampled_from(list(value.keys(True, True))), max_size=2)):
        value[key] = value[key] + data.draw(st.integers(-9, 9))
    assert here.is_in(value) == there.is_in(value) == here.contains(value)
    projected = here.project(value.clone())
    assert same(projected, there.project(value.clone()))
    assert here.is_in(projected)
    here.type_check(value)


@given(trees, st.data())
def test_shapes_change_as_torchrls(make: Recipe, data: st.DataObject) -> None:
    here, there = both(make)
    act = data.draw(
        st.sampled_from(
            [
                lambda spec: spec[0],
                lambda spec: spec[:, 1:],
                lambda spec: spec[1, 0],
                lambda spec: spec[..., 0],
                lambda spec: spec[None],
                lambda spec: spec[torch.tensor([1, 0, 1])],
                lambda spec: spec.expand(5, *BATCH),
                lambda spec: spec.unsqueeze(0),
                lambda spec: spec.unsqueeze(-1),
                lambda spec: spec.unsqueeze(1).squeeze(),
                lambda spec: spec.unsqueeze(1).squeeze(1),
                lambda spec: spec.reshape(6),
                lambda spec: spec.reshape(3, 2),
                lambda spec: spec.flatten(0, 1),
                lambda spec: spec.unflatten(0, (2, 1)),
                lambda spec: spec.unbind(0)[1],
                lambda spec: spec.unbind(-1)[2],
                lambda spec: torch.stack([spec, spec.clone()], 1),
                lambda spec: torch.stack([spec, spec.clone()], -1),
                lambda spec: torch.squeeze(spec[:1], 0),
                lambda spec: torch.unsqueeze(spec, 2),
                lambda spec: torch.index_select(spec, 1, torch.tensor([2, 0])),
                lambda spec: spec.to(torch.float64),
                lambda spec: spec.to("cpu"),
                lambda spec: spec.clone(),
                lambda spec: spec.empty(),
            ]
        )
    )
    assert repr(act(here)) == repr(act(there))
    assert repr(here) == repr(make(expstore.specs)), "the spec itself was changed"


@given(trees, trees)
def test_equal_are_those_that_are_made_alike(one: Recipe, other: Recipe) -> None:
    here, there = both(one)
    assert here == here.clone()
    assert here == one(expstore.specs)
    assert (here == other(expstore.specs)) == (there == other(torchrl.data))


def test_more_of_torchrls_answers() -> None:
    def ask(lib: Any) -> list[Any]:
        made = lib.Composite(a=lib.Categorical(3), b=lib.Composite(c=lib.Categorical(2, shape=(1,))), n=None)
        full = lib.Composite(a=lib.Categorical(3), b=lib.Categorical(2, shape=(1,)))
        wide = lib.Composite(a=lib.Categorical(2, shape=(2,)), shape=(2,))
        return [
            ("b", "c") in made.keys(True),
            "c" in made.keys(True),
            made.is_empty(),
            full.cardinality(),
            lib.Composite().cardinality(),
            {key: value.tolist() for key, value in full.enumerate().items()},
            wide.enumerate()["a"].tolist(),
            full.encode({"a": 2, "b": [1]})["b"].tolist(),
            lib.Composite({("x", "y"): None})["x", "y"],
            made.pop(("b", "c")).n,
            made.pop("nothing", 5),
            repr(made.separates("a", "nothing")),
            list(made.keys()),
            repr(lib.Composite(a=lib.Composite(b=lib.Categorical(2, shape=(4,))), shape=(4,))),
            repr(lib.Composite().update({"a": lib.Categorical(2), "b": {"c": lib.Categorical(3)}})),
            lib.Composite(shape=(2, 3), names=["x", None]).expand(4, 2, 3).names,
            lib.Composite(shape=(2, 3), names=["x", "y"])[0].names,
            lib.Composite(shape=(2, 3), names=["x", "y"]).unsqueeze(1).names,
            lib.Composite(shape=(2, 3)).refine_names(..., "y").names,
            lib.Composite(a=lib.Composite(shape=(2,)), shape=(2,), names=["x"])["a"].names,
        ]

    assert ask(expstore.specs) == ask(torchrl.data)


# -- better on purpose -----------------------------------------------------------------------------


def test_a_lacking_key_is_not_in_the_spec() -> None:
    spec = Composite(a=Categorical(3))
    assert not spec.is_in(TensorDict({}, []))
    assert not spec.is_in({})
    assert spec.is_in({"a": torch.tensor(1), "more": 3})


def test_fields_without_a_spec_are_kept() -> None:
    spec = Composite(a=Categorical(3, shape=(1, 2)), n=None, shape=(1, 2))
    for made in (
        spec[0],
        spec.squeeze(),
        spec.unsqueeze(0),
        spec.reshape(2),
        spec.unbind(0)[0],
        spec.to("cpu"),
    ):
        assert list(made) == ["a", "n"]
        assert made["n"] is None
    assert spec.is_in(spec.rand())
    assert "n" not in spec.rand()


def test_keys_can_be_asked_for_at_any_depth() -> None:
    spec = Composite({("a", "b", "c"): Categorical(2), "d": Categorical(3)})
    assert ("a", "b", "c") in spec
    assert "d" in spec
    assert ("a", "x") not in spec
    assert spec["a", "b", "c"] is spec["a"]["b"]["c"]
    assert spec.get(("a", "x")) is None
    assert spec.get("x", 1) == 1
    del spec["a", "b"]
    assert list(spec.keys(True)) == ["a", "d"]
    with pytest.raises(KeyError):
        del spec["a", "b"]
    with pytest.raises(KeyError, match="'d' is not a composite"):
        spec["d", "e"]
    assert Composite(a=Composite()).is_empty(recurse=True)
    with pytest.raises(TypeError, match="give a spec"):
        spec["x"] = torch.zeros(3)
    with pytest.raises(TypeError, match="when a string was expected"):
        spec[3] = None


def test_devices() -> None:
    spec = Composite(a=Categorical(2), b=Composite(c=Categorical(3)))
    assert spec.device is None
    assert spec.to("cpu").device == torch.device("cpu")
    placed = spec.to("cpu")
    assert placed["b"].device == torch.device("cpu")
    assert placed != spec
    assert placed.to("cpu") is placed
    assert placed.to(None) is placed
    with pytest.raises(RuntimeError, match="another device"):
        placed["d"] = Categorical(2, device="meta")
    with pytest.raises(RuntimeError, match="clear_device_"):
        placed.device = None
    assert placed.clear_device_() == spec
    spec.device = "cpu"
    assert spec.device == spec["b"].device == torch.device("cpu")
    with pytest.raises(ValueError, match="Only device/dtype"):
        spec.to(1.5)  # type: ignore[arg-type]


def test_locks() -> None:
    spec = Composite(a=Composite(b=Categorical(2)))
    assert spec.lock_() is spec
    assert spec.is_locked
    assert spec["a"].locked
    for act in (
        lambda: spec.set("x", None),
        lambda: spec["a"].pop("b"),
        lambda: spec["a"].update({"c": None}),
    ):
        with pytest.raises(RuntimeError, match="locked"):
            act()
    with pytest.raises(RuntimeError, match="part of a locked graph"):
        spec["a"].unlock_()
    assert spec["a"].is_locked
    assert not spec.clone().is_locked
    copied = pickle.loads(pickle.dumps(spec))
    assert copied == spec
    assert copied.is_locked
    with pytest.raises(RuntimeError, match="part of a locked graph"):
        copied["a"].unlock_()
    spec.is_locked = False
    spec["a", "c"] = None
    only = Composite(a=Composite(b=Categorical(2))).lock_(recurse=False)
    only["a", "c"] = None
    assert only.unlock_().set("x", None).is_locked is False


def test_a_lock_ends_with_the_one_that_made_it() -> None:
    inner = Composite(b=Categorical(2))
    outer = Composite(a=inner).lock_()
    del outer
    inner.unlock_()
    assert not inner.is_locked


@tensorclass
class Pair:
    a: torch.Tensor
    b: torch.Tensor


def test_values_can_be_of_a_class() -> None:
    spec = Composite(a=Categorical(3), b=Categorical(2, shape=(4,)), data_cls=Pair)
    drawn = spec.rand((5,))
    assert isinstance(drawn, Pair)
    assert drawn.batch_size == (5,)
    assert spec.is_in(drawn)
    assert not spec.is_in(drawn.to_tensordict())
    assert isinstance(spec.encode({"a": 1, "b": [0, 1, 0, 1]}), Pair)
    assert spec.clone() == spec
    assert spec.expand(2).data_cls is Pair


def test_values_become_arrays_and_come_back() -> None:
    spec = Composite(a=Categorical(3), next=Composite(b=Bounded(-1, 1, shape=(2,))))
    value = spec.rand()
    arrays = spec.to_numpy(value)
    assert isinstance(arrays["next"]["b"], np.ndarray)
    assert same(spec.encode(arrays), value)
    value["a"] += 7
    with pytest.raises(AssertionError, match="not in space"):
        spec.to_numpy(value, safe=True)


def test_the_shape_of_a_composite_can_be_set() -> None:
    spec = Composite(a=Categorical(2, shape=(3, 4)), b=Composite(c=Categorical(2, shape=(3,))))
    spec.shape = (3,)
    assert spec.batch_size == spec["b"].shape == (3,)
    spec.lock_()
    with pytest.raises(RuntimeError, match="locked"):
        spec.shape = ()


# -- stacks ----------------------------------------------------------------------------------------


def agents(lib: Any) -> Any:
    one = lib.Composite(obs=lib.Bounded(-1, 1, shape=(3,)), act=lib.Categorical(2), own=lib.Categorical(5))
    two = lib.Composite(obs=lib.Bounded(-1, 1, shape=(4,)), act=lib.Categorical(4))
    return torch.stack([one, two])


def test_a_stack_of_composites_is_torchrls() -> None:
    here, there = agents(expstore.specs), agents(torchrl.data)
    assert isinstance(here, StackedComposite)
    assert here.stack_dim == there.stack_dim == 0
    assert here.shape == there.shape == (2,)
    assert len(here) == 2
    assert sorted(here.keys()) == sorted(there.keys())
    assert here["obs"].shape == there["obs"].shape == (2, -1)
    torch.manual_seed(0)
    drawn = here.rand()
    torch.manual_seed(0)
    theirs = there.rand()
    assert isinstance(drawn, LazyStackedTensorDict)
    assert all(same(a, b) for a, b in zip(drawn.unbind(0), theirs.unbind(0), strict=True))
    assert here.is_in(drawn)
    assert there.is_in(drawn)
    assert here.is_in(here.rand((3,)))
    drawn[1]["act"] = torch.tensor(3)
    assert here.is_in(drawn)
    drawn[0]["act"] = torch.tensor(3)
    assert not here.is_in(drawn)
    assert not there.is_in(drawn)
    assert here.project(drawn)[0]["act"] == 1
    assert here[1] == expstore.specs.Composite(obs=Bounded(-1, 1, shape=(4,)), act=Categorical(4)), (
        "a part is what was stacked"
    )
    assert here.unbind(0) == tuple(here.parts)
    assert here == agents(expstore.specs) == here.clone()
    assert here != here.to(torch.float64)
    assert here.unsqueeze(0).shape == there.unsqueeze(0).shape == (1, 2)
    assert here.unsqueeze(-1).squeeze(-1) == here
    assert here.unsqueeze(0).squeeze() == here
    assert here.expand(3, 2).shape == there.expand(3, 2).shape
    assert here.expand(3, 2).is_in(here.expand(3, 2).rand())
    assert pickle.loads(pickle.dumps(here)) == here
    assert "0 ->" in repr(here)
    assert "own" in repr(here)


def test_setting_a_stack_sets_its_parts() -> None:
    spec = agents(expstore.specs)
    spec["new", "one"] = Categorical(7, shape=(2,))
    assert spec.parts[0]["new", "one"].n == 7
    assert spec["new", "one"].shape == (2,)
    spec["none"] = None
    assert spec["none"] is None
    del spec["own"]
    assert "own" not in spec.parts[0]
    with pytest.raises(KeyError):
        del spec["own"]
    with pytest.raises(KeyError):
        spec["nothing"]
    spec.lock_()
    with pytest.raises(RuntimeError, match="locked"):
        spec.parts[0]["x"] = None
    with pytest.raises(RuntimeError, match="part of a locked graph"):
        spec.parts[0].unlock_()
    spec.unlock_()
    spec.parts[0]["x"] = None
    assert list(spec.empty()) == []
    assert spec.empty().is_empty()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_stack_of_leaves_is_torchrls() -> None:
    def make(lib: Any, dim: int) -> Any:
        return torch.stack([lib.Bounded(-1, 1, shape=(3,)), lib.Bounded(-5, 5, shape=(3,))], dim)

    for dim in (0, 1, -1):
        here, there = make(expstore.specs, dim), make(torchrl.data, dim)
        assert isinstance(here, Stacked)
        assert here.shape == there.shape
        value = torch.stack([torch.full((3,), 0.5), torch.full((3,), 3.0)], dim)
        assert here.is_in(value)
        assert there.is_in(value)
        assert not here.is_in(value.flip(dim % 2))
        assert not there.is_in(value.flip(dim % 2))
        assert here.is_in(value.expand(4, *value.shape))
        assert here.is_in(here.rand((2,)))
        assert here.project(value.flip(dim % 2)).amax() == 1
        assert torch.equal(here.encode([[0.5] * 3, [3.0] * 3]), value)
        assert here.unbind(dim) == tuple(here.parts)
        with pytest.raises(IndexError):
            here[None]
    lengths = torch.stack([Bounded(0, 1, shape=(2,)), Bounded(0, 1, shape=(3,))])
    assert lengths.zero().is_nested
    assert lengths.is_in(lengths.rand())
    with pytest.raises(RuntimeError, match="stack dimension other than 0"):
        lengths.zero((2,))
    assert torch.stack([Categorical(2), Categorical(3), Categorical(4)])[1:].parts == [
        Categorical(3),
        Categorical(4),
    ]
    assert not torch.stack([Categorical(2), Categorical(3)]).is_in(torch.tensor([1, 1, 1]))


@pytest.mark.parametrize("act", ["reshape", "cardinality", "index", "flatten"])
def test_meaningless_calls_of_a_stack_are_refused(act: str) -> None:
    args: dict[str, tuple[Any, ...]] = {"reshape": (2,), "index": (0, 0), "flatten": (0, 1)}
    for spec in (agents(expstore.specs), torch.stack([Categorical(2), Categorical(3)])):
        with pytest.raises(NotImplementedError):
            getattr(spec, act)(*args.get(act, ()))
    with pytest.raises(NotImplementedError):
        torch.stack([Categorical(2), Categorical(2)], out=Categorical(2))
    with pytest.raises((ValueError, RuntimeError)):
        StackedComposite(dim=0)
