"""Repair rebuilds derived files, gives up only lost rows, and can be repeated after a kill."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import expstore
from expstore.buffers.tensordict import TensorDictReplayBuffer
from expstore.cli.app import run
from expstore.core.id_set import IdSet
from expstore.disk.files import Disk
from expstore.episodes.fragments import cut_out
from expstore.episodes.log import LogEntry, fill_up, salvage
from expstore.errors import CorruptionError, LockedError, NotFoundError, StateError
from expstore.maintenance import repair, verify
from expstore.maintenance.verify import inspect
from expstore.samplers import PrioritizedSampler, SamplerWithoutReplacement
from expstore.storages.memory import MemoryStorage
from tests.support.damaged_stores import (
    BLOCK,
    CAPACITY,
    ROWS,
    SLOTS,
    batch,
    flip,
    in_child,
)
from tests.support.stores import read_files

pytestmark = pytest.mark.usefixtures("no_syncs", "short_flat_shards")

ALL = range(ROWS - CAPACITY + 1, ROWS + 1)


def ids_in_slots(first: int, last: int) -> list[int]:
    return [i for i in ALL if first <= (i - 1) % SLOTS <= last]


def number_of(i: int) -> int:
    """What the field "number" of a row holds; rows of index 0 and 1 were changed."""
    index = (i - 1) % CAPACITY
    return 77 + index if index < 2 else i - 1


def check_rows(rb: TensorDictReplayBuffer, kept: list[int]) -> None:
    """The store holds these rows of the first life, whole, and no others, whoever asks."""
    assert len(rb) == len(kept)
    found = rb[:]
    by_index = sorted(kept, key=lambda i: (i - 1) % CAPACITY)
    assert found["number"].tolist() == [number_of(i) for i in by_index]
    expected = torch.tensor([number_of(i) for i in by_index])
    assert torch.equal(found["wide"], (expected[:, None] * 7 + torch.arange(40)).to(torch.uint8))
    told = rb.sql("SELECT _id, number, next.reward FROM transitions ORDER BY _id").fetchall()
    assert told == [(i, number_of(i), number_of(i) / 8) for i in sorted(kept)]
    fragments = rb.sql("SELECT first_id, length, stride FROM fragments").fetchall()
    held = [first + k * stride for first, length, stride in fragments for k in range(length)]
    assert sorted(held) == sorted(kept)
    assert rb.sql("SELECT sum(live_rows) FROM episodes").fetchall() == [(len(kept) or None,)]
    assert rb.sql("SELECT count(*) FROM priorities").fetchall() == [(len(kept),)]
    if kept:
        drawn = {i for _ in range(20) for i in rb.sample(500)["id"].tolist()}
        assert drawn <= set(kept)
        assert len(drawn) > 0.8 * len(kept)


def check_kept(path: Path, kept: list[int]) -> None:
    """The store is sound, and holds these rows."""
    assert verify(path) == []
    with expstore.open(path, mode="r") as rb:
        check_rows(rb, kept)


def check_store(path: Path, kept: list[int]) -> None:
    """The store is sound, holds these rows for writers, readers and in versions, and can be written to."""
    check_kept(path, kept)
    with expstore.open(path) as rb:
        assert rb.recovered is None
        check_rows(rb, kept)
        lost = sorted(set(ALL) - set(kept))
        for i in lost[:1] + lost[-1:]:
            with pytest.raises(expstore.ExpStoreError, match="no row with index"):
                rb[(i - 1) % CAPACITY]
            assert rb.update_priority(id=[i], priority=2.0) == 0
        rb.dumps(path.with_name("versions"))
    with expstore.open(path.with_name("versions"), mode="r") as rb:
        check_rows(rb, kept)
    with expstore.open(path.with_name("loaded.exp"), capacity=CAPACITY) as rb:
        rb.loads(path.with_name("versions"))
        assert len(rb) == len(kept)
        assert sorted(rb["number"].tolist()) == sorted(map(number_of, kept))
    memory = TensorDictReplayBuffer(storage=MemoryStorage(CAPACITY), batch_size=4)
    memory.loads(path.with_name("versions"))
    assert sorted(memory["number"].tolist()) == sorted(map(number_of, kept))
    assert memory.sql("SELECT sum(live_rows) FROM episodes").fetchall() == [(len(kept),)]
    with expstore.open(path) as rb:
        assert rb.extend(batch(100, 0), return_ids=True).tolist() == list(range(ROWS + 1, ROWS + 101))
        assert len(rb) == len([i for i in kept if i > ROWS + 100 - CAPACITY]) + 100
        rb.extend(batch(CAPACITY, 0))
        assert len(rb) == CAPACITY
        assert rb["number"].shape == (CAPACITY,)
    expstore.open(path).close()
    assert verify(path) == []
    assert json.loads((path / "expstore.json").read_bytes())["gaps"] == []


@pytest.mark.guarantee("damage/repair")
def test_redundant_data_is_rebuilt_without_loss(store: Path) -> None:
    """zarr.json, shard indexes, the index, a page that was never written to."""
    (store / "columns/number/zarr.json").unlink()
    flip(store / "columns/next/zarr.json", 30, 2)
    (store / "columns/wide/zarr.json").write_bytes(b"{}")
    flip(store / "columns/wide/c/1/0", BLOCK * 40 + 3, 1)
    flip(store / "columns/_row/priority/c/0", BLOCK * 4 + 1, 7)
    (store / "index.duckdb").write_bytes(b"no database")
    (store / "checksums").unlink()
    done = repair(store)
    assert (done.lost, done.left) == ((), [])
    assert len(done.acts) == 6
    check_kept(store, list(ALL))


def test_nothing_to_repair(store: Path) -> None:
    done = repair(store, drop_damaged=True)
    assert (done.acts, done.lost, done.left) == (["index.duckdb rebuilt"], (), [])
    check_kept(store, list(ALL))


@pytest.mark.guarantee(
    "damage/repair",
    "`expstore repair` drops rows only with `--drop-damaged`, and then exactly the rows of damaged blocks.",
)
@pytest.mark.slow
def test_a_damaged_block_is_left_unless_it_may_be_dropped(store: Path) -> None:
    flip(store / "columns/next/reward/c/0/0", 4 * 100, 5)
    done = repair(store)
    assert [finding.kind for finding in done.left] == ["payload"]
    assert done.lost == ()
    assert [finding.kind for finding in verify(store)] == ["payload"]
    with expstore.open(store) as rb:
        assert len(rb) == CAPACITY
    done = repair(store, drop_damaged=True)
    assert (done.lost, done.lost_rows, done.left) == (((9097, 12_000),), 2904, [])
    check_kept(store, list(range(7001, 9097)))


@pytest.mark.guarantee("damage/repair")
def test_rows_in_the_middle_go_and_their_neighbours_stay(store: Path) -> None:
    """Slots 4096 to 8191 hold ids 4097 to 8192, of which 7001 to 8192 can be read."""
    flip(store / "columns/wide/c/1/0", 40 * 3000, 5)
    flip(store / "columns/_row/step/c/0", 8 * 5, 5)
    done = repair(store, drop_damaged=True)
    assert done.lost == ((7001, 8192), (9097, 12_000))
    check_store(store, list(range(8193, 9097)))


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("name", "size"), [("number/c/1", None), ("_row/id/c/0", 1000), ("_row/episode/c/2", None)]
)
def test_a_shard_that_is_gone(store: Path, name: str, size: int | None) -> None:
    path = store / "columns" / name
    path.unlink() if size is None else os.truncate(path, size)
    with pytest.raises(CorruptionError, match=name):
        expstore.open(store)
    shard = int(name.split("/c/")[1].split("/")[0])
    done = repair(store, drop_damaged=True)
    lost = set(ids_in_slots(shard * BLOCK, shard * BLOCK + BLOCK - 1))
    assert done.lost_rows == len(lost)
    check_store(store, [i for i in ALL if i not in lost])


@pytest.mark.parametrize("sampler", ["prioritized", "without replacement"])
def test_other_samplers_leave_out_what_was_given_up(store: Path, sampler: str) -> None:
    (store / "columns/number/c/1").unlink()
    repair(store, drop_damaged=True)
    kept = list(range(8193, 12_001))
    chosen = PrioritizedSampler() if sampler == "prioritized" else SamplerWithoutReplacement()
    with expstore.open(store, sampler=chosen) as rb:
        for _ in range(2):
            if sampler == "prioritized":
                rb.update_priority(id=torch.arange(7001, 12_001), priority=1.0)
                drawn = [i for _ in range(20) for i in rb.sample(500)["id"].tolist()]
                assert len(set(drawn)) > 0.8 * len(kept)
            else:
                drawn = [i for _ in range(34) for i in rb.sample(112)["id"].tolist()]
                drawn += [] if chosen.ran_out else rb.sample(112)["id"].tolist()
                assert chosen.ran_out
                assert len(drawn) == len(set(drawn)) == len(kept)
            assert set(drawn) <= set(kept)
            rb.extend(batch(7, 0))
            kept = [i for i in range(8193, rb.storage.last + 1) if i > rb.storage.last - CAPACITY]


def test_priorities_that_are_gone_cost_no_row(store: Path) -> None:
    (store / "columns/_row/priority/c/0").unlink()
    assert repair(store, drop_damaged=True).lost == ()
    with expstore.open(store) as rb:
        told = rb.sql("SELECT DISTINCT priority FROM priorities WHERE id > 9096").fetchall()
        assert told == [(3.0,)]  # the largest so far
    check_kept(store, list(ALL))


def test_all_rows_lost(store: Path) -> None:
    shutil.rmtree(store / "columns/number/c")
    done = repair(store, drop_damaged=True)
    assert done.lost == ((7001, 12_000),)
    with expstore.open(store) as rb:
        assert len(rb) == 0
        with pytest.raises(expstore.errors.NotReadyError):
            rb.sample(4)
        assert rb.sql("SELECT count(*) FROM transitions").fetchall() == [(0,)]
        rb.extend(batch(10, 0))
        assert sorted(rb.sample(100)["id"].unique().tolist()) == list(range(12_001, 12_011))
    assert verify(store) == []


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_the_log_of_episodes(store: Path, damage: str) -> None:
    """Episodes that have rows get an entry again; rows are not touched."""
    with expstore.open(store) as rb:
        before = rb.sql("SELECT episode_id, length FROM episodes WHERE live_rows > 0 ORDER BY 1").fetchall()
    path = store / "episodes.log"
    if damage == "flip":
        flip(path, 96 * 5 + 50, 1)
    elif damage == "cut":
        os.truncate(path, 500)
    else:
        path.unlink()
    done = repair(store)
    assert [finding.path for finding in done.left] == ["episodes.log"]
    assert done.lost == ()
    done = repair(store, drop_damaged=True)
    assert (done.lost, done.left) == ((), [])
    assert any("episodes.log restored" in act for act in done.acts)
    with expstore.open(store) as rb:
        after = rb.sql("SELECT episode_id, length FROM episodes WHERE live_rows > 0 ORDER BY 1").fetchall()
        assert after == before
        assert rb.sql("SELECT name FROM sources WHERE named").fetchall() == [("arm",)]
    check_store(store, list(ALL))


def test_a_journal_that_is_damaged_in_the_middle(store_path: Path) -> None:
    """What was written after the damage is lost, also where it has overwritten older rows."""

    def work() -> list[str]:
        rb = expstore.open(store_path, capacity=CAPACITY)
        for first in range(0, ROWS, 1000):
            rb.extend(batch(1000, first))
        rb.flush()
        os._exit(0)

    in_child(work)
    (segment,) = (store_path / "journal").iterdir()
    data = segment.read_bytes()
    # The record of the batch that begins with id 8001.
    at = data.index((8001).to_bytes(8, "little") + bytes(8))
    flip(segment, at + 60, 0)
    with pytest.raises(CorruptionError, match="journal/000001 is damaged"):
        expstore.open(store_path)
    assert [f.fatal for f in repair(store_path).left].count(True) == 1
    assert repair(store_path, drop_damaged=True, dry_run=True).acts
    done = repair(store_path, drop_damaged=True)
    # Ids 3001 to 8000 would be the readable ones; 9097 to 12,000 stand in the slots of the first 2904 ids.
    assert done.left == []
    assert verify(store_path) == []
    with expstore.open(store_path) as rb:
        assert rb["number"].tolist() == sorted(range(3000, 8000), key=lambda n: n % CAPACITY)
        assert rb.extend(batch(1, 0), return_ids=True).tolist() == [8001]


def test_rows_that_no_sync_had_seen(store_path: Path) -> None:
    """Their shard is gone: they are dropped, and the rows that get their ids next can be read."""

    def work() -> list[str]:
        rb = expstore.open(store_path, capacity=CAPACITY)
        rb.storage.background.stop()
        rb.extend(batch(4000, 0))
        rb.flush()
        rb.extend(batch(2000, 4000))
        os._exit(0)

    in_child(work)
    (store_path / "columns/number/c/1").unlink()
    with pytest.raises(CorruptionError, match="number/c/1 is missing"):
        expstore.open(store_path)
    assert repair(store_path, drop_damaged=True).left == []
    assert verify(store_path) == []
    with expstore.open(store_path) as rb:
        assert (len(rb), rb.storage.last) == (4000, 4000)
        assert rb.extend(batch(2000, 8000), return_ids=True).tolist() == list(range(4001, 6001))
        assert rb["number"].tolist() == sorted([*range(1000, 4000), *range(8000, 10_000)], key=place_of)
    assert verify(store_path) == []


def place_of(number: int) -> int:
    """The index of the row with this number, in the test above."""
    return (number if number < 4000 else number - 4000) % CAPACITY


@pytest.mark.parametrize("name", ["expstore.json", "journal/000001"])
def test_irreparable_stores_stay_unchanged(store: Path, name: str) -> None:
    (store / name).write_bytes(b"nothing")
    before = read_files(store, "LOCK")
    done = repair(store, drop_damaged=True)
    assert any(finding.fatal for finding in done.left)
    assert before == read_files(store, "LOCK")


def test_a_dry_run_changes_nothing(store: Path) -> None:
    flip(store / "columns/next/reward/c/0/0", 4 * 100, 5)
    (store / "columns/number/c/1").unlink()
    flip(store / "episodes.log", 300, 0)
    (store / "columns/number/zarr.json").unlink()
    before = read_files(store)
    done = repair(store, drop_damaged=True, dry_run=True)
    assert before == read_files(store)
    assert done.lost == ((7001, 8192), (9097, 12_000))
    assert repair(store, drop_damaged=True).lost == done.lost


def test_a_locked_or_missing_store_is_refused(store: Path, tmp_path: Path) -> None:
    with expstore.open(store), pytest.raises(LockedError):
        repair(store)
    with pytest.raises(NotFoundError):
        repair(tmp_path)


class _Meeting(Disk):
    """Lets a writer try to open the store when a repair writes episodes.log."""

    def __init__(self, store: Path) -> None:
        super().__init__()
        self.store, self.refused = store, 0

    def gate(self, act: str, path: Path) -> None:
        if act == "create" and path.name == "episodes.log.tmp":
            with pytest.raises(LockedError, match="has it open"):
                expstore.open(self.store)
            self.refused += 1


@pytest.mark.guarantee("damage/repair-again")
def test_no_writer_opens_a_store_that_is_being_repaired(store: Path) -> None:
    flip(store / "episodes.log", 300, 0)
    disk = _Meeting(store)
    assert repair(store, drop_damaged=True, disk=disk).left == []
    assert disk.refused == 1
    assert verify(store) == []
    with expstore.open(store) as rb:  # the lock is free again
        assert len(rb) == CAPACITY


@pytest.mark.guarantee("damage/repair-again")
def test_a_store_that_was_opened_after_the_check_is_not_changed(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = inspect(store)
    expstore.open(store).close()
    monkeypatch.setattr(sys.modules[repair.__module__], "inspect", lambda path, **options: found)
    before = read_files(store, "LOCK")
    with pytest.raises(LockedError, match="was opened while it was checked"):
        repair(store)
    assert read_files(store, "LOCK") == before


class _Ending(Disk):
    """Ends the process before the N-th act that changes something."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.left = at

    def gate(self, act: str, path: Path) -> None:
        self.left -= 1
        if self.left == 0:
            os._exit(9)


