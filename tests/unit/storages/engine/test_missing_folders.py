"""A store whose folder is deleted, moved or replaced while it is open says so, and writes nowhere else."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import expstore
from expstore.buffers.tensordict import TensorDictReplayBuffer
from expstore.core import tuning
from expstore.errors import SchemaError, StateError, StorageError
from expstore.maintenance.verify import verify
from expstore.storages.format import journal
from expstore.storages.format.journal import Kind
from tests.support.stores import NoKeeper

ROWS = {"x": np.arange(3)}
GONE = "was deleted, moved or replaced while its store was open"


@pytest.fixture
def rb(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TensorDictReplayBuffer]:
    """An open store of six rows, without a background thread."""
    monkeypatch.setattr("expstore.storages.engine.store.Keeper", NoKeeper)
    monkeypatch.setattr(journal, "_LOOK_SECONDS", 0.0)  # as if deleting took a millisecond
    with expstore.open(store_path) as rb:
        rb.extend(ROWS)
        rb.add({"x": 3})
        rb.add({"x": 4})
        rb.add({"x": 5})
        yield rb


WRITES: dict[str, Callable[[TensorDictReplayBuffer], Any]] = {
    "extend": lambda rb: rb.extend(ROWS),
    "add": lambda rb: rb.add({"x": 6}),
    "flush": lambda rb: rb.flush(),
    "close": lambda rb: rb.close(),
}


@pytest.mark.guarantee(
    "process/folders",
    "A store whose folder was deleted, moved or replaced says so within a second or two of a write, and "
    "writes to no other store.",
)
@pytest.mark.parametrize("write", WRITES)
def test_the_next_write_after_a_deletion_says_so(
    write: str, rb: TensorDictReplayBuffer, store_path: Path
) -> None:
    shutil.rmtree(store_path)
    with pytest.raises(StorageError, match=GONE):
        WRITES[write](rb)
    if write != "close":
        assert len(rb) == 6
        with pytest.raises(StateError, match=f"{GONE}; the folder was deleted or moved: close the store"):
            rb.extend(ROWS)
    rb.close()
    assert not store_path.exists()


@pytest.mark.guarantee("process/folders")
def test_rows_follow_a_folder_that_is_moved_until_a_checkpoint_says_so(
    rb: TensorDictReplayBuffer, store_path: Path
) -> None:
    other = store_path.rename(store_path.with_name("other.exp"))
    rb.extend(ROWS)
    with pytest.raises(StorageError, match=GONE):
        rb.flush()
    with pytest.raises(StateError, match=GONE):
        rb.extend(ROWS)
    rb.close()
    assert not store_path.exists()
    with expstore.open(other) as moved:
        assert moved[:]["x"].tolist() == [*range(6), *range(3)]


@pytest.mark.guarantee("process/folders")
def test_a_store_that_takes_the_place_of_another_is_not_written_to(
    rb: TensorDictReplayBuffer, store_path: Path
) -> None:
    other = store_path.rename(store_path.with_name("other.exp"))
    with expstore.open(store_path) as instead:
        instead.extend({"y": np.arange(2)})
    record = bytes(2 * tuning.JOURNAL_SEGMENT_BYTES)
    with pytest.raises(StorageError, match=GONE):
        rb.storage.checkpoints.append_record(rb.storage, Kind.CLOSE, record)
    with pytest.raises(StateError, match=GONE):
        rb.flush()
    rb.close()
    assert [finding for finding in verify(store_path) if finding.kind != "index"] == []
    with expstore.open(store_path) as instead, expstore.open(other) as moved:
        assert instead[:]["y"].tolist() == [0, 1]
        assert moved[:]["x"][:6].tolist() == list(range(6))


def test_rows_too_large_for_the_capacity_are_refused_and_change_nothing(store_path: Path) -> None:
    with expstore.open(store_path, capacity=2**40) as rb:
        with pytest.raises(SchemaError, match="1099511627776 rows .* smaller cap"):
            rb.extend({"x": np.zeros((2, 100))})
        assert rb.storage.schema is None
        assert not (store_path / "columns").exists()
