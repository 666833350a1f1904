"""`extend` at a given rate, as a collector calls it, and without a pause, compared with TorchRL and the disk.

Run as `python benchmarks/offered.py`. Each call is due at a fixed time, and its latency counts from that
time, so that a stall counts for every call that it delays. The sides take turns of some seconds, each running
alone.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # some distributions install a `benchmarks` of their own

import numpy as np  # noqa: E402

from benchmarks import vs_torchrl  # noqa: E402
from benchmarks.report import Bar, Report, Result, options  # noqa: E402
from benchmarks.timing import Case  # noqa: E402
from benchmarks.vs_torchrl import Pair, scratch  # noqa: E402
from benchmarks.workloads import LOCOMOTION, PIXELS, Workload  # noqa: E402

#: An in-memory file system, if there is one.
MEMORY = Path("/dev/shm")
#: Calls per second of a collector of locomotion rows.
RATE = 100.0
#: Rate of flat frames as a share of the disk's write rate.
SHARE = 0.6
BARS = {
    "offered/locomotion-p50": Bar(1, "x", at_least=True),
    "offered/locomotion-p99": Bar(2, "x"),
    "offered/pixels-p50": Bar(1, "x", at_least=True),
    "offered/no-pause-memory": Bar(2.5, "x", at_least=True),
    "offered/no-pause-disk": Bar(0.8, " of the disk", at_least=True),
}


@dataclass(frozen=True)
class Effort:
    """Sizes of the benchmark.

    Args:
        rows: Rows of each ring of locomotion rows.
        frames: Rows of each ring of frames.
        extend_rows: Rows per call.
        seconds: Length of a turn.
        rounds: Number of turns per side.
        calls: Calls of a turn without pauses.
        disk_bytes: Bytes written to measure the disk.
    """

    rows: int = 1_000_000
    frames: int = 60_000
    extend_rows: int = 1000
    seconds: float = 4.0
    rounds: int = 5
    calls: int = 300
    disk_bytes: int = 1 << 30


FULL = Effort()
QUICK = Effort(rows=200_000, frames=20_000, seconds=2.0, rounds=3, calls=100, disk_bytes=1 << 28)
SMOKE = Effort(rows=500, frames=50, extend_rows=10, seconds=0.05, rounds=1, calls=3, disk_bytes=1 << 20)


def measure_disk(folder: Path, size: int) -> float:
    """Return the bytes per second of writing a file from end to end and syncing it."""
    block = np.random.default_rng(0).integers(0, 256, min(size, 1 << 23), np.uint8).tobytes()
    path = folder / "written"
    began = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for _ in range(size // len(block)):
            file.write(block)
        os.fdatasync(file.fileno())
    seconds = time.perf_counter() - began
    path.unlink()
    return size / seconds


def offer(case: Case, rate: float, seconds: float) -> list[float]:
    """Make calls at a rate; return the time from each call's due time to its end."""
    case.settle()
    clock, latencies = time.perf_counter, []
    began = clock()
    for number in range(max(1, int(rate * seconds))):
        due = began + number / rate
        item = next(case.inputs)
        if (left := due - clock()) > 0:
            time.sleep(left)
        case.act(item)
        latencies.append(clock() - due)
    return latencies


def rush(case: Case, calls: int) -> list[float]:
    """Make calls one after another; return the time of each, plus its share of the time for settling."""
    case.settle()
    items = [next(case.inputs) for _ in range(min(calls, 20))]
    began = time.perf_counter()
    for number in range(calls):
        case.act(items[number % len(items)])
    case.settle()
    return [(time.perf_counter() - began) / calls]


def alternate(pair: Pair, rounds: int, act: Callable[[Case], list[float]]) -> tuple[list[float], list[float]]:
    """Let both sides take turns; return the results of `act`, ours and theirs."""
    found: tuple[list[float], list[float]] = ([], [])
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds + 1):
            cases = list(zip(found, pair.cases("extend", 1), strict=True))
            for times, case in cases if number % 2 else reversed(cases):
                taken = act(case)
                if number:  # the first turn warms up
                    times += taken
    finally:
        gc.enable()
    return found


