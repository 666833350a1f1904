"""A resized store keeps rows, episodes, numbers and snapshots."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

import expstore
from expstore import ConsumingSampler, TensorDictMaxValueWriter, TensorDictReplayBuffer
from expstore.core import tuning
from expstore.core.draw_state import NO_PROGRESS
from expstore.errors import CorruptionError, LockedError, NotFoundError, SchemaError, StateError, StorageError
from expstore.maintenance import verify
from expstore.storages.engine.open_settings import Settings
from expstore.storages.factory import ZarrStorage
from expstore.storages.format.layout import ColumnLayout
from expstore.storages.stats import meta_relation
from tests.support.batches import noise_frames
from tests.support.damaged_stores import flip
from tests.support.framed_rows import framed_rows
from tests.support.gated_disk import GatedDisk, refuse
from tests.support.stores import read_columns, read_files
from tests.support.tuned import set_spare_slots

pytestmark = [pytest.mark.index, pytest.mark.usefixtures("no_syncs", "short")]

PACKED = {"frame": {"layout": "packed", "rows": 4}, "next.frame": {"layout": "packed", "rows": 8}}
LAYOUTS = {
    "flat": ColumnLayout(),
    "packed": ColumnLayout(fields=PACKED, share_next=False),
    "shared": ColumnLayout(fields=PACKED),
}
EPISODE, SHAPE = 5, (6, 8)


@pytest.fixture(scope="module")
def short() -> Iterator[None]:
    """Short shards and little spare."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "PACKED_SHARD_ROWS", 32)
        patch.setattr(tuning, "UNBOUNDED_PACKED_SHARD_ROWS", 32)
        patch.setattr(tuning, "PACKED_LOOKBACK_ROWS", (4, 8))
        set_spare_slots(patch, 12)
        yield


def batch(count: int, start: int = 0, *, step: int = 0) -> TensorDict:
    """Return rows of these numbers; `step` is the step of the first row in its source."""
    return framed_rows(count, start, shape=SHAPE, every=EPISODE, step=step)


def buffer(
    path: Path, capacity: int | None = None, layout: str = "flat", **more: Any
) -> TensorDictReplayBuffer:
    asked = Settings(flatten=True, seed=7, layout=LAYOUTS[layout], meta={"mine": 1})
    kept = ZarrStorage(path, capacity, settings=asked if not path.exists() else Settings())
    return TensorDictReplayBuffer(storage=kept, batch_size=8, **more)


def same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray], last: int | None = None) -> None:
    """Compare rows with the last so many of others."""
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        np.testing.assert_array_equal(
            found[name], values if last is None else values[len(values) - last :], name
        )


RELATIONS = {
    "sources": "SELECT * FROM sources ORDER BY ALL",
    "episodes": "SELECT * EXCLUDE live_rows FROM episodes ORDER BY ALL",
}


def answers(rb: TensorDictReplayBuffer) -> dict[str, Any]:
    return {name: rb.sql(query).fetchall() for name, query in RELATIONS.items()}


# -- a model -----------------------------------------------------------------------------------------


