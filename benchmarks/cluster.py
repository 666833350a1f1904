"""Two shards behind one buffer, compared with one stream from one server: CPU time per row, of all processes.

Run as `python -m benchmarks.cluster`; exits 1 below a bar. The servers run in their own processes. The sides
alternate, so that other load on the machine affects both. If ray and torchrl are installed, TorchRL's
`RayReplayBuffer` (one actor, pickled TensorDicts) is one of the sides: CPU of this process and of the actor,
without Ray's own processes.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # some distributions install a `benchmarks` of their own

import expstore  # noqa: E402
from benchmarks.report import Bar, Report, Result, options  # noqa: E402
from benchmarks.vs_torchrl import scratch  # noqa: E402
from benchmarks.workloads import LOCOMOTION, Workload  # noqa: E402

BATCH, SHARDS = 256, 2
#: Numbers of batches that are drawn together.
AHEAD = (4, 16, 64)
RAY = "TorchRL's RayReplayBuffer"
BARS = {
    f"ahead={AHEAD[-1]}": Bar(1.25, "x the CPU of one stream"),
    RAY: Bar(10.0, f"x the CPU of ahead={AHEAD[-1]}", at_least=True),
}
#: A batch of RayReplayBuffer takes some ten times as long: fewer are measured.
RAY_SHARE = 8


@dataclass(frozen=True)
class Effort:
    """Sizes of the benchmark."""

    workload: Workload
    batches: int
    rounds: int


FULL = Effort(LOCOMOTION.scaled(rows=200_000, extend_rows=1000), 512, 9)
QUICK = Effort(LOCOMOTION.scaled(rows=20_000, extend_rows=1000), 128, 5)
SMOKE = Effort(LOCOMOTION.scaled(rows=1000, extend_rows=100), 64, 1)


@contextmanager
def serving(folder: Path) -> Iterator[tuple[str, int]]:
    """Serve a folder of stores in a separate process; yield its address and process id."""
    command = [sys.executable, "-m", "expstore", "serve", str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as server:
        assert server.stdout is not None
        try:
            line = server.stdout.readline()
            while "http://" not in line:
                assert line, "the server did not start"
                line = server.stdout.readline()
            yield line[line.index("http://") :].split()[0].rstrip(",."), server.pid
        finally:
            server.terminate()
            server.stdout.read()
            server.wait(60)


@contextmanager
def ray_buffer(workload: Workload) -> Iterator[tuple[Iterator[Any], int]]:
    """Fill a RayReplayBuffer; yield its batches, and the id of the process of its actor."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import ray
        from torchrl.data import LazyTensorStorage, RayReplayBuffer

        ray.init(
            num_cpus=2, include_dashboard=False, object_store_memory=256 << 20, logging_level="error",
            log_to_driver=False,
        )  # fmt: skip
        try:
            rb = RayReplayBuffer(
                storage=partial(LazyTensorStorage, workload.rows), batch_size=BATCH,
                remote_config={"num_cpus": 0},
            )  # fmt: skip
            for start in range(0, workload.rows, workload.extend_rows):
                rb.extend(workload.batch(workload.extend_rows, start=start, seed=start))
            process = ray.get(rb._rb.__ray_call__.remote(lambda _: os.getpid()))
            yield iter(rb.sample, None), process
        finally:
            ray.shutdown()


def cpu_seconds(processes: Sequence[int]) -> float:
    """Return the CPU time of this process and of others so far."""
    ticks = 0
    for process in processes:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def measure(batches: Iterator[Any], count: int, processes: Sequence[int]) -> float:
    """Return the CPU time per row of `count` batches in microseconds."""
    before = cpu_seconds(processes)
    for _ in range(count):
        next(batches)
    return (cpu_seconds(processes) - before) / (count * BATCH) * 1e6


def run(folder: Path, effort: Effort) -> Iterator[Result]:
    """Fill the stores, serve them, and measure."""
    workload = effort.workload
    for shard in range(SHARDS):
        with expstore.open(folder / str(shard) / "run.exp", capacity=workload.rows, seed=shard) as rb:
            for start in range(0, workload.rows, workload.extend_rows):
                rb.extend(workload.batch(workload.extend_rows, start=start, seed=start))
    with ExitStack() as stack:
        servers = [stack.enter_context(serving(folder / str(shard))) for shard in range(SHARDS)]
        urls, processes = [f"{url}/run" for url, _ in servers], [process for _, process in servers]
        one = stack.enter_context(expstore.connect(urls[0], batch_size=BATCH, seed=1))
        sides = {"one stream": one.stream()}
        for ahead in AHEAD:
            rb = stack.enter_context(expstore.connect(urls, batch_size=BATCH, seed=1, ahead=ahead))
            sides[f"ahead={ahead}"] = rb.stream()
        ours = list(sides.values())
        if importlib.util.find_spec("ray") and importlib.util.find_spec("torchrl"):
            sides[RAY], actor = stack.enter_context(ray_buffer(workload))
            processes.append(actor)
        counts = {name: effort.batches // (RAY_SHARE if name == RAY else 1) for name in sides}
        times: dict[str, list[float]] = {name: [] for name in sides}
        for name, batches in sides.items():
            measure(batches, min(counts[name], AHEAD[-1]), processes)
        for _ in range(effort.rounds):
            for name, batches in sides.items():
                times[name].append(measure(batches, counts[name], processes))
        for batches in ours:
            batches.close()
    for name, found in times.items():
        other = f"ahead={AHEAD[-1]}" if name == RAY else "one stream"
        mine, known = statistics.median(found), statistics.median(times[other])
        ratio = statistics.median(us / theirs for us, theirs in zip(found, times[other], strict=True))
        servers = {"one stream": "1 server", RAY: "1 actor"}.get(name, f"{SHARDS} servers")
        yield Result(
            name, ratio, f"{mine:.2f} µs CPU a row", f"{known:.2f} µs ({other})", f"{ratio:.2f}x",
            note=f"{servers}, {BATCH} locomotion rows a batch", data={"us": found},
        )  # fmt: skip


def main(argv: Sequence[str] | None = None, out: Callable[[str], object] = print) -> int:
    """Measure, print the table, return the exit code."""
    parser = options(__doc__, quick="smaller stores, few batches", folder=ROOT / "benchmarks" / "out")
    wanted: argparse.Namespace = parser.parse_args(argv)
    effort = SMOKE if wanted.smoke else QUICK if wanted.quick else FULL
    with scratch(wanted.folder, 6 * effort.workload.rows * effort.workload.row_bytes) as folder:
        report = Report({} if wanted.smoke else BARS, out, other="compared with", file=wanted.json)
        for result in run(folder, effort):
            report.add(result)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
