"""What the benchmark programs share: bars, rows of the table, their options, and the file of their figures.

Used by the programs of this folder. This module measures nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from math import isfinite
from pathlib import Path
from typing import Any

import expstore
from benchmarks.timing import Series

OUT = Path(__file__).parent / "out"


@dataclass(frozen=True)
class Bar:
    """The lower or upper limit of a measurement."""

    limit: float
    unit: str
    at_least: bool = False

    def holds(self, value: float) -> bool:
        return value >= self.limit if self.at_least else value <= self.limit

    def __str__(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.limit:g}{self.unit}"


def at_least(limit: float, unit: str = "x") -> Bar:
    """Return a lower limit, by default of a ratio."""
    return Bar(limit, unit, at_least=True)


@dataclass(frozen=True)
class Result:
    """One row of the table."""

    name: str
    value: float
    ours: str
    theirs: str = "–"
    ratio: str = "–"
    note: str = ""
    data: dict[str, Any] = field(default_factory=dict)


def compare(name: str, ours: Series, theirs: Series, note: str = "", *, other: str = "torchrl") -> Result:
    """Return the row of a call that both sides make; its value is how many times as fast expstore is."""
    ratio = theirs.median / ours.median
    text = f"{ratio:.3g}x (means {theirs.mean / ours.mean:.3g}x)"
    data = {"expstore": ours.to_json(), other: theirs.to_json()}
    return Result(name, ratio, span(ours), span(theirs), text, note, data)


def slowest(name: str, seconds: Sequence[float], note: str, data: dict[str, Any]) -> Result:
    """Return the row of something that is repeated and judged by its slowest time."""
    text = f"{max(seconds):.3f} s, the slowest of {len(seconds)} (fastest {min(seconds):.3f})"
    return Result(name, max(seconds), text, note=note, data=data)


def _format_time(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} µs" if seconds < 1e-2 else f"{seconds * 1e3:.1f} ms"


def span(series: Series) -> str:
    median, low, high = map(_format_time, (series.median, series.low, series.high))
    return f"{median} [{low}–{high}] n={series.calls}"


def compare_offered(name: str, ours: Series, theirs: Series, note: str) -> Result:
    """Return the row of calls at a fixed rate; its value is the ratio of the 99th percentiles."""
    texts = [
        f"p50 {_format_time(one.median)}, p99 {_format_time(one.last)} n={one.calls}"
        for one in (ours, theirs)
    ]
    data = {
        side: one.to_json() | {"p99": one.last} for side, one in (("expstore", ours), ("torchrl", theirs))
    }
    ratio = theirs.last / ours.last
    return Result(name, ratio, *texts, f"{ratio:.3g}x", note, data)


def slowdown(quiet: Series, busy: Series) -> str:
    means = f"means {_format_time(quiet.mean)} → {_format_time(busy.mean)}"
    return f"{_format_time(quiet.median)} → {_format_time(busy.median)}, {means} n={busy.calls}"


def table_row(row: Mapping[str, Any]) -> str:
    """Return a line of the table for a row of the file of figures."""
    passes = ("yes" if row["ok"] else "**no**") if row["bar"] else "–"
    what = f"{row['name']} ({row['note']})" if row["note"] else row["name"]
    return f"| {what} | {row['ours']} | {row['theirs']} | {row['ratio']} | {row['bar'] or '–'} | {passes} |"


def describe_machine() -> dict[str, str]:
    """Return the machine and the versions of the software."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        cpu = names[0] if names else cpu
    packages = ("numpy", "torch", "tensordict", "torchrl", "duckdb", "zarr")
    return {
        "machine": f"{os.cpu_count()} x {cpu}, {platform.system()} {platform.release()}",
        "versions": f"Python {platform.python_version()}, expstore {expstore.__version__}, "
        + ", ".join(f"{name} {version(name)}" for name in packages),
    }