def kill_and_repair(
    store: Path, damage: Callable[[Path], Any], kept: list[int], steps: range, count: Callable[..., None]
) -> int:
    """Kill repairs before their N-th act, then run them to the end; returns the first N that none reached."""
    for at in steps:
        path = Path(shutil.copytree(store, store.with_name(f"killed-{at}.exp")))
        damage(path)
        if (pid := os.fork()) == 0:
            try:
                torch.set_num_threads(1)
                repair(path, drop_damaged=True, disk=_Ending(at))
                os._exit(0)
            except BaseException:
                os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert status in (0, 9)
        if status == 0:
            return at
        count()
        try:
            with expstore.open(path) as rb:
                assert sorted(rb[:]["number"].tolist()) == sorted(map(number_of, kept))
        except CorruptionError:
            pass  # either it is refused, or it is repaired
        done = repair(path, drop_damaged=True)
        assert done.left == []
        assert verify(path) == []
        with expstore.open(path) as rb:
            assert sorted(rb[:]["number"].tolist()) == sorted(map(number_of, kept))
        shutil.rmtree(path)
    return steps.stop


def _several(path: Path) -> None:
    (path / "columns/number/c/1").unlink()
    flip(path / "episodes.log", 300, 0)
    (path / "columns/number/zarr.json").unlink()


