"""Make TorchRL's environments accept specs of expstore.

TorchRL recognizes specs by `isinstance`. Its spec classes are abstract base classes, with which other classes
can be registered. TorchRL also calls private methods: `_propagate_lock`, `_propagate_unlock`, `_check_unlock`
of composites, and `_register_batch_size` of bounded specs. It reads `_safe_shape`, and `_specs` of stacks.
Transforms that change specs in place (CatFrames, FlattenObservation, ...) need TorchRL's own specs.
"""

from __future__ import annotations

import sys

_NAMES = (
    "TensorSpec",
    "Composite",
    "Stacked",
    "StackedComposite",
    "Bounded",
    "BoundedContinuous",
    "BoundedDiscrete",
    "Unbounded",
    "UnboundedContinuous",
    "UnboundedDiscrete",
    "Categorical",
    "OneHot",
    "MultiCategorical",
    "MultiOneHot",
    "Binary",
    "Choice",
    "NonTensor",
)


def register_with_torchrl() -> None:
    """Register each spec class with TorchRL's class of the same name; without TorchRL do nothing.

    TorchRL takes seconds to import, so it is not imported for this. A program that gives specs to one of its
    environments has imported it, and a spec calls this function when it is created.
    """
    theirs = sys.modules.get("torchrl.data.tensor_specs")
    if theirs is None or not hasattr(theirs, "StackedComposite"):  # not imported, or not completely
        return
    from expstore import specs

    if not issubclass(specs.NonTensor, theirs.NonTensor):
        for name in _NAMES:
            getattr(theirs, name).register(getattr(specs, name))
