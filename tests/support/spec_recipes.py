"""Specs of all kinds, made alike by expstore and by TorchRL; Hypothesis chooses them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torchrl.data as torchrl
from hypothesis import strategies as st

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
        return getattr(expstore.specs, self.name)(*self.args, **self.kwargs)

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


@st.composite
def unbounded(draw: st.DrawFn) -> Recipe:
    kwargs = {"shape": draw(shapes), "dtype": draw(st.sampled_from((*FLOATS, *WHOLE, torch.bool)))}
    return Recipe(
        draw(st.sampled_from(["Unbounded", "UnboundedDiscrete", "UnboundedContinuous"])), (), kwargs
    )


@st.composite
def one_hot(draw: st.DrawFn) -> Recipe:
    n = draw(st.integers(1, 5))
    shape = (*draw(shapes)[:2], n)
    return Recipe("OneHot", (n, shape), {"mask": draw(masks(shape))})


@st.composite
def binary(draw: st.DrawFn) -> Recipe:
    dtype = draw(st.sampled_from((torch.int8, torch.bool, torch.int64, torch.float32)))
    return Recipe("Binary", (), {"shape": (*draw(shapes)[:2], draw(st.integers(1, 3))), "dtype": dtype})


nvecs = st.lists(st.integers(1, 4), min_size=1, max_size=4)


@st.composite
def multi_categorical(draw: st.DrawFn) -> Recipe:
    nvec, lead = draw(nvecs), draw(shapes)[:2]
    if draw(st.booleans()):
        mask = draw(masks((*lead, sum(nvec))))
        if mask is not None:
            mask = mask.index_fill(-1, torch.tensor(nvec).cumsum(0) - 1, True)
        kwargs = {"shape": (*lead, len(nvec)), "mask": mask}
        return Recipe("MultiCategorical", (nvec,), kwargs)
    return Recipe("MultiCategorical", ([nvec, [n + 1 for n in nvec]],))


@st.composite
def multi_one_hot(draw: st.DrawFn) -> Recipe:
    nvec, lead = draw(nvecs), draw(shapes)[:2]
    mask = draw(masks((*lead, sum(nvec))))
    if mask is not None:
        mask = mask.index_fill(-1, torch.tensor(nvec).cumsum(0) - 1, True)
    return Recipe("MultiOneHot", (nvec, (*lead, sum(nvec))), {"mask": mask})


KINDS: dict[str, st.SearchStrategy[Recipe]] = {
    "bounded": bounded(),
    "categorical": categorical(),
    "unbounded": unbounded(),
    "one hot": one_hot(),
    "binary": binary(),
    "multi categorical": multi_categorical(),
    "multi one hot": multi_one_hot(),
}
recipes = st.one_of(*KINDS.values())
