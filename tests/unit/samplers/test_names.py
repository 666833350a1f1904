"""Names of samplers: one table for `expstore.open`, buffers and requests."""

from __future__ import annotations

from typing import get_args

import pytest

from expstore import samplers
from expstore.api.samplers import AnySpec
from expstore.errors import ArgumentError
from expstore.samplers.names import SAMPLERS, SamplerName, make_sampler


def test_requests_have_the_same_names() -> None:
    union, *_ = get_args(AnySpec)
    kinds = {get_args(model.model_fields["kind"].annotation)[0] for model in get_args(union)}
    assert kinds == set(SAMPLERS) == set(get_args(SamplerName))


def test_samplers_are_made_with_their_options() -> None:
    made = make_sampler("prioritized", alpha=0.7)
    assert isinstance(made, samplers.PrioritizedSampler)
    assert repr(made) == repr(samplers.PrioritizedSampler(alpha=0.7))
    for name, kind in SAMPLERS.items():
        options = {"slice_len": 4} if "slices" in name else {"newest": 9} if name == "recency" else {}
        assert type(make_sampler(name, **options)) is kind


def test_a_missing_option_is_named() -> None:
    with pytest.raises(
        ArgumentError, match=r"'streaming_slices' .*slice_len.*StreamingSliceSampler\(\.\.\.\)"
    ):
        make_sampler("streaming_slices")
