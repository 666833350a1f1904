"""Kills and power cuts while rows are changed and drawn: no recorded draw comes again with other values.

Both sides are one process, whose every file operation is an act. Each change gives rows a mark of its own, so
a draw must come again without exactly those rows whose marks differ.
"""

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
from expstore.disk.checkpointed import Dirty
from expstore.disk.files import Disk
from expstore.errors import RowsChangedError
from expstore.storages import ZarrStorage
from expstore.storages.engine import opening, store
from expstore.storages.format import draw_log
from expstore.storages.format.row_changes import RowChanges
from tests.crash.folder_power_cuts import disks_after
from tests.crash.killing_disks import KillingDisk, machine
from tests.support.forks import in_child
from tests.support.stores import NoKeeper, copy_folder

ROUNDS, BATCH = 6, 6
#: The ids and the marks of a batch.
Seen = dict[int, float]


def rows(start: int, count: int, mark: float = 0.0) -> TensorDict:
    seen = torch.arange(start, start + count)[:, None].float()
    return TensorDict({"observation": seen, "mark": torch.full((count,), mark)}, [count])


def open_buffer(path: Path, disk: Disk | None = None) -> Any:
    """A ring of 200 rows, which is never full."""
    storage = ZarrStorage(path, 200, disk=disk) if disk else ZarrStorage(path, 200)
    return expstore.TensorDictReplayBuffer(storage=storage, batch_size=BATCH, with_ids=True)


def note(batch: Any) -> Seen:
    return dict(zip(batch["id"].tolist(), batch["mark"].tolist(), strict=True))


def change(rb: Any, ids: list[int], mark: float) -> None:
    rb.update_if_present(id=torch.tensor(ids), patch={"mark": torch.full((len(ids),), mark)})


def replace(rb: Any, ids: list[int], mark: float) -> None:
    """Replace rows as a writer does that keeps the best."""
    schema = rb.storage.require_schema()
    values = {
        "observation": np.array(ids, np.float32)[:, None] - 1,
        "mark": np.full(len(ids), mark, np.float32),
    }
    rb.storage.replace(np.array(ids), [values[entry.key[0]] for entry in schema.fields])


