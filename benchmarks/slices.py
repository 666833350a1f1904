"""Slices compared with TorchRL, and their cost in stores of every size and with interleaved lanes.

Run as `python benchmarks/slices.py`; exits 1 below a bar. Between two batches one row is added, outside of
the timed section; this makes TorchRL search for trajectories again. TorchRL gets the key of the trajectory
ids, and samples from rows on disk and in memory.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # some distributions install a `benchmarks` of their own

import expstore  # noqa: E402
from benchmarks.report import Bar, Report, Result, options, span  # noqa: E402
from benchmarks.timing import Case, Series, alternate, each_threads  # noqa: E402
from benchmarks.vs_torchrl import scratch  # noqa: E402
from benchmarks.workloads import LOCOMOTION, TRAJECTORY, Stream, Workload  # noqa: E402

if TYPE_CHECKING:
    from tensordict import TensorDict

BATCH, SLICES, EPISODE, LANES = 256, 8, 200, 128

BARS = {
    "slices/beside-memmap": Bar(30, "x", at_least=True),
    "slices/beside-memory": Bar(30, "x", at_least=True),
    "slices/index-by-size": Bar(1.5, "x"),
    "slices/index-by-lanes": Bar(2, "x"),
    "slices/sample-by-lanes": Bar(2, "x"),
}


_ROWS = replace(LOCOMOTION, episode=EPISODE)


@dataclass(frozen=True)
class Effort:
    """Sizes of the benchmark.

    Args:
        workload: The rows that both sides draw from.
        sizes: Rows of the stores whose index is queried.
        lane_rows: Rows of the stores with one lane and with many.
        calls: Calls in a block.
        rounds: Blocks of each side.
    """

    workload: Workload = _ROWS
    sizes: tuple[int, ...] = (100_000, 1_000_000, 10_000_000)
    lane_rows: int = 1_000_000
    calls: int = 100
    rounds: int = 5


FULL = Effort()
QUICK = Effort(
    workload=FULL.workload.scaled(rows=100_000, extend_rows=1000),
    sizes=(10_000, 100_000, 1_000_000),
    lane_rows=100_000,
)
SMOKE = Effort(
    workload=FULL.workload.scaled(rows=2000, extend_rows=400),
    sizes=(2000, 4000),
    lane_rows=30_000,
    calls=2,
    rounds=1,
)


def sampler() -> Any:
    return expstore.SliceSampler(num_slices=SLICES)


def open_ours(folder: Path, workload: Workload) -> Any:
    return expstore.open(
        folder / "store.exp", capacity=workload.rows, batch_size=BATCH, sampler=sampler(), seed=1
    )


def open_theirs(folder: Path, workload: Workload, *, memory: bool) -> Any:
    from torchrl import data

    logging.getLogger("torchrl").setLevel(logging.WARNING)
    storage = (
        data.LazyTensorStorage(workload.rows)
        if memory
        else data.LazyMemmapStorage(workload.rows, scratch_dir=str(folder / "torchrl"))
    )
    slices = data.SliceSampler(num_slices=SLICES, traj_key=TRAJECTORY)
    return data.TensorDictReplayBuffer(storage=storage, sampler=slices, batch_size=BATCH)


def single_rows(stream: Stream) -> Iterator[TensorDict]:
    """Yield the rows of a stream one by one."""
    return (batch[place] for batch in stream for place in range(batch.shape[0]))


def adding(rb: Any, rows: Iterator[TensorDict]) -> Iterator[None]:
    """Add a row before each call, outside of the timed section."""
    for row in rows:
        rb.add(row)
        yield


def small_rows(first: int, count: int) -> TensorDict:
    """Return small rows: one lane, episodes one after the other."""
    import torch
    from tensordict import TensorDict

    number = torch.arange(first, first + count)
    ends = ((number + 1) % EPISODE == 0)[:, None]
    return TensorDict({"number": number, "next": {"terminated": ends}}, [count])


class Lanes:
    """Create batches of many lanes, row by row, without reset rows.

    An episode of a lane has 200 steps, followed by a reset row with trajectory id -1. Lanes are at different
    steps, so that in nearly every step some lane has no row.
    """

    def __init__(self, lanes: int) -> None:
        self.count = lanes
        self._at = np.arange(lanes) * (EPISODE + 1) // lanes

    def batch(self, times: int) -> TensorDict:
        """Return the next steps of all lanes. Batch size `[times, lanes]`."""
        import torch
        from tensordict import TensorDict

        at = self._at + np.arange(times)[:, None]
        cases, steps = np.divmod(at, EPISODE + 1)
        ids = np.where(steps == EPISODE, -1, cases)
        ends = torch.from_numpy(steps == EPISODE - 1).unsqueeze(-1)
        self._at = self._at + times
        return TensorDict(
            {
                "number": torch.from_numpy(at),
                "next": {"terminated": ends},
                "collector": {"traj_ids": torch.from_numpy(ids)},
            },
            [times, at.shape[1]],
            names=["time", None],
        )


def in_memory(capacity: int) -> Any:
    storage = expstore.MemoryStorage(capacity, seed=1, flatten=True)
    return expstore.TensorDictReplayBuffer(storage=storage, sampler=sampler(), batch_size=BATCH)


def ask_index(rb: Any) -> Callable[[Any], object]:
    """Return a function that finds the rows of a batch of slices without reading them."""
    storage, slices = rb.storage, rb.sampler
    generator = np.random.default_rng(1)
    return lambda _: slices.sample(storage, BATCH, generator)


def rows_per_fragment(rb: Any) -> float:
    fragments = rb.storage.episodes.fragments.rows
    return float(fragments[2].sum() / fragments.shape[1])


class Slices:
    """Measure with stores that are full rings."""

    def __init__(self, folder: Path, effort: Effort, threads: Sequence[int]) -> None:
        self.folder, self.effort, self.threads = folder, effort, threads

    def run(self) -> Iterator[Result]:
        yield from self._compare()
        yield self._by_size()
        yield from self._by_lanes()

    def _alternate(self, cases: list[Case]) -> list[Series]:
        return alternate(cases, rounds=self.effort.rounds, warm=20)

    def _compare(self) -> Iterator[Result]:
        workload = self.effort.workload
        sides = [
            open_ours(self.folder, workload),
            open_theirs(self.folder, workload, memory=False),
            open_theirs(self.folder, workload, memory=True),
        ]
        cases = []
        for rb in sides:
            stream = Stream(workload, workload.extend_rows, pool=5 * EPISODE // 50)
            for _ in range(workload.rows // workload.extend_rows):
                rb.extend(next(stream))
            act = self._whole(rb)
            cases.append(Case(act, adding(rb, single_rows(stream)), self.effort.calls, settle=sides[0].flush))
        for more in each_threads(self.threads):
            ours, *theirs = self._alternate(cases)
            for name, series in zip(("memmap", "memory"), theirs, strict=True):
                ratio = series.median / ours.median
                text = f"{ratio:.0f}x (means {series.mean / ours.mean:.0f}x)"
                data = {"expstore": ours.to_json(), "torchrl": series.to_json()}
                note = (
                    f"{workload.rows:,} rows, {SLICES} slices of {BATCH // SLICES}, a row added before each"
                )
                called = f"slices/beside-{name}{more}"
                yield Result(called, ratio, span(ours), span(series), text, note, data)
        sides[0].close()

    @staticmethod
    def _whole(rb: Any) -> Callable[[Any], object]:
        return lambda _: rb.sample()

    def _by_size(self) -> Result:
        cases = []
        for rows in self.effort.sizes:
            rb = in_memory(rows)
            step = min(rows, 100_000)
            for first in range(0, rows, step):
                rb.extend(small_rows(first, step))
            more = (small_rows(first, 1)[0] for first in range(rows, 1 << 62))
            cases.append(Case(ask_index(rb), adding(rb, more), self.effort.calls))
        found = self._alternate(cases)
        medians = [series.median for series in found]
        ratio = max(medians) / min(medians)
        text = ", ".join(
            f"{rows:,} rows {median * 1e6:.0f} µs"
            for rows, median in zip(self.effort.sizes, medians, strict=True)
        )
        data = {str(rows): series.to_json() for rows, series in zip(self.effort.sizes, found, strict=True)}
        note = "only the rows' ids, a row added before each"
        return Result("slices/index-by-size", ratio, text, ratio=f"{ratio:.2f}x", note=note, data=data)

    def _by_lanes(self) -> Iterator[Result]:
        rows = self.effort.lane_rows
        stores, feeds = [], []
        for count in (1, LANES):
            rb, lanes = in_memory(rows), Lanes(count)
            times = max(8, 1024 // count)
            while rb.write_count < rows:
                rb.extend(lanes.batch(times))
            stores.append(rb)
            feeds.append(lanes)
        shares = [rows_per_fragment(rb) for rb in stores]
        note = f"{rows:,} rows, {LANES} lanes of {shares[1]:.1f} rows per fragment, one of {shares[0]:.0f}"
        for name, act in (("index", ask_index), ("sample", self._whole)):
            cases = [
                Case(act(rb), self._extending(rb, lanes), self.effort.calls)
                for rb, lanes in zip(stores, feeds, strict=True)
            ]
            one, many = self._alternate(cases)
            ratio = many.median / one.median
            text = f"one lane {span(one)}, {LANES} lanes {span(many)}"
            data = {"one": one.to_json(), "many": many.to_json(), "rows_per_fragment": shares}
            yield Result(f"slices/{name}-by-lanes", ratio, text, ratio=f"{ratio:.2f}x", note=note, data=data)

    @staticmethod
    def _extending(rb: Any, lanes: Lanes) -> Iterator[None]:
        """Add one row per lane before each call."""
        while True:
            rb.extend(lanes.batch(LANES // lanes.count))
            yield


def main(argv: Sequence[str] | None = None, out: Callable[[str], object] = print) -> int:
    """Measure, print the table, return the exit code."""
    parser = options(__doc__, quick="a tenth of the rows", folder=ROOT / "benchmarks" / "out")
    wanted = parser.parse_args(argv)
    effort = SMOKE if wanted.smoke else QUICK if wanted.quick else FULL
    bars = {} if wanted.smoke else BARS
    with scratch(wanted.folder, 4 * effort.workload.rows * effort.workload.row_bytes) as folder:
        report = Report(bars, out, other="TorchRL", file=wanted.json)
        for result in Slices(folder, effort, wanted.threads).run():
            report.add(result)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
