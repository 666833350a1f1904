"""A copy of a closed store by hard links, as `cp -al` makes it, never shares what is written in place.

The truth is a copy by bytes with the same operations.
"""

from __future__ import annotations

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
from expstore.disk.files import Disk
from expstore.errors import LockedError, StorageError
from expstore.maintenance import repair, verify
from expstore.storages.engine.open_settings import Settings
from expstore.storages.factory import ArrowStorage, ZarrStorage
from tests.crash.killing_disks import KillingDisk
from tests.support.gated_disk import GatedDisk, refuse
from tests.support.stores import read_files

pytestmark = [pytest.mark.index, pytest.mark.usefixtures("no_syncs", "small_files")]

PACKED = {"columns": "flat", "fields": {"frame": {"layout": "packed", "rows": 4}}}
LAYOUTS: dict[str, Any] = {
    "flat": "flat",
    "packed": expstore.Layout(fields=PACKED["fields"]),
    "arrow": "arrow",
}


def rows(first: int, count: int, layout: str) -> TensorDict:
    """Return episodes of 8 rows that follow from their numbers."""
    number = torch.arange(first, first + count)
    frames: Any = number[:, None].expand(count, 16).to(torch.uint8).contiguous()
    if layout == "arrow":
        frames = NonTensorStack(*[f"frame {n}" * (n % 3) for n in number.tolist()])
    done = (number % 8 == 7)[:, None]
    return TensorDict(
        {"number": number, "frame": frames, "next": {"reward": number[:, None].float(), "done": done}},
        [count],
    )


def make(path: Path, layout: str, capacity: int | None) -> Path:
    with expstore.open(path, capacity=capacity, layout=LAYOUTS[layout], batch_size=4, seed=1) as rb:
        for first in range(0, 64, 16):
            rb.extend(rows(first, 16, layout), source="arm", idempotency_key=f"key {first}")
            rb.flush()
        rb.update_priority(id=[60, 61], priority=[3.0, 4.0])
        rb.episodes.annotate(7, level="high")
        rb.sql("SELECT 1")
    return path


def write(path: Path, layout: str, first: int) -> None:
    """Write everything that a store writes in place."""
    with expstore.open(path, batch_size=4) as rb:
        growing = rb.storage.capacity is None
        for start in range(first, first + 80, 16):
            rb.extend(rows(start, 16, layout), source="arm", idempotency_key=f"key {start}")
        rb.update_priority(id=[rb.storage.last], priority=[float(first)])
        rb.episodes.annotate(8, level=first)
        if layout == "flat":
            rb[torch.arange(len(rb) - 3, len(rb))] = rows(first + 500, 3, layout)
        rb.sample()
        if growing:
            rb.episodes.delete("episode_id IN (1, 2, 5)")
        rb.flush()
        rb.extend(rows(first + 300, 3, layout))


def picture(path: Path, mode: Any = "r") -> dict[str, Any]:
    with expstore.open(path, mode=mode, batch_size=4, seed=3 if mode == "r" else None) as rb:
        return look(rb)


def look(rb: Any) -> dict[str, Any]:
    """Return what a store says of itself, without times."""
    storage = rb.storage
    ids = storage.window.ids()
    columns = storage.read(ids, range(len(storage.schema.fields) + 3))
    return {
        "ids": ids.tolist(),
        "columns": [
            column.tolist() if isinstance(column, np.ndarray) else column.to_pylist() for column in columns
        ],
        "priorities": storage.priorities.values[storage.geometry.slot_of(ids)].tolist(),
        "transitions": rb.sql("SELECT * EXCLUDE (_time) FROM transitions ORDER BY _id").fetchall(),
        "episodes": rb.sql(
            "SELECT episode_id, length, live_rows, return, info FROM episodes ORDER BY 1"
        ).fetchall(),
    }


def link(source: Path, target: Path) -> Path:
    """Copy a folder as `cp -al` does."""
    return Path(shutil.copytree(source, target, copy_function=os.link))


@pytest.mark.slow
@pytest.mark.some(4)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("capacity", [48, None], ids=["ring", "growing"])
def test_both_sides_can_be_written(tmp_path: Path, layout: str, capacity: int | None) -> None:
    first = make(tmp_path / "a.exp", layout, capacity)
    truth = [shutil.copytree(first, tmp_path / f"truth {side}.exp") for side in "ab"]
    second = link(first, tmp_path / "b.exp")
    before = read_files(second)
    assert [finding.kind for finding in verify(second)] == ["links"]
    with expstore.open(second, mode="r") as reader:
        seen = look(reader)
        for side, path in enumerate((first, second)):
            write(path, layout, 1000 * (side + 1))
            write(truth[side], layout, 1000 * (side + 1))
            if path == first:
                assert read_files(second) == before
                assert look(reader) == seen == picture(second)
        reader.refresh()
        assert look(reader) == picture(second) != seen
    for path, true in zip((first, second), truth, strict=True):
        assert picture(path) == picture(true)
        assert picture(path, "a") == picture(true, "a")
        assert verify(path) == []


