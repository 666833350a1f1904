"""Samplers: they choose the rows of each batch.

A buffer has one sampler.
"""

from expstore.samplers.base import Sampler
from expstore.samplers.consuming import ConsumingSampler
from expstore.samplers.ensemble import SamplerEnsemble
from expstore.samplers.filter import Where
from expstore.samplers.groups import GroupSampler
from expstore.samplers.prioritized import PrioritizedSampler
from expstore.samplers.prioritized_slices import PrioritizedSliceSampler
from expstore.samplers.prompt_groups import PromptGroupSampler
from expstore.samplers.random import RandomSampler
from expstore.samplers.recency import RecencySampler
from expstore.samplers.slices import SliceSampler
from expstore.samplers.slices_without_replacement import SliceSamplerWithoutReplacement
from expstore.samplers.staleness import StalenessAwareSampler
from expstore.samplers.streaming_slices import StreamingSliceSampler
from expstore.samplers.without_replacement import SamplerWithoutReplacement

__all__ = [
    "ConsumingSampler",
    "GroupSampler",
    "PrioritizedSampler",
    "PrioritizedSliceSampler",
    "PromptGroupSampler",
    "RandomSampler",
    "RecencySampler",
    "Sampler",
    "SamplerEnsemble",
    "SamplerWithoutReplacement",
    "SliceSampler",
    "SliceSamplerWithoutReplacement",
    "StalenessAwareSampler",
    "StreamingSliceSampler",
    "Where",
]
