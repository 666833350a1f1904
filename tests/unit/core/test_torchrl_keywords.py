"""TorchRL keywords without effect are accepted at their defaults, and otherwise refused with the reason."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

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


def test_keywords_without_effect_are_accepted() -> None:
    check_keywords(Thing(), {"compilable": False, "shared": False}, ("compilable", "shared"))
    check_keywords(Thing(), {}, ())


def test_unsupported_keywords_are_refused_with_a_reason() -> None:
    reason = "each field is kept in one array already"
    with pytest.raises(ValueError, match=f"^Thing does not support consolidated=True: {reason}; leave cons"):
        check_keywords(Thing(), {"consolidated": True}, ("consolidated",))


def test_a_keyword_of_another_class_is_unknown() -> None:
    assert "shared" in VOID
    with pytest.raises(TypeError, match="^Thing got an unexpected keyword argument 'shared'"):
        check_keywords(Thing(), {"shared": False}, ("compilable",))


def test_every_ignored_keyword_has_a_reason() -> None:
    assert not [name for name, void in VOID.items() if len(void.reason) < 15]


def test_the_cpu_asks_for_no_device() -> None:
    for value in [None, "cpu", "cpu:0", torch.device("cpu")]:
        PrioritizedSampler(10, 0.7, 0.5, device=value)


def test_priorities_are_on_no_device() -> None:
    for value in ["cuda", torch.device("cuda", 1), 0]:
        with pytest.raises(ValueError, match="PrioritizedSampler does not support device=.*host memory"):
            PrioritizedSampler(10, 0.7, 0.5, device=value)


def test_a_max_capacity_is_a_number_of_rows() -> None:
    for kind in [PrioritizedSampler, partial(PrioritizedSliceSampler, slice_len=2)]:
        for fine in (None, 1, np.int64(7)):
            kind(fine)
        with pytest.raises(ValueError, match="does not support max_capacity=0: it is a number of rows"):
            kind(0)
        with pytest.raises(TypeError):
            kind("many")


def test_writers_take_compilable_in_its_place() -> None:
    for kind in [RoundRobinWriter, TensorDictRoundRobinWriter, ImmutableDatasetWriter]:
        kind(False)
        kind(compilable=False)
        with pytest.raises(ValueError, match=f"{kind.__name__} does not support compilable=True"):
            kind(True)
        with pytest.raises(ValueError, match=f"{kind.__name__} does not support compilable=True"):
            kind(compilable=True)
        with pytest.raises(ValueError, match="TensorDictMaxValueWriter does not support compilable=True"):
            TensorDictMaxValueWriter(compilable=True)


def test_slices_name_trajectories_by_both_of_torchrls_keys() -> None:
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


def test_a_where_may_contain_both() -> None:
    for name in MAKE:
        make = MAKE[name]
        assert filter_of(make(where=Where("a > 1", weight="a"))) == ("a > 1", "a")
        assert filter_of(make(where=Where("a > 1"))) == ("a > 1", None)
        assert filter_of(make(where=Where(weight="a"))) == (None, "a")
        assert filter_of(make(where=Where("a > 1"), weight="a")) == filter_of(make(where="a > 1", weight="a"))
        assert make(where=Where()).filter is None
        with pytest.raises(TypeError, match="pass one weight: either weight='b' or"):
            make(where=Where(weight="a"), weight="b")


def test_samplers_without_chances_refuse_a_weight() -> None:
    for name in ONCE:
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


def test_expressions_are_text() -> None:
    for given in [{"condition": 3}, {"weight": 0.5}]:
        with pytest.raises(TypeError, match="must be an SQL expression"):
            Where(**given)
