"""Integers of every dtype: saturating conversion, comparison, and drawing between bounds.

Used by the specs of numbers. Arguments have matching or broadcastable shapes.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

#: torch can store these dtypes, but neither compare nor draw them.
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
_SMALLEST = torch.iinfo(torch.int64).min


def as_count(n: Any, what: str, *, unknown: bool = False) -> int:
    """Return a number of choices; raise ValueError unless it is an integer of at least 1.

    Args:
        n: The number, also as a NumPy or torch integer.
        what: Its name in the message.
        unknown: Whether -1 is allowed, for a number that is not known yet.
    """
    try:
        found = int(n)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        found = 0
    if (found < 1 and not (unknown and found == -1)) or found != n:
        raise ValueError(
            f"{what} is the number of choices and must be an integer of at least 1"
            f"{', or -1 if it is not known yet' if unknown else ''}; got {n!r}"
        )
    return found


def check_bound(bound: Any, name: str, dtype: torch.dtype) -> None:
    """Raise ValueError if a dtype of integers cannot hold a finite bound."""
    if dtype.is_floating_point or dtype == torch.bool or getattr(bound, "dtype", None) == dtype:
        return
    given = as_tensor(bound)
    info = torch.iinfo(dtype)
    ends: tuple[float, float] = (info.min, info.max)
    if given.is_floating_point():  # floats round the largest 64-bit integers
        ends = tuple(torch.tensor(ends, dtype=torch.float64).to(given.dtype).tolist())
    for value in given.reshape(-1).tolist():
        if math.isfinite(value) and not ends[0] <= value <= ends[1]:
            raise ValueError(
                f"Bounded: {name}={value} is no {str(dtype).removeprefix('torch.')}, whose numbers are "
                f"{info.min} to {info.max}; use another bound, or a wider dtype"
            )


def as_ordered(tensor: torch.Tensor) -> torch.Tensor:
    """Return numbers as a dtype that torch can compare, in the same order: int64 for unsigned integers."""
    if tensor.dtype == torch.uint64:
        return tensor.view(torch.int64) ^ _SMALLEST
    return tensor.long() if tensor.dtype in UNSIGNED else tensor


def from_ordered(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert the result of `as_ordered` back to its dtype."""
    return (tensor ^ _SMALLEST).view(torch.uint64) if dtype == torch.uint64 else tensor.to(dtype)


def in_order(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return tensors of any dtypes as dtypes that torch can compare."""
    dtypes = {one.dtype for one in tensors}
    if len(dtypes) > 1 and dtypes.intersection(UNSIGNED):
        return tuple(one.double() for one in tensors)
    return tuple(as_ordered(one) for one in tensors)


def as_tensor(value: Any) -> torch.Tensor:
    """Return a tensor as it is, arrays and numbers as a tensor of their dtype; raise TypeError otherwise."""
    if isinstance(value, torch.Tensor):
        return value
    array = np.array(value)
    # NumPy gives the largest Python integers a dtype that torch does not recognise.
    return torch.as_tensor(array.view(array.dtype.str))


def saturate(value: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Convert numbers to a dtype that may be smaller; numbers that are too large become its largest value.

    NaN becomes the smallest integer.
    """
    value = as_tensor(value)
    if dtype == torch.bool:
        value = (value if value.is_floating_point() else value.long()) > 0
    elif not dtype.is_floating_point and value.dtype != dtype:
        value = _whole(value, dtype)
    return torch.as_tensor(value, dtype=dtype, device=device)


def _whole(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    info = torch.iinfo(dtype)
    if not value.is_floating_point():
        value = value.double() if value.dtype == torch.uint64 else value.long()
    if value.is_floating_point():
        # float64 rounds the largest 64-bit integers up; these values are replaced after the cast.
        above, below = value >= info.max, ~(value > info.min)
    else:
        above, below = value > min(info.max, -_SMALLEST - 1), value < info.min
    value = value.to(dtype)
    largest, smallest = (
        torch.full((), end, dtype=dtype, device=value.device) for end in (info.max, info.min)
    )
    return torch.where(above, largest, torch.where(below, smallest, value))


def draw_integers(
    low: torch.Tensor,
    high: torch.Tensor,
    size: torch.Size,
    dtype: torch.dtype,
    generator: torch.Generator | None,
) -> torch.Tensor:
    """Draw integers from low to high, both included. int64."""
    # Draws the same numbers as TorchRL for a seed: small ranges use 32 random bits per number.
    exact = torch.float64 if dtype in (torch.int32, torch.int64) else torch.float32
    share = torch.rand(size, dtype=exact, device=low.device, generator=generator)
    span = high - low
    drawn = torch.minimum(low + (share * (span.to(exact) + 1)).long(), high.expand(size))
    # Wider ranges of uint32 and uint64 need more than the 24 bits of a float32.
    widest = 2**52 if exact == torch.float64 else 2**16
    wide = ((span < 0) | (span > widest)).expand(size)
    if wide.any():
        # A float has too few bits for these ranges. span < 0: the difference of the bounds overflows.
        low, high, span = (bound.expand(size)[wide] for bound in (low, high, span))
        drawn[wide] = _wide_integers(low, high, span, generator)
    return drawn


def _wide_integers(
    low: torch.Tensor, high: torch.Tensor, span: torch.Tensor, generator: torch.Generator | None
) -> torch.Tensor:
    """Draw integers of up to 64 bits: repeat random bits until they lie between the bounds."""
    bits = torch.where(span < 0, 0, torch.log2(span.double().clamp(min=1)).ceil().long().clamp(max=63))
    drawn = torch.empty_like(low)
    left = torch.ones_like(low, dtype=torch.bool)
    while left.any():
        raw = torch.empty_like(low).random_(torch.iinfo(torch.int64).min, None, generator=generator)
        offset = raw & (torch.bitwise_left_shift(torch.ones_like(bits), bits) - 1)
        tried = torch.where(span < 0, raw, low + offset)
        fits = torch.where(span < 0, (raw >= low) & (raw <= high), offset <= span)
        drawn = torch.where(left & fits, tried, drawn)
        left = left & ~fits
    return drawn
