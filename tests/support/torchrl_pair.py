"""Run a program twice, with TorchRL's classes and with ours, and compare what it reports.

Used by parity tests. This module compares values without knowing their meaning.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torchrl.data.replay_buffers as theirs
from tensordict import TensorDict, is_tensor_collection

import expstore
from tests.support.torchrl_names import find_own, find_own_module

THEIRS = SimpleNamespace(
    name="torchrl", **{name: getattr(theirs, name) for name in theirs.__all__}, samplers=theirs.samplers
)
OURS = SimpleNamespace(
    name="expstore",
    **{name: find_own(name) for name in theirs.__all__ if find_own_module(name)},
    samplers=expstore.samplers,
)
#: Names of rows here in addition to TorchRL's index.
_MORE = frozenset({"id", "anchor_id"})


def numbers(first: int, count: int) -> TensorDict:
    """Return rows `first` to `first + count - 1`: `x` and `("deep", "y")` are their numbers."""
    x = torch.arange(first, first + count)
    return TensorDict({"x": x, "deep": {"y": x[:, None].float()}}, [count])


def plain(value: Any) -> Any:
    """Return a value in comparable form: tensors as type, shape and numbers."""
    if is_tensor_collection(value):
        found = {name: plain(value.get(name)) for name in sorted(value.keys()) if name not in _MORE}
        return "collection", tuple(value.batch_size), found
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.tolist()
    if isinstance(value, np.ndarray):
        return plain(torch.from_numpy(value))
    if isinstance(value, torch.Size):
        return plain(tuple(value))
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items() if key not in _MORE}
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [plain(one) for one in value]
    return value


@dataclass
class Failure:
    """The error that a call raised; equal to another error that the same `except` would catch."""

    error: BaseException

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Failure):
            return NotImplemented
        return isinstance(self.error, type(other.error))

    def __repr__(self) -> str:
        return f"{type(self.error).__name__}: {self.error}"


@dataclass
class Teller:
    """Collect the reports of a program.

    Args:
        folder: A folder for files.
    """

    folder: Path
    facts: list[Any] = field(default_factory=list)

    def __call__(self, *values: Any) -> None:
        self.facts.extend(plain(value) for value in values)

    def fails(self, call: Callable[[], object], words: str = "") -> None:
        """Report how a call fails; its message must contain these words."""
        with pytest.raises(Exception, match=re.escape(words) or None) as caught:
            call()
        self.facts.append(Failure(caught.value))

    def warns(self, call: Callable[[], object]) -> object:
        """Report whether a call warns; return its result."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            value = call()
        self.facts.append(bool(caught))
        return value


def run(program: Callable[[Any, Teller], None], lib: SimpleNamespace, folder: Path) -> list[Any]:
    folder.mkdir(exist_ok=True)
    tell = Teller(folder)
    torch.manual_seed(0)
    quiet = warnings.catch_warnings() if lib is THEIRS else contextlib.nullcontext()
    with quiet:
        if lib is THEIRS:
            warnings.simplefilter("ignore")
        program(lib, tell)
    return tell.facts


def same(program: Callable[[Any, Teller], None], folder: Path) -> list[Any]:
    """Run a program with both libraries; return its reports, which must be equal."""
    expected = run(program, THEIRS, folder / "torchrl")
    found = run(program, OURS, folder / "expstore")
    for number, (other, own) in enumerate(zip(expected, found, strict=True)):
        assert own == other, f"fact {number}: {own} instead of {other}"
    assert expected
    return found
