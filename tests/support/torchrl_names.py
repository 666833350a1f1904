"""What of torchrl is looked for here: its replay buffers, and names of other modules.

Used by the tests of names, signatures and examples. It checks nothing itself.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Any

import torchrl.data.replay_buffers as theirs

#: What is none of TorchRL's replay buffers, by its module.
ELSEWHERE = {
    "DensifyReward": "torchrl.data",
    "MultiStep": "torchrl.data",
    "ReplayBufferTrainer": "torchrl.trainers",
    **dict.fromkeys(
        (
            *("CatFrames", "MultiStepTransform", "NextStateReconstructor", "RandomCropTensorDict"),
            *("Reward2GoTransform",),
        ),
        "torchrl.envs.transforms",
    ),
    **dict.fromkeys(
        (
            *("Composite", "Stacked", "StackedComposite"),
            *("Binary", "BinaryBox", "Bounded", "BoundedContinuous", "BoundedDiscrete", "Box", "BoxList"),
            *("Categorical", "CategoricalBox", "Choice", "ContinuousBox", "MultiCategorical", "MultiOneHot"),
            *("NonTensor", "OneHot", "TensorSpec", "Unbounded", "UnboundedContinuous", "UnboundedDiscrete"),
        ),
        "torchrl.data.tensor_specs",
    ),
    "split_trajectories": "torchrl.collectors.utils",
}

#: Modules of TorchRL's of which everything that is offered here is looked for.
MODULES = ("torchrl.data", "torchrl.data.tensor_specs", "torchrl.envs.transforms", "torchrl.trainers")

#: All names of TorchRL's that are looked for here.
NAMES = (*theirs.__all__, *ELSEWHERE)


def their(name: str) -> Any:
    """Return what has a name in torchrl."""
    return getattr(module(ELSEWHERE.get(name, theirs.__name__)), name)


def module(name: str) -> Any:
    """Return a module of TorchRL's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some use what other ones call deprecated
        return import_module(name)
