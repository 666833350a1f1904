"""Slices compared with TorchRL, and their cost in stores of every size and with interleaved lanes.

Run as `python -m benchmarks.slices`; exits 1 below a bar. Between two batches one row is added, outside of
the timed section; this makes TorchRL search for trajectories again. TorchRL gets the key of the trajectory
ids, and samples from rows on disk and in memory.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import expstore
from benchmarks.report import Bar, Result, Setup, at_least, compare, run_program, span
from benchmarks.timing import Case, alternate, each_threads
from benchmarks.workloads import LOCOMOTION, TRAJECTORY, Stream, Workload

if TYPE_CHECKING:
    from tensordict import TensorDict

BATCH, SLICES, EPISODE, LANES = 256, 8, 200, 128

BARS = {
    "slices/memmap": at_least(30),
    "slices/memory": at_least(30),
    "slices/index-by-size": Bar(1.5, "x"),
    "slices/index-by-lanes": Bar(2, "x"),
    "slices/sample-by-lanes": Bar(2, "x"),
}


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

    workload: Workload = replace(LOCOMOTION, episode=EPISODE)  # noqa: RUF009 - frozen
    sizes: tuple[int, ...] = (100_000, 1_000_000, 10_000_000)
    lane_rows: int = 1_000_000
    calls: int = 100
    rounds: int = 5


FULL = Effort()
SMOKE = Effort(
    FULL.workload.scaled(rows=2000, extend_rows=400), sizes=(2000, 4000), lane_rows=30_000, calls=2, rounds=1
)


def open_ours(folder: Path, workload: Workload) -> Any:
    sampler = expstore.SliceSampler(num_slices=SLICES)
    return expstore.open(
        folder / "store.exp", capacity=workload.rows, batch_size=BATCH, sampler=sampler, seed=1
    )


def open_theirs(folder: Path, workload: Workload, *, memory: bool) -> Any:
    from torchrl import data

    logging.getLogger("torchrl").setLevel(logging.WARNING)
    storage = (
        data.LazyTensorStorage(workload.rows)
        if memory
        else data.LazyMemmapStorage(workload.rows, scratch_dir=str(folder / "torchrl"))
    )
    sampler = data.SliceSampler(num_slices=SLICES, traj_key=TRAJECTORY)
    return data.TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=BATCH)


def open_in_memory(capacity: int) -> Any:
    storage = expstore.MemoryStorage(capacity, seed=1, flatten=True)
    sampler = expstore.SliceSampler(num_slices=SLICES)
    return expstore.TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=BATCH)


def add_rows(rb: Any, rows: Iterator[TensorDict]) -> Iterator[None]:
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
        episodes, steps = np.divmod(at, EPISODE + 1)
        ids = np.where(steps == EPISODE, -1, episodes)
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

    def extend(self, rb: Any) -> Iterator[None]:
        """Add about 128 rows before each call, outside of the timed section."""
        while True:
            rb.extend(self.batch(LANES // self.count))
            yield


def find_rows(rb: Any) -> Callable[[Any], object]:
    """Return a function that finds the rows of a batch of slices without reading them."""
    storage, sampler = rb.storage, rb.sampler
    generator = np.random.default_rng(1)
    return lambda _: sampler.sample(storage, BATCH, generator)


def sample(rb: Any) -> Callable[[Any], object]:
    return lambda _: rb.sample()


def rows_per_fragment(rb: Any) -> float:
    fragments = rb.storage.episodes.fragments.rows
    return float(fragments[2].sum() / fragments.shape[1])


def measure(setup: Setup) -> Iterator[Result]:
    effort = SMOKE if setup.smoke else FULL
    yield from measure_sides(setup.folder, effort)
    yield measure_sizes(effort)
    yield from measure_lanes(effort)


def measure_sides(folder: Path, effort: Effort) -> Iterator[Result]:
    workload = effort.workload
    ours = open_ours(folder, workload)
    cases = []
    for rb in (ours, open_theirs(folder, workload, memory=False), open_theirs(folder, workload, memory=True)):
        stream = Stream(workload, workload.extend_rows, pool=20)
        for _ in range(workload.rows // workload.extend_rows):
            rb.extend(next(stream))
        rows = (batch[place] for batch in stream for place in range(batch.shape[0]))
        cases.append(Case(sample(rb), add_rows(rb, rows), effort.calls, settle=ours.flush))
    note = f"{workload.rows:,} rows, {SLICES} slices of {BATCH // SLICES}, a row added before each"
    for suffix in each_threads():
        mine, *others = alternate(cases, rounds=effort.rounds)
        for name, theirs in zip(("memmap", "memory"), others, strict=True):
            yield compare(f"slices/{name}{suffix}", mine, theirs, note)
    ours.close()


def measure_sizes(effort: Effort) -> Result:
    """Compare finding the rows of a batch in stores of several sizes."""
    cases = []
    for rows in effort.sizes:
        rb = open_in_memory(rows)
        step = min(rows, 100_000)
        for first in range(0, rows, step):
            rb.extend(small_rows(first, step))
        more = (small_rows(first, 1)[0] for first in range(rows, 1 << 62))
        cases.append(Case(find_rows(rb), add_rows(rb, more), effort.calls))
    series = dict(zip(effort.sizes, alternate(cases, rounds=effort.rounds), strict=True))
    medians = [one.median for one in series.values()]
    ratio = max(medians) / min(medians)
    text = ", ".join(f"{rows:,} rows {one.median * 1e6:.0f} µs" for rows, one in series.items())
    data = {str(rows): one.to_json() for rows, one in series.items()}
    note = "only the rows' ids, a row added before each"
    return Result("slices/index-by-size", ratio, text, ratio=f"{ratio:.2f}x", note=note, data=data)


def measure_lanes(effort: Effort) -> Iterator[Result]:
    """Compare stores with one lane and with many."""
    rows = effort.lane_rows
    stores: list[tuple[Any, Lanes]] = []
    for count in (1, LANES):
        rb, lanes = open_in_memory(rows), Lanes(count)
        while rb.write_count < rows:
            rb.extend(lanes.batch(max(8, 1024 // count)))
        stores.append((rb, lanes))
    shares = [rows_per_fragment(rb) for rb, _ in stores]
    note = f"{rows:,} rows, {LANES} lanes of {shares[1]:.1f} rows per fragment, one of {shares[0]:.0f}"
    for name, act in (("index", find_rows), ("sample", sample)):
        cases = [Case(act(rb), lanes.extend(rb), effort.calls) for rb, lanes in stores]
        one, many = alternate(cases, rounds=effort.rounds)
        ratio = many.median / one.median
        text = f"one lane {span(one)}, {LANES} lanes {span(many)}"
        data = {"one": one.to_json(), "many": many.to_json(), "rows_per_fragment": shares}
        yield Result(f"slices/{name}-by-lanes", ratio, text, ratio=f"{ratio:.2f}x", note=note, data=data)


if __name__ == "__main__":
    sys.exit(run_program(measure, BARS, gigabytes=0.8))
