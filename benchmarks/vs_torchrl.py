"""expstore compared with TorchRL's LazyMemmapStorage, and with its own targets; exits 1 below a bar.

Run as `make bench`; README.md explains the table. Both sides are used through their public buffers with their
defaults, in one process, taking turns. All measurements are warm.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # some distributions install a `benchmarks` of their own

import expstore  # noqa: E402
from benchmarks.probes import Probes  # noqa: E402
from benchmarks.report import Bar, Report, Result, options, slower, span  # noqa: E402
from benchmarks.timing import Case, alternate, busy_thread, each_threads, touch_memory  # noqa: E402
from benchmarks.workloads import LOCOMOTION, PIXELS, Stream, Workload  # noqa: E402

BATCH = 256
MB = 1 << 20


def _times(limit: float) -> Bar:
    return Bar(limit, "x", at_least=True)


#: All measurements with their bars, in the order of the table.
BARS: dict[str, Bar] = {
    "locomotion/sample": _times(3),
    "locomotion/extend-filling": _times(2),
    "locomotion/extend-full": _times(2),
    "locomotion/add-filling": _times(3),
    "locomotion/add-full": _times(3),
    "locomotion/extend-busy": Bar(3, "x its quiet time"),
    "pixels/sample": _times(8),
    "pixels/extend-filling": _times(2),
    "pixels/extend-full": _times(2),
    "pixels/add-filling": _times(3),
    "pixels/add-full": _times(3),
    "reopen/closed": Bar(0.5, " s"),
    "reopen/killed": Bar(0.5, " s"),
    "memory/growth": Bar(300, " MB"),
    "cli/help": Bar(0.5, " s"),
    "cli/info": Bar(1, " s"),
    "cli/sql": Bar(1, " s"),
}


@dataclass(frozen=True)
class Effort:
    """Sizes of the benchmark. `wide_calls` is for calls that write megabytes, `busy_calls` for TorchRL."""

    rounds: int = 5
    calls: int = 400
    wide_calls: int = 10
    busy_calls: int = 100
    warm: int = 20
    warm_seconds: float = 2.0
    repeats: int = 5
    pool: int = 40
    locomotion: Workload = LOCOMOTION
    pixels: Workload = PIXELS
    memory_rows: int = 10_000_000
    memory_extend_rows: int = 10_000


FULL = Effort()
QUICK = Effort(
    calls=100,
    wide_calls=4,
    busy_calls=100,
    repeats=3,
    locomotion=LOCOMOTION.scaled(rows=100_000, extend_rows=1000),
    pixels=PIXELS.scaled(rows=12_000, extend_rows=1000),
    memory_rows=1_000_000,
)
SMOKE = Effort(
    rounds=1,
    calls=2,
    wide_calls=2,
    busy_calls=1,
    warm=1,
    warm_seconds=0.0,
    repeats=1,
    pool=2,
    locomotion=LOCOMOTION.scaled(rows=500, extend_rows=50),
    pixels=PIXELS.scaled(rows=100, extend_rows=10),
    memory_rows=5000,
    memory_extend_rows=500,
)


# -- the two sides ------------------------------------------------------------------------------------


def open_expstore(folder: Path, capacity: int) -> Any:
    return expstore.open(folder / "store.exp", capacity=capacity, batch_size=BATCH, layout="flat")


def open_torchrl(folder: Path, capacity: int) -> Any:
    from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer

    logging.getLogger("torchrl").setLevel(logging.WARNING)
    storage = LazyMemmapStorage(capacity, scratch_dir=str(folder / "torchrl"))
    return TensorDictReplayBuffer(storage=storage, batch_size=BATCH)


class Pair:
    """Hold two buffers of one capacity, with separate inputs (TorchRL writes into its inputs)."""

    def __init__(self, folder: Path, workload: Workload, capacity: int, effort: Effort) -> None:
        folder.mkdir()
        self.folder = folder
        self.workload = workload
        self.capacity = capacity
        self.ours = open_expstore(folder, capacity)
        self.theirs = open_torchrl(folder, capacity)
        size = workload.extend_rows
        # Inputs of at most 128 MB; larger ones would not be read from warm memory.
        pool = max(1, min(effort.pool, 128 * MB // (workload.row_bytes * size)))
        self._batches = [Stream(workload, size, pool=pool) for _ in range(2)]
        self._rows = [Stream(workload, 0, pool=min(1000, size * pool)) for _ in range(2)]
        self._warm_up(effort.warm_seconds)

    def _warm_up(self, seconds: float) -> None:
        """Let both sides do what they do only once."""
        self.ours.extend(next(self._batches[0]))
        self.theirs.extend(next(self._batches[1]))
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.ours.sample()
            self.theirs.sample()

    def fill(self) -> None:
        for _ in range(self.capacity // self.workload.extend_rows + 1):
            self.ours.extend(next(self._batches[0]))
            self.theirs.extend(next(self._batches[1]))

    def cases(self, act: str, calls: int) -> list[Case]:
        """Return both sides' turns of `extend`, `add` or `sample`."""
        both: dict[str, list[Any]] = {
            "extend": self._batches,
            "add": self._rows,
            "sample": [repeat(BATCH), repeat(BATCH)],
        }
        sides = (self.ours, self.theirs)
        new_bytes = calls * self.workload.row_bytes * {"extend": self.workload.extend_rows}.get(act, 1)

        def settle() -> None:
            # Outstanding writes of expstore must not run during TorchRL's turn.
            self.ours.flush()
            if act != "sample" and len(self.ours) < self.capacity:
                touch_memory(2 * new_bytes)

        return [
            Case(getattr(side, act), one, calls, settle=settle)
            for side, one in zip(sides, both[act], strict=True)
        ]

    def close(self) -> None:
        self.ours.close()
        del self.theirs


