"""Resizing and merging stores: killed at any operation, and power cuts anywhere.

The next opening finds the old store or the new one, and of a merged store all or nothing.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import expstore
from expstore.core import tuning
from expstore.disk.files import Disk
from expstore.maintenance import verify
from expstore.storages.engine import store
from tests.crash.folder_power_cuts import disks_after
from tests.crash.killing_disks import KillingDisk, machine
from tests.support.framed_rows import framed_rows
from tests.support.stores import NoKeeper, copy_folder
from tests.support.tuned import set_spare_slots

pytestmark = [pytest.mark.index, pytest.mark.usefixtures("no_syncs", "short")]

FIELDS = {"frame": {"layout": "packed", "rows": 4}, "next.frame": {"layout": "packed", "rows": 4}}
FORMER, NEW, ROWS = 24, 40, 50
CUTS = [24, pytest.param(1500, marks=pytest.mark.torture)]


@pytest.fixture(scope="module")
def short() -> Iterator[None]:
    """Set short shards, few spare slots, and no background syncs."""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "PACKED_SHARD_ROWS", 16)
        patch.setattr(tuning, "UNBOUNDED_PACKED_SHARD_ROWS", 16)
        patch.setattr(tuning, "PACKED_LOOKBACK_ROWS", (4, 8))
        set_spare_slots(patch, 8)
        patch.setattr(store, "Keeper", NoKeeper)
        yield


def make(path: Path, first: int = 0, capacity: int | None = FORMER) -> Path:
    with expstore.open(path, capacity=capacity, layout=expstore.Layout(fields=FIELDS), seed=1) as rb:
        for start in range(first, first + ROWS, 10):
            rb.extend(framed_rows(10, start, shape=(40,)), source="arm")
        rb.update_priority(id=[ROWS], priority=[4.0])
        rb.snapshots.tag("one")
    return path


def picture(path: Path, mode: Any = "a", *, sql: bool = False) -> dict[str, Any]:
    """Return what a store says of itself; its episodes only with `sql`, which takes longer."""
    with expstore.open(path, mode=mode) as rb:
        storage = rb.storage
        ids = storage.window.ids()
        columns = storage.read(ids, range(len(storage.schema.fields) + 5))
        episodes = rb.sql("SELECT * FROM episodes ORDER BY ALL").fetchall() if sql else []
        if not sql:
            (rb.storage if mode == "a" else rb).close()  # without an index
        return {
            "capacity": storage.capacity,
            "ids": ids.tolist(),
            "rows": [column.tobytes() for column in columns],
            "log": [e.text for e in storage.state.log.read()] if sql else [],
            "episodes": episodes,
            "versions": [version.tag for version in expstore.versions(path)],
        }


def killed_at(act: Callable[[Disk], Any], at: int) -> None:
    """Run an operation in a child that is killed at this file operation, if it is reached."""
    pid = os.fork()
    if not pid:
        try:
            act(KillingDisk(at, torn=0.5 if at % 3 == 0 else None, serial=True))
        finally:
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert status == 0 or os.WTERMSIG(status) == signal.SIGKILL


def moments(trace: Sequence[str], stride: int) -> Iterator[int]:
    """Yield numbers of operations: all that change files outside of the new store, and some others."""
    names = (
        "rename load",
        "rename columns",
        "rename journal",
        "rename checksums",
        "rename out.exp",
        "rmtree",
    )
    for at, act in enumerate(trace, 1):
        if act.startswith(names) or trace[at - 2].startswith(names) or at % stride == 1 % stride:
            yield at


SOME = [pytest.param(23, id="some"), pytest.param(1, marks=pytest.mark.torture, id="all")]


@pytest.mark.guarantee(
    "keep/resize-whole",
    "After a kill or a power cut, `resize` and `merge` have done nothing or everything; refused ones "
    "change nothing.",
)
@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("stride", SOME)
@pytest.mark.parametrize("new", [NEW, 9])
def test_a_resize_is_killed(tmp_path: Path, new: int, stride: int, count_cases: Callable[..., None]) -> None:
    model, copy = make(tmp_path / "model.exp"), tmp_path / "copy.exp"
    expected, disk = copy_folder(model, tmp_path / "expected.exp"), KillingDisk(serial=True)
    former, former_told = picture(model), picture(model, sql=True)
    expstore.resize(expected, capacity=new, disk=disk)
    wanted, told = picture(expected), picture(expected, sql=True)
    found, refused = [], 0
    for number, at in enumerate(moments(disk.trace, stride)):
        count_cases()
        copy_folder(model, copy)
        killed_at(lambda disk: expstore.resize(copy, capacity=new, disk=disk), at)
        try:
            seen = picture(copy, "r")
        except expstore.errors.StorageError as exc:  # while the parts are moved; a writer finishes that
            if exc.kind != "half_loaded":
                raise
            refused, seen = refused + 1, wanted
        now = picture(copy, sql=number % 5 == 0)
        found.append(now["capacity"])
        if number % 5 == 0:
            assert now == (former_told if now["capacity"] == FORMER else told), f"act {at}"
            assert verify(copy) == []
        else:
            assert now == seen == (former if now["capacity"] == FORMER else wanted), f"act {at}"
        assert seen["ids"] == now["ids"]
        assert [name for name in os.listdir(copy) if name.startswith("swap")] == []
        shutil.rmtree(copy)
    assert sorted(found, key=lambda capacity: capacity != FORMER) == found  # the capacity never changes back
    assert found.count(FORMER) > 8
    assert found.count(new) > 8
    assert refused < 16


@pytest.mark.guarantee("keep/resize-whole")
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("stride", SOME)
def test_a_merge_is_killed(tmp_path: Path, stride: int, count_cases: Callable[..., None]) -> None:
    paths = [make(tmp_path / "a.exp"), make(tmp_path / "b.exp", 100, None)]
    before, out, disk = [picture(path) for path in paths], tmp_path / "out.exp", KillingDisk(serial=True)
    expstore.merge(paths, out=out, fields=FIELDS, disk=disk)
    wanted, there = picture(out), []
    assert len(wanted["ids"]) == FORMER + ROWS
    shutil.rmtree(out)
    for number, at in enumerate(moments(disk.trace, stride)):
        count_cases()
        killed_at(lambda disk: expstore.merge(paths, out=out, fields=FIELDS, disk=disk), at)
        there.append(out.exists())
        if not there[-1] and number % 9 == 5:  # remains of the killed process block nothing
            expstore.merge(paths, out=out, fields=FIELDS)
            assert sorted(os.listdir(tmp_path)) == ["a.exp", "b.exp", "out.exp"]
        if out.exists():
            assert picture(out) == wanted
            assert verify(out) == []
            shutil.rmtree(out)
    assert [picture(path) for path in paths] == before
    assert sorted(there) == there
    assert there.count(False) > 8
    assert there[-1]


# -- power cuts --------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder for disks; each opening is a new start of the machine."""
    monkeypatch.setattr(machine, "boot", 7)
    made = tmp_path / "disks"
    made.mkdir()
    return made


