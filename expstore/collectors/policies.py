"""What chooses actions: a function, a torch module whose weights are replaced while it collects, or none.

Used by collectors, in this process and in workers. It knows neither environments nor buffers.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from expstore.core.values import Array
from expstore.data.to_arrays import to_array
from expstore.errors import ArgumentError, NotFoundError

Policy = Callable[[Any], Any]
Weights = dict[str, Array]


class ModulePolicy:
    """Choose actions with a torch module, without gradients.

    Args:
        module: Takes a batch of observations, as tensors with a leading lane dimension that are nested like
            the observation space, and returns a batch of actions.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, observation: Any) -> Any:
        """Return actions for observations. NumPy arrays in, tensors out."""
        with torch.no_grad():
            return self.module(_to_tensors(observation))

    def set_weights(self, weights: Weights) -> None:
        """Replace the weights by those that `weights_of` returned."""
        self.module.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})


def weights_of(module: nn.Module) -> Weights:
    """Return a copy of the weights and buffers of a module, as arrays by name; bfloat16 as float32."""
    return {name: np.array(to_array(value)) for name, value in module.state_dict().items()}


def check_policy(policy: Any) -> Policy | None:
    """Return what chooses actions; None: random actions.

    Raises:
        ArgumentError: It can neither be called nor names a function.
        NotFoundError: There is no such function.
    """
    if isinstance(policy, str):
        policy = load_policy(policy)
    if isinstance(policy, nn.Module):
        return ModulePolicy(policy)
    if policy is not None and not callable(policy):
        raise ArgumentError(
            f"policy is {policy!r}; pass a function of a batch of observations, a torch.nn.Module, its name "
            "as 'module:function', or None for random actions"
        )
    found: Policy | None = policy
    return found


def load_policy(name: str) -> Any:
    """Return the object that is named as "module:object".

    Raises:
        NotFoundError: The name has another form, or there is no such module or object.
    """
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise NotFoundError(f"policy {name!r} names no function", hint="write it as module:function")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as exc:
        if exc.name != module.split(".")[0] and exc.name != module:
            raise
        raise NotFoundError(
            f"policy {name!r}: there is no module {exc.name!r}",
            hint="run in the folder that has it, or add that folder to PYTHONPATH",
        ) from exc
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as exc:
            raise NotFoundError(f"policy {name!r}: {module} has no {attribute!r}") from exc
    return found


def _to_tensors(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _to_tensors(part) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_to_tensors(part) for part in value)
    return torch.as_tensor(value)
