"""Snapshots are complete, share unchanged files, and are restored completely or not at all."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from tensordict import TensorDict

import expstore
from expstore.buffers.replay_buffer import ReplayBuffer
from expstore.buffers.tensordict import TensorDictReplayBuffer
from expstore.core import tuning
from expstore.data.containers import form_of
from expstore.disk.files import Disk
from expstore.disk.writer_lock import WriterLock
from expstore.errors import CorruptionError, LockedError, SchemaError, SnapshotError, StateError, StorageError
from expstore.maintenance import survey, verify
from expstore.samplers import PrioritizedSampler, Sampler, SamplerWithoutReplacement
from expstore.schema.row_fields import priority_place
from expstore.storages.factory import ZarrStorage
from expstore.storages.memory import MemoryStorage
from expstore.storages.snapshot_access import SnapshotPin
from expstore.storages.snapshots import create, restore
from expstore.storages.snapshots.catalog import find_version
from tests.support.batches import same
from tests.support.damaged_stores import flip
from tests.support.gated_disk import GatedDisk
from tests.support.waits import wait_until

pytestmark = [pytest.mark.index, pytest.mark.usefixtures("no_syncs")]

Make = Callable[..., TensorDict]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "backup"


def rows_of(rb: ReplayBuffer) -> TensorDict:
    """All rows, the oldest first."""
    window = rb.storage.window
    ids = np.arange(window.low + 1, window.last + 1)
    columns = rb.storage.read(ids)
    return form_of(rb.storage).build(columns, [ids.size], {})


def batches(rb: ReplayBuffer, count: int) -> list[TensorDict]:
    """The next batches, without ids, which a load shifts."""
    return [rb.sample().exclude("id") for _ in range(count)]


def inodes(folder: Path) -> dict[str, int]:
    return {str(p.relative_to(folder)): p.stat().st_ino for p in folder.rglob("*") if p.is_file()}


def priorities(rb: ReplayBuffer) -> list[float]:
    storage = rb.storage
    parts = storage.views([priority_place(storage.require_schema())], storage.window.low + 1, len(storage))[0]
    return [value for part in parts for value in part.tolist()]


# -- what a version is -----------------------------------------------------------------------------


@pytest.mark.guarantee(
    "version/moment",
    "A version is the store as it was at one moment, although other threads read and write.",
)
@pytest.mark.some(1)
@pytest.mark.parametrize("capacity", [5000, None, 20_000])
def test_a_version_is_the_store_as_it_was(
    store_path: Path, place: Path, make_batch: Make, capacity: int | None
) -> None:
    with expstore.open(store_path, capacity=capacity, batch_size=16, meta={"run": 7}) as rb:
        rb.extend(make_batch(9000, episode_length=10), source="worker")
        rb.extend(make_batch(7, start=9000))  # few enough to stand in the journal first
        rb.update_priority(id=[rb.storage.last, rb.storage.last - 3], priority=[3.0, 0.5])
        before, levels = rows_of(rb), priorities(rb)
        episodes = rb.sql("SELECT * EXCLUDE (info) FROM episodes ORDER BY episode_id").fetchall()
        made = rb.dumps(place)
        rb.extend(make_batch(4000, start=20_000))
    assert (made.number, made.rows) == (1, len(before))
    assert made.episodes > 1
    with expstore.open(place, mode="r") as old:
        assert same(rows_of(old), before)
        assert priorities(old) == levels
        assert old.meta == {"run": 7}
        assert old.sql("SELECT * EXCLUDE (info) FROM episodes ORDER BY episode_id").fetchall() == episodes
        with pytest.raises(StateError, match="reading only"):
            old.extend(make_batch(1))


def test_versions_may_lie_next_to_their_store_but_not_among_other_files(
    tmp_path: Path, make_batch: Make
) -> None:
    place = tmp_path / "dump"
    with expstore.open(place / "storage") as rb:
        rb.extend(make_batch(5))
        rb.dumps(place)
        (place / "notes").write_text("mine")
        with pytest.raises(SnapshotError, match="not a folder of snapshots: it has notes"):
            rb.dumps(place)
    with expstore.open(place / "storage") as rb, expstore.open(place, mode="r") as old:
        assert same(rows_of(old), rows_of(rb))


def test_an_empty_store_has_versions(store_path: Path, place: Path, make_batch: Make) -> None:
    with expstore.open(store_path, capacity=100) as rb:
        assert rb.dumps(place).rows == 0
        rb.extend(make_batch(5))
        rb.empty()
        assert rb.dumps(place).rows == 0
        for number in (1, 2):
            assert len(expstore.open(place, version=number)) == 0
        rb.extend(make_batch(3))
        rb.loads(place, 1)
        assert len(rb) == 0
        rb.extend(make_batch(3))
        assert len(rb) == 3


def test_shards_grow_where_there_would_be_too_many_files(
    store_path: Path, place: Path, make_batch: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "SNAPSHOT_FILES", 40)
    with expstore.open(store_path, capacity=40_000) as rb:
        rb.extend(make_batch(30_000))
        rb.dumps(place)
        assert zarr.open_group(place / "v0001/columns", mode="r")["action"].shards == (16_384,)
        assert same(rows_of(expstore.open(place, mode="r")), rows_of(rb))


# -- what a version shares -------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [None, 70_000])
def test_the_next_version_shares_what_has_not_changed(
    store_path: Path, place: Path, make_batch: Make, capacity: int | None
) -> None:
    with expstore.open(store_path, capacity=capacity) as rb:
        rb.extend(make_batch(65_000))
        first = rb.dumps(place)
        rb.extend(make_batch(100, start=65_000))
        second = rb.dumps(place)
        third = rb.dumps(place)
    assert second.new_bytes < first.new_bytes / 5
    assert third.new_bytes < second.new_bytes / 2
    one, two = inodes(place / "v0001"), inodes(place / "v0002")
    new = [name for name in two if name.startswith("columns/action/c") and two[name] != one.get(name)]
    assert new == ["columns/action/c.7"]


def test_a_ring_that_comes_round_is_copied_where_it_was_written(
    store_path: Path, place: Path, make_batch: Make
) -> None:
    with expstore.open(store_path, capacity=40_000) as rb:
        rb.extend(make_batch(40_000))
        rb.extend(make_batch(3000, start=40_000))
        for number in range(4):
            rb.extend(make_batch(2000, start=50_000 + 3000 * number))
            rb[-1] = make_batch(1, start=7)[0]
            rb.update_priority(id=rb.storage.last - 30_000, priority=2.0 + number)
            expected, levels = rows_of(rb), priorities(rb)
            rb.dumps(place, keep=9)
            old = expstore.open(place, version=number + 1)
            assert same(rows_of(old), expected)
            assert priorities(old) == levels


def test_changed_rows_and_priorities_are_not_shared(store_path: Path, place: Path, make_batch: Make) -> None:
    with expstore.open(store_path) as rb:
        rb.extend(make_batch(20_000))
        rb.dumps(place)
        rb[9000] = make_batch(1, start=5)[0]
        rb.update_priority(id=17_000, priority=9.0)
        rb.dumps(place)
    one, two = inodes(place / "v0001/columns"), inodes(place / "v0002/columns")
    differ = sorted(name for name in two if two[name] != one[name])
    assert [n for n in differ if n.startswith("action")] == ["action/c.1"]
    assert [n for n in differ if n.startswith("_row/priority")] == ["_row/priority/c.2"]
    assert expstore.open(place, version=1)[9000]["action"] == 9000 % 3
    assert expstore.open(place, version=2)[9000]["action"] == 5 % 3


def test_stamps_of_another_history_are_not_believed(
    store_path: Path, place: Path, tmp_path: Path, make_batch: Make
) -> None:
    """A store is put back from a plain copy and goes on differently, with the same numbers."""
    expstore.open(store_path, seed=1).close()
    with expstore.open(store_path) as rb:
        rb.extend(make_batch(9000))
    os.system(f"cp -r {store_path} {tmp_path}/copy.exp")
    for path, start in ((store_path, 100), (tmp_path / "copy.exp", 900)):
        with expstore.open(path) as rb:
            rb.extend(make_batch(50, start=start))
            expected = rows_of(rb)
            rb.dumps(place)
        assert same(rows_of(expstore.open(place, mode="r")), expected)


def test_without_hard_links_files_are_copied(
    store_path: Path, place: Path, make_batch: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(Disk, "warm", lambda disk: None)  # compiled loops do not ask os
    with expstore.open(store_path) as rb:
        rb.extend(make_batch(9000))
        first = rb.dumps(place)
        assert rb.dumps(place).new_bytes == first.new_bytes
        assert same(rows_of(expstore.open(place, mode="r")), rows_of(rb))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_damaged_version_is_not_shared(
    store_path: Path, place: Path, make_batch: Make, monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    monkeypatch.setattr(Disk, "warm", Disk._load_kernel if compiled else lambda disk: None)
    with expstore.open(store_path) as rb:
        rb.extend(make_batch(20_000))
        rb.dumps(place)
        (place / "v0001/columns/action/c.0").unlink()
        os.truncate(place / "v0001/columns/action/c.1", 100)
        rb.dumps(place)
        assert same(rows_of(expstore.open(place, mode="r")), rows_of(rb))


# -- which versions there are ----------------------------------------------------------------------


def test_versions_are_listed_and_found(store_path: Path, place: Path, make_batch: Make) -> None:
    with expstore.open(store_path) as rb:
        for count in (3, 4, 5):
            rb.extend(make_batch(count, episode_length=2))
            rb.dumps(place) if count != 4 else rb.snapshots.tag("best", place)
    found = expstore.versions(place)
    assert [(v.number, v.tag, v.rows) for v in found] == [(1, None, 3), (2, "best", 7), (3, None, 12)]
    assert all(v.disk_bytes > 0 and v.new_bytes > 0 and v.time > 1.6e9 for v in found)
    assert found[2].episodes == 7  # each batch counts from 0, so none continues the one before
    for version, rows in ((None, 12), (1, 3), ("best", 7), (2, 7), ("3", 12), ("v0001", 3)):
        assert len(expstore.open(place, mode="r", version=version)) == rows
    with pytest.raises(SnapshotError, match=r"no version 'worst': there are 1, 2 \(best\), 3"):
        expstore.open(place, version="worst")
    with pytest.raises(SnapshotError, match="no version 4"):
        expstore.open(place, version=4)
    with pytest.raises(StateError, match="versions"):
        expstore.open(place, mode="w")
    with pytest.raises(StateError, match="is a snapshot"):
        ZarrStorage(place / "v0001")


def test_the_newest_version_may_be_deleted(store_path: Path, place: Path, make_batch: Make) -> None:
    with expstore.open(store_path) as rb:
        for count in (3, 4):
            rb.extend(make_batch(count))
            rb.dumps(place)
        rb.snapshots.tag("mine", place)
        shutil.rmtree(place / "v0003")
        assert len(expstore.open(place, mode="r")) == 7
        rb.extend(make_batch(5))
        rb.loads(place)
        assert len(rb) == 7


def test_a_store_keeps_its_own_tagged_versions(store_path: Path, make_batch: Make) -> None:
    with expstore.open(store_path, capacity=50, batch_size=4) as rb:
        rb.extend(make_batch(10))
        rb.snapshots.tag("start")
        rb.extend(make_batch(30, start=10))
        with pytest.raises(SnapshotError, match="already has a snapshot 'start'"):
            rb.snapshots.tag("start")
        for name in ("7", "v3", "", "a/b", "..", "a" * 101):
            with pytest.raises(SnapshotError, match="is not a valid tag"):
                rb.snapshots.tag(name)
        assert [v.tag for v in expstore.versions(store_path)] == ["start"]
    with expstore.open(store_path) as rb:  # versions/ is no foreign folder
        assert len(rb) == 40
        assert len(expstore.open(store_path, version="start")) == 10
        rb.loads(store_path, "start")
        assert len(rb) == 10
        assert [v.tag for v in expstore.versions(store_path)] == ["start"]


@pytest.mark.guarantee("version/whole")
def test_so_many_are_kept_and_tagged_ones_always(store_path: Path, place: Path, make_batch: Make) -> None:
    with expstore.open(store_path) as rb:
        rb.extend(make_batch(3))
        rb.snapshots.tag("first", place)
        for _ in range(4):
            rb.dumps(place, keep=2)
        assert [v.number for v in expstore.versions(place)] == [1, 4, 5]
        rb.snapshots.tag("last", place)
        rb.dumps(place, keep=1)
        assert [v.number for v in expstore.versions(place)] == [1, 6, 7]
        with pytest.raises(ValueError, match="keep"):
            rb.dumps(place, keep=0)


def test_a_folder_that_is_something_else_is_refused(
    store_path: Path, place: Path, tmp_path: Path, make_batch: Make
) -> None:
    with expstore.open(store_path) as rb:
        rb.extend(make_batch(3))
        place.mkdir()
        (place / "thesis.tex").write_text("...")
        for path in (place, store_path):
            before = sorted(p.name for p in path.iterdir())
            with pytest.raises(SnapshotError):
                rb.dumps(path)
            assert sorted(p.name for p in path.iterdir()) == before
        with pytest.raises((SnapshotError, StorageError)):
            rb.dumps(place / "thesis.tex")
    with pytest.raises(StateError, match="closed"):
        rb.dumps(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    with pytest.raises(SnapshotError, match="it holds no snapshots"):
        find_version(Disk(), tmp_path)


def test_two_at_once_in_one_place(store_path: Path, place: Path, make_batch: Make) -> None:
    with expstore.open(store_path) as rb:
        rb.extend(make_batch(3))
        rb.dumps(place)
        lock = WriterLock(Disk(), place / "LOCK")
        with pytest.raises(LockedError, match="another snapshot is being made"):
            rb.dumps(place)
        lock.release()
        assert rb.dumps(place).number == 2


# -- while others go on ----------------------------------------------------------------------------


class SlowDisk(GatedDisk):
    """Wait for `released` before a certain file is created."""

    def __init__(self, name: str) -> None:
        super().__init__(self._wait)
        self.name = name
        self.reached, self.released = threading.Event(), threading.Event()

    def _wait(self, act: str, path: Path) -> None:
        if act == "create" and str(path).endswith(self.name):
            self.reached.set()
            assert self.released.wait(60)


def started(act: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when somebody is about to wait for a copy."""
    event, wait = threading.Event(), SnapshotPin.wait

    def note(self: SnapshotPin, through: int | None = None) -> None:
        if self.first and (through is None or through >= self.first):
            event.set()
        wait(self, through)

    monkeypatch.setattr(SnapshotPin, "wait", note)
    return event


