"""mode="r": reading a store, with or without a writer, without changing any file."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import expstore
from expstore.core import tuning
from expstore.errors import CorruptionError, NotFoundError, StateError
from expstore.storages import FollowerStorage
from expstore.storages.columns import column_set, column_set_writer
from tests.support.batches import numbered_rows
from tests.support.followed_stores import check_rows, contents, rows
from tests.support.open_files import open_files

if TYPE_CHECKING:
    from expstore import TensorDictReplayBuffer

pytestmark = pytest.mark.index


@pytest.fixture
def closed(store_path: Path) -> Path:
    """A closed ring of 50 rows that has turned: ids 51 to 100 can be read."""
    with expstore.open(store_path, capacity=50, seed=3) as rb:
        rb.extend(rows(60))
        rb.extend(rows(39, 60))
        rb.add(rows(1, 99)[0])
        rb.update_priority(id=[100], priority=7.0)
    return store_path


@pytest.fixture
def follow(closed: Path) -> Iterator[TensorDictReplayBuffer]:
    with expstore.open(closed, mode="r", batch_size=16) as rb:
        yield rb


# ---------------------------------------------------------------------------------------------------
# A closed store.


@pytest.mark.guarantee("process/readers")
def test_nothing_is_written(closed: Path) -> None:
    (closed / "index.duckdb").unlink()
    before = contents(closed)
    for entry in [closed, *closed.rglob("*")]:
        entry.chmod(0o555 if entry.is_dir() else 0o444)
    with expstore.open(closed, mode="r", batch_size=8) as rb:
        check_rows(rb.sample())
        assert rb.sql("SELECT count(*) FROM transitions").fetchall() == [(50,)]
        assert rb.stats()["size"] == 50
    for entry in [closed, *closed.rglob("*")]:
        entry.chmod(0o755 if entry.is_dir() else 0o644)
    assert contents(closed) == before


def test_settings_are_held_against_the_store(closed: Path, tmp_path: Path) -> None:
    with expstore.open(closed, mode="r", capacity=50, seed=99) as rb:
        assert rb.storage.seed == 99  # the reader's own
    with pytest.raises(StateError, match="capacity=50, opened with capacity=51"):
        expstore.open(closed, mode="r", capacity=51)
    with pytest.raises(NotFoundError, match="not a store"):
        expstore.open(tmp_path / "none", mode="r")
    assert not (tmp_path / "none").exists()
    with pytest.raises(ValueError, match="parquet"):
        expstore.open(closed, mode="r", layout="parquet")  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------
# Columns opened for reading.


@pytest.mark.parametrize(("capacity", "fills"), [(None, True), (40, False)])
def test_priorities_are_the_writers(
    store_path: Path, capacity: int | None, fills: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As rows come, and after a refresh; also where holes take space when they are looked at."""
    for module in (column_set, column_set_writer):
        monkeypatch.setattr(module, "fills_holes", lambda disk, folder: fills)

    def priorities(rb: TensorDictReplayBuffer) -> list[float]:
        ids = rb.storage.window.ids()
        found: list[float] = rb.storage.priorities.values[rb.storage.geometry.slot_of(ids)].tolist()
        return found

    with expstore.open(store_path, capacity=capacity, sampler=expstore.PrioritizedSampler()) as writer:
        writer.extend(rows(9))
        writer.update_priority(id=torch.arange(1, 10), priority=3.0)
        writer.flush()
        with expstore.open(store_path, mode="r", sampler=expstore.PrioritizedSampler()) as reader:
            for count in (1, 25, 60, 7, 300):
                writer.extend(rows(count))
                writer.flush()
                assert priorities(reader) == priorities(writer)
            ids = writer.storage.window.ids()
            writer.update_priority(id=ids[::2], priority=torch.arange(len(ids[::2])) + 1.0)
            writer.flush()
            reader.storage.follow(priorities=True)
            assert priorities(reader) == priorities(writer)
            assert len(set(priorities(reader))) > 10


