"""Sampling from a store four times as large as the memory of its process, compared with TorchRL's maps.

Run as `python benchmarks/larger_than_memory.py`; exits 1 below a bar. Each side is a process in its own
memory cgroup, whose limit includes the page cache. This needs Linux, and a memory controller that the user
may write to. The processes are forked after the imports, so the limit covers the memory for opening and
reading a store. Plain reads are `pread`s of as many bytes by 16 threads without readahead.
"""

from __future__ import annotations

import gc
import json
import logging
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # some distributions install a `benchmarks` of their own

import numpy as np  # noqa: E402
from torchrl import data  # noqa: E402

import expstore  # noqa: E402
from benchmarks.report import Bar, Report, Result, options, span  # noqa: E402
from benchmarks.timing import Series  # noqa: E402
from benchmarks.vs_torchrl import scratch  # noqa: E402
from benchmarks.workloads import PIXELS, TRAJECTORY, Leaf, Stream, Workload  # noqa: E402

BATCH, SLICES = 256, 8
MB = 1 << 20
CGROUPS = Path("/sys/fs/cgroup")
ACTS = ("sample", "slices")
SIDES = ("expstore", "torchrl", "plain")
PREFIX = "expstore-benchmark-"
#: Threads of plain reads, that is the number of requests waiting at the disk at the same time.
READERS = 16

BARS = {
    "larger-than-memory/sample": Bar(1.5, "x", at_least=True),
    "larger-than-memory/slices": Bar(5, "x", at_least=True),
}
#: Image rows with trajectory ids, and the bytes of one of their two observations.
ROWS = replace(PIXELS, leaves=(*PIXELS.leaves, Leaf(TRAJECTORY, "int64", ())))
OBSERVATION = ROWS.leaves[0].row_bytes


@dataclass(frozen=True)
class Effort:
    """Sizes of the benchmark.

    Args:
        limit: Memory of each side in bytes.
        times: Ratio of the size of a store to the limit.
        extend_rows: Rows per call that fills the stores.
        warm_seconds: Seconds that each side reads before it is measured.
        seconds: Length of a block, which has at least two calls.
        rounds: Blocks of each side.
    """

    limit: int = 1 << 30
    times: float = 4.0
    extend_rows: int = 1000
    warm_seconds: float = 8.0
    seconds: float = 6.0
    rounds: int = 4

    @property
    def workload(self) -> Workload:
        """The rows of a store."""
        calls = int(self.times * self.limit) // ROWS.row_bytes // self.extend_rows
        return ROWS.scaled(rows=calls * self.extend_rows, extend_rows=self.extend_rows)


FULL = Effort()
QUICK = Effort(limit=256 * MB, warm_seconds=1.0, seconds=1.0, rounds=2)
SMOKE = Effort(limit=512 * MB, times=0.02, extend_rows=100, warm_seconds=0.0, seconds=0.0, rounds=1)


# -- memory cgroups -----------------------------------------------------------------------------------


class NoCgroup(Exception):
    """Raised if no memory cgroup can be created."""


@contextmanager
def memory_cgroup(name: str, limit: int) -> Iterator[Path]:
    """Create a cgroup with `limit` bytes of memory, page cache included; remove it at the end.

    Raises:
        NoCgroup: There is no memory controller, or the user may not write to it.
    """
    version_1 = (CGROUPS / "memory").is_dir()
    group = (CGROUPS / "memory" if version_1 else CGROUPS) / name
    try:
        group.mkdir()
    except OSError as exc:
        raise NoCgroup(f"a memory cgroup cannot be made: {exc}") from exc
    try:
        try:
            (group / ("memory.limit_in_bytes" if version_1 else "memory.max")).write_text(str(limit))
        except OSError as exc:
            raise NoCgroup(f"the memory of a cgroup cannot be limited: {exc}") from exc
        yield group
    finally:
        _remove(group)