def open_pair(folder: Path, workload: Workload, effort: Effort, rows: int) -> Pair:
    """Return both buffers, filled."""
    scaled = workload.scaled(rows=rows, extend_rows=effort.extend_rows)
    pair = Pair(folder, scaled, rows, vs_torchrl.SMOKE if effort is SMOKE else vs_torchrl.QUICK)
    pair.fill()
    return pair


def compare_latencies(name: str, pair: Pair, rate: float, effort: Effort) -> Iterator[Result]:
    """Compare the median and the 99th percentile of calls at a rate."""
    ours, theirs = alternate(pair, effort.rounds, lambda case: offer(case, rate, effort.seconds))
    data = {"rate": rate, "expstore": sorted(ours), "torchrl": sorted(theirs)}
    for part in (50, 99):
        mine, other = (float(np.percentile(times, part)) for times in (ours, theirs))
        ratio = other / mine if part == 50 else mine / other
        yield Result(
            f"offered/{name}-p{part}",
            ratio,
            f"{mine * 1e3:.2f} ms",
            f"{other * 1e3:.2f} ms",
            f"{ratio:.2f}x",
            note=f"{rate:.1f} calls a second, {len(ours)} calls a side",
            data=data if part == 50 else {},
        )


def compare_rush(name: str, pair: Pair, effort: Effort, disk: float | None) -> Result:
    """Compare calls without a pause; outstanding writes to the disk count."""
    ours, theirs = alternate(pair, effort.rounds, lambda case: rush(case, effort.calls))
    mine, other = (float(np.median(times)) for times in (ours, theirs))
    size = pair.workload.row_bytes * effort.extend_rows
    share = "" if disk is None else f", {size / mine / disk:.2f} of what the disk writes"
    return Result(
        f"offered/{name}",
        other / mine if disk is None else size / mine / disk,
        f"{mine * 1e6:.0f} µs a call",
        f"{other * 1e6:.0f} µs a call",
        f"{other / mine:.2f}x",
        note=f"{size / mine / 1e6:.0f} MB/s{share}",
        data={"expstore": ours, "torchrl": theirs, "disk": disk},
    )


def measure(folder: Path, effort: Effort) -> Iterator[Result]:
    """Yield all results."""
    disk = measure_disk(folder, effort.disk_bytes)
    pair = open_pair(folder / "locomotion", LOCOMOTION, effort, effort.rows)
    yield from compare_latencies("locomotion", pair, RATE, effort)
    yield compare_rush("no-pause-disk", pair, effort, disk)
    pair.close()
    pair = open_pair(folder / "pixels", PIXELS, effort, effort.frames)
    rate = SHARE * disk / (PIXELS.row_bytes * effort.extend_rows)
    yield from compare_latencies("pixels", pair, rate, effort)
    pair.close()
    if MEMORY.is_dir() and os.access(MEMORY, os.W_OK):
        with scratch(MEMORY, 4 * effort.rows * LOCOMOTION.row_bytes) as place:
            pair = open_pair(place / "memory", LOCOMOTION, effort, effort.rows)
            yield compare_rush("no-pause-memory", pair, effort, None)
            pair.close()


def main(argv: Sequence[str] | None = None, out: Callable[[str], object] = print) -> int:
    """Measure, print the table, return the exit code."""
    parser = options(__doc__, quick="half of the turns", folder=ROOT / "benchmarks" / "out")
    wanted = parser.parse_args(argv)
    effort = SMOKE if wanted.smoke else QUICK if wanted.quick else FULL
    needed = 4 * (effort.frames * PIXELS.row_bytes + effort.rows * LOCOMOTION.row_bytes) + effort.disk_bytes
    with scratch(wanted.folder, needed) as folder:
        report = Report({} if wanted.smoke else BARS, out, other="TorchRL", file=wanted.json)
        for result in measure(folder, effort):
            report.add(result)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