def test_a_reader_follows_a_store_that_was_copied_under_it(tmp_path: Path) -> None:
    path = make(tmp_path / "a.exp", "flat", 48)
    with expstore.open(path, mode="r", batch_size=4) as reader:
        assert look(reader)["ids"][-1] == 64
        link(path, tmp_path / "b.exp")
        with expstore.open(path, batch_size=4) as rb:
            rb.extend(rows(64, 4, "flat"))
            rb.flush()
            reader.refresh()
            assert sorted(reader[:]["number"].tolist()) == list(range(20, 68))


def test_verify_names_the_files_and_repair_copies_them(tmp_path: Path) -> None:
    path = make(tmp_path / "a.exp", "flat", 48)
    link(path, tmp_path / "b.exp")
    (finding,) = verify(path)
    assert (finding.kind, finding.path, finding.fatal) == ("links", "STATE", False)
    assert finding.message.startswith("STATE, LOCK, episodes.log, checksums and ")
    assert "files that had hard links copied" in repair(path).acts
    assert verify(path) == []
    os.link(path / "columns/number/c/0", tmp_path / "shard")
    assert [(finding.path, finding.kind) for finding in verify(path)] == [("columns/number/c/0", "links")]


@pytest.mark.parametrize("layout", ["packed", "arrow"])
def test_finished_files_stay_shared_with_versions(tmp_path: Path, layout: str) -> None:
    path = make(tmp_path / "a.exp", layout, None)
    with expstore.open(path) as rb:
        rb.dumps(tmp_path / "versions")

    def shared() -> set[int]:
        return {file.stat().st_ino for file in path.rglob("*") if file.is_file() and file.stat().st_nlink > 1}

    before = shared()
    assert before
    with expstore.open(path) as rb:
        rb.extend(rows(64, 16, layout))
    assert shared() == before
    assert verify(path) == []


def test_holes_and_permissions_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(1 << 24)
        os.pwrite(file.fileno(), b"data", 1 << 23)
    path.chmod(0o640)
    os.link(path, tmp_path / "other")
    Disk().open(path).close()
    assert path.stat().st_ino != (tmp_path / "other").stat().st_ino
    assert path.read_bytes() == (tmp_path / "other").read_bytes()
    assert path.stat().st_mode & 0o777 == 0o640
    assert path.stat().st_blocks * 512 < 1 << 20
    assert sorted(os.listdir(tmp_path)) == ["file", "other"]


def test_a_full_disk_leaves_the_file_and_says_what_was_copied(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"data")
    os.link(path, tmp_path / "other")
    with pytest.raises(StorageError, match="cannot copy .*file, which has hard links") as caught:
        GatedDisk(refuse("write", error=OSError(28, os.strerror(28)))).open(path)
    assert caught.value.kind == "disk_full"
    assert sorted(os.listdir(tmp_path)) == ["file", "other"]
    assert path.samefile(tmp_path / "other")


# -- LOCK ------------------------------------------------------------------------------------------------


def test_a_lock_that_is_a_hard_link_is_not_written_through(tmp_path: Path) -> None:
    path = make(tmp_path / "a.exp", "flat", 48)
    victim = tmp_path / "victim"
    victim.write_bytes(b"PRECIOUS" * 100)
    (path / "LOCK").unlink()
    os.link(victim, path / "LOCK")
    expstore.open(path).close()
    assert victim.read_bytes() == b"PRECIOUS" * 100
    assert not (path / "LOCK").samefile(victim)


def test_a_copy_of_a_store_that_is_being_written_cannot_be_opened(tmp_path: Path) -> None:
    path = make(tmp_path / "a.exp", "flat", 48)
    with expstore.open(path):
        copy = link(path, tmp_path / "b.exp")
        with pytest.raises(LockedError, match=f"this process .{os.getpid()}. has it open"):
            expstore.open(copy)
        assert (copy / "LOCK").samefile(path / "LOCK")
    expstore.open(copy).close()


# -- kills -----------------------------------------------------------------------------------------------


def open_storage(path: Path, disk: Disk) -> ZarrStorage:
    kind = ArrowStorage if (path / "segments").exists() else ZarrStorage
    return kind(path, disk=disk, settings=Settings(on_sigterm="ignore"))


def killed_at(path: Path, at: int) -> bool:
    """Open a store in a child that is killed before file operation `at`; return whether it got that far."""
    child = os.fork()
    if not child:
        try:
            open_storage(path, KillingDisk(at, torn=0.5 if at % 3 == 0 else None, serial=True))
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status in (0, 9), status
    return status == 9


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.some(4)
@pytest.mark.parametrize("stride", [23, pytest.param(1, marks=pytest.mark.torture)])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("capacity", [48, None], ids=["ring", "growing"])
def test_killed_while_files_are_copied(
    tmp_path: Path, layout: str, capacity: int | None, stride: int, count_cases: Callable[..., None]
) -> None:
    path, at = make(tmp_path / "a.exp", layout, capacity), 1
    true, before = picture(path), read_files(path)
    while killed_at(copy := link(path, tmp_path / f"{at}.exp"), at):
        count_cases()
        assert picture(copy) == true, at
        assert picture(copy, "a") == true, at
        assert verify(copy) == [], at
        assert read_files(path) == before, at
        shutil.rmtree(copy)
        at += stride
    assert at > 60
