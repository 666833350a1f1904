"""The soak: what it takes for growth, and that its work runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support.soak import Use, find_growth, main

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def uses(**slopes: float) -> list[Use]:
    """Return uses over an hour that grow by so much each minute, after a first quarter that grows fast."""
    start = {"memory": 400e6, "descriptors": 60.0, "threads": 40.0, "objects": 100.0}
    return [
        Use(60.0 * minute, *(int(at * min(1, 0.5 + minute / 30) + slopes.get(name, 0) * minute)
                             for name, at in start.items()))
        for minute in range(60)
    ]  # fmt: skip


def test_what_is_flat_has_not_grown() -> None:
    assert find_growth(uses()) == []
    assert find_growth(uses(memory=0.5e6, descriptors=0.05)) == []


@pytest.mark.parametrize(
    ("name", "slope"), [("memory", 2e6), ("descriptors", 0.2), ("threads", 0.8), ("objects", 2.0)]
)
def test_what_grows_is_found(name: str, slope: float) -> None:
    (line,) = find_growth(uses(**{name: slope}))
    assert line.startswith(f"{name}: ")


@pytest.mark.torture
def test_the_work_runs(tmp_path: Path) -> None:
    lines: list[object] = []
    status = main(["--minutes", "0.3", "--json", str(tmp_path / "uses.json")], lines.append)
    assert not [
        line
        for line in lines
        if str(line).startswith(("client ", "learner ", "agent ", "browser ", "a follower "))
    ]
    assert status in (0, 1)  # caches are still growing
    assert min(map(len, json.loads((tmp_path / "uses.json").read_text()).values())) > 20
