"""durability="sync": returned rows are on the disk after one fsync, and not visible before it.

Power cuts with torn pages are in tests/crash; here files that were never synced are simply removed.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

import expstore
from expstore.buffers.tensordict import TensorDictReplayBuffer
from expstore.core import tuning
from expstore.disk.files import Disk
from expstore.errors import StateError, StorageError
from expstore.storages.engine import store
from expstore.storages.engine.open_settings import Settings
from expstore.storages.engine.store import Store
from expstore.storages.factory import ArrowStorage, ZarrStorage
from expstore.storages.format.journal import SYNC_SEGMENT_BYTES
from expstore.storages.read_view import find
from tests.support.stores import NoKeeper
from tests.support.tuned import set_spare_slots

pytestmark = [pytest.mark.index, pytest.mark.usefixtures("checked_locks")]

MakeBatch = Callable[..., TensorDict]


class Watching(Disk):
    """Write down every sync, tell somebody before it, and fail on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.synced: list[str] = []
        self.before: Callable[[str], None] = lambda name: None

    def gate(self, act: str, path: Path) -> None:
        if act in ("sync", "sync_dir"):
            name = "/".join(path.parts[-2:])
            self.before(name)
            self.synced.append(name)


@pytest.fixture
def disk() -> Watching:
    return Watching()


@pytest.fixture
def open_store(
    store_path: Path, disk: Watching, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., TensorDictReplayBuffer]]:
    """A factory of buffers in sync mode without a background thread."""
    monkeypatch.setattr(store, "Keeper", NoKeeper)
    opened = []

    def make(capacity: int | None = None, *, path: Path = store_path, **more: Any) -> TensorDictReplayBuffer:
        settings = Settings(durability=more.pop("durability", "sync"), flatten=True, seed=1)
        kept = ZarrStorage(path, capacity, settings=settings, disk=disk, **more)
        opened.append(TensorDictReplayBuffer(storage=kept, batch_size=8, with_ids=True))
        return opened[-1]

    yield make
    for rb in opened:
        rb.storage.close()


def lose_columns(store: Path, other: Path) -> Path:
    """Copy what a power cut leaves at worst: no byte of any column that no mark covers."""
    shutil.copytree(store, other, ignore=lambda folder, names: [n for n in names if n in ("c", "STATE")])
    (other / "LOCK").unlink()
    return other


@pytest.mark.guarantee("power/sync-mode")
@pytest.mark.parametrize("rows", [1, 8, 9, 300, 1000])
def test_an_extend_is_one_fsync_of_the_journal(
    open_store: Callable[..., TensorDictReplayBuffer], disk: Watching, make_batch: MakeBatch, rows: int
) -> None:
    rb = open_store(5000)
    rb.extend(make_batch(3))
    rb.extend(make_batch(rows))  # the first after an opening finds a new segment
    disk.synced.clear()
    for number in range(3):
        rb.extend(make_batch(rows, start=number))
    rb.add(make_batch(1)[0])
    assert disk.synced == ["journal/000001"] * 4


def test_the_other_mode_does_not_sync(
    open_store: Callable[..., TensorDictReplayBuffer], disk: Watching, make_batch: MakeBatch
) -> None:
    rb = open_store(5000, durability="process")
    rb.extend(make_batch(3))
    disk.synced.clear()
    rb.extend(make_batch(100))
    rb.add(make_batch(1)[0])
    assert disk.synced == []
    assert rb.stats()["durability"] == "process"


