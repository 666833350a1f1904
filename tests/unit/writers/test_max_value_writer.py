"""The writer that keeps the best rows: which rows are kept, in which slots, through any events."""

from __future__ import annotations

import math
import pickle
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

import expstore
from expstore import ListStorage, ReplayBuffer
from expstore.buffers.tensordict import TensorDictReplayBuffer
from expstore.core import tuning
from expstore.core.values import Ranking
from expstore.errors import NotFoundError, SchemaError, StateError
from expstore.kernels.rank_tree import RankTree
from expstore.samplers import ConsumingSampler, PrioritizedSampler
from expstore.storages.memory import MemoryStorage
from expstore.writers.writers import RoundRobinWriter, TensorDictMaxValueWriter
from tests.support.batches import buffer_factory
from tests.support.forks import in_child

pytestmark = pytest.mark.usefixtures("no_syncs", "no_index_on_close")

Make = Callable[..., TensorDictReplayBuffer]


@pytest.fixture(params=["memory", "zarr"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """A factory of buffers that keep the best rows, over both kinds of storage."""
    with buffer_factory(request.param, tmp_path) as factory:

        def keeping_the_best(capacity: int | None, *, writer: Any = None, **options: Any) -> Any:
            writer = TensorDictMaxValueWriter("score") if writer is None else writer
            return factory(capacity, writer=writer, **options)

        yield keeping_the_best


def rows(scores: Iterable[float], first: int = 0) -> TensorDict:
    """Rows with these scores, numbered; all else follows from the number."""
    score = torch.tensor(list(scores), dtype=torch.float64)
    number = torch.arange(first, first + len(score))
    return TensorDict(
        {"score": score, "number": number, "frame": number[:, None] % 251 + torch.arange(70)}, [len(score)]
    )


def whole(rb: TensorDictReplayBuffer) -> list[tuple[float, int]]:
    """Score and number of every row by index; no row may be made of two."""
    found = rb[:]
    assert torch.equal(found["frame"], found["number"][:, None] % 251 + torch.arange(70))
    return list(zip(found["score"].tolist(), found["number"].tolist(), strict=True))


class Best:
    """A list that keeps the best rows: a better row takes the place of the worst, of the first of several."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.count = capacity, 0
        self.held: list[tuple[float, int]] = []

    @staticmethod
    def rank(score: float) -> float:
        return -math.inf if math.isnan(score) else score

    def extend(self, scores: list[float]) -> list[int]:
        """Offer rows; return their places, -1 of those that did not stay to the end."""
        ranks = np.array([self.rank(score) for score, _ in self.held])
        row_at: dict[int, int] = {}
        for row, score in enumerate(scores):
            new = score, self.count + row
            place = len(self.held)
            if place < self.capacity:
                self.held.append(new)
                ranks = np.append(ranks, self.rank(score))
            elif self.rank(score) > ranks.min():
                place = int(ranks.argmin())
                self.held[place], ranks[place] = new, self.rank(score)
            else:
                continue
            row_at[place] = row
        self.count += len(scores)
        places = [-1] * len(scores)
        for place, row in row_at.items():
            places[row] = place
        return places

    def change(self, place: int, score: float) -> None:
        self.held[place] = score, self.count
        self.count += 1


class Program:
    """Do the same with a store and with the list.

    Args:
        rb: The store, empty.
        capacity: Number of rows.
        folder: An empty folder, for versions.
        rng: Chooses scores.
    """

    def __init__(self, rb: TensorDictReplayBuffer, capacity: int, folder: Path, rng: Any) -> None:
        self.rb, self.best, self.folder, self.rng = rb, Best(capacity), folder, rng
        self.saved: list[tuple[float, int]] | None = None

    def scores(self, count: int) -> list[float]:
        found = self.rng.integers(0, 90, count).astype(float)
        found[self.rng.random(count) < 0.05] = self.rng.choice([math.nan, math.inf, -math.inf])
        return list(found.tolist())

    def extend(self, count: int) -> None:
        scores = self.scores(count)
        assert self.rb.extend(rows(scores, self.best.count)).tolist() == self.best.extend(scores)

    def add(self) -> None:
        (score,) = self.scores(1)
        assert [self.rb.add(rows([score], self.best.count)[0])] == self.best.extend([score])

    def change(self) -> None:
        if self.best.held:
            place, (score,) = int(self.rng.integers(len(self.best.held))), self.scores(1)
            self.rb[place] = rows([score], self.best.count)[0]
            self.best.change(place, score)

    def change_all(self) -> None:
        scores = self.scores(len(self.best.held))
        if scores:
            self.rb[:] = rows(scores, self.best.count)
            self.best.held = [(score, self.best.count + row) for row, score in enumerate(scores)]
            self.best.count += len(scores)

    def empty(self) -> None:
        self.rb.empty()
        self.best.held = []

    def flush(self) -> None:
        self.rb.flush()

    def save(self) -> None:
        if self.best.held:
            self.rb.dumps(self.folder)
            self.saved = list(self.best.held)

    def load(self) -> None:
        if self.saved is not None:
            self.rb.loads(self.folder)
            self.best.held = list(self.saved)

    def extend_by_another_buffer(self) -> None:
        other = TensorDictReplayBuffer(storage=self.rb.storage, writer=TensorDictMaxValueWriter("score"))
        scores = self.scores(5)
        assert other.extend(rows(scores, self.best.count)).tolist() == self.best.extend(scores)

    def reopen(self) -> None:
        path = getattr(self.rb.storage, "path", None)
        if path is not None:
            self.rb.close()
            # A store that is opened without a writer has the one by which it was filled.
            writer = TensorDictMaxValueWriter("score") if self.rng.random() < 0.5 else None
            self.rb = expstore.open(path, writer=writer)


# ---------------------------------------------------------------------------------------------------
# Which rows stay, and where.


@pytest.mark.some(4)
@pytest.mark.parametrize("waiting", [True, False])
@pytest.mark.parametrize("capacity", [1, 7, 60])
def test_the_best_rows_stay_whatever_happens(
    make: Make,
    capacity: int,
    waiting: bool,
    tmp_path: Path,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """TorchRL's writer loses ranks when rows are loaded or changed."""
    if not waiting:  # for their columns
        monkeypatch.setattr(tuning, "REPLACED_ROWS_BYTES", 2000)
    program = Program(make(capacity), capacity, tmp_path / "versions", rng)
    acts = [lambda count=count: program.extend(count) for count in (1, 3, 50)]
    others = [
        "add",
        "change",
        "change_all",
        "empty",
        "flush",
        "save",
        "load",
        "extend_by_another_buffer",
        "reopen",
    ]
    acts += [getattr(program, name) for name in others]
    for act in [*acts, *rng.choice(np.array(acts, object), 60)]:
        act()
        assert str(whole(program.rb)) == str(program.best.held)  # NaN is equal to itself as text
    if not isinstance(program.rb.storage, MemoryStorage):
        with expstore.open(program.rb.storage.path, mode="r") as follower:
            program.rb.flush()
            follower.refresh()
            assert str(whole(follower)) == str(program.best.held)
            assert follower.write_count == program.rb.write_count
    program.rb.close()


def test_long_batches_and_stores_that_are_not_full(make: Make, rng: np.random.Generator) -> None:
    rb, best = make(3000), Best(3000)
    for size in (1, 50, 2000, 90, 3100):
        scores = rng.integers(0, 60, size).astype(float).tolist()
        assert rb.extend(rows(scores, best.count)).tolist() == best.extend(scores)
        assert whole(rb) == best.held
    unbounded = make(None)
    assert unbounded.extend(rows([3.0, 1.0, 2.0])).tolist() == [0, 1, 2]
    assert unbounded.extend(rows([0.0], 3)).tolist() == [3]
    assert unbounded.storage.ranking == Ranking(("score",), "sum")


@pytest.mark.some(5)
@pytest.mark.parametrize("reduction", ["sum", "max", "min", "mean", "median"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64])
def test_several_values_of_a_row_become_one(reduction: Any, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    rb = TensorDictReplayBuffer(
        storage=MemoryStorage(10), writer=TensorDictMaxValueWriter(("a", "r"), reduction), batch_size=1
    )
    values = torch.randint(-50, 50, (80, 4, 3), generator=generator).to(dtype)
    rb.extend(TensorDict({"a": {"r": values}}, [80]))
    wide = values.double().reshape(80, -1)
    single = getattr(wide, reduction)(1)
    ranks = single if isinstance(single, torch.Tensor) else single.values
    kept = rb["a", "r"].double().reshape(10, -1)
    single = getattr(kept, reduction)(1)
    assert sorted((single if isinstance(single, torch.Tensor) else single.values).tolist()) == sorted(
        ranks.topk(10).values.tolist()
    )


@given(st.data())
def test_the_tree_is_a_list_of_ranks(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 70))
    ranks = st.integers(-5, 5).map(float) | st.just(-np.inf)
    held = [np.inf] * size
    tree = RankTree(size)
    for _ in range(data.draw(st.integers(1, 4))):
        places = data.draw(st.lists(st.integers(0, size - 1), unique=True))
        values = data.draw(st.lists(ranks, min_size=len(places), max_size=len(places)))
        tree.set(np.array(places, np.int64), np.array(values, float))
        for place, value in zip(places, values, strict=True):
            held[place] = value
        assert tree.lowest == min(held)
        newcomers = data.draw(st.lists(ranks))
        expected = []
        for rank in newcomers:
            place = held.index(min(held))
            expected.append(place if rank > held[place] else -1)
            held[place] = max(rank, held[place])
        assert tree.take(np.array(newcomers, float)).tolist() == expected


# ---------------------------------------------------------------------------------------------------
# What a row that takes a place brings with it.


def test_a_place_keeps_its_id_and_gets_a_new_time_and_priority(make: Make) -> None:
    rb = make(4, sampler=PrioritizedSampler(4, 1.0, 1.0), batch_size=200)
    rb.extend(rows([1.0, 2.0, 3.0, 4.0]))
    before = rb.sql("SELECT _id, _time FROM transitions ORDER BY _id").fetchall()
    rb.update_priority([0, 1, 2, 3], [0.0, 0.0, 7.0, 0.0])
    assert set(rb.sample()["index"].tolist()) == {2}
    assert rb.extend(rows([9.0], 4), return_ids=True).tolist() == [1]
    after = rb.sql("SELECT _id, _time, _priority, number FROM transitions ORDER BY _id").fetchall()
    assert [row[0] for row in after] == [row[0] for row in before]
    assert after[0][1] > before[0][1]
    assert [row[1] for row in after[1:]] == [row[1] for row in before[1:]]
    assert [row[2:] for row in after] == [(7.0, 4), (0.0, 1), (7.0, 2), (0.0, 3)]
    assert set(rb.sample()["index"].tolist()) == {0, 2}


def test_priorities_that_come_along_are_set_for_rows_that_are_taken_in(make: Make) -> None:
    rb = make(2, sampler=PrioritizedSampler(2, 1.0, 1.0), batch_size=4)
    rb.priority_key = "number"
    rb.extend(rows([5.0, 1.0, 0.0, 3.0], 10))
    found = rb.sql("SELECT _priority, number FROM transitions ORDER BY _index").fetchall()
    assert found == [(10.0, 10), (13.0, 13)]


def test_rows_count_as_written_when_they_are_taken_in(make: Make) -> None:
    rb = make(2)
    rb.extend(rows([1.0, 2.0, 0.0]))
    rb.extend(rows([0.0, 3.0, 0.0]))
    assert rb.write_count == 3


def test_a_sampler_is_notified_of_new_rows(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    rb = make(3)
    told: list[list[int]] = []
    monkeypatch.setattr(rb.sampler, "hears_writes", True, raising=False)  # as a class with the method has it
    monkeypatch.setattr(rb.sampler, "on_write", lambda ids: told.append(ids.tolist()))
    rb.extend(rows([3.0, 1.0, 2.0]))
    rb.extend(rows([0.0, 9.0, 0.0]))
    assert told == [[1, 2, 3], [2]]


def test_a_sequence_of_rows_is_one_endless_episode(make: Make) -> None:
    rb = make(4, writer=TensorDictMaxValueWriter())
    reward, done = torch.arange(6.0)[:, None], torch.ones(6, 1, dtype=torch.bool)
    rb.extend(TensorDict({"next": {"reward": reward, "terminated": done}}, [6]))
    assert rb.episodes().arrow().column("status").to_pylist() == ["open"]
    assert sorted(rb["next", "reward"].reshape(-1).tolist()) == [2, 3, 4, 5]


@pytest.mark.some(5)
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float16, torch.float32, torch.int64])
def test_flags_and_other_narrow_fields_are_replaced_as_well(make: Make, dtype: torch.dtype) -> None:
    rb = make(300)
    number = torch.arange(600)
    values = (number % 7 == 3) if dtype is torch.bool else (number * 37 % 101).to(dtype)
    rb.extend(TensorDict({"score": -(number[:300] % 11).double(), "x": values[:300]}, [300]))
    index = rb.extend(TensorDict({"score": number[300:].double(), "x": values[300:]}, [300]))
    assert sorted(index.tolist()) == list(range(300))
    assert torch.equal(rb["x"][index], values[300:])


# ---------------------------------------------------------------------------------------------------
# Ranks follow from the rows, whatever comes between.


def test_a_write_that_failed_leaves_no_ranks(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    rb = make(2)
    rb.extend(rows([1.0, 2.0]))
    with monkeypatch.context() as patch:
        patch.setattr(rb.storage, "_change", _fail)
        with pytest.raises(OSError, match="no more"):
            rb.extend(rows([5.0], 2))
    assert rb.extend(rows([1.5], 3)).tolist() == [0]
    assert whole(rb) == [(1.5, 3), (2.0, 1)]


def _fail(*_: Any, **__: Any) -> None:
    raise OSError("no more")


@pytest.mark.guarantee("kill/best")
@pytest.mark.parametrize("waits", [True, False])
def test_a_kill_leaves_rows_with_their_priorities(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """Of rows that wait for their columns none has the priority of the row before it."""
    path = tmp_path / "best.exp"
    if not waits:
        monkeypatch.setattr(tuning, "REPLACED_ROWS_BYTES", 0)

    def life() -> None:
        rb = expstore.open(path, capacity=30, writer=TensorDictMaxValueWriter("score"))
        rb.extend(rows(range(30)))
        rb.update_priority(list(range(30)), [3.0] * 30)
        rb.flush()
        rb.extend(rows([100.0 + n for n in range(20)], 30))  # single writes and the compiled loop
        rb.update_priority([0, 25], [0.5, 0.25])
        rb.storage.write_values()  # as the background thread does ten times a second
        rb.extend(rows([200.0], 50))

    in_child(life)
    with expstore.open(path, mode="r") as follower:
        seen = follower.sql("SELECT number, _priority FROM transitions ORDER BY _index").fetchall()
        assert follower.write_count == 51
    with expstore.open(path) as rb:
        assert rb.recovered is not None
        assert rb.sql("SELECT number, _priority FROM transitions ORDER BY _index").fetchall() == seen
        assert rb.write_count == 51
        assert rb.storage.priorities.largest == 3
        assert [number for number, _ in seen] == [*range(30, 50), 50, *range(21, 30)]
        assert dict(seen) == dict.fromkeys(range(21, 51), 3.0) | {30: 3.0 if waits else 0.5, 25: 0.25}
        assert rb.extend(rows([20.0, 22.5], 60)).tolist() == [-1, 21]


def test_rows_that_wait_for_their_columns_are_there_for_all(make: Make, tmp_path: Path) -> None:
    rb = make(60, batch_size=64)
    rb.extend(rows(range(60)))
    rb.flush()
    rb.extend(rows([100.0 + n for n in range(30)], 60))
    rb.extend(rows([200.0], 90))  # displaces one that has not waited
    expected = [*range(60, 90), 90, *range(31, 60)]
    assert [number for _, number in whole(rb)] == expected
    assert rb["number"].tolist() == expected
    found = rb.sql("SELECT number, frame FROM transitions ORDER BY _index").fetchall()
    assert [number for number, _ in found] == expected
    assert all(list(frame) == [number % 251 + n for n in range(70)] for number, frame in found)
    assert set(rb.sample()["number"].tolist()) <= set(expected)
    version = rb.dumps(tmp_path / "versions")
    with expstore.open(tmp_path / "versions", version=version.number) as kept:
        assert [number for _, number in whole(kept)] == expected


def test_rows_are_whole_while_others_take_their_places(tmp_path: Path) -> None:
    with expstore.open(
        tmp_path / "best.exp", capacity=500, batch_size=300, writer=TensorDictMaxValueWriter("score"), seed=1
    ) as rb:
        rb.extend(rows(range(500)))
        over = threading.Event()
        failures: list[BaseException] = []

        def beside(work: Callable[[], object]) -> None:
            try:
                while not over.is_set():
                    work()
            except BaseException as exc:
                failures.append(exc)

        def look() -> None:
            found = rb.sample()
            assert torch.equal(found["frame"], found["number"][:, None] % 251 + torch.arange(70))

        threads = [
            threading.Thread(target=beside, args=(work,)) for work in (look, lambda: whole(rb), rb.flush)
        ]
        for thread in threads:
            thread.start()
        for cycle in range(60):
            first = 500 + 100 * cycle
            rb.extend(rows(range(first, first + 100), first))
        over.set()
        for thread in threads:
            thread.join()
        assert not failures
        assert sorted(number for _, number in whole(rb)) == list(range(6000, 6500))
    with expstore.open(tmp_path / "best.exp") as rb:
        assert sorted(number for _, number in whole(rb)) == list(range(6000, 6500))


def test_a_follower_reads_while_the_writer_writes(tmp_path: Path) -> None:
    path = tmp_path / "best.exp"
    with expstore.open(path, capacity=40, writer=TensorDictMaxValueWriter("score")) as rb:
        rb.extend(rows(range(40)))
        with expstore.open(path, mode="r", batch_size=8) as follower:
            assert whole(follower) == whole(rb)
            rb.update_priority([5], [2.0])
            rb.extend(rows([50.0, -1.0, 60.0], 40))
            before = whole(follower)  # rows that displace others come with the next sync
            assert before in (whole(rb), [(float(n), n) for n in range(40)])
            rb.flush()
            follower.refresh()
            assert whole(follower) == whole(rb)
            assert [number for _, number in whole(follower)[:3]] == [40, 42, 2]
            query = "SELECT _priority FROM transitions WHERE _index < 6 ORDER BY _index"
            assert follower.sql(query).fetchall() == [(2,), (2,), (1,), (1,), (1,), (2,)]
            assert follower.write_count == rb.write_count == 42
            assert set(follower.sample()["number"].tolist()) <= {40, *range(2, 43)} - {41}


def test_a_copy_of_a_writer_has_no_ranks() -> None:
    writer = TensorDictMaxValueWriter("score", "max")
    rb = TensorDictReplayBuffer(storage=MemoryStorage(2), writer=writer)
    rb.extend(rows([1.0, 2.0]))
    copy = pickle.loads(pickle.dumps(writer))
    other = TensorDictReplayBuffer(storage=MemoryStorage(2), writer=copy)
    assert other.extend(rows([0.0, 0.0])).tolist() == [0, 1]


# ---------------------------------------------------------------------------------------------------
# What is refused, with nothing changed.


def test_unrankable_rows_are_refused(make: Make) -> None:
    with pytest.raises(ValueError, match="reduction 'product' is unknown"):
        TensorDictMaxValueWriter(reduction="product")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="does not support compilable=True"):
        TensorDictMaxValueWriter(compilable=True)
    rb = make(3)
    with pytest.raises(NotFoundError, match=r"Rank key 'score' not found in data"):
        rb.extend(rows([1.0]).exclude("score"))
    with pytest.raises(SchemaError, match="cannot be ranked by 'score': complex64"):
        rb.extend(TensorDict({"score": torch.zeros(2, dtype=torch.complex64)}, [2]))
    assert rb.schema is None
    rb.extend(rows([1.0, 2.0]))
    with pytest.raises(ValueError, match="episode_info is not supported"):
        rb.extend(rows([3.0]), episode_info={"a": 1})
    assert len(rb) == 2


def test_dims_are_refused_when_the_buffer_is_made() -> None:
    storage = MemoryStorage(10, ndim=2)
    with pytest.raises(ValueError, match="not compatible with storages with more than one dimension"):
        TensorDictReplayBuffer(storage=storage, writer=TensorDictMaxValueWriter())
    rb = TensorDictReplayBuffer(storage=storage)
    with pytest.raises(ValueError, match="more than one dimension"):
        rb.set_writer(TensorDictMaxValueWriter())
    assert isinstance(rb.writer, RoundRobinWriter)


def test_no_other_writer_destroys_the_best_rows(make: Make) -> None:
    rb = make(3)
    rb.extend(rows([7.0, 8.0, 9.0]))
    before = whole(rb)
    for writer in (
        RoundRobinWriter(),
        TensorDictMaxValueWriter("score", "max"),
        TensorDictMaxValueWriter("number"),
    ):
        rb.set_writer(writer)
        with pytest.raises(StateError, match="keeps (the best|its) rows by sum of score"):
            rb.extend(rows([99.0], 3))
    assert whole(rb) == before
    rb.empty()
    rb.set_writer(RoundRobinWriter())
    assert rb.extend(rows([1.0, 2.0, 3.0, 0.0])).tolist() == [0, 1, 2, 0]
    assert rb.storage.ranking is None
    rb.set_writer(TensorDictMaxValueWriter("score"))
    with pytest.raises(StateError, match="keeps the newest rows, but this writer keeps the best by sum of"):
        rb.extend(rows([99.0], 3))
    assert [number for _, number in whole(rb)] == [3, 1, 2]


def test_the_rank_key_of_a_store_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "best.exp"
    with expstore.open(path, capacity=2, writer=TensorDictMaxValueWriter("score", "max")) as rb:
        rb.extend(rows([7.0, 8.0]))
    with expstore.open(path, writer=RoundRobinWriter()) as rb:
        with pytest.raises(StateError, match="best rows by max of score"):
            rb.extend(rows([99.0], 2))
        rb.empty()
        rb.extend(rows([1.0], 2))
    with expstore.open(path) as rb:
        assert isinstance(rb.writer, RoundRobinWriter)
    with pytest.raises(ValueError, match="cannot be used with mode='r'"):
        expstore.open(path, mode="r", writer=RoundRobinWriter())


def test_a_version_for_which_there_is_no_room(make: Make, tmp_path: Path) -> None:
    rb = make(5)
    rb.extend(rows([7.0, 8.0, 9.0, 10.0]))
    rb.dumps(tmp_path / "versions")
    small = make(3)
    with pytest.raises(StateError, match="has the best 4 rows by sum of score; there is room for 3"):
        small.loads(tmp_path / "versions")
    larger = make(6)
    larger.loads(tmp_path / "versions")
    larger.extend(rows([1.0, 2.0, 8.5], 4))
    assert sorted(score for score, _ in whole(larger)) == [2.0, 7.0, 8.0, 8.5, 9.0, 10.0]


def test_best_rows_are_not_counted(make: Make) -> None:
    rb = make(3, sampler=ConsumingSampler(), batch_size=1)
    with pytest.raises(StateError, match="counts how often"):
        rb.extend(rows([1.0]))
    best = make(3)
    best.extend(rows([1.0]))
    with pytest.raises(StateError, match="cannot count samples"):
        best.set_sampler(ConsumingSampler())


def test_settings_of_a_writer() -> None:
    writer = TensorDictMaxValueWriter("score", "max")
    assert writer.state_dict() == {"rank_key": ["score"], "reduction": "max"}
    writer.load_state_dict(TensorDictMaxValueWriter("score", "max").state_dict())
    with pytest.raises(ValueError, match="reduction='max', the state reduction='sum'"):
        writer.load_state_dict(TensorDictMaxValueWriter("score").state_dict())
    assert repr(writer) == "TensorDictMaxValueWriter()"
    assert RoundRobinWriter().state_dict() == {}


def test_the_best_of_rows_that_are_objects() -> None:
    def rows(*scores: float) -> list[TensorDict]:
        return [
            TensorDict({"score": torch.tensor(score), "of": torch.zeros(number)})
            for number, score in enumerate(scores)
        ]

    with ReplayBuffer(
        storage=ListStorage(3), writer=TensorDictMaxValueWriter("score"), collate_fn=list
    ) as rb:
        assert rb.extend(rows(1, 5, 2, 4)).tolist() == [-1, 1, 2, 0]
        assert rb.add(rows(3)[0]) == 2
        assert rb.add(rows(0)[0]) == -1
        assert sorted(float(row["score"]) for row in rb[:]) == [3, 4, 5]
        with pytest.raises(StateError, match="expects data to be a tensor collection"):
            rb.extend(["x"])
        with pytest.raises(NotFoundError, match="Rank key 'score' not found"):
            rb.add(TensorDict({"a": torch.zeros(())}))
        assert len(rb) == 3
    with (
        ReplayBuffer(writer=TensorDictMaxValueWriter("score")) as rb,
        pytest.raises(StateError, match="expects data to be a tensor collection"),
    ):
        rb.extend({"a": torch.zeros(3)})
