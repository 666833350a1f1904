"""Specs behave like TorchRL's.

Run with the other tests. Hypothesis draws specs, values and changes. Intended differences have separate tests
at the end.
"""

from __future__ import annotations

import math
import pickle
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torchrl.data as torchrl
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorData

import expstore
import expstore.specs
from tests.support.spec_recipes import Recipe, recipes, seeds, shapes


def nearby(spec: Any, seed: int, lead: tuple[int, ...], *, far: float) -> torch.Tensor:
    """Return values of the spec, of which some may be just out of it."""
    drawn: torch.Tensor = seeded(seed, lambda: spec.rand(lead))
    draws = torch.Generator().manual_seed(seed)
    moved = torch.randint(-100, 100, drawn.shape, generator=draws)
    moved = torch.where(torch.rand(drawn.shape, generator=draws) < far, moved, torch.zeros_like(moved))
    if drawn.dtype == torch.bool:
        return drawn ^ (moved > 50)
    return torch.where(moved == 0, drawn, moved.remainder(8).to(drawn.dtype))


#: Their last dim cannot be taken apart.
DOMAIN_LAST = (expstore.OneHot, expstore.MultiCategorical, expstore.Binary)


def seeded(seed: int, act: Callable[[], Any]) -> Any:
    """Return what is drawn after a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return act()


def facts(spec: Any) -> Iterator[Any]:
    """Yield all that is known of a spec, of either side."""
    yield repr(spec)
    for name in ("low", "high", "mask", "nvec"):
        value = getattr(spec, name, None)
        yield name, None if value is None else torch.as_tensor(value).tolist()


def asked(act: Callable[[], Any]) -> Any:
    """Return an answer; an exception as its class."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return act()
        except Exception as exc:
            return type(exc)


# --- values


@given(recipes)
def test_specs_describe_themselves_alike(recipe: Recipe) -> None:
    ours, theirs = recipe.both()
    assert list(facts(ours)) == list(facts(theirs))
    assert (ours.ndim, ours.ndimension(), ours.domain) == (theirs.ndim, theirs.ndimension(), theirs.domain)
    assert ours.space is not None
    assert torch.equal(ours.zero((2,)), theirs.zero((2,)))
    assert torch.equal(ours.ones(), theirs.ones())
    assert asked(ours.cardinality) == asked(theirs.cardinality)


@given(recipes, seeds, shapes)
def test_the_same_seed_draws_the_same_values(recipe: Recipe, seed: int, lead: tuple[int, ...]) -> None:
    ours, theirs = recipe.both()
    drawn = seeded(seed, lambda: ours.rand(lead))
    bare = recipe.name == "MultiCategorical" and ours.shape == (1,) and ours.mask is None
    assert drawn.shape == (lead if bare else (*lead, *ours.shape))
    assert drawn.dtype == ours.dtype
    assert ours.is_in(drawn)
    if recipe.name != "MultiCategorical" or ours.ndim == 1 or ours.mask is not None:
        # Rows of numbers are drawn one by one there.
        assert torch.equal(drawn, seeded(seed, lambda: theirs.rand(torch.Size(lead))))
    generator = torch.Generator().manual_seed(seed)
    assert torch.equal(drawn, ours.sample(lead, generator=generator))


@given(recipes, seeds, shapes, st.sampled_from([0.0, 0.1, 1.0]))
def test_is_in_and_project_agree(recipe: Recipe, seed: int, lead: tuple[int, ...], far: float) -> None:
    ours, theirs = recipe.both()
    value = nearby(ours, seed, lead, far=far)
    kept = value.clone()
    answer = asked(lambda: theirs.is_in(value.clone()))
    # A number that is none of n is an error there if there is a mask.
    expected = not isinstance(answer, type) and bool(answer)
    if isinstance(ours, expstore.OneHot) and ours.mask is not None:
        # A single one is only asked for there if there is no mask.
        plain = replace(recipe, kwargs={"mask": None}).there()
        expected = expected and bool(plain.is_in(value))
    assert ours.is_in(value) == ours.contains(value) == expected
    projected = ours.project(value)
    assert ours.is_in(projected)
    assert torch.equal(value, kept)
    if ours.is_in(value):
        assert projected is value
    elif isinstance(ours, expstore.OneHot):
        rows = ours.within(value)
        assert torch.equal(projected[rows], value[rows])
        if ours.mask is None and recipe.name == "OneHot":
            # One of those that were there, if there were any.
            assert (projected & value).any(-1)[value.any(-1)].all()
    elif getattr(ours, "mask", None) is not None:
        # What a mask hides is replaced by chance: in both cases by something that is allowed.
        assert theirs.is_in(projected)
        assert torch.equal(projected[ours.within(value)], value[ours.within(value)])
    else:
        assert torch.equal(projected, theirs.project(value.clone()))


