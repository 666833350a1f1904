"""What open stores take of their process: threads and descriptors, also while a sync hangs."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import expstore
from expstore.disk import files
from expstore.maintenance.verify import verify
from expstore.storages.engine import background_checkpoints
from tests.support.forks import in_child
from tests.support.open_files import open_files
from tests.support.waits import wait_until

LAYOUTS = ["flat", "packed", "arrow"]


def rows(fields: int, start: int = 0, count: int = 16) -> dict[str, np.ndarray]:
    values = np.arange(start, start + count, dtype=np.float32)[:, None] + np.zeros(4, np.float32)
    return {f"f{number:02d}": values + number for number in range(fields)}


def work_threads(others: set[threading.Thread]) -> list[str]:
    """Return the names of this package's threads, without `others`."""
    alive = set(threading.enumerate()) - others
    return [thread.name for thread in alive if thread.name.startswith("expstore-")]


@pytest.fixture(autouse=True)
def idle_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_checkpoints, "REST_SECONDS", 0.0)


def test_thirty_stores_share_a_few_threads(tmp_path: Path) -> None:
    others = set(threading.enumerate())  # of tests before this one
    with ExitStack() as stores:
        opened = [
            stores.enter_context(expstore.open(tmp_path / str(number), layout=LAYOUTS[number % 3]))
            for number in range(30)
        ]
        most = 0
        for lap in range(3):
            for rb in opened:
                rb.extend(rows(3, 16 * lap))
                rb.flush()
                most = max(most, threading.active_count() - len(others))
        assert most < 40
        assert work_threads(set()).count("expstore-keeper") == 1
        wait_until(lambda: sum(name != "expstore-warm" for name in work_threads(others)) <= 2)
    wait_until(lambda: "expstore-keeper" not in work_threads(others))


@pytest.mark.some(4)
@pytest.mark.parametrize("capacity", [None, 100])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fields", [1, 30])
def test_an_idle_store_has_few_descriptors(
    layout: str, capacity: int | None, fields: int, store_path: Path
) -> None:
    with expstore.open(store_path, layout=layout, capacity=capacity, batch_size=4, seed=1) as rb:
        for lap in range(3):
            rb.extend(rows(fields, 40 * lap, 40))
            rb.update_priority(np.arange(4), np.full(4, 2.0))
            rb.flush()
            wait_until(lambda: len(open_files(store_path)) <= 12)
            assert rb.sample()["f00"].shape == (4, 4)
            assert len(open_files(store_path)) <= 12
        with expstore.open(store_path, mode="r", batch_size=4) as reader:
            before = len(open_files(store_path))
            for lap in range(3, 6):
                rb.extend(rows(fields, 40 * lap, 40))
                reader.sample()
                newest = 40 * lap + 39
                wait_until(lambda: bool(reader[:]["f00"].max() == newest))  # noqa: B023
            rb.flush()
            wait_until(lambda: len(open_files(store_path)) <= before)
        expected = rb[:]["f00"].numpy()
    assert verify(store_path) == []
    with expstore.open(store_path) as rb:
        assert (rb[:]["f00"].numpy() == expected).all()


def rest(rb: Any) -> None:
    """Close the descriptors of a store's columns now."""
    rb.flush()
    wait_until(lambda: rb.storage.checkpoints.rest(rb.storage))


def test_a_file_that_was_replaced_while_the_store_rested_is_not_written_to(store_path: Path) -> None:
    rb = expstore.open(store_path)
    rb.extend(rows(2))
    rest(rb)
    file = rb.storage.state.columns.flat[0].files[0]
    file.path.rename(store_path / "other")
    file.path.write_bytes((store_path / "other").read_bytes())
    before = file.path.read_bytes()
    with pytest.raises(expstore.errors.StorageError, match="was deleted, moved or replaced"):
        rb.extend(rows(2, count=300))
    assert file.path.read_bytes() == before
    rb.close()
    (store_path / "other").rename(file.path)
    with expstore.open(store_path) as rb:
        assert (rb[:]["f01"][:, 0].numpy() == np.arange(16) + 1).all()
    assert verify(store_path) == []


