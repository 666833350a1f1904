"""Select the part of a long test that `make test` runs: a share of its examples, or some of its cases.

The long form runs everything with the same assertions.

    @share(0.2)
    @given(...)
    def test_it(...): ...

    test_it_in_full = pytest.mark.torture(in_full(test_it))

    @pytest.mark.some(3)
    @pytest.mark.parametrize(...)
    def test_that(...): ...
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings

#: Default number of examples of a property, and the maximum in a run that looks for new examples.
EXAMPLES, MOST = 100, 300


def share(part: float, *, of: int | None = None, **others: Any) -> Callable[[Any], Any]:
    """Run a share of the examples, or all of them in a run that looks for new examples.

    Args:
        part: The share.
        of: Total number of examples; None for `EXAMPLES`.
        others: More Hypothesis settings.
    """
    asked = settings().max_examples
    whole = min(max(asked, EXAMPLES), MOST) if of is None else of
    number = whole if asked > EXAMPLES else math.ceil(whole * part)

    def decorate(test: Any) -> Any:
        test = settings(max_examples=number, **others)(test)
        test.whole = max(whole, EXAMPLES) if of is None else of
        return test

    return decorate


def in_full(test: Any) -> Any:
    """Return the long form of a test that runs a share of its examples."""
    own = test.hypothesis
    long = given(**own._given_kwargs)(own.inner_test)
    long = settings(test._hypothesis_internal_use_settings, max_examples=test.whole)(long)
    long.pytestmark = [mark for mark in getattr(test, "pytestmark", []) if mark.name != "timeout"]
    return pytest.mark.timeout(3600)(long)


def spread(cases: Sequence[Mapping[str, int]], count: int) -> list[int]:
    """Return the numbers of some cases that cover as many values as possible.

    Args:
        cases: Values of each case: name -> number of the value, the same for equal values.
        count: Number of cases.

    >>> spread([{"a": 0, "b": 0}, {"a": 0, "b": 1}, {"a": 1, "b": 0}, {"a": 1, "b": 1}], 2)
    [0, 3]
    """
    left = list(range(len(cases)))
    met: dict[tuple[str, int], int] = {}
    chosen = []
    for _ in range(min(count, len(cases))):
        # Prefer the values that were covered least; in a tie the first case.
        best = min(left, key=lambda number: sum(met.get(value, 0) for value in cases[number].items()))
        chosen.append(best)
        left.remove(best)
        for value in cases[best].items():
            met[value] = met.get(value, 0) + 1
    return sorted(chosen)


def leave_the_rest(items: Sequence[pytest.Item]) -> None:
    """Mark cases that only `make torture` runs, if `make test` runs some cases of a test."""
    by_test: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("some") and not item.get_closest_marker("torture"):
            by_test.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in by_test.values():
        marker = cases[0].get_closest_marker("some")
        assert marker is not None
        chosen = set(spread([_values_of(item) for item in cases], marker.args[0]))
        for number, item in enumerate(cases):
            if number not in chosen:
                item.add_marker(pytest.mark.torture)
                item.add_marker(pytest.mark.rest)


def _values_of(item: pytest.Item) -> Mapping[str, int]:
    """Return what identifies the values of a case's parameters: name -> identity of the value.

    `callspec.indices` has the number of the case for a parameter that is no fixture.
    """
    params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    return {name: id(value) for name, value in params.items()}
