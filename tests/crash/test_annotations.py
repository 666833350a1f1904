"""Kills and power cuts while rows are annotated: each call has written all of its values, or none."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore.disk.files import Disk
from expstore.storages import ZarrStorage
from expstore.storages.columns import annotated
from expstore.storages.engine import store
from tests.crash.folder_power_cuts import disks_after
from tests.crash.killing_disks import KillingDisk, machine
from tests.support.forks import in_child
from tests.support.stores import NoKeeper, copy_folder

CALLS = 7


def rows(start: int, count: int) -> TensorDict:
    return TensorDict({"observation": torch.arange(start, start + count)[:, None].float()}, [count])


def open_buffer(path: Path, disk: Disk | None = None) -> Any:
    """A ring of 32 rows, which is never full."""
    return expstore.TensorDictReplayBuffer(storage=ZarrStorage(path, 32, disk=disk), batch_size=4)


def ids_of(call: int) -> list[int]:
    """The rows of a call: the newest one, and some before it."""
    newest = 8 + 2 * call
    return [newest, newest - 3, newest - 5]


def values_of(call: int, id: int) -> dict[str, list[float]]:
    return {"score": [100.0 * call + id], "loose": [float(call)] * ((call + id) % 4)}


def annotate(rb: Any, call: int) -> None:
    ids = ids_of(call)
    score, loose = ([values_of(call, id)[name] for id in ids] for name in ("score", "loose"))
    values = {
        "score": np.array(score, np.float32).reshape(-1),
        "loose": [np.array(x, np.float32) for x in loose],
    }
    rb.annotate(ids, values, by=str(call))


def life(path: Path, told: Path | None, disk: Disk) -> None:
    """Append and annotate; write down which calls returned."""
    rb = open_buffer(path, disk)
    for call in range(CALLS):
        rb.extend(rows(rb.storage.last, 2))
        if call == 0:
            assert rb.storage.last == 10
        annotate(rb, call)
        if told is not None:
            with told.open("ab") as file:
                file.write(b".")
        if call in (2, 4):
            rb.flush()
    rb.close()


def check(at: Path, mode: str) -> int:
    """Check that the calls that are left are the first ones, each with all of its values; return how many."""
    rb = expstore.open(at, mode=mode, batch_size=4) if mode == "r" else open_buffer(at)
    with rb:
        last = rb.storage.stored.last
        found: dict[int, dict[tuple[int, str], list[float]]] = {}
        relation = rb.sql("SELECT id, field, value, author FROM annotations").arrow().to_pylist()
        for row in relation:
            found.setdefault(int(row["author"]), {})[row["id"], row["field"]] = row["value"]
        done = sorted(found.keys() - {100})
        assert done == list(range(len(done)))
        newest: dict[tuple[int, str], list[float]] = {}
        for call in done:
            expected = {
                (id, name): value for id in ids_of(call) for name, value in values_of(call, id).items()
            }
            assert found[call] == expected
            newest |= expected
        if done:
            columns = rb.sql("SELECT _id, score, loose FROM transitions ORDER BY _id").arrow().to_pylist()
            for row in columns:
                for name in (
                    ("score", "loose") if row["_id"] not in {id for id, _ in found.get(100, ())} else ()
                ):
                    value = newest.get((row["_id"], name))
                    read = row[name] if name == "loose" or row[name] is None else [row[name]]
                    assert read == value, (row, name, value)
        if mode != "r":
            rb.extend(rows(last, 1))
            rb.annotate([last + 1, last], {"score": [1.0, 2.0]}, by="100")
            answer = rb.sql("SELECT score FROM transitions WHERE _id = ?", params=[last]).fetchall()
            assert answer == [(2.0,)]
    return len(done)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(machine, "boot", 7)
    monkeypatch.setattr(store, "Keeper", NoKeeper)
    monkeypatch.setattr(annotated, "FILE_BYTES", 600)
    monkeypatch.setattr("expstore.storages.format.annotation_log.FILE_BYTES", 600)
    folder = tmp_path / "place"
    folder.mkdir()
    with open_buffer(folder / "a.exp") as rb:
        rb.extend(rows(0, 8))
    return folder


@pytest.mark.guarantee(
    "kill/annotations",
    "A killed call of `rb.annotate` has written all of its values or none, and calls that returned all.",
)
@pytest.mark.usefixtures("no_syncs")
@pytest.mark.parametrize("torn", [None, 0.5])
@pytest.mark.parametrize("step", [9, pytest.param(1, marks=pytest.mark.torture)])
def test_killed_at_some_acts(
    place: Path, torn: float | None, step: int, tmp_path: Path, count_cases: Callable[..., None]
) -> None:
    before = place / "a.exp"
    disk = KillingDisk(serial=True, syncs=False)
    whole = tmp_path / "whole.exp"
    copy_folder(before, whole)
    life(whole, None, disk)
    counts = set()
    for number in range(1 + step // 2, disk.acts, step):
        at, told = tmp_path / f"{number}.exp", tmp_path / f"{number}.told"
        copy_folder(before, at)
        told.touch()
        in_child(lambda: life(at, told, KillingDisk(number, torn=torn, serial=True, syncs=False)))  # noqa: B023
        returned = told.stat().st_size
        check(at, "r")
        count = check(at, "a")
        assert returned <= count <= returned + 1
        assert check(at, "a") == count
        counts.add(count)
        count_cases()
        shutil.rmtree(at)
    assert len(counts) > 4


@pytest.mark.guarantee(
    "power/annotations",
    "After a power cut the first calls of `rb.annotate` have all of their values, for rows that are "
    "there, and the others none.",
)
@pytest.mark.usefixtures("no_syncs")
@pytest.mark.parametrize("cuts", [24, pytest.param(500, marks=pytest.mark.torture)])
def test_the_power_goes_while_rows_are_annotated(
    place: Path, cuts: int, tmp_path: Path, long_seed: int, count_cases: Callable[..., None]
) -> None:
    disks = tmp_path / "disks"
    disks.mkdir()
    counts = set()
    for over, at in disks_after(
        place, lambda disk: life(place / "a.exp", None, disk), disks, cuts, long_seed
    ):
        count = check(at / "a.exp", "a")
        assert count == CALLS or not over
        assert check(at / "a.exp", "a") == count
        counts.add(count)
        count_cases()
    assert len(counts) > 3


@pytest.mark.guarantee("power/annotations")
@pytest.mark.usefixtures("no_syncs")
@pytest.mark.parametrize(("boot", "calls"), [(7, 2), (8, 1)])
def test_values_that_a_power_cut_has_taken_are_cut(
    boot: int, calls: int, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head can be on the disk without its values; only a power cut can do that."""
    copy = tmp_path / "copy.exp"
    rb = open_buffer(place / "a.exp", KillingDisk(1 << 40, serial=True, syncs=False))
    rb.extend(rows(8, 2))
    annotate(rb, 0)
    rb.flush()
    rb.extend(rows(10, 2))
    annotate(rb, 1)
    copy_folder(place / "a.exp", copy)
    rb.close()
    path = max((copy / "annotations").iterdir())
    path.write_bytes(path.read_bytes()[:-4] + b"\1" * 4)
    monkeypatch.setattr(machine, "boot", boot)
    with open_buffer(copy, KillingDisk(1 << 40, serial=True, syncs=False)) as rb:
        assert len(rb) == 12
        found = rb.sql("SELECT DISTINCT author FROM annotations ORDER BY ALL").fetchall()
        assert found == [(str(call),) for call in range(calls)]
