"""TorchRL keywords without effect are accepted at their defaults, and otherwise refused with the reason."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import expstore
from expstore import (
    ConsumingSampler,
    ImmutableDatasetWriter,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    RecencySampler,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StalenessAwareSampler,
    TensorDictMaxValueWriter,
    TensorDictRoundRobinWriter,
    Where,
)
from expstore.core.torchrl_keywords import VOID, check_keywords


class Thing:
    pass


def test_what_asks_for_nothing_is_accepted() -> None:
    check_keywords(Thing(), {"compilable": False, "shared": False}, ("compilable", "shared"))
    check_keywords(Thing(), {}, ())


def test_what_asks_for_something_is_refused_by_name_and_reason() -> None:
    reason = "each field is kept in one array already"
    with pytest.raises(ValueError, match=f"^Thing does not support consolidated=True: {reason}; leave cons"):
        check_keywords(Thing(), {"consolidated": True}, ("consolidated",))


def test_a_keyword_of_another_class_is_unknown() -> None:
    assert "shared" in VOID
    with pytest.raises(TypeError, match="^Thing got an unexpected keyword argument 'shared'"):
        check_keywords(Thing(), {"shared": False}, ("compilable",))


def test_every_reason_is_said() -> None:
    assert not [name for name, void in VOID.items() if len(void.reason) < 15]


@pytest.mark.parametrize("value", [None, "cpu", "cpu:0", torch.device("cpu")])
def test_the_cpu_asks_for_no_device(value: Any) -> None:
    PrioritizedSampler(10, 0.7, 0.5, device=value)


@pytest.mark.parametrize("value", ["cuda", torch.device("cuda", 1), 0])
def test_priorities_are_on_no_device(value: Any) -> None:
    with pytest.raises(ValueError, match="PrioritizedSampler does not support device=.*host memory"):
        PrioritizedSampler(10, 0.7, 0.5, device=value)


@pytest.mark.parametrize("kind", [PrioritizedSampler, partial(PrioritizedSliceSampler, slice_len=2)])
def test_a_max_capacity_is_a_number_of_rows(kind: Any) -> None:
    for fine in (None, 1, np.int64(7)):
        kind(fine)
    with pytest.raises(ValueError, match="does not support max_capacity=0: it is a number of rows"):
        kind(0)
    with pytest.raises(TypeError):
        kind("many")


@pytest.mark.parametrize("kind", [RoundRobinWriter, TensorDictRoundRobinWriter, ImmutableDatasetWriter])
def test_writers_take_compilable_in_its_place(kind: Any) -> None:
    kind(False)
    kind(compilable=False)
    with pytest.raises(ValueError, match=f"{kind.__name__} does not support compilable=True"):
        kind(True)
    with pytest.raises(ValueError, match=f"{kind.__name__} does not support compilable=True"):
        kind(compilable=True)
    with pytest.raises(ValueError, match="TensorDictMaxValueWriter does not support compilable=True"):
        TensorDictMaxValueWriter(compilable=True)


def test_slices_name_trajectories_by_both_of_torchrls_words() -> None:
    for kind in (SliceSampler, SliceSamplerWithoutReplacement):
        kind(slice_len=2, traj_key="a")
        kind(slice_len=2, trajectory_key="a")


# -- where and weight ------------------------------------------------------------------------------

MAKE: dict[str, Any] = {
    "random": RandomSampler,
    "recency": lambda **given: RecencySampler(half_life=5, **given),
    "staleness": StalenessAwareSampler,
    "prioritized": PrioritizedSampler,
    "slices": lambda **given: SliceSampler(slice_len=2, **given),
}
ONCE: dict[str, Any] = {
    "without replacement": SamplerWithoutReplacement,
    "slices without replacement": lambda **given: SliceSamplerWithoutReplacement(slice_len=2, **given),
    "consuming": ConsumingSampler,
}


def filter_of(sampler: Any) -> tuple[str | None, str | None]:
    return sampler.filter.where, sampler.filter.weight


@pytest.mark.parametrize("name", MAKE)
def test_a_where_may_contain_both(name: str) -> None:
    make = MAKE[name]
    assert filter_of(make(where=Where("a > 1", weight="a"))) == ("a > 1", "a")
    assert filter_of(make(where=Where("a > 1"))) == ("a > 1", None)
    assert filter_of(make(where=Where(weight="a"))) == (None, "a")
    assert filter_of(make(where=Where("a > 1"), weight="a")) == filter_of(make(where="a > 1", weight="a"))
    assert make(where=Where()).filter is None
    with pytest.raises(TypeError, match="pass one weight: either weight='b' or"):
        make(where=Where(weight="a"), weight="b")


@pytest.mark.parametrize("name", ONCE)
def test_where_chances_count_nothing_a_weight_is_refused(name: str) -> None:
    make = ONCE[name]
    assert filter_of(make(where=Where("a > 1"))) == ("a > 1", None)
    for given in ({"weight": "a"}, {"where": Where(weight="a")}):
        with pytest.raises(ValueError, match="weight='a'"):
            make(**given)


def test_prioritized_slices_take_a_weight_with_the_condition() -> None:
    make: Any = partial(PrioritizedSliceSampler, slice_len=2)
    assert filter_of(make(where="a > 1")) == ("a > 1", None)
    assert filter_of(make(where=Where("a > 1", weight="a"))) == ("a > 1", "a")
    with pytest.raises(TypeError, match=r"where=expstore\.Where\(condition, weight=\.\.\.\)"):
        make(weight="a")


@pytest.mark.parametrize("given", [{"condition": 3}, {"weight": 0.5}])
def test_expressions_are_text(given: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="must be an SQL expression"):
        Where(**given)


def test_a_where_is_no_text_elsewhere() -> None:
    with pytest.raises(TypeError):
        Where("a", "b")  # type: ignore[call-arg]
    assert expstore.Where is Where
