"""Slices that start only at matching rows, while rows and episodes change.

How often each of them comes is in `test_slices_frequencies`.
"""

from __future__ import annotations

import itertools
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from expstore import TensorDictReplayBuffer
from expstore.samplers import SliceSampler
from tests.support.batches import memory_buffer, trajectory_rows

LENGTH = 3
#: `value` is a number from 0 to 4.
rows = partial(trajectory_rows, value=lambda x: x * 7919 % 5)


def starts(rb: TensorDictReplayBuffer) -> set[int]:
    """Return the first rows of slices that come."""
    first: torch.Tensor = rb.sample(500 * LENGTH)["x"].view(-1, LENGTH)[:, 0]
    return set(first.tolist())


def possible(rb: TensorDictReplayBuffer, value: int) -> set[int]:
    """Return the first rows with this value, from what the buffer holds."""
    held = dict(zip(rb[:]["x"].tolist(), rb[:]["value"].tolist(), strict=True))
    return {x for x in held if held[x] == value and all(x + k in held for k in range(LENGTH))}


@pytest.mark.parametrize("by", ["trajectory", "start"])
def test_starts_follow_new_and_changed_rows(by: Any) -> None:
    """Trajectories take turns in a ring that wraps; draws go on meanwhile."""
    rb = memory_buffer(60, sampler=SliceSampler(slice_len=LENGTH, by=by, where="value = 4"))
    rng, at = np.random.default_rng(1), dict.fromkeys(range(1, 6), 0)
    for _ in range(6):
        for _ in range(12):
            trajectory, count = int(rng.integers(1, 6)), int(rng.integers(1, 4))
            rb.extend(rows(trajectory, count, at[trajectory]))
            at[trajectory] += count
        rb.sample(LENGTH)  # so that it follows what comes, besides looking at all of it
        rb.refresh()
        assert starts(rb) == possible(rb, 4)
    changed = rb[:20]
    changed["value"] = (changed["value"] + 1) % 5
    rb[:20] = changed
    rb.refresh()
    assert starts(rb) == possible(rb, 4)


def test_starts_follow_more_changes_than_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("expstore.samplers.filter._KEPT", 20)
    rb = memory_buffer(400, sampler=SliceSampler(slice_len=LENGTH, by="start", where="value = 4"))
    for trajectory in range(1, 81):
        rb.extend(rows(trajectory, 4))
    rb.refresh()
    assert starts(rb) == possible(rb, 4)
    for place in range(1, 121, 4):
        changed = rb[place : place + 1]
        changed["value"] = (changed["value"] + 1) % 5
        rb[place : place + 1] = changed
        rb.refresh()
    assert starts(rb) == possible(rb, 4)


def test_facts_of_episodes_decide_too() -> None:
    rb = memory_buffer(60, sampler=SliceSampler(slice_len=LENGTH, by="start", where="episode.length >= 8"))
    for trajectory, count in ((1, 4), (2, 9), (3, 8)):
        rb.extend(rows(trajectory, count))
    rb.refresh()
    wanted = {*range(2000, 2007), *range(3000, 3006)}
    assert starts(rb) == wanted
    rb.extend(rows(1, 4, 4))
    rb.refresh()
    assert starts(rb) == wanted | {*range(1000, 1006)}


def test_small_masses_count_next_to_large_ones() -> None:
    weight = "CASE WHEN x < 2000 THEN 1e9 ELSE 1e-9 * (1 + x % 3) END"
    rb = memory_buffer(2000, sampler=SliceSampler(slice_len=1, weight=weight))
    rb.extend(rows(1, 900))
    rb.extend(rows(2, 9))
    rb.refresh()
    drawn = torch.cat([rb.sample(3000)["x"] for _ in range(4)])
    counts = np.bincount(drawn[drawn >= 2000].numpy() - 2000, minlength=9)
    total = int(counts.sum())
    assert 5600 < total < 6400
    expected = total * np.array([1 + x % 3 for x in range(2000, 2009)]) / 18
    assert (np.abs(counts - expected) < 5 * expected**0.5).all()


@pytest.mark.slow
def test_a_fast_writer_does_not_make_a_draw_fail() -> None:
    rb = memory_buffer(40, sampler=SliceSampler(slice_len=LENGTH, where="x >= 0"))
    rb.extend(rows(1, 40))
    over, first = threading.Event(), itertools.count(2)

    def write() -> None:
        while not over.is_set():
            rb.extend(rows(next(first), 20))

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(400):
            assert rb.sample(9).shape == (9,)
    finally:
        over.set()
        thread.join()
