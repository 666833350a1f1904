"""What a type checker needs to find the types of the package.

`make lint` checks the types that a user's program gets: tests/fixtures/typed_program.py.
"""

from __future__ import annotations

from tests.support.paths import ROOT


def test_the_package_says_that_it_has_types() -> None:
    assert (ROOT / "expstore" / "py.typed").is_file()
