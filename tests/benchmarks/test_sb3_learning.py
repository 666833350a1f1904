"""The learning curves of Stable-Baselines3 are measured, drawn, and those of its page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("stable_baselines3", reason="stable-baselines3 is not installed")
pytest.importorskip("matplotlib", reason="matplotlib is not installed")

from benchmarks import sb3_learning
from tests.support.paths import ROOT


@pytest.mark.slow
def test_runs_are_kept_and_drawn(tmp_path: Path) -> None:
    figures, picture, lines = tmp_path / "a.json", tmp_path / "a.png", []
    arguments = ["--steps", "300", "--seeds", "1", "--json", str(figures), "--picture", str(picture)]
    assert sb3_learning.main(arguments, lines.append) == 0
    runs = json.loads(figures.read_text())
    assert runs.keys() == sb3_learning.TASKS.keys()
    for found in runs.values():
        assert found.keys() == {*sb3_learning.BUFFERS}
        for run in (run for seeds in found.values() for run in seeds.values()):
            assert len(run["ends"]) == len(run["returns"])
            assert 200 <= run["ends"][-1] <= 512  # DQN makes 256 steps at a time
    assert len(lines) == 4 + 2 + 4  # runs, the head of the table, its rows
    assert picture.read_bytes().startswith(b"\x89PNG")
    again: list[str] = []
    assert sb3_learning.main(arguments, again.append) == 0
    assert again == lines[4:]  # nothing was trained


def test_the_page_has_the_returns_of_the_figures() -> None:
    runs = json.loads(sb3_learning.FIGURES.read_text())
    page = (ROOT / "docs" / "stable_baselines3.md").read_text()
    assert "\n".join(sb3_learning.table_of(runs)) in page
