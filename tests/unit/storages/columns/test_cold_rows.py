"""Rows loaded from the disk before they are copied: only when copies were slow, and without changing rows."""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path

import numpy as np
import pytest

import expstore
from expstore.kernels.load_rows import load_rows
from expstore.storages.columns import cold_rows, column_set
from expstore.storages.columns.cold_rows import ColdRows

ROWS, ROW = 2000, 5000
linux = pytest.mark.skipif(sys.platform != "linux", reason="rows are loaded on Linux only")


class Loop:
    """Stands for the compiled loop; tells that `missing` parts were not in memory."""

    def __init__(self, missing: int = 0) -> None:
        self.missing = missing
        self.calls: list[tuple[list[int], list[int], int]] = []

    def __call__(self, starts: np.ndarray, sizes: np.ndarray, slots: np.ndarray, page: int) -> int:
        self.calls.append((starts.tolist(), sizes.tolist(), slots.size))
        return self.missing


def prepared(missing: int = 0) -> tuple[ColdRows, Loop]:
    found, loop = ColdRows(), Loop(missing)
    found._loop = loop
    return found, loop


@linux
def test_a_slow_copy_lets_the_next_batch_be_checked() -> None:
    column = np.zeros((100, 3), np.float32)
    cold, loop = prepared()
    cold.note_slow_copy(0.002, 1000)
    assert cold.active
    cold.load(np.arange(10), [column])
    assert loop.calls == [([column.ctypes.data], [12], 10)]
    assert not cold.active


@linux
def test_slow_copies_of_rows_in_memory_are_checked_less_and_less() -> None:
    cold, loop = prepared()
    for _ in range(200):
        cold.note_slow_copy(1.0, 0)
        if cold.active:
            cold.load(np.arange(10), [np.zeros(100)])
    assert len(loop.calls) <= 9
    loop.missing = 1
    while not cold.active:
        cold.note_slow_copy(1.0, 0)
    cold.load(np.arange(10), [np.zeros(100)])
    assert cold.active


@linux
def test_a_batch_that_might_not_fit_into_memory_is_copied_as_it_is() -> None:
    cold, loop = prepared()
    cold.note_slow_copy(1.0, 0)
    wide = np.lib.stride_tricks.as_strided(np.zeros(1), (1000, 1), (1 << 20, 8))
    cold.load(np.arange(257), [wide])
    assert loop.calls == []


def test_other_systems_load_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    cold, _ = prepared()
    cold.note_slow_copy(1.0, 0)
    assert not cold.active


@linux
def test_finds_rows_that_are_not_in_memory_and_loads_them(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    rows = np.random.default_rng(1).integers(0, 255, (ROWS, ROW), np.uint8)
    path.write_bytes(rows.tobytes())
    slots = np.array([3, 4, 5, 1999, 700, 0, 1200, 1201])
    with path.open("r+b") as file:
        os.fsync(file.fileno())
        mapped = mmap.mmap(file.fileno(), 0)
        column = np.frombuffer(mapped, np.uint8).reshape(ROWS, ROW)
        starts, sizes = np.array([column.ctypes.data]), np.array([ROW])
        mapped.madvise(mmap.MADV_DONTNEED)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        missing = load_rows(starts, sizes, slots, mmap.PAGESIZE)
        if not missing:
            pytest.skip("this file system keeps its files in memory")
        assert missing == 5  # runs of consecutive rows
        assert load_rows(starts, sizes, slots, mmap.PAGESIZE) == 0
        assert load_rows(starts, sizes, np.array([400]), mmap.PAGESIZE) == 1  # nothing else was read
        np.testing.assert_array_equal(column[slots], rows[slots])


def test_a_store_loads_what_it_samples_and_returns_the_same(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a loop that tells that rows are missing; flags that were never set have no file to load."""
    monkeypatch.setattr(cold_rows, "SLOW_COPY", 0.0)
    monkeypatch.setattr(column_set, "SLOW_COPY", 0.0)
    monkeypatch.setattr(cold_rows, "_COPY_SPEED", np.inf)
    monkeypatch.setattr(sys, "platform", "linux")
    rows = {"observation": np.arange(60.0).reshape(20, 3), "flag": np.zeros(20, bool)}
    drawn = []
    for missing in (None, 1):
        with expstore.open(store_path, mode="w", capacity=50, seed=3, batch_size=8) as rb:
            rb.extend(rows)
            loop = Loop(missing or 0)
            if missing is not None:
                rb.storage.state.require_columns()._cold._loop = loop
            drawn.append([rb.sample(as_numpy=True)["observation"] for _ in range(4)])
            assert len(loop.calls) == (0 if missing is None else 3)
    np.testing.assert_array_equal(*drawn)
