"""What values fields may have: the TensorSpec family, under TorchRL's names.

Used by whoever describes an environment; stores keep the specs of their fields. Nothing here reads a store.
"""

from expstore.specs.base import TensorSpec
from expstore.specs.bounded import Bounded, BoundedContinuous, BoundedDiscrete
from expstore.specs.boxes import BinaryBox, Box, BoxList, CategoricalBox, ContinuousBox
from expstore.specs.categorical import Categorical

#: Older names of the same classes.
BoundedTensorSpec = Bounded
DiscreteTensorSpec = Categorical

__all__ = [
    "BinaryBox",
    "Bounded",
    "BoundedContinuous",
    "BoundedDiscrete",
    "BoundedTensorSpec",
    "Box",
    "BoxList",
    "Categorical",
    "CategoricalBox",
    "ContinuousBox",
    "DiscreteTensorSpec",
    "TensorSpec",
]
