"""States of a handle (open, forked, copied, closed), and the notifications of its parts."""

from __future__ import annotations

import copy
import gc
import pickle
import shutil
import threading
from pathlib import Path

import pytest

import expstore
from expstore import MemoryStorage
from expstore.buffers.store_handle import Life, StoreHandle, StorePart
from expstore.errors import StateError
from expstore.storages.read_view import ReadView
from tests.support.batches import numbered_rows
from tests.support.forks import in_child
from tests.support.threads import in_threads


class Part(StorePart):
    """Note what a handle says; refuse storages of one capacity."""

    def __init__(self, refused: int | None = -1) -> None:
        self.attached: list[ReadView] = []
        self.events: list[str] = []
        self.refused = refused

    def attach(self, storage: ReadView) -> None:
        if storage.capacity == self.refused:
            raise ValueError("does not fit")
        self.attached.append(storage)

    def leave_parent(self) -> None:
        self.events.append("left")

    def before_fork(self) -> None:
        self.events.append("before")

    def after_fork(self) -> None:
        self.events.append("after")


@pytest.fixture
def path(store_path: Path) -> Path:
    """A closed store with ten rows."""
    with expstore.open(store_path) as rb:
        rb.extend(numbered_rows(10))
    return store_path


def opened(path: Path) -> StoreHandle:
    return StoreHandle(expstore.open(path).storage)


def test_a_handle_is_open_until_it_is_closed(path: Path) -> None:
    handle, part = opened(path), Part()
    handle.add_part(part)
    assert handle.life is Life.OPEN
    assert part.attached == [handle.storage]
    handle.close()
    handle.close()
    assert handle.life is Life.CLOSED
    with pytest.raises(StateError, match="closed"):
        handle.check_open()
    expstore.open(path).close()  # the lock was released


def test_a_copy_follows_when_it_is_first_used(path: Path) -> None:
    handle, part = opened(path), Part()
    copied = pickle.loads(pickle.dumps(handle))
    copied.add_part(part)
    assert copied.life is Life.COPIED
    assert part.attached == []
    assert copied.storage.follows
    assert part.attached == [copied.storage]
    assert (copied.life, copied.storage.last, handle.storage.last) == (Life.OPEN, 10, 10)
    copied.close()
    assert handle.life is Life.OPEN
    handle.close()


def test_a_copy_that_was_never_opened_is_closed_for_good(path: Path) -> None:
    handle = opened(path)
    copied = pickle.loads(pickle.dumps(handle))
    copied.close()
    assert copied.life is Life.CLOSED
    with pytest.raises(StateError, match="closed"):
        _ = copied.storage
    handle.close()


def test_a_copy_of_a_buffer_opens_nothing_until_it_is_used(path: Path) -> None:
    with expstore.open(path) as rb:
        first = pickle.loads(pickle.dumps(rb))
        second = copy.copy(first)
        assert first._store.life is second._store.life is Life.COPIED
        assert (len(second), first._store.life, second._store.life) == (10, Life.COPIED, Life.OPEN)
        first.close()
        second.close()
        assert len(rb) == 10


def test_a_copy_in_ram_has_the_rows() -> None:
    storage = MemoryStorage(10)
    expstore.ReplayBuffer(storage=storage).extend(numbered_rows(4))
    copied = pickle.loads(pickle.dumps(StoreHandle(storage)))
    assert copied.life is Life.OPEN
    assert copied.is_in_memory
    assert copied.storage is not storage
    assert len(copied.storage) == 4
    storage.close()
    with pytest.raises(StateError, match="closed"):
        pickle.dumps(StoreHandle(storage))


def test_threads_that_use_a_copy_first_open_one_follower(path: Path) -> None:
    handle, part = opened(path), Part()
    copied = pickle.loads(pickle.dumps(handle))
    copied.add_part(part)
    start = threading.Barrier(8)

    def use(_: int) -> None:
        start.wait()
        _ = copied.storage

    in_threads(8, use)
    assert part.attached == [copied.storage]
    copied.close()
    handle.close()


def test_a_part_that_does_not_fit_leaves_a_copy_unopened(path: Path) -> None:
    handle, part = opened(path), Part()
    copied = pickle.loads(pickle.dumps(handle))
    part.refused = handle.storage.capacity
    copied.add_part(part)
    for _ in range(2):
        with pytest.raises(ValueError, match="does not fit"):
            _ = copied.storage
        assert copied.life is Life.COPIED
    part.refused = -1
    assert len(copied.storage) == 10
    copied.close()
    handle.close()


def test_a_forked_child_follows(path: Path) -> None:
    handle, part = opened(path), Part()
    handle.add_part(part)

    def child() -> None:
        assert part.events == ["before", "left"]
        assert handle.life is Life.FORKED
        assert handle.storage.follows
        assert part.attached[-1] is handle.storage
        assert len(handle.storage) == 10
        handle.close()
        assert handle.life is Life.CLOSED

    in_child(child)
    assert part.events == ["before", "after"]
    assert (handle.life, handle.storage.can_write) == (Life.OPEN, True)
    handle.close()


@pytest.mark.guarantee("process/forks")
@pytest.mark.slow
def test_a_part_that_fails_in_a_child_keeps_no_other_one(
    path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(Part):
        def leave_parent(self) -> None:
            raise RuntimeError("cannot leave")

    handles, parts = [opened(path)], [Failing(), Part()]
    for number in range(8):  # the order of the handles is not known
        shutil.copytree(path, tmp_path / f"{number}.exp", ignore=shutil.ignore_patterns("LOCK"))
        handles.append(opened(tmp_path / f"{number}.exp"))
    for handle in handles:
        for part in parts:
            handle.add_part(part)

    def child() -> None:
        assert caplog.text.count("RuntimeError: cannot leave") == len(handles)
        assert parts[1].events == ["before"] * 9 + ["left"] * 9
        assert all(handle.life is Life.FORKED for handle in handles)

    in_child(child)
    for handle in handles:
        handle.close()


def test_a_storage_that_does_not_fit_is_not_held() -> None:
    first, second, third = MemoryStorage(10), MemoryStorage(20), MemoryStorage(30)
    handle, part = StoreHandle(first), Part(refused=30)
    handle.add_part(part)
    assert handle.replace(second) is first
    with pytest.raises(ValueError, match="does not fit"):
        handle.replace(third)
    assert handle.storage is second
    assert part.attached == [first, second, second]
    assert handle.catalog.query("SELECT count(*) FROM sources", None).fetchone() == (0,)
    handle.close()
    assert not first.closed
    with pytest.raises(StateError, match="closed"):
        handle.replace(first)


def test_other_content_is_attached_again() -> None:
    storage = MemoryStorage(10)
    handle, part = StoreHandle(storage), Part()
    handle.add_part(part)
    expstore.ReplayBuffer(storage=storage).extend(numbered_rows(3))
    storage.load_state_dict(storage.state_dict())
    assert part.attached == [storage, storage]


def test_parts_are_held_weakly() -> None:
    handle, part = StoreHandle(MemoryStorage(10)), Part()
    handle.add_part(part)
    gc.disable()
    try:
        del part
        assert handle._live_parts() == []
    finally:
        gc.enable()
