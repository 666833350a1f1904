"""How results are told: bars, rows of the table, and what everything ran on.

Used by the scripts here. It measures nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import expstore
from benchmarks.timing import Series

__all__ = ["Bar", "Report", "Result", "machine", "options", "slower", "span", "table_row"]


@dataclass(frozen=True)
class Bar:
    """Say what a measurement must reach, or must not go beyond."""

    limit: float
    unit: str
    at_least: bool = False

    def holds(self, value: float) -> bool:
        return value >= self.limit if self.at_least else value <= self.limit

    def __str__(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.limit:g}{self.unit}"


@dataclass(frozen=True)
class Result:
    """Hold one row of the table."""

    name: str
    value: float
    ours: str
    theirs: str = "–"
    ratio: str = "–"
    note: str = ""
    data: dict[str, Any] = field(default_factory=dict)


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} µs" if seconds < 1e-2 else f"{seconds * 1e3:.1f} ms"


def span(series: Series) -> str:
    return f"{_time(series.median)} [{_time(series.low)}–{_time(series.high)}] n={series.calls}"


def slower(quiet: Series, busy: Series) -> str:
    means = f"means {_time(quiet.mean)} → {_time(busy.mean)}"
    return f"{_time(quiet.median)} → {_time(busy.median)}, {means} n={busy.calls}"


def table_row(result: Result, bar: Bar) -> str:
    ok = "yes" if bar.holds(result.value) else "**no**"
    what = f"{result.name}" + (f" ({result.note})" if result.note else "")
    return f"| {what} | {result.ours} | {result.theirs} | {result.ratio} | {bar} | {ok} |"


def machine() -> dict[str, str]:
    """Say what this ran on and with."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        cpu = names[0] if names else cpu
    packages = ("numpy", "torch", "tensordict", "torchrl", "duckdb", "zarr")
    torch = sys.modules.get("torch")
    return {
        "machine": f"{os.cpu_count()} x {cpu}, {platform.system()} {platform.release()}",
        "threads": f"{torch.get_num_threads()} torch threads" if torch else "torch was not needed",
        "versions": f"Python {platform.python_version()}, expstore {expstore.__version__}, "
        + ", ".join(f"{name} {version(name)}" for name in packages),
    }


def options(doc: str | None, *, quick: str, folder: Path) -> argparse.ArgumentParser:
    """Return what every script is asked with: how much is done, where stores lie, where figures go."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0] if doc else None)
    parser.add_argument("--quick", action="store_true", help=f"{quick}: rough numbers")
    parser.add_argument("--smoke", action="store_true", help="run everything once, tiny, without bars")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--folder", type=Path, default=folder, help="where stores lie")
    return parser


class Report:
    """Print a table row by row, then what it was measured on; keep the figures."""

    def __init__(self, bars: Mapping[str, Bar], out: Callable[[str], object], *, other: str) -> None:
        self._bars, self._out = bars, out
        self._load = os.getloadavg()[0]
        self._results: list[Result] = []
        out(f"| what | expstore | {other} | ratio | bar | ok |\n| --- | --- | --- | --- | --- | --- |")

    def add(self, result: Result) -> None:
        """Print a row."""
        self._results.append(result)
        self._out(table_row(result, self._bars.get(result.name, Bar(float("inf"), ""))))
        sys.stdout.flush()

    def end(self, file: Path | None) -> int:
        """Say what this ran on, write the figures to a file; return the exit code: 1 below a bar."""
        about = machine() | {"load": f"load {self._load:.1f} before, {os.getloadavg()[0]:.1f} after"}
        self._out(f"\n{about['machine']}; {about['load']}; {about['threads']}.\n{about['versions']}.")
        if file:
            rows = [asdict(result) for result in self._results]
            file.write_text(json.dumps({"about": about, "results": rows}, indent=1))
        bars = self._bars
        return 1 if any(r.name in bars and not bars[r.name].holds(r.value) for r in self._results) else 0
