"""What is done to rows on their way in, and to batches on their way out.

Buffers take one of these, functions, modules, or torchrl's.
"""

from expstore.transforms.compose import Compose, Inverted
from expstore.transforms.crop import RandomCropTensorDict
from expstore.transforms.steps import StepTransform, StepView

__all__ = ["Compose", "Inverted", "RandomCropTensorDict", "StepTransform", "StepView"]