@dataclass
class World:
    """A store, and what it must hold: a plain list of rows."""

    path: Path
    capacity: int | None
    layout: str
    low: int = 0
    #: Number, name and number of its episode, step, priority.
    rows: list[tuple[int, tuple[str, int, int], int, float]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    largest: float = 1.0

    def act(self, name: str, *given: Any) -> None:
        if name == "resize":
            (capacity,) = given
            before = len(self.live)
            outcome = expstore.resize(self.path, capacity=capacity)
            self.capacity = capacity
            self.trim()
            assert (outcome.capacity, outcome.rows) == (capacity, len(self.live))
            assert outcome.given_up == before - len(self.live)
            assert verify(self.path) == []
            return
        with buffer(self.path, self.capacity, self.layout) as rb:
            getattr(self, name)(rb, *given)

    def extend(self, rb: TensorDictReplayBuffer, count: int, source: str) -> None:
        first, start = len(self.rows), self.counts.get(source, 0)
        rb.extend(batch(count, first, step=start), source=source)
        for which in range(start, start + count):  # an opening is a session: it begins an episode
            episode, step = (source, start, which // EPISODE), min(which - start, which % EPISODE)
            self.rows.append((first + which - start, episode, step, self.largest))
        self.counts[source] = start + count
        self.trim()

    def weigh(self, rb: TensorDictReplayBuffer, share: float, priority: float) -> None:
        if self.live:
            place = self.low + int(share * (len(self.live) - 1))
            rb.update_priority(id=[place + 1], priority=[priority])
            number, episode, step, _ = self.rows[place]
            self.rows[place] = number, episode, step, priority
            self.largest = max(self.largest, priority)

    @property
    def live(self) -> list[tuple[int, tuple[str, int, int], int, float]]:
        return self.rows[self.low :]

    def trim(self) -> None:
        if self.capacity is not None:
            self.low = max(self.low, len(self.rows) - self.capacity)

    def check(self, mode: Any) -> None:
        """Hold what a reader or a writer finds against the list."""
        with expstore.open(self.path, mode=mode) as rb:
            found = read_columns(rb.storage)
            numbers = np.array([row[0] for row in self.live], np.int64)
            np.testing.assert_array_equal(found["number"], numbers)
            np.testing.assert_array_equal(found["id"], numbers + 1)
            np.testing.assert_array_equal(found["frame"], noise_frames(numbers, *SHAPE).numpy())
            np.testing.assert_array_equal(found["next.frame"], noise_frames(numbers + 1, *SHAPE).numpy())
            assert found["step"].tolist() == [step for _, _, step, _ in self.live]
            assert found["priority"].tolist() == [np.float32(row[3]) for row in self.live]
            named = [episode for _, episode, _, _ in self.live]
            pairs = set(zip(named, found["episode"].tolist(), strict=True))
            assert len(pairs) == len(set(named)) == len(np.unique(found["episode"]))
            (live,) = rb.sql("SELECT sum(live_rows) FROM episodes").fetchall()
            assert live == (len(self.live),)


ACTS = st.one_of(
    st.tuples(st.just("extend"), st.integers(1, 40), st.sampled_from("abc")),
    st.tuples(st.just("extend"), st.integers(1, 40), st.sampled_from("abc")),
    st.tuples(st.just("weigh"), st.floats(0, 1), st.sampled_from([0.5, 2.0, 7.25])),
    st.tuples(st.just("resize"), st.one_of(st.none(), st.integers(8, 90))),
)


LIVES = {
    "capacity": st.one_of(st.none(), st.integers(8, 60)),
    "layout": st.sampled_from([*LAYOUTS]),
    "acts": st.lists(ACTS, min_size=2, max_size=8),
}


@pytest.mark.slow
@settings(deadline=None, max_examples=3)
@given(**LIVES)
def test_a_list_of_rows_says_what_is_there(
    capacity: int | None, layout: str, acts: list[tuple[Any, ...]]
) -> None:
    live(capacity, layout, acts)


@pytest.mark.torture
@pytest.mark.timeout(1200)
@settings(
    deadline=None,
    max_examples=300,
    derandomize=False,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
@given(**LIVES)
def test_many_lists_of_rows(
    capacity: int | None, layout: str, acts: list[tuple[Any, ...]], count_cases: Callable[..., None]
) -> None:
    count_cases()
    live(capacity, layout, acts)


def live(capacity: int | None, layout: str, acts: list[tuple[Any, ...]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        world = World(Path(name) / "run.exp", capacity, layout)
        world.act("extend", 20, "a")
        for act in acts:
            world.act(*act)
            if act[0] == "resize":
                world.check("r")
        world.check("r")
        world.check("a")


# -- everything else a user can see ------------------------------------------------------------------


def fill(path: Path, capacity: int | None, layout: str, **more: Any) -> None:
    """Make a store with all there is to be kept; it was opened once more, which cuts open episodes."""
    with buffer(path, capacity, layout, **more) as rb:
        for first in range(0, 120, 15):
            rb.extend(batch(15, first, step=first), source="arm" if first % 2 else None)
            if first == 30:
                rb.snapshots.tag("early")
        rb.update_priority(id=[100, 101, 119], priority=[3.0, 0.25, 9.0])
        rb.sql("SELECT 1")
        for _ in range(3):
            rb.sample()
    buffer(path, None, layout, **more).close()


SIZES = [(None, 150), (60, 90), (60, None), (60, 60), (90, 40), (None, 40)]


@pytest.mark.guarantee(
    "keep/resize",
    "`resize` keeps rows, ids, episodes, facts, priorities and the next batches, and `merge` keeps all rows.",
)
@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("capacity", "new", "layout"),
    [
        *((*sizes, "shared") for sizes in SIZES),
        *((*sizes, "flat") for sizes in SIZES[::2]),
        (90, 40, "packed"),
    ],
)
def test_all_stays_as_it_was(tmp_path: Path, capacity: int | None, new: int | None, layout: str) -> None:
    path, told = tmp_path / "run.exp", []
    fill(path, capacity, layout)
    with buffer(path, None, layout) as rb:
        before, said, rows = read_columns(rb.storage), answers(rb), len(rb)
        facts = dict(meta_relation(rb.storage))
        numbers = (rb.storage.draws.number, rb.storage.priorities.largest, rb.write_count, rb.storage.last)
    outcome = expstore.resize(path, capacity=new, progress=lambda *both: told.append(both))
    kept = rows if new is None else min(rows, new)
    assert (outcome.former, outcome.capacity, outcome.rows) == (capacity, new, kept)
    assert (outcome.given_up, outcome.recovered) == (rows - kept, None)
    assert told == sorted(told)
    assert bool(told) == (new != capacity)
    assert all(done == total for done, total in told[-1:])
    assert verify(path) == []
    assert [name for name in os.listdir(path) if name.startswith("load")] == []
    assert os.listdir(tmp_path) == ["run.exp"]
    for mode in ("r", "a"):
        with expstore.open(path, mode=mode, batch_size=8) as rb:
            same(read_columns(rb.storage), before, kept)
            assert answers(rb) == said
            now = (rb.storage.draws.number, rb.storage.priorities.largest, rb.write_count, rb.storage.last)
            assert now[mode == "r" :] == numbers[mode == "r" :]  # a reader counts its own draws
            assert (rb.storage.capacity, rb.storage.seed, rb.meta["mine"]) == (new, 7, 1)
            found = dict(meta_relation(rb.storage))
            assert {key: found[key] for key in ("uuid", "created")} == {
                key: facts[key] for key in ("uuid", "created")
            }
    (early,) = expstore.versions(path)
    assert (early.tag, early.rows) == ("early", 45)
    with expstore.open(path, version="early") as rb:
        assert rb.storage.capacity == capacity


@pytest.mark.guarantee("keep/resize")
@pytest.mark.parametrize("new", [200, None])
def test_the_next_batches_are_those_that_would_have_come(tmp_path: Path, new: int | None) -> None:
    path = tmp_path / "run.exp"
    fill(path, 130, "flat")
    with buffer(path) as rb:
        wanted = [rb.sample()["number"].tolist() for _ in range(3)]
        rb.storage.draws.set(3, NO_PROGRESS)
    expstore.resize(path, capacity=new)
    with buffer(path) as rb:
        assert [rb.sample()["number"].tolist() for _ in range(3)] == wanted


@pytest.mark.some(2)
@pytest.mark.parametrize("new", [30, 200, None])
def test_counts_stay(tmp_path: Path, new: int | None) -> None:
    path = tmp_path / "run.exp"

    def counts(rb: TensorDictReplayBuffer) -> np.ndarray:
        storage: Any = rb.storage
        window = storage.window
        return np.concatenate(storage.state.sampled.views(storage.geometry.runs(window.low + 1, window.size)))

    with buffer(path, 60, sampler=ConsumingSampler(3)) as rb:
        for first in range(0, 90, 15):
            rb.extend(batch(15, first))
            rb.sample()
        before = counts(rb)
    assert set(before.tolist()) > {0, 1}
    expstore.resize(path, capacity=new)
    assert verify(path) == []
    with buffer(path, None, sampler=ConsumingSampler(3)) as rb:
        np.testing.assert_array_equal(counts(rb), before[-30:] if new == 30 else before)


def test_rows_that_left_by_episodes_stay_away(tmp_path: Path) -> None:
    path = tmp_path / "run.exp"
    with expstore.open(path, retain={"where": "terminated"}) as rb:
        rb.extend(batch(20))
    with pytest.raises(StateError, match="has a retain= policy"):
        expstore.resize(path, capacity=8)
    expstore.open(path, retain={}).close()
    assert expstore.resize(path, capacity=8).rows == 8
    assert verify(path) == []


def test_a_store_without_rows(tmp_path: Path) -> None:
    path = tmp_path / "run.exp"
    buffer(path, 60, "shared").close()
    assert expstore.resize(path, capacity=24).rows == 0
    with buffer(path) as rb:
        rb.extend(batch(30))
        assert sorted(rb[:]["number"].tolist()) == list(range(6, 30))
        assert rb.storage.capacity == 24


@pytest.mark.some(2)
@pytest.mark.parametrize(("asked", "capacity"), [(100, 102), (31, 33), (None, None)])
def test_rows_of_several_dims_are_whole_steps(
    tmp_path: Path, asked: int | None, capacity: int | None
) -> None:
    path = tmp_path / "run.exp"
    with TensorDictReplayBuffer(storage=ZarrStorage(path, 60, ndim=2), batch_size=4) as rb:
        for first in range(0, 90, 15):
            rb.extend(batch(15, first).reshape(3, 5))
        before = read_columns(rb.storage)
    assert expstore.resize(path, capacity=asked).capacity == capacity
    assert verify(path) == []
    with TensorDictReplayBuffer(storage=ZarrStorage(path), batch_size=4) as rb:
        same(read_columns(rb.storage), before, min(60, capacity or 60))
        assert rb.storage.geometry.dims == (3,)
        rb.extend(batch(6, 90).reshape(3, 2))
        assert rb.storage.last == 96


def test_an_open_reader_continues(tmp_path: Path) -> None:
    path = tmp_path / "run.exp"
    fill(path, 60, "shared")
    with expstore.open(path, mode="r") as reader:
        before = read_columns(reader.storage)
        expstore.resize(path, capacity=25)
        reader.refresh()
        same(read_columns(reader.storage), before, 25)
        assert reader.sql("SELECT count(*) FROM transitions").fetchall() == [(25,)]


@pytest.mark.some(2)
@pytest.mark.parametrize("new", [7, 30, None])
def test_rows_without_a_fixed_size(tmp_path: Path, new: int | None) -> None:
    path = tmp_path / "run.exp"
    texts = ["x" * (n % 9) if n % 5 else None for n in range(40)]
    with expstore.open(path, capacity=20, layout="arrow") as rb:
        for first in range(0, 40, 8):
            number = torch.arange(first, first + 8)
            rb.extend(TensorDict({"text": texts[first : first + 8], "number": number}, [8]))
    assert expstore.resize(path, capacity=new).rows == min(20, new or 20)
    assert verify(path) == []
    with expstore.open(path) as rb:
        found = rb.sql("SELECT number, text FROM transitions ORDER BY number").fetchall()
        assert found == [(n, texts[n]) for n in range(40 - min(20, new or 20), 40)]
        rb.extend(TensorDict({"text": ["late"], "number": torch.tensor([40])}, [1]))


# -- stores that keep the best rows ------------------------------------------------------------------


def best(path: Path, capacity: int | None = None) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(
        storage=ZarrStorage(path, capacity), writer=TensorDictMaxValueWriter("score"), batch_size=4
    )


def scores(count: int, seed: int) -> TensorDict:
    values = np.random.default_rng(seed).integers(0, 1000, count).astype(np.float32)
    return TensorDict({"score": torch.from_numpy(values), "twice": torch.from_numpy(2 * values)}, [count])


@pytest.mark.some(2)
@pytest.mark.parametrize("new", [10, 25, 60])
def test_the_best_rows_stay(tmp_path: Path, new: int) -> None:
    path = tmp_path / "best.exp"
    with best(path, 25) as rb:
        seen = scores(80, 1)
        rb.extend(seen)
        rb.update_priority(id=[3], priority=[4.0])
    ranked = sorted(seen["score"].tolist(), reverse=True)
    outcome = expstore.resize(path, capacity=new)
    assert (outcome.rows, outcome.given_up) == (min(new, 25), max(0, 25 - new))
    assert verify(path) == []
    with best(path) as rb:
        kept = rb[:]
        assert sorted(kept["score"].tolist(), reverse=True) == ranked[: min(new, 25)]
        assert torch.equal(kept["twice"], 2 * kept["score"])
        later = scores(80, 2)
        rb.extend(later)
        # With more room the worst that had gone do not come back.
        pool = sorted([*ranked[: min(new, 25)], *later["score"].tolist()], reverse=True)
        assert sorted(rb[:]["score"].tolist(), reverse=True) == pool[:new]
    assert verify(path) == []


def test_of_equal_rows_the_earlier_ones_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "best.exp"
    with best(path, 6) as rb:
        values = torch.tensor([1.0, 5.0, 5.0, 5.0, 0.0, 5.0])
        rb.extend(TensorDict({"score": values, "twice": torch.arange(6.0)}, [6]))
    expstore.resize(path, capacity=3)
    with best(path) as rb:
        assert rb[:]["twice"].tolist() == [1.0, 2.0, 3.0]
        assert read_columns(rb.storage)["id"].tolist() == [7, 8, 9]  # those of the places are gone


# -- what cannot be ----------------------------------------------------------------------------------


@pytest.mark.guarantee("damage/copies")
@pytest.mark.parametrize("best", [False, True])
def test_wrong_bytes_are_not_copied(tmp_path: Path, best: bool) -> None:
    path = tmp_path / "run.exp"
    writer = TensorDictMaxValueWriter(rank_key="level") if best else None
    with expstore.open(path, capacity=40, layout="flat", writer=writer) as rb:
        rb.extend(TensorDict({"level": torch.arange(40.0)}, [40]))
    flip(path / "columns/level/c/0", 30 * 4, 1)
    before = read_files(path / "columns")
    with pytest.raises(CorruptionError, match="columns/level/c/0 is damaged in the rows with ids"):
        expstore.resize(path, capacity=20)
    assert read_files(path / "columns") == before
    assert [finding.column for finding in verify(path)] == ["level"]


@pytest.mark.guarantee("keep/resize-whole")
def test_refused_resizes_change_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run.exp"
    fill(path, 60, "packed")
    before = read_files(path)
    with pytest.raises(ValueError, match="capacity must be at least 1, got 0"):
        expstore.resize(path, capacity=0)
    with pytest.raises(NotFoundError, match="is not a store"):
        expstore.resize(tmp_path / "no.exp", capacity=5)
    with pytest.raises(StateError, match="is a snapshot, which is read-only"):
        expstore.resize(path / "versions/v0001", capacity=5)
    assert read_files(path) == before
    assert os.listdir(tmp_path) == ["run.exp"]
    with buffer(path) as rb:
        with pytest.raises(LockedError, match="this process .* has it open"):
            expstore.resize(path, capacity=5)
        assert len(rb) == 60
    with pytest.raises(SchemaError, match="chunk"):
        expstore.resize(path, capacity=3)  # chunks of 8 rows were asked for
    with buffer(path) as rb:
        assert (len(rb), rb.storage.capacity) == (60, 60)


def test_a_full_disk_leaves_the_store_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "run.exp"
    fill(path, 60, "shared")
    with buffer(path) as rb:
        before = read_columns(rb.storage)
    with pytest.raises(StorageError):
        expstore.resize(path, capacity=99, disk=GatedDisk(refuse("write", where="swap.tmp")))
    assert [name for name in os.listdir(path) if name.startswith("load")] == []
    assert verify(path) == []
    with buffer(path) as rb:
        same(read_columns(rb.storage), before)
        assert rb.storage.capacity == 60
