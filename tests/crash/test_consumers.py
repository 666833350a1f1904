"""Kills and power cuts while a consumer draws, commits and goes back: what was committed lasts.

Both sides are one process, whose every file operation is an act. After each cut the store is opened for
writing, gets rows with the ids of those that were lost, and only then the consumer is opened.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore.disk.files import Disk
from expstore.storages import ZarrStorage
from expstore.storages.engine import opening, store
from expstore.storages.format import draw_log
from tests.crash.folder_power_cuts import disks_after
from tests.crash.killing_disks import KillingDisk, machine
from tests.support.forks import in_child
from tests.support.stores import NoKeeper, copy_folder

ROUNDS, BATCH = 6, 3


def rows(start: int, count: int, mark: float = 0.0) -> TensorDict:
    seen = torch.arange(start, start + count)[:, None].float()
    return TensorDict({"observation": seen, "mark": torch.full((count,), mark)}, [count])


def buffer(storage: Any) -> Any:
    return expstore.TensorDictReplayBuffer(storage=storage, batch_size=BATCH, with_ids=True)


class Learner:
    """Rounds of extend and draws; remembers which draws returned, and which commits."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.drawn: list[list[int]] = []
        self.committed = 0
        #: Gets a byte for each new draw that returned; None: nothing is written.
        self.told: Path | None = None

    def run(self, disk: Disk) -> None:
        """Do all rounds; each ends with a commit, and some go back first."""
        rb = buffer(ZarrStorage(self.path, disk=disk))
        c = rb.consumer("learner", sampler="without_replacement", keep="all")
        for number in range(ROUNDS):
            rb.extend(rows(rb.storage.last, 4))
            position = c.position
            for _ in range(2):
                self.drawn.append(c.sample()["id"].tolist())
                if self.told is not None:
                    with self.told.open("ab") as file:
                        file.write(b".")
            if number % 2:
                c.seek(position)
                assert [c.sample()["id"].tolist() for _ in range(2)] == self.drawn[-2:]
            if number % 3 != 2:
                c.commit()
                self.committed = len(self.drawn)
        rb.close()


@pytest.fixture
def learner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Learner:
    monkeypatch.setattr(machine, "boot", 7)
    monkeypatch.setattr(store, "Keeper", NoKeeper)
    monkeypatch.setattr(draw_log, "SEGMENT_BYTES", 500)
    place = tmp_path / "place"
    place.mkdir()
    with buffer(ZarrStorage(place / "a.exp")) as rb:
        rb.extend(rows(0, 4))
    return Learner(place / "a.exp")


def check(at: Path, drawn: list[list[int]], *, over: bool, committed: int) -> int:
    """Open what a power cut left, reuse the ids of lost rows, and replay; return how many draws there are."""
    with buffer(ZarrStorage(at)) as rb:
        last = rb.storage.last
        rb.extend(rows(last, 30, mark=1.0))
        if not over and not rb.consumers.list():
            return 0
        with rb.consumer("learner", sampler="without_replacement") as c:
            assert c.position["draw"] == c.committed
            c.seek("end")
            count = c.position["draw"]
            if over:
                assert count == len(drawn)
                assert c.committed == committed
            batches = list(c.replay(0, count - 1))
            assert [batch["id"].tolist() for batch in batches] == drawn[:count]
            assert not any((batch["mark"] != 0).any() for batch in batches), (
                "a row that has an id of a lost one"
            )
            c.sample()
            c.commit()
    return int(count)


@pytest.mark.guarantee(
    "consumers/power", "After a power cut a consumer has the draws that `commit` or `flush` returned after."
)
@pytest.mark.usefixtures("no_syncs")
@pytest.mark.parametrize("cuts", [40, pytest.param(2000, marks=pytest.mark.torture)])
def test_the_power_goes_while_a_consumer_draws(
    learner: Learner, cuts: int, tmp_path: Path, long_seed: int, count_cases: Callable[..., None]
) -> None:
    disks = tmp_path / "disks"
    disks.mkdir()
    counts = set()
    for over, at in disks_after(learner.path.parent, learner.run, disks, cuts, long_seed):
        counts.add(check(at / "a.exp", learner.drawn, over=over, committed=learner.committed))
        count_cases()
    assert len(counts) > 4


@pytest.mark.usefixtures("no_syncs")
def test_draws_of_lost_rows_that_are_not_cut_are_found(
    learner: Learner, tmp_path: Path, long_seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above fails without the rule that an opening cuts the logs before it reuses ids."""
    monkeypatch.setattr(opening, "cut_logs", lambda disk, path, last, change: None)
    disks = tmp_path / "disks"
    disks.mkdir()

    def cut() -> None:
        for over, at in disks_after(learner.path.parent, learner.run, disks, 400, long_seed):
            check(at / "a.exp", learner.drawn, over=over, committed=learner.committed)

    with pytest.raises(AssertionError, match="a row that has an id of a lost one"):
        cut()


@pytest.mark.guarantee("consumers/restore")
@pytest.mark.usefixtures("no_syncs")
@pytest.mark.parametrize("cuts", [40, pytest.param(2000, marks=pytest.mark.torture)])
def test_the_power_goes_while_a_version_is_restored(
    learner: Learner, cuts: int, tmp_path: Path, long_seed: int, count_cases: Callable[..., None]
) -> None:
    """Rows and their former ids change together: recorded draws never have other rows, and lose none."""
    path, versions = learner.path, learner.path.parent / "versions"
    drawn: list[list[float]] = []
    with buffer(ZarrStorage(path)) as rb:
        rb.snapshots.create(versions)
        with rb.consumer("learner", keep="all") as c:
            drawn += [c.sample()["observation"].tolist() for _ in range(4)]

    def restore(disk: Disk) -> None:
        with buffer(ZarrStorage(path, disk=disk)) as rb:
            rb.consumer("learner", keep="all").commit()
            for start in (4, 8):
                rb.extend(rows(start, 4, mark=1.0))
                rb.snapshots.restore(versions)

    disks, lows = tmp_path / "disks", set()
    disks.mkdir()
    for _, at in disks_after(path.parent, restore, disks, cuts, long_seed):
        with buffer(ZarrStorage(at / "a.exp")) as rb, rb.consumer("learner", keep="all") as c:
            assert [batch["observation"].tolist() for batch in c.replay(0)] == drawn
            lows.add(rb.storage.stored.low)
        count_cases()
    assert len(lows) > 1


@pytest.mark.guarantee("consumers/kill")
@pytest.mark.usefixtures("no_syncs")
@pytest.mark.parametrize("torn", [None, 0.5])
@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.torture)])
def test_killed_at_some_acts(
    learner: Learner, torn: float | None, step: int, tmp_path: Path, count_cases: Callable[..., None]
) -> None:
    before, number = tmp_path / "before.exp", 0
    copy_folder(learner.path, before)
    whole = Learner(learner.path)
    disk = KillingDisk(serial=True, syncs=False)
    whole.run(disk)
    for number in range(1 + step // 2, disk.acts, step):
        at, told = tmp_path / f"{number}.exp", tmp_path / f"{number}.told"
        copy_folder(before, at)
        told.touch()
        killed = Learner(at)
        killed.told = told
        in_child(lambda: killed.run(KillingDisk(number, torn=torn, serial=True, syncs=False)))  # noqa: B023
        returned = told.stat().st_size
        count = check(at, whole.drawn, over=False, committed=0)
        assert returned <= count <= returned + 1
        count_cases()
        shutil.rmtree(at)
    assert number > 60