def test_resting_files_that_others_have_linked_are_written_to_as_if_they_were_open(
    store_path: Path, tmp_path: Path
) -> None:
    with expstore.open(store_path) as rb:
        rb.extend(rows(2))
        rest(rb)
        file = rb.storage.state.columns.flat[0].files[0]
        os.link(file.path, tmp_path / "linked")
        rb.extend(rows(2, 16, 300))
        assert file.path.samefile(tmp_path / "linked")  # the map has this file
        assert rb[-1]["f00"][0] == 315


def test_a_store_with_unsynced_rows_does_not_rest(store_path: Path) -> None:
    with expstore.open(store_path) as rb:
        rb.storage.background.stop()
        rb.extend(rows(2, count=300))
        before = open_files(store_path)
        assert not rb.storage.checkpoints.rest(rb.storage)
        assert open_files(store_path) == before
        rb.flush()
        assert rb.storage.checkpoints.rest(rb.storage)
        rb.update_priority([1], [3.0])
        rb.storage.write_values()
        assert not rb.storage.checkpoints.rest(rb.storage)


def test_a_store_in_use_does_not_rest(store_path: Path) -> None:
    with expstore.open(store_path) as rb:
        rb.storage.background.stop()
        rb.extend(rows(2))
        rb.flush()
        storage: Any = rb.storage
        for lock in (storage.locks.storage, storage.checkpoints.lock, storage.locks.sampled):
            result: list[bool] = []
            with lock:
                other = threading.Thread(target=lambda: result.append(storage.checkpoints.rest(storage)))  # noqa: B023
                other.start()
                other.join()
            assert result == [False]
        assert storage.checkpoints.rest(storage)


@pytest.fixture
def hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Let each fsync of files below `tmp_path / "hung"` wait for an event."""
    go_on, sync = threading.Event(), files._sync_data

    def sync_or_hang(fd: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").startswith(str(tmp_path / "hung")):
            assert go_on.wait(120)
        sync(fd)

    monkeypatch.setattr(files, "_sync_data", sync_or_hang)
    monkeypatch.setattr(files.Disk, "warm", lambda disk: None)  # the compiled loop does not hang
    yield go_on
    go_on.set()


@pytest.mark.guarantee("process/turns")
def test_a_sync_that_hangs_delays_no_other_store(
    tmp_path: Path, hanging: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do its background checkpoints stop: rows are synced although nobody calls `flush`."""
    hanging.set()
    others = threading.active_count()  # of tests before this one
    with ExitStack() as stores:
        hung = [stores.enter_context(expstore.open(tmp_path / f"hung{number}")) for number in range(4)]
        sound = stores.enter_context(expstore.open(tmp_path / "sound"))
        stores.callback(hanging.set)  # first of all, so that a failure does not wait for the syncs
        for rb in (*hung, sound):
            rb.extend(rows(20))
            rb.flush()
        hanging.clear()
        flushes = []
        for rb in hung:
            rb.extend(rows(20, 16))
            flushes.append(threading.Thread(target=rb.flush))
            flushes[-1].start()
        wait_until(lambda: all(rb.storage.checkpoints.lock.locked() for rb in hung))
        for lap in range(1, 4):
            sound.extend(rows(20, 16 * lap))
            sound.flush()
            assert sound.stats()["unsynced_rows"] == 0
        sound.extend(rows(20, 64, 300))
        wait_until(lambda: sound.stats()["unsynced_rows"] == 0)
        assert all(thread.is_alive() for thread in flushes)
        assert all(rb.storage.checkpoints.lock.locked() for rb in hung)
        assert threading.active_count() - others < 30
        hanging.set()
        for thread in flushes:
            thread.join()
        assert [len(rb) for rb in (*hung, sound)] == [32, 32, 32, 32, 364]


def test_a_forked_child_opens_stores_with_threads_of_its_own(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "a") as rb:
        rb.extend(rows(3))

        def child() -> None:
            with expstore.open(tmp_path / "b") as other:
                other.extend(rows(3, count=300))
                wait_until(lambda: other.stats()["unsynced_rows"] == 0)

        in_child(child)
        rb.extend(rows(3, 16))
        wait_until(lambda: bool(rb.stats()["unsynced_rows"] == 0))
        assert len(rb) == 32
    assert verify(tmp_path / "b") == []
