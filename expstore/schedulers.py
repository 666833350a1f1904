"""Schedule an attribute of a sampler, for instance beta from 0.4 to 1.

The names are those of torchrl.data.replay_buffers.scheduler.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Literal

from expstore.buffers.replay_buffer import ReplayBuffer
from expstore.errors import ArgumentError
from expstore.samplers.base import Sampler

__all__ = ["LambdaScheduler", "LinearScheduler", "ParameterScheduler", "SchedulerList", "StepScheduler"]


class ParameterScheduler(ABC):
    """Set an attribute of a sampler at every `step`.

    Args:
        obj: A sampler, or a buffer whose sampler is meant.
        param_name: Name of the attribute.
        min_value: Lower bound of the attribute; None: no bound.
        max_value: Upper bound of the attribute; None: no bound.
    """

    def __init__(
        self,
        obj: ReplayBuffer | Sampler,
        param_name: str,
        min_value: float | None = None,
        max_value: float | None = None,
    ) -> None:
        if not isinstance(obj, ReplayBuffer | Sampler):
            raise ArgumentError(f"a scheduler takes a ReplayBuffer or a Sampler, got {type(obj).__name__}")
        self.sampler = obj.sampler if isinstance(obj, ReplayBuffer) else obj
        if not hasattr(self.sampler, param_name):
            raise ArgumentError(f"{type(self.sampler).__name__} has no attribute {param_name!r}")
        self.param_name = param_name
        self._low, self._high = min_value, max_value
        self.initial_val = getattr(self.sampler, param_name)
        self._steps = 0

    def step(self) -> None:
        """Count a step and set the attribute."""
        self._steps += 1
        value = self._value(self._steps)
        if self._low is not None:
            value = max(value, self._low)
        if self._high is not None:
            value = min(value, self._high)
        setattr(self.sampler, self.param_name, value)

    @abstractmethod
    def _value(self, steps: int) -> Any:
        """Return the attribute's value after `steps` steps."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for `load_state_dict`."""
        return {"steps": self._steps, "initial_val": self.initial_val, "value": self._current()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the result of `state_dict`, including the attribute's value."""
        self._steps, self.initial_val = int(state_dict["steps"]), state_dict["initial_val"]
        setattr(self.sampler, self.param_name, state_dict["value"])

    def _current(self) -> Any:
        return getattr(self.sampler, self.param_name)


class LambdaScheduler(ParameterScheduler):
    """Set the initial value times a function of the number of steps.

    Args:
        obj: A sampler, or a buffer whose sampler is meant.
        param_name: Name of the attribute.
        lambda_fn: The function.
        min_value: Lower bound of the attribute; None: no bound.
        max_value: Upper bound of the attribute; None: no bound.

    Example:
        >>> from expstore import PrioritizedSampler
        >>> from expstore.schedulers import LambdaScheduler
        >>> sampler = PrioritizedSampler(max_capacity=1000, alpha=0.7, beta=0.5)
        >>> scheduler = LambdaScheduler(sampler, "beta", lambda steps: 1 + steps / 100, max_value=1.0)
        >>> scheduler.step()
    """

    def __init__(
        self,
        obj: ReplayBuffer | Sampler,
        param_name: str,
        lambda_fn: Callable[[int], float],
        min_value: float | None = None,
        max_value: float | None = None,
    ) -> None:
        super().__init__(obj, param_name, min_value, max_value)
        self._function = lambda_fn

    def _value(self, steps: int) -> Any:
        return self.initial_val * self._function(steps)


class LinearScheduler(ParameterScheduler):
    """Change the initial value to a final one in equal steps, and keep it there.

    Args:
        obj: A sampler, or a buffer whose sampler is meant.
        param_name: Name of the attribute.
        final_value: The last value.
        num_steps: Number of steps until the last value.

    Example:
        >>> from expstore import PrioritizedSampler
        >>> from expstore.schedulers import LinearScheduler
        >>> sampler = PrioritizedSampler(max_capacity=1000, alpha=0.7, beta=0.5)
        >>> scheduler = LinearScheduler(sampler, "beta", final_value=1.0, num_steps=1000)
        >>> scheduler.step()
    """

    def __init__(
        self, obj: ReplayBuffer | Sampler, param_name: str, final_value: float, num_steps: int
    ) -> None:
        super().__init__(obj, param_name)
        if num_steps < 1:
            raise ArgumentError(f"num_steps must be at least 1, got {num_steps}")
        self._final, self._number = final_value, num_steps

    def _value(self, steps: int) -> Any:
        if steps >= self._number:
            return self._final
        return self.initial_val + (self._final - self.initial_val) / self._number * steps


class StepScheduler(ParameterScheduler):
    """Multiply the value of the attribute by a number, or add one to it, every few steps.

    Args:
        obj: A sampler, or a buffer whose sampler is meant.
        param_name: Name of the attribute.
        gamma: The factor, or the number to add.
        n_steps: Number of steps between changes.
        mode: "multiplicative" or "additive".
        min_value: Lower bound of the attribute; None: no bound.
        max_value: Upper bound of the attribute; None: no bound.

    Example:
        >>> from expstore import PrioritizedSampler
        >>> from expstore.schedulers import StepScheduler
        >>> sampler = PrioritizedSampler(max_capacity=1000, alpha=0.7, beta=0.5)
        >>> scheduler = StepScheduler(sampler, "beta", gamma=0.1, n_steps=10, mode="additive", max_value=1.0)
        >>> scheduler.step()
    """

    def __init__(
        self,
        obj: ReplayBuffer | Sampler,
        param_name: str,
        gamma: float = 0.9,
        n_steps: int = 1,
        mode: Literal["multiplicative", "additive"] = "multiplicative",
        min_value: float | None = None,
        max_value: float | None = None,
    ) -> None:
        super().__init__(obj, param_name, min_value, max_value)
        if mode not in ("multiplicative", "additive"):
            raise ArgumentError(f"Invalid mode: {mode}. Choose 'multiplicative' or 'additive'.")
        if n_steps < 1:
            raise ArgumentError(f"n_steps must be at least 1, got {n_steps}")
        self._change = operator.mul if mode == "multiplicative" else operator.add
        self._gamma, self._every = gamma, n_steps

    def _value(self, steps: int) -> Any:
        current = self._current()
        return self._change(current, self._gamma) if steps % self._every == 0 else current


class SchedulerList:
    """Step several schedulers together.

    Args:
        schedulers: One scheduler, or several.
    """

    def __init__(self, schedulers: ParameterScheduler | Iterable[ParameterScheduler]) -> None:
        self.schedulers = [schedulers] if isinstance(schedulers, ParameterScheduler) else list(schedulers)

    def append(self, scheduler: ParameterScheduler) -> None:
        """Add a scheduler."""
        self.schedulers.append(scheduler)

    def step(self) -> None:
        """Step all schedulers."""
        for scheduler in self.schedulers:
            scheduler.step()
