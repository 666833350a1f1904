"""Deprecated names of specs, which TorchRL's documentation still uses."""

from __future__ import annotations

from expstore.specs.bounded import Bounded, UnboundedContinuous, UnboundedDiscrete
from expstore.specs.categorical import Binary, Categorical, MultiCategorical, MultiOneHot, OneHot
from expstore.specs.composite import Composite

BinaryDiscreteTensorSpec = Binary
BoundedTensorSpec = Bounded
CompositeSpec = Composite
DiscreteTensorSpec = Categorical
MultiDiscreteTensorSpec = MultiCategorical
MultiOneHotDiscreteTensorSpec = MultiOneHot
OneHotDiscreteTensorSpec = OneHot
UnboundedContinuousTensorSpec = UnboundedContinuous
UnboundedDiscreteTensorSpec = UnboundedDiscrete
