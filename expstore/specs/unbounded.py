"""Specs of any numbers.

Use them for values without bounds. They describe only shape, dtype and device.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from expstore.specs.base import LeafSpec
from expstore.specs.bounded import Bounded
from expstore.specs.boxes import ContinuousBox
from expstore.specs.integers import UNSIGNED, as_ordered, draw_integers, from_ordered, saturate
from expstore.specs.shapes import Move, safe


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

    def _remake(
        self,
        move: Move | None = None,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> Any:
        return Unbounded(
            move.shape(self.shape) if move else self.shape,
            device or self.device,
            dtype or self.dtype,
            domain=None if dtype else self.domain,
        )

    def cardinality(self) -> int:
        """Raise NotImplementedError: the values cannot be counted."""
        raise NotImplementedError("`cardinality` is not implemented for Unbounded specs.")

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
        >>> from expstore import UnboundedContinuous
        >>> UnboundedContinuous((2,)).domain
        'continuous'
    """


class UnboundedDiscrete(Unbounded):
    """Spec whose elements are any integers of a dtype. See Unbounded.

    Example:
        >>> from expstore import UnboundedDiscrete
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


def _ends(dtype: torch.dtype) -> tuple[float, float]:
    """Return the smallest and the largest number of a dtype."""
    if dtype == torch.bool:
        return False, True
    info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    return info.min, info.max
