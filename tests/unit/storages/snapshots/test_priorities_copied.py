"""Copies of a store have the priorities of one moment, although `update_priority` waits for no other lock."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import expstore
from expstore.storages.engine.increment import capture
from tests.support.batches import episode_rows


class Hurried:
    """The lock of priorities; a thread that waits for it sets all of them once it is free."""

    def __init__(self, rb: Any) -> None:
        self._rb, self._lock = rb, rb.storage.priorities.changing
        self.has_set = False

    def __enter__(self) -> None:
        self._lock.__enter__()

    def __exit__(self, *_: object) -> None:
        self._lock.__exit__(None, None, None)
        if not self.has_set:
            self.has_set = True
            self._rb.update_priority(id=np.arange(1, 51), priority=9.0)


def _capture(rb: Any, folder: Path) -> float:
    names = itertools.count()
    increment = capture(rb.storage, None, name=lambda: f"part/{next(names)}")
    assert increment is not None
    list(increment.parts)
    return float(increment.state["base"]["max_priority"])


def _dump(rb: Any, folder: Path) -> float:
    rb.dumps(folder / "versions")
    with expstore.open(folder / "versions", mode="r") as copy:
        assert copy.sql("SELECT max(priority) FROM priorities").fetchall() == [(1.0,)]
        return float(copy.storage.priorities.largest)


@pytest.mark.parametrize("copy", [_capture, _dump])
def test_priorities_are_set_before_they_are_copied_or_after(
    tmp_path: Path, copy: Callable[[Any, Path], float]
) -> None:
    with expstore.open(tmp_path / "run.exp", sampler="prioritized", batch_size=4) as rb:
        rb.extend(episode_rows(50, length=10))
        rb.storage.priorities.changing = lock = Hurried(rb)
        assert copy(rb, tmp_path) == 1.0
        assert lock.has_set
