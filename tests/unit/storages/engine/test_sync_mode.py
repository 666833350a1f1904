"""durability="sync": returned rows are on the disk after one fsync, and not visible before it.

Power cuts with torn pages are in tests/crash; here files that were never synced are simply removed.
"""

from __future__ import annotations

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
from expstore.errors import StateError, StorageError
from expstore.storages.engine import store
from expstore.storages.engine.open_settings import Settings
from expstore.storages.engine.store import Store
from expstore.storages.factory import ArrowStorage, ZarrStorage
from tests.support.gated_disk import GatedDisk, refuse
from tests.support.stores import NoKeeper

pytestmark = [pytest.mark.index, pytest.mark.usefixtures("checked_locks")]

MakeBatch = Callable[..., TensorDict]
Open = Callable[..., TensorDictReplayBuffer]


class Watching(GatedDisk):
    """Write down every sync; call `before_sync` with the name of the file first."""

    def __init__(self) -> None:
        super().__init__(self._note)
        self.synced: list[str] = []
        self.before_sync: Callable[[str], object] = lambda name: None

    def _note(self, act: str, path: Path) -> None:
        if act in ("sync", "sync_dir"):
            name = "/".join(path.parts[-2:])
            self.before_sync(name)
            self.synced.append(name)


@pytest.fixture
def disk() -> Watching:
    return Watching()


@pytest.fixture
def open_store(store_path: Path, disk: Watching, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
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
@pytest.mark.parametrize("rows", [1, 8, 9, 1000])
def test_an_extend_is_one_fsync_of_the_journal(
    open_store: Open, disk: Watching, make_batch: MakeBatch, rows: int
) -> None:
    rb = open_store(5000)
    rb.extend(make_batch(3))
    rb.extend(make_batch(rows))  # the first after an opening finds a new segment
    disk.synced.clear()
    for number in range(3):
        rb.extend(make_batch(rows, start=number))
    rb.add(make_batch(1)[0])
    assert disk.synced == ["journal/000001"] * 4


def test_the_other_mode_does_not_sync(open_store: Open, disk: Watching, make_batch: MakeBatch) -> None:
    rb = open_store(5000, durability="process")
    rb.extend(make_batch(3))
    disk.synced.clear()
    rb.extend(make_batch(100))
    rb.add(make_batch(1)[0])
    assert disk.synced == []
    assert rb.stats()["durability"] == "process"


@pytest.mark.guarantee("power/sync-mode")
def test_no_row_is_visible_before_it_is_on_the_disk(
    open_store: Open, disk: Watching, make_batch: MakeBatch
) -> None:
    rb = open_store(5000)
    rb.extend(make_batch(3))
    seen: list[tuple[int, int]] = []
    state = rb.storage.shared.page  # type: ignore[attr-defined]
    disk.before_sync = lambda name: seen.append((len(rb), state.get("last")))
    for rows in (1, 100, 2000):
        rb.extend(make_batch(rows))
    rows = 30_000  # more than ride in a record, and than the spare slots
    rb.extend(make_batch(rows))
    assert seen[:3] == [(3, 3), (4, 4), (104, 104)]
    assert {last for _, last in seen[3:]} == {2104, 2104 + rows}
    assert len(rb) == 5000


def test_a_long_batch_is_in_the_columns_before_its_record(
    open_store: Open, disk: Watching, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
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
    rows = TensorDict({"frame": values}, [60])
    cut, partial = tmp_path / "cut.exp", Path("columns/frame/partial")
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
    open_store: Open, disk: Watching, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
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
    open_store: Open, disk: Watching, make_batch: MakeBatch
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


@pytest.mark.some(2)
@pytest.mark.parametrize("rows", [1, 100, 3000])
def test_a_failed_fsync_publishes_nothing_and_poisons(
    open_store: Open,
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

    disk.before_sync = fail
    with pytest.raises(StorageError, match="no sync"):
        rb.extend(make_batch(rows))
    assert len(rb) == 5
    disk.before_sync = lambda name: None
    for act in (lambda: rb.extend(make_batch(1)), rb.flush, rb.empty):
        with pytest.raises(StateError, match="no sync of .*open it again") as caught:
            act()
        assert caught.value.kind == "poisoned"
    assert rb.sample()["id"].max() <= 5
    rb.close()
    again = open_store(5000)
    assert len(again) in (5, 5 + rows)  # the record may have got there


def test_two_threads_that_sync_at_once_both_get_the_error(
    open_store: Open, disk: Watching, make_batch: MakeBatch
) -> None:
    """The kernel tells only one of them: the extend must not return because it was the other one."""
    rb = open_store(5000)
    rb.extend(make_batch(5))
    inside, slipped, heard = threading.Event(), threading.Event(), []

    def fail(name: str) -> None:
        if name.startswith("journal") and threading.current_thread() is flusher:
            disk.before_sync = lambda name: slipped.set()
            inside.set()
            slipped.wait(0.2)  # the extend must not get to a sync of its own
            raise StorageError("no sync")

    def flush() -> None:
        try:
            rb.flush()
        except StorageError as exc:
            heard.append(exc)

    flusher = threading.Thread(target=flush)
    disk.before_sync = fail
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
    open_store: Open, store_path: Path, tmp_path: Path, make_batch: MakeBatch
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


def test_a_sync_that_fails_before_it_syncs_gives_back_what_it_took(
    open_store: Open, disk: Watching, make_batch: MakeBatch
) -> None:
    """The next one finds the new folders, and the priorities that were written, again."""
    rb = open_store(5000, durability="process")
    rb.extend(make_batch(100))
    rb.update_priority(index=np.arange(10), priority=2.0)
    before = disk.before
    disk.before = refuse("write", where="checksums")
    disk.synced.clear()
    with pytest.raises(StorageError, match="no write today") as caught:
        rb.flush()
    assert not caught.value.lost
    assert disk.synced == []
    disk.before = before
    rb.flush()
    assert rb.stats()["poisoned"] is None
    assert len([name for name in disk.synced if name.startswith("c/")]) >= 8
    assert "observation/c" in disk.synced