@pytest.mark.guarantee("power/sync-mode")
def test_no_row_is_visible_before_it_is_on_the_disk(
    open_store: Callable[..., TensorDictReplayBuffer], disk: Watching, make_batch: MakeBatch
) -> None:
    rb = open_store(5000)
    rb.extend(make_batch(3))
    seen: list[tuple[int, int]] = []
    state = rb.storage.shared.page  # type: ignore[attr-defined]
    disk.before = lambda name: seen.append((len(rb), state.get("last")))
    for rows in (1, 100, 2000):
        rb.extend(make_batch(rows))
    rows = 30_000  # more than ride in a record, and than the spare slots
    rb.extend(make_batch(rows))
    assert seen[:3] == [(3, 3), (4, 4), (104, 104)]
    assert {last for _, last in seen[3:]} == {2104, 2104 + rows}
    assert len(rb) == 5000


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "process"])
def test_rows_come_back_from_the_journal_alone(
    open_store: Callable[..., TensorDictReplayBuffer],
    store_path: Path,
    tmp_path: Path,
    make_batch: MakeBatch,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
) -> None:
    """Few rows, many, across the end of the ring, into a second shard; the other mode is the control."""
    set_spare_slots(monkeypatch, 4000)
    rb = open_store(6000, durability=mode)
    start = 0
    for rows in (1, 8, 65, 3000, 500):
        rb.extend(make_batch(rows, start=start, episode_length=7))
        start += rows
    left = open_store(path=lose_columns(store_path, tmp_path / "early.exp"))
    assert len(left) == (start if mode == "sync" else 9)
    rb.flush()
    for rows in (2500, 400, 7, 1000):  # 10,000 slots: the last ones lie across the end of the ring
        rb.extend(make_batch(rows, start=start, episode_length=7))
        start += rows
        if rows == 2500:
            rb.flush()
    rb.flush()
    for rows in (2400, 600, 8):
        rb.extend(make_batch(rows, start=start, episode_length=7))
        start += rows
    other = tmp_path / "late.exp"
    shutil.copytree(store_path, other)
    slots = np.arange(start - 3008, start) % 10_000
    for column in (*rb.storage.state.columns.columns,):  # type: ignore[attr-defined]
        path = other / column.shard_path(0).relative_to(store_path)
        with path.open("r+b") as file:
            for low, high in ((slots[0], 9_999), (0, slots[-1])):
                file.seek(int(low) * column.row_bytes)
                file.write(b"\xa5" * int(high + 1 - low) * column.row_bytes)
    again = open_store(path=other)
    if mode == "process":
        assert again.storage.last == start - 3008
        return
    assert again.storage.last == start
    assert_rows(again, start - 6000, start)
    assert again.sql("SELECT sum(length), count(*) FROM episodes").fetchall() == [(start, -(-start // 7))]


def assert_rows(rb: TensorDictReplayBuffer, first: int, end: int) -> None:
    order = np.argsort(find(rb.storage, slice(None))[0])
    held = rb[:][np.arange(len(rb))][order]
    number = np.arange(first, end)
    np.testing.assert_array_equal(held["observation"][:, 0].numpy(), number.astype(np.float32))
    np.testing.assert_array_equal(held["action"].numpy(), number % 3)
    np.testing.assert_array_equal(held["next", "terminated"][:, 0].numpy(), (number + 1) % 7 == 0)


def test_a_long_batch_is_in_the_columns_before_its_record(
    open_store: Callable[..., TensorDictReplayBuffer],
    disk: Watching,
    make_batch: MakeBatch,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tuning, "INLINE_BATCH_BYTES", 10_000)
    rb = open_store(5000)
    rb.extend(make_batch(3))
    rb.extend(make_batch(3))
    disk.synced.clear()
    rb.extend(make_batch(1000))
    *columns, last = disk.synced
    assert last == "journal/000001"
    assert len([name for name in columns if name.startswith("c")]) >= 6
    assert "observation/c" in columns  # the folder, because the shard's name is new there
    disk.synced.clear()
    rb.extend(make_batch(1000))
    assert not [name for name in disk.synced if not name.startswith(("c/", "0/", "journal/"))]


@pytest.mark.parametrize(("kind", "folder"), [("packed", "columns/frame"), ("arrow", "run.exp/segments")])
def test_names_of_new_files_are_on_the_disk_before_the_record(
    store_path: Path, disk: Watching, monkeypatch: pytest.MonkeyPatch, kind: str, folder: str
) -> None:
    """A power cut must not take a file that an extend which returned has made."""
    monkeypatch.setattr(store, "Keeper", NoKeeper)
    monkeypatch.setattr(tuning, "INLINE_BATCH_BYTES", 0)
    settings = Settings(durability="sync", seed=1)
    storage: Store
    if kind == "packed":
        storage = ZarrStorage(store_path, 500, settings=settings, layout="packed", disk=disk)
        values: Any = torch.arange(40 * 2048, dtype=torch.uint8).reshape(40, 2048)
    else:
        storage = ArrowStorage(store_path, 500, settings=settings, disk=disk)
        values = NonTensorStack(*[f"row {number}" for number in range(80)])
    rows = TensorDict({"frame": values, "x": torch.zeros(len(values))}, [len(values)])
    with TensorDictReplayBuffer(storage=storage, batch_size=8) as rb:
        rb.extend(rows[:3])  # these stay in the record
        disk.synced.clear()
        rb.extend(rows)
        assert folder in disk.synced
        assert disk.synced[-1] == "journal/000001"


@pytest.mark.guarantee("power/sync-mode")
def test_rows_of_an_incomplete_chunk_are_kept_until_its_shard_is_synced(
    store_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next extend writes the chunk to its shard; the disk has only its raw rows."""
    monkeypatch.setattr(store, "Keeper", NoKeeper)
    monkeypatch.setattr(tuning, "INLINE_BATCH_BYTES", 50_000)
    fields = {"frame": {"layout": "packed", "rows": 16}}
    settings = Settings(durability="sync", seed=1)
    values = np.random.default_rng(0).integers(0, 256, (60, 2048), dtype=np.uint8)
    rows, cut, partial = (
        TensorDict({"frame": values}, [60]),
        tmp_path / "cut.exp",
        Path("columns/frame/partial"),
    )
    storage = ZarrStorage(store_path, 500, settings=settings, fields=fields)
    with TensorDictReplayBuffer(storage=storage, batch_size=8) as rb:
        rb.extend(rows[:40])  # not in its record: eight rows are in an incomplete chunk
        shutil.copytree(store_path, cut)
        rb.extend(rows[40:])  # in its record
        shutil.copy(store_path / partial, cut / partial)
    (cut / "STATE").unlink()  # another boot
    with expstore.open(cut) as rb:
        assert len(rb) == 40
        np.testing.assert_array_equal(rb[:]["frame"].numpy(), values[:40])


def test_folders_that_could_not_be_synced_are_tried_again(
    open_store: Callable[..., TensorDictReplayBuffer],
    disk: Watching,
    make_batch: MakeBatch,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tuning, "INLINE_BATCH_BYTES", 0)
    rb = open_store(5000)
    rb.extend(make_batch(100))
    columns, real = rb.storage.state.columns, Watching.sync_all  # type: ignore[attr-defined]
    columns.put_back({columns.folder})

    def fail(self: Watching, files: Any, folders: Any, pool: Any) -> None:
        if folders:
            raise StorageError("too many open files")
        real(self, files, folders, pool)

    with monkeypatch.context() as patch:
        patch.setattr(Watching, "sync_all", fail)
        with pytest.raises(StorageError, match="too many"):
            rb.extend(make_batch(100))
    assert columns.new_folders == {columns.folder}


def test_a_segment_is_synced_with_its_name_and_the_one_before(
    open_store: Callable[..., TensorDictReplayBuffer], disk: Watching, make_batch: MakeBatch
) -> None:
    rb = open_store(5000, segment_bytes=16_384)
    rb.extend(make_batch(3))
    disk.synced.clear()
    while "journal/000002" not in disk.synced:
        before = len(disk.synced)
        rb.extend(make_batch(20))
    assert sorted(disk.synced[before:]) == ["journal/000001", "journal/000002", "run.exp/journal"]
    disk.synced.clear()
    rb.extend(make_batch(20))
    assert disk.synced == ["journal/000002"]


def test_segments_are_longer_in_this_mode(
    open_store: Callable[..., TensorDictReplayBuffer], store_path: Path, tmp_path: Path
) -> None:
    open_store(100)
    open_store(100, path=tmp_path / "other.exp", durability="process")
    sizes = [(path / "journal" / "000001").stat().st_size for path in (store_path, tmp_path / "other.exp")]
    assert sizes == [64 << 20, 4 << 20]


@pytest.mark.some(2)
@pytest.mark.parametrize("rows", [1, 100, 3000])
def test_a_failed_fsync_publishes_nothing_and_poisons(
    open_store: Callable[..., TensorDictReplayBuffer],
    disk: Watching,
    make_batch: MakeBatch,
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
) -> None:
    monkeypatch.setattr(tuning, "INLINE_BATCH_BYTES", 100_000)
    rb = open_store(5000)
    rb.extend(make_batch(5))

    def fail(name: str) -> None:
        raise StorageError(f"no sync of {name}")

    disk.before = fail
    with pytest.raises(StorageError, match="no sync"):
        rb.extend(make_batch(rows))
    assert len(rb) == 5
    disk.before = lambda name: None
    for act in (lambda: rb.extend(make_batch(1)), rb.flush, rb.empty):
        with pytest.raises(StateError, match="no sync of .*open it again") as caught:
            act()
        assert caught.value.kind == "poisoned"
    assert rb.sample()["id"].max() <= 5
    rb.close()
    again = open_store(5000)
    assert len(again) in (5, 5 + rows)  # the record may have got there


def test_two_threads_that_sync_at_once_both_get_the_error(
    open_store: Callable[..., TensorDictReplayBuffer],
    disk: Watching,
    make_batch: MakeBatch,
) -> None:
    """The kernel tells only one of them: the extend must not return because it was the other one."""
    rb = open_store(5000)
    rb.extend(make_batch(5))
    inside, slipped, heard = threading.Event(), threading.Event(), []

    def fail(name: str) -> None:
        if name.startswith("journal") and threading.current_thread() is flusher:
            disk.before = lambda name: slipped.set()
            inside.set()
            slipped.wait(0.2)  # the extend must not get to a sync of its own
            raise StorageError("no sync")

    def flush() -> None:
        try:
            rb.flush()
        except StorageError as exc:
            heard.append(exc)

    flusher = threading.Thread(target=flush)
    disk.before = fail
    flusher.start()
    assert inside.wait(10)
    with pytest.raises((StateError, StorageError), match="no sync"):
        rb.extend(make_batch(9))
    flusher.join()
    assert len(heard) == 1
    assert len(rb) == 5


@pytest.mark.guarantee("power/durable")
@pytest.mark.slow
def test_changes_in_place_and_deletions_are_durable(
    open_store: Callable[..., TensorDictReplayBuffer],
    store_path: Path,
    tmp_path: Path,
    make_batch: MakeBatch,
) -> None:
    rb = open_store(100)
    rb.extend(make_batch(10))
    rb[2] = make_batch(1, start=500)[0]
    copy = tmp_path / "changed.exp"
    shutil.copytree(store_path, copy)
    shutil.copyfile(  # the change itself has not reached the disk
        store_path / "columns/_row/id/c/0", copy / "columns/_row/id/c/0"
    )
    column = rb.storage.state.columns.columns[rb.storage.require_schema().place_of(("action",))]  # type: ignore[attr-defined]
    with (copy / column.shard_path(0).relative_to(store_path)).open("r+b") as file:
        file.write(np.arange(10, dtype="<i8") % 3)
    again = open_store(path=copy)
    assert again[2]["action"] == 500 % 3
    rb.empty()
    emptied = open_store(path=lose_columns(store_path, tmp_path / "emptied.exp"))
    assert len(emptied) == 0
    assert emptied.storage.last == 100


def test_open_passes_it_on(store_path: Path, make_batch: MakeBatch) -> None:
    with expstore.open(store_path, capacity=100, durability="sync") as rb:
        rb.extend(make_batch(5))
        assert rb.stats()["durability"] == "sync"
    with expstore.open(store_path) as rb:  # this handle's, not the store's
        assert rb.stats()["durability"] == "process"
    with pytest.raises(ValueError, match="'paranoid' is unknown; use 'process', 'sync'"):
        expstore.open(store_path, durability="paranoid")  # type: ignore[arg-type]


def test_riding_bytes_fit_into_a_segment() -> None:
    assert tuning.INLINE_BATCH_BYTES * 2 < SYNC_SEGMENT_BYTES


def test_a_sync_that_fails_before_it_syncs_gives_back_what_it_took(
    open_store: Callable[..., TensorDictReplayBuffer], disk: Watching, make_batch: MakeBatch
) -> None:
    """The next one finds the new folders, and the priorities that were written, again."""
    rb = open_store(5000, durability="process")
    rb.extend(make_batch(100))
    rb.update_priority(index=np.arange(10), priority=2.0)
    write, failed = disk.gate, []

    def refuse(act: str, path: Path) -> None:
        if act == "write" and path.name == "checksums" and not failed:
            failed.append(path)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(act, path)

    disk.gate = refuse  # type: ignore[method-assign]
    disk.synced.clear()
    with pytest.raises(StorageError, match="No space") as caught:
        rb.flush()
    assert failed
    assert not caught.value.lost
    assert disk.synced == []
    rb.flush()
    assert rb.stats()["poisoned"] is None
    assert len([name for name in disk.synced if name.startswith("c/")]) >= 8
    assert "observation/c" in disk.synced