@pytest.mark.guarantee(
    "damage/repair-again",
    "`expstore repair` can be killed and run again, and no other process can open the store for writing "
    "meanwhile.",
)
@pytest.mark.slow
def test_killed_in_the_middle_it_can_be_run_again(store: Path, count_cases: Callable[..., None]) -> None:
    assert kill_and_repair(store, _several, list(range(8193, 12_001)), range(1, 400, 13), count_cases) > 40


@pytest.mark.guarantee("damage/repair-again")
@pytest.mark.torture
@pytest.mark.timeout(1200)
def test_killed_before_every_act_it_can_be_run_again(store: Path, count_cases: Callable[..., None]) -> None:
    assert kill_and_repair(store, _several, list(range(8193, 12_001)), range(1, 400), count_cases) > 40


@given(
    runs=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 9), st.integers(1, 4)), max_size=8),
    deleted=st.lists(st.tuples(st.integers(1, 80), st.integers(0, 20)), max_size=4),
)
def test_deleted_ids_are_cut_out_row_by_row(
    runs: list[tuple[int, int, int]], deleted: list[tuple[int, int]]
) -> None:
    """Fragments, against sets of single rows."""
    given_up = IdSet.of((first, first + n) for first, n in deleted)
    dead = {i for first, last in given_up for i in range(first, last + 1)}
    fragments = np.array([(e, 5, n, first, stride) for e, (first, n, stride) in enumerate(runs)], np.int64)
    fragments = fragments.reshape(-1, 5).T
    cut = cut_out(fragments, given_up)

    def rows(of: Any) -> list[tuple[int, int, int]]:
        return sorted(
            (e, step + k, first + k * stride) for e, step, n, first, stride in of.T.tolist() for k in range(n)
        )

    assert rows(cut) == [row for row in rows(fragments) if row[2] not in dead]
    assert (np.diff(cut[3]) >= 0).all()


