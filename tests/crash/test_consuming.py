"""Kills and power cuts while a consumer consumes: each row is committed once, whatever is killed.

A child draws and commits until it is killed at an act on files, and the next child continues in the same
store. The child writes the store, too, or it reads the store that its parent writes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore.buffers import consumer
from expstore.disk.files import Disk
from expstore.errors import NotReadyError
from expstore.storages import ZarrStorage
from expstore.storages.engine import store
from expstore.storages.format import draw_log
from tests.crash.folder_power_cuts import disks_after
from tests.crash.killing_disks import KillingDisk, machine
from tests.support.forks import in_child
from tests.support.stores import NoKeeper

BATCH, COMMIT_EVERY, ROWS = 3, 5, 7


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "boot", 7)
    monkeypatch.setattr(store, "Keeper", NoKeeper)
    monkeypatch.setattr(draw_log, "SEGMENT_BYTES", 700)


def rows(start: int, mark: float = 0.0, count: int = ROWS) -> TensorDict:
    seen = torch.arange(start, start + count)[:, None].float()
    return TensorDict({"observation": seen, "mark": torch.full((count,), mark)}, [count])


def write(path: Path, disk: Disk) -> Any:
    return expstore.TensorDictReplayBuffer(
        storage=ZarrStorage(path, disk=disk), batch_size=BATCH, with_ids=True
    )


def learn(rb: Any, told: Path, most: int = 100) -> Any:
    """Draw until no row is left; commit every few draws; write down what returned."""
    c = rb.consumer("learner", sampler="consuming", keep="all")
    with told.open("a") as file:
        for number in range(c.position["draw"], c.position["draw"] + most):
            try:
                ids = c.sample()["id"].tolist()
            except NotReadyError:
                break
            file.write(json.dumps([number, ids]) + "\n")
            file.flush()
            if number % COMMIT_EVERY == COMMIT_EVERY - 1:
                c.commit()
                file.write(json.dumps([number, None]) + "\n")
                file.flush()
    return c


def check(rb: Any, told: Path) -> int:
    """Draw the rest; check that each row was committed once. Return how many draws were committed before."""
    lines = [json.loads(line) for line in told.read_text().splitlines()]
    committed = rb.consumers.list()[0].committed
    with rb.consumer("learner", sampler="consuming", keep="all") as c:
        assert (
            c.committed == committed >= max((number + 1 for number, ids in lines if ids is None), default=0)
        )
    c = learn(rb, told)
    c.commit()
    drawn = [batch["id"].tolist() for batch in c.replay(0)]
    assert all(drawn[number] == ids for number, ids in lines if ids is not None)
    counts = Counter(id for ids in drawn for id in ids)
    assert counts == dict.fromkeys(range(1, rb.storage.last + 1), 1)
    c.close()
    return committed


@pytest.mark.guarantee("consumers/consumed")
@pytest.mark.usefixtures("no_syncs")
@pytest.mark.parametrize("torn", [None, 0.5])
@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.torture)])
def test_each_row_is_committed_once_by_a_learner_that_writes(
    torn: float | None, step: int, tmp_path: Path, count_cases: Callable[..., None]
) -> None:
    path, told = tmp_path / "a.exp", tmp_path / "told"
    told.touch()
    with write(path, Disk()) as rb:
        rb.extend(rows(0))

    def live(number: int) -> None:
        at = number if number % 4 == 0 else 0  # in the opening
        disk = KillingDisk(at, torn=torn, serial=True, syncs=False)
        rb = write(path, disk)
        disk.arm(number)
        rb.extend(rows(rb.storage.last))
        learn(rb, told, 8)

    for number in range(1, 60, step):
        in_child(lambda: live(number))  # noqa: B023
        count_cases()
    with write(path, Disk()) as rb:
        assert check(rb, told) > 5
        assert rb.storage.last > 50


@pytest.mark.guarantee("consumers/consumed")
@pytest.mark.usefixtures("no_syncs")
@pytest.mark.parametrize("torn", [None, 0.5])
@pytest.mark.parametrize("rounds", [2, pytest.param(20, marks=pytest.mark.torture)])
def test_each_row_is_committed_once_by_a_learner_that_reads(
    torn: float | None,
    rounds: int,
    tmp_path: Path,
    count_cases: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, told = tmp_path / "a.exp", tmp_path / "told"
    told.touch()

    def live(number: int) -> None:
        monkeypatch.setattr(
            consumer, "Disk", lambda: KillingDisk(number, torn=torn, serial=True, syncs=False)
        )
        learn(expstore.open(path, mode="r", batch_size=BATCH), told, 8)

    with write(path, Disk()) as rb:
        for _ in range(rounds):
            for number in range(1, 25):
                rb.extend(rows(rb.storage.last))
                rb.flush()
                in_child(lambda: live(number))  # noqa: B023
                count_cases()
        assert check(rb, told) > 20


@pytest.mark.guarantee("consumers/consumed")
@pytest.mark.usefixtures("no_syncs")
@pytest.mark.parametrize("cuts", [24, pytest.param(2000, marks=pytest.mark.torture)])
def test_each_row_that_a_power_cut_leaves_is_drawn_once(
    cuts: int, tmp_path: Path, long_seed: int, count_cases: Callable[..., None]
) -> None:
    """Rows that get the ids of lost ones are drawn, too."""
    base, disks, told = tmp_path / "base", tmp_path / "disks", tmp_path / "told"
    base.mkdir()
    disks.mkdir()
    with write(base / "a.exp", Disk()) as rb:
        rb.extend(rows(0))

    def live(disk: Disk) -> None:
        rb = write(base / "a.exp", disk)
        for _ in range(4):
            rb.extend(rows(rb.storage.last))
            learn(rb, told).close()
        rb.close()

    committed = set()
    for _, at in disks_after(base, live, disks, cuts, long_seed):
        with write(at / "a.exp", Disk()) as rb:
            rb.extend(rows(rb.storage.last, mark=1.0, count=40))
            learn(rb, told).close()
            told.write_text("")
            committed.add(check(rb, told))
        count_cases()
    assert len(committed) > 2
