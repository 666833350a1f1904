"""A store is shipped to object storage in memory, restored on an empty disk, and fenced."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("obstore", reason="the extra expstore[s3] is not installed")

import expstore
from expstore import Ship, cold
from expstore.cold import ship as shipping
from expstore.errors import ArgumentError, CorruptionError, LockedError, RemoteError, StateError
from tests.support.batches import episode_rows
from tests.support.object_stores import WatchedStorage

pytestmark = pytest.mark.usefixtures("no_syncs", "no_index_on_close")

Buffer = expstore.TensorDictReplayBuffer


@pytest.fixture
def storage() -> WatchedStorage:
    return WatchedStorage()


@pytest.fixture
def open_store(tmp_path: Path, storage: WatchedStorage) -> Iterator[Callable[..., Buffer]]:
    """Open a store by its name; it ships when it is told to, and when it is closed."""
    opened: list[Buffer] = []

    def act(name: str, **settings: Any) -> Buffer:
        ship = Ship(settings.pop("to", storage), every=3600.0)
        opened.append(expstore.open(tmp_path / name, ship=ship, batch_size=4, **settings))
        return opened[-1]

    yield act
    storage.calm()
    for rb in opened:
        rb.close()


def _numbers(rb: Buffer) -> list[int]:
    return rb[:]["number"].tolist()


def _ship_once(rb: Buffer) -> bool:
    """Do in this thread what the thread that ships does every few seconds; return whether it succeeded."""
    shipper: Any = rb.storage.writer().holders.shipping
    return shipper._work(time.monotonic())


def _fail(number: int, act: str, key: str) -> None:
    raise RemoteError("the server does not answer")


@pytest.mark.guarantee(
    "ship/restore",
    "A store that is opened with `ship=` on an empty disk has the rows, episodes and draws that were shipped"
    " last, and continues.",
)
def test_an_empty_disk_gets_what_was_shipped(open_store: Callable[..., Buffer], tmp_path: Path) -> None:
    rb = open_store("a.exp", seed=0)
    rb.extend(episode_rows(50, length=10))
    rb.sample()
    rb.flush(shipped=True)
    uuid, ahead = rb.stats()["uuid"], [rb.sample()["number"].tolist() for _ in range(3)]
    (tmp_path / "b.exp").mkdir()
    restored = open_store("b.exp")
    assert _numbers(restored) == list(range(50))
    assert restored.stats()["uuid"] == uuid
    assert [restored.sample()["number"].tolist() for _ in range(3)] == ahead
    assert restored.sql("SELECT count(*) FROM episodes").fetchall() == [(5,)]
    restored.extend(episode_rows(10, start=50, length=10))
    restored.close()  # ships the rest
    assert _numbers(open_store("c.exp")) == list(range(60))


@pytest.mark.guarantee(
    "ship/fencing",
    "A former writer that still uploads, and requests that are lost, delayed or repeated, change nothing in"
    " what a restore finds.",
)
def test_the_former_writer_is_fenced_and_keeps_its_rows(
    open_store: Callable[..., Buffer], tmp_path: Path
) -> None:
    first = open_store("a.exp", seed=0)
    first.extend(episode_rows(20, length=10))
    first.flush(shipped=True)
    first.extend(episode_rows(10, start=20, length=10))  # only on its disk
    second = open_store("b.exp")
    with pytest.raises(LockedError, match=r"another writer ships to .*process \d+ on .* since \d{4}-"):
        first.flush(shipped=True)
    with pytest.raises(LockedError, match=r"a\.exp can no longer be written"):
        first.extend(episode_rows(10, start=30, length=10))
    with pytest.raises(LockedError):
        first.add(episode_rows(1, start=30)[0])
    assert first.stats()["shipped"]["last_error"]
    assert _numbers(first) == list(range(30))
    assert first.sample().shape == (4,)
    first.close()
    second.extend(episode_rows(10, start=100, length=10))
    second.close()
    third = open_store("c.exp")
    assert _numbers(third) == [*range(20), *range(100, 110)]
    third.close()
    expstore.merge([tmp_path / "a.exp", tmp_path / "b.exp"], out=tmp_path / "both.exp")
    with expstore.open(tmp_path / "both.exp", mode="r") as both:
        assert set(_numbers(both)) == {*range(30), *range(100, 110)}


def test_of_two_that_open_at_once_one_wins(
    open_store: Callable[..., Buffer], storage: WatchedStorage
) -> None:
    rb = open_store("a.exp", seed=0)
    rb.extend(episode_rows(20, length=10))
    rb.close()
    winner: list[Buffer] = []

    def race(number: int, act: str, key: str) -> None:
        if act == "create" and key == "epoch/00000002":
            storage.calm()
            winner.append(open_store("b.exp"))

    storage.before = race
    with pytest.raises(LockedError, match="another writer ships"):
        open_store("c.exp")
    assert _numbers(winner[0]) == list(range(20))
    winner[0].extend(episode_rows(10, start=20, length=10))
    winner[0].flush(shipped=True)


def test_a_folder_continues_only_its_own_line(
    open_store: Callable[..., Buffer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rb = open_store("a.exp", seed=0)
    rb.extend(episode_rows(20, length=10))
    rb.close()
    shutil.copytree(tmp_path / "a.exp", tmp_path / "old.exp")
    rb = open_store("a.exp")  # a restart
    rb.extend(episode_rows(10, start=20, length=10))
    rb.close()
    assert _numbers(open_store("a.exp")) == list(range(30))
    with pytest.raises(StateError, match="another folder has continued") as caught:
        open_store("old.exp")
    assert caught.value.kind == "diverged"
    # A disk image of the same opening: it knows the claim, and is older.
    shutil.copy(tmp_path / "a.exp" / "SHIPPED", tmp_path / "old.exp" / "SHIPPED")
    with pytest.raises(StateError, match=r"old\.exp is older than what it has shipped") as caught:
        open_store("old.exp")
    assert caught.value.kind == "diverged"
    open_store("new.exp", to=WatchedStorage()).close()
    with pytest.raises(StateError, match="has another store") as caught:
        open_store("new.exp")
    assert caught.value.kind == "mismatch"
    with expstore.open(tmp_path / "old.exp") as old:  # without ship= it can be used
        assert _numbers(old) == list(range(20))


@pytest.mark.guarantee(
    "ship/outage",
    "While an object storage does not answer, a program that ships to it continues, and nothing piles up.",
)
def test_an_outage_stops_nothing_and_fills_nothing(
    open_store: Callable[..., Buffer], storage: WatchedStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    captures: list[object] = []
    capture = shipping.capture
    monkeypatch.setattr(shipping, "capture", lambda *a, **k: captures.append(1) or capture(*a, **k))
    rb = open_store("a.exp", seed=0)
    rb.extend(episode_rows(20, length=10))
    rb.flush(shipped=True)
    before = len(captures)
    storage.before = _fail
    for start in range(20, 60, 10):
        rb.extend(episode_rows(10, start=start, length=10))
        assert not _ship_once(rb)
    with pytest.raises(RemoteError, match="within 0.01 seconds: the server does not answer") as caught:
        rb.flush(shipped=True, timeout=0.01)
    assert caught.value.kind == "not_shipped"
    assert len(captures) == before + 1
    found = rb.stats()["shipped"]
    assert found["rows_behind"] == 40
    assert found["failures"] >= 1
    assert "does not answer" in found["last_error"]
    storage.calm()
    rb.flush(shipped=True)
    assert rb.stats()["shipped"]["rows_behind"] == 0
    assert _numbers(open_store("b.exp")) == list(range(60))


def test_failed_uploads_leave_neither_names_nor_parts(
    open_store: Callable[..., Buffer], storage: WatchedStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first part of each attempt arrives, and the second one does not."""
    monkeypatch.setattr(shipping, "_SWEEP_SECONDS", 0.0)
    rb = open_store("a.exp", seed=0)
    shipper: Any = rb.storage.writer().holders.shipping
    assert _ship_once(rb)  # and its sweep has asked for a list
    arrived: list[str] = []

    def fail_second(number: int, act: str, key: str) -> None:
        if act == "put" and key.startswith("shipped/"):
            arrived.append(key)
            if len(arrived) % 2 == 0:
                _fail(number, act, key)

    for start in range(0, 100, 10):
        rb.extend(episode_rows(10, start=start, length=10))
        storage.before = fail_second
        assert not _ship_once(rb)
        assert len(shipper._log._parts) <= 2
    assert len(set(arrived)) == 20
    storage.calm()
    rb.flush(shipped=True)
    bucket = storage.connect()
    _, newest = shipping.ShipLog(bucket).find()
    assert newest is not None
    needed = shipping.parts_of(newest.state or {}, lambda name: bucket.read(f"shipped/{name}") or b"")
    assert {key for key, _ in bucket.keys("shipped")} == {f"shipped/{name}" for name in needed}
    assert _numbers(open_store("b.exp")) == list(range(100))