class Learner:
    """Rounds of extend, draws and changes; remembers what each draw returned."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.drawn: list[Seen] = []
        #: Gets a byte for each new draw that returned; None: nothing is written.
        self.told: Path | None = None

    def run(self, disk: Disk) -> None:
        """Do all rounds; some end with a commit, some with a sync."""
        rb = open_buffer(self.path, disk)
        c = rb.consumer("learner", seed=5, keep="all")
        for number in range(ROUNDS):
            mark = 10.0 * number
            rb.extend(rows(rb.storage.last, 4))
            self.draw(c)
            change(rb, [1 + number, 2 + number], mark + 1)
            self.draw(c)
            replace(rb, [2 + number, 3, 4 + number], mark + 2)
            self.draw(c)
            replace(rb, [3, 5, 6, 7, 8], mark + 3)
            self.draw(c)
            if number == 2:
                c.commit()
            elif number == 4:
                rb.flush()
        rb.close()

    def draw(self, c: Any) -> None:
        self.drawn.append(note(c.sample()))
        if self.told is not None:
            with self.told.open("ab") as file:
                file.write(b".")


@pytest.fixture
def learner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Learner:
    monkeypatch.setattr(machine, "boot", 7)
    monkeypatch.setattr(store, "Keeper", NoKeeper)
    monkeypatch.setattr(draw_log, "SEGMENT_BYTES", 500)
    place = tmp_path / "place"
    place.mkdir()
    with open_buffer(place / "a.exp") as rb:
        rb.extend(rows(0, 8))
        rb.consumer("other").close()
    return Learner(place / "a.exp")


def check_draws(rb: Any, c: Any, drawn: list[Seen], *, exact: bool) -> None:
    """Check that draws come again with the same values, and without changed rows; `exact`: no others."""
    ids = np.arange(1, rb.storage.last + 1)
    place = rb.storage.require_schema().place(("mark",))
    marks = dict(zip(ids.tolist(), rb.storage.read(ids, [place])[0].tolist(), strict=True))
    for number, seen in enumerate(drawn):
        kept = {id: mark for id, mark in seen.items() if marks[id] == mark}
        try:
            (batch,) = c.replay(number, number)
            found = note(batch)
        except RowsChangedError:
            found = {}
        assert found == kept if exact else found.items() <= kept.items(), f"draw {number} has other values"


def check(at: Path, drawn: list[Seen], *, over: bool) -> int:
    """Open what is left, use the numbers of what was lost, and replay; return how many draws there are."""
    with open_buffer(at) as rb:
        rb.extend(rows(rb.storage.last, 30, mark=1000.0))
        if not over and "learner" not in [one.name for one in rb.consumers.list()]:
            return 0
        for number in range(3):
            with rb.consumer("learner", missing="skip", at="end", keep="all") as c:
                if number == 0:
                    count = c.position["draw"]
                    assert count == len(drawn) or not over
                    drawn = drawn[:count]
                check_draws(rb, c, drawn, exact=True)
                drawn = [*drawn, note(c.sample())]
            if number == 0:
                change(rb, sorted(drawn[0])[:1], 2000.0)
            elif number == 1:
                replace(rb, sorted(drawn[-1])[:1], 3000.0)
    return int(count)


def check_reader(at: Path, drawn: list[Seen]) -> None:
    """Replay in a process that reads, before any writer has opened what is left."""
    with expstore.open(at, mode="r", batch_size=BATCH) as rb:
        if "learner" in [one.name for one in rb.consumers.list()]:
            with rb.consumer("learner", missing="skip", at="end") as c:
                check_draws(rb, c, drawn[: c.position["draw"]], exact=False)


@pytest.mark.guarantee("consumers/changed")
@pytest.mark.usefixtures("no_syncs")
@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("cuts", [40, pytest.param(500, marks=pytest.mark.torture)])
def test_the_power_goes_while_rows_are_changed(
    learner: Learner, reads: bool, cuts: int, tmp_path: Path, long_seed: int, count_cases: Callable[..., None]
) -> None:
    disks = tmp_path / "disks"
    disks.mkdir()
    counts = set()
    for over, at in disks_after(learner.path.parent, learner.run, disks, cuts, long_seed):
        if reads:
            check_reader(at / "a.exp", learner.drawn)
        counts.add(check(at / "a.exp", learner.drawn, over=over))
        count_cases()
    assert len(counts) > 4


RECOVER = RowChanges.recover


def _recover_file_only(changes: RowChanges, end: int, find: Any, stored: Any) -> None:
    RECOVER(changes, end, find and list, stored)


def _cut_rows_only(disk: Disk, path: Path, last: int, change: int) -> None:
    draw_log.cut_logs(disk, path, last, 1 << 62)


@pytest.mark.usefixtures("no_syncs")
@pytest.mark.parametrize(
    ("place", "name", "broken"),
    [
        (RowChanges, "begin", lambda changes, checkpoint: Dirty()),
        (RowChanges, "recover", _recover_file_only),
        (opening, "cut_logs", _cut_rows_only),
    ],
)
def test_each_rule_is_needed(
    learner: Learner,
    place: Any,
    name: str,
    broken: Any,
    tmp_path: Path,
    long_seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The test above fails without syncs of the file, without what the journal adds, and without cut logs."""
    monkeypatch.setattr(place, name, broken)
    disks = tmp_path / "disks"
    disks.mkdir()

    def cut() -> None:
        for over, at in disks_after(learner.path.parent, learner.run, disks, 400, long_seed):
            check(at / "a.exp", learner.drawn, over=over)

    with pytest.raises(AssertionError, match="has other values"):
        cut()


@pytest.mark.guarantee("consumers/changed")
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
        check_reader(at, whole.drawn)
        assert returned <= check(at, whole.drawn, over=False) <= returned + 1
        count_cases()
        shutil.rmtree(at)
    assert number > 60
