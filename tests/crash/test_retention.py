"""Kill a writer before each operation of applying a retention policy, and check the store."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

import expstore
from expstore.core import tuning
from expstore.core.id_set import IdSet
from expstore.disk.files import Disk
from expstore.errors import CorruptionError
from expstore.maintenance import verify
from expstore.storages import ArrowStorage, ZarrStorage
from expstore.storages.columns.flat import FlatColumn
from expstore.storages.engine import delete, store
from expstore.storages.engine.open_settings import Settings
from tests.crash.folder_power_cuts import disks_after
from tests.crash.killing_disks import KillingDisk, machine
from tests.support.stores import NoKeeper, copy_folder

pytestmark = pytest.mark.index

ROWS = 600
LAYOUTS: dict[str, Any] = {
    "flat": {"layout": "flat"},
    "packed": {"layout": {"columns": "flat", "fields": {"frame": {"layout": "packed", "rows": 64}}}},
    "segments": {"layout": "arrow"},
}


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let two extends make a segment."""
    monkeypatch.setattr(tuning, "ARROW_SEGMENT_BATCHES", 2)


def filled(path: Path, episodes: int, **more: Any) -> None:
    with expstore.open(path, seed=1, **more) as rb:
        for number in range(1, episodes + 1):
            done = torch.zeros(ROWS, 1, dtype=torch.bool)
            done[-1] = True
            frames = torch.full((ROWS, 2048), number, dtype=torch.uint8)
            ends = {"done": done, "terminated": done}
            rows: Any = {"frame": frames, "number": torch.full((ROWS,), number), "next": ends}
            if more.get("layout") == "arrow":
                rows["frame"] = NonTensorStack(*[[number] * (step % 5 + 1) for step in range(ROWS)])
            rb.extend(TensorDict(rows, [ROWS]))


def check_whole(rb: Any, kept: set[int]) -> None:
    """Compare a store of six episodes with the episodes that it must have."""
    found = rb.sql("SELECT number, count(*) FROM transitions GROUP BY number ORDER BY number").fetchall()
    assert found == [(number, ROWS) for number in sorted(kept)]
    live = dict(rb.sql("SELECT episode_id, live_rows FROM episodes").fetchall())
    assert live == {number: ROWS * (number in kept) for number in range(1, 7)}
    fragments = rb.sql("SELECT episode_id, length FROM fragments ORDER BY first_id").fetchall()
    assert fragments == found
    values = rb[:]
    if rb.storage.kind == "arrow":
        wanted = [[number] * (step % 5 + 1) for number in sorted(kept) for step in range(ROWS)]
        assert list(values["frame"]) == wanted
    else:
        assert (values["frame"] == values["number"][:, None]).all()


def segments(path: Path) -> list[int]:
    """Return the first ids of the segments, from their names."""
    return [int(one.stem) for one in sorted((path / "segments").glob("*.arrows"))]


def open_with(path: Path, disk: Disk) -> ZarrStorage:
    """Open a store for writing, with a given disk."""
    kind = ArrowStorage if (path / "segments").exists() else ZarrStorage
    return kind(path, disk=disk, settings=Settings(on_sigterm="ignore"))


def killed(path: Path, at: int, act: Callable[[ZarrStorage], Any], monkeypatch: pytest.MonkeyPatch) -> bool:
    """Run an operation in a child that is killed before file operation `at`; return whether it finished."""
    child = os.fork()
    if not child:
        try:
            monkeypatch.setattr(tuning, "CHECKPOINT_SECONDS", 1e9)
            disk = KillingDisk(serial=True)
            storage = open_with(path, disk)
            disk.arm(at)
            act(storage)
            storage.sync()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert status in (0, 9), status
    return status == 0