@given(recipes, seeds)
def test_values_go_to_numpy_and_back(recipe: Recipe, seed: int) -> None:
    ours, theirs = recipe.both()
    value = ours.rand(generator=torch.Generator().manual_seed(seed))
    array = ours.to_numpy(value, safe=True)
    assert np.array_equal(array, theirs.to_numpy(value))
    assert torch.equal(ours.encode(array).reshape(value.shape), value)  # drawn bare, it has its dim again
    assert torch.equal(ours.encode(array), theirs.encode(array))
    assert torch.equal(ours.encode(array.tolist()), asked(lambda: theirs.encode(np.asarray(array.tolist()))))


# --- other specs

ACTS: dict[str, Callable[[Any, st.DataObject], Callable[[Any], Any]]] = {}


def act(make: Callable[[Any, st.DataObject], Callable[[Any], Any]]) -> None:
    ACTS[make.__name__] = make


@act
def expand(spec: Any, data: st.DataObject) -> Callable[[Any], Any]:
    wide = tuple(data.draw(st.integers(1, 3)) if n == 1 else n for n in spec.shape)
    lead = data.draw(shapes)
    return lambda one: one.expand(*lead, *wide)


@act
def squeeze(spec: Any, data: st.DataObject) -> Callable[[Any], Any]:
    last = spec.ndim - 2 if isinstance(spec, DOMAIN_LAST) else spec.ndim - 1
    dim = data.draw(st.none() | st.integers(-spec.ndim, max(last, 0)))
    return lambda one: torch.squeeze(one, dim) if dim is not None else one.squeeze()


@act
def unsqueeze(spec: Any, data: st.DataObject) -> Callable[[Any], Any]:
    dim = data.draw(st.integers(-spec.ndim - 2, spec.ndim + 1))
    return lambda one: torch.unsqueeze(one, dim)


@act
def flatten(spec: Any, data: st.DataObject) -> Callable[[Any], Any]:
    first = data.draw(st.integers(0, max(spec.ndim - 1, 0)))
    last = data.draw(st.integers(first, max(spec.ndim - 1, 0)))
    return lambda one: one.flatten(first, last)


@act
def reshape(spec: Any, data: st.DataObject) -> Callable[[Any], Any]:
    sizes = data.draw(st.sampled_from([tuple(spec.shape), (1, *spec.shape), tuple(spec.shape)[::-1]]))
    return lambda one: one.reshape(*sizes) if sizes else one.view(())


@act
def unflatten(spec: Any, data: st.DataObject) -> Callable[[Any], Any]:
    dim = data.draw(st.integers(-spec.ndim, max(spec.ndim - 1, 0)))
    sizes = (1, spec.shape[dim]) if spec.ndim else (1,)
    return lambda one: one.unflatten(dim, sizes)


@act
def unbind(spec: Any, data: st.DataObject) -> Callable[[Any], Any]:
    last = spec.ndim - 2 if isinstance(spec, DOMAIN_LAST) else spec.ndim - 1
    dim = data.draw(st.integers(0, max(last, 0)))
    return lambda one: one.unbind(dim)[-1]


@act
def index(spec: Any, data: st.DataObject) -> Callable[[Any], Any]:
    size = spec.shape[0] if spec.ndim else 1
    whole = st.integers(-size, size)
    parts = st.one_of(
        st.none(),
        st.just(...),
        whole,
        st.slices(size).filter(lambda one: one.step is None or one.step > 0),
        st.lists(st.integers(0, size - 1), min_size=1, max_size=3),
        st.lists(st.integers(0, size - 1), min_size=1, max_size=3).map(torch.tensor),
        st.lists(st.integers(0, size - 1), min_size=1, max_size=3).map(np.array),
        st.integers(1, size).map(range),
    )
    picked = data.draw(parts | st.tuples(st.none() | st.just(...), whole) | st.just((slice(None), ...)))
    return lambda one: one[picked]


@act
def index_select(spec: Any, data: st.DataObject) -> Callable[[Any], Any]:
    dim = data.draw(st.integers(-spec.ndim, max(spec.ndim - 1, 0)))
    places = torch.tensor(data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4)))
    return lambda one: torch.index_select(one, dim, places)


@act
def stack(spec: Any, data: st.DataObject) -> Callable[[Any], Any]:
    dim = data.draw(st.integers(-spec.ndim - 1, spec.ndim))
    return lambda one: torch.stack([one, one.clone()], dim)


@act
def cast(spec: Any, data: st.DataObject) -> Callable[[Any], Any]:
    dest = data.draw(st.sampled_from((torch.float32, torch.int64, torch.int32, "cpu")))
    return lambda one: one.to(dest)


#: What TorchRL loses on the way, by the act and what it loses.
LOST = {
    **dict.fromkeys(["expand", "reshape", "unflatten", "flatten", "index", "cast", "stack"], "mask"),
}


