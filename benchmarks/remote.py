"""A served store on this machine: single batches, streamed batches, writes.

Run as `python -m benchmarks.remote`; exits 1 below a bar. The server runs in its own process.
"""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import expstore
from benchmarks.probes import ROOT, read_rss_anon
from benchmarks.report import Bar, Result, Setup, at_least, run_program, span
from benchmarks.timing import Series
from benchmarks.workloads import LOCOMOTION, PIXELS, Workload

BATCH = 256
BARS = {
    "sample": at_least(400, " requests/s"),
    "stream": at_least(1.0, "M rows/s"),
    "stream/pixels": at_least(1.0, " GB/s"),
    "extend": at_least(200, " requests/s"),
    "memory": Bar(400, " MB"),
}


@dataclass(frozen=True)
class Effort:
    """Sizes of the benchmark: rows, calls of `sample`, seconds and first batches of a stream."""

    locomotion: Workload
    pixels: Workload
    calls: int
    seconds: float
    warm: int


FULL = Effort(
    LOCOMOTION.scaled(rows=200_000, extend_rows=1000),
    PIXELS.scaled(rows=20_000, extend_rows=500),
    1000,
    8.0,
    20,
)
SMOKE = Effort(
    LOCOMOTION.scaled(rows=1000, extend_rows=100), PIXELS.scaled(rows=100, extend_rows=50), 3, 0.05, 1
)


@contextmanager
def serve(folder: Path) -> Iterator[tuple[str, int]]:
    """Serve a folder of stores in a separate process; yield its address and process id."""
    command = [sys.executable, "-m", "expstore", "serve", str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as server:
        assert server.stdout is not None
        for line in server.stdout:
            if address := re.search(r"http://\S+:\d+", line):
                break
        else:
            raise RuntimeError("the server did not start")
        reader = threading.Thread(target=server.stdout.read, daemon=True)  # a full pipe would block it
        reader.start()
        try:
            yield address[0], server.pid
        finally:
            server.terminate()
            server.wait(60)


def measure(setup: Setup) -> Iterator[Result]:
    effort = SMOKE if setup.smoke else FULL
    for workload in (effort.locomotion, effort.pixels):
        path = setup.folder / f"{workload.name}.exp"
        with expstore.open(path, capacity=workload.rows, seed=1, layout="flat") as rb:
            for start in range(0, workload.rows, workload.extend_rows):
                rb.extend(workload.batch(workload.extend_rows, start=start, seed=start))
    with serve(setup.folder) as (url, process):
        yield measure_samples(url, effort)
        for workload in (effort.locomotion, effort.pixels):
            yield measure_stream(url, workload, effort)
        yield measure_extends(url, effort)
        yield measure_memory(url, process, effort)
    yield measure_limit(min(effort.seconds, 3.0))


def measure_samples(url: str, effort: Effort) -> Result:
    with expstore.connect(f"{url}/locomotion", batch_size=BATCH) as rb:
        series = _time_calls(rb.sample, effort.calls)
    return _rate("sample", series, f"{BATCH} locomotion rows")


def measure_extends(url: str, effort: Effort) -> Result:
    workload = effort.locomotion
    batch = workload.batch(workload.extend_rows, seed=7)
    with expstore.connect(f"{url}/locomotion") as rb:
        series = _time_calls(lambda: rb.extend(batch), effort.calls // 2)
    return _rate("extend", series, f"{workload.extend_rows} rows a call")


def measure_memory(url: str, process: int, effort: Effort) -> Result:
    """Measure the server's own memory while three clients sample, extend and ask SQL.

    Pages of libraries and of the store's files are not its own: other processes share them, and the system
    drops them when memory is short.
    """
    batch = effort.locomotion.batch(effort.locomotion.extend_rows, seed=8)

    def work(number: int) -> None:
        with expstore.connect(f"{url}/locomotion", batch_size=BATCH) as rb:
            for _ in range(effort.calls // 5):
                rb.sample()
                rb.extend(batch, source=f"client-{number}")
            rb.sql("SELECT count(*) FROM transitions").fetchall()

    with ThreadPoolExecutor(3) as clients:
        list(clients.map(work, range(3)))
    size = read_rss_anon(process) / 1e6
    return Result("memory", size, f"{size:.0f} MB", note="RssAnon of the server with three clients")


def _rate(name: str, series: Series, note: str) -> Result:
    rate = 1 / series.median
    return Result(name, rate, f"{rate:.0f} requests/s, {span(series)}", note=note)


def measure_stream(url: str, workload: Workload, effort: Effort) -> Result:
    rows = 0
    with expstore.connect(f"{url}/{workload.name}", batch_size=BATCH) as rb:
        batches = rb.stream()
        for _ in range(effort.warm):
            next(batches)
        started = time.perf_counter()
        while (seconds := time.perf_counter() - started) < effort.seconds:
            rows += next(batches).numel()
        batches.close()
    millions, gigabytes = rows / seconds / 1e6, rows * workload.row_bytes / seconds / 1e9
    text = f"{millions:.2f}M rows/s, {gigabytes:.2f} GB/s"
    note = f"{workload.row_bytes} B a row, {BATCH} a batch"
    if workload.name == "pixels":
        return Result("stream/pixels", gigabytes, text, note=note)
    return Result("stream", millions, text, note=note)


def measure_limit(seconds: float) -> Result:
    """Measure the throughput of a loopback socket between two processes."""
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


def _time_calls(act: Callable[[], Any], calls: int) -> Series:
    for _ in range(min(20, calls)):
        act()
    times = []
    for _ in range(calls):
        started = time.perf_counter()
        act()
        times.append(time.perf_counter() - started)
    return Series([times])


if __name__ == "__main__":
    sys.exit(run_program(measure, BARS, gigabytes=1.2))
