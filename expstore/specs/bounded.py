"""Specs of numbers: between bounds, or any numbers of a dtype.

Use them for observations and actions. Both bounds belong to the space.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch

from expstore.specs.base import LeafSpec, keep, per_element
from expstore.specs.boxes import ContinuousBox
from expstore.specs.integers import (
    UNSIGNED,
    as_ordered,
    check_bound,
    draw_integers,
    from_ordered,
    in_order,
    saturate,
)
from expstore.specs.shapes import as_size, broadcast, safe

_SHAPE = (
    "Bounded requires the shape to be explicitly (via the shape argument) or implicitly defined (via either "
    "the minimum or the maximum or both). If the maximum and/or the minimum have a non-singleton shape, they "
    "must match the provided shape if this one is set explicitly."
)


class Bounded(LeafSpec):
    """Spec whose elements are numbers from `low` to `high`, both included.

    Instances belong to one of two classes: BoundedContinuous or BoundedDiscrete. `domain` selects the
    class; by default the dtype does. A bound may be infinite. NaN is never in the space. For threads,
    processes and crashes see TensorSpec.

    Args:
        low: The smallest value: one number for all elements, or one for each element.
        high: The largest value, given in the same way.
        shape: Shape of a value; the shape of the bounds by default.
        device: Device of the values.
        dtype: Dtype of the values; torch's default dtype if not given.
        domain: "continuous" or "discrete".

    Raises:
        RuntimeError: The shapes of bounds and values do not fit, or no shape is known.
        ValueError: Some bounds have no number between them, or the dtype cannot hold a finite bound.
        TypeError: An argument is unknown, or a bound is missing.

    Example:
        >>> from expstore import Bounded
        >>> spec = Bounded(low=-1, high=torch.tensor([1.0, 2.0]))
        >>> spec.shape
        torch.Size([2])
        >>> spec.project(torch.tensor([5.0, 5.0]))
        tensor([1., 2.])
    """

    _arguments: ClassVar = {"low": per_element, "high": per_element, "domain": keep}

    def __init__(
        self,
        low: Any = None,
        high: Any = None,
        shape: torch.Size | tuple[int, ...] | list[int] | int | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        domain = kwargs.pop("domain", None)
        for old, new in (("maximum", "high"), ("minimum", "low")):
            if old in kwargs:
                raise TypeError(f"'{old}' has been removed. Please use '{new}' instead.")
        if kwargs:
            raise TypeError(f"Got unrecognised kwargs {tuple(kwargs)}.")
        if low is None or high is None:
            raise TypeError(
                f"Bounded takes two bounds; got low={low}, high={high}. Use math.inf for no bound"
            )
        super().__init__((), None, device, dtype)
        if domain is None:
            domain = "continuous" if self.dtype.is_floating_point else "discrete"
        self._domain = domain
        for name, bound in (("low", low), ("high", high)):
            check_bound(bound, name, self.dtype)
        low, high = (saturate(bound, self.dtype, self.device) for bound in (low, high))
        self._shape, size = _shape_of(low, high, shape)
        low, high = (bound.expand(size).contiguous().clone() for bound in (low, high))
        empty = ~(as_ordered(low) <= as_ordered(high))
        if empty.any():
            place = tuple(empty.nonzero()[0].tolist())
            raise ValueError(
                f"Bounded: there is no number between low={low[place].item()} and high={high[place].item()}"
                + (f" (element {place})" if place else "")
            )
        self._space = ContinuousBox(low, high)
        self.__class__ = BoundedContinuous if domain == "continuous" else BoundedDiscrete

    @property
    def low(self) -> torch.Tensor:
        """The smallest value of each element. Shape and dtype are those of the spec."""
        return self._box.low

    @property
    def high(self) -> torch.Tensor:
        """The largest value of each element. Shape and dtype are those of the spec."""
        return self._box.high

    def _register_batch_size(self, batch_size: torch.Size) -> None:
        """Do nothing: TorchRL's composites call it, and TorchRL's own specs save memory with it."""

    @property
    def _box(self) -> ContinuousBox:
        box: ContinuousBox = self.space
        return box

    def _rebuild(self, arguments: dict[str, Any]) -> Any:
        if arguments["dtype"] != self.dtype:
            bounds = {n: saturate(arguments[n], arguments["dtype"], self.device) for n in ("low", "high")}
            arguments = {**arguments, **bounds, "domain": None}
        return super()._rebuild(arguments)

    def cardinality(self) -> float:
        """Return infinity, also for integers, like TorchRL."""
        return math.inf

    def within(self, val: torch.Tensor) -> torch.Tensor:
        """Return for each element whether it lies between its bounds.

        Returns:
            A bool tensor with the shape of `val`.
        """
        low, val, high = in_order(self.low.to(val.device), val, self.high.to(val.device))
        return (val >= low) & (val <= high)

    def _project(self, val: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        low, high = (bound.to(val.device) for bound in self._box)
        if val.is_floating_point() and not self.dtype.is_floating_point:
            val = val.double().round()
        val = saturate(val, self.dtype, val.device)
        bottom, asked, top = in_order(low, val, high)
        return torch.where(asked < bottom, low, torch.where(asked > top, high, val))

    def rand(self, shape: Any = None, *, generator: torch.Generator | None = None) -> torch.Tensor:
        """Draw a value, uniformly between the bounds.

        Without bounds the distribution follows gymnasium's Box: normal without any bound, exponential with
        one bound.

        Args:
            shape: Dims to put in front of the spec's shape.
            generator: Random generator; torch's default generator if None.
        """
        size = self._draw_shape(shape)
        if self.dtype.is_floating_point:
            return self._draw_numbers(size, generator)
        low, high = (as_ordered(bound).long() for bound in self._box)
        return from_ordered(draw_integers(low, high, size, self.dtype, generator), self.dtype)

    def _draw_numbers(self, size: torch.Size, generator: torch.Generator | None) -> torch.Tensor:
        low, high = self._box
        share = torch.rand(size, dtype=self.dtype, device=self.device, generator=generator)
        drawn = share * (high - low) + low
        if not torch.isfinite(high - low).all():
            drawn = torch.where(torch.isfinite(high - low), drawn, low * (1 - share) + high * share)
            normal = torch.randn(size, dtype=self.dtype, device=self.device, generator=generator)
            above = low - torch.log1p(-share)
            below = high + torch.log1p(-share)
            open_low, open_high = torch.isinf(low), torch.isinf(high)
            drawn = torch.where(open_high, torch.where(open_low, normal, above), drawn)
            drawn = torch.where(open_low & ~open_high, below, drawn)
        # Rounding errors may exceed the bounds by one bit.
        return torch.clamp(drawn, low, high)


class BoundedContinuous(Bounded):
    """Spec whose elements are numbers from `low` to `high`. See Bounded.

    Example:
        >>> from expstore.specs import BoundedContinuous
        >>> BoundedContinuous(0, 1, shape=(2,)).domain
        'continuous'
    """

    def __init__(
        self,
        low: Any = None,
        high: Any = None,
        shape: torch.Size | tuple[int, ...] | list[int] | int | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        domain: str = "continuous",
    ) -> None:
        super().__init__(low, high, shape, device, dtype, domain=domain)


class BoundedDiscrete(Bounded):
    """Spec whose elements are integers from `low` to `high`. See Bounded.

    Example:
        >>> from expstore.specs import BoundedDiscrete
        >>> BoundedDiscrete(0, 255, shape=(2,), dtype=torch.uint8).domain
        'discrete'
    """

    def __init__(
        self,
        low: Any = None,
        high: Any = None,
        shape: torch.Size | tuple[int, ...] | list[int] | int | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        domain: str = "discrete",
    ) -> None:
        super().__init__(low, high, shape, device, dtype, domain=domain)


class Unbounded(LeafSpec):
    """Spec whose elements are any numbers of a dtype.

    Instances belong to one of two classes: UnboundedContinuous or UnboundedDiscrete. `domain` selects the
    class; by default the dtype does. `space` has the bounds of the dtype, but infinities and NaN are in the
    spec too. Equal to a Bounded with those bounds. For threads, processes and crashes see TensorSpec.

    Args:
        shape: Shape of a value.
        device: Device of the values.
        dtype: Dtype of the values; torch's default dtype if not given.
        domain: "continuous" or "discrete".

    Raises:
        TypeError: An unknown argument is given.

    Example:
        >>> from expstore import Unbounded
        >>> spec = Unbounded(shape=(2,))
        >>> spec.is_in(torch.tensor([0.0, 1e30]))
        True
    """

    _arguments: ClassVar = {"domain": keep}

    def __init__(
        self,
        shape: torch.Size | tuple[int, ...] | list[int] | int = (1,),
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        domain = kwargs.pop("domain", None)
        if kwargs:
            raise TypeError(f"Got unrecognised kwargs {tuple(kwargs)}.")
        super().__init__(shape, None, device, dtype)
        if domain is None:
            domain = "continuous" if self.dtype.is_floating_point else "discrete"
        self._domain = domain
        self.__class__ = UnboundedContinuous if domain == "continuous" else UnboundedDiscrete

    @property
    def space(self) -> ContinuousBox:
        """The range of the dtype."""
        low, high = (
            torch.full(safe(self.shape), bound, dtype=self.dtype, device=self.device)
            for bound in _ends(self.dtype)
        )
        return ContinuousBox(low, high)

    def _rebuild(self, arguments: dict[str, Any]) -> Any:
        same = arguments["dtype"] == self.dtype
        return super()._rebuild(arguments if same else {**arguments, "domain": None})

    def within(self, val: torch.Tensor) -> torch.Tensor:
        """Return True for each element: all numbers are in the space.

        Returns:
            A bool tensor with the shape of `val`.
        """
        return torch.ones_like(val, dtype=torch.bool)

    def _project(self, val: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        if self.dtype == torch.bool:
            return val.bool()
        if val.is_floating_point() and not self.dtype.is_floating_point:
            val = val.double().round()
        return saturate(val, self.dtype, val.device)

    def _fit_shape(self, val: torch.Tensor) -> torch.Tensor:
        """Return a value in the spec's shape if its number of elements fits; raise RuntimeError otherwise."""
        lead = val.shape[: max(val.ndim - self.ndim, 0)]
        if not self._takes(val.shape) and val.numel() == math.prod((*lead, *safe(self.shape))):
            return val.reshape(*lead, *safe(self.shape))
        return super()._fit_shape(val)

    def rand(self, shape: Any = None, *, generator: torch.Generator | None = None) -> torch.Tensor:
        """Draw normally distributed values; integers are drawn uniformly from 0 to the largest.

        Args:
            shape: Dims to put in front of the spec's shape.
            generator: Random generator; torch's default generator if None.
        """
        size = self._draw_shape(shape)
        if self.dtype.is_floating_point:
            return torch.randn(size, device=self.device, dtype=self.dtype, generator=generator)
        if self.dtype in UNSIGNED:
            low, high = (as_ordered(bound) for bound in self.space)
            return from_ordered(draw_integers(low, high, size, self.dtype, generator), self.dtype)
        return torch.empty(size, device=self.device, dtype=self.dtype).random_(generator=generator)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Bounded):
            low, high = _ends(self.dtype)
            return (
                self.domain == other.domain
                and self._lies_like(other)
                and bool((other.low == low).all() and (other.high == high).all())
            )
        if not isinstance(other, Unbounded):
            return NotImplemented
        return self._lies_like(other)


