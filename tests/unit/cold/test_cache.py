"""Versions on an object storage that are opened for reading, through a cache of bounded size."""

from __future__ import annotations

import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import expstore
from expstore import cold
from expstore.disk.files import Disk
from expstore.errors import SnapshotError, StateError
from tests.support.batches import episode_rows
from tests.support.forks import collect_from_child
from tests.support.object_stores import WatchedStorage

pytestmark = pytest.mark.usefixtures("no_syncs", "no_index_on_close")

Buffer = expstore.TensorDictReplayBuffer


@pytest.fixture
def cached(tmp_path: Path, rb: Buffer, storage: WatchedStorage) -> WatchedStorage:
    """Three versions of 50, 60 and 70 rows, and a cache."""
    storage.cache = tmp_path / "cache"
    for number in range(3):
        if number:
            rb.extend(episode_rows(10, start=40 + 10 * number))
        rb.snapshots.tag(f"t{number}")
        cold.push(rb, storage, version=f"t{number}")
    rb.close()
    return storage


def _space(storage: WatchedStorage) -> int:
    return Disk().measure_space(storage.cache / "files")


def _trees(storage: WatchedStorage) -> int:
    return sum(path.is_dir() for path in (storage.cache / "versions").iterdir())


def test_a_version_is_read_like_a_store(cached: WatchedStorage) -> None:
    with expstore.open(cached, mode="r", batch_size=8) as rb:
        assert len(rb) == 70
        assert rb[:]["number"].tolist() == list(range(70))
        assert rb.sample().shape == (8,)
        assert rb.sql("SELECT max(number) FROM transitions").fetchall() == [(69,)]
        with pytest.raises(StateError):
            rb.extend(episode_rows(1))
    for version, rows in ((1, 50), ("t1", 60), ("v3", 70)):
        with expstore.open(cached, mode="r", version=version) as rb:
            assert len(rb) == rows
    with pytest.raises(SnapshotError, match=r"has no version 9: there are 1 \(t0\), 2 \(t1\), 3 \(t2\)"):
        expstore.open(cached, mode="r", version=9)


def test_what_is_cached_is_not_fetched_again(cached: WatchedStorage) -> None:
    expstore.open(cached, mode="r").close()
    before = len(cached.requests)
    expstore.open(cached, mode="r").close()
    assert [act for act, _ in cached.requests[before:]] == ["get"]  # the list of versions
    expstore.open(cached, mode="r", version=1).close()
    parts = {key for act, key in cached.requests if key.startswith("parts/") and act == "get"}
    assert len(parts) == sum(act == "get" and key.startswith("parts/") for act, key in cached.requests)


def test_the_cache_is_bounded_and_drops_the_longest_unused(cached: WatchedStorage) -> None:
    with expstore.open(cached, mode="r", version=1):
        one = _space(cached)
    expstore.open(cached, mode="r", version=2).close()
    more = _space(cached) - one
    cached.cache_bytes = one + more
    expstore.open(cached, mode="r", version=1).close()
    expstore.open(cached, mode="r", version=3).close()  # in place of version 2
    assert _space(cached) <= cached.cache_bytes
    assert _trees(cached) == 2
    before = len(cached.requests)
    expstore.open(cached, mode="r", version=1).close()
    assert not any(key.startswith("parts/") for _, key in cached.requests[before:])


def test_a_version_in_use_is_not_removed(cached: WatchedStorage) -> None:
    with expstore.open(cached, mode="r", version=1, batch_size=8) as rb:
        cached.cache_bytes = _space(cached)
        with pytest.raises(StateError, match="other versions in it are in use") as caught:
            expstore.open(cached, mode="r", version=2)
        assert caught.value.kind == "cache_full"
        assert rb[:]["number"].tolist() == list(range(50))
    expstore.open(cached, mode="r", version=2).close()
    assert _trees(cached) == 1
    assert _space(cached) <= cached.cache_bytes


def test_a_version_that_does_not_fit_is_refused_before_anything_is_fetched(cached: WatchedStorage) -> None:
    cached.cache_bytes = 5000
    with pytest.raises(StateError, match=r"version 3 takes .* may take 5\.0 kB|version 3 takes") as caught:
        expstore.open(cached, mode="r")
    assert caught.value.kind == "cache_full"
    assert not any(act == "get" and key.startswith("parts/") for act, key in cached.requests)


def test_many_threads_open_at_once_and_fetch_once(cached: WatchedStorage) -> None:
    start = threading.Barrier(6)

    def read(number: int) -> int:
        start.wait()
        with expstore.open(cached, mode="r", version=number % 2 + 1) as rb:
            return len(rb)

    with ThreadPoolExecutor(6) as pool:
        assert sorted(pool.map(read, range(6))) == [50, 50, 50, 60, 60, 60]
    fetched = [key for act, key in cached.requests if act == "get" and key.startswith("parts/")]
    assert len(fetched) == len(set(fetched))


def test_copies_in_other_processes_read_the_same_version(cached: WatchedStorage) -> None:
    with expstore.open(cached, mode="r", batch_size=8) as rb:
        with pickle.loads(pickle.dumps(rb)) as copy:
            assert copy[:]["number"].tolist() == list(range(70))
        (found,) = collect_from_child(lambda tell: tell(rb[:]["number"].tolist()))
        assert found == list(range(70))


@pytest.mark.parametrize("name", ["cache", "cache_bytes", "retries"])
def test_settings_of_the_cache_have_a_place(name: str) -> None:
    with pytest.raises(expstore.ArgumentError, match=rf"ObjectStorage\(url, {name}=\.\.\.\)"):
        expstore.open("s3://bucket/run", mode="r", **{name: 3})


def test_only_readers_open_a_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, storage: WatchedStorage
) -> None:
    monkeypatch.chdir(tmp_path)
    modes: Any = ("a", "x", "w")
    for mode in modes:
        with pytest.raises(StateError, match=r"s3://bucket/run is a URL.*mode='r'"):
            expstore.open("s3://bucket/run", mode=mode)
        with pytest.raises(StateError, match=r"versions are read-only; open it with mode='r'"):
            expstore.open(storage, mode=mode)
    with pytest.raises(ValueError, match="writer= cannot be used with mode='r'"):
        expstore.open(storage, mode="r", writer=expstore.RoundRobinWriter())
    with pytest.raises(SnapshotError, match="it has no versions"):
        expstore.open(storage, mode="r")
    assert os.listdir(tmp_path) == []
