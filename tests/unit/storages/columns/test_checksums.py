"""Block checksums match the columns after any stop, and equal stamps mean equal bytes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest

import expstore
from expstore.buffers.tensordict import TensorDictReplayBuffer
from expstore.core import tuning
from expstore.disk import files
from expstore.errors import CorruptionError
from expstore.storages.columns.checksums import (
    DAMAGED,
    GIVEN_UP,
    HEADER_BYTES,
    NOTHING,
    SUMMED,
    read_entries,
    state_of,
)
from expstore.storages.columns.flat import zeros_sum
from expstore.storages.format.manifest import Manifest
from tests.support.damaged_stores import BLOCK, batch, flip
from tests.support.forks import in_child

pytestmark = pytest.mark.usefixtures("no_syncs")


@pytest.fixture(autouse=True)
def shards_of_two_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "FLAT_SHARD_ROWS", 2 * BLOCK)


def columns_of(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The bytes of every summed column, slot after slot, as its shards hold them."""
    schema = Manifest.load(files.Disk(), path).schema
    rows = {entry.path: entry.row_bytes for entry in schema.fields}
    rows |= {f"_row/{name}": 8 for name in ("id", "episode", "step", "time")}
    found = {}
    for name, width in rows.items():
        shards = sorted(
            (path / "columns" / name / "c").rglob("*"),
            key=lambda p: int(p.relative_to(path / "columns" / name / "c").parts[0]),
        )
        parts = []
        for shard in shards:
            if shard.is_file():
                data = shard.read_bytes()
                count = (len(data) - 4) // (BLOCK * width + 16)
                parts.append(np.frombuffer(data, np.uint8, count * BLOCK * width).reshape(-1, BLOCK * width))
        found[name] = np.concatenate(parts) if parts else np.zeros((0, BLOCK * width), np.uint8)
    return found


def entries_of(path: Path) -> Any:
    width = len(columns_of(path))
    return read_entries((path / "checksums").read_bytes(), width, path / "checksums")


