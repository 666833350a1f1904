"""Versions on an object storage in memory: what is sent, what comes back, and what is refused."""

from __future__ import annotations

import hashlib
import itertools
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore import cold
from expstore.cold import upload, version_list
from expstore.cold.parts import LocalPart, read_part
from expstore.cold.version_list import LIST, Manifest, RemoteVersion, VersionList, manifest_key, part_key
from expstore.disk.files import Disk
from expstore.errors import (
    ArgumentError,
    CorruptionError,
    MigrationError,
    NotFoundError,
    SnapshotError,
    StateError,
)
from expstore.maintenance import verify
from tests.support.batches import counted_frames, episode_rows
from tests.support.object_stores import Killed, WatchedStorage, check_whole

pytestmark = pytest.mark.usefixtures("no_syncs", "no_index_on_close")

Buffer = expstore.TensorDictReplayBuffer


def _objects(storage: WatchedStorage) -> dict[str, bytes]:
    found = obstore.list(storage.where).collect()
    return {item["path"]: bytes(obstore.get(storage.where, item["path"]).bytes()) for item in found}


# -- there and back ----------------------------------------------------------------------------------


def _frames(rb: Buffer) -> None:
    rb.extend(
        TensorDict(
            {"pixels": counted_frames(torch.arange(40), 3, 16, 16), "reward": torch.arange(40.0)}, [40]
        )
    )


def _texts(rb: Buffer) -> None:
    rb.extend({"prompt": [f"text {i}" * (i % 7) for i in range(60)], "reward": np.arange(60.0)})


STORES: dict[str, tuple[dict[str, Any], Callable[[Buffer], object]]] = {
    "flat": ({}, lambda rb: rb.extend(episode_rows(70, length=10))),
    "ring": ({"capacity": 32}, lambda rb: rb.extend(episode_rows(70, length=10))),
    "packed": ({"layout": "packed"}, _frames),
    "arrow": ({"layout": "arrow"}, _texts),
    "empty": ({}, lambda rb: None),
    "prioritized": ({"sampler": "prioritized"}, lambda rb: rb.extend(episode_rows(70, length=10))),
}


@pytest.mark.guarantee(
    "version/pulls",
    "A pulled store is the one that `loads` makes of the version; a part that is damaged or missing is "
    "found and named.",
)
@pytest.mark.slow
@pytest.mark.parametrize("kind", STORES)
def test_a_pulled_store_is_the_one_that_loads_makes(
    kind: str, tmp_path: Path, storage: WatchedStorage
) -> None:
    settings, fill = STORES[kind]
    with expstore.open(tmp_path / "run.exp", seed=0, **settings) as rb:
        fill(rb)
        if kind == "prioritized":
            rb.update_priority(torch.arange(70), torch.arange(70) + 1.0)
        pushed = cold.push(rb, storage)
        assert (pushed.number, pushed.rows, pushed.tag) == (1, len(rb), None)
        assert pushed.store == rb.stats()["uuid"]
    assert cold.pull(storage, tmp_path / "pulled.exp") == pushed
    settings = {name: value for name, value in settings.items() if name != "layout" or value == "arrow"}
    with expstore.open(tmp_path / "loaded.exp", **settings) as rb:
        rb.loads(tmp_path / "run.exp" / "versions")
        expected = _read_all(rb)
    with expstore.open(tmp_path / "pulled.exp", sampler=settings.get("sampler")) as rb:
        assert rb.storage.capacity == settings.get("capacity")
        assert _read_all(rb) == expected
        fill(rb)  # it is a store like any other
    assert verify(tmp_path / "pulled.exp") == []
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["loaded.exp", "pulled.exp", "run.exp"]


def _read_all(rb: Buffer) -> list[Any]:
    relations = ("transitions", "episodes", "fragments", "priorities")
    found: list[Any] = [rb.sql(f"FROM {name} ORDER BY ALL").fetchall() for name in relations]
    return [*found, [rb.sample(4)["id"].tolist() for _ in range(3)] if len(rb) else []]


