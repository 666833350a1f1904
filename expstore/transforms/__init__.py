"""What is done to rows on their way in, and to batches on their way out.

Buffers take one of these, functions, modules, or torchrl's.
"""

from expstore.transforms.compose import Compose, Inverted
from expstore.transforms.crop import RandomCropTensorDict
from expstore.transforms.frames import CatFrames
from expstore.transforms.multi_step import MultiStepTransform
from expstore.transforms.next_state import NextStateReconstructor
from expstore.transforms.returns import Reward2GoTransform
from expstore.transforms.steps import StepTransform, StepView

__all__ = [
    "CatFrames",
    "Compose",
    "Inverted",
    "MultiStepTransform",
    "NextStateReconstructor",
    "RandomCropTensorDict",
    "Reward2GoTransform",
    "StepTransform",
    "StepView",
]
