"""The writer that keeps the best rows: which rows are kept, in which slots, through any events."""

from __future__ import annotations

import heapq
import logging
import os
import pickle
import signal
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


class Heap:
    """Do the same, row by row, with a heap as torchrl's writer."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.count = capacity, 0
        self.held: list[tuple[float, int]] = []
        self._heap: list[tuple[float, int]] = []

    def extend(self, scores: list[float]) -> list[int]:
        found: dict[int, int] = {}
        for row, score in enumerate(scores):
            place = len(self.held)
            if place < self.capacity:
                self.held.append((score, self.count + row))
                heapq.heappush(self._heap, (score, place))
            elif score > self._heap[0][0]:
                place = self._heap[0][1]
                heapq.heapreplace(self._heap, (score, place))
                self.held[place] = (score, self.count + row)
            else:
                continue
            found[place] = row
        self.count += len(scores)
        places = [-1] * len(scores)
        for place, row in found.items():
            places[row] = place
        return places


# ---------------------------------------------------------------------------------------------------
# Which rows stay, and where.


@pytest.mark.parametrize("capacity", [1, 7, 40, 3000])
def test_the_best_rows_stay_at_the_places_of_the_heap(
    make: Make, capacity: int, rng: np.random.Generator
) -> None:
    rb, heap = make(capacity), Heap(capacity)
    for size in (1, 3, 50, 1, 2000, 90, 9, 3100):
        scores = rng.integers(0, 60, size).astype(float).tolist()
        data = rows(scores, heap.count)
        assert rb.extend(data).tolist() == heap.extend(scores)
        assert whole(rb) == heap.held
    for _ in range(20):
        score = float(rng.integers(0, 90))
        index = rb.add(rows([score], heap.count)[0])
        assert [index] == heap.extend([score])
    assert whole(rb) == heap.held


def test_the_same_program_on_torchrl(make: Make, rng: np.random.Generator) -> None:
    from torchrl import data

    logging.getLogger("torchrl").setLevel(logging.WARNING)
    theirs = data.TensorDictReplayBuffer(
        storage=data.LazyTensorStorage(60), writer=data.TensorDictMaxValueWriter("score"), batch_size=2
    )
    ours = make(60)
    for size in (20, 70, 1, 200, 45):
        batch = rows(rng.normal(size=size).round(1).tolist())
        assert torch.equal(ours.extend(batch), theirs.extend(batch.clone()))
        assert torch.equal(ours["number"], theirs[:]["number"])


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


def test_nan_ranks_below_all(make: Make) -> None:
    rb = make(3)
    nan, inf = float("nan"), float("inf")
    rb.extend(rows([nan, 1.0, nan]))
    assert rb.extend(rows([nan, -inf, 0.0, inf, -5.0], 3)).tolist() == [-1, -1, 0, 2, -1]
    assert [number for _, number in whole(rb)] == [5, 1, 6]


def test_an_unbounded_store_keeps_all(make: Make) -> None:
    rb = make(None)
    assert rb.extend(rows([3.0, 1.0, 2.0])).tolist() == [0, 1, 2]
    assert rb.extend(rows([0.0], 3)).tolist() == [3]
    assert rb.storage.ranking == Ranking(("score",), "sum")


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


def test_a_reopened_store_continues(tmp_path: Path, rng: np.random.Generator) -> None:
    heap, path = Heap(50), tmp_path / "best.exp"
    for life in range(4):
        writer = TensorDictMaxValueWriter("score") if life % 2 == 0 else None  # else as it was filled
        with expstore.open(path, capacity=50, writer=writer) as rb:
            for _ in range(3):
                scores = rng.integers(0, 1000, 40).astype(float).tolist()
                data = rows(scores, heap.count)
                assert rb.extend(data).tolist() == heap.extend(scores)
            assert isinstance(rb.writer, TensorDictMaxValueWriter)
            assert rb.write_count >= 50
            written = rb.write_count
        with expstore.open(path, mode="r") as follower:
            assert whole(follower) == heap.held
            assert follower.write_count == written


def test_max_value_writer_after_loads(make: Make, tmp_path: Path) -> None:
    """torchrl's takes its ranks from where it was, and lets worse rows displace better ones."""
    rb = make(3)
    rb.extend(rows([7.0, 8.0, 9.0]))
    rb.dumps(tmp_path / "versions")
    rb.empty()
    rb.extend(rows([1.0, 2.0, 3.0]))
    rb.loads(tmp_path / "versions")
    assert rb.extend(rows([4.0, 6.0, 7.5], 3)).tolist() == [-1, -1, 0]
    assert [score for score, _ in whole(rb)] == [7.5, 8.0, 9.0]
    other = make(3)
    other.loads(tmp_path / "versions")
    assert other.extend(rows([4.0, 7.0, 8.5], 3)).tolist() == [-1, -1, 0]