@pytest.mark.some(3)
@pytest.mark.parametrize("name", ACTS)
@given(data=st.data())
def test_changed_specs_agree(name: str, data: st.DataObject) -> None:
    recipe = data.draw(recipes)
    ours, theirs = recipe.both()
    change = ACTS[name](ours, data)
    before = list(facts(ours))
    made, expected = asked(lambda: change(ours)), asked(lambda: change(theirs))
    assert list(facts(ours)) == before
    if isinstance(expected, type):
        # What only fails there may be possible here.
        assert isinstance(made, type) or name not in {"index", "index_select", "unsqueeze"}
        return
    if isinstance(ours, expstore.OneHot) and expected.shape[-1:] != ours.shape[-1:]:
        # TorchRL takes the new last dim for the number of choices.
        assert made is ValueError
        return
    if made is IndexError and ours.ndim == isinstance(ours, DOMAIN_LAST):
        # As of a tensor of no dims; TorchRL returns the spec.
        return
    assert not isinstance(made, type), made
    if isinstance(expected, torchrl.MultiCategorical) and made.shape == () != expected.shape:
        # A single element, of which TorchRL makes a spec of shape (1,).
        assert made.n == expected.nvec.item()
        return
    lost = LOST.get(name) if getattr(expected, "mask", None) is None else None
    if name == "index_select" and recipe.name == "MultiCategorical":
        # TorchRL picks single choices from the mask where elements are picked.
        lost = "mask"
    for mine, other in zip(facts(made), facts(expected), strict=True):
        assert mine == other or mine[0] == lost, (mine, other)
    assert made.is_in(made.rand())


@given(recipes)
def test_copies_are_equal_and_others_are_not(recipe: Recipe) -> None:
    ours = recipe.here()
    for copy in (
        ours.clone(),
        recipe.here(),
        pickle.loads(pickle.dumps(ours)),
        ours.to(ours.dtype),
        ours.cpu(),
    ):
        assert copy == ours
    assert ours != ours.unsqueeze(0)
    assert ours != "a spec"
    with pytest.raises(TypeError, match="unhashable"):
        hash(ours)


# --- what is refused


#: Calls that TorchRL's classes refuse.
REFUSED: list[Callable[[Any], Any]] = [
    lambda of: of.Bounded(0, 1),
    lambda of: of.Bounded(torch.zeros(3), 1, shape=(2,)),
    lambda of: of.Bounded(minimum=0, high=1),
    lambda of: of.Bounded(0, 1, shape=(), colour="red"),
    lambda of: of.Bounded(0, 1, shape=(3,)).expand(4),
    lambda of: of.Bounded(0, 1, shape=(3,)).encode([1, 2]),
    lambda of: of.Bounded(0, 1, shape=(3,)).enumerate(),
    lambda of: of.Bounded(0, 1, shape=(3,)).index(0, 0),
    lambda of: of.Bounded(0, 1, shape=(3,)).unsqueeze(5),
    lambda of: of.Bounded(0, 1, shape=(3,))[3],
    lambda of: of.Bounded(0, 1, shape=(3,))[0, 0],
    lambda of: of.Unbounded((3,))[[0, 3]],
    lambda of: of.Unbounded((3,))[range(10)],
    lambda of: of.Binary(shape=(3, 4))[np.array([[2, 10]])],
    lambda of: of.OneHot(4, (3, 4))[torch.tensor([10, 2])],
    lambda of: of.OneHot(4, (3, 4))[1, ..., 2, ..., 3],
    lambda of: torch.index_select(of.OneHot(2), -1, torch.tensor([0])),
    lambda of: torch.index_select(of.Binary(2), 0, torch.tensor([0])),
    lambda of: of.MultiOneHot((3, 2)).encode([[0, 1]] * 3),
    lambda of: of.Unbounded((-1, 2)).expand(3, 3, 2),
    lambda of: of.Bounded(0, 1, shape=(3,)).type_check(torch.ones(3).int()),
    lambda of: of.Bounded(0, 1, shape=()).assert_is_in(torch.tensor(2.0)),
    lambda of: of.Categorical(-1).rand(),
    lambda of: of.Categorical(-1).cardinality(),
    lambda of: of.Categorical(3, mask=torch.ones(4)),
    lambda of: of.Categorical(3, mask=torch.zeros(3)).rand(),
    lambda of: torch.stack([of.Categorical(3), of.Bounded(0, 1, (1,))]),
    lambda of: torch.stack([of.Categorical(3), of.Categorical(3, (1,))]),
    lambda of: of.Unbounded().cardinality(),
    lambda of: of.Unbounded().enumerate(),
    lambda of: of.OneHot(3, (4,)),
    lambda of: of.OneHot(3).encode(3),
    lambda of: of.OneHot(3).index([0, 1, 0], torch.ones(3)),
    lambda of: of.OneHot(3).unsqueeze(-1),
    lambda of: of.OneHot(3).unbind(-1),
    lambda of: of.OneHot(1).squeeze(),
    lambda of: of.OneHot(3)[0],
    lambda of: of.MultiOneHot((3, 2), (4,)),
    lambda of: of.MultiOneHot((3, 2)).encode([0, 2]),
    lambda of: of.MultiOneHot((3, 2)).index(1, torch.ones(5)),
    lambda of: of.MultiCategorical((3, 2), (3,)),
    lambda of: of.MultiCategorical((3, 2)).unbind(-1),
    lambda of: of.MultiCategorical((3, 2)).unsqueeze(-1),
    lambda of: of.MultiCategorical((1,)).squeeze(),
    lambda of: of.MultiCategorical([[3, 2], [1, 2]]).enumerate(),
    lambda of: of.MultiCategorical((3, 2)).n,
    lambda of: of.MultiCategorical((3, 2), mask=torch.ones(4, dtype=bool)).rand(),
    lambda of: of.Binary(),
    lambda of: of.Binary(3, (2,)),
    lambda of: of.Binary(3, ()),
    lambda of: of.Binary(shape=())[0],
    lambda of: of.Binary(3).unbind(0),
    lambda of: of.NonTensor(batched=True, feature_dims=1),
    lambda of: of.NonTensor().cardinality(),
    lambda of: of.NonTensor().index(0, 0),
    lambda of: of.Choice((of.Categorical(3),)),
    lambda of: of.Choice([1, 2]),
    lambda of: of.Choice([of.Categorical(3), of.OneHot(3)]),
    lambda of: of.Choice([of.OneHot(3), of.OneHot(4)]),
    lambda of: of.Choice([of.OneHot(3)]).index(0, 0),
    lambda of: of.Composite(shape=(2,)).set("a", of.Categorical(3)),
    lambda of: of.Composite(a=of.Categorical(3, shape=(4,)), shape=(2,)),
    lambda of: of.Composite({}, {}),
    lambda of: of.Composite(3),
    lambda of: of.Composite(shape=(1,), batch_size=(1,)),
    lambda of: of.Composite()["a"],
    lambda of: of.Composite()["shape"],
    lambda of: of.Composite().pop("a"),
    lambda of: of.Composite(a=of.Categorical(2)).encode({"b": 1}),
    lambda of: of.Composite(a=of.Categorical(2)).encode({"a": None}),
    lambda of: of.Composite().lock_().set("a", None),
    lambda of: of.Composite(shape=(2,)).expand(3),
    lambda of: of.Composite(shape=(2,)).unbind(-4),
    lambda of: of.Composite().unsqueeze(4),
    lambda of: of.Composite().index(0, 0),
    lambda of: torch.stack([of.Composite(), of.Categorical(2)]),
    lambda of: torch.stack([of.Composite(shape=(1,)), of.Composite()]),
    lambda of: torch.stack([of.Categorical(2), of.Bounded(0, 1, shape=())]),
    lambda of: torch.stack([of.Categorical(2), of.Categorical(3, shape=(2,))]),
    lambda of: setattr(of.Composite(a=of.Categorical(2)), "shape", (3,)),
    lambda of: of.Composite(a=of.Categorical(2)).type_check({"a": torch.zeros(())}),
    lambda of: setattr(of.Composite(shape=(2,)), "names", ["a", "b"]),
    lambda of: of.Composite(shape=(2,), names=["a"]).refine_names("b"),
]


