"""Swaps of several entries: interrupted anywhere, one leaves the former state or the new one."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import google_crc32c
import pytest

from expstore.disk.files import Disk
from expstore.errors import CorruptionError
from expstore.storages.format.swap import SWAP, TEMPORARY, Swap, current_path, finish_swap, is_half_replaced
from tests.support.gated_disk import GatedDisk

pytestmark = pytest.mark.usefixtures("no_syncs")  # tests/crash has the power cuts

FORMER = {
    "expstore.json": "former",
    "checksums": "former sums",
    "columns/a/c": "former a",
    "columns/b/c": "b",
    "journal/1": "former records",
}
#: Swap -> (the files that are built, the files afterwards).
SWAPS = {
    Swap(added=("columns/new/deep",), replaced=("checksums",)): (
        {"expstore.json": "new", "checksums": "new sums", "columns/new/deep/c": "added"},
        FORMER | {"expstore.json": "new", "checksums": "new sums", "columns/new/deep/c": "added"},
    ),
    Swap(replaced=("checksums",), removed=("columns/a",)): (
        {"expstore.json": "new", "checksums": "new sums"},
        {
            "expstore.json": "new",
            "checksums": "new sums",
            "columns/b/c": "b",
            "journal/1": "former records",
        },
    ),
    Swap(replaced=("columns", "segments", "checksums", "journal")): (
        {"expstore.json": "new", "columns/z/c": "z", "segments/1": "s", "journal/7": "new records"},
        {
            "expstore.json": "new",
            "checksums": "former sums",  # the change has none
            "columns/z/c": "z",
            "segments/1": "s",  # the store had none
            "journal/7": "new records",
        },
    ),
}


def interrupting_disk(at: int = 0) -> GatedDisk:
    """Return a disk that raises KeyboardInterrupt before operation number `at`, counted from 1."""
    numbers = itertools.count(1)

    def interrupt(act: str, path: Path) -> None:
        if next(numbers) == at:
            raise KeyboardInterrupt

    return GatedDisk(interrupt)


def write(folder: Path, content: dict[str, str]) -> None:
    for name, text in content.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def files_of(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): path.read_text()
        for path in folder.rglob("*")
        if path.is_file() and not {SWAP, TEMPORARY} & set(path.relative_to(folder).parts)
    }


def prepare(folder: Path, swap: Swap, *, new: dict[str, str]) -> Path:
    write(folder, FORMER)
    write(folder / TEMPORARY, new)
    swap.save(Disk(), folder)
    return folder


def is_interrupted(disk: Disk, store: Path, swap: Swap | None) -> bool:
    """Commit a swap if one is passed, and finish it; return whether the disk interrupted it."""
    try:
        if swap is not None:
            swap.commit(disk, store)
        finish_swap(disk, store)
    except KeyboardInterrupt:
        return True
    return False


@pytest.mark.parametrize("swap", SWAPS)
def test_a_swap_is_one_act(tmp_path: Path, swap: Swap) -> None:
    new, after = SWAPS[swap]
    states: list[bool] = []
    for at in range(1, 100):
        store = prepare(tmp_path / str(at), swap, new=new)
        if not is_interrupted(interrupting_disk(at), store, swap):
            assert (files_of(store), states[-1]) == (after, True)
            break
        committed = (store / "expstore.json").read_text() == "new"
        sums = current_path(Disk(), store, "checksums").read_text()
        assert sums == ("new sums" if committed and "checksums" in new else "former sums")
        again = 1
        while is_interrupted(interrupting_disk(again), store, None):  # the opening is killed, too
            again += 1
        assert files_of(store) == (after if committed else FORMER), f"interrupted before operation {at}"
        assert not (store / SWAP).exists()
        assert not (store / TEMPORARY).exists()
        states.append(committed)
    assert states == sorted(states)
    assert 0 < sum(states) < len(states)


def test_readers_are_told_of_content_that_is_half_replaced(tmp_path: Path) -> None:
    """From the commit until everything is in its place: before and afterwards the store is whole."""
    for swap, (new, _) in SWAPS.items():
        told = []
        for at in range(1, 100):
            store = prepare(tmp_path / f"{len(swap.replaced)}{len(swap.added)}-{at}", swap, new=new)
            interrupted = is_interrupted(interrupting_disk(at), store, swap)
            half = is_half_replaced(Disk(), store, "journal")
            told.append(half)
            whole = files_of(store).items() >= {("journal/1", "former records"), ("columns/b/c", "b")}
            assert half or whole or files_of(store).items() >= {("journal/7", "new records")}
            if not interrupted:
                break
        assert any(told) == ("journal" in swap.replaced)
        assert not told[0]
        assert not told[-1]


def test_a_forged_list_is_damage(tmp_path: Path) -> None:
    for data in ({"added": ["../elsewhere"]}, {"removed": ["/etc"]}, {"moved": []}, {"added": [1]}, []):
        crc = google_crc32c.value(json.dumps(data, sort_keys=True).encode())
        write(tmp_path, {"swap/list": json.dumps({"swap": data, "crc32c": crc})})
        with pytest.raises(CorruptionError, match="list is damaged"):
            finish_swap(Disk(), tmp_path)
