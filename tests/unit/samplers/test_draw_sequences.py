"""Samplers draw the rows in `tests/golden/draws`, also after a restart and with prefetching."""

from __future__ import annotations

from pathlib import Path

import pytest

import expstore
from tests.support.draw_sequences import SAMPLERS, SEQUENCES, draw
from tests.support.golden import GOLDEN, compare, recorded


@pytest.mark.slow
@pytest.mark.parametrize("name", SEQUENCES)
def test_a_sampler_draws_the_recorded_rows(name: str, tmp_path: Path) -> None:
    difference = compare("draws", name, SEQUENCES[name](tmp_path))
    assert not difference, difference


@pytest.mark.parametrize("name", ["without_replacement", "prioritized"])
def test_batches_made_ahead_are_the_recorded_ones(name: str, tmp_path: Path) -> None:
    assert draw(SAMPLERS[name], tmp_path, prefetch=2) == recorded("draws", name)


def test_every_sampler_has_a_sequence() -> None:
    drawn = {type(make()).__name__ for make in SAMPLERS.values()} | {"SamplerEnsemble"}
    # GroupSampler needs a store with groups: tests/unit/buffers/test_groups.py
    assert drawn == set(expstore.samplers.__all__) - {"Sampler", "Where", "GroupSampler"}


def test_every_record_belongs_to_a_sequence() -> None:
    assert {path.stem for path in (GOLDEN / "draws").iterdir()} == set(SEQUENCES)
