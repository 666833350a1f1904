"""`where=` and `weight=` of samplers: which rows are drawn, how often, and from when on."""

from __future__ import annotations

import gc
import os
import pickle
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

import expstore
from expstore import (
    ConsumingSampler,
    MemoryStorage,
    PrioritizedSampler,
    RandomSampler,
    RecencySampler,
    SamplerWithoutReplacement,
    StalenessAwareSampler,
    TensorDictReplayBuffer,
)
from expstore.errors import NotReadyError, QueryError, StateError
from expstore.samplers.base import Sampler
from expstore.samplers.filter import Filter
from expstore.sql.expressions import FACTS
from tests.support.batches import episode_rows
from tests.support.forks import in_child
from tests.support.tuned import few_rows_in_memory

LIMIT = 20.0  # seconds after which what should come has not come
DRAWS = 40_000


#: `kind` is the number modulo 7, the reward half of it.
rows = partial(episode_rows, kind=lambda number: number % 7, reward=lambda number: number % 7 / 2)


def in_memory(sampler: Sampler, capacity: int = 1000) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(
        storage=MemoryStorage(capacity), sampler=sampler, batch_size=64, with_ids=True
    )


def on_disk(path: Path, sampler: Sampler, capacity: int = 1000, **settings: Any) -> TensorDictReplayBuffer:
    settings = {"seed": 1} | settings
    return expstore.open(path, capacity=capacity, sampler=sampler, batch_size=64, **settings)


@pytest.fixture
def make(store_path: Path) -> Callable[..., TensorDictReplayBuffer]:
    """A factory of buffers of 1000 rows on disk with a sampler."""
    return lambda sampler, capacity=1000: on_disk(store_path, sampler, capacity)


