"""Cases of a test marked `some` meet as many values as they can."""

from __future__ import annotations

import pytest


@pytest.mark.some(2)
@pytest.mark.parametrize("one", ["a", "b"])
@pytest.mark.parametrize("other", ["a", "b"])
def test_chosen_cases_have_different_values(request: pytest.FixtureRequest, one: str, other: str) -> None:
    assert (one == other) is not bool(request.node.get_closest_marker("rest"))
