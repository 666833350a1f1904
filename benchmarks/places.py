"""One sample and one extend by each way to a store, compared with a buffer that this process has open.

Run as `python -m benchmarks.places`. The servers run in their own processes. A forked process measures: its
parent owns the shared store, and is idle. The ways alternate, so that other load on the machine affects all.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # some distributions install a `benchmarks` of their own

import expstore  # noqa: E402
from benchmarks.cluster import serving  # noqa: E402
from benchmarks.report import Report, Result, options  # noqa: E402
from benchmarks.vs_torchrl import scratch  # noqa: E402
from benchmarks.workloads import LOCOMOTION, Workload  # noqa: E402

BATCH = 256
#: The buffer that the others are compared with.
LOCAL = "this process"
FULL = LOCOMOTION.scaled(rows=200_000, extend_rows=1000), 60
QUICK = LOCOMOTION.scaled(rows=20_000, extend_rows=1000), 15
SMOKE = LOCOMOTION.scaled(rows=1000, extend_rows=100), 1
#: Calls of each way in a round.
_CALLS = 16


def fill(path: Path, workload: Workload) -> Any:
    """Return a buffer over a new, full store."""
    rb = expstore.open(path, capacity=workload.rows, batch_size=BATCH, seed=1)
    for start in range(0, workload.rows, workload.extend_rows):
        rb.extend(workload.batch(workload.extend_rows, start=start, seed=start))
    return rb


def measure(
    folder: Path, urls: Sequence[str], shared: Any, workload: Workload, rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of a call of each way in each round, by the name of the call."""
    with ExitStack() as stack:
        mine = [stack.enter_context(fill(folder / f"mine{number}.exp", workload)) for number in range(3)]
        reader = stack.enter_context(expstore.open(folder / "shared.exp", mode="r", batch_size=BATCH, seed=1))
        connect = partial(expstore.connect, batch_size=BATCH, seed=1)
        ways = {
            LOCAL: mine[0],
            'mode="r"': reader,
            "share()": shared,
            "HTTP": stack.enter_context(connect(urls[0])),
            "two open buffers": stack.enter_context(connect(mine[1:])),
            "an open buffer and an address": stack.enter_context(connect([mine[2], urls[1]])),
            "two addresses": stack.enter_context(connect(list(urls))),
            "two addresses, ahead=16": stack.enter_context(connect(list(urls), ahead=16)),
        }
        rows = workload.batch(workload.extend_rows, start=0, seed=0)
        calls: dict[str, dict[str, Callable[[], Any]]] = {
            "sample": {name: rb.sample for name, rb in ways.items()},
            # Several stores: as for the one that gets the rows.
            "extend": {name: partial(ways[name].extend, rows) for name in (LOCAL, "share()", "HTTP")},
        }
        times: dict[str, dict[str, list[float]]] = {
            kind: {name: [] for name in acts} for kind, acts in calls.items()
        }
        for number in range(-2, rounds):
            for kind, acts in calls.items():
                for name, act in acts.items():
                    before = time.perf_counter()
                    for _ in range(_CALLS):
                        act()
                    if number >= 0:
                        times[kind][name].append((time.perf_counter() - before) / _CALLS)
        return times


def run(folder: Path, workload: Workload, rounds: int) -> list[Result]:
    """Fill the stores, serve two of them, and measure."""
    with ExitStack() as stack:
        for number in range(2):
            fill(folder / str(number) / "run.exp", workload).close()
        urls = [f"{stack.enter_context(serving(folder / str(number)))[0]}/run" for number in range(2)]
        shared = stack.enter_context(fill(folder / "shared.exp", workload))
        shared.share()
        mine, theirs = multiprocessing.Pipe()
        work = partial(measure, folder, urls, shared, workload, rounds)
        child = multiprocessing.get_context("fork").Process(target=lambda: theirs.send(work()))
        child.start()
        theirs.close()
        times = mine.recv()
        child.join()
    found = []
    for kind, sides in times.items():
        for name, seconds in sides.items():
            pairs = zip(seconds, sides[LOCAL], strict=True)
            ratio = statistics.median(ours / local for ours, local in pairs)
            mine_us, local_us = (statistics.median(each) * 1e6 for each in (seconds, sides[LOCAL]))
            texts = f"{mine_us:.0f} µs", f"{local_us:.0f} µs", f"{ratio:.1f}x"
            found.append(Result(f"{kind}/{name}", ratio, *texts, data={"seconds": seconds}))
    return found


def main(argv: Sequence[str] | None = None, out: Callable[[str], object] = print) -> int:
    """Measure, print the table, return the exit code."""
    parser = options(__doc__, quick="smaller stores, few rounds", folder=ROOT / "benchmarks" / "out")
    wanted: argparse.Namespace = parser.parse_args(argv)
    workload, rounds = SMOKE if wanted.smoke else QUICK if wanted.quick else FULL
    with scratch(wanted.folder, 12 * workload.rows * workload.row_bytes) as folder:
        report = Report({}, out, other=LOCAL, file=wanted.json)
        for result in run(folder, workload, rounds):
            report.add(result)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