def counted(rb: TensorDictReplayBuffer, draws: int = DRAWS) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Draw rows; return those that came, by number, and how often."""
    numbers = torch.cat([rb.sample(1000)["number"] for _ in range(draws // 1000)])
    found = np.unique(numbers.numpy(), return_counts=True)
    return found[0], found[1]


def check_distribution(rb: TensorDictReplayBuffer, numbers: Any, weights: Any, draws: int = DRAWS) -> None:
    """Check that rows are drawn in proportion to weights, and no others: six standard deviations at most.

    And three more: rows that hardly ever come may do so now and then.
    """
    came, often = counted(rb, draws)
    chance = np.asarray(weights, np.float64) / np.sum(weights)
    assert set(came.tolist()) <= set(np.asarray(numbers)[chance > 0].tolist())
    seen = np.zeros(len(chance))
    seen[np.searchsorted(numbers, came)] = often
    spread = np.sqrt(draws * chance * (1 - chance))
    assert np.all(np.abs(seen - draws * chance) <= 6 * spread + 3)


def matching(rb: TensorDictReplayBuffer, where: str) -> list[int]:
    """Ask SQL which numbers match."""
    text = where.replace("episode.", "e.").replace("next.", "t.next.")
    found = rb.sql(
        f"SELECT t.number FROM transitions t JOIN episodes e ON e.episode_id = t._episode WHERE {text}"
    )
    return sorted(number for (number,) in found.fetchall())


# -- the law -------------------------------------------------------------------------------------


#: A sampler, and the masses that it gives to numbers from 260 to 459.
MASSES: dict[str, tuple[Callable[[], Sampler], Callable[[NDArray[Any]], NDArray[Any]]]] = {
    "both": (
        lambda: RandomSampler(where="kind IN (1, 2, 5)", weight="next.reward * 2 + 1"),
        lambda number: np.isin(number % 7, [1, 2, 5]) * (number % 7 + 1),
    ),
    "null": (lambda: RandomSampler(weight="nullif(kind, 3)"), lambda number: number % 7 * (number % 7 != 3)),
    "newest": (
        lambda: RecencySampler(None, 60, where="kind != 3", weight="kind + 1"),
        lambda number: (number % 7 != 3) * (number % 7 + 1) * (number >= 400),
    ),
    "half-life": (
        lambda: RecencySampler(3.0, where="kind != 3", weight="kind + 1"),
        lambda number: (number % 7 != 3) * (number % 7 + 1) * 0.5 ** ((459 - number) / 3),
    ),
    "however old": (
        lambda: RecencySampler(0.05, where="number < 280"),
        lambda number: (number < 280) * 0.5 ** np.clip((279 - number) / 0.05, 0, 1000),
    ),
}


@pytest.mark.parametrize("name", MASSES)
def test_rows_that_match_are_drawn_in_proportion_to_their_weights(
    make: Callable[..., TensorDictReplayBuffer], name: str
) -> None:
    sampler, mass = MASSES[name]
    rb = make(sampler(), 200)
    rb.extend(rows(300))  # the ring wraps
    rb.sample()
    rb.extend(rows(160, start=300))
    rb.refresh()
    numbers = np.arange(260, 460)
    check_distribution(rb, numbers, mass(numbers))
    rb.close()


def test_priorities_are_multiplied_and_their_weights_are_of_the_candidates(
    make: Callable[..., TensorDictReplayBuffer],
) -> None:
    sampler = PrioritizedSampler(alpha=0.7, beta=0.5, eps=0.0, where="kind < 4", weight="kind + 0.5")
    rb = make(sampler, 100)
    rb.extend(rows(130))
    rb.refresh()
    ids = rb.storage.window.ids()
    priorities = np.linspace(0.01, 3, 100).astype(np.float32)
    rb.sample()  # the tree is there when they are set
    rb.update_priority(id=ids, priority=priorities)
    numbers = np.arange(30, 130)
    kinds = numbers % 7
    mass = priorities.astype(np.float64) ** 0.7 * np.where(kinds < 4, kinds + 0.5, 0)
    check_distribution(rb, numbers, mass)
    batch = rb.sample(500)
    drawn = mass[batch["number"].numpy() - 30]
    expected = (drawn / mass[mass > 0].min()) ** -0.5
    np.testing.assert_allclose(batch["priority_weight"].numpy(), expected, rtol=1e-5)
    rb.close()


@pytest.mark.some(3)
@pytest.mark.parametrize(
    "where",
    [
        "episode.return > 14",
        "episode.status = 'terminated'",
        "episode.length >= 10 AND next.reward > 1",
        "episode.episode_id % 2 = 0",
        "episode.trajectory_id IS NULL AND episode.info IS NULL",
        "episode.end_time IS NULL OR _step < 3",
    ],
)
def test_expressions_speak_of_episodes(make: Callable[..., TensorDictReplayBuffer], where: str) -> None:
    rb = make(RandomSampler(where=where), 200)
    rb.extend(rows(255))
    rb.sample()
    rb.extend(rows(28, start=255))
    rb.refresh()
    wanted = matching(rb, where)
    assert wanted
    assert set(counted(rb, 20_000)[0].tolist()) == set(wanted)
    rb.close()


def test_fields_with_the_names_of_other_columns_are_told_apart() -> None:
    """As SQL shows them: with an underscore behind, and so does a field called `episode`."""
    number = torch.arange(40)
    names = ("_priority", "_step", "_time", "_index", "episode")
    data = TensorDict(dict.fromkeys(names, number + 100) | {"number": number}, [40])
    where = " AND ".join(f"{name}_ >= 120" for name in names)
    rb = in_memory(RandomSampler(where=f"{where} AND _index < 30 AND episode.length = 1"))
    rb.extend(data)
    assert set(counted(rb, 2000)[0].tolist()) == set(range(20, 30))
    assert rb.sql("SELECT _index, _index_ FROM transitions LIMIT 1").fetchall() == [(0, 100)]


# -- what is evaluated, and when -----------------------------------------------------------------


@pytest.mark.guarantee("draw/where")
def test_rows_that_left_are_never_drawn_and_new_ones_join_soon(
    make: Callable[..., TensorDictReplayBuffer],
) -> None:
    rb = make(RandomSampler(where="kind = 2"), 200)
    rb.extend(rows(200))
    rb.sample()
    newest, deadline = 0, time.monotonic() + LIMIT
    rb.extend(rows(100, start=200))
    while newest < 294:  # the newest row of kind 2
        batch = rb.sample()
        assert int(batch["number"].min()) >= 100
        assert bool((batch["kind"] == 2).all())
        newest = max(newest, int(batch["number"].max()))
        assert time.monotonic() < deadline
    rb.close()


def test_a_draw_does_not_wait_for_an_evaluation() -> None:
    rb = in_memory(RandomSampler(where="kind = 2"))
    rb.extend(rows(100))
    rb.sample()
    filter = rb.sampler.filter
    assert filter is not None
    with filter._evaluating:  # as if one went on
        rb.extend(rows(100, start=100))
        assert int(rb.sample()["number"].max()) < 100
    rb.refresh()
    assert int(rb.sample(1000)["number"].max()) >= 100


def test_without_a_candidate_a_draw_looks_at_what_is_new() -> None:
    rb = in_memory(RandomSampler(where="number >= 150"))
    rb.extend(rows(100))
    with pytest.raises(NotReadyError, match=r"none of the 100 rows .* where='number >= 150'"):
        rb.sample()
    rb.extend(rows(100, start=100))
    assert int(rb.sample()["number"].min()) >= 150


@pytest.mark.guarantee("draw/where")
def test_changed_rows_follow_after_a_refresh(make: Callable[..., TensorDictReplayBuffer]) -> None:
    rb = make(RandomSampler(where="kind = 2"))
    rb.extend(rows(700))
    rb.sample()
    changed = rb[2:9:7].clone()
    changed["kind"] = torch.tensor([0])
    rb[torch.tensor([2])] = changed
    other = rb[3:4].clone()
    other["kind"] = torch.tensor([2])
    rb[torch.tensor([3])] = other
    rb.refresh()
    came = counted(rb, 20_000)[0].tolist()
    assert 2 not in came
    assert set(came) == {3, *range(9, 700, 7)}
    rb.close()


def test_changed_episodes_are_seen_after_a_refresh(
    make: Callable[..., TensorDictReplayBuffer],
) -> None:
    rb = make(RandomSampler(where="episode.status = 'terminated'"))
    rb.extend(rows(25), source="a")
    assert int(rb.sample(500)["number"].max()) == 19
    rb.extend(rows(5, start=25), source="a")
    rb.refresh()
    assert int(rb.sample(500)["number"].max()) == 29
    rb.extend(rows(1, start=30, length=1), source="b")
    rb.refresh()
    assert set(counted(rb, 5000)[0].tolist()) == set(range(31))
    rb.close()


# -- the same rows, the same draws ---------------------------------------------------------------


WHERE, WEIGHT = "episode.return > 5 AND kind != 2", "kind + 0.1"
FILTERED: dict[str, Callable[[], Sampler]] = {
    "random": lambda: RandomSampler(where=WHERE, weight=WEIGHT),
    "prioritized": lambda: PrioritizedSampler(where=WHERE, weight=WEIGHT),
    "recency": lambda: RecencySampler(50.0, where=WHERE, weight=WEIGHT),
    "staleness": lambda: StalenessAwareSampler(where=WHERE, weight=WEIGHT),
    "without_replacement": lambda: SamplerWithoutReplacement(where=WHERE),
}


def drawn_with(rb: TensorDictReplayBuffer, number: int) -> list[int]:
    """Draw by generator `number`, whoever has drawn before."""
    rb.refresh()
    generator = np.random.Generator(np.random.Philox(number))
    selection = rb.sampler.sample(rb.storage, 200, generator)
    weights = [values.tolist() for values in selection.info.values()]
    return [*selection.ids.tolist(), *(w for one in weights for w in one)]


@pytest.mark.guarantee(
    "draw/where",
    "With `where=` or `weight=`, a row that has left the store is never drawn; after `rb.refresh()`, "
    "draws follow from the rows alone, to the bit.",
)
@pytest.mark.some(4)
@pytest.mark.parametrize("capacity", [300, None])
@pytest.mark.parametrize("kind", FILTERED)
def test_after_a_refresh_draws_are_those_of_any_other_process(
    store_path: Path, kind: str, capacity: int | None
) -> None:
    rb = expstore.open(store_path, capacity=capacity, sampler=FILTERED[kind](), batch_size=64)
    follower: TensorDictReplayBuffer | None = None
    for step in range(9):
        rb.extend(versioned(73, start=73 * step), source="a")
        if kind != "without_replacement":  # its draws depend on those before
            rb.sample()
        if step == 4:
            changed = rb[:6].clone()
            changed["kind"] = torch.zeros(6, dtype=torch.int64)
            rb[torch.arange(6)] = changed
            rb.flush()
            follower = expstore.open(store_path, mode="r", sampler=FILTERED[kind]())
        if follower is not None and kind != "without_replacement":
            drawn_with(follower, 0)
    rb.update_priority(id=rb.storage.window.ids()[::3], priority=2.5)
    rb.flush()
    expected = drawn_with(rb, 17)
    assert follower is not None
    assert drawn_with(follower, 17) == expected
    fresh = expstore.open(store_path, mode="r", sampler=FILTERED[kind]())
    assert drawn_with(fresh, 17) == expected
    fresh.close()
    follower.close()
    rb.close()
    rb = expstore.open(store_path, sampler=FILTERED[kind]())
    assert drawn_with(rb, 17) == expected
    rb.close()


# -- what is refused -----------------------------------------------------------------------------

REFUSED = {
    "(SELECT true)": "a subquery",
    "EXISTS (SELECT 1 FROM transitions)": "a subquery",
    "kind IN (SELECT 1)": "a subquery",
    "max(kind) > 1": r"max\(\) is an aggregate",
    "count(*) > 1": "aggregate",
    "kind = max(kind) OVER ()": "a window function",
    "row_number() OVER () = 1": "a window function",
    "kind = ?": "a parameter",
    "kind = $kind": "a parameter",
    "kind = 1; SELECT true": "2 statements|syntax error",
    "true, false": "more than one expression",
    "true AS x": "more than one expression",
    "true FROM transitions": "more than one expression",
    "true ORDER BY 1": "more than one expression",
    "true) OR (true": "syntax error",
    "kind = 1 /*": "unterminated",
    "-- nothing": "not one SQL expression",
    "": "not one SQL expression",
    "kind >": "syntax error",
    "true\0": "a NUL character",
    "*": "a star",
    "random() < 0.5": "can return different values for the same row",
    "_time > now()": "can return different values for the same row",
    "_time > ago(INTERVAL 1 DAY)": "can return different values for the same row",
    "unnest([true])": "a table",
    "_priority > 1": "PrioritizedSampler",
    "transitions._priority > 1": "PrioritizedSampler",
    "_sampled = 0": "ConsumingSampler",
    "episode.live_rows > 3": "every row that is evicted",
    "episode.reward > 3": "not a column of episodes.*episode.return",
}


def test_expressions_beyond_a_row_are_refused_by_name() -> None:
    for text, why in REFUSED.items():
        for make in (lambda text: RandomSampler(where=text), lambda text: PrioritizedSampler(weight=text)):
            with pytest.raises(QueryError, match=f"(?s){why}"):
                make(text)


def test_unknown_fields_are_refused_after_the_first_rows() -> None:
    for name, text, why in (
        (
            "where",
            "kind = 1 AND nothing > 2",
            "nothing.*fields are number, kind, next.reward.*_step.*episode",
        ),
        ("where", "next.rewards > 2", "next.reward"),
        ("where", "kind", "where= takes a boolean expression.*BIGINT"),
        ("weight", "kind = 1", "weight= takes a number.*BOOLEAN"),
        ("weight", "next", "weight= takes a number.*STRUCT"),
        ("where", "_time > current_timestamp", "current_timestamp changes"),
        ("where", "no_function(kind)", "no_function"),
    ):
        rb = in_memory(RandomSampler(**{name: text}))
        rb.extend(rows(10))
        with pytest.raises(QueryError, match=f"(?s){why}"):
            rb.sample()
        with pytest.raises(QueryError, match=f"(?s){why}"):
            TensorDictReplayBuffer(storage=rb.storage, sampler=RandomSampler(**{name: text}))


def test_a_store_whose_fields_are_others_is_not_left_open(store_path: Path) -> None:
    with on_disk(store_path, RandomSampler()) as rb:
        rb.extend(rows(10))
    with pytest.raises(QueryError, match="nothing"):
        on_disk(store_path, RandomSampler(where="nothing > 1"))
    with on_disk(store_path, RandomSampler(where="kind > 1")) as rb:
        rb.sample()


@pytest.mark.parametrize("weight", ["kind - 3", "'nan'::FLOAT", "1e308 * kind * 10", "kind * 1e200"])
def test_invalid_weights_are_refused_and_change_nothing(weight: str) -> None:
    rb = in_memory(RandomSampler(weight=f"CASE WHEN number < 100 THEN 1 ELSE {weight} END"))
    rb.extend(rows(100))
    rb.sample()
    rb.extend(rows(10, start=100))
    filter = rb.sampler.filter
    assert filter is not None
    before = filter.version, filter.masses.copy()
    with pytest.raises(QueryError, match="weight=.*for the row with id 10") as caught:
        rb.refresh()
    assert caught.value.kind == "weight"
    with pytest.raises(QueryError, match="weight="):  # as long as it is so
        rb.sample()
    assert filter.version == before[0]
    np.testing.assert_array_equal(filter.masses, before[1])
    good = rows(10)
    rb[torch.arange(100, 110)] = good
    rb.refresh()
    assert rb.sample()["number"].numel() == 64


def test_a_failure_in_the_background_is_raised_by_a_draw() -> None:
    rb = in_memory(RandomSampler(where="CAST(CASE WHEN kind = 6 THEN 'six' ELSE '1' END AS INT) = 1"))
    rb.extend(rows(6))
    rb.sample()
    rb.extend(rows(1, start=6))
    deadline = time.monotonic() + LIMIT

    def draw_on() -> None:
        while time.monotonic() < deadline:
            rb.sample()

    with pytest.raises(QueryError, match="six"):
        draw_on()


# -- life ----------------------------------------------------------------------------------------


def test_batches_made_ahead_before_a_refresh_are_drawn_again() -> None:
    rb = TensorDictReplayBuffer(
        storage=MemoryStorage(1000),
        sampler=RandomSampler(where="episode.status = 'open'"),
        prefetch=3,
        batch_size=50,
    )
    rb.extend(rows(15), source="a")
    assert int(rb.sample()["number"].min()) >= 10
    rb.extend(rows(5, start=15), source="a")
    rb.extend(rows(5, start=100), source="a")
    rb.refresh()
    for _ in range(5):
        assert int(rb.sample()["number"].min()) >= 100


def test_every_sampler_says_its_filter_and_refuses_the_state_of_another() -> None:
    def buffer(where: str | None) -> TensorDictReplayBuffer:
        rb = in_memory(RandomSampler(where=where))
        rb.extend(rows(50))
        return rb

    one = buffer("kind = 1")
    assert "where='kind = 1'" in repr(one)
    state = one.state_dict()
    assert state["_sampler"] == {"where": "kind = 1", "weight": None}
    expected = one.sample()["number"].tolist()
    same = buffer("kind = 1")
    same.load_state_dict(state)
    assert same.sample()["number"].tolist() == expected
    for other in (buffer("kind = 2"), buffer(None)):
        with pytest.raises(StateError):
            other.load_state_dict(state)


@pytest.mark.guarantee("process/forks")
@pytest.mark.slow
def test_a_fork_refuses_a_filter_that_does_not_fit_and_only_this_one(store_path: Path) -> None:
    refused = [in_memory(RandomSampler(where="nothing > 1")) for _ in range(8)]  # their order is not known
    for other in refused:
        other.extend(rows(10))
    rb = on_disk(store_path, RandomSampler(where="episode.return > 5 AND kind = 2"))
    rb.extend(rows(300))
    rb.sample()

    def child() -> None:
        assert rb.storage.follows
        assert set((rb.sample()["number"] % 7).tolist()) == {2}
        for other in refused:
            with pytest.raises(QueryError, match="nothing"):
                other.sample()

    in_child(child)
    rb.close()


def test_the_thread_ends_with_the_store_and_holds_nothing() -> None:
    def filtering() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "expstore-filter"}

    others = filtering()  # of tests before this one; they end by themselves
    rb = in_memory(RandomSampler(where="kind = 2"))
    rb.extend(rows(100))
    rb.sample()
    assert not filtering() - others  # nothing is new
    rb.extend(rows(100, start=100))
    rb.sample()
    assert len(filtering() - others) == 1
    rb.close()
    assert not filtering() - others
    rb = in_memory(RandomSampler(where="kind = 2"))
    rb.extend(rows(100))
    rb.sample()
    rb.extend(rows(100, start=100))
    rb.sample()
    rb.refresh()
    storage = weakref.ref(rb.storage)
    del rb
    deadline = time.monotonic() + LIMIT
    while storage() is not None and time.monotonic() < deadline:
        gc.collect()
    assert storage() is None


# -- the other samplers --------------------------------------------------------------------------


def test_recency_with_a_wider_window_looks_back_again() -> None:
    sampler = RecencySampler(newest=10, where="kind = 2")
    rb = in_memory(sampler)
    rb.extend(rows(700))
    assert int(rb.sample(500)["number"].min()) >= 690
    sampler.newest = 600
    check_distribution(rb, np.arange(100, 700), np.arange(100, 700) % 7 == 2)


def versioned(count: int, *, start: int = 0) -> TensorDict:
    return rows(count, start=start).set("policy_version", torch.arange(start, start + count) // 20)


@pytest.mark.slow
def test_staleness_is_multiplied(make: Callable[..., TensorDictReplayBuffer]) -> None:
    sampler = StalenessAwareSampler(max_staleness=6, where="kind IN (1, 2, 4)", weight="next.reward")
    rb = make(sampler, 200)
    rb.extend(versioned(150))
    sampler.consumer_version = 20
    with pytest.raises(NotReadyError, match="max_staleness"):
        rb.sample(1)
    rb.extend(versioned(250, start=150))
    rb.refresh()
    numbers = np.arange(200, 400)
    kinds, staleness = numbers % 7, 20 - numbers // 20
    mass = np.isin(kinds, [1, 2, 4]) * kinds / (staleness + 1.0) * (staleness <= 6)
    # One row per batch: larger ones hold no row twice.
    draws = torch.cat([rb.sample(1)["number"] for _ in range(6000)]).numpy()
    chance = mass / mass.sum()
    seen = np.bincount(draws - 200, minlength=200)
    assert np.all(np.abs(seen - 6000 * chance) <= 6 * np.sqrt(6000 * chance * (1 - chance)) + 1e-9)
    batch = rb.sample(40)
    assert len(set(batch["number"].tolist())) == 40
    assert batch["staleness"].tolist() == (20 - batch["number"] // 20).tolist()
    every = set(numbers[mass > 0].tolist())
    assert set(rb.sample(len(every))["number"].tolist()) == every
    assert set(rb.sample(2000)["number"].tolist()) <= every
    rb.close()


@pytest.mark.some(3)
@pytest.mark.parametrize("size", [5, 64, 1000])
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_pass_covers_the_rows_that_match(
    make: Callable[..., TensorDictReplayBuffer], size: int, shuffle: bool
) -> None:
    rb = make(SamplerWithoutReplacement(shuffle=shuffle, where="kind IN (0, 4)"), 2000)
    rb.extend(rows(2600))
    rb.refresh()
    wanted = [n for n in range(600, 2600) if n % 7 in (0, 4)]
    orders = []
    for _ in range(2):
        batches = []
        while not batches or not rb.sampler.ran_out:
            batches.append(rb.sample(size)["number"])
        assert [len(one) for one in batches[:-1]] == [size] * (len(batches) - 1)
        orders.append(torch.cat(batches).tolist())
        assert sorted(orders[-1]) == wanted
    assert (orders[0] == orders[1]) is not shuffle
    rb.close()


def test_a_pass_drops_the_rest_that_fills_no_batch() -> None:
    rb = in_memory(SamplerWithoutReplacement(drop_last=True, where="kind = 2"))
    rb.extend(rows(700))  # 100 of them
    batches = []
    while not batches or not rb.sampler.ran_out:
        batches.append(rb.sample(30)["number"].tolist())
    assert [len(set(one)) for one in batches] == [30, 30, 30]
    assert len({number for one in batches for number in one}) == 90
    with pytest.raises(ValueError, match=r"batch size \(101\).*rows \(100\) that match where='kind = 2'"):
        rb.sample(101)
    assert len(rb.sample(100)) == 100


def test_matching_rows_are_drawn_the_set_number_of_times(make: Callable[..., TensorDictReplayBuffer]) -> None:
    rb = make(ConsumingSampler(2, where="kind = 2 AND episode.status = 'terminated'"))
    rb.extend(rows(75), source="a")
    wanted = [n for n in range(70) if n % 7 == 2]
    assert len(rb) == len(wanted)
    came = [n for batch in rb for n in batch["number"].tolist()]
    assert sorted(came) == sorted(wanted * 2)
    assert len(rb) == 0
    with pytest.raises(NotReadyError, match="where="):
        rb.sample()
    rb.extend(rows(5, start=75), source="a")
    assert [sorted(batch["number"].tolist()) for batch in rb] == [[72, 79], [72, 79]]
    rb.extend(rows(10, start=80), source="a")
    assert sorted(n for batch in rb for n in batch["number"].tolist()) == [86, 86]
    rb.close()


def test_a_buffer_that_consumes_keeps_the_filter() -> None:
    storage = MemoryStorage(100)
    sampler = RandomSampler(where="kind = 2")
    rb = TensorDictReplayBuffer(storage=storage, sampler=sampler, consume_after_n_samples=1, batch_size=100)
    rb.extend(rows(50))
    assert set((rb.sample()["number"] % 7).tolist()) == {2}


@pytest.mark.parametrize("asked", [False, True])
def test_facts_of_episodes_equal_those_in_sql(
    make: Callable[..., TensorDictReplayBuffer], asked: bool
) -> None:
    rb = make(RandomSampler(where="episode.length > 0"), 60)
    catalog, names = None, [name for name in FACTS if name != "source"]
    for step in range(6):
        rb.extend(rows(17, start=17 * step), source="a", episode_info={"step": step})
        rb.extend(rows(3, start=1000), source=f"b{step}")  # is never ended
        if asked:
            rb.sql("SELECT 1")  # now the index has it all
        if step == 3:
            rb.episodes.annotate(2, note="late")
        catalog = rb.storage.index.catalog
        assert catalog is not None
        episodes = np.arange(1, rb.storage.episodes.next_episode)
        found = catalog.facts(names, episodes).sort_by("episode_id").to_pylist()
        columns = ", ".join(f'"{name}"' for name in names)
        told = rb.sql(f"SELECT {columns} FROM episodes ORDER BY episode_id").arrow().to_pylist()
        assert found == told
    rb.close()


def test_notes_about_episodes_decide_after_a_refresh(make: Callable[..., TensorDictReplayBuffer]) -> None:
    rb = make(RandomSampler(where="CAST(episode.info ->> '$.good' AS BOOLEAN)"))
    rb.extend(rows(30))
    with pytest.raises(NotReadyError):
        rb.sample()
    rb.episodes.annotate(2, good=True)
    rb.refresh()
    assert set(counted(rb, 2000)[0].tolist()) == set(range(10, 20))
    rb.episodes.annotate(2, good=False)
    rb.episodes.annotate(1, good=True)
    rb.refresh()
    assert set(counted(rb, 2000)[0].tolist()) == set(range(10))
    rb.close()


def test_nothing_is_evaluated_while_a_process_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    rb = in_memory(RandomSampler(where="kind = 2 AND episode.length > 0"))
    rb.extend(rows(100))
    rb.sample()
    begun, forks = threading.Event(), threading.Event()
    ask, asked = Filter._ask, []

    def slow(self: Filter, storage: Any, ids: Any, facts: Any) -> Any:
        with storage.locks.episodes:  # in the child it would be locked for ever
            begun.set()
            forks.wait(0.5)  # the fork is to come after this, however long it takes
        asked.append(os.getpid())
        return ask(self, storage, ids, facts)

    monkeypatch.setattr(Filter, "_ask", slow)
    rb.extend(rows(100, start=100))
    rb.sample()
    assert begun.wait(LIMIT)
    child = os.fork()
    if not child:
        free = rb.storage.locks.episodes.acquire(timeout=LIMIT)
        os._exit(0 if free and asked else 1)
    forks.set()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    rb.refresh()
    assert int(rb.sample(1000)["number"].max()) >= 100


def test_sql_and_a_filter_of_a_copy_share_what_the_index_has(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_rows_in_memory(monkeypatch)
    rb = on_disk(store_path, RandomSampler(where="episode.status = 'terminated'"))
    rb.extend(rows(20), source="a")
    rb.flush()
    copied = pickle.loads(pickle.dumps(rb))
    for step in range(2, 5):
        assert set(torch.cat([copied.sample(1000)["number"]]).tolist()) == set(range(10 * step))
        assert copied.sql("SELECT count(*) FROM episodes").fetchone() == (step,)
        rb.extend(rows(10, start=10 * step), source="a")
        copied.refresh()
    copied.close()
    rb.close()


def test_rows_that_are_overwritten_while_they_are_read_say_nothing() -> None:
    rb = in_memory(RandomSampler(weight="kind - 2"), 100)
    good = rows(100).set("kind", torch.full((100,), 3))
    bad = rows(100).set("kind", torch.zeros(100, dtype=torch.int64))
    rb.extend(good)
    read, once = rb.storage.read, iter([True])

    def overtaken(ids: Any, places: Any = None) -> Any:
        first = next(once, False)
        if first:
            while rb.storage.last <= (rb.storage.geometry.slots or 0) + 100:
                rb.extend(bad)
        columns = read(ids, places)
        if first:
            assert set(columns[0].tolist()) == {0}
            rb.extend(good)
        return columns

    rb.storage.read = overtaken  # type: ignore[method-assign]
    rb.refresh()  # the rows of which it has read other bytes have left
    assert rb.sample()["kind"].tolist() == [3] * 64


def test_a_new_row_is_not_taken_for_the_one_that_was_in_its_slot() -> None:
    rb = in_memory(RandomSampler(where="number < 10000"), 100)
    for start in range(0, 10_000, 50):
        rb.extend(rows(50, start=start))
    assert rb.storage.last > 2 * (rb.storage.geometry.slots or 10_000)
    filter = rb.sampler.filter
    assert filter is not None
    rb.refresh()
    filter.masses[:] = 1  # as they are when every slot has been looked at
    with filter._evaluating:
        rb.extend(rows(50, start=10_000))
        assert int(rb.sample(500)["number"].max()) < 10_000


def test_iteration_continues_with_new_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Filter, "_hurry", lambda self, storage: None)  # as if the thread were late
    rb = in_memory(ConsumingSampler(where="kind = 2"))
    rb.extend(rows(7))
    assert len(rb) == 1
    rb.extend(rows(7, start=7))
    assert rb.sample(1)["number"].tolist() == [2]
    assert not rb.sampler.ran_out
    assert rb.sample(1)["number"].tolist() == [9]
    assert rb.sampler.ran_out
