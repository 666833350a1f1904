"""Which rows make up a batch.

Buffers take one of these.
"""

from expstore.samplers.base import Sampler
from expstore.samplers.prioritized import PrioritizedSampler
from expstore.samplers.random import RandomSampler

__all__ = ["PrioritizedSampler", "RandomSampler", "Sampler"]
