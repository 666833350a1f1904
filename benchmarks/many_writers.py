"""Several processes write one store through its owner, compared with one process alone and with TorchRL.

Run as `python benchmarks/many_writers.py`. Four forked workers extend a shared buffer without a pause, by
1000 rows and by 16; the sides alternate. TorchRL's side is its shared LazyMemmapStorage, into which each
worker writes by itself, one after the other, and of which nothing survives. What counts are the latencies
while the owner does something: it trains a network on batches that it samples, or it runs Python code.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # some distributions install a `benchmarks` of their own

import numpy as np  # noqa: E402
import torch  # noqa: E402

import expstore  # noqa: E402
from benchmarks.report import Bar, Report, Result, options  # noqa: E402
from benchmarks.vs_torchrl import scratch  # noqa: E402
from benchmarks.workloads import LOCOMOTION, PIXELS, Stream, Workload  # noqa: E402

WORKERS, BATCH = 4, 256
ROWS, FEW = 1000, 16
BARS = {
    "many-writers/locomotion-throughput": Bar(0.7, "x", at_least=True),
    "many-writers/locomotion-torchrl": Bar(1.5, "x", at_least=True),
    "many-writers/locomotion-cpu": Bar(1.5, "x"),
    "many-writers/pixels-throughput": Bar(0.7, "x", at_least=True),
    "many-writers/pixels-torchrl": Bar(1.5, "x", at_least=True),
    "many-writers/pixels-cpu": Bar(1.5, "x"),
    "many-writers/latency-idle": Bar(1.0, "x"),
}


@dataclass(frozen=True)
class Effort:
    """Say how much is done.

    Args:
        seconds: Of a round.
        rounds: How many rounds each side has.
        rows: Capacity of the rings of locomotion rows.
        frames: The same, of pixels.
    """

    seconds: float = 2.0
    rounds: int = 5
    rows: int = 500_000
    frames: int = 20_000


FULL, QUICK = Effort(), Effort(seconds=1.0, rounds=3, rows=200_000, frames=10_000)
SMOKE = Effort(seconds=0.1, rounds=1, rows=20_000, frames=2_000)


@dataclass
class Rounds:
    """The counts and latencies of all rounds of a side.

    Args:
        calls: How many calls were made.
        seconds: How long the rounds were.
        times: Of each call, in seconds.
        owner_cpu: Seconds of processors that this process took.
        worker_cpu: The same, of all workers.
    """

    calls: int = 0
    seconds: float = 0.0
    times: list[float] = field(default_factory=list)
    owner_cpu: float = 0.0
    worker_cpu: float = 0.0

    def percentile(self, part: float) -> float:
        return float(np.percentile(self.times, part))

    def cpu_per_row(self, rows: int) -> float:
        return (self.owner_cpu + self.worker_cpu) / max(1, self.calls * rows)

    def rate(self, rows: int) -> float:
        return self.calls * rows / self.seconds

    def to_json(self, rows: int) -> dict[str, float]:
        per_row = 1e6 / max(1, self.calls * rows)
        return {
            "calls": self.calls,
            "rows_per_second": self.rate(rows),
            "p50": self.percentile(50),
            "p99": self.percentile(99),
            "owner_us_per_row": self.owner_cpu * per_row,
            "worker_us_per_row": self.worker_cpu * per_row,
        }


class Worker:
    """A forked process that extends a buffer when it is told to.

    Args:
        rb: The buffer.
        workload: The rows.
        rows: Of each call.
        number: Seed of its rows.
    """

    def __init__(self, rb: Any, workload: Workload, rows: int, number: int) -> None:
        asked, self._ask = os.pipe()
        self._told, tell = os.pipe()
        sys.stdout.flush()
        self.pid = os.fork()
        if not self.pid:
            code = 1
            try:
                os.close(self._ask)
                torch.set_num_threads(1)
                self._serve(rb, Stream(workload, rows, pool=4, seed=number), asked, tell)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        os.close(asked)
        os.close(tell)
        self._answers = os.fdopen(self._told, "rb")

    def _serve(self, rb: Any, stream: Stream, asked: int, tell: int) -> None:
        answers = os.fdopen(tell, "wb")
        for _ in range(3):
            rb.extend(next(stream))
        gc.disable()
        # The end of the pipe would not be seen: workers that were forked later have copies of it.
        while (seconds := float(np.frombuffer(os.read(asked, 8), np.float64)[0])) > 0:
            times: list[float] = []
            cpu, end = time.process_time(), time.perf_counter() + seconds
            while (began := time.perf_counter()) < end:
                rb.extend(next(stream))
                times.append(time.perf_counter() - began)
            pickle.dump((times, time.process_time() - cpu), answers)
            answers.flush()

    def begin(self, seconds: float) -> None:
        os.write(self._ask, np.float64(seconds).tobytes())

    def end(self) -> tuple[list[float], float]:
        found: tuple[list[float], float] = pickle.load(self._answers)
        return found

    def close(self) -> None:
        self.begin(0.0)
        os.close(self._ask)
        os.waitpid(self.pid, 0)
        self._answers.close()


class Side:
    """A buffer that is shared, and its workers.

    Args:
        rb: The buffer, with its first rows.
        workload: The rows.
        rows: Of each call.
        workers: How many write.
    """

    def __init__(self, rb: Any, workload: Workload, rows: int, workers: int = WORKERS) -> None:
        self.rb, self.rows = rb, rows
        self.workers = [Worker(rb, workload, rows, number) for number in range(workers)]

    def run_round(self, into: Rounds, seconds: float, act: Callable[[Any, float], None]) -> None:
        """Let the workers write for some seconds while this process acts."""
        cpu = time.process_time()
        for worker in self.workers:
            worker.begin(seconds)
        act(self.rb, seconds)
        for worker in self.workers:
            times, worker_cpu = worker.end()
            into.calls += len(times)
            into.times += times
            into.worker_cpu += worker_cpu
        into.owner_cpu += time.process_time() - cpu
        into.seconds += seconds

    def close(self) -> None:
        for worker in self.workers:
            worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# -- what the owner does meanwhile ---------------------------------------------------------------------------


def wait(rb: Any, seconds: float) -> None:
    """Do nothing."""


def train(rb: Any, seconds: float) -> None:
    """Train a network on batches that are sampled."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(17, 256), torch.nn.ReLU(), torch.nn.Linear(256, 17))
    optimizer, end = torch.optim.Adam(net.parameters()), time.perf_counter() + seconds
    while time.perf_counter() < end:
        batch = rb.sample(BATCH)
        loss = (net(batch["observation"]) - batch["next", "observation"]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def loop(rb: Any, seconds: float) -> None:
    """Run Python code, which holds the GIL for 5 ms whenever another thread wants it."""
    number, end = 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        for _ in range(1000):
            number += 1


def extend_alone(rb: Any, stream: Stream, into: Rounds, seconds: float) -> None:
    """Extend in this process, without workers."""
    cpu, end = time.process_time(), time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        rb.extend(next(stream))
        into.times.append(time.perf_counter() - began)
        into.calls += 1
    into.owner_cpu += time.process_time() - cpu
    into.seconds += seconds


# -- buffers -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def open_ours(folder: Path, workload: Workload, rows: int, capacity: int) -> Iterator[Any]:
    path = folder / f"{workload.name}-{rows}-{time.monotonic_ns()}.exp"
    with expstore.open(path, capacity=capacity, layout="flat", seed=1) as rb:
        fill(rb.share(), workload, capacity)
        yield rb


@contextlib.contextmanager
def open_theirs(folder: Path, workload: Workload, rows: int, capacity: int) -> Iterator[Any]:
    from torchrl import data

    logging.getLogger("torchrl").setLevel(logging.WARNING)
    where = folder / f"torchrl-{workload.name}-{rows}-{time.monotonic_ns()}"
    storage = data.LazyMemmapStorage(capacity, scratch_dir=str(where))
    rb = data.TensorDictReplayBuffer(storage=storage, shared=True, batch_size=BATCH)
    fill(rb, workload, capacity)
    yield rb


def fill(rb: Any, workload: Workload, capacity: int) -> None:
    """Write every slot once: files do not grow while calls are timed."""
    stream = Stream(workload, ROWS, pool=4)
    for _ in range(capacity // ROWS + 2):
        rb.extend(next(stream))


# -- measurements --------------------------------------------------------------------------------------------


def measure_throughput(folder: Path, workload: Workload, capacity: int, effort: Effort) -> Iterator[Result]:
    """Compare four workers with one process alone, and with TorchRL's."""
    alone, ours, theirs = Rounds(), Rounds(), Rounds()
    stream = Stream(workload, ROWS, pool=4, seed=9)
    with (
        open_theirs(folder, workload, ROWS, capacity) as other,
        Side(other, workload, ROWS) as peers,
        open_ours(folder, workload, ROWS, capacity) as rb,
        Side(rb, workload, ROWS) as side,
    ):
        for number in range(effort.rounds):
            acts = [
                lambda: extend_alone(rb, stream, alone, effort.seconds),
                lambda: side.run_round(ours, effort.seconds, wait),
                lambda: peers.run_round(theirs, effort.seconds, wait),
            ]
            for act in acts if number % 2 == 0 else reversed(acts):
                act()
        side.close()
        side.workers = []
    sides = {"alone": alone, "four": ours, "torchrl": theirs}
    data = {name: rounds.to_json(ROWS) for name, rounds in sides.items()}
    name = f"many-writers/{workload.name}"
    rate, single, other_rate = (rounds.rate(ROWS) for rounds in (ours, alone, theirs))
    text = f"{rate:,.0f} rows/s"
    yield Result(
        f"{name}-throughput", rate / single, text, f"{single:,.0f} rows/s", f"{rate / single:.2f}x",
        f"{WORKERS} workers extend({ROWS}); the other side: one process alone", data,
    )  # fmt: skip
    yield Result(
        f"{name}-torchrl", rate / other_rate, text, f"{other_rate:,.0f} rows/s", f"{rate / other_rate:.2f}x",
        f"{WORKERS} workers of a shared LazyMemmapStorage",
    )  # fmt: skip
    cost, least = ours.cpu_per_row(ROWS), alone.cpu_per_row(ROWS)
    yield Result(
        f"{name}-cpu", cost / least, f"{cost * 1e6:.2f} µs a row", f"{least * 1e6:.2f} µs a row",
        f"{cost / least:.2f}x", "CPU of owner and workers; the other side: of one process alone",
    )  # fmt: skip


def measure_latency(folder: Path, effort: Effort) -> Iterator[Result]:
    """Time `extend` of a few rows: one worker and an idle owner, then four workers and an owner that acts."""
    workload, capacity = LOCOMOTION, effort.rows
    trips = PipeTrips()
    local, proxied = Rounds(), Rounds()
    stream = Stream(workload, FEW, pool=40, seed=9)
    with open_ours(folder, workload, FEW, capacity) as rb, Side(rb, workload, FEW, 1) as side:
        for _ in range(effort.rounds):
            extend_alone(rb, stream, local, effort.seconds / 2)
            side.run_round(proxied, effort.seconds / 2, wait)
            trips.measure(500)
    trips.close()
    least = local.percentile(50) + 2 * trips.median
    mine = proxied.percentile(50)
    yield Result(
        "many-writers/latency-idle", mine / least, f"{mine * 1e6:.0f} µs", f"{least * 1e6:.0f} µs",
        f"{mine / least:.2f}x",
        f"extend({FEW}), one worker, idle owner; {local.percentile(50) * 1e6:.0f} µs in process "
        f"and two round trips of a pipe, {trips.median * 1e6:.0f} µs each",
        {"expstore": proxied.to_json(FEW), "alone": local.to_json(FEW), "round_trip": trips.median},
    )  # fmt: skip
    acts = {"waiting": wait, "training": train, "python": loop}
    found = {name: (Rounds(), Rounds()) for name in acts}
    with (
        open_theirs(folder, workload, FEW, capacity) as other,
        Side(other, workload, FEW) as peers,
        open_ours(folder, workload, FEW, capacity) as rb,
        Side(rb, workload, FEW) as side,
    ):
        for _ in range(effort.rounds):
            for name, act in acts.items():
                side.run_round(found[name][0], effort.seconds, act)
                peers.run_round(found[name][1], effort.seconds, act)
        side.close()
        side.workers = []
    for name, (ours, theirs) in found.items():
        data = {"expstore": ours.to_json(FEW), "torchrl": theirs.to_json(FEW)}
        for part in (50, 99):
            mine, other_time = ours.percentile(part), theirs.percentile(part)
            yield Result(
                f"many-writers/latency-{name}-p{part}", mine, f"{mine * 1e6:.0f} µs",
                f"{other_time * 1e6:.0f} µs", f"{other_time / mine:.2f}x",
                f"extend({FEW}), {WORKERS} workers without a pause, {ours.rate(FEW):,.0f} rows/s against "
                f"{theirs.rate(FEW):,.0f}",
                data if part == 50 else {},
            )  # fmt: skip


class PipeTrips:
    """Time round trips of a byte to a forked process and back, through two pipes."""

    def __init__(self) -> None:
        asked, self._ask = os.pipe()
        self._told, tell = os.pipe()
        self._times: list[float] = []
        self._pid = os.fork()
        if not self._pid:
            os.close(self._ask)
            while os.read(asked, 1) == b"x":
                os.write(tell, b"x")
            os._exit(0)
        os.close(asked)
        os.close(tell)

    def measure(self, count: int) -> None:
        for _ in range(count):
            began = time.perf_counter()
            os.write(self._ask, b"x")
            os.read(self._told, 1)
            self._times.append(time.perf_counter() - began)

    @property
    def median(self) -> float:
        return float(np.median(self._times))

    def close(self) -> None:
        os.write(self._ask, b"q")
        os.close(self._ask)
        os.waitpid(self._pid, 0)
        os.close(self._told)


def main(argv: Sequence[str] | None = None, out: Callable[[str], object] = print) -> int:
    """Measure, print the table, return the exit code."""
    parser = options(__doc__, quick="short rounds", folder=ROOT / "benchmarks" / "out")
    wanted = parser.parse_args(argv)
    effort = SMOKE if wanted.smoke else QUICK if wanted.quick else FULL
    torch.set_num_threads(1)  # workers are forked, and two cores are all that the sides have
    report = Report({} if wanted.smoke else BARS, out, other="the other side", file=wanted.json)
    needed = 6 * max(effort.rows * LOCOMOTION.row_bytes, effort.frames * PIXELS.row_bytes)
    with scratch(wanted.folder, needed) as folder:
        for result in measure_throughput(folder, LOCOMOTION, effort.rows, effort):
            report.add(result)
        for result in measure_throughput(folder, PIXELS, effort.frames, effort):
            report.add(result)
        for result in measure_latency(folder, effort):
            report.add(result)
    return report.end()


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main())
