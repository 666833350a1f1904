"""Specs of the values that a field may have: the TensorSpec family, under TorchRL's names.

Use them to describe environments. A store keeps the specs of its fields. This package never reads a store.
"""

from expstore.specs.base import TensorSpec
from expstore.specs.binary import Binary
from expstore.specs.bounded import Bounded, BoundedContinuous, BoundedDiscrete
from expstore.specs.boxes import BinaryBox, Box, BoxList, CategoricalBox, ContinuousBox
from expstore.specs.categorical import Categorical, OneHot
from expstore.specs.composite import Composite
from expstore.specs.former_names import (
    BinaryDiscreteTensorSpec,
    BoundedTensorSpec,
    CompositeSpec,
    DiscreteTensorSpec,
    MultiDiscreteTensorSpec,
    MultiOneHotDiscreteTensorSpec,
    OneHotDiscreteTensorSpec,
    UnboundedContinuousTensorSpec,
    UnboundedDiscreteTensorSpec,
)
from expstore.specs.gymnasium_spaces import from_space, to_space
from expstore.specs.json_text import from_text, to_text
from expstore.specs.multi import MultiCategorical, MultiOneHot
from expstore.specs.non_tensor import Choice, NonTensor
from expstore.specs.stacked import Stacked, StackedComposite
from expstore.specs.torchrl_specs import from_env, from_torchrl, to_torchrl
from expstore.specs.unbounded import Unbounded, UnboundedContinuous, UnboundedDiscrete

__all__ = [
    "Binary",
    "BinaryBox",
    "BinaryDiscreteTensorSpec",
    "Bounded",
    "BoundedContinuous",
    "BoundedDiscrete",
    "BoundedTensorSpec",
    "Box",
    "BoxList",
    "Categorical",
    "CategoricalBox",
    "Choice",
    "Composite",
    "CompositeSpec",
    "ContinuousBox",
    "DiscreteTensorSpec",
    "MultiCategorical",
    "MultiDiscreteTensorSpec",
    "MultiOneHot",
    "MultiOneHotDiscreteTensorSpec",
    "NonTensor",
    "OneHot",
    "OneHotDiscreteTensorSpec",
    "Stacked",
    "StackedComposite",
    "TensorSpec",
    "Unbounded",
    "UnboundedContinuous",
    "UnboundedContinuousTensorSpec",
    "UnboundedDiscrete",
    "UnboundedDiscreteTensorSpec",
    "from_env",
    "from_space",
    "from_text",
    "from_torchrl",
    "to_space",
    "to_text",
    "to_torchrl",
]