def test_calls_that_torchrl_refuses_raise_the_same_error() -> None:
    for number, act in enumerate(REFUSED):
        with pytest.raises(Exception, match=".") as theirs:
            act(torchrl)
        with pytest.raises(type(theirs.value)):
            pytest.fail(f"call {number} of {theirs.value!r} returns {act(expstore.specs)}")


def test_meaningless_arguments_are_refused() -> None:
    for make, error, text in [
        (lambda: expstore.Bounded(1, 0, shape=(2,)), ValueError, r"no number between low=1.0 and high=0.0"),
        (lambda: expstore.Bounded(math.nan, 0, shape=()), ValueError, "no number between low=nan"),
        (lambda: expstore.Bounded(0, None, shape=()), TypeError, "takes two bounds"),
        (lambda: expstore.Bounded(0, 1, shape=(), dtype="float32"), TypeError, "dtype is one of torch's"),
        (lambda: expstore.Bounded(0, 1, shape=(-1, 2))[:1], IndexError, "its size is unknown"),
        (lambda: expstore.Bounded(0, 1, shape=(-1, 2)).unbind(0), ValueError, "Cannot unbind along dim 0"),
        (lambda: expstore.OneHot(3, use_register=True), ValueError, "cannot map numbers back"),
        (lambda: expstore.MultiOneHot((3, 2), use_register=True), ValueError, "cannot map numbers back"),
        (lambda: expstore.OneHot(3).encode(-1), AssertionError, "expected 0 to 2"),
        (lambda: expstore.OneHot(3, (2, 3)).flatten(0, 1), ValueError, "must remain unchanged"),
        (lambda: expstore.MultiOneHot((3, 2)).encode([0, 1, 1]), ValueError, "takes 2 numbers"),
        (lambda: expstore.Unbounded(colour="red"), TypeError, "unrecognised kwargs"),
        (lambda: expstore.Unbounded(dtype=torch.complex64), TypeError, "use two values of torch.float32"),
        (lambda: expstore.specs.Choice([]), ValueError, "at least one"),
        (lambda: expstore.MultiCategorical((3,)).set_provisional_n(4), ValueError, "knows how many"),
        (
            lambda: expstore.MultiCategorical([[3, 2], [1, 4]], mask=torch.ones(5)),
            ValueError,
            "Only homogeneous MultiDiscrete specs can be masked",
        ),
        (
            lambda: expstore.OneHot(2, (2, 2), mask=torch.eye(2).bool()).enumerate(use_mask=True),
            ValueError,
            "the same mask for all elements",
        ),
    ]:
        with pytest.raises(error, match=text):
            make()