def test_versions_by_number_and_tag(tmp_path: Path, rb: Buffer, storage: WatchedStorage) -> None:
    assert cold.versions(storage) == []
    with pytest.raises(SnapshotError, match="has no version: it has no versions"):
        cold.pull(storage, tmp_path / "new.exp")
    rb.snapshots.tag("start")
    cold.push(rb, storage, version="start")
    rb.extend(episode_rows(10, start=50))
    cold.push(rb, storage)
    assert [(v.number, v.tag, v.rows, v.episodes) for v in cold.versions(storage)] == [
        (1, "start", 50, 5),
        (2, None, 60, 6),
    ]
    for number, (version, rows) in enumerate([(1, 50), ("start", 50), ("v2", 60), ("2", 60), (None, 60)]):
        cold.pull(storage, tmp_path / f"{number}.exp", version=version)
        with expstore.open(tmp_path / f"{number}.exp", mode="r") as reader:
            assert len(reader) == rows
    with pytest.raises(SnapshotError, match=r"has no version 7: there are 1 \(start\), 2"):
        cold.pull(storage, tmp_path / "new.exp", version=7)


def test_a_path_or_a_folder_of_versions_is_pushed(
    tmp_path: Path, rb: Buffer, storage: WatchedStorage
) -> None:
    rb.dumps(tmp_path / "backup")
    rb.extend(episode_rows(10, start=50))
    rb.dumps(tmp_path / "backup")
    rb.close()
    assert cold.push(tmp_path / "backup", storage).rows == 60
    assert cold.push(tmp_path / "backup", storage, version=1).rows == 50
    assert cold.push(tmp_path / "backup" / "v0001", storage).number == 2  # which is there already
    assert cold.push(tmp_path / "run.exp", storage).number == 3


def test_a_pull_refuses_a_path_that_exists(tmp_path: Path, rb: Buffer, storage: WatchedStorage) -> None:
    cold.push(rb, storage)
    with pytest.raises(StateError, match="exists already"):
        cold.pull(storage, tmp_path / "run.exp")
    with pytest.raises(NotFoundError, match="there is no folder"):
        cold.pull(storage, tmp_path / "none" / "run.exp")


# -- what is sent ------------------------------------------------------------------------------------