@pytest.mark.guarantee("version/moment")
def test_overwriting_uncopied_rows_waits(
    store_path: Path, place: Path, make_batch: Make, waiting: threading.Event
) -> None:
    disk = SlowDisk("action/c.1")
    rb = TensorDictReplayBuffer(storage=ZarrStorage(store_path, 20_000, disk=disk), batch_size=8)
    rb.extend(make_batch(20_000))
    rb.extend(make_batch(2000, start=20_000))  # 22,000 of 24,096 slots
    expected = rows_of(rb)
    dump = started(lambda: rb.dumps(place))
    assert disk.reached.wait(60)
    # Slots 0 to 8191 are copied; the next ones are being copied.
    for start, count in ((22_000, 4000), (26_000, 4000), (30_000, 2288)):
        rb.extend(make_batch(count, start=start))
    assert rb.storage.snapshot_pin.first == 8193
    assert not waiting.is_set()
    done: list[str] = []
    extend = started(lambda: (rb.extend(make_batch(10)), done.append("extend")))
    assert waiting.wait(60)
    assert not done
    assert rb.sample().shape == (8,)  # readers wait for nobody
    disk.released.set()
    for thread in (dump, extend):
        thread.join(60)
    assert done == ["extend"]
    assert rb.storage.snapshot_pin.first == 0
    assert rb.stats()["waits"] > 0
    assert same(rows_of(expstore.open(place, mode="r")), expected)
    rb.close()


