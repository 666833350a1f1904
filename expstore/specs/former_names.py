"""Deprecated names of specs, which TorchRL's documentation still uses."""

from __future__ import annotations

from expstore.specs.binary import Binary
from expstore.specs.bounded import Bounded
from expstore.specs.categorical import Categorical, OneHot
from expstore.specs.composite import Composite
from expstore.specs.multi import MultiCategorical, MultiOneHot
from expstore.specs.unbounded import UnboundedContinuous, UnboundedDiscrete

BinaryDiscreteTensorSpec = Binary
BoundedTensorSpec = Bounded
CompositeSpec = Composite
DiscreteTensorSpec = Categorical
MultiDiscreteTensorSpec = MultiCategorical
MultiOneHotDiscreteTensorSpec = MultiOneHot
OneHotDiscreteTensorSpec = OneHot
UnboundedContinuousTensorSpec = UnboundedContinuous
UnboundedDiscreteTensorSpec = UnboundedDiscrete
