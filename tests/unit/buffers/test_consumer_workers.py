"""Consumers in workers of a shared buffer: of their own, and a rank of one whose rank 0 is elsewhere."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import expstore
from tests.support.forks import forked

pytestmark = pytest.mark.usefixtures("no_syncs", "no_index_on_close")


def rows(count: int, start: int = 0) -> TensorDict:
    return TensorDict({"observation": torch.arange(start, start + count)[:, None].float()}, [count])


def numbers_of(batches: Iterable[Any]) -> list[list[int]]:
    return [batch["observation"].reshape(-1).long().tolist() for batch in batches]


def draw(consumer: Any, count: int) -> list[list[int]]:
    return numbers_of(consumer.sample() for _ in range(count))


def join(ranks: list[list[list[int]]]) -> list[list[int]]:
    """Return whole batches of the parts of each rank."""
    return [list(chain(*parts)) for parts in zip(*ranks, strict=True)]


def as_it_is(rb: Any) -> Callable[[], Any]:
    return lambda: rb


def pickled(rb: Any) -> Callable[[], Any]:
    data = pickle.dumps(rb)
    return lambda: pickle.loads(data)


@pytest.mark.guarantee("consumers/ranks")
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("copy", [as_it_is, pickled])
def test_a_worker_has_consumers_and_ranks(
    tmp_path: Path, copy: Callable[[Any], Callable[[], Any]], rank: int
) -> None:
    """The worker writes between its draws, through the parent; either of them is rank 0."""
    with expstore.open(tmp_path / "run.exp", batch_size=4, seed=1).share() as rb:
        rb.extend(rows(100))
        get = copy(rb)

        def work() -> Any:
            mine = get()
            with mine.consumer("own", sampler="without_replacement") as own:
                found = draw(own, 3)
                own.commit()
            mine.extend(rows(20, 100))
            with mine.consumer("both", rank=rank, world=2, timeout=60) as both:
                parts = draw(both, 4)
                both.commit()
            return found, parts

        with forked(work) as wait:
            with rb.consumer("both", rank=1 - rank, world=2, timeout=60) as here:
                parts = draw(here, 4)
                here.commit()
                found, there = wait()
                assert here.committed == 4
        wholes = join([there, parts] if rank == 0 else [parts, there])
        known = {one.name: (one.draws, one.committed, one.is_open) for one in rb.consumers.list()}
        assert known == {"own": (3, 3, False), "both": (4, 4, False)}
        with rb.consumer("own", sampler="without_replacement") as own:
            assert own.position["draw"] == 3
            assert numbers_of(own.replay(0, 2)) == found
    assert {len(whole) for whole in wholes} == {4}
