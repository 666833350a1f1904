"""What is done while the lock of the episodes is held, which every extend takes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore.episodes.fragments import CapturedFragments
from expstore.storages.episode_lookup import steps_of_episode


class CountingLock:
    """A lock that counts the lines of Python that this thread runs while it holds the lock."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self.depth = self.lines = 0
        self._thread = threading.get_ident()  # others are background checkpoints

    def __enter__(self) -> CountingLock:
        self._lock.acquire()
        self.depth += self._thread == threading.get_ident()
        if self.depth == 1 and self._thread == threading.get_ident():
            self._former = sys.gettrace()  # of a measurement of coverage
            sys.settrace(self._trace)
            frame: FrameType | None = sys._getframe(1)
            while frame is not None:
                frame.f_trace = self._trace
                frame = frame.f_back
        return self

    def __exit__(self, *_: object) -> None:
        self.depth -= self._thread == threading.get_ident()
        if not self.depth and self._thread == threading.get_ident():
            sys.settrace(self._former)
        self._lock.release()

    def _trace(self, frame: FrameType, event: str, arg: object) -> Any:
        if self.depth and event == "line":
            self.lines += 1
        return self._trace


def rows_of(trajectories: range, rows: int = 2) -> TensorDict:
    """return rows of trajectories that are truncated, and may be continued."""
    names = np.repeat(np.arange(trajectories.start, trajectories.stop), rows)
    size = names.size
    truncated = torch.from_numpy(np.arange(size) % rows == rows - 1).unsqueeze(1)
    following = {"reward": torch.ones(size, 1), "truncated": truncated, "done": truncated}
    return TensorDict(
        {"obs": torch.zeros(size, 2), ("collector", "traj_ids"): torch.from_numpy(names), "next": following},
        [size],
    )


def find_facts(rb: expstore.TensorDictReplayBuffer) -> None:
    rb.sql("SELECT count(*) FROM episodes").fetchall()


def look_up_runs(rb: expstore.TensorDictReplayBuffer) -> None:
    with rb.storage.runs.lock:
        rb.storage.runs.look()


ACTIONS: dict[str, Callable[[expstore.TensorDictReplayBuffer], object]] = {
    "SQL": find_facts,
    "annotate": lambda rb: rb.episodes.annotate(50, note=1),
    "find_open": lambda rb: rb.episodes.find_open(None),
    "rows of an episode": lambda rb: steps_of_episode(rb.storage, 50),
    "runs": look_up_runs,
    "end of a stream": lambda rb: rb.episodes.end("another"),
}


def count_lines(folder: Path | None, episodes: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """return the lines that run under the lock for each action, in a store with many episodes."""
    if folder is None:
        rb = expstore.TensorDictReplayBuffer(storage=expstore.LazyTensorStorage(100_000), batch_size=4)
    else:
        rb = expstore.open(folder)
    with rb:
        rb.extend(rows_of(range(episodes)))
        rb.flush()
        lock = CountingLock(rb.storage.locks.episodes)
        monkeypatch.setattr(rb.storage.locks, "episodes", lock)
        found = {}
        for cycle in range(2):  # the first SQL builds the index, the others bring it up to date
            for name, act in ACTIONS.items():
                if cycle:
                    rb.extend(rows_of(range(episodes, episodes + 3)))
                    rb.extend(rows_of(range(3)), source="another")
                lock.lines = 0
                act(rb)
                found[f"{name} {cycle}"] = lock.lines
    return found


@pytest.mark.parametrize("on_disk", [False, True], ids=["ram", "disk"])
def test_no_episode_is_scanned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_disk: bool) -> None:
    """Neither by a loop nor by an array operation over all fragments."""
    columns = CapturedFragments.columns
    locks: list[CountingLock] = []

    def read(self: CapturedFragments) -> Any:
        assert not any(lock.depth for lock in locks), "all fragments are read under the lock"
        return columns(self)

    monkeypatch.setattr(CapturedFragments, "columns", read)
    make = CountingLock.__init__
    monkeypatch.setattr(
        CountingLock, "__init__", lambda self, lock: (make(self, lock), locks.append(self))[0]
    )
    few = count_lines(tmp_path / "few.exp" if on_disk else None, 300, monkeypatch)
    many = count_lines(tmp_path / "many.exp" if on_disk else None, 3000, monkeypatch)
    assert all(lines > 0 for name, lines in few.items() if not name.startswith("end"))
    # Far less than a line for each of the 2,700 more episodes: `evict` looks at blocks of 256 fragments.
    assert {name: (lines, many[name]) for name, lines in few.items() if many[name] > lines + 600} == {}
