"""`rb.snapshots`: create, tag, list and restore."""

from __future__ import annotations

from pathlib import Path

import pytest

import expstore
from expstore import MemoryStorage, PrioritizedSampler, ReplayBuffer
from expstore.errors import LockedError, NotFoundError, SnapshotError, StateError
from tests.support.batches import numbered_rows


def test_versions_of_a_store_are_listed_and_restored(store_path: Path, tmp_path: Path) -> None:
    place = tmp_path / "versions"
    with expstore.open(store_path, sampler=PrioritizedSampler(alpha=0.5)) as rb:
        rb.extend(numbered_rows(5))
        assert rb.snapshots.list() == []
        assert rb.snapshots.tag("early").rows == 5
        rb.sampler.alpha = 0.9
        rb.extend(numbered_rows(5))
        assert rb.snapshots.create(place).number == 1
        assert rb.dumps(place, keep=1).number == 2
        assert [version.tag for version in rb.snapshots.list()] == ["early"]
        assert [version.number for version in rb.snapshots.list(place)] == [2]
        rb.snapshots.restore(version="early")
        assert (len(rb), rb.sampler.alpha) == (5, 0.5)
        first = rb.sql("SELECT min(episode_id) FROM episodes").fetchone()[0]
        with pytest.raises(
            NotFoundError, match=f"episode {first - 1} is no longer in the store; rb.episodes"
        ):
            rb.episodes.annotate(first - 1, good=True)
        rb.snapshots.restore(place)
        assert (len(rb), rb.sampler.alpha) == (10, 0.9)
        with pytest.raises(SnapshotError, match="early"):
            rb.snapshots.restore(version="late")


def test_rows_in_ram_have_no_folder_of_their_own(tmp_path: Path) -> None:
    rb = ReplayBuffer(storage=MemoryStorage(10))
    rb.extend(numbered_rows(3))
    for act in (lambda: rb.snapshots.tag("x"), rb.snapshots.list, rb.snapshots.restore):
        with pytest.raises(StateError, match="no folder of its own"):
            act()
    rb.snapshots.tag("x", tmp_path / "versions")
    rb.empty()
    rb.snapshots.restore(tmp_path / "versions", "x")
    assert len(rb) == 3


def test_a_reader_creates_versions_of_a_store_that_nobody_writes(store_path: Path, tmp_path: Path) -> None:
    with expstore.open(store_path) as rb:
        rb.extend(numbered_rows(5))
        with expstore.open(store_path, mode="r") as reader:
            with pytest.raises(LockedError, match="dumps.. of the buffer that writes"):
                reader.dumps(tmp_path / "early")
    assert not (tmp_path / "early").exists()
    with expstore.open(store_path, mode="r") as reader:
        assert reader.dumps(tmp_path / "versions").rows == 5
        assert reader.snapshots.tag("x", tmp_path / "versions").number == 2
        with pytest.raises(StateError, match="reading only"):
            reader.snapshots.tag("y")
        assert len(reader) == 5
        reader.sample(4)
    with expstore.open(tmp_path / "versions", version=1) as version:
        with pytest.raises(StateError, match="is a version already; copy its folder"):
            version.dumps(tmp_path / "copies")
    rb = ReplayBuffer(storage=MemoryStorage(10))
    rb.loads(tmp_path / "versions", 1)
    assert len(rb) == 5
