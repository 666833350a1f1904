"""Stores write what is recorded in `tests/golden/acts`, operation by operation and byte by byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.act_lives import LIVES
from tests.support.act_traces import trace
from tests.support.golden import GOLDEN, compare


@pytest.mark.parametrize("name", LIVES)
def test_a_life_of_a_store_acts_on_files_as_recorded(name: str, tmp_path: Path) -> None:
    difference = compare("acts", name, trace(LIVES[name], tmp_path))
    assert not difference, difference


def test_every_record_belongs_to_a_life() -> None:
    assert {path.stem for path in (GOLDEN / "acts").iterdir()} == set(LIVES)
