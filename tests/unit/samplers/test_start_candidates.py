"""Slices that start only at matching rows, compared with a row-by-row reference."""

from __future__ import annotations

import itertools
import pickle
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import expstore
from expstore import TensorDictReplayBuffer
from expstore.errors import NotReadyError
from expstore.samplers import PrioritizedSliceSampler, SliceSampler
from tests.support.batches import memory_buffer, trajectory_rows

LENGTH = 3


#: `value` is a number from 0 to 4.
rows = partial(trajectory_rows, value=lambda x: (x * 7919 % 5).float())


def held(rb: TensorDictReplayBuffer) -> dict[int, list[int]]:
    """Return trajectory -> x of its readable rows."""
    storage = rb.storage
    (found,) = storage.read(storage.window.ids(), [storage.require_schema().place_of(("x",))])
    trajectories: dict[int, list[int]] = {}
    for x in sorted(found.tolist()):
        trajectories.setdefault(x // 1000, []).append(x)
    return trajectories


def places(
    rb: TensorDictReplayBuffer, mass: Callable[[int], float], *, strict: bool = True, left: int = 0
) -> dict[int, dict[tuple[int, int], float]]:
    """Return trajectory -> (first x, length) of each slice in it -> mass."""
    found: dict[int, dict[tuple[int, int], float]] = {}
    for trajectory, xs in held(rb).items():
        full = min(LENGTH, len(xs))
        if full < LENGTH and strict:
            continue
        spare = min(left, full - 1)
        slices = {
            (xs[max(begin, 0)], full + min(begin, 0)): mass(xs[max(begin, 0)])
            for begin in range(-spare, len(xs) - full + 1)
        }
        slices = {place: value for place, value in slices.items() if value > 0}
        if slices:
            found[trajectory] = slices
    return found


def distribution(found: dict[int, dict[tuple[int, int], float]], by: str) -> dict[tuple[int, int], float]:
    """Return the chance of each slice."""
    if by == "start":
        total = sum(sum(slices.values()) for slices in found.values())
        return {place: mass / total for slices in found.values() for place, mass in slices.items()}
    return {
        place: mass / sum(slices.values()) / len(found)
        for slices in found.values()
        for place, mass in slices.items()
    }


def check(rb: TensorDictReplayBuffer, expected: dict[tuple[int, int], float]) -> None:
    counts: Counter[tuple[int, int]] = Counter()
    for _ in range(30):
        batch = rb.sample(150 * LENGTH)
        ends = np.flatnonzero(batch["next", "truncated"].numpy().reshape(-1)) + 1
        x = batch["x"].numpy()
        for begin, end in zip([0, *ends[:-1]], ends, strict=True):
            one = x[begin:end]
            assert (np.diff(one) == 1).all()
            counts[int(one[0]), len(one)] += 1
    assert counts.keys() <= expected.keys()
    total = sum(counts.values())
    for place, chance in expected.items():
        assert abs(counts[place] - total * chance) < 5 * (total * chance) ** 0.5 + 1, place


def value_of(x: int) -> int:
    return x * 7919 % 5


def matches(x: int) -> float:
    return float(value_of(x) >= 3)


def fill(rb: TensorDictReplayBuffer, at: dict[int, int], seed: int, cycles: int) -> None:
    """Let trajectories grow in turn by a few rows each."""
    rng = np.random.default_rng(seed)
    for _ in range(cycles):
        trajectory, count = int(rng.integers(1, 6)), int(rng.integers(1, 4))
        rb.extend(rows(trajectory, count, at.get(trajectory, 0)))
        at[trajectory] = at.get(trajectory, 0) + count


@pytest.mark.some(3)
@pytest.mark.parametrize("by", ["trajectory", "start"])
@pytest.mark.parametrize(
    ("options", "model"),
    [({}, {}), ({"strict_length": False}, {"strict": False}), ({"span": (2, 0)}, {"left": 2})],
)
@pytest.mark.parametrize(
    ("filter", "mass"),
    [
        ({"where": "value >= 3"}, matches),
        ({"where": "value > 0", "weight": "value"}, lambda x: float(value_of(x))),
    ],
)
def test_slices_begin_where_rows_match(
    by: Any,
    options: dict[str, Any],
    model: dict[str, Any],
    filter: dict[str, str],
    mass: Callable[[int], float],
) -> None:
    rb = memory_buffer(60, sampler=SliceSampler(slice_len=LENGTH, by=by, **options, **filter))
    at: dict[int, int] = {}
    for seed in range(3):
        fill(rb, at, seed, 12)
        rb.sample(LENGTH)  # so that it follows what comes, besides looking at all of it
        rb.refresh()
        check(rb, distribution(places(rb, mass, **model), by))
    changed = rb[:10]
    changed["value"][:] = 4.0
    first = changed["x"].tolist()
    rb[:10] = changed
    rb.refresh()
    check(rb, distribution(places(rb, lambda x: _changed(x, first, mass), **model), by))


def _changed(x: int, changed: list[int], mass: Callable[[int], float]) -> float:
    """The mass of a row, of which some have the value 4 now."""
    four = next(y for y in range(5) if value_of(y) == 4)
    return mass(four if x in changed else x)


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


def test_facts_of_episodes_decide_too() -> None:
    rb = memory_buffer(60, sampler=SliceSampler(slice_len=LENGTH, by="start", where="episode.length >= 8"))
    for trajectory, count in ((1, 4), (2, 9), (3, 8)):
        rb.extend(rows(trajectory, count))
    rb.refresh()
    check(rb, {(t * 1000 + k, LENGTH): 1 / 13 for t, n in ((2, 7), (3, 6)) for k in range(n)})
    rb.extend(rows(1, 4, 4))
    rb.refresh()
    check(rb, {(t * 1000 + k, LENGTH): 1 / 19 for t, n in ((1, 6), (2, 7), (3, 6)) for k in range(n)})


def test_rows_that_left_are_not_drawn_and_new_ones_join() -> None:
    rb = memory_buffer(30, sampler=SliceSampler(slice_len=LENGTH, where="value >= 3"))
    at: dict[int, int] = {}
    fill(rb, at, 0, 30)
    rb.sample(30)
    for seed in range(1, 40):
        fill(rb, at, seed, 4)
        firsts = rb.sample(30)["x"].view(10, LENGTH)[:, 0].tolist()
        possible = {place[0] for slices in places(rb, matches).values() for place in slices}
        assert set(firsts) <= possible
    rb.refresh()
    check(rb, distribution(places(rb, matches), "trajectory"))


def test_priorities_combine_with_the_filter() -> None:
    sampler = PrioritizedSliceSampler(60, 0.6, 1.0, slice_len=LENGTH, where="value >= 3")
    rb = memory_buffer(60, sampler=sampler)
    at: dict[int, int] = {}
    for seed in range(4):
        fill(rb, at, seed, 12)
        ids = rb.storage.window.ids()
        values = np.random.default_rng(seed).random(ids.size).astype(np.float32)
        rb.update_priority(id=torch.from_numpy(ids), priority=torch.from_numpy(values))
        rb.refresh()
        x = rb.storage.read(ids, [rb.storage.require_schema().place_of(("x",))])[0]
        priority = dict(zip(x.tolist(), ((values + np.float32(1e-8)).astype(float)) ** 0.6, strict=True))
        expected = distribution(places(rb, lambda x, priority=priority: matches(x) * priority[x]), "start")  # type: ignore[misc]
        check(rb, expected)
        batch = rb.sample(30)
        least = min(expected.values())
        weights = [least / expected[first, LENGTH] for first in batch["x"].view(10, -1)[:, 0].tolist()]
        np.testing.assert_allclose(batch["priority_weight"].view(10, -1)[:, 1], weights, rtol=1e-4)


@pytest.mark.parametrize("kind", [SliceSampler, PrioritizedSliceSampler])
def test_there_may_be_nowhere_to_begin(kind: type[Any]) -> None:
    rb = memory_buffer(60, sampler=kind(slice_len=LENGTH, where="value > 9"))
    rb.extend(rows(1, 9))
    with pytest.raises(NotReadyError, match="none of the 9 rows can be drawn with where='value > 9'"):
        rb.sample(9)
    late = rows(2, 9)
    late["value"][:] = 10.0
    rb.extend(late)
    assert (rb.sample(9)["x"] >= 2000).all()


@pytest.mark.parametrize("by", ["trajectory", "start"])
def test_after_a_refresh_batches_follow_from_the_rows_alone(store_path: Path, by: Any) -> None:
    def opened(**options: Any) -> TensorDictReplayBuffer:
        sampler = SliceSampler(slice_len=LENGTH, by=by, where="value >= 3")
        return expstore.open(store_path, sampler=sampler, batch_size=30, **options)

    def batches(rb: TensorDictReplayBuffer) -> list[list[int]]:
        rb.refresh()
        return [rb.sample()["x"].tolist() for _ in range(20)]

    with opened(capacity=60, seed=3) as rb:
        at: dict[int, int] = {}
        for seed in range(8):
            fill(rb, at, seed, 6)
            rb.sample()
        draw = rb.storage.draws.number
        expected = batches(rb)
        rb.storage.draws.set(draw, rb.storage.draws.progress)
    with opened() as rb:
        assert batches(rb) == expected


def test_copies_evaluate_for_themselves() -> None:
    sampler = SliceSampler(slice_len=LENGTH, where="value >= 3")
    rb = memory_buffer(60, sampler=sampler)
    rb.extend(rows(1, 12))
    rb.sample(LENGTH)
    copied = pickle.loads(pickle.dumps(sampler))
    assert repr(copied) == (
        "SliceSampler(slice_len=3, strict_length=True, by='trajectory', where='value >= 3')"
    )
    other = TensorDictReplayBuffer(storage=rb.storage, sampler=copied)
    check(other, distribution(places(other, matches), "trajectory"))