# --- what is better here


def test_infinite_bounds_can_be_drawn_from() -> None:
    low = torch.tensor([-math.inf, 0.0, -math.inf, -3e38])
    high = torch.tensor([math.inf, math.inf, 5.0, 3e38])
    spec = expstore.Bounded(low, high)
    drawn = spec.rand((10_000,), generator=torch.Generator().manual_seed(0))
    assert spec.is_in(drawn)
    assert torch.isfinite(drawn).all()
    assert drawn[:, :3].mean(0).tolist() == pytest.approx([0.0, 1.0, 4.0], abs=0.05)
    assert drawn[:, 3].double().abs().mean().item() == pytest.approx(1.5e38, rel=0.05)


@pytest.mark.parametrize(
    ("low", "high"),
    [(-(2**63), 2**63 - 1), (-(2**62), 2**62 + 5), (0, 2**60), (2**60, 2**60 + 2), (-(2**63), 0)],
)
def test_wide_integers_are_all_as_likely(low: int, high: int) -> None:
    spec = expstore.Bounded(low, high, shape=(), dtype=torch.int64)
    drawn = spec.rand((20_000,), generator=torch.Generator().manual_seed(0))
    assert spec.is_in(drawn)
    if high - low > 2:
        # Every bit is drawn, and every part of the range.
        assert {int(one) % 2 for one in drawn} == {0, 1}
        share = np.array([(int(one) - low) / (high - low) for one in drawn])
        assert np.histogram(share, bins=4, range=(0, 1))[0] == pytest.approx([5000] * 4, abs=300)
    else:
        assert set(drawn.tolist()) == {low, low + 1, high}


def test_bounds_keep_to_smaller_dtypes() -> None:
    spec = expstore.Bounded(-math.inf, 1e30, shape=(2,)).to(torch.int8)
    assert isinstance(spec, expstore.specs.BoundedDiscrete)
    assert (spec.low.tolist(), spec.high.tolist()) == ([-128, -128], [127, 127])
    assert spec.project(torch.tensor([500.0, -1.6])).tolist() == [127, -2]
    assert expstore.Bounded(0, 1, shape=(), dtype=torch.bool).project(torch.tensor(3.0)).item() is True


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint32, torch.uint64])
@pytest.mark.parametrize("high", [2**17, 2**31 - 1])
def test_low_bits_of_wide_ranges_are_drawn(dtype: torch.dtype, high: int) -> None:
    spec = expstore.Bounded(0, high, shape=(), dtype=dtype)
    drawn = spec.rand((10_000,), generator=torch.Generator().manual_seed(0)).long()
    counts = torch.bincount(drawn % 256, minlength=256)
    assert counts.min() > 10  # 39 are expected
    assert drawn.double().mean().item() == pytest.approx(high / 2, rel=0.02)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_unsigned_numbers_are_numbers(dtype: torch.dtype) -> None:
    largest = torch.iinfo(dtype).max
    spec = expstore.Bounded(3, largest - 1, shape=(2,), dtype=dtype)
    drawn = spec.rand((1000,), generator=torch.Generator().manual_seed(0))
    assert spec.is_in(drawn)
    numbers = drawn.flatten().double()
    assert numbers.mean().item() == pytest.approx(largest / 2, rel=0.1)
    assert spec.project(torch.tensor([1e30, -5.0])).tolist() == [largest - 1, 3]
    assert spec.project(torch.from_numpy(np.array([2, largest], np.uint64)).to(dtype)).tolist() == [
        3,
        largest - 1,
    ]
    assert spec.within(torch.tensor([2.0, 4.0])).tolist() == [False, True]
    assert spec.to(torch.int32).high.tolist() == [min(largest - 1, 2**31 - 1)] * 2
    assert spec.to(torch.int64).to(dtype) == spec or dtype == torch.uint64
    assert spec == spec.clone() != expstore.Unbounded((2,), dtype=dtype)
    free = expstore.Unbounded((2,), dtype=dtype)
    assert free.rand((1000,)).double().amax() > largest / 2
    choice = expstore.Categorical(3, (2,), dtype=dtype)
    assert choice.is_in(choice.rand((10,)))
    assert choice.project(torch.tensor([9, 1]).to(dtype)).tolist() == [2, 1]


def test_specs_are_indexed_as_tensors_are() -> None:
    values = torch.arange(6.0).reshape(2, 3)
    spec = expstore.Bounded(values, 10)
    for index in (
        *(
            [True, False],
            np.array([False, True]),
            values > 3,
            np.int64(1),
            True,
            [[0, 1], [1, 0]],
            (1, [0, 2]),
        ),
        *((slice(None), None, [0]), (..., -1), range(1), (), [], torch.tensor(1), slice(None, None, 2)),
        *([[[[0]]]], ([0, 1], [0, 2]), (1, ..., None), slice(5, 9)),
    ):
        tensors = values[torch.tensor(index)] if isinstance(index, list) and index else values[index]
        assert torch.equal(spec[index].low, tensors), index
        assert spec[index].shape == tensors.shape
    assert spec[::-1].low.tolist() == values.flip(0).tolist()
    assert spec[:, 10:0:-1].low.tolist() == [[2, 1], [5, 4]]
    assert expstore.OneHot(2, (0, 2))[None].shape == (1, 0, 2)