class Bench:
    """Run the selected measurements; each method yields rows of the table."""

    def __init__(self, folder: Path, effort: Effort, only: str, threads: Sequence[int]) -> None:
        self.folder = folder
        self.effort = effort
        self.only = only
        self.threads = threads

    def wants(self, *names: str) -> bool:
        return any(self.only in name for name in names)

    def run(self) -> Iterator[Result]:
        with ExitStack() as stack:
            # forked before anything else runs here
            wanted = self.wants("reopen/closed", "reopen/killed", "memory/growth")
            yield from self._all(stack.enter_context(Probes()) if wanted else None)

    def _all(self, probes: Probes | None) -> Iterator[Result]:
        yield from self._filling(self.effort.locomotion)
        yield from self._full(self.effort.locomotion)
        store = self.folder / "full-locomotion" / "store.exp"
        if self.wants("reopen/closed", "reopen/killed", "cli/info", "cli/sql") and not store.exists():
            self._make_store(store)
        if probes is not None:
            yield from self._reopen(store, probes)
        yield from self._commands(store)
        shutil.rmtree(self.folder / "full-locomotion", ignore_errors=True)
        yield from self._filling(self.effort.pixels)
        yield from self._full(self.effort.pixels)
        shutil.rmtree(self.folder / "full-pixels", ignore_errors=True)
        if probes is not None and self.wants("memory/growth"):
            yield self._memory(probes)

    # -- compared with TorchRL ------------------------------------------------------------------------

    def _calls(self, workload: Workload, act: str) -> int:
        wide = workload.extend_rows * workload.row_bytes > 4 * MB
        return self.effort.wide_calls if act == "extend" and wide else self.effort.calls

    def _filling(self, workload: Workload) -> Iterator[Result]:
        """Measure writing to a ring that is not full yet."""
        names = {act: f"{workload.name}/{act}-filling" for act in ("add", "extend")}
        if not self.wants(*names.values()):
            return
        rounds = self.effort.rounds
        room = workload.extend_rows + sum(
            (rounds * self._calls(workload, act) + self.effort.warm) * rows
            for act, rows in (("add", 1), ("extend", workload.extend_rows))
        )
        folder = self.folder / f"filling-{workload.name}"
        pair = Pair(folder, workload, room + 1, self.effort)
        for act, name in names.items():
            if self.wants(name):
                yield self._compare(pair, act, name)
        if len(pair.ours) == pair.capacity:
            raise RuntimeError("the ring is full, though it should be filling")
        pair.close()
        shutil.rmtree(folder)

    def _full(self, workload: Workload) -> Iterator[Result]:
        """Measure a full ring: writing and reading."""
        acts = {"add-full": "add", "extend-full": "extend", "extend-busy": "", "sample": "sample"}
        names = {f"{workload.name}/{name}": act for name, act in acts.items()}
        wanted = [name for name in names if name in BARS and self.wants(name)]
        if not wanted:
            return
        pair = Pair(self.folder / f"full-{workload.name}", workload, workload.rows, self.effort)
        pair.fill()
        for more in each_threads(self.threads):
            for name in wanted:
                if names[name]:
                    yield self._compare(pair, names[name], name + more)
                elif not more:
                    yield self._busy(pair, name)
        pair.close()

    def _compare(self, pair: Pair, act: str, name: str) -> Result:
        cases = pair.cases(act, self._calls(pair.workload, act))
        ours, theirs = alternate(cases, rounds=self.effort.rounds, warm=self.effort.warm)
        ratio = theirs.median / ours.median
        return Result(
            name,
            ratio,
            span(ours),
            span(theirs),
            f"{ratio:.1f}x (means {theirs.mean / ours.mean:.1f}x)",
            data={"expstore": ours.to_json(), "torchrl": theirs.to_json()},
        )

    def _busy(self, pair: Pair, name: str) -> Result:
        ours, theirs = pair.cases("extend", self._calls(pair.workload, "extend"))
        few = replace(theirs, calls=self.effort.busy_calls)
        cases = [ours, replace(ours, around=busy_thread), theirs, replace(few, around=busy_thread)]
        series = alternate(cases, rounds=self.effort.rounds, warm=self.effort.warm)
        times = [series[n + 1].median / series[n].median for n in (0, 2)]
        names = ("expstore", "expstore_busy", "torchrl", "torchrl_busy")
        return Result(
            name,
            times[0],
            f"{times[0]:.1f}x: {slower(series[0], series[1])}",
            f"{times[1]:.1f}x: {slower(series[2], series[3])}",
            data={key: one.to_json() for key, one in zip(names, series, strict=True)},
        )

    # -- promises of its own --------------------------------------------------------------------------

    def _make_store(self, store: Path) -> None:
        store.parent.mkdir(exist_ok=True)
        workload = self.effort.locomotion
        stream = Stream(workload, workload.extend_rows, pool=self.effort.pool)
        with open_expstore(store.parent, workload.rows) as rb:
            for _ in range(workload.rows // workload.extend_rows):
                rb.extend(next(stream))

    def _reopen(self, store: Path, probes: Probes) -> Iterator[Result]:
        rng = random.Random(1)
        workload = self.effort.locomotion
        for name in ("reopen/closed", "reopen/killed"):
            if not self.wants(name):
                continue
            found = []
            for _ in range(self.effort.repeats):
                if name == "reopen/killed":
                    pid = probes.start(
                        "write_on", path=str(store), extend_rows=workload.extend_rows, calls=self.effort.calls
                    )
                    time.sleep(rng.uniform(0, 0.3))
                    probes.kill(pid)
                found.append(probes.run("reopen", path=str(store), batch_size=BATCH))
            seconds = sorted(one["open"] for one in found)
            worst = seconds[-1]
            yield Result(
                name,
                worst,
                f"{worst:.3f} s, the slowest of {len(seconds)} (fastest {seconds[0]:.3f})",
                note=f"{found[0]['rows']:,} rows" + (f"; {r}" if (r := found[-1]["recovered"]) else ""),
                data={"probes": found},
            )

    def _memory(self, probes: Probes) -> Result:
        effort = self.effort
        if not Path("/proc/self/status").exists():
            return Result("memory/growth", 0.0, "not measured", note="needs /proc")
        found = probes.run(
            "memory",
            path=str(self.folder / "memory.exp"),
            rows=effort.memory_rows,
            extend_rows=effort.memory_extend_rows,
            batch_size=BATCH,
        )
        shutil.rmtree(self.folder / "memory.exp")
        growth = found["growth"] / MB
        note = f"{found['rows']:,} rows, RssAnon after imports {found['before'] / MB:.0f} MB"
        return Result("memory/growth", growth, f"{growth:.0f} MB", note=note, data=found)

    def _commands(self, store: Path) -> Iterator[Result]:
        query = 'SELECT status, count(*), avg("return") FROM episodes GROUP BY status'
        wide = "SELECT count(*), avg(next.reward) FROM transitions"
        commands: dict[str, list[list[str]]] = {
            "cli/help": [["--help"]],
            "cli/info": [["info", str(store)]],
            "cli/sql": [["sql", str(store), query], ["sql", str(store), wide]],
        }
        for name, lines in commands.items():
            if self.wants(name):
                yield self._command(name, lines)

    def _command(self, name: str, lines: list[list[str]]) -> Result:
        # An installed package has compiled modules.
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        medians = []
        for words in lines:
            seconds = []
            warm = int(self.effort.repeats > 1)
            for number in range(warm + self.effort.repeats):
                started = time.perf_counter()
                done = subprocess.run(
                    [sys.executable, "-m", "expstore", *words],
                    cwd=ROOT,
                    env=environment,
                    capture_output=True,
                    text=True,
                    check=False,
                )
                if done.returncode:
                    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
                    return Result(name, float("inf"), f"exit code {done.returncode}", note=last)
                if number >= warm:
                    seconds.append(time.perf_counter() - started)
            medians.append(sorted(seconds)[len(seconds) // 2])
        text = ", ".join(f"{median:.2f} s" for median in medians)
        note = "episodes by status; a mean over transitions" if len(lines) > 1 else ""
        return Result(name, max(medians), text, note=note, data={"medians": medians})


# -- the run ------------------------------------------------------------------------------------------


@contextmanager
def scratch(parent: Path, needed: int) -> Iterator[Path]:
    """Create a folder for the stores and remove it in any case."""
    parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(parent).free
    if free < needed:
        sys.exit(f"{parent} has {free / 1e9:.1f} GB free, but {needed / 1e9:.1f} GB are needed; see --folder")
    folder = Path(tempfile.mkdtemp(prefix="stores-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def needed_bytes(effort: Effort) -> int:
    """Return the size of the largest pair of stores in bytes, with a margin."""
    sizes = [workload.rows * workload.row_bytes for workload in (effort.locomotion, effort.pixels)]
    sizes.append(effort.rounds * effort.calls * effort.locomotion.extend_rows * LOCOMOTION.row_bytes)
    sizes.append(effort.memory_rows * LOCOMOTION.row_bytes)
    return 3 * max(sizes)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = options(__doc__, quick="small stores and few calls", folder=ROOT / "benchmarks" / "out")
    parser.add_argument("--only", default="", metavar="TEXT", help="measurements with TEXT in their name")
    parser.add_argument("--bar", action="append", default=[], metavar="NAME=LIMIT", help="another bar")
    parsed = parser.parse_args(argv)
    if not any(parsed.only in name for name in BARS):
        parser.error(f"--only {parsed.only}: the measurements are {', '.join(BARS)}")
    try:
        given = {name: float(limit) for name, limit in (text.split("=") for text in parsed.bar)}
        parsed.bars = {name: replace(BARS[name], limit=limit) for name, limit in given.items()}
    except (KeyError, ValueError) as exc:
        parser.error(f"--bar takes NAME=LIMIT: {exc}")
    return parsed


def main(argv: Sequence[str] | None = None, out: Callable[[str], object] = print) -> int:
    """Measure, print the table, return the exit code."""
    wanted = _arguments(argv)
    effort = SMOKE if wanted.smoke else QUICK if wanted.quick else FULL
    bars: dict[str, Bar] = ({} if wanted.smoke else dict(BARS)) | wanted.bars
    report = Report(bars, out, other="TorchRL", file=wanted.json)
    with scratch(wanted.folder, needed_bytes(effort)) as folder:
        for result in Bench(folder, effort, wanted.only, wanted.threads).run():
            report.add(result)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
