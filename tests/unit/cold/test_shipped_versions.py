"""Versions of a store that is shipped to the same address: what they cost, and that they share the parts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("obstore", reason="the extra expstore[s3] is not installed")

import expstore
from expstore import Ship, cold
from expstore.cold.version_list import manifest_key
from expstore.errors import ArgumentError, LockedError, RemoteError, SnapshotError, StateError
from tests.support.batches import episode_rows
from tests.support.object_stores import WatchedStorage, find_needed, find_shipped

pytestmark = pytest.mark.usefixtures("no_syncs", "no_index_on_close")

Buffer = expstore.TensorDictReplayBuffer
Open = Callable[..., Buffer]


@pytest.fixture
def open_store(tmp_path: Path, storage: WatchedStorage) -> Iterator[Open]:
    """Open a store by its name; it ships when it is told to, and when it is closed."""
    opened: list[Buffer] = []
    storage.cache = tmp_path / "cache"

    def act(name: str = "a.exp", **settings: Any) -> Buffer:
        opened.append(expstore.open(tmp_path / name, ship=Ship(storage, every=3600.0), seed=0, **settings))
        return opened[-1]

    yield act
    storage.calm()
    for rb in opened:
        rb.close()


def _look(rb: Buffer) -> list[Any]:
    relations = ("transitions", "episodes", "fragments", "priorities")
    found: list[Any] = [rb.sql(f"FROM {name} ORDER BY ALL").fetchall() for name in relations]
    return [*found, [rb.sample(16)["id"].tolist() for _ in range(3)]]


@pytest.mark.guarantee("ship/versions")
def test_a_version_of_a_shipped_store_costs_a_list(
    open_store: Open, storage: WatchedStorage, tmp_path: Path
) -> None:
    rb = open_store(sampler="prioritized", capacity=150_000)
    numbers = np.arange(100_000)
    rb.extend({"number": numbers, "next": {"done": numbers % 100 == 99}})
    rb.update_priority(numbers[:50], np.arange(50) + 1.0)
    rb.flush(shipped=True)
    there, before = find_shipped(storage), len(storage.requests)
    version = cold.push(rb, storage, tag="best")
    requests = storage.requests[before:]
    assert len(requests) <= 5, requests
    assert (version.rows, version.episodes, version.tag, version.new_parts) == (100_000, 1000, "best", 0)
    (new,) = find_shipped(storage) - there
    assert len(storage.connect().read(new) or b"") < 100_000
    assert version.bytes == sum(size for _, size in storage.connect().keys("shipped"))
    assert not (tmp_path / "a.exp" / "versions").exists()
    expected = _look(rb)
    cold.pull(storage, tmp_path / "b.exp")
    with expstore.open(tmp_path / "b.exp", sampler="prioritized") as pulled:
        assert pulled.stats()["uuid"] != rb.stats()["uuid"]
        assert _look(pulled) == expected
    with expstore.open(storage, mode="r", batch_size=8) as reader:
        assert reader.sql("SELECT count(*), sum(number) FROM transitions").fetchall() == [
            (100_000, int(numbers.sum()))
        ]


@pytest.mark.guarantee("ship/versions")
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.torture) for seed in range(1, 20))]
)
def test_versions_outlive_the_rows_of_a_ring(
    open_store: Open,
    storage: WatchedStorage,
    tmp_path: Path,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Random extends, captures, versions, prunes, sweeps and openings; nothing that is needed is deleted."""
    monkeypatch.setattr("expstore.storages.snapshots.increment_parts.PAGE_ENTRIES", 3)
    chance, number, pushed = random.Random(seed), 0, 0
    #: The rows of each version.
    rows: dict[int, list[int]] = {}
    rb = open_store(capacity=60)

    def extend() -> None:
        nonlocal number
        count = chance.choice([3, 20, 45])
        rb.extend(episode_rows(count, start=number, length=10))
        number += count

    def push() -> None:
        nonlocal pushed
        pushed += 1
        tag = chance.choice([None, f"t{pushed}"])
        version = cold.push(rb, storage, tag=tag)
        rows[version.number] = rb[:]["number"].tolist()

    def prune() -> None:
        listed = [version.number for version in cold.versions(storage)]
        drop = [chance.choice(listed)] if listed and chance.random() < 0.5 else []
        grace = chance.choice([0.0, 86_400.0])
        for version in cold.prune(
            storage, keep=chance.choice([1, 3, 9]), drop=drop, grace_seconds=grace
        ).versions:
            del rows[version.number]

    def sweep() -> None:
        rb.storage.writer().holders.shipping._sweep()  # type: ignore[union-attr]

    def reopen() -> None:
        nonlocal rb
        rb.close()
        rb = open_store(capacity=60)

    def capture() -> None:
        rb.flush(shipped=True)

    def check() -> None:
        assert find_needed(storage) <= find_shipped(storage)

    extend()
    capture()
    for _ in range(60):
        chance.choice([extend, extend, extend, push, push, prune, sweep, capture, reopen, check])()
    assert {version.number for version in cold.versions(storage)} == rows.keys()
    for version, expected in rows.items():
        cold.pull(storage, tmp_path / f"{version}.exp", version=version)
        with expstore.open(tmp_path / f"{version}.exp", mode="r") as pulled:
            assert pulled[:]["number"].tolist() == expected
    rb.flush(shipped=True)
    expected = rb[:]["number"].tolist()
    cold.prune(storage, keep=2, grace_seconds=0.0)
    assert find_shipped(storage) == find_needed(storage)  # exactly
    sweep()
    assert find_shipped(storage) == find_needed(storage)
    other = open_store("b.exp")
    assert other[:]["number"].tolist() == expected


