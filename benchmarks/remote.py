"""A served store on this machine, compared with Reverb's client: single batches, streamed batches, writes.

Run as `python benchmarks/remote.py`; exits 1 below a bar. The server runs in its own process, and so does
Reverb, in an environment that has it: `--reverb PYTHON` names its interpreter; without it Reverb is left out.
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import subprocess
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
from benchmarks.timing import Series  # noqa: E402
from benchmarks.vs_torchrl import scratch  # noqa: E402
from benchmarks.workloads import LOCOMOTION, PIXELS, Workload  # noqa: E402

BATCH = 256
BARS = {
    "sample": Bar(400, " requests/s", at_least=True),
    "stream": Bar(1.0, "M rows/s", at_least=True),
    "stream/pixels": Bar(1.0, " GB/s", at_least=True),
    "extend": Bar(200, " requests/s", at_least=True),
    "reverb": Bar(5, "x its rows/s", at_least=True),
}


@dataclass(frozen=True)
class Effort:
    """Sizes of the benchmark."""

    locomotion: Workload
    pixels: Workload
    calls: int
    seconds: float


FULL = Effort(
    LOCOMOTION.scaled(rows=200_000, extend_rows=1000), PIXELS.scaled(rows=20_000, extend_rows=500), 1000, 8.0
)
QUICK = Effort(
    LOCOMOTION.scaled(rows=50_000, extend_rows=1000), PIXELS.scaled(rows=4_000, extend_rows=500), 200, 2.0
)
SMOKE = Effort(
    LOCOMOTION.scaled(rows=1000, extend_rows=100), PIXELS.scaled(rows=100, extend_rows=50), 3, 0.05
)


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Serve a folder of stores in a separate process; yield its address."""
    command = [sys.executable, "-m", "expstore", "serve", str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as server:
        assert server.stdout is not None
        for line in server.stdout:
            if found := re.search(r"http://\S+:\d+", line):
                break
        else:
            raise RuntimeError("the server did not start")
        reading = threading.Thread(target=server.stdout.read, daemon=True)  # a full pipe would block it
        reading.start()
        try:
            yield found[0]
        finally:
            server.terminate()
            server.wait(60)


class Remote:
    """Measure one server."""

    def __init__(self, folder: Path, effort: Effort, *, only: str, reverb: str | None) -> None:
        self.folder, self.effort = folder, effort
        self.only, self.reverb = only, reverb
        self.rows_per_second = 0.0

    def run(self) -> Iterator[Result]:
        """Fill two stores, serve them, and measure."""
        effort = self.effort
        for workload in (effort.locomotion, effort.pixels):
            path = self.folder / f"{workload.name}.exp"
            with expstore.open(path, capacity=workload.rows, seed=1, layout="flat") as rb:
                for start in range(0, workload.rows, workload.extend_rows):
                    rb.extend(workload.batch(workload.extend_rows, start=start, seed=start))
        measurements: dict[str, Callable[[str], Result]] = {
            "sample": self._sample,
            "stream": lambda url: self._stream(url, "stream", effort.locomotion),
            "stream/pixels": lambda url: self._stream(url, "stream/pixels", effort.pixels),
            "extend": self._extend,
        }
        with serving(self.folder) as url:
            for name, measure in measurements.items():
                if self.only in name:
                    yield measure(url)
        if self.reverb and self.only in "reverb":
            yield self._reverb()
        if self.only in "limit":
            yield self._limit()

    def _sample(self, url: str) -> Result:
        with expstore.connect(f"{url}/locomotion", batch_size=BATCH) as rb:
            times = _timed(rb.sample, self.effort.calls)
        rate = 1 / times.median
        return Result(
            "sample", rate, f"{rate:.0f} requests/s, {span(times)}", note=f"{BATCH} locomotion rows"
        )

    def _stream(self, url: str, name: str, workload: Workload) -> Result:
        count = size = 0
        with expstore.connect(f"{url}/{workload.name}", batch_size=BATCH) as rb:
            batches = rb.stream()
            for _ in range(20 if self.effort.seconds > 1 else 1):
                next(batches)
            started = time.perf_counter()
            while (seconds := time.perf_counter() - started) < self.effort.seconds:
                batch = next(batches)
                count += batch.numel()
                size += batch.numel() * workload.row_bytes
            batches.close()
        rows, gigabytes = count / seconds / 1e6, size / seconds / 1e9
        ours = f"{rows:.2f}M rows/s, {gigabytes:.2f} GB/s"
        if workload.name == "locomotion":
            self.rows_per_second = count / seconds
        value = gigabytes if name.endswith("pixels") else rows
        return Result(name, value, ours, note=f"{workload.row_bytes} B a row, {BATCH} a batch")

    def _extend(self, url: str) -> Result:
        workload = self.effort.locomotion
        batch = workload.batch(workload.extend_rows, seed=7)
        with expstore.connect(f"{url}/locomotion") as rb:
            times = _timed(lambda: rb.extend(batch), self.effort.calls // 2)
        rate = 1 / times.median
        return Result(
            "extend",
            rate,
            f"{rate:.0f} requests/s, {span(times)}",
            note=f"{workload.extend_rows} rows a call",
        )

    def _reverb(self) -> Result:
        peer = [
            str(self.reverb),
            str(ROOT / "benchmarks" / "reverb_peer.py"),
            str(BATCH),
            str(self.effort.seconds),
        ]
        done = subprocess.run(peer, capture_output=True, text=True, check=False)
        if done.returncode:
            return Result("reverb", float("inf"), "–", f"did not run: {done.stderr.strip()[-200:]}")
        told = json.loads(done.stdout.splitlines()[-1])
        best = max(told.values())
        theirs = ", ".join(f"{name} {rate / 1e3:.0f}k rows/s" for name, rate in told.items())
        ratio = self.rows_per_second / best
        return Result(
            "reverb", ratio, f"{self.rows_per_second / 1e3:.0f}k rows/s", theirs, f"{ratio:.1f}x", data=told
        )

    def _limit(self) -> Result:
        """Measure the throughput of a loopback socket between two processes."""
        seconds = min(self.effort.seconds, 3.0)
        sender = "import socket, sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1])))\n"
        sender += "b = bytes(1 << 20)\ntry:\n    while True: s.sendall(b)\nexcept OSError: pass"
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = str(server.getsockname()[1])
            with subprocess.Popen([sys.executable, "-c", sender, port]) as process:
                connection, _ = server.accept()
                memory, size, started = bytearray(1 << 20), 0, time.perf_counter()
                with connection:
                    while (passed := time.perf_counter() - started) < seconds:
                        size += connection.recv_into(memory)
                process.wait(30)
        rate = size / passed / 1e9
        return Result("limit", rate, f"{rate:.2f} GB/s", note="bytes through a loopback socket, MiB by MiB")


def _timed(act: Callable[[], Any], calls: int) -> Series:
    for _ in range(min(20, calls)):
        act()
    times = []
    for _ in range(calls):
        started = time.perf_counter()
        act()
        times.append(time.perf_counter() - started)
    return Series([times])


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = options(__doc__, quick="smaller stores, few calls", folder=ROOT / "benchmarks" / "out")
    parser.add_argument("--only", default="", metavar="TEXT", help="measurements with TEXT in their name")
    parser.add_argument("--reverb", metavar="PYTHON", help="an interpreter with dm-reverb")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None, out: Callable[[str], object] = print) -> int:
    """Measure, print the table, return the exit code."""
    wanted = _arguments(argv)
    effort = SMOKE if wanted.smoke else QUICK if wanted.quick else FULL
    needed = 3 * sum(w.rows * w.row_bytes for w in (effort.locomotion, effort.pixels))
    with scratch(wanted.folder, needed) as folder:
        report = Report({} if wanted.smoke else BARS, out, other="Reverb", file=wanted.json)
        if not wanted.reverb:
            report.skip("reverb", "pass an interpreter with dm-reverb: --reverb or REVERB_PYTHON")
        for result in Remote(folder, effort, only=wanted.only, reverb=wanted.reverb).run():
            report.add(result)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
