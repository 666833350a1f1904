"""Report of results: bars, rows of the table, and a description of the machine.

Used by the scripts here. This module measures nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from math import isfinite
from pathlib import Path
from typing import Any

import expstore
from benchmarks.timing import Series


@dataclass(frozen=True)
class Bar:
    """Describe the lower or upper limit of a measurement."""

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


def table_row(result: Result, bar: Bar | None) -> str:
    held = "–" if bar is None else "yes" if bar.holds(result.value) else "**no**"
    what = f"{result.name}" + (f" ({result.note})" if result.note else "")
    return f"| {what} | {result.ours} | {result.theirs} | {result.ratio} | {bar or '–'} | {held} |"


def machine() -> dict[str, str]:
    """Describe the machine and the versions of the software."""
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
    """Return the options that all scripts share: effort, folder of the stores, file of the figures."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0] if doc else None)
    parser.add_argument("--quick", action="store_true", help=f"{quick}: rough numbers")
    parser.add_argument("--smoke", action="store_true", help="run everything once, tiny, without bars")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    parser.add_argument("--folder", type=Path, default=folder, help="folder for stores")
    parser.add_argument(
        "--threads",
        type=_numbers,
        default=(),
        metavar="N,M",
        help="torch threads; comparisons are made with each number, names have `@M` for all but the first",
    )
    return parser


def _numbers(text: str) -> tuple[int, ...]:
    numbers = tuple(map(int, text.split(",")))
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError("torch needs at least one thread")
    return numbers


class Report:
    """Print a table row by row, then the machine it was measured on; store the figures.

    Args:
        bars: The bars of results, by name. A result without a bar is only reported.
        out: Prints a line.
        other: Heading of the second column.
        file: File of the figures, rewritten after each row, so that an interrupted part keeps its figures.
    """

    def __init__(
        self, bars: Mapping[str, Bar], out: Callable[[str], object], *, other: str, file: Path | None
    ) -> None:
        self._bars, self._out, self._file = bars, out, file
        self._load = os.getloadavg()[0]
        self._started = time.monotonic()
        self._results: list[Result] = []
        self._skipped: dict[str, str] = {}
        out(f"| what | expstore | {other} | ratio | bar | ok |\n| --- | --- | --- | --- | --- | --- |")

    def add(self, result: Result) -> None:
        """Print a row."""
        self._results.append(result)
        self._out(table_row(result, self._bar(result)))
        sys.stdout.flush()
        self._write({}, whole=False)

    def skip(self, name: str, why: str) -> None:
        """Print that a side is left out, and what it needs."""
        self._skipped[name] = why
        self._out(f"{name} is left out: {why}")
        self._write({}, whole=False)

    def end(self) -> int:
        """Print the machine and write all figures; return the exit code: 1 below a bar."""
        about = machine() | {"load": f"load {self._load:.1f} before, {os.getloadavg()[0]:.1f} after"}
        self._out(f"\n{about['machine']}; {about['load']}; {about['threads']}.")
        self._out(f"{about['versions']}. Took {time.monotonic() - self._started:.0f} s.")
        self._out(
            "Times are medians [10th–90th percentile] per call, n calls a side, the sides taking turns."
        )
        if self._load > 1.0:
            self._out("**Other programs were running: these figures mean little.**")
        below = [row.name for row in self._results if not self._holds(row)]
        if below:
            self._out(f"Below their bars: {', '.join(below)}.")
        self._write(about, whole=True)
        return 1 if below else 0

    def _holds(self, result: Result) -> bool:
        bar = self._bar(result)
        return bar is None or bar.holds(result.value)

    def _bar(self, result: Result) -> Bar | None:
        """Return the bar of a result; it does not depend on the number of threads."""
        return self._bars.get(result.name.partition("@")[0])

    def _write(self, about: dict[str, str], *, whole: bool) -> None:
        if self._file is None:
            return
        rows = [
            asdict(one)
            | {"value": one.value if isfinite(one.value) else None}
            | {"bar": str(self._bar(one) or ""), "ok": self._holds(one)}
            for one in self._results
        ]
        told = {"whole": whole, "about": about, "skipped": self._skipped, "results": rows}
        temporary = self._file.with_name(f"{self._file.name}.part")
        temporary.write_text(json.dumps(told, indent=1, allow_nan=False))
        temporary.replace(self._file)
