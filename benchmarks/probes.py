"""Measurements that need a fresh process: opening a store, writing until a kill, memory.

`run_probe` and `kill_writer` start this module in a process that has done nothing but the imports.
"""

from __future__ import annotations

import importlib
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import expstore
from benchmarks.workloads import LOCOMOTION, Stream

ROOT = Path(__file__).resolve().parents[1]


def run_probe(probe: str, **arguments: Any) -> dict[str, Any]:
    """Run a function of this module in a fresh process; return its result."""
    done = subprocess.run(_command(probe, arguments), cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"probe {probe} ended with {done.returncode}: {done.stderr.strip()[-400:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def kill_writer(path: Path, *, extend_rows: int, calls: int, seed: int) -> None:
    """Let a process extend a store, and kill it with SIGKILL amid a write, some time after `calls` calls."""
    command = _command("write_on", {"path": str(path), "extend_rows": extend_rows, "calls": calls})
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        if not writer.stdout.readline():
            raise RuntimeError(f"the writer of {path} ended with {writer.wait()}")
        time.sleep(random.Random(seed).uniform(0, 0.3))
        writer.kill()


def _command(probe: str, arguments: dict[str, Any]) -> list[str]:
    return [sys.executable, "-m", "benchmarks.probes", probe, json.dumps(arguments)]


# -- in the fresh process -----------------------------------------------------------------------------


def reopen(*, path: str, batch_size: int, prioritized: bool = False) -> dict[str, Any]:
    """Open a store and sample a batch; the compiled loops are loaded before."""
    importlib.import_module("expstore.kernels.sum_tree")
    sampler = expstore.PrioritizedSampler() if prioritized else None
    started = time.perf_counter()
    rb = expstore.open(path, batch_size=batch_size, sampler=sampler)
    opened = time.perf_counter()
    rb.sample()
    sampled = time.perf_counter()
    facts = {"rows": len(rb), "recovered": rb.recovered}
    rb.close()
    return facts | {"open": opened - started, "first_sample": sampled - opened}


def write_on(*, path: str, extend_rows: int, calls: int) -> None:
    """Extend a store until killed; print a line after `calls` calls."""
    rb = expstore.open(path)
    for number, batch in enumerate(Stream(LOCOMOTION, extend_rows, pool=5, seed=5)):
        rb.extend(batch)
        if number == calls:
            print("writing", flush=True)


def memory(*, path: str, rows: int, extend_rows: int, batch_size: int) -> dict[str, Any]:
    """Fill a ring and write a tenth of it again, while sampling; return the growth of RssAnon."""
    before = peak = read_rss_anon()
    rb = expstore.open(path, capacity=rows, batch_size=batch_size)
    stream = Stream(LOCOMOTION, extend_rows, pool=2)
    for number in range(rows * 11 // 10 // extend_rows):
        rb.extend(next(stream))
        if number % 5 == 0:
            rb.sample()
            peak = max(peak, read_rss_anon())
    facts = {"before": before, "growth": peak - before, "rows": len(rb)}
    rb.close()
    return facts


def read_rss_anon(process: int | str = "self") -> int:
    """Return the anonymous resident memory of a process in bytes; by default of this one."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/{process}/status has no RssAnon")


if __name__ == "__main__":
    probes: dict[str, Callable[..., Any]] = {"memory": memory, "reopen": reopen, "write_on": write_on}
    _ = expstore.open  # loads the modules that a user's program would load
    print(json.dumps(probes[sys.argv[1]](**json.loads(sys.argv[2]))))