def check(path: Path, *, rows: range, slots: int | None = None) -> int:
    """Hold every entry against the files; blocks of these rows must have one. Returns how many do."""
    held, entries = columns_of(path), entries_of(path)
    needed = {row // BLOCK if slots is None else row % slots // BLOCK for row in rows}
    summed = 0
    for block, entry in enumerate(entries):
        if state_of(entry) == SUMMED:
            summed += 1
            for place, (name, data) in enumerate(held.items()):
                assert entry["sums"][place] == google_crc32c.value(data[block].tobytes()), (name, block)
        else:
            assert state_of(entry) in (NOTHING, GIVEN_UP)
            assert block not in needed
    assert max(needed, default=-1) < len(entries)
    return summed


@pytest.mark.some(2)
@pytest.mark.parametrize("capacity", [None, 9000, 15_000])
@pytest.mark.parametrize("stop", ["close", "kill", "flush and kill"])
def test_sums_say_what_the_columns_contain(store_path: Path, capacity: int | None, stop: str) -> None:
    """Rings that turn, shards that come, rows one by one, changes in place; the last block is short."""

    def write() -> None:
        rng = np.random.default_rng(3)
        rb = expstore.open(store_path, capacity=capacity)
        first = 0
        for step in range(30):
            count = int(rng.integers(1, 1500))
            rb.extend(batch(count, first))
            first += count
            if step % 5 == 2:
                rb[rng.integers(0, min(len(rb), 8000), 20)] = batch(20, 50_000)
            if step % 7 == 3:
                for _ in range(3):
                    rb.add(batch(1, first)[0])
                    first += 1
            if step % 9 == 8:
                rb.flush()
        if stop == "close":
            rb.close()
        elif stop != "kill":
            rb.flush()

    in_child(write)
    if stop == "close":
        assert check(store_path, rows=range(0)) >= 3
    with expstore.open(store_path) as rb:
        assert (rb.recovered is None) == (stop == "close")
        low, last, slots = rb.storage.window.low, rb.storage.last, rb.storage.geometry.slots
    assert slots is None or last > slots
    assert check(store_path, rows=range(low, last), slots=slots) >= 3


def test_an_opening_sums_what_the_last_writer_left(store_path: Path) -> None:
    """The next writer is killed at once: what recovery wrote must do."""
    in_child(lambda: expstore.open(store_path, capacity=20_000).extend(batch(7000, 0)))
    in_child(lambda: expstore.open(store_path))
    assert check(store_path, rows=range(7000)) == 2


def test_equal_stamps_mean_equal_bytes(store_path: Path) -> None:
    rng = np.random.default_rng(7)
    seen: dict[tuple[int, int, int], bytes] = {}
    first = 0
    for life in range(3):
        rb = expstore.open(store_path, capacity=20_000)
        for step in range(12):
            if step % 4 == 3:
                rb[rng.integers(0, len(rb), 2)] = batch(2, 90_000 + step)
            else:
                count = int(rng.integers(1, 3000))
                rb.extend(batch(count, first))
                first += count
            rb.flush()
            kept = rb.storage.state.checksums
            held = columns_of(store_path)
            stamps = kept.stamps()
            assert (stamps[:, 1] > 0).any()
            for block, (generation, sequence) in enumerate(stamps.tolist()):
                if sequence:
                    data = b"".join(data[block].tobytes() for data in held.values())
                    assert seen.setdefault((block, generation, sequence), data) == data
        if life:
            rb.close()
        else:
            rb.storage.background.stop()  # as if killed: the next one takes over what is there
            rb.storage.lock_file.release()
    assert len(seen) > 40


def test_untouched_blocks_keep_their_stamp(store_path: Path) -> None:
    with expstore.open(store_path) as rb:
        rb.extend(batch(3 * BLOCK, 0))
        rb.flush()
        before = rb.storage.state.checksums.stamps()
        rb.extend(batch(10, 0))
        rb.update_priority([1], 5.0)
        rb.flush()
        rb[BLOCK + 5] = batch(1, 7)[0]
        rb.flush()
        after = rb.storage.state.checksums.stamps()
    assert [bool((before[b] == after[b]).all()) for b in range(3)] == [True, False, True]
    assert after[3, 1] > 0


def test_lost_sums_are_made_again(store_path: Path) -> None:
    """As in a store that was made before there were any."""
    with expstore.open(store_path, capacity=9000) as rb:
        rb.extend(batch(9000, 0))
    path = store_path / "checksums"
    size = path.stat().st_size
    for lose in (
        path.unlink,
        lambda: path.write_bytes(b""),
        lambda: flip(path, 9, 0),  # of another store
        lambda: os.truncate(path, size - 5),
        lambda: flip(path, size - 3, 3),
    ):
        lose()
        with expstore.open(store_path) as rb:
            assert rb["number"][8999] == 8999
        assert check(store_path, rows=range(9000)) == 3


def test_blocks_of_rows_in_flight_are_given_up_or_summed(store_path: Path) -> None:
    """A power cut leaves neither STATE nor a record of them; the bytes are anybody's guess."""

    def write() -> None:
        rb = expstore.open(store_path, capacity=40_000)
        rb.extend(batch(3000, 0))
        rb.flush()
        rb.storage.state.columns.write(rb.storage.geometry.runs(3001, 2000), *filling(rb))

    in_child(write)
    (store_path / "STATE").write_bytes(bytes(4096))
    with expstore.open(store_path) as rb:
        assert len(rb) == 3000
    assert check(store_path, rows=range(3000)) == 1
    states = [state_of(entry) for entry in entries_of(store_path)]
    assert states[:2] == [SUMMED, GIVEN_UP]
    with expstore.open(store_path) as rb:
        rb.extend(batch(3000, 3000))
    assert check(store_path, rows=range(6000)) == 2


def test_sums_of_shards_that_were_lost_are_dropped(store_path: Path) -> None:
    """A power cut may keep the sums of a sync that was under way, and lose the new shards' names."""

    def write() -> None:
        rb = expstore.open(store_path)
        rb.extend(batch(3000, 0))
        rb.flush()
        rb.storage.disk.sync_all = None  # the next sync writes the sums and fails
        rb.extend(batch(3 * BLOCK, 3000))
        with pytest.raises(TypeError):
            rb.flush()

    in_child(write)
    (store_path / "STATE").write_bytes(bytes(4096))
    assert state_of(entries_of(store_path)[3]) == SUMMED
    for shard in store_path.glob("columns/**/c/1"):
        shutil.rmtree(shard) if shard.is_dir() else shard.unlink()
    with expstore.open(store_path) as rb:
        assert len(rb) == 3000
    assert [state_of(entry) for entry in entries_of(store_path)] == [SUMMED] + 3 * [GIVEN_UP]


def filling(rb: TensorDictReplayBuffer) -> tuple[Any, Any, Any]:
    """2000 rows as columns, numbers and priorities, as an extend that was killed had written them."""
    fields = rb.storage.state.columns.columns[:-5]
    columns = [np.full((2000, *c.entry.shape), 1, c.entry.numpy_dtype) for c in fields]
    return columns, np.ones((4, 2000), np.int64), np.ones(2000, np.float32)


def test_flags_that_are_never_set_are_not_read(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hole that was read takes memory; its sum is known."""
    with expstore.open(store_path) as rb:
        rb.extend(batch(5, 0))
        blank = [c for c in rb.storage.state.columns.flat.values() if c.blank]
        assert [c.entry.key for c in blank] == [("never",), ("next", "terminated")]
        for column in blank:
            monkeypatch.setattr(column, "view", None)
        rb.flush()
        place = [c.entry.key for c in rb.storage.state.columns.columns].index(("never",))
    assert entries_of(store_path)[0]["sums"][place] == zeros_sum(BLOCK) == google_crc32c.value(bytes(BLOCK))


def test_forgetting_all_rows_sums_nothing(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with expstore.open(store_path, capacity=20_000) as rb:
        rb.extend(batch(20_000, 0))
        rb.flush()
        before = rb.storage.state.checksums.stamps()
        rb.empty()
        assert (rb.storage.state.checksums.stamps() == before).all()
        rb.extend(batch(10, 0))
    check(store_path, rows=range(20_000, 20_010), slots=24_096)


def test_an_entry_that_is_damaged_is_known() -> None:
    path = Path("checksums")
    with pytest.raises(CorruptionError, match="checksums"):
        read_entries(bytes(HEADER_BYTES), 3, path)


def test_each_bit_of_an_entry_counts(store_path: Path) -> None:
    with expstore.open(store_path) as rb:
        rb.extend(batch(5, 0))
    data = bytearray((store_path / "checksums").read_bytes())
    for bit in range(HEADER_BYTES * 8, len(data) * 8):
        data[bit // 8] ^= 1 << bit % 8
        (entry,) = read_entries(bytes(data), 9, store_path)
        assert state_of(entry) == DAMAGED
        data[bit // 8] ^= 1 << bit % 8


def test_large_zeros() -> None:
    size = 3 * (1 << 20) + 77
    assert zeros_sum(size) == google_crc32c.value(bytes(size))