def test_masks_stay_with_their_elements() -> None:
    mask = torch.tensor([[True, False, False], [False, True, False]])
    spec = expstore.Categorical(3, shape=(2,), mask=mask)
    assert spec[1].rand().item() == 1
    assert spec.expand(4, 2).rand().tolist() == [[0, 1]] * 4
    assert spec.unsqueeze(-1).unflatten(0, (2, 1)).rand().flatten().tolist() == [0, 1]
    assert torch.stack([spec, spec], 1).rand().tolist() == [[0, 0], [1, 1]]
    assert not spec.is_in(torch.tensor([0, 0]))
    assert not spec.is_in(torch.tensor([0, 1], dtype=torch.int32))
    assert spec.to(torch.int32).is_in(torch.tensor([0, 1], dtype=torch.int32))
    assert spec.within(torch.tensor([[0, 0], [7, 1]])).tolist() == [[True, False], [False, True]]


def test_arrays_may_lie_backwards() -> None:
    backwards = np.arange(3, dtype=np.float32)[::-1]
    assert expstore.Unbounded((3,)).encode(backwards).tolist() == [2, 1, 0]
    assert expstore.Unbounded((3,)).encode([backwards]).tolist() == [2, 1, 0]


def test_values_of_another_kind_are_not_in() -> None:
    spec = expstore.Bounded(0, 1, shape=(3,))
    assert spec.is_in(torch.ones(5, 3))
    for value in (
        torch.ones(2),
        torch.ones(3).double(),
        np.ones(3, np.float32),
        1.0,
        torch.full((3,), math.nan),
    ):
        assert not spec.is_in(value)


