"""The fold over records equals the writer's memory after each operation."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore.buffers.tensordict import TensorDictReplayBuffer
from expstore.episodes.table import EpisodeTable
from expstore.storages.format.journal import Kind, Record, read_journal
from expstore.storages.format.paths import JOURNAL
from expstore.storages.recovery.log_state import LogState, apply_to_episodes
from expstore.storages.sessions import end_sessions
from tests.support.batches import numbered_rows

Act = Callable[[TensorDictReplayBuffer], Any]


def rows(count: int, start: int = 0) -> Any:
    return numbered_rows(count, start, score=torch.arange(start, start + count).float())


def oldest(rb: TensorDictReplayBuffer) -> torch.Tensor:
    """Return the indices of the two oldest rows."""
    storage = rb.storage
    return torch.from_numpy(storage.geometry.indices_of(storage.window.ids()[:2], run=True))


ACTS: dict[str, Act] = {
    "extend": lambda rb: rb.extend(rows(12)),
    "add": lambda rb: rb.add(rows(1)[0]),
    "longer than the ring": lambda rb: rb.extend(rows(500)),
    "priorities": lambda rb: rb.update_priority(oldest(rb), torch.tensor([2.0, 7.0])),
    "sample": lambda rb: rb.sample(4),
    "flush": lambda rb: rb.flush(),
    "change": lambda rb: rb.storage.set(oldest(rb), rows(2, 90)),
    "note": lambda rb: rb.episodes.annotate_each(
        {number: {"note": "n"} for number in {1, rb.storage.episodes.next_episode - 1}}
    ),
    "end": lambda rb: end_sessions(rb.storage, [rb.storage.episodes.session]),
    "empty": lambda rb: rb.empty(),
}


#: The same after the store was emptied.
ANEW = ("empty", "extend", "end", "longer than the ring", "change", "note", "priorities", "sample", "add")


def fold(rb: TensorDictReplayBuffer) -> tuple[LogState, EpisodeTable]:
    storage = rb.storage
    first, *others = read_journal(storage.disk, storage.path / JOURNAL)
    assert first.kind is Kind.BASE
    state, table = LogState.of(first), EpisodeTable(generation=first.json()["generation"])
    table.load_base(first.json()["episodes"])
    for record in others:
        state.apply(record)
        apply_to_episodes(record, table)
    return state, table


def check(rb: TensorDictReplayBuffer) -> None:
    storage = rb.storage
    state, table = fold(rb)
    assert (state.last, state.retired, state.write_count) == (
        storage.last,
        storage.state.retired,
        storage.write_count,
    )
    assert (state.content, state.index_floor) == (storage.state.content, storage.state.index_floor)
    assert state.sequence == storage.state.journal.sequence
    assert state.find_stored(storage.capacity, storage.window.deleted) == storage.window
    assert table.to_base() == storage.episodes.to_base()


@pytest.mark.parametrize("capacity", [100, None])
@pytest.mark.parametrize("acts", [tuple(ACTS), ANEW], ids=["once", "anew"])
def test_the_fold_says_what_memory_says(
    store_path: Path, capacity: int | None, acts: tuple[str, ...]
) -> None:
    with expstore.open(store_path, capacity=capacity, seed=0) as rb:
        rb.extend(rows(30))
        check(rb)
        for name in acts:
            if name != "longer than the ring" or capacity is not None:
                ACTS[name](rb)
                check(rb)
        rb.flush()  # a checkpoint has what draws and priorities are
        state, _ = fold(rb)
        assert (state.draw, state.progress) == (rb.storage.draws.number, tuple(rb.storage.draws.progress))
        assert state.max_priority == rb.storage.priorities.largest == 7.0
        assert state.draw == 1


def test_rows_that_have_left_between_others(store_path: Path) -> None:
    with expstore.open(store_path) as rb:
        for start in range(0, 40, 10):
            batch = rows(10, start)
            batch["next"] = TensorDict({"done": (torch.arange(10) == 9)[:, None]}, [10])
            rb.extend(batch)
        rb.storage.retention.delete(np.array([2]))
        state, _ = fold(rb)
        assert state.find_stored(None, rb.storage.window.deleted) == rb.storage.window
        assert rb.storage.window.rows == 30
        assert (state.content, state.index_floor) == (rb.storage.state.content, rb.storage.state.content)


def test_a_base_says_what_the_records_before_it_say(store_path: Path) -> None:
    with expstore.open(store_path, capacity=100, seed=0) as rb:
        rb.extend(rows(30))
        for act in ACTS.values():
            act(rb)
        rb.flush()
        state, table = fold(rb)
        base = rb.storage.state.base_record(rb.storage.manifest.generation, opening=False)
        again = LogState.of(_record(base, state))
        assert again == replace(state, index_floor=state.content)
        assert table.to_base() == base["episodes"]


def _record(base: dict[str, Any], state: LogState) -> Record:
    return Record(state.sequence, Kind.BASE, json.dumps(base).encode())
