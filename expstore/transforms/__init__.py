"""Transforms of rows before they are stored, and of batches after they were sampled.

Buffers accept these classes, functions, modules and TorchRL's transforms.
"""

from expstore.transforms.base import StepTransform, StepView
from expstore.transforms.cat_frames import CatFrames
from expstore.transforms.compose import Compose, Inverted
from expstore.transforms.multi_step import MultiStepTransform
from expstore.transforms.next_state import NextStateReconstructor
from expstore.transforms.random_crop import RandomCropTensorDict
from expstore.transforms.reward_to_go import Reward2GoTransform

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