def test_only_changes_are_read_and_sent(
    tmp_path: Path, rb: Buffer, storage: WatchedStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = cold.push(rb, storage)
    assert first.new_parts == storage.count("put") - 1  # and the list of its files
    assert first.new_bytes <= first.bytes
    read: list[Path] = []

    def note(disk: Disk, path: Path) -> LocalPart:
        read.append(path)
        return read_part(disk, path)

    monkeypatch.setattr(upload, "read_part", note)
    rb.extend(episode_rows(5, start=50))
    second = cold.push(rb, storage)
    assert 0 < second.new_parts < first.new_parts
    assert 0 < len(read) < second.files
    assert all(path.stat().st_nlink == 1 for path in read)
    assert check_whole(storage) == [first, second]


def test_a_version_is_sent_once(tmp_path: Path, rb: Buffer, storage: WatchedStorage) -> None:
    version = rb.dumps(tmp_path / "backup")
    first = cold.push(tmp_path / "backup", storage)
    before = storage.count("put")
    assert cold.push(tmp_path / "backup", storage, version=version.number) == first
    assert storage.count("put") == before


def test_zeros_are_not_sent(tmp_path: Path, storage: WatchedStorage) -> None:
    """A shard has its full length at once."""
    with expstore.open(tmp_path / "run.exp", layout="flat") as rb:
        rb.extend(TensorDict({"a": torch.ones(10, 1000)}, [10]))
        version = cold.push(rb, storage)
    assert version.bytes < 1_000_000
    cold.pull(storage, tmp_path / "new.exp")
    with expstore.open(tmp_path / "new.exp", mode="r") as reader:
        assert reader[:]["a"].eq(1).all()


@pytest.mark.some(4)
@pytest.mark.parametrize("size", [0, 1, 1 << 16, (1 << 16) + 1, 300_000, 20 << 20])
def test_a_file_comes_back_with_its_holes(size: int, tmp_path: Path, storage: WatchedStorage) -> None:
    from expstore.cold.parts import fetch_file
    from expstore.cold.version_list import PartFile

    rng, data = np.random.default_rng(size), bytearray(size)
    for start in range(0, size, 100_000):
        if rng.random() < 0.5:
            data[start : start + 70_000] = rng.bytes(min(70_000, size - start))
    (tmp_path / "a").write_bytes(data)
    disk, bucket = Disk(), storage.connect()
    local = read_part(disk, tmp_path / "a")
    part = f"{'0' * 22}/{local.sha256}" if local.sha256 else ""
    if part:
        bucket.write(part_key(part), local.read(disk))
    entry = PartFile(part, local.file.size, local.file.runs)
    entry.check()
    fetch_file(bucket, disk, entry, tmp_path / "b", "b")
    assert (tmp_path / "b").read_bytes() == data


# -- what is refused ---------------------------------------------------------------------------------


def test_another_store_is_refused_before_anything_is_written(
    tmp_path: Path, rb: Buffer, storage: WatchedStorage
) -> None:
    cold.push(rb, storage)
    with expstore.open(tmp_path / "other.exp") as other:
        other.extend(episode_rows(5))
        with pytest.raises(StateError, match="has versions of another store") as caught:
            cold.push(other, storage)
        assert caught.value.kind == "mismatch"
        assert not (tmp_path / "other.exp" / "versions").exists()
        assert len(cold.versions(storage)) == 1
        assert cold.push(other, storage, any_store=True).number == 2


def test_a_tag_is_given_once(tmp_path: Path, rb: Buffer, storage: WatchedStorage) -> None:
    rb.snapshots.tag("best", tmp_path / "a")
    rb.snapshots.tag("best", tmp_path / "b")
    cold.push(tmp_path / "a", storage)
    with pytest.raises(SnapshotError, match="already has a version 'best'"):
        cold.push(tmp_path / "b", storage)
    assert len(check_whole(storage)) == 1


def test_what_cannot_be_pushed_is_refused(tmp_path: Path, rb: Buffer, storage: WatchedStorage) -> None:
    memory = expstore.TensorDictReplayBuffer(storage=expstore.MemoryStorage(10))
    with pytest.raises(StateError, match="has no folder"):
        cold.push(memory, storage)
    with pytest.raises(ArgumentError, match="cannot push a int"):
        cold.push(3, storage)  # type: ignore[arg-type]
    with pytest.raises(expstore.errors.LockedError):
        cold.push(tmp_path / "run.exp", storage)
    with pytest.raises(SnapshotError, match="has no version 9"):
        cold.push(rb, storage, version=9)
    with pytest.raises(SnapshotError):
        cold.push(tmp_path / "none", storage)
    assert cold.versions(storage) == []


#: Addresses with a user name, a password or options.
SECRETS = (
    "s3://key:secret@bucket/run", "s3://key@bucket/run", "s3://bucket/run?secret=1", "s3://bucket/run#secret",
    "s3://key:a/secret@bucket/run", "s3://key:a#b?secret@bucket/run", "https://bucket.minio/run?secret=1",
    "https://key:secret@minio:9000/bucket/run", "s3a://key:secret@bucket",
)  # fmt: skip


def test_credentials_in_a_url_are_refused_and_not_repeated() -> None:
    acts: list[Callable[[str], object]] = [
        cold.versions,
        expstore.open,
        lambda url: expstore.open(url, mode="r"),
        lambda url: cold.pull(url, "x"),
    ]
    for url, act in itertools.product(SECRETS, acts):
        with pytest.raises(
            StateError, match="contains credentials or options|is a URL, not a path"
        ) as caught:
            act(url)
        assert "secret" not in caught.value.message
        assert "key" not in caught.value.message


def test_other_urls_are_refused() -> None:
    for url in ("s3://", "s3:///run", "s3://a/../b", "s3://bucket//run", "gs://bucket/run", "run"):
        with pytest.raises(StateError, match="is not the address of an object storage"):
            cold.versions(url)


def test_settings_are_checked(tmp_path: Path) -> None:
    for wrong in ({"cache_bytes": "many"}, {"cache_bytes": 0}, {"retries": -1}, {"retries": 1.5}):
        with pytest.raises(ArgumentError):
            cold.ObjectStorage("s3://bucket/run", **wrong)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="is not the address"):
        cold.versions(tmp_path)
    with pytest.raises(ArgumentError, match="retries= cannot be used"):
        cold.ObjectStorage(WatchedStorage().where, retries=3)
    assert cold.ObjectStorage("s3://bucket/run/").name == "s3://bucket/run"