@pytest.mark.some(4)
@pytest.mark.parametrize("lost", [[0], [3], [1, 2, 3], [7], [0, 7], list(range(8))])
def test_lost_entries_of_a_log_are_filled_up(lost: list[int]) -> None:
    entries = [LogEntry(episode=0, source=1, text="a name of some length")]
    entries += [LogEntry(episode=e, source=1, length=e, text="{}" * e) for e in range(1, 8)]
    packed = [entry.pack() for entry in entries]
    data = b"".join(bytes(len(part)) if n in lost else part for n, part in enumerate(packed))
    kept, pieces = salvage(data)
    assert kept == [entry for n, entry in enumerate(entries) if n not in lost]
    filled, placed = fill_up(data, pieces, [entries[n] for n in lost])
    assert len(filled) == len(data)
    whole, rest = salvage(filled)
    assert rest == []
    assert placed == len(lost)
    assert {e.episode for e in whole} == set(range(8))


def test_the_command(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(store / "columns/next/reward/c/0/0", 4 * 100, 5)
    assert run(["repair", str(store), "--dry-run", "--drop-damaged"]) == 0
    assert "would be: 2,904 rows dropped: ids 9097 to 12000" in capsys.readouterr().out
    assert run(["repair", str(store)]) == 1
    told = capsys.readouterr()
    assert "not repaired: payload: columns/next/reward" in told.out
    assert "--drop-damaged" in told.err
    assert run(["repair", str(store), "--drop-damaged", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["lost"] == [[9097, 12_000]]
    (store / "expstore.json").write_bytes(b"")
    assert run(["repair", str(store)]) == 4


def test_a_version_is_not_repaired(store: Path, tmp_path: Path) -> None:
    """It shares files with its store; nothing of it is changed."""
    with expstore.open(store) as rb:
        made = rb.dumps(tmp_path / "versions")
    path = made.path / "columns/number/c.0"
    data = bytearray(path.read_bytes())
    data[BLOCK // 2 * 8] ^= 1
    path.unlink()
    path.write_bytes(data)
    found = verify(made.path)
    assert found
    manifest = (made.path / "expstore.json").read_bytes()
    with pytest.raises(StateError, match="is a snapshot"):
        repair(made.path, drop_damaged=True)
    assert (made.path / "expstore.json").read_bytes() == manifest
    assert verify(made.path) == found