def test_a_change_in_place_waits(
    store_path: Path, place: Path, make_batch: Make, waiting: threading.Event
) -> None:
    disk = SlowDisk("action/c.0")
    rb = TensorDictReplayBuffer(storage=ZarrStorage(store_path, 500, disk=disk), batch_size=8)
    rb.extend(make_batch(600)[:500])
    expected = rows_of(rb)
    dump = started(lambda: rb.dumps(place))
    assert disk.reached.wait(60)
    rb.update_priority(id=100, priority=7.0)  # that is kept apart
    change = started(lambda: rb.__setitem__(slice(0, 5), make_batch(5, start=77)))
    assert waiting.wait(60)
    assert same(rows_of(rb), expected)
    disk.released.set()
    for thread in (dump, change):
        thread.join(60)
    assert not same(rows_of(rb), expected)
    assert same(rows_of(expstore.open(place, mode="r")), expected)
    assert priorities(expstore.open(place, mode="r")) == [1.0] * 500
    rb.close()


@pytest.mark.guarantee("version/moment")
@pytest.mark.slow
def test_versions_of_a_store_in_use(store_path: Path, place: Path, make_batch: Make) -> None:
    """One writes, one samples, versions are made: every version is a run of rows as they were written."""
    with expstore.open(store_path, capacity=9000, batch_size=64) as rb:
        rb.extend(make_batch(9000))
        stop, faults = threading.Event(), []

        def write() -> None:
            start = 9000
            while not stop.is_set():
                rb.extend(make_batch(300, start=start))
                start += 300

        def draw() -> None:
            while not stop.is_set():
                batch = rb.sample()
                if not (batch["observation"][:, 0] == batch["id"] - 1).all():
                    faults.append(batch)

        threads = [started(write), started(draw), started(draw)]
        for _ in range(6):
            rb.dumps(place)
            old = expstore.open(place, mode="r")
            window = old.storage.window
            rows = rows_of(old)
            assert (rows["observation"][:, 0] == torch.arange(window.low, window.last)).all()
            assert len(old) == 9000
        stop.set()
        for thread in threads:
            thread.join(60)
        assert not faults


