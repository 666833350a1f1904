"""Followers of a running writer: what they see, when, and what they never see."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore.core import tuning
from expstore.disk.files import Disk, ReadingDisk
from expstore.errors import NotReadyError, StateError
from expstore.storages import FollowerStorage, ZarrStorage
from expstore.storages.engine.open_settings import Settings
from expstore.storages.engine.open_store import OpenStore
from expstore.storages.engine.store import Store, _BatchWrite
from expstore.storages.format.control_page import StatePage
from tests.support.damaged_stores import flip
from tests.support.followed_stores import check_rows, contents, rows
from tests.support.forks import in_child
from tests.support.tuned import few_rows_in_memory, set_spare_slots

if TYPE_CHECKING:
    from expstore import TensorDictReplayBuffer

pytestmark = pytest.mark.index

#: A writer and its follower.
Pair = tuple["TensorDictReplayBuffer", "TensorDictReplayBuffer"]


@pytest.fixture(autouse=True)
def _few_rows_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    few_rows_in_memory(monkeypatch)


QUERIES = (
    "SELECT count(*), min(_id), max(_id), sum(a), sum(next.reward) FROM transitions",
    "SELECT episode_id, length, status, live_rows FROM episodes ORDER BY 1",
    "SELECT * FROM fragments ORDER BY first_id",
    "SELECT number, name, named FROM sources ORDER BY 1",
)


@pytest.fixture
def pair(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """A writer of a ring of 50 rows and 16 spare slots, which holds 20, and its follower."""
    set_spare_slots(monkeypatch, 16)
    with expstore.open(store_path, capacity=50, batch_size=8, seed=1) as rb:
        rb.extend(rows(20))
        with expstore.open(store_path, mode="r", batch_size=8, seed=2) as seen:
            yield rb, seen


def drain(rb: TensorDictReplayBuffer) -> None:
    """Bring rows that came one by one to the columns, as the keeper does within 0.1 s."""
    rb.storage.drain()


def stop_background(rb: TensorDictReplayBuffer) -> None:
    """Let nothing reach the columns later than when a call returns."""
    rb.storage.background.stop()


def put(rb: TensorDictReplayBuffer, batch: TensorDict, **options: Any) -> None:
    """Extend; short batches, too, are in the columns when this returns."""
    rb.extend(batch, **options)
    drain(rb)


def same_answers(rb: TensorDictReplayBuffer, seen: TensorDictReplayBuffer) -> None:
    drain(rb)
    for query in QUERIES:
        assert seen.sql(query).fetchall() == rb.sql(query).fetchall(), query


# ---------------------------------------------------------------------------------------------------
# What is seen.


@pytest.mark.guarantee(
    "process/readers",
    "A reader takes no lock, writes nothing, and sees rows when the `extend` that wrote them returned, "
    "small batches 0.1 s later.",
)
@pytest.mark.parametrize(("count", "width", "later"), [(8, 1, True), (9, 1, False), (2, 2100, False)])
def test_small_batches_show_when_they_are_in_the_columns(
    store_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, width: int, later: bool
) -> None:
    """A reader that takes in what there is brings them no sooner."""
    batch = TensorDict({"a": torch.zeros(20, width)}, [20])
    with expstore.open(store_path, capacity=50) as rb, monkeypatch.context() as patch:
        put(rb, batch)
        if later:
            patch.setattr(Store, "drain", lambda *_: None)
        with expstore.open(store_path, mode="r") as seen:
            rb.extend(batch[:count])
            seen.refresh()
            assert len(seen) == (20 if later else 20 + count)
            patch.undo()
            drain(rb)
            assert len(seen) == 20 + count


@pytest.mark.guarantee("process/readers")
def test_small_batches_show_by_themselves(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drained, inner = threading.Event(), Store.drain

    def noting(store: Store) -> None:
        inner(store)
        if store.last == 24:
            drained.set()

    monkeypatch.setattr(Store, "drain", noting)
    with expstore.open(store_path, capacity=50) as rb:
        rb.extend(rows(20))
        with expstore.open(store_path, mode="r") as seen:
            rb.extend(rows(4, 20))
            assert drained.wait(30), "nobody asked for it"
            assert seen["a"].tolist() == rb["a"].tolist()


def test_a_version_that_is_loaded_shows(pair: Pair, tmp_path: Path) -> None:
    rb, seen = pair
    rb.dumps(tmp_path / "versions")
    put(rb, rows(30, 100))
    same_answers(rb, seen)
    rb.loads(tmp_path / "versions")
    assert seen["a"].tolist() == rb["a"].tolist() == list(range(20))
    same_answers(rb, seen)
    with expstore.open(tmp_path / "versions", mode="r") as version:
        copy = pickle.loads(pickle.dumps(version))
        assert copy["a"].tolist() == list(range(20))


def test_a_follower_that_came_before_the_first_rows(store_path: Path) -> None:
    with expstore.open(store_path, capacity=50, batch_size=4) as rb:
        with expstore.open(store_path, mode="r", batch_size=4) as seen:
            assert len(seen) == 0
            with pytest.raises(NotReadyError):
                seen.sample()
            assert seen.sql("SELECT count(*) FROM transitions").fetchall() == [(0,)]
            put(rb, rows(5))
            assert len(seen) == 5
            check_rows(seen.sample())
            same_answers(rb, seen)


@pytest.mark.slow
def test_sql_follows_through_many_segments(store_path: Path) -> None:
    storage = ZarrStorage(store_path, 200, settings=Settings(flatten=True), segment_bytes=2048)
    with expstore.TensorDictReplayBuffer(storage=storage, with_ids=True) as rb:
        put(rb, rows(5))
        with expstore.open(store_path, mode="r") as seen:
            for start in range(5, 600, 3):
                put(rb, rows(3, start))
                if start % 10 == 0:
                    rb.flush()
                if start % 25 == 0:
                    same_answers(rb, seen)
            same_answers(rb, seen)


@pytest.mark.slow
def test_an_unbounded_store_grows(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "FLAT_SHARD_ROWS", 4096)
    with expstore.open(store_path) as rb:
        put(rb, rows(10))
        with expstore.open(store_path, mode="r", batch_size=300) as seen:
            for start in range(10, 90_010, 10_000):
                put(rb, rows(10_000, start))
                batch = seen.sample()
                check_rows(batch)
                assert seen[len(seen) - 1]["a"] == start + 9999
            same_answers(rb, seen)


# ---------------------------------------------------------------------------------------------------
# What is not.


@pytest.mark.guarantee("process/readers")
@pytest.mark.slow
def test_rows_in_change_are_waited_for(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    rb, seen = pair
    monkeypatch.setattr(tuning, "CHANGE_SECONDS", 0.05)
    with rb.storage._note_changes(np.array([4, 7])):
        assert seen[3]["a"] == 3
        assert seen[8]["a"] == 8
        with pytest.raises(StateError, match="is changing these rows"):
            seen[5]
        with pytest.raises(StateError, match="overwrote rows"):
            seen.sql("SELECT 1")
    assert seen[5]["a"] == 5
    assert seen.sql("SELECT 1").fetchall() == [(1,)]


def test_a_change_that_failed_is_not_visible(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    rb, seen = pair
    monkeypatch.setattr(tuning, "CHANGE_SECONDS", 0.05)
    with monkeypatch.context() as patch:
        patch.setattr(OpenStore, "overwrite", lambda self, *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            rb[4] = rows(1, 1000)[0]
    with pytest.raises(StateError, match="is changing these rows"):
        seen[4]
    put(rb, rows(1, 20))  # reads the journal again, and completes the change
    assert seen[4]["a"] == 1000


@pytest.mark.guarantee("process/readers")
@pytest.mark.parametrize("moves", [3, 200])
def test_a_sample_that_is_overtaken_is_drawn_again(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, moves: int
) -> None:
    rb, seen = pair
    put(rb, rows(60, 20))
    real, done = FollowerStorage.take, []

    def take(self: FollowerStorage, *arguments: Any) -> Any:
        found = real(self, *arguments)
        if len(done) < 2:
            done.append(0)
            for _ in range(moves):
                put(rb, rows(1, int(rb.storage.last)))
        return found

    monkeypatch.setattr(FollowerStorage, "take", take)
    check_rows(seen.sample())
    assert seen.stats()["redraws"] == (2 if moves == 200 else 0)


def test_sql_that_is_overtaken_runs_again(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    rb, seen = pair
    put(rb, rows(60, 20))
    spare, real = rb.stats()["spare"], FollowerStorage.views
    times = [5]

    def views(self: FollowerStorage, *arguments: Any) -> Any:
        found = real(self, *arguments)
        if times[0]:
            times[0] -= 1
            for _ in range(2):
                put(rb, rows(spare, int(rb.storage.last)))
        return found

    monkeypatch.setattr(FollowerStorage, "views", views)
    monkeypatch.setattr(tuning, "QUERY_RETRY_SECONDS", 60.0)
    query = "SELECT count(*) FILTER (a <> _id - 1), max(_id) FROM transitions"
    assert seen.sql(query).fetchall() == [(0, rb.storage.last)]
    times[0] = 2
    monkeypatch.setattr(tuning, "QUERY_RETRY_SECONDS", 0.0)
    with pytest.raises(StateError, match="overwrote rows while the query read them, 2 times in a row"):
        seen.sql(query)


def test_reading_everything_while_it_is_overwritten(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    rb, seen = pair
    put(rb, rows(60, 20))
    spare, real = rb.stats()["spare"], FollowerStorage.take

    def take(self: FollowerStorage, *arguments: Any) -> Any:
        found = real(self, *arguments)
        for _ in range(2):
            put(rb, rows(spare, int(rb.storage.last)))
        return found

    monkeypatch.setattr(FollowerStorage, "take", take)
    with pytest.raises(StateError, match="faster than they can be read"):
        seen["a"]


# ---------------------------------------------------------------------------------------------------
# Writers come and go.


def test_the_next_writer_is_followed(store_path: Path) -> None:
    with expstore.open(store_path, capacity=50) as rb:
        rb.extend(rows(20))
        seen = expstore.open(store_path, mode="r", batch_size=4)
    assert len(seen) == 20
    seen.refresh()
    assert not seen.stats()["live"]
    for start in (20, 30):
        with expstore.open(store_path) as rb:
            rb.extend(rows(10, start))
            assert len(seen) == start + 10
            assert seen.stats()["live"]
            same_answers(rb, seen)
            check_rows(seen.sample())
        assert seen["a"].tolist() == list(range(start + 10))
    seen.close()


def write_and_die(path: Path) -> None:
    rb = expstore.open(path, capacity=50)
    stop_background(rb)
    rb.extend(rows(60))
    rb.update_priority(id=[40], priority=3.0)
    rb.flush()
    rb.extend(rows(9, 60))
    for number in range(69, 72):
        rb.add(rows(1, number)[0])


@pytest.mark.guarantee(
    "kill/readers",
    "A reader sees every row of calls that returned in a killed writer, and after a power cut what the "
    "next writer will find.",
)
@pytest.mark.some(1)
@pytest.mark.parametrize("early", [False, True])
def test_a_killed_writer_leaves_every_row(store_path: Path, early: bool) -> None:
    """Rows that came one by one are only in the journal; a follower reads them there."""
    expstore.open(store_path, capacity=50).close()
    seen = expstore.open(store_path, mode="r", batch_size=16) if early else None
    in_child(lambda: write_and_die(store_path))
    before = contents(store_path)
    if seen is None:
        seen = expstore.open(store_path, mode="r", batch_size=16)
    seen.refresh()
    assert sorted(seen["a"].tolist()) == list(range(22, 72))
    assert not seen.stats()["live"]
    assert seen.recovered is not None
    assert "12 rows since the last sync kept" in seen.recovered
    for _ in range(20):
        check_rows(seen.sample())
    answers = [seen.sql(query).fetchall() for query in QUERIES[:3]]
    priorities = seen.sql("SELECT priority FROM priorities WHERE id IN (40, 72) ORDER BY id").fetchall()
    assert priorities == [(3.0,), (3.0,)]
    assert contents(store_path) == before
    with expstore.open(store_path) as rb:
        assert answers[0] == rb.sql(QUERIES[0]).fetchall()
        assert answers[2] == rb.sql(QUERIES[2]).fetchall()
        put(rb, rows(3, 72))
        assert sorted(seen["a"].tolist()) == list(range(25, 75))
    seen.close()


def change_and_die(path: Path) -> None:
    rb = expstore.open(path, capacity=50)
    rb.extend(rows(30))

    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    OpenStore.overwrite = die  # type: ignore[method-assign]
    rb[torch.tensor([4, 5, 9])] = rows(3, 1000)


@pytest.mark.parametrize("early", [False, True])
def test_a_change_that_was_recorded_shows_whole(store_path: Path, early: bool) -> None:
    expstore.open(store_path, capacity=50).close()
    seen = expstore.open(store_path, mode="r") if early else None
    in_child(lambda: change_and_die(store_path))
    if seen is None:
        seen = expstore.open(store_path, mode="r")
    expected = [0, 1, 2, 3, 1000, 1001, 6, 7, 8, 1002, *range(10, 30)]
    assert seen["a"].tolist() == expected
    assert seen[5]["wide"].tolist() == rows(1, 1001)[0]["wide"].tolist()
    assert seen.sql("SELECT list(a ORDER BY _id) FROM transitions").fetchall() == [(expected,)]
    seen.close()


def restart_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the machine look as if it had been started since the last writer ran."""
    monkeypatch.setattr(Disk, "boot_id", lambda self: b"another start...")


