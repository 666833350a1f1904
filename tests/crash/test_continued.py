"""Kill a writer of continued rows, or cut its power: rows that are left have their whole values."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import expstore
from expstore.buffers.tensordict import TensorDictReplayBuffer
from expstore.core import tuning
from expstore.disk.files import Disk
from expstore.maintenance import verify
from expstore.storages.engine import store
from expstore.storages.engine.open_settings import Settings
from expstore.storages.factory import open_storage
from tests.crash.folder_power_cuts import disks_after
from tests.crash.killing_disks import KillingDisk, machine
from tests.support.conversations import Talks, check_rows, open_talks, table_of
from tests.support.stores import NoKeeper, copy_folder
from tests.support.tuned import few_rows_in_memory

pytestmark = [pytest.mark.index, pytest.mark.slow, pytest.mark.timeout(1200)]

BATCHES = 14


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a few batches make a segment, and a few rows fill the memtable."""
    monkeypatch.setattr(tuning, "ARROW_SEGMENT_BATCHES", 3)
    monkeypatch.setattr(store, "Keeper", NoKeeper)
    few_rows_in_memory(monkeypatch)


def write(path: Path, disk: Disk, note: Callable[[int], None] = lambda rows: None) -> None:
    """Continue the conversations of a store, delete some of them, and sync a few times."""
    talks = Talks(seed=7)
    talks.batch()
    rb = TensorDictReplayBuffer(storage=open_storage(path, settings=Settings(on_sigterm="ignore"), disk=disk))
    for number in range(BATCHES):
        rb.extend(talks.batch())
        note(len(talks.rows))
        if number % 4 == 1:
            rb.flush()
        if number % 4 == 3:
            rb.storage.drain()
        if number == 9:
            rb.episodes.delete("episode_id % 2 = 1")
    rb.close()


def build(path: Path) -> list[Any]:
    """Make the store with its first batch; return all rows that it will have."""
    talks = Talks(seed=7)
    with open_talks(path) as rb:
        rb.extend(talks.batch())
    for _ in range(BATCHES):
        talks.batch()
    return talks.rows


def check(path: Path, rows: list[Any]) -> int:
    """Check what a crash has left, continue rows, and check again; return the last id."""
    with expstore.open(path, mode="r") as reader:
        read = check_rows(reader.storage, rows)
    with expstore.open(path) as rb:
        last = int(rb.storage.last)
        assert check_rows(rb.storage, rows) == read > 0
        more = Talks(seed=7)
        while len(more.rows) < last:
            more.batch()
        first = max(0, len(more.rows) - 4)
        extra = more.rows[first:]
        ids = rb.extend(table_of(extra), return_ids=True).numpy()
        found = rb.storage.read(ids, [rb.storage.schema.place(("tokens",))])[0].to_pylist()
        assert found == [row["tokens"] for row in extra]
    assert [one for one in verify(path) if one.kind != "index"] == []
    return last


@pytest.mark.guarantee("rows/continued")
@pytest.mark.parametrize("step", [13, pytest.param(1, marks=pytest.mark.torture)])
def test_a_killed_writer_leaves_whole_values(
    tmp_path: Path, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = build(tmp_path / "a.exp")
    at, ended = 1, False
    while not ended:
        path, known = tmp_path / f"{at}.exp", tmp_path / f"{at}.txt"
        copy_folder(tmp_path / "a.exp", path)
        child = os.fork()
        if not child:
            try:
                disk = KillingDisk(serial=True, torn=0.5 if at % 2 else None, syncs=False)
                disk.arm(at)
                with known.open("wb", buffering=0) as file:
                    write(path, disk, lambda count, file=file: file.write(b"%d\n" % count))
                os._exit(0)
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        assert status in (0, 9), status
        ended = status == 0
        returned = [int(one) for one in known.read_bytes().split()] if known.exists() else []
        assert check(path, rows) >= max(returned, default=0)
        shutil.rmtree(path)
        at += step
    assert at > 6 * step


@pytest.mark.guarantee("rows/continued")
@pytest.mark.usefixtures("no_syncs")
@pytest.mark.parametrize("cuts", [12, pytest.param(600, marks=pytest.mark.torture)])
def test_a_power_cut_leaves_whole_values(
    tmp_path: Path, cuts: int, long_seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "boot", 7)
    place, disks = tmp_path / "place", tmp_path / "disks"
    place.mkdir()
    disks.mkdir()
    rows = build(place / "a.exp")
    lasts = set[int]()
    for over, at in disks_after(place, lambda disk: write(place / "a.exp", disk), disks, cuts, long_seed):
        last = check(at / "a.exp", rows)
        assert last == len(rows) or not over
        lasts.add(last)
    assert len(lasts) > 2
