"""Storages in RAM and on disk: long extends, torn reads, shards, failed and interrupted writes."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from expstore.core.spare_slots import spare_slots
from expstore.disk.files import Disk
from expstore.episodes.segmentation import Steps
from expstore.episodes.table import EpisodeTable
from expstore.errors import CorruptionError, SchemaError, StateError, StorageError
from expstore.schema.field_roles import find_keys
from expstore.schema.schema import Field, Schema
from expstore.storages.base import Storage
from expstore.storages.columns import flat
from expstore.storages.columns.column_set_writer import WritableColumns
from expstore.storages.engine.store import Store, _BatchWrite
from expstore.storages.factory import ZarrStorage
from expstore.storages.format.journal import Kind, read_journal
from expstore.storages.format.records import Mark
from expstore.storages.memory import MemoryStorage
from expstore.writers.writers import RoundRobinWriter
from tests.support.batches import closing_factory
from tests.support.gated_disk import GatedDisk, refuse
from tests.support.stores import prepare, window_ids
from tests.support.tuned import set_spare_slots

pytestmark = pytest.mark.usefixtures("no_syncs")

SCHEMA = Schema(
    [
        Field(("x",), "float32", (3,)),
        Field(("next", "n"), "int64", ()),
        Field(("wide",), "uint8", (700,)),
        Field(("done",), "bool", (1,)),
    ]
)


@pytest.fixture(params=["memory", "zarr"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Storage]]:
    """A factory of storages of both kinds."""
    names = itertools.count()

    def create(capacity: int | None = None, *, schema: Schema | None = SCHEMA, **options: Any) -> Storage:
        path = tmp_path / f"{next(names)}.exp"
        memory = request.param == "memory"
        storage = MemoryStorage(capacity) if memory else ZarrStorage(path, capacity, **options)
        return storage if schema is None else prepare(storage, schema)

    with closing_factory(create) as factory:
        yield factory


def values_of(ids: np.ndarray, version: np.ndarray | int = 0) -> list[np.ndarray]:
    """Every value follows from the row's id and how often it was changed."""
    n = ids * 1000 + version
    return [
        (n[:, None] * np.array([1, 2, 4])).astype(np.float32),
        n.astype(np.int64),
        ((n[:, None] + np.arange(700)) % 251).astype(np.uint8),
        (n[:, None] // 1000 % 7 == 3),
    ]


def put(storage: Storage, count: int) -> np.ndarray:
    with storage.lock:
        storage.writer()
        ids = np.arange(storage.last + 1, storage.last + 1 + count)
        columns = [np.ascontiguousarray(column) for column in values_of(ids)]
        steps = Steps(count, terminated=columns[3].reshape(-1))
        written = RoundRobinWriter().write(storage, columns, steps, source=None, info="")
        np.testing.assert_array_equal(written, ids)
    return ids


def check(storage: Storage, ids: np.ndarray, version: np.ndarray | int = 0) -> None:
    for found, expected in zip(storage.read(ids), values_of(ids, version), strict=True):
        np.testing.assert_array_equal(found, expected)


# ---------------------------------------------------------------------------------------------------
# Numbers.


def test_spare_slots() -> None:
    assert spare_slots(1_000_000, 100) == 125_000
    assert spare_slots(1000, 100) == 4096
    assert spare_slots(1000, 1 << 20) == 125
    assert spare_slots(1, 64 << 20) == 64
    assert spare_slots(None, 100) == 65_536
    assert spare_slots(None, 1 << 20) == 256
    assert spare_slots(None, 1 << 30) == 1


# ---------------------------------------------------------------------------------------------------
# Long extends.


def test_a_long_extend_gives_up_only_what_it_must(
    make: Callable[..., Storage], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it is being written, the rows whose slots it takes are gone and all others can be read."""
    set_spare_slots(monkeypatch, 5)
    storage = make(20)
    put(storage, 5)
    for _ in range(4):
        put(storage, 5)
    seen: list[Any] = []
    real = storage._reserve

    def watch(rows: Any) -> int:
        skipped = real(rows)
        seen.append((storage.window.low, storage.window.last, storage.state.horizon, skipped))
        ids = window_ids(storage)
        assert storage.intact(ids)
        check(storage, ids)
        return skipped

    monkeypatch.setattr(storage, "_reserve", watch)
    put(storage, 12)
    put(storage, 23)
    assert seen == [(12, 25, 37, 0), (35, 37, 60, 3)]


# ---------------------------------------------------------------------------------------------------
# Rows that change while they are read.


def test_a_row_is_void_once_its_slot_may_be_written_to(make: Callable[..., Storage]) -> None:
    storage = make(20)
    put(storage, 20)
    assert storage.geometry.slots is not None
    storage._state.horizon = 15 + storage.geometry.slots
    assert storage.intact(np.array([16, 20]))
    assert not storage.intact(np.array([15, 20]))
    assert storage.intact(np.array([], np.int64))
    unbounded = make(None)
    put(unbounded, 3)
    unbounded._state.horizon = 10**9
    assert unbounded.intact(np.array([1]))


def test_rows_changed_while_they_are_read_are_read_again(
    make: Callable[..., Storage], monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = make(20)
    ids = put(storage, 10)
    real = storage.take
    version = 0

    def torn(slots: np.ndarray, places: Any) -> list[np.ndarray]:
        """A writer comes in between the first column and the others, this often."""
        nonlocal version
        found = real(slots, places)
        if version < often:
            version += 1
            storage.change(ids, range(4), [np.ascontiguousarray(c) for c in values_of(ids, version)])
        return [found[0], *real(slots, places)[1:]]

    monkeypatch.setattr(storage, "take", torn)
    for often in (1, 3):
        version = 0
        check(storage, ids, often)


# ---------------------------------------------------------------------------------------------------
# Which fields say what.


def keys_of(*fields: str, **options: Any) -> dict[str, str]:
    schema = Schema([Field(tuple(f.split(":")[0].split(".")), f.split(":")[1], (1,)) for f in fields])
    found = find_keys(schema, **options)
    return {name: ".".join(v) for name in found.__slots__ if (v := getattr(found, name)) is not None}


def test_find_keys() -> None:
    assert keys_of("done:bool", "next.reward:float32", "next.terminated:bool", "terminated:bool") == {
        "terminated": "next.terminated",
        "reward": "next.reward",
    }
    assert keys_of("done:bool", "reward:float32", "truncated:bool") == {
        "truncated": "truncated",
        "done": "done",
        "reward": "reward",
    }
    assert keys_of("collector.traj_ids:int64", "episode:int64", "collector.mask:bool", "is_init:bool") == {
        "trajectory": "collector.traj_ids",
        "mask": "collector.mask",
        "start": "is_init",
    }
    assert keys_of("episode:float32", "step_count:int64") == {"start": "step_count"}
    assert keys_of("episode:int32", "id:int64", trajectory=("id",)) == {"trajectory": "id"}
    assert keys_of(
        "next.done:bool", "stop:bool", "x.truncated:bool", ends=[("stop",), ("x", "truncated")]
    ) == {
        "truncated": "x.truncated",
        "done": "stop",
    }
    assert keys_of("next.done:bool", "r:int64", reward=("r",)) == {"done": "next.done", "reward": "r"}


def test_keys_that_were_asked_for_must_be_there() -> None:
    shapes = {"a": ("int64", ()), "w": ("int64", (2,)), "c": ("complex64", ()), "truncated": ("bool", (3,))}
    schema = Schema([Field((name,), *facts) for name, facts in shapes.items()])
    refused: list[tuple[dict[str, Any], str]] = [
        ({"trajectory": ("t",)}, "'t' is not a field with one value per row"),
        ({"trajectory": ("w",)}, "'w' is not a field with one value per row"),
        ({"ends": [("a",), ("t",)]}, "'t' is not a field of numbers of a fixed size"),
        ({"reward": ("c",)}, "'c' is not a field of numbers of a fixed size"),
        ({"ends": [("w",), ("truncated",)]}, "different numbers of values per row"),
    ]
    for options, words in refused:
        with pytest.raises(SchemaError, match=words):
            find_keys(schema, **options)


def test_rewards_and_ends_of_several_agents_are_found_if_they_are_given() -> None:
    schema = Schema([Field(("next", "done"), "bool", (3, 1)), Field(("next", "reward"), "float32", (3, 1))])
    found = find_keys(schema)
    assert found.done is found.reward is None
    found = find_keys(schema, reward_reduce="sum", done_reduce="all")
    assert (found.done, found.reward) == (("next", "done"), ("next", "reward"))
    assert find_keys(schema, ends=[("next", "done")]).done == ("next", "done")


# ---------------------------------------------------------------------------------------------------
# On disk: shards.


def starts_with_two_shards(real: Callable[..., None]) -> Callable[..., None]:
    return lambda self, shards: real(self, 2 if shards == 16 else shards)


def check_reopened(path: Path, *, size: int, version: int = 0) -> None:
    """Open a store again, and check its rows."""
    again = ZarrStorage(path)
    assert len(again) == size
    check(again, window_ids(again), version)
    again.close()


@pytest.mark.usefixtures("short_flat_shards")
def test_a_ring_of_several_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_spare_slots(monkeypatch, 1000)
    storage = prepare(ZarrStorage(tmp_path / "run.exp", 10_000), SCHEMA)
    for count in (4000, 900, 3, 300, 8000, 1, 900, 900, 12_000, 5, 1000, 1000):
        put(storage, count)
        check(storage, window_ids(storage)[:: 1 + len(storage) // 700])
    storage.close()
    check_reopened(tmp_path / "run.exp", size=10_000)


@pytest.mark.usefixtures("short_flat_shards")
@pytest.mark.parametrize("rows", [3, 700])
def test_a_ring_that_is_emptied_before_all_its_shards_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """The ids jump over slots that have no shard yet."""
    set_spare_slots(monkeypatch, 1000)
    storage = prepare(ZarrStorage(tmp_path / "run.exp", 20_000), SCHEMA)
    put(storage, rows)
    storage.clear()
    storage.close()
    again = ZarrStorage(tmp_path / "run.exp")
    assert (len(again), again.last) == (0, 20_000)
    put(again, rows)
    again.sync()
    put(again, 2)
    check(again, window_ids(again))
    again.close()
    check_reopened(tmp_path / "run.exp", size=rows + 2)


@pytest.mark.usefixtures("short_flat_shards")
def test_a_lost_or_short_shard_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "run.exp"
    storage = prepare(ZarrStorage(path), SCHEMA)
    put(storage, 9000)
    storage.close()
    shard = path / "columns" / "x" / "c" / "1" / "0"
    whole = shard.read_bytes()
    os.truncate(shard, 5000)
    with pytest.raises(CorruptionError, match=f"{shard} has 5000 bytes, {len(whole)} bytes are expected"):
        ZarrStorage(path)
    shard.unlink()
    with pytest.raises(CorruptionError, match=rf"{shard} is missing"):
        ZarrStorage(path)
    shard.write_bytes(whole)
    check_reopened(path, size=9000)


@pytest.mark.usefixtures("short_flat_shards")
def test_a_wide_column_read_while_it_moves(tmp_path: Path, monkeypatch: Any) -> None:
    """A reader that sees the old mapping must not make it the one that stays."""
    monkeypatch.setattr(flat.FlatColumn, "_reserve", starts_with_two_shards(flat.FlatColumn._reserve))
    storage = prepare(ZarrStorage(tmp_path / "run.exp"), SCHEMA)
    put(storage, 8000)
    wide = storage.state.columns.columns[2]
    real = flat.AddressRange.array
    grown = False

    def grow_first(self: Any, *args: Any, **options: Any) -> np.ndarray:
        nonlocal grown
        found = real(self, *args, **options)
        if options.get("writable_flag") and not grown:
            grown = True
            put(storage, 4000)  # a writer comes in between: the mapping moves
        return found

    monkeypatch.setattr(flat.AddressRange, "array", grow_first)
    check(storage, np.array([1, 8000]))
    assert grown
    assert wide.ready == 12_288
    check(storage, np.array([1, 8000, 12_000]))
    storage.close()


# ---------------------------------------------------------------------------------------------------
# On disk: failures and interruptions.


def faulty_storage(path: Path, capacity: int | None = 50) -> tuple[ZarrStorage, GatedDisk]:
    disk = GatedDisk()
    return prepare(ZarrStorage(path, capacity, disk=disk), SCHEMA), disk


@pytest.mark.guarantee(
    "disk/fsync",
    "A failed fsync is never retried: the buffer can only be read and closed, and the next opening writes"
    " the unsynced data again.",
)
def test_a_failed_sync_poisons_the_handle(tmp_path: Path) -> None:
    storage, disk = faulty_storage(tmp_path / "run.exp")
    put(storage, 20)
    disk.before = refuse("sync")
    with pytest.raises(StorageError, match="no sync today"):
        storage.sync()
    disk.relax()
    for act in (lambda: put(storage, 1), storage.sync, storage.clear):
        with pytest.raises(StateError, match="can no longer be written: no sync today") as caught:
            act()
        assert caught.value.kind == "poisoned"
    check(storage, window_ids(storage))  # reading goes on
    assert not storage.can_write
    storage.close()
    again = ZarrStorage(tmp_path / "run.exp")
    assert again.counters.recovered
    check(again, np.arange(1, 21))
    put(again, 3)
    again.close()


# The ring of 114 slots ends among the rows that are kept back.
@pytest.mark.parametrize(("capacity", "before"), [(50, 107), (None, 40)])
def test_only_who_reads_rows_that_are_kept_back_has_them_written(
    tmp_path: Path, capacity: int | None, before: int
) -> None:
    storage = prepare(ZarrStorage(tmp_path / "run.exp", capacity), SCHEMA)
    storage.background.stop()
    put(storage, before)
    storage.drain()
    for new in range(1, 13):
        put(storage, 1)
        old = window_ids(storage)[:-new]
        check(storage, old)
        check(storage, old[:0])
        assert storage._state.memtable.count == new
    check(storage, np.array([before + 5, before - 3]))
    assert storage._state.memtable.count == 0
    put(storage, 2)
    check(storage, window_ids(storage))
    storage.close()


@pytest.mark.guarantee(
    "disk/full",
    "A full disk leaves the store as it was; with `min_free_bytes`, an `extend` is refused before the "
    "disk is full.",
)
@pytest.mark.parametrize("count", [3, 40])
@pytest.mark.parametrize("where", ["columns", "journal"])
def test_a_full_disk_leaves_the_store_as_it_was(tmp_path: Path, where: str, count: int) -> None:
    storage, disk = faulty_storage(tmp_path / "run.exp")
    put(storage, 40)
    storage.drain()
    disk.before = refuse("write", where=where)
    before = storage.window, storage.write_count, storage.episodes.to_base()
    if count == 40 or where == "journal":  # few rows go to the journal only
        with pytest.raises(StorageError, match="no write today"):
            put(storage, count)
        disk.relax()
        assert (storage.window, storage.write_count, storage.episodes.to_base()) == before
        check(storage, window_ids(storage))
    disk.relax()
    storage.sync()
    put(storage, 30)
    check(storage, window_ids(storage))
    storage.close()
    check_reopened(tmp_path / "run.exp", size=50)


def put_interrupted(storage: Storage, count: int) -> None:
    """Be interrupted after the record is written and before memory has the rows."""

    def interrupt(*args: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EpisodeTable, "commit", interrupt)
        with pytest.raises(KeyboardInterrupt):
            put(storage, count)


@pytest.mark.guarantee("kill/whole")
@pytest.mark.parametrize(("count", "times"), [(1, 3), (30, 3)])
def test_an_interrupted_publish_is_taken_from_the_journal(tmp_path: Path, count: int, times: int) -> None:
    """Ctrl-C after the record is written and before memory knows: the rows are there, numbers go on."""
    storage = prepare(ZarrStorage(tmp_path / "run.exp", 50), SCHEMA)
    put(storage, 20)
    storage.set_priorities(np.array([5]), np.array([3.0]))
    expected = 20
    for _ in range(times):
        source = storage.episodes.to_base()["sessions"]
        put_interrupted(storage, count)
        storage.sync()  # as the background thread does meanwhile
        assert storage.last == expected
        expected += count
        storage.writer()
        assert storage.last == expected, "the record was not read again"
        put(storage, 2)
        expected += 2
        assert storage.last == storage.write_count == expected
        assert storage.episodes.to_base()["sessions"] == source, "the handle has lost its stream"
        check(storage, window_ids(storage))
        storage.sync()
        assert storage.can_write
    assert storage.priorities.values[4] == 3.0
    episodes = [np.concatenate(part) for part in storage.views([5, 6], storage.window.low + 1, len(storage))]
    storage.close()
    again = ZarrStorage(tmp_path / "run.exp")
    assert again.write_count == expected
    found = [np.concatenate(part) for part in again.views([5, 6], again.window.low + 1, len(again))]
    np.testing.assert_array_equal(found, episodes)
    again.close()


def test_no_mark_covers_what_an_interruption_left_behind(tmp_path: Path) -> None:
    """Rows whose publishing was interrupted are not yet synced: a sync must not call them so."""
    storage = prepare(ZarrStorage(tmp_path / "run.exp", 50), SCHEMA)
    put(storage, 20)

    put_interrupted(storage, 30)
    storage.sync()
    records = read_journal(Disk(), tmp_path / "run.exp" / "journal")
    published = [record.sequence for record in records if record.kind is Kind.PUBLISH]
    marks = [Mark.unpack(record.body).sequence for record in records if record.kind is Kind.MARK]
    assert len(published) == 2
    assert max(marks, default=0) < published[1]
    put(storage, 1)
    assert storage.last == 51
    check(storage, window_ids(storage))
    storage.close()


def test_names_of_shards_that_an_extend_under_way_has_made_are_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sync that finds nothing else to do must bring them to the disk, or leave them to the next."""
    storage, _ = faulty_storage(tmp_path / "run.exp")
    storage.background.stop()
    storage.sync()
    storage.sync()  # nothing is left to do
    named: set[Path] = set()
    sync_dir, put_batch = Disk.sync_dir, _BatchWrite.put

    def note(disk: Disk, path: Path) -> None:
        named.add(path)
        sync_dir(disk, path)

    def put_and_sync(write: _BatchWrite, state: Any) -> bool:
        in_columns = put_batch(write, state)
        storage.sync()
        return in_columns

    monkeypatch.setattr(Disk, "sync_dir", note)
    monkeypatch.setattr(_BatchWrite, "put", put_and_sync)
    put(storage, 30)
    storage.sync()
    assert {column.shard_path(0).parent for column in storage.state.columns.arrays} <= named
    storage.close()


def test_no_mark_covers_a_change_whose_bytes_are_not_written(tmp_path: Path) -> None:
    """A sync that comes while rows are changed in place must leave the redo record in force."""
    storage, disk = faulty_storage(tmp_path / "run.exp")
    put(storage, 30)
    storage.sync()
    syncing: list[threading.Thread] = []

    def trap(act: str, path: Path) -> None:
        if act == "write" and "columns" in str(path) and "_row" not in str(path):
            disk.relax()
            syncing.append(threading.Thread(target=lambda: storage.sync()))
            syncing[0].start()
            syncing[0].join(0.5)  # it may have to wait for the change to end
            raise StorageError("stopped in the middle")

    disk.before = trap
    ids = np.arange(1, 31)
    with pytest.raises(StorageError, match="in the middle"):
        storage.change(ids, range(4), [np.ascontiguousarray(c) for c in values_of(ids, 1)])
    syncing[0].join()
    records = read_journal(Disk(), tmp_path / "run.exp" / "journal")
    redo = next(record.sequence for record in records if record.kind is Kind.REDO)
    assert all(Mark.unpack(r.body).sequence < redo for r in records if r.kind is Kind.MARK)
    storage.writer()  # reads the journal again
    check(storage, ids, 1)
    storage.change(ids[:2], [1], [ids[:2]])
    storage.sync()
    records = read_journal(Disk(), tmp_path / "run.exp" / "journal")
    redo = next(record.sequence for record in records if record.kind is Kind.REDO)
    assert any(Mark.unpack(r.body).sequence >= redo for r in records if r.kind is Kind.MARK), "never settled"
    storage.change(ids[:2], [1], [ids[:2] * 1000 + 1])
    storage.close()
    check_reopened(tmp_path / "run.exp", size=30, version=1)


def test_rows_can_be_read_while_the_journal_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mapping is shown to readers only when its files are in it; reading a hole would be SIGSEGV."""
    storage = prepare(ZarrStorage(tmp_path / "run.exp", 50), SCHEMA)
    put(storage, 30)
    storage.sync()
    real = WritableColumns.open_shards

    def look(self: WritableColumns) -> None:
        assert storage.state.columns is not self
        assert storage.changes.number % 2, "rows may be redone under a reader's eyes"
        check(storage, np.arange(1, 31))
        real(self)

    monkeypatch.setattr(WritableColumns, "open_shards", look)
    storage.health.note_interruption()
    put(storage, 1)
    check(storage, np.arange(1, 32))
    storage.close()


def test_a_child_never_writes_rows_that_were_kept_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the time the child looks, the parent may have given their slots to newer rows."""
    set_spare_slots(monkeypatch, 8)
    storage = prepare(ZarrStorage(tmp_path / "run.exp", 8), SCHEMA)
    put(storage, 8)
    storage.sync()
    put(storage, 2)
    wakes_child, wake = os.pipe()
    with monkeypatch.context() as patch:
        patch.setattr(Store, "drain", lambda *_: None)  # as if a thread had added them just then
        pid = os.fork()
    if pid == 0:
        os.close(wake)
        os.read(wakes_child, 1)
        storage.read(np.array([9, 10]))
        os._exit(0)
    for _ in range(6):
        put(storage, 8)
    storage.sync()
    np.testing.assert_array_equal(
        storage.geometry.slot_of(np.array([9, 10])),
        storage.geometry.slot_of(window_ids(storage)[-2:]),
    )
    os.close(wake)
    os.waitpid(pid, 0)
    os.close(wakes_child)
    check(storage, window_ids(storage))
    storage.close()


# ---------------------------------------------------------------------------------------------------
# Settings.


class SlowIndex:
    """A catalog whose index takes as long to catch up as the test likes."""

    def __init__(self) -> None:
        self.asked, self.go_on = threading.Event(), threading.Event()

    def keep_up(self) -> None:
        self.asked.set()
        assert self.go_on.wait(30)

    def busy(self) -> bool:
        return False

    def close(self) -> None: ...


def test_extends_do_not_wait_for_the_index(tmp_path: Path) -> None:
    storage = prepare(ZarrStorage(tmp_path / "a.exp", 1000), SCHEMA)
    index = SlowIndex()
    storage.index.use(index)  # type: ignore[arg-type]
    put(storage, 10)
    journal = storage.state.journal
    with storage.locks.episodes:
        journal.start_segment(storage.state.base_record(storage.manifest.generation, opening=False))
    cutting = threading.Thread(target=storage.sync)
    cutting.start()
    assert index.asked.wait(30)
    # Far more rows than there are spare slots: these extends wait for syncs.
    writing = threading.Thread(target=lambda: [put(storage, 100) for _ in range(30)], daemon=True)
    writing.start()
    writing.join(30)
    assert not writing.is_alive(), "an extend waits for the index"
    assert len(journal.sync_files()) > 1
    index.go_on.set()
    cutting.join(30)
    assert len(journal.sync_files()) == 1
    storage.close()