def _remove(group: Path) -> None:
    """Remove a cgroup whose processes have ended; the kernel may count them for another moment."""
    until = time.monotonic() + 10
    while True:
        try:
            return group.rmdir()
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def remove_leftovers() -> None:
    """Remove the cgroups of runs that were killed."""
    for group in [*CGROUPS.glob(f"{PREFIX}*"), *(CGROUPS / "memory").glob(f"{PREFIX}*")]:
        if not Path(f"/proc/{group.name.split('-')[2]}").exists():
            with suppress(OSError):  # a process of that run is still running
                group.rmdir()


# -- in the cgroups -----------------------------------------------------------------------------------


class Ours:
    """Sample from a store."""

    def __init__(self, folder: Path, act: str) -> None:
        sampler = expstore.SliceSampler(num_slices=SLICES) if act == "slices" else None
        self._rb = expstore.open(folder / "store.exp", batch_size=BATCH, sampler=sampler, seed=1)
        self.read, self.close = self._rb.sample, self._rb.close


class Theirs:
    """Sample from TorchRL's memory maps."""

    def __init__(self, folder: Path, act: str) -> None:
        path = folder / "torchrl"
        rows = json.loads((path / "storage_metadata.json").read_text())["len"]
        storage = data.LazyMemmapStorage(rows, scratch_dir=str(path))
        storage.loads(path)
        sampler = data.SliceSampler(num_slices=SLICES, traj_key=TRAJECTORY) if act == "slices" else None
        rb = data.TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=BATCH)
        self.read = rb.sample

    def close(self) -> None:
        """Unmap the files by dropping the only references to them."""
        del self.read


class Plain:
    """Read both observations of as many rows with plain reads."""

    def __init__(self, folder: Path, act: str) -> None:
        rows = BATCH // SLICES if act == "slices" else 1
        self._size, self._count = rows * OBSERVATION, 2 * BATCH // rows
        self._fd = os.open(folder / "plain", os.O_RDONLY)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)
        self._last = os.fstat(self._fd).st_size // OBSERVATION - rows
        self._rng = np.random.default_rng(1)
        self._pool = ThreadPoolExecutor(READERS)

    def read(self) -> None:
        """Read one batch."""
        places = self._rng.integers(0, self._last, self._count) * OBSERVATION
        list(self._pool.map(self._read_all, np.array_split(places, min(READERS, self._count))))

    def _read_all(self, places: np.ndarray[Any, Any]) -> None:
        for place in places.tolist():
            os.pread(self._fd, self._size, place)

    def close(self) -> None:
        """Close the file."""
        self._pool.shutdown()
        os.close(self._fd)


KINDS: dict[str, Callable[[Path, str], Any]] = {"expstore": Ours, "torchrl": Theirs, "plain": Plain}


def serve(pipe: Connection, kind: str) -> None:
    """Serve the requests of the parent process until it closes the pipe."""
    opened: Any = None
    with suppress(EOFError):
        while True:
            act, *given = pipe.recv()
            try:
                found = None
                if act == "join":
                    (given[0] / "cgroup.procs").write_text(str(os.getpid()))
                elif act == "open":
                    opened = KINDS[kind](*given)
                elif act == "read":
                    found = read_for(opened.read, *given)
                else:
                    opened.close()
                    opened = None
                    gc.collect()
            except Exception as exc:
                pipe.send(exc)
            else:
                pipe.send(found)


def read_for(read: Callable[[], object], seconds: float) -> list[float]:
    """Call a function for some seconds, at least twice; return the time of each call."""
    times: list[float] = []
    clock, until = time.perf_counter, time.perf_counter() + seconds
    gc.disable()
    while len(times) < 2 or clock() < until:
        started = clock()
        read()
        times.append(clock() - started)
    gc.enable()
    return times


class Reader:
    """A process that reads one side's files."""

    def __init__(self, kind: str) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, kind), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, act: str, *given: Any) -> Any:
        """Send a request to the process; return its result."""
        self._pipe.send((act, *given))
        try:
            found = self._pipe.recv()
        except EOFError:
            self._process.join()
            raise RuntimeError(f"a reader ended at {act}: exit code {self._process.exitcode}") from None
        if isinstance(found, Exception):
            raise found
        return found

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()
        self._pipe.close()


# -- the measurements ---------------------------------------------------------------------------------


