"""The file of idempotency keys is read as written, and losses are reported."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import numpy as np
import pytest

from expstore.core import tuning
from expstore.core.idempotency import ENTRY, KEPT_US, WriteKey
from expstore.disk.files import Disk
from expstore.storages.format.write_key_file import HEADER_BYTES, KEYS, KeyFile, count_keys


def key(number: int) -> WriteKey:
    return WriteKey.of(str(number), None)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of keys of which six are known, in a ring of nine."""
    monkeypatch.setattr(tuning, "IDEMPOTENCY_KEYS", 6)
    monkeypatch.setattr(tuning, "IDEMPOTENCY_SLOTS", 9)
    return tmp_path / KEYS


def opened(path: Path, covered: int = 1 << 40, known: int = 0, *, now: int = 0) -> KeyFile:
    return KeyFile(Disk(), path, expected=True, covered=covered, known=known, now=now)


def ids(keys: KeyFile, *, now: int = 0) -> dict[int, int]:
    """Key -> id of its row, for those that are known."""
    found = {number: keys.find(key(number), now) for number in range(100)}
    return {number: written.first_id for number, written in found.items() if written is not None}


def add(keys: KeyFile, first: int, count: int) -> None:
    for number in range(first, first + count):
        keys.note(key(number), number + 1, 1, 0)


def brought(keys: KeyFile) -> KeyFile:
    """Do as a sync does."""
    keys.flush()
    for file in keys.unsynced:
        file.sync()
    keys.completed(tidy=True)
    return keys


def test_no_file_is_created_without_a_key(path: Path) -> None:
    keys = brought(opened(path))
    assert not path.exists()
    assert not keys.unsynced
    assert not keys.waiting
    KeyFile(Disk(), path, expected=False, covered=9, known=0, now=0).close()
    keys.close()
    assert not path.exists()


@pytest.mark.some(4)
@pytest.mark.parametrize("count", range(30))
def test_read_again_it_says_the_same(path: Path, count: int) -> None:
    keys = opened(path)
    for number in range(count):
        add(keys, number, 1)
        if number % 3 == 2:
            brought(keys)
    brought(keys).close()
    again = opened(path, known=count)
    assert ids(again) == ids(keys) == {n: n + 1 for n in range(max(0, count - 6), count)}
    assert again.number == count
    assert len(again) == len(keys)
    add(again, count, 2)
    assert ids(again) == {n: n + 1 for n in range(max(0, count - 4), count + 2)}
    assert path.stat().st_size <= HEADER_BYTES + 9 * ENTRY.size if count else not path.exists()


def test_more_keys_than_are_spare_must_wait(path: Path) -> None:
    keys = opened(path)
    assert keys.spare == keys.room == 3
    add(keys, 0, 3)
    assert keys.room == 0
    assert keys.waiting
    keys.flush()
    assert keys.room == 0
    assert keys.unsynced
    keys.completed(tidy=True)
    assert keys.room == 3
    assert not keys.waiting
    assert not keys.unsynced


def brought_with(path: Path, count: int) -> KeyFile:
    keys = opened(path)
    for number in range(count):
        add(keys, number, 1)
        brought(keys)
    return keys


@pytest.mark.guarantee("power/keys")
@pytest.mark.parametrize("count", [4, 9, 14, 20])
def test_keys_of_rows_that_are_lost_never_count_again(path: Path, count: int) -> None:
    brought_with(path, count).close()
    keys = opened(path, covered=count - 2)  # a power cut has taken the last two rows
    left = {n: n + 1 for n in range(max(0, count - 8), count - 2)}
    assert ids(keys) == left
    keys.flush()
    keys.close()
    # Their ids are other rows' by now, and a mark covers these.
    assert ids(opened(path, known=count - 2)) == left


@pytest.mark.some(4)
@pytest.mark.parametrize("place", range(4, 10))
def test_a_damaged_entry_is_reported_and_lost_alone(
    path: Path, caplog: pytest.LogCaptureFixture, place: int
) -> None:
    brought_with(path, 10).close()
    data = bytearray(path.read_bytes())
    data[HEADER_BYTES + place % 9 * ENTRY.size + 20] ^= 1
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING, "expstore"):
        keys = opened(path, known=10)
    assert [r.getMessage() for r in caplog.records] == [
        f"{path} is damaged: 1 keys are lost; it is created again"
    ]
    assert ids(keys) == {n: n + 1 for n in range(4, 10) if n != place}
    caplog.clear()
    assert ids(opened(path, known=keys.number)) == ids(keys)
    assert not caplog.records


@pytest.mark.some(4)
@pytest.mark.parametrize("left", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 100, None])
def test_a_truncated_or_missing_file_is_reported(
    path: Path, caplog: pytest.LogCaptureFixture, left: int | None
) -> None:
    brought_with(path, 5).close()
    if left is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:left])
    keys = opened(path, known=5)
    assert len(caplog.records) == 1
    assert "it is created again" in caplog.text
    assert len(keys) == (1 if left == HEADER_BYTES + 100 else 0)
    add(keys, 7, 1)
    brought(keys)
    assert 7 in ids(opened(path, known=keys.number))
    assert len(caplog.records) == 1


def test_a_missing_unused_file_is_created_without_a_warning(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = opened(path, known=0)
    add(keys, 0, 1)
    brought(keys)
    assert not caplog.records
    assert list(ids(opened(path))) == [0]


def test_old_keys_are_not_taken_over(path: Path) -> None:
    keys = opened(path)
    keys.note(key(1), 1, 1, 0)
    keys.note(key(2), 2, 1, KEPT_US)
    brought(keys)
    again = opened(path, now=KEPT_US + 5)
    assert len(again) == 1
    assert list(ids(again, now=KEPT_US + 5)) == [2]
    assert again.number == 2


def test_keys_are_counted_without_opening(path: Path) -> None:
    assert count_keys(Disk(), path.parent) == 0
    keys = opened(path)
    for number in range(20):
        keys.note(key(number), number + 1, 1, time.time_ns() // 1000)
        brought(keys)
    assert count_keys(Disk(), path.parent) == 6


@pytest.mark.some(4)
@pytest.mark.parametrize("seed", range(20))
def test_any_life_is_as_one_in_memory(path: Path, seed: int) -> None:
    """Keys come, syncs end half way, power cuts take rows, files are read again: as a dict says."""
    rng = np.random.default_rng(seed)
    keys, last, marked = opened(path), 0, 0
    rows: dict[int, int] = {}  # id -> key
    for step in range(300):
        act = rng.choice(["note", "flush", "sync", "cut", "kill"], p=[0.6, 0.1, 0.15, 0.05, 0.1])
        if act == "note" and keys.room:
            last += 1
            rows[last] = step
            keys.note(WriteKey.of(str(step), None), last, 1, 0)
        elif act == "flush":
            keys.flush()
        elif act == "sync":
            brought(keys)
            marked = last
        elif act in ("cut", "kill"):
            keys.close()
            if act == "cut":
                last = int(rng.integers(marked, last + 1))
                rows = {row: name for row, name in rows.items() if row <= last}
            keys = opened(path, covered=marked)
            for row in range(marked + 1, last + 1):
                keys.note(WriteKey.of(str(rows[row]), None), row, 1, 0)
            brought(keys)
            marked = last
        newest = dict(list(rows.items())[-6:])
        for row, name in newest.items():
            found = keys.find(WriteKey.of(str(name), None), 0)
            assert found.first_id == row
        assert len(keys) == len(newest)
