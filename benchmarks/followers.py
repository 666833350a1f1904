"""The cost of two followers for a writer: extend with and without followers; exits 1 above the bar.

Run as `python benchmarks/followers.py [--seconds 30]`. Followers sample and query without a pause, each in
its own process; the phases alternate. Three busy processes on two cores slow each other down in any case. So
in a third phase two followers read another, closed store: they use as much CPU, but do not touch the writer's
files. The bar applies to the ratio of the two phases with followers.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # some distributions install a `benchmarks` of their own

import expstore  # noqa: E402
from benchmarks.report import Bar, Report, Result, options, span  # noqa: E402
from benchmarks.timing import Series, touch_memory  # noqa: E402
from benchmarks.vs_torchrl import scratch  # noqa: E402
from benchmarks.workloads import LOCOMOTION, Stream  # noqa: E402

CAPACITY, ROWS, BATCH = 100_000, 1000, 256
QUERY = "SELECT count(*), avg(next.reward), max(_id) FROM transitions"
BAR = Bar(1.1, "x")
#: Followers in a phase: none, two on a closed store, two on the writer's store.
QUIET, APART, FOLLOWED, END = range(4)
NAMES = {QUIET: "no followers", APART: "two followers of another store", FOLLOWED: "two followers"}


def follow(folder: Path, phase: Synchronized[int], ready: Any, done: Any) -> None:
    """Sample and query the store that the phase selects."""
    samples = queries = 0
    buffers = {
        APART: expstore.open(folder / "other.exp", mode="r", batch_size=BATCH),
        FOLLOWED: expstore.open(folder / "run.exp", mode="r", batch_size=BATCH),
    }
    for rb in buffers.values():
        rb.sample()
        rb.sql(QUERY)
    ready.wait()
    while (now := phase.value) != END:
        if now == QUIET:
            time.sleep(0.01)
            continue
        for _ in range(100):
            buffers[now].sample()
        samples += 100
        try:
            buffers[now].sql(QUERY)
            queries += 1
        except expstore.errors.StateError:
            pass  # the follower was overtaken twice
    done.put((samples, queries))


def fill(path: Path, stream: Stream) -> Any:
    rb = expstore.open(path, capacity=CAPACITY, batch_size=BATCH)
    for _ in range(CAPACITY // ROWS + 5):
        rb.extend(next(stream))
    return rb


def measure(folder: Path, seconds: float, rounds: int, out: Callable[[str], object]) -> dict[int, Series]:
    """Time extends phase by phase."""
    stream = Stream(LOCOMOTION, ROWS, pool=40)
    fill(folder / "other.exp", stream).close()
    context = multiprocessing.get_context("spawn")
    phase, ready, done = context.Value("i", QUIET), context.Barrier(3), context.Queue()
    series = {name: Series() for name in NAMES}
    with fill(folder / "run.exp", stream) as rb:
        workers = [context.Process(target=follow, args=(folder, phase, ready, done)) for _ in range(2)]
        for worker in workers:
            worker.start()
        ready.wait()
        for _ in range(rounds):
            for name, times in series.items():
                phase.value = name
                time.sleep(0.2)
                times.blocks.append(extend_for(rb, stream, seconds / rounds))
        phase.value = END
        for _ in workers:
            samples, queries = done.get()
            out(f"a follower drew {samples:,} batches and ran {queries:,} queries")
        for worker in workers:
            worker.join()
        out(f"the ring was written {rb.write_count / CAPACITY:.0f} times over")
    return series


def extend_for(rb: Any, stream: Stream, seconds: float) -> list[float]:
    times = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        batch = next(stream)
        began = time.perf_counter()
        rb.extend(batch)
        times.append(time.perf_counter() - began)
    return times


def results(series: dict[int, Series]) -> Iterator[Result]:
    """Return the cost of following, relative to followers of another store that use as much CPU."""
    quiet, apart, followed = (series[phase] for phase in (QUIET, APART, FOLLOWED))
    cost, whole = followed.median / apart.median, followed.median / quiet.median
    text = f"{cost:.2f}x, in total {whole:.2f}x"
    data = {NAMES[phase]: one.to_json() for phase, one in series.items()}
    note = f"extend({ROWS}): {NAMES[FOLLOWED]}; {NAMES[APART]}; without followers {span(quiet)}"
    yield Result("followers/cost", cost, span(followed), span(apart), text, note, data)


def main(argv: Sequence[str] | None = None, out: Callable[[str], object] = print) -> int:
    """Measure, print the table, return the exit code."""
    parser = options(__doc__, quick="6 seconds a phase", folder=ROOT / "benchmarks" / "out")
    parser.add_argument("--seconds", type=float, default=30.0, help="total seconds of each phase")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--bar", type=float, default=BAR.limit, help="maximum cost of following")
    wanted = parser.parse_args(argv)
    seconds, rounds = (0.1, 1) if wanted.smoke else (6.0 if wanted.quick else wanted.seconds, wanted.rounds)
    bars = {} if wanted.smoke else {"followers/cost": Bar(wanted.bar, "x")}
    touch_memory(400 << 20)
    report = Report(bars, out, other="followers of another store", file=wanted.json)
    with scratch(wanted.folder, 20 * CAPACITY * LOCOMOTION.row_bytes) as folder:
        for result in results(measure(folder, seconds, rounds, out)):
            report.add(result)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