@pytest.mark.guarantee("keep/resize-whole")
@pytest.mark.slow
@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.timeout(1200)
def test_the_power_goes_while_a_store_is_resized(
    tmp_path: Path, folder: Path, cuts: int, long_seed: int, count_cases: Callable[..., None]
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    model = make(place / "run.exp")
    former = picture(model)
    expected = copy_folder(model, tmp_path / "expected.exp")
    expstore.resize(expected, capacity=9)
    wanted, found = picture(expected), set()

    def act(disk: Disk) -> None:
        expstore.resize(model, capacity=9, disk=disk)

    for over, at in disks_after(place, act, folder, cuts, long_seed):
        count_cases()
        now = picture(at / "run.exp")
        assert now == (former if now["capacity"] == FORMER else wanted)
        assert now["capacity"] == 9 or not over
        found.add(now["capacity"])
    assert found == {FORMER, 9}


@pytest.mark.slow
@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.timeout(1200)
def test_the_power_goes_while_stores_are_merged(
    tmp_path: Path, folder: Path, cuts: int, long_seed: int, count_cases: Callable[..., None]
) -> None:
    paths = [make(tmp_path / "a.exp"), make(tmp_path / "b.exp", 100, None)]
    place = tmp_path / "place"
    place.mkdir()

    def act(disk: Disk) -> None:
        expstore.merge(paths, out=place / "out.exp", fields=FIELDS, disk=disk)

    wanted, there = None, set()
    for over, at in disks_after(place, act, folder, cuts, long_seed):
        count_cases()
        out = at / "out.exp"
        there.add(out.exists())
        assert out.exists() or not over
        if out.exists():
            found = picture(out)
            wanted = wanted or found
            assert found == wanted
    assert there == {True, False}
    assert wanted is not None
    assert len(wanted["ids"]) == FORMER + ROWS
