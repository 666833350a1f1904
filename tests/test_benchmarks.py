"""The benchmark script runs through, and fails when something is below its bar.

Run with the other tests; sizes are tiny and the figures mean nothing here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.timing import Series
from benchmarks.vs_torchrl import BARS, Bar

ROOT = Path(__file__).resolve().parents[1]


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    script = ROOT / "benchmarks" / "vs_torchrl.py"
    command = [sys.executable, str(script), "--smoke", "--folder", str(folder), *arguments]
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_every_row_is_there_and_a_bar_can_fail(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    planted = start(tmp_path / "a", "--json", str(figures), "--bar", "locomotion/sample=1e9")
    passing = start(tmp_path / "b", "--only", "locomotion/sample", "--bar", "locomotion/sample=0")
    table, trouble = planted.communicate(timeout=100)
    assert trouble == ""
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")][2:]
    assert sorted(row[0].split(" ")[0] for row in rows) == sorted(BARS)
    assert [row[0] for row in rows if "no" in row[-1]] == ["locomotion/sample"]
    assert planted.returncode == 1
    assert {row["name"] for row in json.loads(figures.read_text())["results"]} == set(BARS)
    passing.communicate(timeout=100)
    assert passing.returncode == 0
    assert list((tmp_path / "a").iterdir()) == list((tmp_path / "b").iterdir()) == []


@pytest.mark.parametrize(
    ("bar", "value", "holds"),
    [
        (Bar(3, "x", at_least=True), 3.0, True),
        (Bar(3, "x", at_least=True), 2.99, False),
        (Bar(0.5, " s"), 0.5, True),
        (Bar(0.5, " s"), float("inf"), False),
        (Bar(0.5, " s"), float("nan"), False),
        (Bar(3, "x", at_least=True), float("nan"), False),
    ],
)
def test_a_bar_holds_on_its_own_side(bar: Bar, value: float, holds: bool) -> None:
    assert bar.holds(value) is holds


def test_a_series_speaks_of_all_its_blocks() -> None:
    series = Series([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0]])
    assert (series.low, series.median, series.high, series.mean) == (2.0, 6.0, 10.0, 6.0)