# -- putting one back ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [SamplerWithoutReplacement, PrioritizedSampler])
def test_other_samplers_continue_as_well(
    store_path: Path, place: Path, tmp_path: Path, make_batch: Make, kind: type[Sampler]
) -> None:
    with expstore.open(store_path, capacity=100, batch_size=16, sampler=kind(), seed=3) as rb:
        rb.extend(make_batch(100))
        rb.extend(make_batch(40, start=100))
        batches(rb, 2)
        rb.update_priority(id=[120, 130], priority=[9.0, 0.25])
        rb.dumps(place)
        wanted = batches(rb, 6)
    for path in (tmp_path / "new.exp", None):
        storage = MemoryStorage(100) if path is None else ZarrStorage(path, 100)
        new = TensorDictReplayBuffer(storage=storage, sampler=kind(), batch_size=16)
        new.extend(make_batch(30, start=900))
        batches(new, 1)
        new.loads(place)
        assert all(same(a, b) for a, b in zip(batches(new, 6), wanted, strict=True))
        new.close()


@pytest.mark.guarantee("version/loads")
@pytest.mark.slow
def test_ids_and_episodes_continue_above_both(
    store_path: Path, place: Path, tmp_path: Path, make_batch: Make
) -> None:
    with expstore.open(store_path, capacity=100) as rb:
        rb.extend(make_batch(250, episode_length=5)[:100], source="a")
        rb.extend(make_batch(12), source="a")
        rb.dumps(place)
        highest, episode = rb.storage.last, rb.storage.episodes.next_episode
        index = rb.storage.geometry.index_of(np.arange(highest - 99, highest + 1))
    with expstore.open(tmp_path / "other.exp", capacity=100) as rb:
        rb.extend(make_batch(700, episode_length=3)[:90])
        highest, episode = max(highest, rb.storage.last), max(episode, rb.storage.episodes.next_episode)
        for _ in range(3):
            rb.loads(place)
            window = rb.storage.window
            assert window.low >= highest
            assert window.size == 100
            ids = np.arange(window.low + 1, window.last + 1)
            assert (rb.storage.geometry.index_of(ids) == index).all()  # the same numbers as before
            lowest = rb.sql("SELECT min(_episode) FROM transitions").fetchall()[0][0]
            assert lowest >= episode
            total = rb.sql("SELECT count(*), min(episode_id) FROM episodes").fetchall()[0]
            assert total[0] == 21
            assert total[1] >= episode
            rb.extend(make_batch(3), source="a")  # another episode: a load ends those that were open
            step = rb.sql("SELECT _step FROM transitions ORDER BY _id DESC LIMIT 1").fetchall()[0][0]
            assert step == 2
            highest, episode = rb.storage.last, rb.storage.episodes.next_episode


