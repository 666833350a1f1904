"""The cost of durability: flush, close, reopen, and extend and add in sync mode, with their fsyncs.

Run as `python benchmarks/durability.py`. It has no bars, because the time of an fsync depends on the disk.
The last rows show the cost of a single fsync here. The rings are full: rows overwrite older ones. For
`extend` and `add`, the fsyncs and fdatasyncs of the store's files and folders by the calling thread are
counted; for `flush`, `close` and `reopen` all of them, including those of the background thread since the
rows were written. The fsyncs of DuckDB, which syncs the index at `close`, are not counted.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # some distributions install a `benchmarks` of their own

import expstore  # noqa: E402
from benchmarks.report import Report, Result, options, span  # noqa: E402
from benchmarks.timing import Series  # noqa: E402
from benchmarks.vs_torchrl import scratch  # noqa: E402
from benchmarks.workloads import LOCOMOTION, Stream, Workload  # noqa: E402
from expstore.disk.files import Disk  # noqa: E402

SIZES = (1, 10, 100, 1000)


class Counted:
    """Time single calls, and count the fsyncs of each."""

    def __init__(self, name: str, note: str = "") -> None:
        self.name, self.note = name, note
        self.times: list[float] = []
        self.syncs: list[int] = []

    def call(self, disk: Disk, act: Callable[[], Any], *, since: int | None = None) -> Any:
        """Run `act` without garbage collection.

        Counts the syncs of this thread, or all syncs since the counter was `since`.
        """
        gc.disable()
        me = threading.get_ident()
        before, started = disk.syncs_of.get(me, 0), time.perf_counter()
        try:
            return act()
        finally:
            self.times.append(time.perf_counter() - started)
            self.syncs.append(disk.syncs_of.get(me, 0) - before if since is None else disk.syncs - since)
            gc.enable()

    def result(self) -> Result:
        series, syncs = Series([self.times]), sorted(self.syncs)
        low, median, high = (syncs[int(part * (len(syncs) - 1))] for part in (0.1, 0.5, 0.9))
        text = f"{median} fsyncs" if low == high else f"{median} [{low}–{high}] fsyncs"
        data = series.to_json() | {"fsyncs": median, "fsyncs_p10": low, "fsyncs_p90": high}
        return Result(self.name, series.median, span(series), ratio=text, note=self.note, data=data)


class Durability:
    """Measure one kind of rows."""

    def __init__(self, folder: Path, workload: Workload, calls: int) -> None:
        self.folder, self.workload, self.calls = folder, workload, calls

    def run(self) -> Iterator[Result]:
        """Run all measurements one after the other."""
        for mode in ("sync", "process"):
            yield from self._mode(mode)
        yield from self._flushing()
        yield from self._closing()
        yield from self._one_fsync()

    def _open(self, **more: Any) -> expstore.TensorDictReplayBuffer:
        return expstore.open(self.folder / "run.exp", capacity=self.workload.rows, seed=0, **more)

    def _mode(self, mode: str) -> Iterator[Result]:
        """Measure extend and add; the first one to run fills the ring."""
        with self._open(durability=mode) as rb:
            batches = iter(Stream(self.workload, 1000, pool=4))
            while len(rb) < self.workload.rows:
                rb.extend(next(batches))
            for rows in (0, *SIZES):
                act, what = (rb.extend, f"extend-{rows}") if rows else (rb.add, "add")
                batches = iter(Stream(self.workload, rows, pool=8))
                rb.flush()
                found = Counted(f"{mode}/{what}", f"{max(rows, 1) * self.workload.row_bytes:,} bytes")
                for _ in range(self.calls):
                    batch = next(batches)
                    found.call(rb.storage.disk, lambda b=batch, act=act: act(b))
                yield found.result()

    def _flushing(self) -> Iterator[Result]:
        with self._open() as rb:
            for rows in (1, 1000, 10_000):
                if 2 * rows > rb.storage.geometry.spare:
                    continue  # a sync would start before the flush
                batches = iter(Stream(self.workload, rows, pool=2))
                found = Counted(f"flush/{rows}", "rows since the last one")
                for _ in range(max(3, self.calls // 10)):
                    since = rb.storage.disk.syncs  # on a busy machine the background thread may be first
                    rb.extend(next(batches))
                    found.call(rb.storage.disk, rb.flush, since=since)
                yield found.result()

    def _closing(self) -> Iterator[Result]:
        close = Counted("close", "1000 rows since the last sync; includes updating the index")
        reopen = Counted("reopen", f"a full ring of {self.workload.rows:,} rows, closed, in the page cache")
        batches = iter(Stream(self.workload, 1000, pool=4))
        for _ in range(max(3, self.calls // 20)):
            disk = Disk()  # a handle that does not exist yet has no counter
            rb = reopen.call(disk, self._open)
            reopen.syncs[-1] = rb.storage.disk.syncs
            rb.flush()  # work that opening leaves to the background
            since = rb.storage.disk.syncs
            rb.extend(next(batches))
            close.call(rb.storage.disk, rb.close, since=since)
        yield close.result()
        yield reopen.result()

    def _one_fsync(self) -> Iterator[Result]:
        disk, pages = Disk(), 200
        file = disk.open(self.folder / "one", create=True)
        file.allocate(pages * 4096)
        file.sync()
        for name, how in (("first", "into reserved space"), ("again", "over existing data")):
            found = Counted(f"one-fsync/{name}", f"4 KiB written {how}")
            for number in range(min(self.calls, pages)):
                file.write(bytes([number % 256]) * 4096, 4096 * number)
                found.call(disk, file.sync)
            yield found.result()
        file.close()


def main(argv: Sequence[str] | None = None, out: Callable[[str], object] = print) -> int:
    """Measure and print the table."""
    parser = options(__doc__, quick="100,000 rows", folder=ROOT / "benchmarks" / "out")
    wanted = parser.parse_args(argv)
    rows, calls = (3000, 5) if wanted.smoke else (100_000, 50) if wanted.quick else (1_000_000, 200)
    workload = LOCOMOTION.scaled(rows=rows, extend_rows=1000)
    report = Report({}, out, other="other", file=wanted.json)
    with scratch(wanted.folder, 6 * rows * workload.row_bytes + (200 << 20)) as folder:
        for result in Durability(folder, workload, calls).run():
            report.add(result)
    out("Fsyncs: medians [10th–90th percentile] per call; DuckDB's own are not counted.")
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
