"""The cost of `where=`: batches with and without a filter, and the evaluations of the filter.

Run as `python benchmarks/filters.py`; exits 1 below a bar. Both sides sample from full rings on disk while a
thread adds 1,000 rows a second, ten at a time. A background evaluation counts for the side that samples at
that time.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # some distributions install a `benchmarks` of their own

import expstore  # noqa: E402
from benchmarks.report import Bar, Report, Result, options, span  # noqa: E402
from benchmarks.timing import Case, alternate, each_threads  # noqa: E402
from benchmarks.vs_torchrl import scratch  # noqa: E402
from benchmarks.workloads import LOCOMOTION, Stream, Workload  # noqa: E402

BATCH, ROWS, SECONDS = 256, 10, 0.01

FILTERS = {
    "row": "next.reward > 0.5",
    "episode": "next.reward > 0.5 AND episode.length > 10",
}
BARS = {
    "filters/sample-row": Bar(2, "x"),
    "filters/sample-episode": Bar(2, "x"),
    "filters/first-row": Bar(1, " s"),
    "filters/new-row": Bar(0.01, " s"),
}


@dataclass(frozen=True)
class Effort:
    """Sizes of the benchmark.

    Args:
        workload: The rows to sample.
        calls: Number of calls per block.
        rounds: Number of blocks per side.
        repeats: Number of times that rows are added and evaluated.
    """

    workload: Workload = LOCOMOTION
    calls: int = 4000
    rounds: int = 6
    repeats: int = 20


FULL = Effort()
QUICK = Effort(workload=LOCOMOTION.scaled(rows=100_000, extend_rows=1000), calls=1000, rounds=4)
SMOKE = Effort(workload=LOCOMOTION.scaled(rows=2000, extend_rows=400), calls=5, rounds=1, repeats=2)


@contextmanager
def writing(rb: Any, stream: Iterator[Any]) -> Iterator[None]:
    """Add rows in another thread at 1,000 steps per second, as a collector does."""
    over = threading.Event()

    def write() -> None:
        due = time.perf_counter()
        for batch in stream:
            rb.extend(batch)
            due += SECONDS
            if over.wait(max(0.0, due - time.perf_counter())):
                return

    thread = threading.Thread(target=write, name="writer", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def draw(rb: Any) -> Callable[[Any], object]:
    return lambda _: rb.sample()


class Filters:
    """Measure with stores that are full rings."""

    def __init__(self, folder: Path, effort: Effort, threads: Sequence[int]) -> None:
        self.folder, self.effort, self.threads = folder, effort, threads

    def run(self) -> Iterator[Result]:
        samplers = {"plain": expstore.RandomSampler()} | {
            name: expstore.RandomSampler(where=where) for name, where in FILTERS.items()
        }
        stores = {name: self._open(name, sampler) for name, sampler in samplers.items()}
        for name in FILTERS:
            yield self._first(name, stores[name])
            yield self._new(name, stores[name])
        for more in each_threads(self.threads):
            for name in FILTERS:
                yield self._compare(name, more, stores["plain"], stores[name])
        for rb in stores.values():
            rb.close()

    def _stream(self, rows: int) -> Stream:
        return Stream(self.effort.workload, rows, pool=20)

    def _open(self, name: str, sampler: Any) -> Any:
        workload = self.effort.workload
        rb = expstore.open(
            self.folder / f"{name}.exp", capacity=workload.rows, batch_size=BATCH, sampler=sampler, seed=1
        )
        for batch in itertools.islice(
            self._stream(workload.extend_rows), workload.rows // workload.extend_rows
        ):
            rb.extend(batch)
        rb.flush()
        return rb

    def _first(self, name: str, rb: Any) -> Result:
        rb.sql("SELECT 1")  # builds the index and loads DuckDB
        started = time.perf_counter()
        rb.refresh()
        seconds = time.perf_counter() - started
        matching = float((rb.sampler.filter.masses > 0).mean())
        note = f"{len(rb):,} rows, of which {matching:.0%} match"
        return Result(f"filters/first-{name}", seconds, f"{seconds * 1e3:.0f} ms", note=note)

    def _new(self, name: str, rb: Any) -> Result:
        times = []
        for batch in itertools.islice(self._stream(200), self.effort.repeats):
            rb.extend(batch)
            started = time.perf_counter()
            rb.refresh()
            times.append(time.perf_counter() - started)
        median = sorted(times)[len(times) // 2]
        text = f"{median * 1e3:.1f} ms, at most {max(times) * 1e3:.1f}"
        return Result(f"filters/new-{name}", median, text, note="200 rows", data={"times": times})

    def _compare(self, name: str, more: str, plain: Any, filtered: Any) -> Result:
        cases = [
            Case(
                draw(rb),
                itertools.repeat(None),
                self.effort.calls,
                settle=rb.flush,
                around=lambda rb=rb: writing(rb, self._stream(ROWS)),
            )
            for rb in (plain, filtered)
        ]
        one, other = alternate(cases, rounds=self.effort.rounds, warm=20)
        ratio = other.mean / one.mean
        text = f"{span(other)}, without a filter {span(one)}"
        note = f"{FILTERS[name]}; 1,000 rows a second are added"
        ratios = f"{ratio:.2f}x in the mean, {other.median / one.median:.2f}x in the median"
        data = {"plain": one.to_json(), "filtered": other.to_json()}
        return Result(f"filters/sample-{name}{more}", ratio, text, ratio=ratios, note=note, data=data)


def main(argv: Sequence[str] | None = None, out: Callable[[str], object] = print) -> int:
    """Measure, print the table, return the exit code."""
    parser = options(__doc__, quick="100,000 rows", folder=ROOT / "benchmarks" / "out")
    wanted = parser.parse_args(argv)
    effort = SMOKE if wanted.smoke else QUICK if wanted.quick else FULL
    bars = {} if wanted.smoke else BARS
    with scratch(wanted.folder, 6 * effort.workload.rows * effort.workload.row_bytes) as folder:
        report = Report(bars, out, other="other", file=wanted.json)
        for result in Filters(folder, effort, wanted.threads).run():
            report.add(result)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
