"""Kills at every act of creating and changing a selection: all of the change is there, or nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import expstore
from expstore.storages import ZarrStorage
from expstore.storages.engine import store
from tests.crash.killing_disks import KillingDisk, machine
from tests.support.forks import in_child
from tests.support.stores import NoKeeper

EPISODES = 40


@pytest.fixture(autouse=True)
def one_boot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "boot", 7)
    monkeypatch.setattr(store, "Keeper", NoKeeper)


EVERY = list(range(1, EPISODES + 1))
CHANGES: dict[str, Callable[[Any], object]] = {
    "create": lambda rb: rb.selections.create("a", "true", reason="all"),
    "exclude": lambda rb: rb.selections.exclude("a", EVERY[::2], reason="odd"),
    "include": lambda rb: rb.selections.include("a", EVERY[::2], reason="odd after all"),
    "drop": lambda rb: rb.selections.drop("a"),
}
#: The members of the selection before each change, and after the last one; None: there is no selection.
STATES = [None, EVERY, EVERY[1::2], EVERY, None]


def opened(path: Path, disk: KillingDisk | None = None) -> Any:
    # On a disk of another boot, records that were not synced would be in doubt.
    storage = ZarrStorage(path, disk=disk or KillingDisk(serial=True, syncs=False))
    return expstore.TensorDictReplayBuffer(storage=storage, as_numpy=True)


def find(path: Path) -> list[int] | None:
    with opened(path) as rb:
        assert [row["condition"] for row in rb.selections().arrow().to_pylist()] == ["true"] * len(
            list(rb.selections)
        )
        return rb.selections["a"].episodes().tolist() if "a" in list(rb.selections) else None


@pytest.mark.guarantee(
    "kill/selections",
    "A kill at any act of creating, changing or dropping a selection leaves all of the change, or nothing.",
)
@pytest.mark.usefixtures("no_syncs")
@pytest.mark.parametrize("torn", [None, 0.5])
def test_a_killed_change_is_all_there_or_not_at_all(
    torn: float | None, tmp_path: Path, count_cases: Callable[..., None]
) -> None:
    path, told = tmp_path / "a.exp", tmp_path / "told"
    ends = np.ones((EPISODES, 1), bool)
    with opened(path) as rb:
        rb.extend({"x": np.arange(EPISODES), "next": {"terminated": ends, "done": ends}}, source="s")
    partial = 0
    for (name, change), before, after in zip(CHANGES.items(), STATES, STATES[1:], strict=False):

        def live(number: int) -> None:
            disk = KillingDisk(torn=torn, serial=True, syncs=False)
            rb = opened(path, disk)
            list(rb.selections)  # opens the index
            disk.arm(number)
            change(rb)  # noqa: B023
            disk.arm(0)
            told.write_text("done")

        for number in range(1, 100):
            in_child(lambda: live(number))  # noqa: B023
            count_cases()
            found = find(path)
            if told.exists():
                assert found == after, name
                break
            assert found in (before, after), name
            partial += found == before
            if found == after:  # killed between the record and the return
                break
        told.unlink(missing_ok=True)
    assert partial >= len(CHANGES)  # each change has an act that is killed before it
