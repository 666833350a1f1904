"""Measurements that need a process of their own: reopening, memory.

`Probes` starts one helper that imports everything once and forks for each probe, so that each begins
right after the imports and has opened nothing. The helper never opens a store itself.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[1]


class Probes:
    """Run probes, one at a time, each in a fresh fork of a helper process."""

    def __init__(self) -> None:
        # Imports take seconds; they run beside those of the caller.
        self._helper = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.probes"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, probe: str, **arguments: Any) -> dict[str, Any]:
        """Run a probe to its end and return what it found."""
        return self._ask(probe, arguments)

    def start(self, probe: str, **arguments: Any) -> int:
        """Run a probe up to its first word and let it go on; return its process id."""
        return int(self._ask(probe, arguments)["pid"])

    def kill(self, pid: int) -> None:
        """Kill -9 what `start` began; it is gone when this returns."""
        self._ask("kill", {"pid": pid})

    def _ask(self, probe: str, arguments: dict[str, Any]) -> dict[str, Any]:
        if self._helper.stdin is None or self._helper.stdout is None:
            raise RuntimeError("the helper has no pipes")
        self._helper.stdin.write(json.dumps([probe, arguments]) + "\n")
        self._helper.stdin.flush()
        line = self._helper.stdout.readline()
        found: dict[str, Any] = json.loads(line) if line else {"error": "the helper process ended"}
        if "error" in found:
            raise RuntimeError(f"probe {probe}: {found['error']}")
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._helper.communicate()  # the end of its input ends it


# -- in the forks -------------------------------------------------------------------------------------


def reopen(*, path: str, batch_size: int) -> dict[str, Any]:
    """Open a store and draw a batch; say how long that took."""
    import expstore

    started = time.perf_counter()
    rb = expstore.open(path, batch_size=batch_size)
    opened = time.perf_counter()
    rb.sample()
    sampled = time.perf_counter()
    rows, recovered = len(rb), rb.recovered
    rb.close()
    return {
        "open": opened - started,
        "first_sample": sampled - opened,
        "close": time.perf_counter() - sampled,
        "rows": rows,
        "recovered": recovered,
    }


def write_on(*, path: str, extend_rows: int, calls: int) -> dict[str, Any]:
    """Extend a store until killed; speak after `calls` calls."""
    import expstore
    from benchmarks.workloads import LOCOMOTION, Stream

    rb = expstore.open(path)
    for number, batch in enumerate(Stream(LOCOMOTION, extend_rows, pool=5, seed=5)):
        rb.extend(batch)
        if number == calls:
            _say({"pid": os.getpid()})
    raise RuntimeError("unreachable")


def memory(*, path: str, rows: int, extend_rows: int, batch_size: int) -> dict[str, Any]:
    """Fill a ring, go on for a tenth of it, sample all the while; say by how much RssAnon grew."""
    import expstore
    from benchmarks.workloads import LOCOMOTION, Stream

    before = peak = rss_anon()
    calls = rows * 11 // 10 // extend_rows
    rb = expstore.open(path, capacity=rows, batch_size=batch_size)
    stream = Stream(LOCOMOTION, extend_rows, pool=2)
    started = time.perf_counter()
    for number in range(calls):
        rb.extend(next(stream))
        if number % 5 == 0:
            rb.sample()
            peak = max(peak, rss_anon())
    seconds = time.perf_counter() - started
    stats = rb.stats()
    rb.close()
    return {
        "before": before,
        "growth": peak - before,
        "growth_at_close": rss_anon() - before,
        "rows": stats["size"],
        "extends_per_second": calls / seconds,
        "wait_seconds": stats["wait_seconds"],
    }


def rss_anon() -> int:
    """Return this process's anonymous resident memory in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status does not say RssAnon")


PROBES = {"memory": memory, "reopen": reopen, "write_on": write_on}


def _say(found: dict[str, Any]) -> None:
    os.write(1, (json.dumps(found) + "\n").encode())


def serve() -> None:
    """Import everything, then fork for each line of the input."""
    import expstore
    from benchmarks import workloads

    _ = expstore.open, workloads  # loads them
    for line in sys.stdin:
        probe, arguments = json.loads(line)
        if probe == "kill":
            os.kill(arguments["pid"], signal.SIGKILL)
            os.waitpid(arguments["pid"], 0)
            _say({})
            continue
        child = os.fork()
        if child == 0:
            code = 1
            try:
                _say(PROBES[probe](**arguments))
                code = 0
            except BaseException as exc:
                traceback.print_exc()
                _say({"error": f"{type(exc).__name__}: {exc}"})
            finally:
                os._exit(code)
        if probe != "write_on":
            os.waitpid(child, 0)


if __name__ == "__main__":
    serve()
