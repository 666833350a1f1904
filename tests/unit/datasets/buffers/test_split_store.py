"""The store of trajectories: several processes or threads use a data set for the first time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore.datasets.buffers import split_store
from expstore.datasets.buffers.split_store import make_split_store
from expstore.errors import LockedError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store of three trajectories of two steps."""
    done = torch.tensor([0, 1, 0, 1, 0, 1]).bool()[:, None]
    with expstore.open(tmp_path / "data") as rb:
        rb.extend(TensorDict({"observation": torch.ones(6, 3), "next": {"done": done}}, [6]))
    return tmp_path / "data"


def count(path: Path) -> int:
    with expstore.open(path, mode="r") as rb:
        return len(rb)


def test_one_process_at_a_time_makes_the_store(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pad, refused = split_store._pad, []

    def pad_and_try(rows: Any, length: int) -> TensorDict:
        with pytest.raises(LockedError, match="makes .*data_split at the moment"):
            make_split_store(path)
        refused.append(length)
        return pad(rows, length)

    monkeypatch.setattr(split_store, "_pad", pad_and_try)
    assert count(make_split_store(path)) == len(refused) == 3
    assert sorted(found.name for found in path.parent.iterdir()) == ["data", "data_split"]


def test_a_store_that_was_made_meanwhile_is_not_replaced(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = split_store.build_atomically

    def build_late(*args: Any, **options: Any) -> Any:
        monkeypatch.undo()
        make_split_store(path)
        return build(*args, **options)

    monkeypatch.setattr(split_store, "build_atomically", build_late)
    with pytest.raises(LockedError, match="was making .*data_split; open the data set again"):
        make_split_store(path)
    assert count(make_split_store(path)) == 3


def test_an_error_keeps_the_store_that_would_be_replaced(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split = make_split_store(path)
    monkeypatch.delattr(split_store, "_pad")
    with pytest.raises(NameError):
        make_split_store(path, again=True)
    assert count(split) == 3
    assert sorted(found.name for found in path.parent.iterdir()) == ["data", "data_split"]