@given(recipes, shapes, st.sampled_from((torch.float32, torch.int64, torch.bool)))
def test_shapes_and_dtypes_count(recipe: Recipe, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    ours, theirs = recipe.both()
    value = torch.zeros(shape, dtype=dtype)
    answer = asked(lambda: theirs.is_in(value))
    fits = not isinstance(answer, type) and bool(answer)
    if getattr(ours, "mask", None) is None:
        assert ours.is_in(value) == fits
    else:
        # Dtypes count with a mask, too; TorchRL looks at the numbers only.
        assert ours.is_in(value) <= fits


def test_dims_of_unknown_size_stay_so() -> None:
    spec = expstore.Bounded(torch.tensor([[0.0, 1.0]]), 2, shape=(-1, 2))
    assert spec.is_in(torch.ones(7, 2))
    assert not spec.is_in(torch.zeros(7, 2))
    assert spec.expand(4, -1, 2).shape == (4, -1, 2)
    assert spec.expand(-1, -1, 2).shape == (-1, -1, 2)
    assert spec.expand(-1, -1, 2).low.shape == (1, 1, 2)
    assert spec.unsqueeze(0).flatten(0, 1).shape == (-1, 2)
    assert spec[3].shape == (2,)
    assert spec[..., 1].low.tolist() == [1.0]
    assert spec.reshape(2, -1).shape == (2, -1)
    assert spec.rand((3,)).shape == (3, 1, 2)
    assert spec.encode(np.ones((7, 2))).shape == (7, 2)
    assert expstore.Unbounded((-1, -1, 2)).encode(np.ones((7, 3, 2))).shape == (7, 3, 2)
    rows = expstore.MultiOneHot((2, 3), (-1, 5))
    assert rows.is_in(rows.encode([[0, 1], [1, 2], [0, 0]]))
    assert rows.encode([[0, 1], [1, 2], [0, 0]]).shape == (3, 5)
    several = expstore.MultiCategorical((2, 3), (-1, 2))
    assert several.is_in(torch.ones(7, 2).long())
    assert several.expand(4, -1, 2).to_one_hot_spec() == rows.expand(4, -1, 5)


def test_the_same_choices_have_two_specs() -> None:
    for numbers, rows in [
        (expstore.Categorical(3, (2,)), expstore.OneHot(3, (2, 3))),
        (expstore.MultiCategorical((3, 2), (4, 2)), expstore.MultiOneHot((3, 2), (4, 5))),
    ]:
        for mask in (None, torch.tensor([True, False, True, True, True][: rows.shape[-1]])):
            numbers.update_mask(mask)
            rows.update_mask(mask)
            assert numbers.to_one_hot_spec() == rows == rows.to_one_hot_spec()
            assert rows.to_categorical_spec() == numbers == numbers.to_categorical_spec()
            drawn = numbers.rand((5,))
            assert rows.is_in(numbers.to_one_hot(drawn, safe=True))
            assert torch.equal(rows.to_categorical(numbers.to_one_hot(drawn), safe=True), drawn)
            assert torch.equal(
                rows.to_one_hot(rows.expand(5, *rows.shape).encode(drawn)), numbers.to_one_hot(drawn)
            )
            assert numbers != rows


def test_all_choices_can_be_listed() -> None:
    mask = torch.tensor([True, False, True])
    assert expstore.Categorical(3, (2,), mask=mask).enumerate().tolist() == [[0, 0], [1, 1], [2, 2]]
    assert expstore.Categorical(3, (2,), mask=mask).enumerate(use_mask=True).tolist() == [[0, 0], [2, 2]]
    assert expstore.OneHot(3, mask=mask).enumerate(use_mask=True).long().tolist() == [[1, 0, 0], [0, 0, 1]]
    several = expstore.MultiCategorical((3, 2), mask=torch.cat([mask, mask[:2]]))
    assert several.enumerate(use_mask=True).tolist() == [[0, 0], [2, 0]]
    assert several.enumerate().shape == (several.cardinality(), 2)
    assert expstore.MultiCategorical((3, 2), (4, 2)).enumerate().shape == (6, 4, 2)
    rows = several.to_one_hot_spec()
    assert rows.enumerate(use_mask=True).long().tolist() == [[1, 0, 0, 1, 0], [0, 0, 1, 1, 0]]
    assert rows.cardinality() == 6


def test_choices_are_indices() -> None:
    values = torch.arange(10.0).reshape(2, 5)
    assert expstore.OneHot(5).index(torch.eye(5)[3], values).tolist() == [[3], [8]]
    assert expstore.OneHot(5).index(torch.eye(5)[[3, 1]].bool(), values).tolist() == [[3], [6]]
    assert expstore.Categorical(5).index(torch.tensor([3, 1]), values).tolist() == [3, 6]
    assert expstore.Categorical(5, (1,)).index(torch.tensor([[3], [1]]), values).tolist() == [[3], [6]]
    both = expstore.MultiOneHot((3, 2))
    assert both.index(both.encode([2, 0]), values).tolist() == [[2, 3], [7, 8]]


def test_projected_rows_are_drawn_as_they_weigh() -> None:
    spec = expstore.OneHot(3, dtype=torch.float32)
    weights = torch.tensor([0.0, 1.0, 3.0]).expand(20_000, 3)
    drawn = spec.project(weights, generator=torch.Generator().manual_seed(0))
    assert drawn.mean(0).tolist() == pytest.approx([0, 0.25, 0.75], abs=0.02)
    spec.update_mask(torch.tensor([True, True, False]))
    assert spec.project(weights).mean(0).tolist() == [0, 1, 0]
    assert spec.project(torch.tensor([0.0, 0.0, -1.0]))[2] == 0


def test_rows_of_numbers_may_have_different_ones() -> None:
    spec = expstore.MultiCategorical([[3, 2], [1, 4]])
    drawn = spec.rand((1000,), generator=torch.Generator().manual_seed(0))
    assert drawn.amax(0).tolist() == [[2, 1], [0, 3]]
    assert spec[0] == expstore.MultiCategorical((3, 2))
    assert spec[:, 0] == expstore.MultiCategorical((3, 1))
    assert spec[1, 1] == expstore.Categorical(4)
    assert spec.cardinality() == 24
    assert [row.shape for row in spec.to_one_hot(torch.zeros(2, 2)).unbind()] == [(5,), (5,)]
    with pytest.raises(ValueError, match="rows of different lengths"):
        spec.to_one_hot(torch.zeros(7, 2, 2))
    mask = torch.tensor([True, False, False, False, True])
    masked = expstore.MultiCategorical((3, 2), (4, 2), mask=mask)
    assert masked[0].rand().tolist() == [0, 1]
    assert masked[:, [1]].mask.tolist() == [[False, True]] * 4
    assert masked[2, 1].mask.tolist() == [False, True]


def test_flags_are_choices_among_two() -> None:
    spec = expstore.Binary(3)
    assert spec == expstore.Categorical(2, (3,), dtype=torch.int8)
    assert expstore.Categorical(2, (3,), dtype=torch.int8) == spec
    assert spec != expstore.Categorical(3, (3,), dtype=torch.int8)
    assert spec != expstore.MultiCategorical((2, 2, 2), dtype=torch.int8)
    spec.update_mask(torch.tensor([False, True]))
    assert spec.rand((4,)).all()
    assert spec.expand(2, 3).mask.shape == (2, 3, 2)


def test_numbers_without_bounds_are_numbers_with_the_bounds_of_the_dtype() -> None:
    for dtype in (torch.float32, torch.int16, torch.bool):
        spec = expstore.Unbounded((2,), dtype=dtype)
        bounded = expstore.Bounded(spec.space.low, spec.space.high, dtype=dtype)
        assert spec == bounded
        assert bounded == spec
        assert expstore.Bounded(0, 1, shape=(3,), dtype=dtype) != spec
        assert expstore.Unbounded((2,), dtype=dtype, domain="neither") != bounded
    spec = expstore.Unbounded((2,), dtype=torch.int8)
    assert spec.project(torch.tensor([3.6, 1e9])).tolist() == [4, 127]
    assert expstore.Unbounded((2, 3)).project(torch.zeros(6)).shape == (2, 3)


def test_objects_have_specs() -> None:
    spec = expstore.specs.NonTensor(shape=(2, 3), example_data="go", feature_dims=1)
    assert repr(spec) == repr(torchrl.NonTensor(shape=(2, 3), example_data="go", feature_dims=1))
    assert spec.rand((4,)).tolist() == [[["go"] * 3] * 2] * 4
    assert spec.zero().batch_size == (2, 3)
    assert spec.encode("stop").tolist() == [["stop"] * 3] * 2
    assert spec.is_in("anything")
    assert spec.is_in(spec.rand((4,)))
    assert not spec.is_in(torch.zeros(2, 3))
    assert not spec.is_in(spec[0].rand())
    for made, shape in [
        (spec.expand(4, 2, 3), (4, 2, 3)),
        (spec.unsqueeze(0), (1, 2, 3)),
        (spec[0], (3,)),
        (spec.unbind(0)[1], (3,)),
        (spec.flatten(0, 1), (6,)),
        (spec.clone(), (2, 3)),
    ]:
        assert (made.shape, made.example_data) == (shape, "go")
        assert made.rand().batch_size == shape
    assert spec == spec.clone() != expstore.specs.NonTensor(shape=(2, 3), example_data="stop", feature_dims=1)
    assert expstore.specs.NonTensor(shape=(3,), batched=True, example_data=1).rand().tolist() == [1, 1, 1]
    assert expstore.specs.NonTensor(shape=()).to_numpy("same", safe=True) == "same"
    with pytest.raises(TypeError, match="describes objects"):
        spec.type_check(torch.ones(3))


def test_a_choice_is_in_one_of_its_specs() -> None:
    low, high = expstore.Bounded(0, 1, shape=(2,)), expstore.Bounded(10, 11, shape=(2,))
    spec = expstore.specs.Choice([low, high])
    assert repr(spec) == repr(torchrl.Choice([torchrl.Bounded(0, 1, shape=(2,))]))
    drawn = [spec.rand(generator=torch.Generator().manual_seed(seed)) for seed in range(20)]
    assert all(low.is_in(one) != high.is_in(one) for one in drawn)
    assert {low.is_in(one) for one in drawn} == {True, False}
    assert spec.project(torch.tensor([9.0, 9.0])).tolist() == [10, 10]
    assert spec.encode([10.5, 10.5]).tolist() == [10.5, 10.5]
    assert spec.expand(3, 2).rand().shape == (3, 2)
    assert spec.unbind(0)[0] == expstore.specs.Choice([low[0], high[0]])
    assert (spec.num_choices, spec.cardinality()) == (2, math.inf)
    assert spec == spec.clone() != expstore.specs.Choice([low])
    assert (spec.zero().tolist(), spec.one().tolist()) == ([0, 0], [1, 1])
    numbers = expstore.specs.Choice([expstore.Categorical(2), expstore.Categorical(3)])
    assert [int(one) for one in numbers.enumerate()] == [0, 1, 0, 1, 2]
    assert numbers.cardinality() == 5


def test_a_choice_is_one_of_its_objects() -> None:
    spec = expstore.specs.Choice([NonTensorData(word) for word in "abc"])
    drawn = {spec.rand(generator=torch.Generator().manual_seed(seed)).data for seed in range(30)}
    assert drawn == set("abc")
    assert spec.rand((4,)).batch_size == (4,)
    assert spec.is_in(NonTensorData("b"))
    assert not spec.is_in(NonTensorData("d"))
    assert [one.data for one in spec.enumerate()] == list("abc")
    assert spec.cardinality() == spec.num_choices == 3
    assert spec.one().data == "b"
    assert spec == spec.clone() != expstore.specs.Choice([NonTensorData(word) for word in "abd"])


def test_older_names_are_the_same_classes() -> None:
    for old, new in [
        ("BinaryDiscreteTensorSpec", "Binary"),
        ("BoundedTensorSpec", "Bounded"),
        ("DiscreteTensorSpec", "Categorical"),
        ("MultiDiscreteTensorSpec", "MultiCategorical"),
        ("MultiOneHotDiscreteTensorSpec", "MultiOneHot"),
        ("OneHotDiscreteTensorSpec", "OneHot"),
        ("UnboundedContinuousTensorSpec", "UnboundedContinuous"),
        ("UnboundedDiscreteTensorSpec", "UnboundedDiscrete"),
    ]:
        assert getattr(expstore.specs, old) is getattr(expstore.specs, new)


@pytest.mark.parametrize("kind", [partial(expstore.Bounded, 0, 10), expstore.Unbounded])
def test_numbers_are_rounded_to_integers(kind: Any) -> None:
    spec = kind(shape=(4,), dtype=torch.int64)
    assert spec.project(torch.tensor([2.7, 2.2, 0.4, 9.6])).tolist() == [3, 2, 0, 10]
