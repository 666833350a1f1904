"""Prefetched batches equal those without prefetching, and stale ones are never returned."""

from __future__ import annotations

import copy
import itertools
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore import (
    MemoryStorage,
    PrioritizedSampler,
    RandomSampler,
    SamplerWithoutReplacement,
    StalenessAwareSampler,
    TensorDictReplayBuffer,
)
from expstore.core.values import Selection
from expstore.errors import NotReadyError, StateError
from expstore.samplers.base import Sampler
from expstore.storages.base import Storage
from tests.support.batches import numbered_rows
from tests.support.forks import collect_from_child, in_child
from tests.support.threads import in_threads

SAMPLERS: dict[str, Callable[[], Sampler]] = {
    "random": RandomSampler,
    "prioritized": PrioritizedSampler,
    "without": SamplerWithoutReplacement,
}
SIZE = 16


def in_memory(prefetch: int, sampler: str = "random", capacity: int = 1000, **more: Any) -> Any:
    return TensorDictReplayBuffer(
        storage=MemoryStorage(capacity, seed=1),
        sampler=SAMPLERS[sampler](),
        batch_size=SIZE,
        prefetch=prefetch,
        **more,
    )


def drawn(rb: TensorDictReplayBuffer, batches: int, size: int | None = None) -> list[list[int]]:
    return [rb.sample(size)["number"].tolist() for _ in range(batches)]


