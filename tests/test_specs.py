"""Specs say of values what TorchRL's say: both are made alike and asked the same.

Run with the other tests. Specs, values and changes are drawn by Hypothesis. What differs on purpose has a
test of its own, at the end.
"""

from __future__ import annotations

import doctest
import importlib
import math
import pickle
import pkgutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torchrl.data as torchrl
from hypothesis import given
from hypothesis import strategies as st

import expstore
import expstore.specs

FLOATS = (torch.float32, torch.float64, torch.float16)
WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

shapes = st.lists(st.integers(1, 3), max_size=3).map(tuple)
seeds = st.integers(0, 2**31)


@dataclass(frozen=True)
class Recipe:
    """Say how a spec is made, here or there."""

    name: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def here(self) -> Any:
        return getattr(expstore, self.name)(*self.args, **self.kwargs)

    def there(self) -> Any:
        return getattr(torchrl, self.name)(*self.args, **self.kwargs)

    def both(self) -> tuple[Any, Any]:
        return self.here(), self.there()


@st.composite
def bounded(draw: st.DrawFn) -> Recipe:
    dtype = draw(st.sampled_from((*FLOATS, *WHOLE)))
    shape = draw(shapes)
    small = draw(st.integers(0, 20))
    large = draw(st.integers(small, 100))
    low: Any = small
    high: Any = torch.full(shape, large).to(dtype) if draw(st.booleans()) else large
    if draw(st.booleans()):
        low = torch.arange(math.prod(shape)).reshape(shape).remainder(small + 1).to(dtype)
    kwargs = {"shape": shape, "dtype": dtype}
    if draw(st.booleans()):
        kwargs["domain"] = draw(st.sampled_from(["continuous", "discrete"]))
    return Recipe("Bounded", (low, high), kwargs)


@st.composite
def masks(draw: st.DrawFn, shape: tuple[int, ...]) -> torch.Tensor | None:
    if draw(st.booleans()):
        return None
    made = torch.rand(shape, generator=torch.Generator().manual_seed(draw(seeds))) < 0.5
    made[..., draw(st.integers(0, shape[-1] - 1))] = True
    return made


@st.composite
def categorical(draw: st.DrawFn) -> Recipe:
    n, shape = draw(st.integers(1, 5)), draw(shapes)
    kwargs = {"shape": shape, "dtype": draw(st.sampled_from((torch.int64, torch.int32)))}
    return Recipe("Categorical", (n,), {**kwargs, "mask": draw(masks((*shape, n)))})


KINDS: dict[str, st.SearchStrategy[Recipe]] = {"bounded": bounded(), "categorical": categorical()}
recipes = st.one_of(*KINDS.values())


def nearby(spec: Any, seed: int, lead: tuple[int, ...], *, far: float) -> torch.Tensor:
    """Return values of the spec, of which some may be just out of it."""
    drawn: torch.Tensor = seeded(seed, lambda: spec.rand(lead))
    draws = torch.Generator().manual_seed(seed)
    moved = torch.randint(-100, 100, drawn.shape, generator=draws)
    moved = torch.where(torch.rand(drawn.shape, generator=draws) < far, moved, torch.zeros_like(moved))
    if drawn.dtype == torch.bool:
        return drawn ^ (moved > 50)
    return torch.where(moved == 0, drawn, moved.remainder(8).to(drawn.dtype))


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
    assert drawn.shape == (*lead, *ours.shape)
    assert drawn.dtype == ours.dtype
    assert ours.is_in(drawn)
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
    assert ours.is_in(value) == ours.contains(value) == (not isinstance(answer, type) and bool(answer))
    projected = ours.project(value)
    assert ours.is_in(projected)
    assert torch.equal(value, kept)
    expected = asked(lambda: theirs.project(value.clone()))
    if ours.is_in(value):
        assert projected is value
    elif getattr(ours, "mask", None) is None:
        assert torch.equal(projected, expected)
    else:
        # What a mask hides is replaced by chance: in both cases by something that is allowed.
        assert theirs.is_in(projected)
        assert torch.equal(projected[ours.within(value)], value[ours.within(value)])


