"""Writers wait while a snapshot copies rows that they would overwrite."""

from __future__ import annotations

import threading

import pytest

from expstore.core.counters import Counters
from expstore.core.lock_order import LockOrder
from expstore.storages.snapshot_access import SnapshotPin
from tests.support.waits import wait_until


def test_wait_returns_at_once_when_free() -> None:
    counters = Counters()
    pin = SnapshotPin(LockOrder(), counters)
    pin.wait()
    with pin.acquire():
        pin.move(5)
        pin.wait(4)
    assert counters.waits == 0


def test_one_waits_until_its_rows_are_copied_and_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    counters, waiting, passed = Counters(), threading.Event(), threading.Event()
    pin = SnapshotPin(LockOrder(), counters)
    wait = pin._moved.wait
    monkeypatch.setattr(pin._moved, "wait", lambda: (waiting.set(), wait()))
    with pin.acquire():
        pin.move(7)
        waiter = threading.Thread(target=lambda: (pin.wait(7), passed.set()))
        waiter.start()
        wait_until(lambda: waiting.is_set() or passed.is_set())
        assert not passed.is_set()  # row 7 itself is not copied yet
        pin.move(8)
        assert passed.wait(60)
        waiter.join()
        everything = threading.Thread(target=pin.wait)
        everything.start()
    everything.join(60)  # whatever has happened to the copy, nobody waits for it any longer
    assert not everything.is_alive()
    assert counters.waits >= 1
    assert pin.first == 0