def make_stores(folder: Path, workload: Workload) -> None:
    """Write the same number of rows for each side, and close the files."""
    rows, each = workload.rows, workload.extend_rows
    stream = Stream(workload, each, pool=4)
    storage = data.LazyMemmapStorage(rows, scratch_dir=str(folder / "torchrl"))
    theirs = data.TensorDictReplayBuffer(storage=storage, batch_size=BATCH)
    with (
        expstore.open(folder / "store.exp", capacity=rows, layout="flat", seed=1) as ours,
        (folder / "plain").open("wb") as plain,
    ):
        for _ in range(rows // each):
            batch = next(stream)
            ours.extend(batch)
            theirs.extend(batch)
            for name in ("observation", ("next", "observation")):
                plain.write(batch[name].numpy())
    storage.dumps(folder / "torchrl")


def drop_pages(folder: Path) -> None:
    """Drop a folder's files from the page cache; no process may map them."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDWR)
            try:
                os.fdatasync(fd)  # dirty pages cannot be dropped
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def measure(readers: dict[str, Reader], folder: Path, effort: Effort) -> Iterator[Result]:
    """Let all sides read in turns, every second round in reverse order."""
    for act in ACTS:
        drop_pages(folder)
        blocks: dict[str, list[list[float]]] = {name: [] for name in readers}
        for reader in readers.values():
            reader.ask("open", folder, act)
            reader.ask("read", effort.warm_seconds)
        for number in range(effort.rounds):
            for name in list(readers)[:: -1 if number % 2 else 1]:
                blocks[name].append(readers[name].ask("read", effort.seconds))
        for reader in readers.values():
            reader.ask("close")
        yield _result(act, effort, *(Series(blocks[name]) for name in SIDES))


def _result(act: str, effort: Effort, ours: Series, theirs: Series, plain: Series) -> Result:
    workload = effort.workload
    ratio = theirs.median / ours.median
    p99 = [float(np.percentile(np.concatenate(one.blocks), 99)) for one in (ours, theirs, plain)]
    note = (
        f"{workload.rows * workload.row_bytes / MB:,.0f} MB of {workload.rows:,} rows in "
        f"{effort.limit // MB} MB of memory; p99 {p99[0] * 1e3:.1f} and {p99[1] * 1e3:.1f} ms; "
        f"plain reads {span(plain)}"
    )
    series = {"expstore": ours.to_json(), "torchrl": theirs.to_json()}
    limit = {"p50": plain.median, "p99": p99[2]}
    return Result(
        f"larger-than-memory/{act}",
        ratio,
        span(ours),
        span(theirs),
        f"{ratio:.2f}x (means {theirs.mean / ours.mean:.2f}x)",
        note,
        series | {"p99": p99[:2], "plain": limit},
    )


def run(report: Report, parent: Path, effort: Effort) -> None:
    """Run all measurements, or report why they are left out."""
    remove_leftovers()
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    workload = effort.workload
    _ = expstore.open  # loads the modules that a user's program would load
    with ExitStack() as stack:
        try:
            groups = {
                name: stack.enter_context(memory_cgroup(f"{PREFIX}{os.getpid()}-{name}", effort.limit))
                for name in SIDES
            }
        except NoCgroup as exc:
            for act in ACTS:
                report.skip(f"larger-than-memory/{act}", str(exc))
            return
        readers = {name: Reader(name) for name in SIDES}  # forked before anything else runs here
        for reader in readers.values():
            stack.callback(reader.close)
        folder = stack.enter_context(scratch(parent, 7 * workload.rows * workload.row_bytes // 2))
        make_stores(folder, workload)
        for name, reader in readers.items():
            reader.ask("join", groups[name])
        for result in measure(readers, folder, effort):
            report.add(result)


def main(argv: Sequence[str] | None = None, out: Callable[[str], object] = print) -> int:
    """Measure, print the table, return the exit code."""
    parser = options(__doc__, quick="stores of 1 GB, short blocks", folder=ROOT / "benchmarks" / "out")
    wanted = parser.parse_args(argv)
    effort = SMOKE if wanted.smoke else QUICK if wanted.quick else FULL
    report = Report({} if wanted.smoke else BARS, out, other="TorchRL", file=wanted.json)
    run(report, wanted.folder, effort)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