def test_a_store_that_never_had_rows_continues_the_ids_of_the_version(
    store_path: Path, place: Path, tmp_path: Path, make_batch: Make
) -> None:
    def numbers(rb: ReplayBuffer) -> list[Any]:
        rows = rb.sql("SELECT _id, _episode, _step FROM transitions ORDER BY _id").fetchall()
        return [rows, rb.sql("SELECT episode_id FROM episodes ORDER BY episode_id").fetchall()]

    memory = TensorDictReplayBuffer(storage=MemoryStorage(100), batch_size=4)
    with expstore.open(store_path) as rb:
        rb.extend(make_batch(30, episode_length=7))
        rb.dumps(place)
        expected = numbers(rb)
    with expstore.open(tmp_path / "new.exp") as rb:
        rb.loads(place)
        assert numbers(rb) == expected
        assert rb.sql("SELECT max(episode_id) FROM episodes").fetchall() == [(5,)]
        rb.extend(make_batch(1))
        assert rb.sql("SELECT max(episode_id) FROM episodes").fetchall() == [(6,)]
    memory.loads(place)
    assert numbers(memory) == expected


def test_refused_calls_change_nothing(
    store_path: Path, place: Path, tmp_path: Path, make_batch: Make
) -> None:
    with expstore.open(store_path, capacity=100) as rb:
        rb.extend(make_batch(20))
        rb.dumps(place)
    with expstore.open(tmp_path / "other.exp", capacity=100) as rb:
        rb.extend(make_batch(30).exclude("action"))
        with pytest.raises(SchemaError, match="action"):
            rb.loads(place)
        with pytest.raises(SnapshotError):
            rb.loads(place, 9)
        assert len(rb) == 30
        rb.extend(make_batch(1).exclude("action"))
    (place / "v0001/columns/action/c.0").unlink()
    with expstore.open(tmp_path / "third.exp", capacity=100) as rb:
        rb.extend(make_batch(30, start=5))
        with pytest.raises(CorruptionError, match="action"):
            rb.loads(place)
        assert rows_of(rb)["observation"][0, 0] == 5
        rb.extend(make_batch(1))
        assert sorted(p.name for p in (tmp_path / "third.exp").iterdir() if "swap" in p.name) in (
            [],
            ["swap.tmp"],
        )
    with expstore.open(place, mode="r") as old, pytest.raises(StateError):
        old.loads(place)


