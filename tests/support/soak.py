"""Run a server under steady work, and check that its memory, descriptors and threads stay as they are.

    python -m tests.support.soak --minutes 60

A server has a ring of rows. Clients extend it, sample by priority and uniformly, set priorities and ask SQL,
at a fixed pace; followers in processes of their own sample it, and open it anew now and then; every minute a
version is made. `/proc` says what the server uses (Linux). The first quarter of the time is not compared:
caches fill then.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import expstore
from tests.support.batches import transitions

#: The ring is overwritten every half minute.
CAPACITY = 20_000
ROWS = 50
#: Clients, and seconds from one round of a client to its next.
CLIENTS, PERIOD = 32, 2.0
FOLLOWERS = 2
#: Growth of memory that is allowed: this share and these bytes. Facts about episodes remain after their rows.
SHARE, BYTES = 0.05, 16 << 20
#: Growth in number that is allowed. Threads of the server's pool come and go with the requests at one time; a
#: thread or a file that each connection left behind would be thousands.
NUMBERS = {"descriptors": 4, "threads": CLIENTS // 2}


@dataclass(frozen=True)
class Use:
    """What a process uses at one time.

    Args:
        seconds: Since the beginning.
        memory: Bytes of anonymous memory.
        descriptors: Number of open files and sockets.
        threads: Number of threads.
    """

    seconds: float
    memory: int
    descriptors: int
    threads: int

    @classmethod
    def of(cls, pid: int, seconds: float) -> Use:
        """Read what a process uses now."""
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        facts = dict(line.split(":", 1) for line in lines)
        memory = int(facts["RssAnon"].split()[0]) << 10
        return cls(seconds, memory, len(os.listdir(f"/proc/{pid}/fd")), int(facts["Threads"]))


def find_growth(uses: Sequence[Use]) -> list[str]:
    """Return what has grown from the second quarter of the time to the last one: a line for each."""
    part = len(uses) // 4
    before, after = uses[part : 2 * part], uses[-part:]
    found = []
    for name in ("memory", "descriptors", "threads"):
        first = median(getattr(use, name) for use in before)
        last = median(getattr(use, name) for use in after)
        allowed = first * SHARE + BYTES if name == "memory" else NUMBERS[name]
        if last - first > allowed:
            found.append(f"{name}: {first:,.0f} -> {last:,.0f}")
    return found


class Client(threading.Thread):
    """A client that does a round of calls at a fixed pace until it is told to stop."""

    def __init__(self, url: str, number: int, stopping: threading.Event) -> None:
        super().__init__()
        self._url, self._number, self._stopping = url, number, stopping
        self.rounds, self.error = 0, ""

    def run(self) -> None:
        try:
            self._work()
        except Exception as exc:
            self.error = f"{type(exc).__name__}: {exc}"

    def _work(self) -> None:
        rng = np.random.default_rng(self._number)
        sampler = "prioritized" if self._number % 2 else None
        due = time.monotonic() + PERIOD * self._number / CLIENTS
        while not self._stopping.wait(max(0.0, due - time.monotonic())):
            # A connection lives for some rounds: connections come and go.
            with expstore.connect(self._url, batch_size=64, sampler=sampler, wait=30.0) as rb:
                for _ in range(10):
                    rb.extend(
                        transitions(ROWS, start=ROWS * self.rounds, episode_length=20),
                        source=f"client-{self._number}",
                    )
                    batch = rb.sample()
                    if sampler:
                        rb.update_priority(id=batch["id"], priority=rng.random(len(batch)) + 0.1)
                    if self.rounds % 20 == 0:
                        rb.sql("SELECT status, count(*), avg(length) FROM episodes GROUP BY status")
                    self.rounds += 1
                    due += PERIOD
                    if self._stopping.wait(max(0.0, due - time.monotonic())):
                        return


def follow(path: Path, stopping: Any, failed: Any) -> None:
    """Sample a store that another process writes, and open it anew every minute."""
    try:
        while not stopping.is_set():
            with expstore.open(path, mode="r", batch_size=64) as rb:
                for _ in range(60):
                    if len(rb):
                        rb.sample()
                    if stopping.wait(1.0):
                        return
    except Exception:
        failed.set()
        raise


@contextmanager
def serve(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Serve a folder in a process that is started as users start it; yield it and the store's address."""
    command = [sys.executable, "-m", "expstore", "serve", str(folder), "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        try:
            yield child, f"{json.loads(child.stdout.readline())['listening']}/run"
        finally:
            child.terminate()
            child.wait(60)


def soak(minutes: float, folder: Path, out: Callable[[str], object]) -> tuple[list[Use], list[str]]:
    """Run the work; return what the server used, and what went wrong."""
    context = multiprocessing.get_context("spawn")
    over, failed, stopping = context.Event(), context.Event(), threading.Event()
    expstore.open(folder / "run.exp", capacity=CAPACITY).close()
    with serve(folder) as (child, url):
        clients = [Client(url, number, stopping) for number in range(CLIENTS)]
        for client in clients:
            client.start()
        followers = [
            context.Process(target=follow, args=(folder / "run.exp", over, failed)) for _ in range(FOLLOWERS)
        ]
        for follower in followers:
            follower.start()
        began, uses = time.monotonic(), []
        pause = min(10.0, minutes * 60 / 40)
        with expstore.connect(url) as rb:
            versions = 0
            while (passed := time.monotonic() - began) < minutes * 60:
                if passed > 60 * versions:
                    rb.dumps()
                    versions += 1
                uses.append(Use.of(child.pid, passed))
                stopping.wait(pause)
        stopping.set()
        over.set()
        for client in clients:
            client.join(60)
        for follower in followers:
            follower.join(60)
        problems = [f"client {client.name}: {client.error}" for client in clients if client.error]
        if failed.is_set():
            problems.append("a follower failed")
        out(f"{sum(client.rounds for client in clients):,} rounds of {CLIENTS} clients, {versions} versions")
    return uses, problems + find_growth(uses)


def main(arguments: Sequence[str] | None = None, out: Callable[[str], object] = print) -> int:
    """Run, print what the server used, return 1 if something grew or failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="how long")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="expstore-soak-") as folder:
        uses, problems = soak(args.minutes, Path(folder), out)
    if args.json:
        args.json.write_text(json.dumps([asdict(use) for use in uses]))
    out("    time     memory  descriptors  threads")
    for use in uses[:: max(1, len(uses) // 12)]:
        out(f"{use.seconds:7.0f}s  {use.memory / 1e6:6.1f} MB  {use.descriptors:11d}  {use.threads:7d}")
    for problem in problems:
        out(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
