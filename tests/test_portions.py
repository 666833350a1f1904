"""What `make test` takes of a test's cases: as many as asked for, of every kind; the rest is marked."""

from __future__ import annotations

import itertools

import pytest
from portions import spread

pytest_plugins = ["pytester"]

CONFTEST = """
import pytest
from portions import leave_the_rest

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    leave_the_rest(items)
"""
TESTS = """
import pytest

@pytest.mark.some(3)
@pytest.mark.parametrize("a", range(3))
@pytest.mark.parametrize("b", "xyz")
def test_some(a, b): ...

@pytest.mark.some(2)
@pytest.mark.parametrize("a", [0, 1, 2, pytest.param(3, marks=pytest.mark.torture)])
def test_fewer(a): ...

def test_other(): ...
"""


def test_every_value_is_met_where_so_many_cases_can_meet_it() -> None:
    cases = [{"a": a, "b": b, "c": c} for a, b, c in itertools.product(range(4), range(3), range(2))]
    chosen = [cases[number] for number in spread(cases, 4)]
    assert [len({case[name] for case in chosen}) for name in "abc"] == [4, 3, 2]
    assert spread(cases, 100) == list(range(24))
    assert len(spread(cases, 1)) == 1


@pytest.mark.parametrize(
    ("marks", "count"), [("not torture", 3 + 2 + 1), ("rest", 6 + 1), ("torture", 6 + 1 + 1)]
)
def test_the_rest_is_marked(pytester: pytest.Pytester, marks: str, count: int) -> None:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(TESTS)
    pytester.makeini("[pytest]\nmarkers =\n  torture\n  rest\n  some")
    done = pytester.runpytest_inprocess("-m", marks, "-p", "no:cacheprovider")
    done.assert_outcomes(passed=count, deselected=14 - count)
