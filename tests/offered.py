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
    "RandomCropTensorDict": "torchrl.envs.transforms",
    **dict.fromkeys(
        (
            *("Binary", "BinaryBox", "Bounded", "BoundedContinuous", "BoundedDiscrete", "Box", "BoxList"),
            *("Categorical", "CategoricalBox", "Choice", "ContinuousBox", "MultiCategorical", "MultiOneHot"),
            *("NonTensor", "OneHot", "TensorSpec", "Unbounded", "UnboundedContinuous", "UnboundedDiscrete"),
        ),
        "torchrl.data.tensor_specs",
    ),
    "split_trajectories": "torchrl.collectors.utils",
}

#: All names of TorchRL's that are looked for here.
NAMES = (*theirs.__all__, *ELSEWHERE)


def their(name: str) -> Any:
    """Return what has a name in torchrl."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some of its modules use what other ones call deprecated
        return getattr(import_module(ELSEWHERE.get(name, theirs.__name__)), name)