def test_following_priorities_changes_the_version(closed: Path) -> None:
    storage = FollowerStorage(closed)
    before = storage.version
    storage.follow()
    assert storage.version == before
    storage.follow(priorities=True)  # a writer may have set some
    assert storage.version != before
    storage.close()


@pytest.mark.parametrize("mode", ["r", "a"])
def test_a_small_batch_longer_than_the_ring_after_a_kill(tmp_path: Path, mode: Any) -> None:
    """Its record tells of rows that never had a slot."""
    killed = tmp_path / "killed.exp"
    with expstore.open(tmp_path / "run.exp", capacity=5, seed=0) as rb:
        rb.extend(numbered_rows(3))
        rb.flush()
        rb.storage.background.stop()  # no mark covers what is extended now
        rb.extend(numbered_rows(8, 3))
        shutil.copytree(tmp_path / "run.exp", killed)
    (killed / "STATE").unlink()
    with expstore.open(killed, mode=mode) as rb:
        assert sorted(rb[:]["number"].tolist()) == [6, 7, 8, 9, 10]


def test_no_descriptor_stays_open(closed: Path) -> None:
    storage = FollowerStorage(closed)
    assert not [name for name in open_files(closed) if "columns" in name or "LOCK" in name]
    storage.close()
    assert not open_files(closed)


def test_shards_are_as_long_as_zarr_json_says(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "FLAT_SHARD_ROWS", 4096)
    with expstore.open(store_path, capacity=9000) as rb:
        rb.extend(rows(9000))
    monkeypatch.undo()
    with expstore.open(store_path, mode="r", batch_size=400) as rb:
        check_rows(rb.sample())
        assert {column.rows for column in rb.storage._source.columns.arrays} == {4096}  # type: ignore[attr-defined]
    with pytest.raises(CorruptionError):
        expstore.open(store_path)


@pytest.mark.guarantee("damage/rest", 'What is not damaged can be read with `mode="r"` and queried.')
@pytest.mark.parametrize("damage", ["missing", "short", "long"])
def test_a_damaged_shard_is_refused_and_the_rest_is_read(
    store_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    monkeypatch.setattr(tuning, "FLAT_SHARD_ROWS", 4096)
    with expstore.open(store_path, capacity=9000) as rb:
        rb.extend(rows(9000))
    file = store_path / "columns" / "wide" / "c" / "1" / "0"
    if damage == "missing":
        file.unlink()
    else:
        os.truncate(file, file.stat().st_size + (1 if damage == "long" else -5000))
    with expstore.open(store_path, mode="r", batch_size=4) as rb:
        (found,) = rb.stats()["damaged"]
        assert found.startswith(f"{file} {'is missing' if damage == 'missing' else 'has '}")
        assert rb["a"].tolist() == list(range(9000))
        assert rb[0]["wide"].tolist() == list(range(200))
        assert rb[8999]["wide"][0] == 8999
        assert rb.sql("SELECT count(a) FROM transitions").fetchall() == [(9000,)]
        needing = "SELECT max(wide[1]) FROM transitions"
        for act in (lambda: rb[4096], lambda: rb[8191], lambda: rb["wide"], lambda: rb.sql(needing)):
            with pytest.raises(CorruptionError, match=str(file)):
                act()
        with pytest.raises(CorruptionError, match=str(file)):
            rb.storage.views([1], 4000, 200)
        assert np.concatenate(rb.storage.views([1], 4000, 97)[0])[:, 0].tolist() == list(range(3999, 4096))


@pytest.mark.guarantee("damage/rest")
def test_damaged_metadata_of_a_column_leave_the_others_readable(closed: Path) -> None:
    (closed / "columns" / "wide" / "zarr.json").write_text("{")
    with expstore.open(closed, mode="r") as rb:
        assert rb["a"].tolist() == list(range(50, 100))
        with pytest.raises(CorruptionError, match=r"wide/zarr\.json"):
            rb["wide"]


def test_a_damaged_journal_is_refused(closed: Path) -> None:
    for file in (closed / "journal").iterdir():
        file.write_bytes(bytes(100))
    with pytest.raises(CorruptionError, match="journal"):
        expstore.open(closed, mode="r")
