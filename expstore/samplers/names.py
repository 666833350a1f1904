"""The names of samplers, the same in `expstore.open`, in buffers and over HTTP."""

from __future__ import annotations

from typing import Any, Literal

from expstore.core.nearest import suggest
from expstore.errors import ArgumentError
from expstore.samplers.base import Sampler
from expstore.samplers.consuming import ConsumingSampler
from expstore.samplers.prioritized import PrioritizedSampler
from expstore.samplers.prioritized_slices import PrioritizedSliceSampler
from expstore.samplers.random import RandomSampler
from expstore.samplers.recency import RecencySampler
from expstore.samplers.slices import SliceSampler
from expstore.samplers.slices_without_replacement import SliceSamplerWithoutReplacement
from expstore.samplers.streaming_slices import StreamingSliceSampler
from expstore.samplers.without_replacement import SamplerWithoutReplacement

SamplerName = Literal[
    "uniform",
    "prioritized",
    "slices",
    "prioritized_slices",
    "recency",
    "without_replacement",
    "slices_without_replacement",
    "streaming_slices",
    "consuming",
]
#: The class of each sampler, by its name.
SAMPLERS: dict[SamplerName, type[Sampler]] = {
    "uniform": RandomSampler,
    "prioritized": PrioritizedSampler,
    "slices": SliceSampler,
    "prioritized_slices": PrioritizedSliceSampler,
    "recency": RecencySampler,
    "without_replacement": SamplerWithoutReplacement,
    "slices_without_replacement": SliceSamplerWithoutReplacement,
    "streaming_slices": StreamingSliceSampler,
    "consuming": ConsumingSampler,
}


def make_sampler(name: str, **options: Any) -> Sampler:
    """Return a new sampler.

    Args:
        name: Name of the sampler: a key of `SAMPLERS`.
        options: Keyword arguments of its class.

    Raises:
        ArgumentError: There is no sampler of this name, or its class does not accept these arguments.

    Example:
        >>> from expstore.samplers.names import make_sampler
        >>> make_sampler("prioritized", alpha=0.7)
    """
    kind = next((kind for known, kind in SAMPLERS.items() if known == name), None)
    if kind is None:
        raise ArgumentError(f"there is no sampler {name!r}", hint=suggest(name, SAMPLERS, "the samplers are"))
    try:
        return kind(**options)
    except TypeError as exc:
        raise ArgumentError(
            f"sampler {name!r} cannot be made: {exc}", hint=f"pass expstore.{kind.__name__}(...)"
        ) from exc