def test_ids_from_before_a_load_are_drawn_again(store_path: Path, place: Path, make_batch: Make) -> None:
    """Whoever has just drawn ids of the former rows must not get rows of the new ones for them."""
    for capacity in (None, 1000):
        path = store_path.with_name(f"{capacity}.exp")
        with expstore.open(path, capacity=capacity, batch_size=8) as rb:
            rb.extend(make_batch(800))
            rb.dumps(place / str(capacity))
            rb.extend(make_batch(100, start=800))
            former = np.arange(1, 901)
            rb.loads(place / str(capacity))
            assert not any(rb.storage.intact(former[n : n + 1]) for n in range(900))
            assert rb.storage.intact(np.arange(rb.storage.window.low + 1, rb.storage.last + 1))
            assert rb.update_priority(id=former, priority=5.0) == 0


@pytest.mark.slow
def test_sampling_continues_while_a_version_is_restored(
    store_path: Path, place: Path, make_batch: Make
) -> None:
    with expstore.open(store_path, capacity=2000, batch_size=32) as rb:
        rb.extend(make_batch(2000))
        rb.dumps(place)
        rb.extend(make_batch(2000, start=10_000))
        stop, faults, seen = threading.Event(), [], []

        def draw() -> None:
            while not stop.is_set():
                batch = rb.sample()
                values = batch["observation"][:, 0].long()
                old, new = values < 2000, values >= 10_000
                # A batch is of one content or of the other, and so are its indices.
                if not (old.all() or new.all()) or not (values % 2000 == batch["index"]).all():
                    faults.append(values)
                seen.append(None)

        threads = [started(draw), started(draw)]
        for _ in range(5):
            count = len(seen)
            rb.loads(place)
            rb.extend(make_batch(2000, start=10_000))
            wait_until(lambda count=count: len(seen) >= count + 5)  # type: ignore[misc]
        stop.set()
        for thread in threads:
            thread.join(60)
        assert not faults


