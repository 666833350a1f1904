"""Kill a writer before each act with which rows leave by a policy, and look at what is there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from disks import KillingDisk
from tensordict import TensorDict

import expstore
from expstore.checks import verify
from expstore.storages import ZarrStorage, keeper
from expstore.storages.settings import Settings

ROWS = 600
LAYOUTS: dict[str, Any] = {
    "flat": {"layout": "flat"},
    "packed": {"layout": "flat", "fields": {"frame": {"layout": "packed", "rows": 64}}},
}


def filled(path: Path, episodes: int, **more: Any) -> None:
    with expstore.open(path, seed=1, **more) as rb:
        for number in range(1, episodes + 1):
            done = torch.zeros(ROWS, 1, dtype=torch.bool)
            done[-1] = True
            frames = torch.full((ROWS, 2048), number, dtype=torch.uint8)
            ends = {"done": done, "terminated": done}
            rows = {"frame": frames, "number": torch.full((ROWS,), number), "next": ends}
            rb.extend(TensorDict(rows, [ROWS]))


def check_whole(rb: Any, kept: set[int]) -> None:
    """Hold a store of six episodes against those that it must have."""
    found = rb.sql("SELECT number, count(*) FROM transitions GROUP BY number ORDER BY number").fetchall()
    assert found == [(number, ROWS) for number in sorted(kept)]
    live = dict(rb.sql("SELECT episode_id, live_rows FROM episodes").fetchall())
    assert live == {number: ROWS * (number in kept) for number in range(1, 7)}
    fragments = rb.sql("SELECT episode_id, length FROM fragments ORDER BY first_id").fetchall()
    assert fragments == found
    values = rb[:]
    assert (values["frame"] == values["number"][:, None]).all()


def killed(path: Path, at: int, act: Callable[[ZarrStorage], Any], monkeypatch: pytest.MonkeyPatch) -> bool:
    """Act in a child that is killed before its act number `at`; say whether it came to its end."""
    child = os.fork()
    if not child:
        try:
            monkeypatch.setattr(keeper, "SYNC_SECONDS", 1e9)
            disk = KillingDisk(in_turn=True)
            storage = ZarrStorage(path, disk=disk, settings=Settings(on_sigterm="ignore"))
            disk.arm(at)
            act(storage)
            storage.sync()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert status in (0, 9), status
    return status == 0


@pytest.mark.parametrize(("layout", "going"), [("flat", [1, 3, 4]), ("packed", [2, 4])])
def test_killed_before_some_acts(
    tmp_path: Path, layout: str, going: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_everywhere(tmp_path, layout, going, monkeypatch, step=9)


@pytest.mark.torture
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("going", [[1, 2, 3], [2, 4], [1, 3, 4]])
def test_killed_before_every_act(
    tmp_path: Path,
    layout: str,
    going: list[int],
    monkeypatch: pytest.MonkeyPatch,
    count_cases: Callable[..., None],
) -> None:
    count_cases(kill_everywhere(tmp_path, layout, going, monkeypatch, step=1))


def kill_everywhere(
    tmp_path: Path, layout: str, going: list[int], monkeypatch: pytest.MonkeyPatch, *, step: int
) -> int:
    """What stays is whole; what was to leave has left whole or is whole; nothing is damaged.

    Returns:
        How many acts there are.
    """
    filled(tmp_path / "a.exp", 6, **LAYOUTS[layout])
    stay, outcomes, at, ended = {1, 2, 3, 4, 5, 6} - set(going), set(), 1, False
    while not ended:
        path = tmp_path / f"{at}.exp"
        shutil.copytree(tmp_path / "a.exp", path)
        ended = killed(path, at, lambda storage: storage.give_up(np.array(going)), monkeypatch)
        assert [f for f in verify(path) if f.kind != "index"] == [], at
        with expstore.open(path, batch_size=8) as rb:
            found = {n for (n,) in rb.sql("SELECT DISTINCT number FROM transitions").fetchall()}
            outcomes.add(frozenset(found))
            assert stay <= found, at
            check_whole(rb, found)
            rb.storage.give_up(np.array(going))
            check_whole(rb, stay)
        assert verify(path) == [], at
        shutil.rmtree(path)
        at += step
    assert outcomes >= {frozenset(stay), frozenset(range(1, 7))}
    return at - step
