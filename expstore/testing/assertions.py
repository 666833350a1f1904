"""Assertions that say what was found, whether pytest rewrites them or not.

Used by the suite, which is installed and may run under `python -O`. It knows nothing of stores.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from expstore.errors import ExpStoreError

__all__ = ["expect", "raises", "same"]


def expect(held: object, what: str) -> None:
    """Raise AssertionError unless something holds; `what` says what it is."""
    if not held:
        raise AssertionError(what)


def same(found: Any, expected: Any, what: str) -> None:
    """Raise AssertionError unless two values are the same; arrays and tensors to the bit.

    Args:
        found: What the storage gave.
        expected: What it was to give.
        what: What they are.
    """
    if isinstance(found, torch.Tensor) or isinstance(expected, torch.Tensor):
        found, expected = _bits(found), _bits(expected)
    if isinstance(found, np.ndarray) or isinstance(expected, np.ndarray):
        found, expected = np.asarray(found), np.asarray(expected)
        if found.shape != expected.shape or found.dtype != expected.dtype:
            raise AssertionError(
                f"{what}: got {found.dtype}{list(found.shape)}, expected {expected.dtype}"
                f"{list(expected.shape)}; {_describe(found)} in the place of {_describe(expected)}"
            )
        if found.tobytes() != expected.tobytes():
            differ = [n for n, pair in enumerate(zip(found, expected, strict=True)) if _differ(*pair)]
            raise AssertionError(
                f"{what}: rows {differ[:8]} differ: {_describe(found)} in the place of {_describe(expected)}"
            )
    elif found != expected:
        raise AssertionError(f"{what}: got {_describe(found)}, expected {_describe(expected)}")


@contextmanager
def raises(*kinds: type[BaseException], what: str, says: str = "") -> Iterator[None]:
    """Raise AssertionError unless one of these errors is raised.

    Args:
        kinds: Which errors will do.
        what: What must be refused.
        says: A part of the message.
    """
    try:
        yield
    except kinds as exc:
        if isinstance(exc, ExpStoreError) and not exc.message:
            raise AssertionError(f"{what}: {type(exc).__name__} without a message") from exc
        if says not in str(exc):
            raise AssertionError(f"{what}: the error does not say {says!r}: {exc}") from exc
        return
    names = " or ".join(kind.__name__ for kind in kinds)
    raise AssertionError(f"{what}: no {names}")


def _bits(values: Any) -> Any:
    tensor = torch.as_tensor(values).contiguous()
    return (tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor).numpy()


def _differ(one: Any, other: Any) -> bool:
    return np.asarray(one).tobytes() != np.asarray(other).tobytes()


def _describe(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 400 else f"{text[:200]} ... {text[-190:]}"