def write_without_sync(path: Path, *counts: int, synced: int = 0) -> None:
    """Extend by so many rows each time; flush after the first `synced` extends."""
    rb = expstore.open(path, capacity=50)
    stop_background(rb)
    for number, count in enumerate(counts):
        rb.extend(rows(count, sum(counts[:number])))
        if number + 1 == synced:
            rb.flush()


@pytest.mark.guarantee("kill/readers")
def test_after_a_power_cut_rows_must_prove_themselves(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_child(lambda: write_without_sync(store_path, 10, 10, 10, 10, synced=1))
    flip(store_path / "columns/a/c/0", 8 * 25, 0)
    restart_machine(monkeypatch)
    with expstore.open(store_path, mode="r") as seen:
        assert seen["a"].tolist() == list(range(20))
        assert seen.recovered is not None
        assert "2 unfinished writes dropped" in seen.recovered


@pytest.mark.guarantee("kill/readers")
def test_after_a_power_cut_new_rows_have_their_first_priority(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The column has no checksum: what stands there may be an older row's priority."""

    def work() -> None:
        rb = expstore.open(store_path, capacity=50)
        stop_background(rb)
        rb.extend(rows(10))
        rb.update_priority(range(10), 3.0)
        rb.flush()
        rb.extend(rows(10, 10))

    in_child(work)
    shard = store_path / "columns" / "_row" / "priority" / "c" / "0"
    data = bytearray(shard.read_bytes())
    data[:80] = np.arange(20, dtype="<f4").tobytes()
    shard.write_bytes(data)
    for is_restarted, newer in ((False, list(range(10, 20))), (True, [3.0] * 10)):
        if is_restarted:
            restart_machine(monkeypatch)
        with expstore.open(store_path, mode="r") as seen:
            assert seen.storage.priorities.values[:20].tolist() == [*range(10), *newer]


def test_after_a_power_cut_in_an_extend_longer_than_the_ring(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_spare_slots(monkeypatch, 10)

    def work() -> None:
        rb = expstore.open(store_path, capacity=4000)
        stop_background(rb)
        rb.extend(rows(20))
        rb.flush()
        append_record = _BatchWrite.append_record

        def record_and_die(*args: Any) -> int:
            # Such an extend ends with a sync.
            die = lambda store: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
            rb.storage.checkpoints._checkpoint = die  # type: ignore[attr-defined]
            return append_record(*args)

        monkeypatch.setattr(_BatchWrite, "append_record", record_and_die)
        rb.extend(rows(90_000, 20))

    in_child(work)
    restart_machine(monkeypatch)
    for mode in ("r", "a"):
        with expstore.open(store_path, mode=mode) as rb:  # type: ignore[arg-type]
            assert sorted(rb["a"].tolist()) == list(range(86_020, 90_020))
            slots = rb.storage.geometry.slot_of(rb.storage.window.ids())
            assert (rb.storage.priorities.values[slots] == 1.0).all()


def test_after_a_power_cut_a_lost_shard_of_priorities_is_made_again(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that prove themselves are kept though their priorities are not there: the record has them."""

    in_child(lambda: write_without_sync(store_path, 30))
    (store_path / "columns" / "_row" / "priority" / "c" / "0").unlink()
    restart_machine(monkeypatch)
    for mode in ("r", "a", "r"):
        with expstore.open(store_path, mode=mode) as rb:  # type: ignore[arg-type]
            assert rb["a"].tolist() == list(range(30))
            assert rb.storage.priorities.values[:30].tolist() == [1.0] * 30


def test_a_writer_that_comes_where_there_was_no_page(store_path: Path) -> None:
    with expstore.open(store_path, capacity=50) as rb:
        rb.extend(rows(20))
    (store_path / "STATE").unlink()
    with expstore.open(store_path, mode="r") as seen:
        assert len(seen) == 20
        with expstore.open(store_path) as rb:
            put(rb, rows(9, 20))
            assert seen["a"].tolist() == list(range(29))


def test_a_writer_out_of_sight_is_known_by_its_heartbeat(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """As from within a container: the process cannot be seen."""
    rb, _ = pair
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    with expstore.open(rb.storage.path, mode="r") as seen:  # type: ignore[attr-defined]
        assert seen.stats()["live"]
    monkeypatch.undo()
    monkeypatch.setattr(Disk, "process_start", lambda self, pid: None)
    monkeypatch.setattr(tuning, "HEARTBEAT_SECONDS", 60.0)
    with expstore.open(rb.storage.path, mode="r") as seen:  # type: ignore[attr-defined]
        assert not seen.stats()["live"]  # taken for dead
        put(rb, rows(5, 20))
        assert len(seen) == 25
        assert seen.stats()["live"]  # but it moves
        same_answers(rb, seen)


def test_a_reused_process_id_is_not_a_writer(store_path: Path) -> None:
    in_child(lambda: write_and_die(store_path))
    disk = ReadingDisk()
    disk.process_start = lambda pid: time.time() + 5  # type: ignore[method-assign]
    storage = FollowerStorage(store_path, disk=disk)
    assert not storage.more_stats()["live"]
    assert storage.last == 72
    storage.close()


def test_an_unknown_writer_is_followed_through_its_files(store_path: Path) -> None:
    """As over a file system of another machine: what STATE says is not believed, only that it moved."""
    disk = ReadingDisk()
    disk.boot_id = lambda: b"another start..."  # type: ignore[method-assign]
    with expstore.open(store_path) as rb:
        rb.extend(rows(3))
        storage = FollowerStorage(store_path, disk=disk)
        assert not storage.more_stats()["live"]
        assert (storage.window.low, storage.window.last) == (0, 3)
        rb.empty()  # gives ids up, and writes to no slot
        assert storage.window.rows == 0
        put(rb, rows(2))
        assert (storage.window.low, storage.window.last) == (3, 5)
        storage.close()


def test_a_copy_of_a_running_store_has_no_writer(pair: Pair, tmp_path: Path) -> None:
    rb, _ = pair
    shutil.copytree(rb.storage.path, tmp_path / "copy")  # type: ignore[attr-defined]
    with expstore.open(tmp_path / "copy", mode="r") as copy:
        put(rb, rows(5, 20))
        assert len(copy) == 20
        assert not copy.stats()["live"]


def test_the_page_of_another_format_is_not_believed(store_path: Path) -> None:
    in_child(lambda: write_and_die(store_path))
    with (store_path / "STATE").open("r+b") as file:
        file.seek(8)
        file.write((1).to_bytes(8, "little"))
    with expstore.open(store_path, mode="r") as seen:
        assert sorted(seen["a"].tolist()) == list(range(22, 72))


def test_a_fence_keeps_counters_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processors that show stores in another order get a fence; what is read is the same."""
    monkeypatch.setattr("expstore.storages.format.control_page._ORDERED", False)
    page = StatePage(Disk(), tmp_path / "STATE")
    page.claim(b"u" * 16, b"b" * 16, generation=3, last=7, drained=6, horizon=9, retired=2, layout=4)
    page.begin_change(1, 2)
    view = StatePage(Disk(), tmp_path / "STATE", write=False).look()
    assert view == (3, 4, 9, 1, 6, 2, 0)


# ---------------------------------------------------------------------------------------------------
# Draws, forks, copies.


def test_draws_are_a_followers_own(store_path: Path) -> None:
    with expstore.open(store_path, capacity=50, batch_size=8, seed=1) as rb:
        rb.extend(rows(50))
        before = rb.storage.draws.number

        def ids(**options: Any) -> list[list[int]]:
            with expstore.open(store_path, mode="r", batch_size=8, **options) as seen:
                return [seen.sample()["id"].tolist() for _ in range(3)]

        assert ids(seed=5) == ids(seed=5)
        assert ids(seed=5) != ids(seed=6)
        assert ids() != ids()
        assert ids(seed=1)[0] != rb.sample()["id"].tolist()
        assert rb.storage.draws.number == before + 1


@pytest.mark.guarantee("process/forks")
def test_a_pickled_buffer_follows(pair: Pair) -> None:
    rb, seen = pair
    for original in (rb, seen):
        copy = pickle.loads(pickle.dumps(original))
        assert (type(copy), copy.batch_size) == (type(rb), 8)
        put(rb, rows(5, rb.storage.last))
        assert len(copy) == len(rb)
        check_rows(copy.sample())
        same_answers(rb, copy)
        with pytest.raises(StateError, match="copy"):
            copy.extend(rows(1))
        copy.close()
        with pytest.raises(StateError, match="closed"):
            copy.sample()
    unused = pickle.loads(pickle.dumps(rb))
    unused.close()
    with pytest.raises(StateError, match="closed"):
        unused.sample()


@pytest.mark.guarantee("process/forks")
def test_a_fork_sees_what_the_parent_writes_later(pair: Pair) -> None:
    rb, seen = pair
    rb["wide"]
    told, tell = multiprocessing.Pipe()
    drawn_once, written = multiprocessing.Event(), multiprocessing.Event()

    def child() -> None:
        try:
            drawn = [buffer.sample()["id"].tolist() for buffer in (rb, rb, seen)]
            drawn_once.set()
            assert written.wait(60)
            for buffer in (rb, seen):
                assert len(buffer) == 50
                assert sorted(buffer["a"].tolist()) == list(range(30, 80))
                check_rows(buffer.sample(30))
                assert buffer.sql("SELECT max(_id) FROM transitions").fetchall() == [(80,)]
            with pytest.raises(StateError, match="fork"):
                rb.extend(rows(1))
            rb.close()
            tell.send(drawn)
        except BaseException as exc:
            drawn_once.set()
            tell.send(repr(exc))

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    assert drawn_once.wait(60)
    draw = rb.storage.draws.number
    put(rb, rows(60, 20))
    written.set()
    drawn = told.recv()
    process.join()
    assert isinstance(drawn, list), drawn
    assert rb.storage.draws.number == draw  # the child's draws are its own
    assert rb.sample()["id"].tolist() not in drawn
    rb.extend(rows(1, 80))
    with pytest.raises(expstore.errors.LockedError):
        expstore.open(rb.storage.path)  # type: ignore[attr-defined]


class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg,misc]
    """What users write to feed a DataLoader."""

    def __init__(self, rb: TensorDictReplayBuffer, batches: int) -> None:
        self.rb, self.batches = rb, batches

    def __iter__(self) -> Iterator[TensorDict]:
        for _ in range(self.batches):
            yield self.rb.sample()


def first(items: list[TensorDict]) -> TensorDict:
    return items[0]


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("method", "role"),
    [
        *[("fork", "writer"), ("fork", "follower")],
        pytest.param("spawn", "follower", marks=pytest.mark.torture),
    ],
)
def test_a_data_loader_with_workers_while_the_writer_extends(pair: Pair, method: str, role: str) -> None:
    rb, seen = pair
    source = rb if role == "writer" else seen
    source.sample()
    stop = threading.Event()

    def extend() -> None:
        while not stop.wait(0.002):
            rb.extend(rows(9, rb.storage.last))

    def batches() -> list[list[int]]:
        torch.manual_seed(0)
        loader = torch.utils.data.DataLoader(
            Stream(source, 15), batch_size=1, collate_fn=first, num_workers=2, multiprocessing_context=method
        )
        found = []
        for batch in loader:
            check_rows(batch)
            found.append(batch["id"].tolist())
        return found

    thread = threading.Thread(target=extend)
    thread.start()
    try:
        found = batches()
        last = rb.storage.last
    finally:
        stop.set()
        thread.join()
    assert len(found) == 30
    assert max(max(ids) for ids in found) > 20  # fresh rows of the living parent
    assert last > 20
    if method == "spawn":
        return  # each of these workers takes seconds to begin; the rest is the same
    still = batches()
    assert len({tuple(ids) for ids in still}) == 30, "workers repeat one another"
    assert still == batches(), "the loader's seed decides"


@pytest.mark.parametrize("more", [1, 2, 5])
def test_packed_rows_after_an_empty_store(store_path: Path, more: int) -> None:
    """The ids that `empty` skips are in no chunk: a follower does not look for them."""

    def frames(first: int, count: int) -> TensorDict:
        numbers = torch.arange(first, first + count)
        return TensorDict({"frame": numbers[:, None].expand(-1, 64).to(torch.uint8)}, [count])

    packed = {"frame": {"layout": "packed", "rows": 2}}
    with expstore.open(store_path, capacity=33, layout=expstore.Layout(fields=packed)) as rb:
        rb.extend(frames(0, 20))
        with expstore.open(store_path, mode="r") as seen:
            assert len(seen) == 20
            rb.add(frames(20, 1)[0])
            rb.empty()  # the next id is 34, the second one of its chunk
            assert len(seen) == 0
            rb.extend(frames(30, more))
            drain(rb)
            assert len(seen) == more
            assert seen[:]["frame"][:, 0].tolist() == list(range(30, 30 + more))