@pytest.mark.guarantee("kill/whole")
@pytest.mark.guarantee("keep/policy")
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("layout", "going"), [("flat", [1, 3, 4]), ("packed", [2, 4]), ("segments", [1, 3, 4])]
)
def test_killed_before_some_acts(
    tmp_path: Path, layout: str, going: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_everywhere(tmp_path, layout, going, monkeypatch, step=9)


@pytest.mark.torture
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("going", [[1, 2, 3], [2, 4], [1, 3, 4]])
def test_killed_before_every_act(
    tmp_path: Path,
    layout: str,
    going: list[int],
    monkeypatch: pytest.MonkeyPatch,
    count_cases: Callable[..., None],
) -> None:
    count_cases(kill_everywhere(tmp_path, layout, going, monkeypatch, step=1))


def kill_everywhere(
    tmp_path: Path, layout: str, going: list[int], monkeypatch: pytest.MonkeyPatch, *, step: int
) -> int:
    """Check after each kill: all episodes are whole, the deleted ones are all there or all gone.

    Returns:
        The number of operations.
    """
    filled(tmp_path / "a.exp", 6, **LAYOUTS[layout])
    stay, outcomes, at, ended = {1, 2, 3, 4, 5, 6} - set(going), set(), 1, False
    while not ended:
        path = tmp_path / f"{at}.exp"
        copy_folder(tmp_path / "a.exp", path)
        ended = killed(path, at, lambda storage: storage.retention.delete(np.array(going)), monkeypatch)
        assert [f for f in verify(path) if f.kind != "index"] == [], at
        with expstore.open(path, batch_size=8) as rb:
            found = {n for (n,) in rb.sql("SELECT DISTINCT number FROM transitions").fetchall()}
            outcomes.add(frozenset(found))
            assert stay <= found, at
            check_whole(rb, found)
            rb.storage.retention.delete(np.array(going))
            check_whole(rb, stay)
            if layout == "segments":
                assert set(segments(path)) <= {1 + ROWS * (n - 1) for n in (1, 3, 5) if {n, n + 1} & stay}
        assert verify(path) == [], at
        shutil.rmtree(path)
        at += step
    assert outcomes == {frozenset(stay), frozenset(range(1, 7))}
    return at - step


def look(path: Path) -> frozenset[int]:
    """Return the episodes of a store in segments, after checking that each is whole."""
    with contextlib.closing(open_with(path, Disk())) as storage:
        texts, numbers = storage.read(storage.window.ids(), [0, 1])
        found = sorted(set(numbers.tolist()))
        assert numbers.tolist() == np.repeat(found, ROWS).tolist()
        assert texts.to_pylist() == [[number] * (step % 5 + 1) for number in found for step in range(ROWS)]
    return frozenset(found)


def cut_anywhere(tmp_path: Path, cuts: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut the power during two deletions; kept episodes are whole, and synced deletions remain."""
    monkeypatch.setattr(machine, "boot", 7)
    monkeypatch.setattr(store, "Keeper", NoKeeper)
    place, disks, outcomes = tmp_path / "place", tmp_path / "disks", set()
    place.mkdir()
    disks.mkdir()
    filled(place / "a.exp", 6, layout="arrow")

    def act(disk: Disk) -> None:
        storage = open_with(place / "a.exp", disk)
        storage.retention.delete(np.array([1]))
        storage.sync()
        storage.retention.delete(np.array([3, 4]))
        storage.close()

    for over, at in disks_after(place, act, disks, cuts, seed):
        found = look(at / "a.exp")
        outcomes.add(found)
        assert found == {2, 5, 6} or not over
    assert verify(place / "a.exp") == []
    assert outcomes >= {frozenset({1, 2, 3, 4, 5, 6}), frozenset({2, 5, 6})}
    assert outcomes <= {frozenset({1, 2, 3, 4, 5, 6}), frozenset({2, 3, 4, 5, 6}), frozenset({2, 5, 6})}


@pytest.mark.guarantee("keep/policy")
@pytest.mark.slow
@pytest.mark.usefixtures("no_syncs")
@pytest.mark.parametrize("cuts", [40, pytest.param(1500, marks=pytest.mark.torture)])
@pytest.mark.timeout(1200)
def test_the_power_goes_while_rows_in_segments_leave(
    tmp_path: Path,
    cuts: int,
    long_seed: int,
    monkeypatch: pytest.MonkeyPatch,
    count_cases: Callable[..., None],
) -> None:
    cut_anywhere(tmp_path, cuts, long_seed, monkeypatch)
    count_cases(cuts)


# -- teeth -------------------------------------------------------------------------------------------


def give_back_first(deletion: Any, going: IdSet) -> tuple[IdSet, IdSet]:
    """Free segments before the record is written, which the protocol forbids."""
    rows = deletion._store.state
    (segments,), window = rows.columns.shared, rows.stored
    segments.note_left(window.low, window.deleted.join(going))
    segments.give_up()
    return RECORD(deletion, going)


RECORD = delete.Deletion._record


@pytest.mark.guarantee("keep/policy")
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_space_given_back_before_the_record_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delete.Deletion, "_record", give_back_first)
    with pytest.raises((AssertionError, CorruptionError)):
        kill_everywhere(tmp_path, "segments", [1, 3, 4], monkeypatch, step=1)


def give_back_unsynced(deletion: Any, going: IdSet) -> tuple[IdSet, IdSet, Any]:
    """Write the record, and free space before it is on the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deletion._store.checkpoints, "sync_journal", lambda files, folders: None)
        return RECORD(deletion, going)


@pytest.mark.guarantee("keep/policy")
@pytest.mark.slow
@pytest.mark.usefixtures("no_syncs")
@pytest.mark.timeout(1200)
def test_a_record_that_is_not_synced_first_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delete.Deletion, "_record", give_back_unsynced)
    monkeypatch.setattr(FlatColumn, "_punch", lambda column, ids: set())  # only segments may detect it
    with pytest.raises(CorruptionError, match="is missing|are missing"):
        cut_anywhere(tmp_path, 200, 0, monkeypatch)  # 1 in 40 hits the fault
