"""Times of calls and openings while a store grows from 10,000 to 10 million rows, compared with TorchRL.

Run as `python benchmarks/growth.py`; exits 1 below a bar. Rings are full at each size. Slices are drawn with
a row added before each draw, on both sides. TorchRL's slices are measured up to a million rows: above that
one draw takes too long.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # some distributions install a `benchmarks` of their own

import expstore  # noqa: E402
from benchmarks.adapters import disk_bytes  # noqa: E402
from benchmarks.report import Bar, Report, Result, options, span  # noqa: E402
from benchmarks.slices import adding, open_theirs, sampler, single_rows  # noqa: E402
from benchmarks.timing import Case, Series, alternate, touch_memory  # noqa: E402
from benchmarks.vs_torchrl import scratch  # noqa: E402
from benchmarks.workloads import LOCOMOTION, Stream, Workload  # noqa: E402

BATCH = 256
QUERY = 'SELECT status, count(*), avg("return") FROM episodes GROUP BY status'
#: Maximum ratio of the time of a call at the largest size to that at a hundredth of it.
BARS = {
    "growth/slices": Bar(2, "x"),
    "growth/extend": Bar(2, "x"),
    "growth/open": Bar(0.5, " s"),
}


@dataclass(frozen=True)
class Effort:
    """Sizes in rows, calls per block, number of blocks, and the largest size for TorchRL's slices."""

    sizes: tuple[int, ...] = (10_000, 100_000, 1_000_000, 10_000_000)
    calls: int = 100
    rounds: int = 3
    repeats: int = 3
    their_slices: int = 1_000_000


FULL = Effort()
QUICK = Effort(sizes=(10_000, 100_000, 1_000_000))
SMOKE = Effort(sizes=(1000, 2000), calls=1, rounds=1, repeats=1)


class Growth:
    """Measure one size after another, then compare two sizes."""

    def __init__(self, folder: Path, effort: Effort) -> None:
        self.folder, self.effort = folder, effort
        self.medians: dict[str, dict[int, float]] = {}

    def run(self) -> Iterator[Result]:
        for rows in self.effort.sizes:
            folder = self.folder / str(rows)
            folder.mkdir()
            yield from self._at(folder, LOCOMOTION.scaled(rows=rows, extend_rows=min(1000, rows // 4)))
            shutil.rmtree(folder)
        yield from self._together()

    def _at(self, folder: Path, workload: Workload) -> Iterator[Result]:
        path, rows = folder / "store.exp", workload.rows
        settings: dict[str, Any] = {"capacity": rows, "batch_size": BATCH, "seed": 1}
        touch_memory(min(1 << 31, 3 * rows * workload.row_bytes))
        ours, theirs = expstore.open(path, **settings), open_theirs(folder, workload, memory=False)
        stream = Stream(replace(workload, extend_rows=min(10_000, rows)), min(10_000, rows), pool=4)
        for _ in range(rows // min(10_000, rows) + 1):
            batch = next(stream)
            ours.extend(batch)
            theirs.extend(batch)
        plain = self._plain(theirs)
        few = [Stream(workload, workload.extend_rows, pool=8) for _ in range(2)]
        for act, feeds in (("sample", (repeat(BATCH), repeat(BATCH))), ("extend", few)):
            cases = [
                Case(getattr(rb, act), feed, self.effort.calls, settle=ours.flush)
                for rb, feed in zip((ours, plain), feeds, strict=True)
            ]
            yield self._row(act, rows, self._alternate(cases))
        yield self._row("sql", rows, self._alternate([self._asking(ours)]))
        ours.close()
        yield from self._slices(path, theirs, workload)
        yield from self._open(path, rows)
        self._note("disk", rows, size := disk_bytes(path) / rows)
        yield Result(f"growth/disk/{rows}", size, f"{size:.0f} B a row", note=f"{rows:,} rows")

    @staticmethod
    def _plain(theirs: Any) -> Any:
        """Return another buffer over the same rows with its own sampler."""
        from torchrl import data

        return data.TensorDictReplayBuffer(storage=theirs.storage, batch_size=BATCH)

    def _asking(self, ours: Any) -> Case:
        return Case(
            lambda _: ours.sql(QUERY).fetchall(), repeat(None), max(1, self.effort.calls // 10), ours.flush
        )

    def _slices(self, path: Path, theirs: Any, workload: Workload) -> Iterator[Result]:
        with expstore.open(path, batch_size=BATCH, sampler=sampler()) as ours:
            sides = [ours] + ([theirs] if workload.rows <= self.effort.their_slices else [])
            cases = [
                Case(
                    lambda _, rb=rb: rb.sample(),
                    adding(rb, single_rows(Stream(workload, workload.extend_rows, pool=2))),
                    self.effort.calls // (1 if rb is ours else 4) or 1,
                    settle=ours.flush,
                )
                for rb in sides
            ]
            yield self._row("slices", workload.rows, self._alternate(cases))

    def _open(self, path: Path, rows: int) -> Iterator[Result]:
        """Open the store and sample from it, in a process that has done so before."""
        times = []
        for _ in range(self.effort.repeats):
            started = time.perf_counter()
            rb = expstore.open(path, batch_size=BATCH)
            rb.sample()
            times.append(time.perf_counter() - started)
            rb.close()
        yield self._row("open", rows, [Series([times])])

    def _alternate(self, cases: list[Case]) -> list[Series]:
        return alternate(cases, rounds=self.effort.rounds, warm=10)

    def _note(self, act: str, rows: int, median: float) -> None:
        self.medians.setdefault(act, {})[rows] = median

    def _row(self, act: str, rows: int, series: list[Series]) -> Result:
        self._note(act, rows, series[0].median)
        data = {name: one.to_json() for name, one in zip(("expstore", "torchrl"), series, strict=False)}
        name, note = f"growth/{act}/{rows}", f"{rows:,} rows"
        if len(series) == 1:
            return Result(name, series[0].median, span(series[0]), note=note, data=data)
        ratio = series[1].median / series[0].median
        return Result(name, ratio, span(series[0]), span(series[1]), f"{ratio:.1f}x", note, data)

    def _together(self) -> Iterator[Result]:
        """Compare the largest size with a hundredth of it; report the slowest opening."""
        sizes = self.effort.sizes
        last, first = sizes[-1], sizes[max(0, len(sizes) - 3)]
        for act in ("sample", "extend", "sql", "slices"):
            found = self.medians[act]
            ratio = found[last] / found[first]
            text = f"{first:,} rows {found[first] * 1e6:.0f} µs, {last:,} rows {found[last] * 1e6:.0f} µs"
            yield Result(f"growth/{act}", ratio, text, ratio=f"{ratio:.2f}x", data={"medians": found})
        opened = self.medians["open"]
        text = ", ".join(f"{rows:,} rows {seconds * 1e3:.0f} ms" for rows, seconds in opened.items())
        yield Result("growth/open", max(opened.values()), text, data={"medians": opened})


def main(argv: Sequence[str] | None = None, out: Callable[[str], object] = print) -> int:
    """Measure, print the table, return the exit code."""
    parser = options(__doc__, quick="up to 1M rows", folder=ROOT / "benchmarks" / "out")
    wanted = parser.parse_args(argv)
    effort = SMOKE if wanted.smoke else QUICK if wanted.quick else FULL
    report = Report({} if wanted.smoke else BARS, out, other="TorchRL", file=wanted.json)
    with scratch(wanted.folder, 4 * effort.sizes[-1] * LOCOMOTION.row_bytes) as folder:
        for result in Growth(folder, effort).run():
            report.add(result)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
