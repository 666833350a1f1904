"""Find numbers that a cast to floats has changed by more than rounding.

NumPy casts int64 to float64 as if nothing could be lost, and makes an infinity of a float that is too large.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from expstore.core.values import Array

#: Number of significant bits of each float type: integers of so many bits are exact.
_BITS = {"float16": 11, "bfloat16": 8, "float32": 24, "float64": 53, "complex64": 24, "complex128": 53}


def find_lost(values: Array, cast: Array) -> Any:
    """Return the first number that a cast to floats has lost, or None.

    An integer is lost if its value has changed, a finite float if it has become infinite.

    Args:
        values: The numbers before the cast.
        cast: The numbers after the cast. Same shape.

    >>> from expstore.core.casts import find_lost
    >>> find_lost(np.array([1, 2**53 + 1]), np.array([1.0, 2.0**53]))
    9007199254740993
    >>> find_lost(np.array([0.1, 1e300]), np.array([0.1, np.inf], np.float32))
    1e+300
    """
    if cast.dtype.kind not in "fc" or not values.size:
        return None
    if values.dtype.kind in "iu":
        lost = _is_rounded(values, cast)
    elif values.dtype.kind in "fc" and values.dtype != cast.dtype:
        lost = np.isfinite(values) & ~np.isfinite(cast)
    else:
        return None
    return values.reshape(-1)[int(lost.reshape(-1).argmax())].item() if lost.any() else None


def _is_rounded(values: Array, cast: Array) -> Any:
    info = np.iinfo(values.dtype)
    if info.max < 1 << _BITS[cast.dtype.name]:
        return np.zeros((), np.bool_)
    floats = cast.real if cast.dtype.kind == "c" else cast
    wide = floats.astype(np.float64)
    inside = (wide >= float(info.min)) & (wide < float(info.max + 1))
    # A float outside the range of the integers cannot be cast back.
    return ~inside | (np.where(inside, wide, 0.0).astype(values.dtype) != values)


def find_rounded(values: Any, array: Array, dtype: str) -> int | None:
    """Return the first integer among floats that a float type would round, or None.

    NumPy makes floats of all numbers in a list if one is a float, and also of integers that have no common
    type.

    Args:
        values: Numbers, or nested lists of numbers.
        array: The same numbers as NumPy converts them.
        dtype: Name of the float type.

    >>> from expstore.core.casts import find_rounded
    >>> find_rounded([0.5, 2**24 + 1], np.array([0.5, 2**24 + 1]), "float32")
    16777217
    """
    bits = _BITS.get(dtype, 113)  # of the widest floats of NumPy
    if array.dtype.kind not in "fc" or not (np.abs(array) >= 1 << bits).any():
        return None
    odd = ((value, abs(value) // (value & -value)) for value in _integers(values) if value)
    return next((value for value, part in odd if part.bit_length() > bits), None)


def _integers(values: Any) -> Iterator[int]:
    """Yield the integers in nested lists."""
    if isinstance(values, list | tuple):
        for value in values:
            yield from _integers(value)
    elif isinstance(values, int | np.integer):
        yield int(values)
    elif isinstance(values, np.ndarray) and values.dtype.kind in "iu":
        yield from values.reshape(-1).tolist()


def cast_floats(values: Array, dtype: Any) -> Array:
    """Cast numbers without NumPy's warnings: `find_lost` says what was lost."""
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(dtype)