def test_a_load_that_was_left_half_way_is_finished_by_the_next_writer(
    store_path: Path, place: Path, make_batch: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    with expstore.open(store_path, capacity=100) as rb:
        rb.extend(make_batch(30))
        rb.dumps(place)
        rb.extend(make_batch(30, start=500))

        def stop(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr("expstore.storages.engine.opening.finish_swap", stop)
            with pytest.raises(KeyboardInterrupt):
                rb.loads(place)
        assert same(rows_of(rb), make_rows(make_batch, (0, 30), (500, 30)))  # what is open can be read
        with pytest.raises(StorageError, match=r"loads\(\) or a change"):
            expstore.open(store_path, mode="r")
        with pytest.raises(StorageError, match=r"loads\(\) or a change"):
            survey(store_path)
        rb.extend(make_batch(5, start=900))  # brings it to its end first
        assert same(rows_of(rb), make_rows(make_batch, (0, 30), (900, 5)))
    with expstore.open(store_path) as rb:
        assert same(rows_of(rb), make_rows(make_batch, (0, 30), (900, 5)))


def make_rows(make_batch: Make, *runs: tuple[int, int]) -> TensorDict:
    return torch.cat([make_batch(count, start=start) for start, count in runs])


def test_versions_are_verified(store_path: Path, place: Path, make_batch: Make) -> None:
    with expstore.open(store_path, capacity=9000) as rb:
        rb.extend(make_batch(9000))
        rb.extend(make_batch(500, start=9000))
        rb.dumps(place)
        rb.extend(make_batch(500, start=9500))
        rb.dumps(place)
    folder = place / "v0002"
    assert verify(place / "v0001") == verify(folder) == []
    names = ("columns/action/c.1", "version.json", "origin", "checksums", "episodes.log", "journal/000001")
    for name in names:
        path = folder / name
        whole = path.read_bytes()
        at = {"columns/action/c.1": 100, "origin": 4200, "checksums": 4200}.get(name, len(whole) // 2)
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 8]) + whole[at + 1 :])
        found = verify(folder)
        assert found, name
        assert any(name.startswith(finding.path) for finding in found), (name, found)
        path.write_bytes(whole)
    assert verify(folder) == []


@pytest.mark.parametrize(("capacity", "rows"), [(None, 300), (None, 20_000), (4000, 5000)])
def test_versions_with_packed_and_flat_fields_are_sound(
    store_path: Path, place: Path, make_batch: Make, capacity: int | None, rows: int
) -> None:
    with expstore.open(store_path, layout="packed", capacity=capacity) as rb:
        rb.extend(make_batch(rows))
        rb.columns.add("note", fill=1.5)  # a flat field
        rb.extend(make_batch(20, start=rows))
        rb.dumps(place)
    assert verify(place / "v0001") == []
    meta = place / "v0001/columns/action/zarr.json"
    facts = json.loads(meta.read_text())
    meta.write_text(json.dumps(facts | {"shape": [4096, *facts["shape"][1:]]}))
    assert [finding.kind for finding in verify(place / "v0001")] == ["metadata"]


