"""Calls that must raise an error: a table of them, and the check that none has left anything behind."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

#: A call, the class of its error, and a regular expression for its message.
Refusal = tuple[Callable[[], object], type[BaseException], str]


def check_refusals(cases: Iterable[Refusal], *, absent: Path | None = None) -> None:
    """Check that each call raises its error, and that `absent` does not exist after it."""
    for number, (call, kind, words) in enumerate(cases):
        with pytest.raises(kind, match=words):
            call()
        assert absent is None or not absent.exists(), f"case {number}, {words!r}, left {absent}"