class Report:
    """Print a table row by row, then the machine it was measured on; write the figures to a file.

    Args:
        bars: The bars of results, by name. A result without a bar is only reported.
        out: Prints a line.
        file: File of the figures, rewritten after each row, so that an interrupted program keeps its figures.
    """

    def __init__(self, bars: Mapping[str, Bar], out: Callable[[str], object], file: Path | None) -> None:
        self._bars, self._out, self._file = bars, out, file
        self._load = os.getloadavg()[0]
        self._started = time.monotonic()
        self._rows: list[dict[str, Any]] = []
        self._skipped: dict[str, str] = {}
        out("| what | expstore | the other | ratio | bar | ok |\n| --- | --- | --- | --- | --- | --- |")

    def add(self, result: Result) -> None:
        """Print a row."""
        # The bar does not depend on the number of threads.
        bar = self._bars.get(result.name.partition("@")[0])
        judged = {
            "value": result.value if isfinite(result.value) else None,
            "bar": str(bar or ""),
            "ok": bar is None or bar.holds(result.value),
        }
        self._rows.append(asdict(result) | judged)
        self._out(table_row(self._rows[-1]))
        sys.stdout.flush()
        self._write({}, is_whole=False)

    def skip(self, name: str, why: str) -> None:
        """Print that a side is left out, and what it needs."""
        self._skipped[name] = why
        self._out(f"{name} is left out: {why}")

    def end(self) -> int:
        """Print the machine and write all figures; return the exit code: 1 below a bar."""
        about = describe_machine() | {"load": f"load {self._load:.1f} before, {os.getloadavg()[0]:.1f} after"}
        self._out(f"\n{about['machine']}; {about['load']}; {about['versions']}.")
        self._out(f"Took {time.monotonic() - self._started:.0f} s. {HOW}")
        if self._load > 1.0:
            self._out("**Other programs were running: these figures mean little.**")
        below = [row["name"] for row in self._rows if not row["ok"]]
        if below:
            self._out(f"Below their bars: {', '.join(below)}.")
        self._write(about, is_whole=True)
        return 1 if below else 0

    def _write(self, about: dict[str, str], *, is_whole: bool) -> None:
        if self._file is None:
            return
        figures = {"whole": is_whole, "about": about, "skipped": self._skipped, "results": self._rows}
        temporary = self._file.with_name(f"{self._file.name}.part")
        temporary.write_text(json.dumps(figures, indent=1, allow_nan=False))
        temporary.replace(self._file)


#: What the columns of a table mean.
HOW = (
    "Times are medians [10th–90th percentile] per call, n calls a side, the sides alternating; names with "
    "`@1` are of one torch thread, others of two."
)


# -- a program ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setup:
    """What a program's measurements get.

    Args:
        folder: Folder for stores, which is removed at the end.
        cache: Folder for what later runs use again.
        smoke: Whether everything runs once, tiny, and figures mean nothing.
        skip: Reports a side that is left out, and what it needs.
    """

    folder: Path
    cache: Path
    smoke: bool
    skip: Callable[[str, str], object]


@contextmanager
def scratch(parent: Path, needed: int) -> Iterator[Path]:
    """Create a folder for stores of `needed` bytes, and remove it in any case."""
    parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(parent).free
    if free < needed:
        sys.exit(f"{parent} has {free / 1e9:.1f} GB free, but {needed / 1e9:.1f} GB are needed; see --folder")
    folder = Path(tempfile.mkdtemp(prefix="stores-", dir=parent.resolve()))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_program(
    measure: Callable[[Setup], Iterator[Result]],
    bars: Mapping[str, Bar],
    *,
    gigabytes: float,
    argv: Sequence[str] | None = None,
    out: Callable[[str], object] = print,
) -> int:
    """Parse the options that all programs have, measure, print the table; return the exit code.

    Args:
        measure: Yields the results.
        bars: Limits of results, by name; a smoke run has none.
        gigabytes: Disk space that the program needs, except in a smoke run.
        argv: Arguments; None for those of the process.
        out: Prints a line.
    """
    module = sys.modules[measure.__module__]
    parser = argparse.ArgumentParser(description=(module.__doc__ or "").partition("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="run everything once, tiny, without bars")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    parser.add_argument("--folder", type=Path, default=OUT, help="folder for stores")
    parser.add_argument("--cache", type=Path, default=OUT, help="folder for what later runs use again")
    options = parser.parse_args(argv)
    report = Report({} if options.smoke else bars, out, options.json)
    with scratch(options.folder, 0 if options.smoke else int(gigabytes * 1e9)) as folder:
        for result in measure(Setup(folder, options.cache, options.smoke, report.skip)):
            report.add(result)
    return report.end()
