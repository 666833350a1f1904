"""Assertions whose messages say what was found, with and without pytest's rewriting.

The suite is installed with the library and may run under `python -O`. This module knows nothing of stores.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from expstore.errors import ExpStoreError


def expect(held: object, what: str) -> None:
    """Raise AssertionError unless `held` is true.

    Args:
        held: The condition.
        what: The message if the condition is false.
    """
    if not held:
        raise AssertionError(what)


def same(found: Any, expected: Any, what: str) -> None:
    """Raise AssertionError unless two values are equal; arrays and tensors are compared bit by bit.

    Args:
        found: The value that the storage returned.
        expected: The value that it should have returned.
        what: Name of the value, for the message.
    """
    if isinstance(found, torch.Tensor) or isinstance(expected, torch.Tensor):
        found, expected = _bits(found), _bits(expected)
    if isinstance(found, np.ndarray) or isinstance(expected, np.ndarray):
        found, expected = np.asarray(found), np.asarray(expected)
        if found.shape != expected.shape or found.dtype != expected.dtype:
            raise AssertionError(
                f"{what}: got {found.dtype}{list(found.shape)}, expected {expected.dtype}"
                f"{list(expected.shape)}; {_describe(found)} instead of {_describe(expected)}"
            )
        if found.tobytes() != expected.tobytes():
            differ = [n for n, pair in enumerate(zip(found, expected, strict=True)) if _differ(*pair)]
            raise AssertionError(
                f"{what}: rows {differ[:8]} differ: {_describe(found)} instead of {_describe(expected)}"
            )
    elif found != expected:
        raise AssertionError(f"{what}: got {_describe(found)}, expected {_describe(expected)}")


@contextmanager
def raises(*kinds: type[BaseException], what: str) -> Iterator[None]:
    """Raise AssertionError unless the block raises one of these errors.

    Args:
        kinds: The accepted errors.
        what: Name of the operation that must be refused, for the message.
    """
    try:
        yield
    except kinds as exc:
        if isinstance(exc, ExpStoreError) and not exc.message:
            raise AssertionError(f"{what}: {type(exc).__name__} without a message") from exc
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