def test_a_version_is_the_state_of_its_push(
    open_store: Open, storage: WatchedStorage, tmp_path: Path
) -> None:
    """The rows that are not shipped yet are sent for it; a closed store claims the address."""
    rb = open_store()
    rb.extend(episode_rows(20, length=10))
    first = cold.push(rb, storage)
    assert (first.rows, first.new_parts > 0) == (20, True)
    rb.extend(episode_rows(10, start=20, length=10))
    rb.snapshots.tag("local")
    local = cold.push(rb, storage, version="local")  # it was never shipped: its files are sent
    assert (local.rows, local.tag, local.files > 0, local.state) == (30, "local", True, "")
    assert cold.push(rb, WatchedStorage()).files > 0  # another address
    rb.close()
    closed = cold.push(tmp_path / "a.exp", storage, tag="end")
    assert (closed.rows, closed.files, closed.state[:8]) == (30, 0, "00000002")
    assert [v.rows for v in cold.versions(storage)] == [20, 30, 30]
    for version, count in ((1, 20), ("local", 30), ("end", 30)):
        with expstore.open(storage, mode="r", version=version) as reader:
            assert reader[:]["number"].tolist() == list(range(count))
    cold.prune(storage, keep=1, drop=[1, "local", "end"], grace_seconds=0.0)
    assert not [key for key, _ in storage.connect().keys("parts")]
    assert find_shipped(storage) == find_needed(storage)


def test_a_shipped_version_is_built_once_in_a_bounded_cache(
    open_store: Open, storage: WatchedStorage
) -> None:
    rb = open_store()
    for start in (0, 20, 40):
        rb.extend(episode_rows(20, start=start, length=10))
        cold.push(rb, storage)

    def read(version: int) -> int:
        with expstore.open(storage, mode="r", version=version) as reader:
            return len(reader)

    before = len(storage.requests)
    assert read(1) == 20
    assert sum(key.startswith("shipped/") for _, key in storage.requests[before:]) > 0
    before = len(storage.requests)
    assert read(1) == 20
    assert [act for act, _ in storage.requests[before:]] == ["get"]
    files = storage.cache / "files"
    one = sum(path.stat().st_blocks for path in files.iterdir()) * 512
    storage.cache_bytes = int(one * 1.5)  # room for one
    assert read(2) == 40
    assert sum(path.is_dir() for path in (storage.cache / "versions").iterdir()) == 1
    with expstore.open(storage, mode="r", version=2), pytest.raises(StateError, match="are in use"):
        read(3)
    storage.cache_bytes = one // 2  # its parts would fit
    with pytest.raises(StateError, match="version 3 takes"):
        read(3)
    assert not [path for path in (storage.cache / "versions").iterdir() if path.name.endswith(".tmp")]


def test_what_a_push_of_a_shipped_store_refuses(open_store: Open, storage: WatchedStorage) -> None:
    rb = open_store()
    rb.extend(episode_rows(20, length=10))
    cold.push(rb, storage, tag="a")
    with pytest.raises(SnapshotError, match="already has a version 'a'"):
        cold.push(rb, storage, tag="a")
    with pytest.raises(SnapshotError, match="is not a valid tag"):
        cold.push(rb, storage, tag="7")
    with pytest.raises(ArgumentError, match="tag='b' is for a new version"):
        cold.push(rb, storage, version=1, tag="b")

    def fail(number: int, act: str, key: str) -> None:
        raise RemoteError("the server does not answer")

    storage.before = fail
    with pytest.raises(RemoteError, match="the server does not answer"):
        cold.push(rb, storage)
    storage.calm()
    open_store("b.exp")
    with pytest.raises(LockedError, match="another writer ships"):
        cold.push(rb, storage)
    assert [version.tag for version in cold.versions(storage)] == ["a"]


def test_a_damaged_version_is_named_and_can_be_removed(
    open_store: Open, storage: WatchedStorage, tmp_path: Path
) -> None:
    rb = open_store()
    rb.extend(episode_rows(20, length=10))
    cold.push(rb, storage, tag="a")
    bucket = storage.connect()
    bucket.delete([key for key, _ in bucket.keys("shipped")][:1])
    rb.extend(episode_rows(10, start=20, length=10))
    rb.flush(shipped=True)
    with pytest.raises(expstore.errors.CorruptionError, match="shipped/.* is missing"):
        cold.pull(storage, tmp_path / "new.exp")
    assert not (tmp_path / "new.exp").exists()
    bucket.delete([manifest_key(cold.versions(storage)[0])])
    with pytest.raises(expstore.errors.CorruptionError, match="the state of version 1 .* is missing"):
        cold.pull(storage, tmp_path / "new.exp")
    with pytest.raises(expstore.errors.CorruptionError, match="and a version needs it"):
        cold.prune(storage, keep=1)
    assert cold.prune(storage, drop=["a"]).versions[0].tag == "a"  # which mends it