@pytest.mark.guarantee(
    "damage/copies",
    "`loads`, `pull`, `resize` and `merge` of closed stores never copy a row whose bytes do not have "
    "their checksum.",
)
@pytest.mark.parametrize(
    ("name", "at"), [("columns/action/c.0", 100), ("columns/_row/episode/c.0", 0), ("checksums", 4100)]
)
def test_a_version_with_wrong_bytes_is_not_restored(
    store_path: Path, place: Path, tmp_path: Path, make_batch: Make, name: str, at: int
) -> None:
    with expstore.open(store_path, layout="flat") as rb:
        rb.extend(make_batch(30))
        rb.dumps(place)
    flip(place / "v0001" / name, at, 3)
    with expstore.open(tmp_path / "other.exp", layout="flat") as rb:
        rb.extend(make_batch(20, start=7))
        rows = rows_of(rb)
        with pytest.raises(CorruptionError, match="v0001/columns/.* is damaged in the rows with ids 1 to 30"):
            rb.loads(place)
        assert same(rows_of(rb), rows)
    memory = TensorDictReplayBuffer(storage=MemoryStorage(100), batch_size=4)
    with pytest.raises(CorruptionError):
        memory.loads(place)
    (place / "v0001/checksums").unlink()
    with (
        expstore.open(tmp_path / "new.exp") as rb,
        pytest.raises(CorruptionError, match="checksums is missing"),
    ):
        rb.loads(place)


@pytest.mark.guarantee("damage/copies")
def test_wrong_bytes_of_a_store_get_into_no_version(store_path: Path, place: Path, make_batch: Make) -> None:
    with expstore.open(store_path, layout="flat") as rb:
        rb.extend(make_batch(9000))
        rb.dumps(place)
    size = rows_of(expstore.open(place, mode="r"))["action"][0].nbytes
    flip(store_path / "columns/action/c/0", 5000 * size, 3)
    with expstore.open(store_path) as rb:
        assert rb.dumps(place).number == 2  # it shares the rows of the version before
        with pytest.raises(CorruptionError, match="action is damaged in slots 4096 to 8191"):
            rb.dumps(place.with_name("another"))
        assert expstore.versions(place.with_name("another")) == []
    assert verify(place / "v0002") == []


def test_a_description_that_is_damaged_hides_its_version_only(
    store_path: Path, place: Path, make_batch: Make
) -> None:
    with expstore.open(store_path) as rb:
        rb.extend(make_batch(3))
        rb.dumps(place)
        rb.dumps(place)
    facts = json.loads((place / "v0001/version.json").read_text())
    (place / "v0001/version.json").write_text(json.dumps(facts | {"rows": 9}))
    assert [v.number for v in expstore.versions(place)] == [2]
    assert len(expstore.open(place, version=1)) == 3
    with expstore.open(store_path) as rb:
        rb.extend(make_batch(4))
        with pytest.raises(CorruptionError, match="version.json is damaged"):
            rb.loads(place, 1)
        assert len(rb) == 7


def test_a_failure_leaves_nothing_behind(
    store_path: Path, place: Path, make_batch: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    with expstore.open(store_path, capacity=100) as rb:
        rb.extend(make_batch(30))
        rb.dumps(place)

        def full(*given: Any) -> None:
            raise StorageError("no space left", kind="disk_full")

        with monkeypatch.context() as patch:
            patch.setattr(create, "sync_paths", full)
            patch.setattr(restore, "sync_paths", full)
            with pytest.raises(StorageError, match="no space"):
                rb.dumps(place)
            with pytest.raises(StorageError, match="no space"):
                rb.loads(place)
        assert sorted(p.name for p in place.iterdir()) == ["LOCK", "v0001"]
        rb.extend(make_batch(90))  # nobody waits for a copy that has ended
        assert rb.dumps(place).number == 2
        rb.loads(place)
        assert len(rb) == 100
