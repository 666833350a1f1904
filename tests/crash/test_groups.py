"""Kills while groups are written, closed, discarded and drawn: whole groups, each once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import expstore
from expstore import GroupSampler
from expstore.buffers import consumer
from expstore.disk.files import Disk
from expstore.errors import NotReadyError
from expstore.storages import ZarrStorage
from expstore.storages.engine import store
from expstore.storages.engine.open_settings import Settings
from tests.crash.killing_disks import KillingDisk, machine
from tests.support.forks import in_child
from tests.support.stores import NoKeeper

SIZE, LENGTH = 3, 2


@pytest.fixture(autouse=True)
def one_boot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "boot", 7)
    monkeypatch.setattr(store, "Keeper", NoKeeper)


def steps(key: int, member: int, first: bool) -> dict[str, Any]:
    """Return the first or the second row of a member of a group."""
    return {
        "prompt": np.array([key]),
        "traj": np.array([10 * key + member]),
        "next": {"terminated": np.array([[not first]]), "done": np.array([[not first]])},
    }


def unharmed() -> Disk:
    """Return a disk of the same boot as those that kill: on another, unsynced counts would be in doubt."""
    return KillingDisk(1 << 40, serial=True, syncs=False)


def opened(path: Path, disk: Disk, sampler: Any = None) -> Any:
    settings = Settings(group_key="prompt", group_size=SIZE, traj_key="traj")
    storage = ZarrStorage(path, disk=disk, settings=settings)
    return expstore.TensorDictReplayBuffer(storage=storage, sampler=sampler, as_numpy=True)


def write(rb: Any, key: int) -> None:
    """Write a group, its members in turns."""
    for first in (True, False):
        for member in range(SIZE):
            rb.extend(steps(key, member, first))


def check_whole(batch: Any) -> int:
    """Check that a batch is a whole group; return its key."""
    assert len(batch["prompt"]) == SIZE * LENGTH
    (key,) = set(batch["prompt"].tolist())
    assert batch["traj"].tolist() == [10 * key + n // LENGTH for n in range(SIZE * LENGTH)]
    return int(key)


def draw(source: Any, told: Path) -> None:
    """Draw all groups, and write down what returned."""
    with told.open("a") as file:
        while True:
            try:
                key = check_whole(source.sample())
            except NotReadyError:
                return
            file.write(json.dumps(key) + "\n")
            file.flush()


@pytest.mark.guarantee("consumers/groups")
@pytest.mark.usefixtures("no_syncs")
@pytest.mark.parametrize("torn", [None, 0.5])
@pytest.mark.parametrize("step", [13, pytest.param(1, marks=pytest.mark.torture)])
def test_no_half_group_is_drawn_and_none_twice_by_a_killed_writer(
    torn: float | None, step: int, tmp_path: Path, count_cases: Callable[..., None]
) -> None:
    path, told = tmp_path / "a.exp", tmp_path / "told"
    told.touch()
    with opened(path, unharmed()) as rb:
        write(rb, 0)
    next_key = 1

    def live(number: int, key: int) -> None:
        rb = opened(path, KillingDisk(number, torn=torn, serial=True, syncs=False), GroupSampler(1))
        write(rb, key)
        draw(rb, told)
        write(rb, key + 1)
        last = int(rb.groups().arrow()["group_id"].to_numpy().max())
        rb.groups.discard(last, reason="told")
        with told.open("a") as file:
            file.write(json.dumps(-last) + "\n")

    for number in range(5, 200, step):
        in_child(lambda: live(number, next_key))  # noqa: B023
        next_key += 2
        count_cases()
        if number % 3 == 0:  # otherwise each opening has an act more than the one before, and none is whole
            opened(path, unharmed()).close()
    with opened(path, unharmed(), GroupSampler(1)) as rb:
        draw(rb, told)
        groups = {row["group_id"]: row for row in rb.groups().arrow().to_pylist()}
    lines = [json.loads(line) for line in told.read_text().splitlines()]
    drawn, discarded = [key for key in lines if key >= 0], [-key for key in lines if key < 0]
    assert len(drawn) == len(set(drawn)) > 4
    assert {groups[number]["reason"] for number in discarded} <= {"told"}
    complete = {int(row["key"]) for row in groups.values() if row["status"] == "complete"}
    assert set(drawn) <= complete
    assert len(complete) - len(drawn) <= len(
        range(5, 200, step)
    )  # a kill may count a draw that never returned


@pytest.mark.guarantee("consumers/groups")
@pytest.mark.usefixtures("no_syncs")
@pytest.mark.parametrize("torn", [None, 0.5])
def test_each_group_is_drawn_once_by_a_killed_reader(
    torn: float | None, tmp_path: Path, count_cases: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, told = tmp_path / "a.exp", tmp_path / "told"
    told.touch()

    def live(number: int) -> None:
        disk = KillingDisk(number, torn=torn, serial=True, syncs=False)
        monkeypatch.setattr(consumer, "Disk", lambda: disk)
        reader = expstore.open(path, mode="r", batches={"as_numpy": True})
        learner = reader.consumer("learner", sampler=GroupSampler(1), keep="all", at="end")
        draw(learner, told)

    with opened(path, unharmed()) as rb:
        for number in range(1, 25):
            write(rb, number)
            rb.flush()
            in_child(lambda: live(number))  # noqa: B023
            count_cases()
        with rb.consumer("learner", sampler=GroupSampler(1), keep="all", at="end") as learner:
            draw(learner, told)
            keys = [check_whole(batch) for batch in learner.replay(0)]
        lines = [json.loads(line) for line in told.read_text().splitlines()]
        assert sorted(keys) == list(range(1, 25))
        assert set(lines) <= set(keys)
        assert len(lines) == len(set(lines)) > 5
