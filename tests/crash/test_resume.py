"""After a kill at any moment, the following batches are those of a run that was never killed."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore import (
    ConsumingSampler,
    MemoryStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    RecencySampler,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StalenessAwareSampler,
    StreamingSliceSampler,
    TensorDictReplayBuffer,
)
from expstore.errors import NotReadyError
from expstore.samplers.base import Sampler

pytestmark = pytest.mark.index

SAMPLERS: dict[str, Callable[[], Sampler]] = {
    "random": RandomSampler,
    "prioritized": PrioritizedSampler,
    "without": SamplerWithoutReplacement,
    "staleness": lambda: StalenessAwareSampler(max_staleness=6),
    "recency": lambda: RecencySampler(half_life=50),
    "consuming": lambda: ConsumingSampler(3),
    "slices": lambda: SliceSampler(slice_len=4),
    "slices-start": lambda: SliceSampler(num_slices=2, by="start", strict_length=False),
    "slices-without": lambda: SliceSamplerWithoutReplacement(slice_len=4),
    "slices-prioritized": lambda: PrioritizedSliceSampler(slice_len=4),
    "slices-streaming": lambda: StreamingSliceSampler(slice_len=4),
}
CAPACITY = 300
SIZE = 16
ACTS = 120
NEXT = 50

Act = tuple[str, int]


def script(seed: int) -> list[Act]:
    """Return the operations of a run: rows, batches, priorities, and policy versions."""
    rng = random.Random(seed)
    acts: list[Act] = [("extend", 60)]
    for _ in range(ACTS):
        kind = rng.choices(["extend", "draw", "priorities", "version"], [3, 6, 3, 1])[0]
        acts.append((kind, rng.randint(1, 70)))
    return acts


def do(rb: TensorDictReplayBuffer, act: Act, version: int) -> int:
    """Run one operation; return the policy version after it."""
    kind, number = act
    if kind == "extend":
        first = rb.storage.last
        numbers = torch.arange(first, first + number)
        rows = {
            "number": numbers,
            "policy_version": torch.full((number,), version),
            # Three trajectories at a time, with interleaved rows.
            "collector": {"traj_ids": numbers // 40 * 3 + numbers % 3},
        }
        rb.extend(TensorDict(rows, [number]), source="only")
    elif kind == "draw":
        with contextlib.suppress(NotReadyError):  # all were returned three times
            rb.sample()
    elif kind == "priorities":
        ids = rb.storage.window.ids()[::3]
        rb.update_priority(id=ids, priority=np.random.default_rng(number).uniform(0, 4, ids.size))
    else:
        version += 1
        if isinstance(rb.sampler, StalenessAwareSampler):
            rb.sampler.consumer_version = version
    return version


def run_killed(path: Path, sampler: str, acts: list[Act], after: int, flush_at: int | None) -> int:
    """Run the operations in a child that is killed after it reported `after` of them."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            rb = expstore.open(path, capacity=CAPACITY, seed=7, sampler=SAMPLERS[sampler](), batch_size=SIZE)
            version = 0
            for number, act in enumerate(acts):
                version = do(rb, act, version)
                if number == flush_at:
                    rb.flush()
                os.write(writing, b".")
            signal.pause()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.close(writing)
    done = 0
    while done < after and (heard := os.read(reading, after - done)):
        done += len(heard)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while heard := os.read(reading, 4096):
        done += len(heard)
    os.close(reading)
    return done


def reference(sampler: str, acts: list[Act], rb: TensorDictReplayBuffer, done: int) -> TensorDictReplayBuffer:
    """Run the same in memory, as far as the store says that the last, unacknowledged operation got."""
    alone = TensorDictReplayBuffer(
        storage=MemoryStorage(CAPACITY, seed=7),
        sampler=SAMPLERS[sampler](),
        batch_size=SIZE,
        with_ids=True,
    )
    version = 0
    for act in acts[:done]:
        version = do(alone, act, version)
    if done < len(acts) and (rb.storage.last, rb.storage.draws.number) != (
        alone.storage.last,
        alone.storage.draws.number,
    ):
        if acts[done][0] == "draw" and handed_out(rb) == handed_out(alone):
            alone.storage.draws.next()  # the batch was not returned yet: its rows are drawn again
        else:
            do(alone, acts[done], version)
    return alone


def handed_out(rb: TensorDictReplayBuffer) -> Any:
    """Return what was returned, in addition to the number of draws."""
    storage = rb.storage
    slots = storage.geometry.slot_of(storage.window.ids())
    return storage.draws.progress, None if storage.state.sampled is None else storage.state.sampled.values[
        slots
    ].tolist()


def batches(rb: TensorDictReplayBuffer) -> list[Any]:
    found: list[Any] = []
    for _ in range(NEXT):
        try:
            batch = rb.sample()
        except NotReadyError:
            found.append(None)
        else:
            found.append((batch["number"].tolist(), batch["id"].tolist()))
    return found


@pytest.mark.guarantee(
    "draw/next",
    "After a restart or a kill, every sampler draws the batches that would have followed; so do "
    "ensembles, hindsight goals, random crops and a loaded trainer.",
)
@pytest.mark.some(2)
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(n, marks=pytest.mark.torture) for n in (2, 3))])
def test_killed_at_any_moment(store_path: Path, sampler: str, seed: int) -> None:
    acts = script(seed)
    after = random.Random(seed + 100).randint(20, ACTS)
    done = run_killed(store_path, sampler, acts, after, None)
    with expstore.open(store_path, capacity=CAPACITY, sampler=SAMPLERS[sampler](), batch_size=SIZE) as rb:
        alone = reference(sampler, acts, rb, done)
        assert (rb.storage.last, rb.storage.draws.number) == (alone.storage.last, alone.storage.draws.number)
        ids = rb.storage.window.ids()
        # Priorities set just before the kill may be lost: use the stored ones.
        alone.update_priority(id=ids, priority=rb.storage.priorities.values[rb.storage.geometry.slot_of(ids)])
        if isinstance(rb.sampler, StalenessAwareSampler) and isinstance(alone.sampler, StalenessAwareSampler):
            alone.sampler.consumer_version = rb.sampler.consumer_version  # set just before the kill, or not
        assert batches(rb) == batches(alone)


@pytest.mark.some(2)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_killed_directly_after_a_flush(store_path: Path, sampler: str) -> None:
    """Nothing is lost then: priorities equal those of the run that was not killed."""
    acts = script(11)[:60]
    done = run_killed(store_path, sampler, acts, len(acts), len(acts) - 1)
    assert done == len(acts)
    with expstore.open(store_path, capacity=CAPACITY, sampler=SAMPLERS[sampler](), batch_size=SIZE) as rb:
        assert batches(rb) == batches(reference(sampler, acts, rb, done))


@pytest.mark.some(3)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_closed_and_opened_again(store_path: Path, sampler: str) -> None:
    acts = script(12)[:60]
    with expstore.open(
        store_path, capacity=CAPACITY, seed=7, sampler=SAMPLERS[sampler](), batch_size=SIZE
    ) as rb:
        version = 0
        for act in acts:
            version = do(rb, act, version)
    with expstore.open(store_path, capacity=CAPACITY, sampler=SAMPLERS[sampler](), batch_size=SIZE) as rb:
        assert batches(rb) == batches(reference(sampler, acts, rb, len(acts)))
