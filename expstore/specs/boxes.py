"""The spaces of specs (`spec.space`): numbers between bounds, one of n choices, several such choices.

A box describes a set of values. It draws no values and checks none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import torch


class Box:
    """Base class of sets of values. Boxes are immutable; threads can share them.

    Example:
        >>> from expstore import Categorical
        >>> from expstore.specs import Box
        >>> isinstance(Categorical(3).space, Box)
        True
    """

    def to(self, dest: torch.dtype | torch.device | str) -> Self:
        """Return a box for another dtype or device; the box itself if it has no tensors."""
        return self

    def clone(self) -> Self:
        """Return a copy; the box itself if it has no tensors."""
        return self


@dataclass(frozen=True, eq=False, repr=False)
class ContinuousBox(Box):
    """Hold the bounds of each element; `low` and `high` are included.

    Two boxes are equal if their bounds are equal bit by bit, including dtype and device. Threads can share
    one.

    Args:
        low: The smallest value of each element. Shape and dtype of the spec.
        high: The largest value of each element.

    Example:
        >>> from expstore import Bounded
        >>> low, high = Bounded(-1, 1, shape=(2,)).space
        >>> high
        tensor([1., 1.])
    """

    low: torch.Tensor
    high: torch.Tensor

    @property
    def device(self) -> torch.device:
        """Device of the bounds."""
        return self.low.device

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield self.low
        yield self.high

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ContinuousBox):
            return NotImplemented
        pairs = [(self.low, other.low), (self.high, other.high)]
        return all(
            a.dtype == b.dtype and a.device == b.device and a.shape == b.shape and torch.equal(a, b)
            for a, b in pairs
        )

    __hash__ = None  # type: ignore[assignment]

    def to(self, dest: torch.dtype | torch.device | str) -> Self:
        """Return a box with another dtype, or on another device."""
        return type(self)(self.low.to(dest), self.high.to(dest))

    def clone(self) -> Self:
        """Return a copy."""
        return type(self)(self.low.clone(), self.high.clone())

    def __repr__(self) -> str:
        lines = [
            f"    {name}=Tensor(shape={of.shape}, device={of.device}, dtype={of.dtype}, "
            f"contiguous={of.is_contiguous()})"
            for name, of in (("low", self.low), ("high", self.high))
        ]
        return "ContinuousBox(\n" + ",\n".join(lines) + ")"


@dataclass(frozen=True)
class CategoricalBox(Box):
    """Hold the integers from 0 to n - 1. Immutable; threads can share it.

    Args:
        n: Number of values; -1 if it is unknown.

    Example:
        >>> from expstore import Categorical
        >>> Categorical(3).space
        CategoricalBox(n=3)
    """

    n: int

    def __post_init__(self) -> None:
        """Convert integers of NumPy and torch to int."""
        object.__setattr__(self, "n", int(self.n))


@dataclass(frozen=True)
class BinaryBox(Box):
    """Hold all rows of n zeros and ones. Immutable; threads can share it.

    Args:
        n: Length of a row.

    Example:
        >>> from expstore.specs import BinaryBox
        >>> BinaryBox(3)
        BinaryBox(n=3)
    """

    n: int


@dataclass(frozen=True)
class BoxList(Box):
    """Hold one box for each of several variables. Immutable; threads can share it.

    Args:
        boxes: The boxes, or nested lists of boxes.

    Example:
        >>> from expstore.specs import BoxList
        >>> len(BoxList.from_nvec(torch.tensor([3, 2])))
        2
    """

    boxes: list[Box]

    @staticmethod
    def from_nvec(nvec: torch.Tensor) -> Box:
        """Return the boxes for these numbers of values; nested lists, the last dim outermost.

        `nvec`: number of values of each element. Shape `(n,)` or more dims, integers.
        """
        if nvec.ndim == 0:
            return CategoricalBox(int(nvec))
        return BoxList([BoxList.from_nvec(part) for part in nvec.unbind(-1)])

    def __iter__(self) -> Iterator[Box]:
        return iter(self.boxes)

    def __len__(self) -> int:
        return len(self.boxes)