class UnboundedContinuous(Unbounded):
    """Spec whose elements are any numbers of a dtype. See Unbounded.

    Example:
        >>> from expstore.specs import UnboundedContinuous
        >>> UnboundedContinuous((2,)).domain
        'continuous'
    """


class UnboundedDiscrete(Unbounded):
    """Spec whose elements are any integers of a dtype. See Unbounded.

    Example:
        >>> from expstore.specs import UnboundedDiscrete
        >>> UnboundedDiscrete((2,)).dtype
        torch.int64
    """

    def __init__(
        self,
        shape: torch.Size | tuple[int, ...] | list[int] | int = (1,),
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = torch.int64,
        **kwargs: Any,
    ) -> None:
        super().__init__(shape, device, dtype, **kwargs)


def _shape_of(low: torch.Tensor, high: torch.Tensor, shape: Any) -> tuple[torch.Size, torch.Size]:
    """Return the shape of a spec and that of its bounds; raise RuntimeError if they do not fit."""
    given = [bound.shape for bound in (high, low) if bound.ndim]
    if shape is None:
        if not given:
            raise RuntimeError(_SHAPE)
        size = broadcast(*given)
        return size, size
    found = as_size(shape)
    size = safe(found)
    if given and (given[0] != size or broadcast(*given) != size):
        raise RuntimeError(f"{_SHAPE} Got shape={found}, low of {low.shape}, high of {high.shape}.")
    return found, size


def _ends(dtype: torch.dtype) -> tuple[float, float]:
    """Return the smallest and the largest number of a dtype."""
    if dtype == torch.bool:
        return False, True
    info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    return info.min, info.max
