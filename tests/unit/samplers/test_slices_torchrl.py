"""Slices of rows from TorchRL's collectors and interleaved workers, compared with TorchRL's.

Each row contains its worker, episode and step, so that the possible slices are known: `LENGTH` consecutive
steps of one episode, wherever their rows are.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore import SliceSampler
from tests.support.counting_env import Counting, Make

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # some of its modules use what other ones call deprecated
    from torchrl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torchrl")

LENGTH = 3
#: Slices per batch, and batches: a slice has a chance above 1 in 400.
SLICES, BATCHES = 1000, 12
FRAMES, TOTAL = 5, 150

Slice = tuple[int, int, int]


# -- what there is to draw from ---------------------------------------------------------------------------


@dataclass
class Stream:
    """Batches in the order in which they came.

    Args:
        batches: As the collector handed them over.
        ndim: Of TorchRL's storage.
        seams: Whether an episode's next batch may lie elsewhere in a storage than behind the one before.
    """

    batches: list[TensorDict]
    ndim: int = 1
    seams: bool = True

    def visible(self) -> torch.Tensor:
        """Return worker, episode and step of every row. Shape `(rows, 3)`."""
        return torch.cat([batch["observation"].reshape(-1, 3) for batch in self.batches])

    def slices(self) -> set[Slice]:
        """Return all there are: worker, episode and first step."""
        rows = {tuple(row) for row in self.visible().tolist()}
        return {(w, e, s) for w, e, s in rows if all((w, e, s + k) in rows for k in range(LENGTH))}


def collected(make: Callable[..., Any], workers: int, **keywords: Any) -> list[TensorDict]:
    environments: Any = [Make(n) for n in range(workers)] if workers > 1 else Make(2)
    collector = make(environments, None, total_frames=TOTAL, **keywords)
    try:
        return [batch.clone() for batch in collector]
    finally:
        collector.shutdown()


def interleave() -> list[TensorDict]:
    """Batches of three workers that take turns; trajectory ids are unique, as from one collector."""
    makers = [Counting(worker) for worker in range(3)]
    kept = [maker._reset() for maker in makers]
    batches = []
    for _ in range(TOTAL // (3 * FRAMES)):
        for worker, maker in enumerate(makers):
            rows = []
            for _ in range(FRAMES):
                after = maker._step(None)
                ids = torch.tensor(1000 * worker + maker.episode)
                rows.append(TensorDict({**kept[worker], "next": after, "collector": {"traj_ids": ids}}, []))
                kept[worker] = maker._reset() if after["done"] else after.select("observation")
            batches.append(torch.stack(rows))
    return batches


KINDS: dict[str, Callable[[], Stream]] = {
    "one": lambda: Stream(collected(Collector, 1, frames_per_batch=FRAMES), seams=False),
    "sync-stack": lambda: Stream(
        collected(MultiSyncCollector, 3, frames_per_batch=3 * FRAMES, cat_results="stack"), 2, seams=False
    ),
    "sync-0": lambda: Stream(collected(MultiSyncCollector, 3, frames_per_batch=3 * FRAMES, cat_results=0)),
    "sync-1": lambda: Stream(collected(MultiSyncCollector, 3, frames_per_batch=3 * FRAMES, cat_results=-1)),
    "one-truncated": lambda: Stream(
        collected(Collector, 1, frames_per_batch=FRAMES, set_truncated=True), seams=False
    ),
    # With buffers, the flag "done" of later batches is that of the first one (torchrl 0.14.1).
    "sync-truncated": lambda: Stream(
        collected(
            MultiSyncCollector,
            3,
            frames_per_batch=3 * FRAMES,
            cat_results="stack",
            set_truncated=True,
            use_buffers=False,
        ),
        2,
        seams=False,
    ),
    "async": lambda: Stream(collected(MultiAsyncCollector, 3, frames_per_batch=FRAMES)),
    "turns": lambda: Stream(interleave()),
}


@pytest.fixture(scope="module", params=KINDS)
def stream(request: pytest.FixtureRequest, forking: None) -> Stream:
    """One run of each kind of collector."""
    return KINDS[request.param]()


# -- what is drawn ----------------------------------------------------------------------------------------


def reached(draw: Callable[[int], Any], batches: int = BATCHES) -> set[Slice]:
    """Return the slices that come; each must be one."""
    found: set[Slice] = set()
    for _ in range(batches):
        rows = draw(SLICES * LENGTH)["observation"].reshape(-1, LENGTH, 3)
        first = rows[:, :1]
        steps = torch.arange(LENGTH)[:, None] * torch.tensor([0, 0, 1])
        assert torch.equal(rows, first + steps), "a slice of rows that do not follow one another"
        found |= {(w, e, s) for w, e, s in first[:, 0].unique(dim=0).tolist()}
    return found


@pytest.mark.some(2)
@pytest.mark.parametrize("by", ["trajectory", "start"])
def test_all_slices_come_and_no_others(stream: Stream, by: str, store_path: Path) -> None:
    sampler = SliceSampler(slice_len=LENGTH, by=by)
    there = stream.slices()
    with expstore.open(store_path, capacity=1000, seed=1, sampler=sampler) as rb:
        for number, batch in enumerate(stream.batches, 1):
            rb.extend(batch)
            if number == len(stream.batches) // 2:
                reached(rb.sample, 1)  # and goes on from there
        assert reached(rb.sample) == there


def test_two_collectors_of_one_store_do_not_mix(forking: None, store_path: Path) -> None:
    """Both call their trajectories 0, 1, 2; the second comes after a restart."""
    first, second = (Stream(collected(Collector, 1, frames_per_batch=FRAMES)) for _ in range(2))
    for batch in second.batches:
        batch["observation"][:, 0] += 10
        batch["next", "observation"][:, 0] += 10
    for collector in (first, second):
        with expstore.open(store_path, seed=1, sampler=SliceSampler(slice_len=LENGTH)) as rb:
            for batch in collector.batches:
                rb.extend(batch)
    with expstore.open(store_path, sampler=SliceSampler(slice_len=LENGTH)) as rb:
        assert reached(rb.sample) == first.slices() | second.slices()