class Watched(RandomSampler):
    """Tell of every selection."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.enough = threading.Semaphore(0)

    def sample(self, storage: Storage, batch_size: int, generator: np.random.Generator) -> Selection:
        self.made.append(threading.current_thread().name)
        self.enough.release()
        return super().sample(storage, batch_size, generator)


# ---------------------------------------------------------------------------------------------------
# The same batches, earlier.


@pytest.mark.some(3)
@pytest.mark.parametrize("generator", [False, True])
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("prefetch", [1, 3])
def test_the_batches_are_the_same(prefetch: int, sampler: str, generator: bool) -> None:
    found = []
    for ahead in (0, prefetch):
        given = torch.Generator().manual_seed(5) if generator else None
        rb = in_memory(ahead, sampler, generator=given)
        rb.extend(numbered_rows(100))
        found.append(drawn(rb, 7) + drawn(rb, 3, 5) + drawn(rb, 7))
        found[-1] += [batch["number"].tolist() for batch in itertools.islice(rb, 7)]
        rb.close()
    assert found[0] == found[1]


@pytest.mark.parametrize("prefetch", [1, 4])
def test_they_are_made_before_they_are_asked_for(prefetch: int) -> None:
    sampler = Watched()
    rb = TensorDictReplayBuffer(
        storage=MemoryStorage(100), sampler=sampler, batch_size=SIZE, prefetch=prefetch
    )
    rb.extend(numbered_rows(100))
    rb.sample()
    for _ in range(prefetch + 1):
        assert sampler.enough.acquire(timeout=60)
    assert len(sampler.made) == prefetch + 1
    assert all(name.startswith("expstore-prefetch") for name in sampler.made)
    assert rb.stats()["prefetch_queue_size"] == prefetch
    rb.close()


def test_every_pass_ends_where_it_ends() -> None:
    rb = in_memory(3, "without", capacity=100)
    rb.extend(numbered_rows(100))
    for _ in range(3):
        batches = [batch["number"].tolist() for batch in rb]
        assert [len(batch) for batch in batches] == [16] * 6 + [4]
        assert sorted(itertools.chain(*batches)) == list(range(100))
    rb.close()


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_many_threads_are_served_once_each(sampler: str) -> None:
    rb, alone = in_memory(3, sampler), in_memory(0, sampler)
    for each in (rb, alone):
        each.extend(numbered_rows(SIZE * 40))
    found: list[list[int]] = []
    in_threads(4, lambda _: found.extend(drawn(rb, 10)))
    assert sorted(found) == sorted(drawn(alone, 40))
    rb.close()


# ---------------------------------------------------------------------------------------------------
# What has become wrong is made anew.


def test_no_row_that_was_overwritten_goes_out() -> None:
    rb = in_memory(4, capacity=64)
    rb.extend(numbered_rows(64))
    for cycle in range(1, 30):
        rb.sample()
        rb.extend(numbered_rows(100, cycle * 100))  # longer than ring and spare
        assert min(drawn(rb, 1)[0]) >= cycle * 100 + 36
    rb.close()


def test_a_change_is_in_the_next_batch() -> None:
    rb = in_memory(4, capacity=64)
    rb.extend(numbered_rows(64))
    for cycle in range(1, 20):
        rb.sample()
        rb[:] = numbered_rows(64, cycle * 100)
        assert min(drawn(rb, 1)[0]) >= cycle * 100
        assert rb.stats()["prefetch_queue_size"] == 4  # the next one is under way again
    rb.close()


def test_an_emptied_buffer_returns_nothing() -> None:
    rb = in_memory(4)
    rb.extend(numbered_rows(100))
    rb.sample()
    rb.empty()
    with pytest.raises(NotReadyError):
        rb.sample()
    rb.extend(numbered_rows(10, 500))
    assert min(drawn(rb, 1)[0]) >= 500
    rb.close()


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_no_batch_from_before_a_reseed(sampler: str) -> None:
    generator = torch.Generator().manual_seed(5)
    rb = in_memory(4, sampler, generator=generator)
    alone = in_memory(0, sampler, generator=torch.Generator().manual_seed(5))
    for each in (rb, alone):
        each.extend(numbered_rows(100))
        drawn(each, 3)
    generator.manual_seed(9)
    alone._sampling.generator.manual_seed(9)  # type: ignore[union-attr]
    assert drawn(rb, 5) == drawn(alone, 5)
    rb.set_rng(torch.Generator().manual_seed(2))
    alone.set_rng(torch.Generator().manual_seed(2))
    assert drawn(rb, 5) == drawn(alone, 5)
    rb.set_rng(None)
    alone.set_rng(None)
    assert drawn(rb, 5) == drawn(alone, 5)
    rb.close()


def test_no_row_that_has_become_too_stale() -> None:
    sampler = StalenessAwareSampler(max_staleness=0)
    rb = TensorDictReplayBuffer(storage=MemoryStorage(1000), sampler=sampler, batch_size=SIZE, prefetch=3)
    for version in range(10):
        rb.extend(TensorDict({"policy_version": torch.full((20,), version)}, [20]))
        sampler.consumer_version = version
        assert set(rb.sample()["policy_version"].tolist()) == {version}
    rb.close()


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_version_that_is_loaded_shows_at_once(tmp_path: Path, sampler: str) -> None:
    with expstore.open(tmp_path / "a.exp", capacity=100, seed=1, sampler=SAMPLERS[sampler]()) as other:
        other.extend(numbered_rows(100, 700))
        other.dumps(tmp_path / "versions")
        wanted = drawn(other, 5, SIZE)
    with expstore.open(
        tmp_path / "b.exp",
        capacity=100,
        sampler=SAMPLERS[sampler](),
        batch_size=SIZE,
        batches=expstore.Batches(prefetch=3),
    ) as rb:
        rb.extend(numbered_rows(100))
        drawn(rb, 2)
        rb.loads(tmp_path / "versions")
        assert drawn(rb, 5) == wanted


# ---------------------------------------------------------------------------------------------------
# What was made and not handed out does not count.


@pytest.mark.guarantee("draw/count")
@pytest.mark.some(2)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_killed_store_continues_with_undelivered_batches(store_path: Path, sampler: str) -> None:
    def open_with(prefetch: int) -> TensorDictReplayBuffer:
        batches = expstore.Batches(prefetch=prefetch)
        made = SAMPLERS[sampler]()
        return expstore.open(store_path, capacity=200, seed=1, sampler=made, batch_size=SIZE, batches=batches)

    def live() -> None:
        rb = open_with(4)
        rb.extend(numbered_rows(100))
        drawn(rb, 5)
        rb.flush()
        drawn(rb, 3)

    in_child(live)
    alone = in_memory(0, sampler, 200)
    alone.extend(numbered_rows(100))
    wanted = drawn(alone, 48)
    with open_with(0) as rb:
        assert rb.storage.draws.number == 8
        assert drawn(rb, 20) == wanted[8:28]
    with open_with(2) as rb:
        assert drawn(rb, 20) == wanted[28:]


@pytest.mark.some(2)
@pytest.mark.parametrize("generator", [False, True])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_state_is_that_of_the_last_returned_batch(store_path: Path, sampler: str, generator: bool) -> None:
    given = torch.Generator().manual_seed(5) if generator else None
    with expstore.open(
        store_path,
        capacity=200,
        seed=1,
        sampler=SAMPLERS[sampler](),
        batch_size=SIZE,
        batches=expstore.Batches(prefetch=2, generator=given),
    ) as rb:
        rb.extend(numbered_rows(100))
        drawn(rb, 20)
        state = rb.state_dict()
        wanted = drawn(rb, 12)
        rb.load_state_dict(state)
        assert drawn(rb, 12) == wanted


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("generator", [False, True])
def test_an_interrupted_call_loses_no_batch(
    monkeypatch: pytest.MonkeyPatch, sampler: str, generator: bool
) -> None:
    rb, alone = (
        in_memory(ahead, sampler, generator=torch.Generator().manual_seed(5) if generator else None)
        for ahead in (3, 0)
    )
    for each in (rb, alone):
        each.extend(numbered_rows(100))
        drawn(each, 3)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Future, "exception", interrupted)
        with pytest.raises(KeyboardInterrupt):
            rb.sample()
    assert drawn(rb, 5) == drawn(alone, 5)
    rb.close()


def test_a_failure_reaches_the_caller_and_passes() -> None:
    rb = in_memory(2, "without", capacity=20)
    rb.sampler.drop_last = True
    rb.extend(numbered_rows(20))
    drawn(rb, 1)
    with pytest.raises(ValueError, match="greater than the storage capacity"):
        rb.sample(50)
    assert len(drawn(rb, 1)[0]) == SIZE
    rb.close()


class Hindered(RandomSampler):
    """Fail whenever asked by a thread that makes batches ahead."""

    def sample(self, storage: Storage, batch_size: int, generator: np.random.Generator) -> Selection:
        if threading.current_thread() is not threading.main_thread():
            raise NotReadyError("there were no rows at that moment")
        return super().sample(storage, batch_size, generator)


def test_a_batch_that_failed_in_prefetching_is_drawn_on_request() -> None:
    rb = TensorDictReplayBuffer(
        storage=MemoryStorage(1000, seed=1), sampler=Hindered(), batch_size=SIZE, prefetch=2
    )
    alone = in_memory(0)
    for each in (rb, alone):
        each.extend(numbered_rows(100))
    assert drawn(rb, 5) == drawn(alone, 5)
    rb.close()


# ---------------------------------------------------------------------------------------------------
# Life.


def test_closing_ends_the_thread(store_path: Path) -> None:
    rb = expstore.open(store_path, batch_size=SIZE, batches=expstore.Batches(prefetch=2))
    rb.extend(numbered_rows(100))
    rb.sample()
    rb.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("expstore-prefetch")]
    with pytest.raises(StateError, match="closed"):
        rb.sample()
    rb.close()


def test_a_forgotten_buffer_lets_the_store_go(store_path: Path) -> None:
    rb = expstore.open(store_path, batch_size=SIZE, batches=expstore.Batches(prefetch=2))
    rb.extend(numbered_rows(100))
    rb.sample()
    prefetcher = rb._sampling._prefetcher
    assert prefetcher is not None
    while not all(future.done() for _, future in list(prefetcher._queue)):
        pass
    del prefetcher
    with pytest.warns(ResourceWarning, match="forgotten without close"):
        del rb
    with expstore.open(store_path, batch_size=SIZE) as again:
        assert len(again) == 100


def test_a_fork_draws_for_itself(store_path: Path) -> None:
    with expstore.open(
        store_path,
        batch_size=SIZE,
        batches=expstore.Batches(prefetch=2),
        sampler=SamplerWithoutReplacement(),
        capacity=1000,
    ) as rb:
        rb.extend(numbered_rows(100))
        rb.sample()
        rb.flush()
        with rb.sampler._lock:  # type: ignore[attr-defined]  # as the thread that makes batches may hold it
            (sizes,) = collect_from_child(lambda tell: tell({len(batch) for batch in rb}))
        assert sizes <= {16, 4}
        assert rb.sample().shape == (SIZE,)


def test_impossible_settings_are_refused(store_path: Path) -> None:
    with pytest.raises(ValueError, match="prefetch must be at least 0"):
        expstore.open(store_path, batches=expstore.Batches(prefetch=-1))
    if not torch.accelerator.is_available():
        with pytest.raises(ValueError, match="pin_memory=True needs an accelerator"):
            expstore.open(store_path, batches=expstore.Batches(pin_memory=True))
    assert not store_path.exists()


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("prefetch", [0, 2])
def test_pinned_batches_go_to_an_accelerator(prefetch: int) -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    plain = in_memory(0)
    rb = in_memory(prefetch, device=device, pin_memory=True)
    pinned = in_memory(prefetch, pin_memory=True)
    for each in (plain, rb, pinned):
        each.extend(numbered_rows(100))
    wanted = drawn(plain, 50)
    assert drawn(rb, 50) == wanted
    for numbers in wanted:
        batch = pinned.sample()
        assert batch["number"].is_pinned()
        assert batch["number"].tolist() == numbers
    rb.close()
    pinned.close()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda rb: pickle.loads(pickle.dumps(rb))])
def test_a_copy_ignores_prefetched_batches_and_continues_from_the_generator(copied: Any) -> None:
    generator = torch.Generator().manual_seed(5)
    rb = TensorDictReplayBuffer(storage=MemoryStorage(100), batch_size=4, prefetch=2, generator=generator)
    rb.extend(numbered_rows(50))
    for _ in range(3):
        rb.sample()
    with copied(rb) as twin:
        wanted = [rb.sample()["number"].tolist() for _ in range(5)]
        assert [twin.sample()["number"].tolist() for _ in range(5)] == wanted
