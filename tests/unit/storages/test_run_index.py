"""The index of runs that samplers use, while rows are written, deleted and looked up."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np

import expstore
from expstore import ReplayBuffer, TensorDictReplayBuffer
from expstore.storages.memory import MemoryStorage
from tests.support.batches import trajectory_rows


def list_runs(rb: ReplayBuffer) -> list[list[int]]:
    """What x is in each run, step by step."""
    runs = rb.storage.runs
    with runs.lock:
        runs.look()
        numbers = np.flatnonzero(runs.first < runs.stop)
        first, length = runs.first[numbers], runs.stop[numbers] - runs.first[numbers]
        ids = runs.rows(numbers, first, length)
    found = rb.storage.read(ids)[rb.storage.require_schema().place_of(("x",))].tolist()
    return [found[end - n : end] for end, n in zip(np.cumsum(length), length, strict=True)]


def test_runs_follow_episodes_whatever_comes_between() -> None:
    rb = ReplayBuffer(storage=MemoryStorage(10))
    rb.extend(trajectory_rows(1, 3))
    assert list_runs(rb) == [[1000, 1001, 1002]]
    rb.extend(trajectory_rows(2, 2))
    rb.extend(trajectory_rows(1, 2, 3))
    assert list_runs(rb) == [[1000, 1001, 1002, 1003, 1004], [2000, 2001]]
    rb.extend(trajectory_rows(2, 5, 2))  # two rows too many for the ring
    assert list_runs(rb) == [[1002, 1003, 1004], [2000, 2001, 2002, 2003, 2004, 2005, 2006]]
    rb.empty()
    assert list_runs(rb) == []
    rb.extend(trajectory_rows(3, 2))
    assert list_runs(rb) == [[3000, 3001]]


def test_rows_are_located() -> None:
    rb = ReplayBuffer(storage=MemoryStorage(6))
    for first in (0, 2, 4):
        rb.extend(trajectory_rows(1, 2, first))
        rb.extend(trajectory_rows(2, 1, first))
    runs = rb.storage.runs
    with runs.lock:
        runs.look()
        numbers, steps = runs.locate(np.array([9, 8, 7, 6, 5, 4, 3, 2]))
    assert steps.tolist()[:6] == [2, 5, 4, 1, 3, 2]
    assert runs.episode[numbers[:6]].tolist() == [2, 1, 1, 2, 1, 1]
    assert numbers[6:].tolist() == [-1, -1]
    assert runs.ids(numbers[:6], steps[:6]).tolist() == [9, 8, 7, 6, 5, 4]


def test_changed_since_reports_changes() -> None:
    rb = ReplayBuffer(storage=MemoryStorage(100))
    runs = rb.storage.runs
    rb.extend(trajectory_rows(1, 3))
    runs.look()
    assert runs.find_changed(0) is None
    seen = runs.moves
    assert runs.find_changed(seen) is not None
    rb.extend(trajectory_rows(2, 3))
    runs.look()
    rb.extend(trajectory_rows(1, 1, 3))
    runs.look()
    changed = runs.find_changed(seen)
    assert changed.tolist() == [1, 0]
    moves = runs.moves
    runs.look()
    assert runs.moves == moves
    for step in range(4, 104):
        rb.extend(trajectory_rows(1, 1, step))
        runs.look()
    assert runs.find_changed(seen) is None


def test_runs_that_got_other_numbers_have_all_changed() -> None:
    rb = ReplayBuffer(storage=MemoryStorage(6))
    runs, renumbered = rb.storage.runs, 0
    rb.extend(trajectory_rows(1, 3))
    runs.look()
    for number in range(2, 1500):
        seen, count = runs.moves, runs.table.count
        rb.extend(trajectory_rows(number, 3))
        runs.look()
        fewer = runs.table.count < count  # those whose rows have left were forgotten
        assert (runs.find_changed(seen) is None) == fewer
        renumbered += fewer
    assert renumbered == 1


def test_a_store_on_disk_shows_the_same_after_any_end(store_path: Path) -> None:
    with expstore.open(store_path, capacity=20) as rb:
        for first in range(0, 12, 2):
            rb.extend(trajectory_rows(1, 2, first), source="a")
            rb.extend(trajectory_rows(1, 1, first), source="b")
        before = list_runs(rb)
        assert len(before) == 2
    with expstore.open(store_path) as rb:
        assert list_runs(rb) == before
        assert rb.episodes.resume("a", check=False).numel() == 1
        with expstore.open(store_path, mode="r") as follower:
            assert list_runs(follower) == before
            rb.extend(trajectory_rows(1, 3, 12), source="a")
            rb.flush()  # few rows stand in the columns a little later
            assert list_runs(follower) == list_runs(rb) != before
        rb.dumps(store_path.with_name("versions"))
        rb.extend(trajectory_rows(7, 5))
        rb.loads(store_path.with_name("versions"))
        assert list_runs(rb)[0][-1] == 1014


def test_threads_may_look_while_one_writes() -> None:
    rb = TensorDictReplayBuffer(storage=MemoryStorage(500))
    rb.extend(trajectory_rows(1, 5))
    stop, wrong = threading.Event(), list[Any]()

    def look() -> None:
        runs = rb.storage.runs
        while not stop.is_set():
            with runs.lock:
                window = runs.look()
                if int((runs.stop - runs.first).sum()) != window.rows:
                    wrong.append((window, runs.first.tolist(), runs.stop.tolist()))
                    return

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    for number in range(400):
        rb.extend(trajectory_rows(1 + number % 3, 4, 5 + 4 * (number // 3)))
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