@given(recipes, seeds)
def test_values_go_to_numpy_and_back(recipe: Recipe, seed: int) -> None:
    ours, theirs = recipe.both()
    value = ours.rand(generator=torch.Generator().manual_seed(seed))
    array = ours.to_numpy(value, safe=True)
    assert np.array_equal(array, theirs.to_numpy(value))
    assert torch.equal(ours.encode(array), value)
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
    dim = data.draw(st.none() | st.integers(-spec.ndim, max(spec.ndim - 1, 0)))
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
    dim = data.draw(st.integers(0, max(spec.ndim - 1, 0)))
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
        # What TorchRL cannot do may be possible here; what both refuse, they refuse.
        assert not isinstance(made, type) or issubclass(made, Exception)
        return
    assert not isinstance(made, type), made
    lost = LOST.get(name) if getattr(expected, "mask", None) is None else None
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


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda of: of.Bounded(0, 1), RuntimeError, "requires the shape to be explicitly"),
        (lambda of: of.Bounded(torch.zeros(3), 1, shape=(2,)), RuntimeError, "must match the provided shape"),
        (lambda of: of.Bounded(minimum=0, high=1), TypeError, "'minimum' has been removed"),
        (lambda of: of.Bounded(0, 1, shape=(), colour="red"), TypeError, "unrecognised kwargs"),
        (lambda of: of.Bounded(0, 1, shape=(3,)).expand(4), ValueError, "The last 1 of the expanded shape"),
        (lambda of: of.Bounded(0, 1, shape=(3,)).encode([1, 2]), RuntimeError, "Shape mismatch"),
        (lambda of: of.Bounded(0, 1, shape=(3,)).enumerate(), NotImplementedError, "enumerate is not impl"),
        (
            lambda of: of.Bounded(0, 1, shape=(3,)).index(0, 0),
            NotImplementedError,
            "not implemented for Bounded",
        ),
        (lambda of: of.Bounded(0, 1, shape=(3,)).unsqueeze(5), ValueError, "Dimension out of range"),
        (lambda of: of.Bounded(0, 1, shape=(3,))[3], IndexError, "out of bounds for"),
        (lambda of: of.Bounded(0, 1, shape=(3,))[0, 0], IndexError, "."),
        (lambda of: of.Bounded(0, 1, shape=(3,)).type_check(torch.ones(3).int()), TypeError, "value.dtype="),
        (
            lambda of: of.Bounded(0, 1, shape=()).assert_is_in(torch.tensor(2.0)),
            AssertionError,
            "not in space",
        ),
        (lambda of: of.Categorical(-1).rand(), RuntimeError, "set_provisional_n"),
        (lambda of: of.Categorical(-1).cardinality(), RuntimeError, "Undefined cardinality"),
        (lambda of: of.Categorical(3, mask=torch.ones(4)), RuntimeError, "Cannot expand mask"),
        (lambda of: of.Categorical(3, mask=torch.zeros(3)).rand(), RuntimeError, "."),
        (
            lambda of: torch.stack([of.Categorical(3), of.Bounded(0, 1, (1,))]),
            RuntimeError,
            "more than one type",
        ),
        (lambda of: torch.stack([of.Categorical(3), of.Categorical(3, (1,))]), RuntimeError, "Ndims differ"),
    ],
)
def test_errors_read_alike(make: Callable[[Any], Any], error: type[Exception], text: str) -> None:
    for of in (expstore, torchrl):
        with pytest.raises(error, match=text):
            make(of)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: expstore.Bounded(1, 0, shape=(2,)), ValueError, r"no number between low=1.0 and high=0.0"),
        (lambda: expstore.Bounded(math.nan, 0, shape=()), ValueError, "no number between low=nan"),
        (lambda: expstore.Bounded(0, None, shape=()), TypeError, "takes two bounds"),
        (lambda: expstore.Bounded(0, 1, shape=(), dtype="float32"), TypeError, "dtype is one of torch's"),
        (lambda: expstore.Bounded(0, 1, shape=(-1, 2))[:1], IndexError, "its size is unknown"),
        (lambda: expstore.Bounded(0, 1, shape=(-1, 2)).unbind(0), ValueError, "Cannot unbind along dim 0"),
    ],
)
def test_what_has_no_meaning_is_refused(make: Callable[[], Any], error: type[Exception], text: str) -> None:
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
    assert isinstance(spec, expstore.BoundedDiscrete)
    assert (spec.low.tolist(), spec.high.tolist()) == ([-128, -128], [127, 127])
    assert spec.project(torch.tensor([500.0, -1.6])).tolist() == [127, -2]
    assert expstore.Bounded(0, 1, shape=(), dtype=torch.bool).project(torch.tensor(3.0)).item() is True


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


def test_dims_of_unknown_size_stay_so() -> None:
    spec = expstore.Bounded(torch.tensor([[0.0, 1.0]]), 2, shape=(-1, 2))
    assert spec.is_in(torch.ones(7, 2))
    assert not spec.is_in(torch.zeros(7, 2))
    assert spec.expand(4, -1, 2).shape == (4, -1, 2)
    assert spec.unsqueeze(0).flatten(0, 1).shape == (-1, 2)
    assert spec[3].shape == (2,)
    assert spec[..., 1].low.tolist() == [1.0]
    assert spec.reshape(2, -1).shape == (2, -1)
    assert spec.rand((3,)).shape == (3, 1, 2)


def test_the_examples_of_the_docstrings_run() -> None:
    words: dict[str, Any] = {"torch": torch}
    words |= {name: getattr(expstore.specs, name) for name in expstore.specs.__all__}
    ran = 0
    for one in pkgutil.iter_modules(expstore.specs.__path__):
        module = importlib.import_module(f"expstore.specs.{one.name}")
        for test in doctest.DocTestFinder(exclude_empty=True).find(module, extraglobs=words):
            result = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test)
            assert not result.failed, test.name
            ran += result.attempted
    assert ran > 10
