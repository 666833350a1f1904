"""Power cuts while episodes are ended and adopted: flushed or durable calls last."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore.disk.files import Disk
from expstore.episodes.sessions import SessionKey
from expstore.maintenance import verify
from expstore.storages import ZarrStorage
from expstore.storages.engine import store
from expstore.storages.engine.open_settings import Settings
from expstore.storages.sessions import end_episodes, end_sessions, resume
from tests.crash.folder_power_cuts import disks_after
from tests.crash.killing_disks import machine
from tests.support.stores import NoKeeper

CLIENT, HEIR = SessionKey("client", remote=True), SessionKey("heir", remote=True)
#: Status and owner of the episode after each operation.
STAGES = [("open", "client"), ("cut", "client"), ("open", "heir"), ("cut", "heir")]


def rows(start: int, count: int) -> TensorDict:
    seen = torch.arange(start, start + count)[:, None].float()
    return TensorDict({"observation": seen, "next": {"observation": seen + 1}}, [count])


def stage(path: Path, mode: Any) -> tuple[Any, ...]:
    """Return status and session of the only episode."""
    with expstore.open(path, mode=mode) as rb:
        (found,) = rb.sql(
            "SELECT e.length, e.status, s.session FROM episodes e, sources s "
            "WHERE s.number = (SELECT max(number) FROM sources)"
        ).fetchall()
    assert found[0] == 4
    return found[1], found[2]


@pytest.mark.guarantee("power/state")
@pytest.mark.guarantee("power/sync-mode")
@pytest.mark.slow
@pytest.mark.index
@pytest.mark.usefixtures("no_syncs")
@pytest.mark.parametrize("durability", ["process", "sync"])
@pytest.mark.parametrize("cuts", [12, pytest.param(600, marks=pytest.mark.torture)])
@pytest.mark.timeout(1200)
def test_the_power_goes_while_episodes_end(
    tmp_path: Path,
    durability: Any,
    cuts: int,
    long_seed: int,
    monkeypatch: pytest.MonkeyPatch,
    count_cases: Callable[..., None],
) -> None:
    monkeypatch.setattr(machine, "boot", 7)
    monkeypatch.setattr(store, "Keeper", NoKeeper)
    place, disks = tmp_path / "place", tmp_path / "disks"
    place.mkdir()
    disks.mkdir()
    with expstore.open(place / "a.exp", seed=1, durability=durability) as rb:
        rb.extend(rows(0, 4), source="robot", session="client")

    def act(disk: Disk) -> None:
        storage = ZarrStorage(place / "a.exp", settings=Settings(durability=durability), disk=disk)

        def last() -> None:
            if durability == "process":
                storage.sync()

        end_sessions(storage, [CLIENT])
        last()
        assert resume(storage, "robot", session=HEIR, check=False).tolist() == [1]
        last()
        end_episodes(storage, "robot", session=HEIR)
        last()
        storage.close()

    seen = set()
    for over, at in disks_after(place, act, disks, cuts, long_seed):
        found = stage(at / "a.exp", "r")
        assert found in STAGES
        assert found == STAGES[-1] or not over
        assert stage(at / "a.exp", "a") == found, "the writer finds another state than a reader"
        assert verify(at / "a.exp") == []
        seen.add(found)
        count_cases()
    assert STAGES[-1] in seen
    assert len(seen) > 1
