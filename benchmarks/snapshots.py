"""Snapshots compared with TorchRL's dumps: the cost of the first one, and of the next after 1000 more rows.

Run as `python benchmarks/snapshots.py`; exits 1 below a bar. Both sides dump the same kind of rows from a
full ring, in one process, taking turns. TorchRL's dumps are not crash-safe.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # some distributions install a `benchmarks` of their own

from benchmarks.report import Bar, Report, Result, options, span  # noqa: E402
from benchmarks.timing import Series  # noqa: E402
from benchmarks.vs_torchrl import FULL, QUICK, SMOKE, Pair, scratch  # noqa: E402

#: Costs of the next snapshot relative to the first; results without a bar are only reported.
BARS = {
    "snapshot/next-bytes": Bar(1 / 30, " of the first"),
    "snapshot/next-time": Bar(1 / 10, " of the first"),
}
NEXT = 3


def timed(series: list[float], act: Callable[[], Any]) -> Any:
    """Run `act` without garbage collection; append its time to the series."""
    gc.collect()
    gc.disable()
    started = time.perf_counter()
    try:
        return act()
    finally:
        series.append(time.perf_counter() - started)
        gc.enable()


def tree_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


class Snapshots:
    """Measure snapshots of one pair of buffers."""

    def __init__(self, folder: Path, pair: Pair, rounds: int) -> None:
        self.folder, self.pair, self.rounds = folder, pair, rounds
        names = ("first", "next", "load", "theirs", "theirs_next", "theirs_load", "first_bytes", "next_bytes")
        self.found: dict[str, list[float]] = {name: [] for name in names}
        self.their_bytes = 0

    def run(self) -> Iterator[Result]:
        """Yield a row per measurement."""
        for number in range(self.rounds):
            sides = (self._ours, self._theirs)
            for side in sides if number % 2 == 0 else reversed(sides):
                self.pair.ours.flush()
                os.sync()  # so that no side has background work during the turn of another
                side(number)
        yield from self._results()

    def _extend(self, side: int) -> None:
        case = self.pair.cases("extend", 1)[side]
        case.act(next(case.inputs))

    def _ours(self, number: int) -> None:
        found, ours, place = self.found, self.pair.ours, self.folder / f"versions-{number}"
        found["first_bytes"].append(timed(found["first"], lambda: ours.dumps(place)).new_bytes)
        for _ in range(NEXT):
            self._extend(0)
            found["next_bytes"].append(timed(found["next"], lambda: ours.dumps(place)).new_bytes)
        timed(found["load"], lambda: ours.loads(place))

    def _theirs(self, number: int) -> None:
        found, theirs, place = self.found, self.pair.theirs, self.folder / f"torchrl-dump-{number}"
        timed(found["theirs"], lambda: theirs.dumps(place))
        for _ in range(NEXT):
            self._extend(1)
            timed(found["theirs_next"], lambda: theirs.dumps(place))
        timed(found["theirs_load"], lambda: theirs.loads(place))
        self.their_bytes = tree_bytes(place)

    def _results(self) -> Iterator[Result]:
        series = {name: Series([times]) for name, times in self.found.items()}

        def row(name: str, ours: str, theirs: str, value: float, ratio: str) -> Result:
            return Result(f"snapshot/{name}", value, span(series[ours]), span(series[theirs]), ratio)

        for name, ours, theirs in (("first", "first", "theirs"), ("load", "load", "theirs_load")):
            ratio = series[theirs].median / series[ours].median
            yield row(name, ours, theirs, ratio, f"{ratio:.2f}x")
        share = series["next"].median / series["first"].median
        yield row("next-time", "next", "theirs_next", share, f"1/{1 / share:.0f} of the first")
        first, after = series["first_bytes"].median, series["next_bytes"].median
        yield Result(
            "snapshot/next-bytes",
            after / first,
            f"{first / 1e6:.1f} MB, then {after / 1e6:.2f} MB",
            f"{self.their_bytes / 1e6:.1f} MB each",
            f"1/{first / after:.0f} of the first",
        )


def main(argv: Sequence[str] | None = None, out: Callable[[str], object] = print) -> int:
    """Measure, print the table, return the exit code."""
    parser = options(__doc__, quick="100,000 rows", folder=ROOT / "benchmarks" / "out")
    wanted = parser.parse_args(argv)
    effort = SMOKE if wanted.smoke else QUICK if wanted.quick else FULL
    workload = effort.locomotion
    report = Report({} if wanted.smoke else BARS, out, other="TorchRL", file=wanted.json)
    with scratch(wanted.folder, 20 * workload.rows * workload.row_bytes) as folder:
        pair = Pair(folder / "pair", workload, workload.rows, effort)
        pair.fill()
        for result in Snapshots(folder, pair, effort.rounds).run():
            report.add(result)
        pair.close()
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