# -- damage ------------------------------------------------------------------------------------------


def _flip(storage: WatchedStorage, key: str) -> None:
    data = bytearray(obstore.get(storage.where, key).bytes())
    data[len(data) // 2] ^= 1
    obstore.put(storage.where, key, bytes(data))


@pytest.mark.guarantee("version/pulls")
def test_a_damaged_part_is_named(tmp_path: Path, rb: Buffer, storage: WatchedStorage) -> None:
    version = cold.push(rb, storage)
    manifest = Manifest.load(storage.connect(), version)
    path, file = next(item for item in manifest.files.items() if item[0].startswith("columns/number/c"))
    key = part_key(file.part)
    whole = bytes(obstore.get(storage.where, key).bytes())
    for damage, found in [
        (lambda: _flip(storage, key), "has SHA-256"),
        (lambda: obstore.put(storage.where, key, whole[:-1]), "is too short"),
        (lambda: obstore.put(storage.where, key, whole + b"\0"), "is too long"),
        (lambda: obstore.delete(storage.where, key), "is missing"),
    ]:
        damage()
        with pytest.raises(CorruptionError, match=f"{path} of version 1 is damaged in .*{key} {found}"):
            cold.pull(storage, tmp_path / "new.exp")
        with pytest.raises(CorruptionError, match=f"{path} of version 1 is damaged"):
            expstore.open(cold.ObjectStorage(storage.where, cache=tmp_path / "cache"), mode="r")
        assert not (tmp_path / "new.exp").exists()


@pytest.mark.guarantee("version/pulls")
def test_damaged_lists_are_named(tmp_path: Path, rb: Buffer, storage: WatchedStorage) -> None:
    version = cold.push(rb, storage)
    _flip(storage, manifest_key(version))
    for act in (cold.pull, lambda where, path: cold.prune(where, keep=1)):
        with pytest.raises(
            CorruptionError, match="the list of files of version 1 in MemoryStore .* is damaged"
        ):
            act(storage, tmp_path / "new.exp")
    obstore.delete(storage.where, manifest_key(version))
    with pytest.raises(CorruptionError, match="the list of files of version 1 .* is missing"):
        cold.pull(storage, tmp_path / "new.exp")
    _flip(storage, LIST)
    with pytest.raises(CorruptionError, match=r"versions\.json in MemoryStore is damaged"):
        cold.versions(storage)


def test_a_list_of_a_newer_version_is_refused(
    storage: WatchedStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(version_list, "_FIRST_FORMAT", 3)
        assert VersionList().commit(storage.connect(), None)
    with pytest.raises(MigrationError, match="has format 3"):
        cold.versions(storage)


_PART = "0" * 22 + "/" + "0" * 64
FORGED_FILES: list[list[Any]] = [
    ["", 5, None],
    [_PART, 0, None],
    ["../" + "0" * 64, 5, None],
    [_PART, 5, [[3, 9]]],
    [_PART, 9, [[3, 5], [4, 6]]],
    [_PART, 9, [[3, 3]]],
    [_PART, -9, None],
    [_PART],
]


def test_forged_lists_of_files_are_refused(storage: WatchedStorage) -> None:
    """Files outside of the version, and files that cannot be."""
    outside = ("../out", "/tmp/out", "a/../../out", "a\\b", "", "a\0b")
    for files, folders in (
        *(({path: ["", 0, None]}, []) for path in outside),
        *(({}, [path]) for path in outside),
        *(({"a": file}, []) for file in FORGED_FILES),
    ):
        data = version_list.seal({"format": 1, "files": files, "folders": folders})
        version = RemoteVersion(
            number=1, tag=None, time=0, rows=0, episodes=0, files=1, bytes=0, new_parts=0, new_bytes=0,
            store="", push="0" * 22, source="", manifest=hashlib.sha256(data).hexdigest(),
        )  # fmt: skip
        obstore.put(storage.where, manifest_key(version), data)
        with pytest.raises(CorruptionError, match="is damaged"):
            Manifest.load(storage.connect(), version)


# -- pruning -----------------------------------------------------------------------------------------


def _push_versions(rb: Buffer, storage: WatchedStorage, count: int, place: Path) -> None:
    for number in range(count):
        rb.extend(episode_rows(10, start=1000 + 10 * number))
        rb.dumps(place)
        cold.push(place, storage)


@pytest.mark.guarantee("version/races")
def test_pruning_keeps_what_remaining_versions_need(
    tmp_path: Path, rb: Buffer, storage: WatchedStorage
) -> None:
    rb.snapshots.tag("first")
    cold.push(rb, storage, version="first")
    _push_versions(rb, storage, 4, tmp_path / "backup")
    before = _objects(storage)
    assert cold.prune(storage, keep=4).versions == ()
    assert _objects(storage).keys() == before.keys()
    done = cold.prune(storage, keep=2)
    assert [version.number for version in done.versions] == [2, 3]
    after = _objects(storage)
    gone = {key: len(data) for key, data in before.items() if key not in after and key.startswith("parts/")}
    assert (done.parts, done.bytes) == (len(gone), sum(gone.values()))
    assert done.parts > 0
    assert [version.number for version in check_whole(storage)] == [1, 4, 5]
    assert cold.push(tmp_path / "backup", storage, version=2).number == 6  # its parts are sent again
    check_whole(storage)
    cold.prune(storage, keep=1, drop=["first"])
    (last,) = check_whole(storage)
    needed = {part_key(part) for part in Manifest.load(storage.connect(), last).parts}
    assert _objects(storage).keys() == {*needed, manifest_key(last), LIST, "probe"}
    with pytest.raises(SnapshotError, match="has no version 77"):
        cold.prune(storage, drop=[77])
    for wrong in ({"keep": 0}, {"keep": 1, "grace_seconds": -1}):
        with pytest.raises(ArgumentError):
            cold.prune(storage, **wrong)


def test_a_version_whose_list_of_files_is_damaged_can_be_dropped(
    tmp_path: Path, rb: Buffer, storage: WatchedStorage
) -> None:
    _push_versions(rb, storage, 2, tmp_path / "backup")
    _flip(storage, manifest_key(cold.versions(storage)[1]))
    assert [version.number for version in cold.prune(storage, drop=[2]).versions] == [2]
    assert [version.number for version in check_whole(storage)] == [1]


def test_a_clock_that_is_behind_is_reported(
    tmp_path: Path, rb: Buffer, storage: WatchedStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    _push_versions(rb, storage, 2, tmp_path / "backup")
    cold.prune(storage, keep=1, grace_seconds=0)
    monkeypatch.setattr(upload, "make_push_id", lambda: "0" * 22)
    with pytest.raises(StateError, match="the clock of this machine"):
        cold.push(rb, storage)


# -- several programs --------------------------------------------------------------------------------


@pytest.mark.guarantee(
    "version/races",
    "Each of several pushes to one address commits one version, and a `prune` at the same time harms none.",
)
def test_every_push_commits_its_own_version(tmp_path: Path, rb: Buffer, storage: WatchedStorage) -> None:
    places = [tmp_path / f"backup-{number}" for number in range(4)]
    for number, place in enumerate(places):
        rb.extend(episode_rows(10, start=100 * number))
        rb.dumps(place)
    start = threading.Barrier(4)

    def push(place: Path) -> int:
        start.wait()
        return cold.push(place, storage).number

    with ThreadPoolExecutor(4) as pool:
        numbers = list(pool.map(push, places))
    assert sorted(numbers) == [1, 2, 3, 4]
    assert [version.number for version in check_whole(storage)] == [1, 2, 3, 4]
    assert {version.rows for version in cold.versions(storage)} == {60, 70, 80, 90}


@pytest.mark.guarantee("version/races")
@pytest.mark.slow
def test_a_prune_before_any_request_of_a_push_harms_no_version(
    tmp_path: Path, rb: Buffer, storage: WatchedStorage
) -> None:
    """It retires the push, the versions whose parts the push refers to, and an interrupted push."""
    for number in range(3):
        rb.extend(episode_rows(10, start=1000 + 10 * number))
        rb.dumps(tmp_path / "backup")
    requests = 0
    for number in range(1000):
        fresh = WatchedStorage()
        cold.push(tmp_path / "backup", fresh, version=1)
        cold.push(tmp_path / "backup", fresh, version=2)

        def prune(storage: WatchedStorage = fresh) -> None:
            cold.prune(storage, drop=["2"], grace_seconds=0)
            check_whole(storage)

        fresh.run_before(number, prune)
        cold.push(tmp_path / "backup", fresh, version=3)
        found = [version.number for version in check_whole(fresh)]
        if found == [1, 2, 3]:  # it ended before that request
            break
        assert found == [1, 3]
        requests += 1
    assert requests > 15


@pytest.mark.guarantee("version/races")
@pytest.mark.slow
def test_a_push_before_any_request_of_a_prune_harms_no_version(
    tmp_path: Path, rb: Buffer, storage: WatchedStorage
) -> None:
    """It may find parts of an interrupted push, and of a removed version, that are about to be deleted."""
    for number in range(3):
        rb.extend(episode_rows(10, start=1000 + 10 * number))
        rb.dumps(tmp_path / "backup")
    requests = 0
    for number in range(1000):
        fresh = WatchedStorage()
        cold.push(tmp_path / "backup", fresh, version=3)
        cold.push(tmp_path / "backup", fresh, version=2)
        cold.push(tmp_path / "backup", fresh, version=1)
        fresh.kill_at(14)
        rb.extend(episode_rows(10, start=2000 + 10 * number))
        last = rb.dumps(tmp_path / "last").number
        with pytest.raises(Killed):
            cold.push(tmp_path / "last", fresh, version=last)

        def push(storage: WatchedStorage = fresh, version: int = last) -> None:
            cold.push(tmp_path / "last", storage, version=version)
            check_whole(storage)

        fresh.run_before(number, push)
        cold.prune(fresh, keep=1, grace_seconds=0)
        found = [version.number for version in check_whole(fresh)]
        if found == [3]:  # it ended before that request
            break
        assert found in ([4], [3, 4])
        requests += 1
    assert requests > 5


def _seal_list(storage: WatchedStorage, content: dict[str, Any]) -> None:
    """Replace the list of versions by one whose checksum matches."""
    content.pop("sha256", None)
    storage.connect()._store.put(LIST, version_list.seal(content))


def test_forged_lists(rb: Buffer, storage: WatchedStorage, tmp_path: Path) -> None:
    """A list with a matching checksum and wrong values is damage, not another error."""
    cold.push(rb, storage)
    content = json.loads(VersionList.load(storage.connect())[0].pack())
    good = dict(content["versions"][0])
    changes: list[dict[str, Any]] = [
        {"number": 0.5}, {"number": -1}, {"rows": "x"}, {"push": "../.."}, {"manifest": "a b"}, {"tag": [1]},
        {"time": None}, {"more": 1},
    ]  # fmt: skip
    for change in changes:
        content["versions"][0] = good | change
        _seal_list(storage, content)
        with pytest.raises(CorruptionError, match="is damaged"):
            cold.pull(storage, tmp_path / "a.exp")


def test_a_version_of_a_thousand_folders(rb: Buffer, storage: WatchedStorage, tmp_path: Path) -> None:
    cold.push(rb, storage)
    found = VersionList.load(storage.connect())[0]
    listed = json.loads(storage.connect().read(manifest_key(found.versions[0])) or b"")
    listed.pop("sha256")
    listed["folders"].append("a/" * 1000)
    sealed = version_list.seal(listed)
    version = replace(found.versions[0], manifest=hashlib.sha256(sealed).hexdigest())
    bucket = storage.connect()
    bucket._store.put(manifest_key(version), sealed)
    content = json.loads(replace(found, versions=(version,)).pack())
    _seal_list(storage, content)
    with pytest.raises(CorruptionError, match="folders deep"):
        cold.pull(storage, tmp_path / "a.exp")