def test_a_kill_at_any_request_of_an_opening_or_an_upload_loses_nothing_that_was_shipped(
    tmp_path: Path,
) -> None:
    """Every request from the N-th on fails, for every N; then another disk restores."""
    seen = set()
    for stop in range(40):
        storage = WatchedStorage()
        with expstore.open(tmp_path / f"{stop}.exp", seed=0, ship=Ship(storage, every=3600.0)) as rb:
            rb.extend(episode_rows(20, length=10))
        first = len(storage.requests) + stop
        storage.before = lambda number, act, key, first=first: (
            _fail(number, act, key) if number >= first else None
        )
        step = "opened"
        try:
            rb = expstore.open(tmp_path / f"{stop}.exp", ship=Ship(storage, every=3600.0))
            rb.extend(episode_rows(10, start=20, length=10))
            step = "extended"
            step = "shipped" if _ship_once(rb) else step
        except RemoteError:
            pass
        storage_of_disk, storage.before = storage.before, lambda number, act, key: None
        with expstore.open(tmp_path / f"{stop}-new.exp", ship=Ship(storage, every=3600.0)) as new:
            assert len(new) in ((30,) if step == "shipped" else (20, 30))
        storage.before = storage_of_disk
        if not rb.storage.closed:
            rb.close()
        shutil.rmtree(tmp_path / f"{stop}.exp")
        seen.add(step)
        if step == "shipped":
            break
    assert seen == {"opened", "extended", "shipped"}


