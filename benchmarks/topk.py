"""The writer that keeps the best rows compared with TorchRL's, in full stores, on disk and in memory.

Run as `python benchmarks/topk.py`; exits 1 below a bar. A call is an `extend` of 1000 rows. Either all of
them are better than the stored rows (a policy that improves), or one in a hundred (the rest of a long run).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # some distributions install a `benchmarks` of their own

import expstore  # noqa: E402
from benchmarks.report import Bar, Report, Result, options, span  # noqa: E402
from benchmarks.timing import Case, Series, alternate  # noqa: E402
from benchmarks.vs_torchrl import scratch  # noqa: E402
from benchmarks.workloads import LOCOMOTION, Workload  # noqa: E402

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

REWARD = ("next", "reward")
#: One in this many rows is better than the stored rows.
SHARES = {"few": 100, "all": 1}
BARS = {
    f"topk/{share}-{place}": Bar(10, "x", at_least=True) for place in ("disk", "memory") for share in SHARES
}


@dataclass(frozen=True)
class Effort:
    """Sizes of the benchmark.

    Args:
        workload: The rows, and the capacity of a full store.
        calls: Number of calls per block.
        rounds: Number of blocks per side.
    """

    workload: Workload = LOCOMOTION
    calls: int = 20
    rounds: int = 5


FULL = Effort()
QUICK = Effort(LOCOMOTION.scaled(rows=100_000, extend_rows=1000))
SMOKE = Effort(LOCOMOTION.scaled(rows=2000, extend_rows=200), calls=2, rounds=1)


class Better:
    """Create an endless sequence of batches in which every n-th row ranks above all earlier rows.

    Args:
        workload: The rows.
    """

    def __init__(self, workload: Workload) -> None:
        self._pool = [workload.batch(workload.extend_rows, seed=seed) for seed in range(8)]
        self._rows = self._best = workload.rows
        self._made = 0

    def filling(self) -> Iterator[TensorDict]:
        """Return the rows of a full store in random order, so that the worst are spread over it."""
        import torch

        ranks = torch.randperm(self._rows, generator=torch.Generator().manual_seed(1))
        for part in ranks.float().split(len(self._pool[0])):
            yield self._ranked(part[:, None])

    def batches(self, every: int) -> Iterator[TensorDict]:
        import torch

        while True:
            rewards = torch.full((len(self._pool[0]), 1), -1.0)
            taken = rewards[::every]
            taken[:] = torch.arange(self._best, self._best + len(taken))[:, None]
            self._best += len(taken)
            yield self._ranked(rewards)

    def _ranked(self, rewards: torch.Tensor) -> TensorDict:
        batch = self._pool[self._made % len(self._pool)].clone()
        self._made += 1
        batch[REWARD] = rewards
        return batch


def ours(folder: Path, workload: Workload, *, memory: bool) -> Any:
    writer = expstore.TensorDictMaxValueWriter(REWARD)
    if not memory:
        return expstore.open(folder / "store.exp", capacity=workload.rows, writer=writer, seed=1)
    return expstore.TensorDictReplayBuffer(storage=expstore.MemoryStorage(workload.rows), writer=writer)


def theirs(folder: Path, workload: Workload, *, memory: bool) -> Any:
    from torchrl import data

    logging.getLogger("torchrl").setLevel(logging.WARNING)
    storage = (
        data.LazyTensorStorage(workload.rows)
        if memory
        else data.LazyMemmapStorage(workload.rows, scratch_dir=str(folder / "torchrl"))
    )
    return data.TensorDictReplayBuffer(storage=storage, writer=data.TensorDictMaxValueWriter(REWARD))


class TopK:
    """Measure with full stores."""

    def __init__(self, folder: Path, effort: Effort) -> None:
        self.folder, self.effort = folder, effort

    def run(self) -> Iterator[Result]:
        for place in ("disk", "memory"):
            yield from self._compare(place)

    def _compare(self, place: str) -> Iterator[Result]:
        workload = self.effort.workload
        sides = [make(self.folder, workload, memory=place == "memory") for make in (ours, theirs)]
        feeds = [Better(workload) for _ in sides]
        for rb, feed in zip(sides, feeds, strict=True):
            for batch in feed.filling():
                rb.extend(batch)
        for share, every in SHARES.items():
            mine, other = self._alternate(sides, [feed.batches(every) for feed in feeds])
            ratio = other.median / mine.median
            text = f"{ratio:.0f}x (means {other.mean / mine.mean:.0f}x)"
            data = {"expstore": mine.to_json(), "torchrl": other.to_json()}
            note = f"{workload.rows:,} rows, 1 in {every} of {workload.extend_rows} is kept"
            yield Result(f"topk/{share}-{place}", ratio, span(mine), span(other), text, note, data)
        if place == "disk":
            sides[0].close()

    def _alternate(self, sides: Sequence[Any], batches: Sequence[Iterator[TensorDict]]) -> list[Series]:
        cases = [
            Case(rb.extend, feed, self.effort.calls, settle=getattr(sides[0], "flush", lambda: None))
            for rb, feed in zip(sides, batches, strict=True)
        ]
        return alternate(cases, rounds=self.effort.rounds, warm=3)


def main(argv: Sequence[str] | None = None, out: Any = print) -> int:
    """Measure, print the table, return the exit code."""
    parser = options(__doc__, quick="a tenth of the rows", folder=ROOT / "benchmarks" / "out")
    wanted = parser.parse_args(argv)
    effort = SMOKE if wanted.smoke else QUICK if wanted.quick else FULL
    bars = {} if wanted.smoke else BARS
    with scratch(wanted.folder, 4 * effort.workload.rows * effort.workload.row_bytes) as folder:
        report = Report(bars, out, other="TorchRL", file=wanted.json)
        for result in TopK(folder, effort).run():
            report.add(result)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
