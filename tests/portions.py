"""How many of a property's examples `make test` looks at: a share of them; `make torture` looks at all.

Used by tests whose examples make stores, and take long. What has to hold is the same in both forms.

    @share(0.2)
    @given(...)
    def test_it(...): ...

    test_it_in_full = pytest.mark.torture(in_full(test_it))
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings

__all__ = ["in_full", "share"]

#: Of a property that says nothing else: as many as the profile of CI has, and in the nightly run no more.
EXAMPLES, MOST = 100, 300


def share(part: float, *, of: int | None = None, **others: Any) -> Callable[[Any], Any]:
    """Look at a part of the examples, or in a run that looks for new ones at all of them.

    Args:
        part: Which part.
        of: How many there are; None: as many as the profile says.
        others: More of Hypothesis' settings.
    """
    asked = settings().max_examples
    whole = min(asked, MOST) if of is None else of
    number = whole if asked > EXAMPLES else math.ceil(whole * part)

    def decorate(test: Any) -> Any:
        test = settings(max_examples=number, **others)(test)
        test.whole = max(whole, EXAMPLES) if of is None else of
        return test

    return decorate


def in_full(test: Any) -> Any:
    """Return the long form of a test that looks at a share of its examples."""
    own = test.hypothesis
    long = given(**own._given_kwargs)(own.inner_test)
    long = settings(test._hypothesis_internal_use_settings, max_examples=test.whole)(long)
    long.pytestmark = [mark for mark in getattr(test, "pytestmark", []) if mark.name != "timeout"]
    return pytest.mark.timeout(3600)(long)