def test_a_changed_row_is_ranked_again(make: Make) -> None:
    rb = make(3)
    rb.extend(rows([7.0, 8.0, 9.0]))
    assert rb.extend(rows([5.0], 3)).tolist() == [-1]
    rb[2] = rows([1.0], 8)[0]
    assert rb.extend(rows([2.0, 5.0], 4)).tolist() == [-1, 2]
    rb[0] = rows([99.0], 9)[0]
    assert rb.extend(rows([6.0, 50.0, 60.0, 70.0], 6)).tolist() == [-1, -1, 1, 2]
    rb[:] = rows([0.0, 0.0, 0.0], 20)  # every slot at once
    assert rb.extend(rows([1.0, 0.0], 30)).tolist() == [0, -1]


def test_a_store_that_was_emptied_fills_again(make: Make) -> None:
    rb = make(3)
    rb.extend(rows([7.0, 8.0]))
    rb.empty()
    assert rb.extend(rows([2.0, 1.0], 2)).tolist() == [0, 1]
    assert rb.extend(rows([1.5, 1.5], 4)).tolist() == [2, 1]
    assert whole(rb) == [(2.0, 2), (1.5, 5), (1.5, 4)]


def test_two_buffers_over_one_storage(make: Make) -> None:
    one = make(2)
    two = TensorDictReplayBuffer(storage=one.storage, writer=TensorDictMaxValueWriter("score"))
    one.extend(rows([1.0, 2.0]))
    assert two.extend(rows([3.0], 2)).tolist() == [0]
    assert one.extend(rows([2.5, 1.5], 3)).tolist() == [1, -1]
    assert two.extend(rows([2.6, 2.5], 5)).tolist() == [1, -1]


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


def _killed(work: Callable[[], None]) -> None:
    """Run `work`, which is to kill itself, in a fork."""
    pid = os.fork()
    if pid == 0:
        try:
            torch.set_num_threads(1)  # OpenMP's threads were left behind in the parent
            work()
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status)


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
        os.kill(os.getpid(), signal.SIGKILL)

    _killed(life)
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
    rb.extend(rows([300.0, 301.0], 91))
    rb[31] = rows([0.0], 93)[0]
    rb.flush()
    assert rb["number"][31:34].tolist() == [93, 92, 33]
    assert rb.extend(rows([33.5], 94)).tolist() == [31]
    rb.loads(tmp_path / "versions")
    assert [number for _, number in whole(rb)] == [*range(60, 90), 90, *range(31, 60)]


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


def test_more_rows_than_may_wait_are_settled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "REPLACED_ROWS_BYTES", 40_000)
    with expstore.open(tmp_path / "best.exp", capacity=100, writer=TensorDictMaxValueWriter("score")) as rb:
        rb.extend(rows(range(100)))
        for cycle in range(20):
            first = 100 + 20 * cycle
            rb.extend(rows(range(first, first + 20), first))
            assert sorted(number for _, number in whole(rb)) == list(range(first - 80, first + 20))
        assert rb.storage.counters.syncs >= 4


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