def test_parts_that_no_state_needs_are_deleted(
    open_store: Callable[..., Buffer], storage: WatchedStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipping, "_SWEEP_SECONDS", 0.0)
    for _ in range(2):
        rb = open_store("a.exp", seed=0, capacity=100)
        for start in range(0, 1000, 100):
            rb.extend(episode_rows(100, start=start, length=10))
            rb.flush(shipped=True)
        rb.close()
    bucket = storage.connect()
    (left,) = [key for key, _ in bucket.keys("manifest")]
    _, newest = shipping.ShipLog(bucket).find()
    assert newest is not None
    assert newest.key == left
    needed = shipping.parts_of(newest.state or {}, lambda name: bucket.read(f"shipped/{name}") or b"")
    assert {key for key, _ in bucket.keys("shipped")} == {f"shipped/{name}" for name in needed}
    assert _numbers(open_store("b.exp")) == list(range(900, 1000))


def test_versions_and_shipping_share_an_address(
    open_store: Callable[..., Buffer], storage: WatchedStorage
) -> None:
    rb = open_store("a.exp", seed=0)
    rb.extend(episode_rows(20, length=10))
    cold.push(rb, storage)
    rb.extend(episode_rows(10, start=20, length=10))
    rb.close()
    cold.prune(storage, drop=[1], grace_seconds=0.0)
    assert _numbers(open_store("b.exp")) == list(range(30))


def test_a_missing_part_leaves_no_store(
    open_store: Callable[..., Buffer], storage: WatchedStorage, tmp_path: Path
) -> None:
    rb = open_store("a.exp", seed=0)
    rb.extend(episode_rows(20, length=10))
    rb.close()
    bucket = storage.connect()
    bucket.delete([key for key, _ in bucket.keys("shipped")][:1])
    with pytest.raises(CorruptionError, match="is missing"):
        open_store("b.exp")
    assert not (tmp_path / "b.exp").exists()
    assert _numbers(open_store("a.exp")) == list(range(20))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every": 0}, "every must be a number of seconds above 0"),
        ({"every": "x"}, "every must be a number"),
        ({"bandwidth": "fast"}, "bytes must be"),
        ({"requests": 0}, "requests must be at least 1"),
        ({"part_bytes": 10}, "part_bytes must be at least"),
        ({"url": "s3://key:secret@bucket/run"}, "contains credentials"),
        ({"url": "https://bucket"}, "is not the address"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises((ArgumentError, StateError), match=message):
        Ship(**{"url": "s3://bucket/run", **settings})


def test_only_the_buffer_that_ships_can_wait(tmp_path: Path, storage: WatchedStorage) -> None:
    for mode in ("r", "w"):
        with pytest.raises(StateError, match="ship= cannot be used with mode"):
            expstore.open(tmp_path / "a.exp", mode=mode, ship=Ship(storage))  # type: ignore[arg-type]
    with expstore.open(tmp_path / "a.exp") as rb, pytest.raises(StateError, match="does not ship"):
        rb.flush(shipped=True)
    assert not storage.requests


def test_limits_are_kept() -> None:
    pace = shipping._Pace(1000.0, threading.Event())
    begun = time.monotonic()
    for _ in range(5):
        pace.wait(50)
    assert time.monotonic() - begun >= 0.2  # the first one passes at once
    assert pace.total == 250
