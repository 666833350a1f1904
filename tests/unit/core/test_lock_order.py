"""Locks of a storage are taken in one order: in the debug mode another order raises at once."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import pytest

from expstore.core.lock_order import LOCK_ORDER, LockOrder, LockOrderError
from expstore.disk.fair_lock import FairLock
from expstore.storages.factory import ZarrStorage
from expstore.storages.memory import MemoryStorage


def make(*names: str) -> list[Any]:
    order = LockOrder()
    return [order.rank_lock(name, threading.RLock()) for name in names]


def test_without_the_debug_mode_locks_are_the_plain_ones(store_path: Path) -> None:
    lock, fair = threading.Lock(), FairLock()
    order = LockOrder()
    assert order.rank_lock("sync", lock) is lock
    assert order.rank_lock("extend", fair) is fair
    storage = ZarrStorage(store_path, 10)
    assert isinstance(storage.lock, type(threading.RLock()))
    assert isinstance(storage.locks.episodes, type(threading.Lock()))
    storage.close()


@pytest.mark.usefixtures("checked_locks")
class TestChecked:
    def test_two_locks_in_the_wrong_order_raise(self) -> None:
        for first, second in itertools.pairwise(LOCK_ORDER):
            before, behind = make(first, second)
            with before, behind:
                pass
            with behind, pytest.raises(LockOrderError, match=f"holds the lock '{second}' takes '{first}'"):
                before.acquire()
            with before:  # it was not taken
                pass

    def test_two_locks_of_one_rank_raise(self) -> None:
        order = LockOrder()
        first, second = (order.rank_lock("tail", threading.RLock()) for _ in range(2))
        with first, pytest.raises(LockOrderError):
            second.acquire()

    def test_a_lock_may_be_taken_again(self) -> None:
        before, behind = make("extend", "storage")
        with before, behind, before, behind:
            pass
        with before:
            pass

    def test_a_lock_may_be_tried_in_any_order(self) -> None:
        before, behind = make("cut", "sync")
        with behind:
            assert before.acquire(blocking=False)
            before.release()

    def test_another_threads_locks_do_not_count(self) -> None:
        before, behind = make("extend", "storage")
        taken: list[bool] = []

        def take() -> None:
            with before:
                taken.append(True)

        with behind:
            thread = threading.Thread(target=take)
            thread.start()
            thread.join()
        assert taken == [True]

    def test_another_storages_locks_have_an_order_of_their_own(self) -> None:
        (priorities,), (storage,) = make("priorities"), make("storage")
        with priorities, storage:
            pass

    def test_a_condition_of_such_a_lock_waits_and_is_notified(self) -> None:
        order = LockOrder()
        moved = threading.Condition(order.rank_lock("pin", threading.Lock()))
        told = threading.Event()

        def tell() -> None:
            with moved:
                told.set()
                moved.notify_all()

        thread = threading.Thread(target=tell)
        with moved:
            thread.start()
            assert moved.wait_for(told.is_set, timeout=60)
        thread.join()

    def test_a_storage_has_such_locks(self) -> None:
        storage = MemoryStorage(10)
        with storage.locks.episodes, pytest.raises(LockOrderError, match=r"'episodes' takes 'storage'"):
            storage.lock.acquire()
