"""Measurements that need a separate process: reopening, memory.

`Probes` forks one helper right after the imports, and the helper forks for each probe, so that each starts
like a fresh process. The helper itself never opens a store.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, Self

import expstore
from benchmarks.workloads import LOCOMOTION, Stream

Say = Callable[[dict[str, Any]], None]


class Probes:
    """Run probes, one at a time, each in a fresh fork of a helper process.

    The helper is forked in the constructor: create the object after importing expstore, before anything else
    runs. Close it by leaving its `with` block.
    """

    def __init__(self) -> None:
        _ = expstore.open  # loads the modules that a user's program would load
        asked, ask = os.pipe()
        told, tell = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(ask)
            os.close(told)
            _serve(asked, tell)
        os.close(asked)
        os.close(tell)
        self._ask_pipe = os.fdopen(ask, "w")
        self._told_pipe = os.fdopen(told)

    def run(self, probe: str, **arguments: Any) -> dict[str, Any]:
        """Run a probe to its end and return its result."""
        return self._ask(probe, arguments)

    def start(self, probe: str, **arguments: Any) -> int:
        """Run a probe until its first message and leave it running; return its process id."""
        return int(self._ask(probe, arguments)["pid"])

    def kill(self, pid: int) -> None:
        """Kill a probe that `start` began with SIGKILL, and wait for its end."""
        self._ask("kill", {"pid": pid})

    def _ask(self, probe: str, arguments: dict[str, Any]) -> dict[str, Any]:
        self._ask_pipe.write(json.dumps([probe, arguments]) + "\n")
        self._ask_pipe.flush()
        line = self._told_pipe.readline()
        found: dict[str, Any] = json.loads(line) if line else {"error": "the helper process ended"}
        if "error" in found:
            raise RuntimeError(f"probe {probe}: {found['error']}")
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ask_pipe.close()  # the helper ends when its input ends
        os.waitpid(self._pid, 0)
        self._told_pipe.close()


def _serve(asked: int, tell: int) -> NoReturn:
    """Fork for each request until the input ends."""

    def say(found: dict[str, Any]) -> None:
        os.write(tell, (json.dumps(found) + "\n").encode())

    for line in os.fdopen(asked):
        probe, arguments = json.loads(line)
        if probe == "kill":
            os.kill(arguments["pid"], signal.SIGKILL)
            os.waitpid(arguments["pid"], 0)
            say({})
            continue
        child = os.fork()
        if child == 0:
            try:
                PROBES[probe](say, **arguments)
            except BaseException as exc:
                traceback.print_exc()
                say({"error": f"{type(exc).__name__}: {exc}"})
            finally:
                os._exit(0)
        if probe != "write_on":
            os.waitpid(child, 0)
    os._exit(0)


# -- in the forks -------------------------------------------------------------------------------------


def reopen(say: Say, *, path: str, batch_size: int, prioritized: bool = False, loaded: bool = False) -> None:
    """Open a store and sample a batch; report how long that took.

    `prioritized` samples by priority; `loaded` loads the compiled loops beforehand.
    """
    sampler = expstore.PrioritizedSampler() if prioritized else None
    if loaded:
        importlib.import_module("expstore.kernels.sum_tree")
    started = time.perf_counter()
    rb = expstore.open(path, batch_size=batch_size, sampler=sampler)
    opened = time.perf_counter()
    rb.sample()
    sampled = time.perf_counter()
    rows, recovered = len(rb), rb.recovered
    rb.close()
    say(
        {
            "open": opened - started,
            "first_sample": sampled - opened,
            "close": time.perf_counter() - sampled,
            "rows": rows,
            "recovered": recovered,
        }
    )


def write_on(say: Say, *, path: str, extend_rows: int, calls: int) -> None:
    """Extend a store until killed; send a message after `calls` calls."""
    rb = expstore.open(path)
    for number, batch in enumerate(Stream(LOCOMOTION, extend_rows, pool=5, seed=5)):
        rb.extend(batch)
        if number == calls:
            say({"pid": os.getpid()})


def memory(say: Say, *, path: str, rows: int, extend_rows: int, batch_size: int) -> None:
    """Fill a ring and then write a tenth of it again, while sampling; report the growth of RssAnon."""
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
    say(
        {
            "before": before,
            "growth": peak - before,
            "growth_at_close": rss_anon() - before,
            "rows": stats["size"],
            "extends_per_second": calls / seconds,
            "wait_seconds": stats["wait_seconds"],
        }
    )


def rss_anon(pid: int | str = "self") -> int:
    """Return the anonymous resident memory of a process (by default this one) in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/{pid}/status has no RssAnon")


PROBES: dict[str, Callable[..., None]] = {"memory": memory, "reopen": reopen, "write_on": write_on}
