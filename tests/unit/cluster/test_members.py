"""Lists of shards: fixed ones, and the cluster file that changes while clients read it."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from expstore.cluster.members import ClusterFile, FileMembers, FixedMembers, ShardEntry
from expstore.errors import ExpStoreError, LockedError, NotFoundError, StateError

STORES = [("http://a:8420/run", "uuid-a"), ("http://b:8420/run", "uuid-b")]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.json"
    ClusterFile.create(path, STORES)
    return path


def test_a_fixed_list_is_numbered_by_position() -> None:
    members = FixedMembers(["http://a:1/x", "http://b:1/x"])
    assert members.read() is members.read()
    assert [(one.number, one.url, one.accepts) for one in members.read().members] == [
        (0, "http://a:1/x", True), (1, "http://b:1/x", True),
    ]  # fmt: skip
    assert pickle.loads(pickle.dumps(members)).read() == members.read()


def test_a_reader_sees_each_change_of_the_file(path: Path) -> None:
    members = FileMembers(path)
    first = members.read()
    assert first.revision == 1
    assert members.read() is first  # the file is not parsed again
    ClusterFile.change(path, lambda known: known.add("http://c:8420/run", "uuid-c"))
    ClusterFile.change(path, lambda known: known.retire(0))
    found = members.read()
    assert found.revision == 3
    assert [(one.number, one.accepts) for one in found.members] == [(0, False), (1, True), (2, True)]
    ClusterFile.change(path, lambda known: known.move(1, "http://d:8420/run", "uuid-b"))
    assert members.read().members[1] == ShardEntry(1, "http://d:8420/run", "uuid-b", accepts=True)
    copied = pickle.loads(pickle.dumps(members))
    ClusterFile.change(path, lambda known: known.remove(0))
    assert [one.number for one in members.read().members] == [1, 2]
    assert copied.read() == members.read()


def test_a_number_is_never_used_twice(path: Path) -> None:
    for act in (
        lambda known: known.add("http://c:8420/run", "uuid-c"),
        lambda known: known.retire(2),
        lambda known: known.remove(2),
        lambda known: known.add("http://c:8420/run", "uuid-c"),
    ):
        ClusterFile.change(path, act)
    assert [one.number for one in FileMembers(path).read().members] == [0, 1, 3]


@pytest.mark.parametrize(
    ("act", "error", "match"),
    [
        (lambda known: known.add("http://x:1/run", "uuid-b"), StateError, "store of shard 1"),
        (lambda known: known.retire(7), NotFoundError, "no shard 7; there are 0, 1"),
        (lambda known: known.retire(0).retire(0), StateError, "retired already"),
        (lambda known: known.retire(0).retire(1), StateError, "last one that accepts"),
        (lambda known: known.remove(1), StateError, "retire it first"),
        (lambda known: known.move(1, "http://x:1/run", "uuid-x"), StateError, "shard 1 is store uuid-b"),
    ],
)
def test_changes_that_make_no_sense_change_nothing(
    path: Path, act: Callable[[ClusterFile], ClusterFile], error: type[ExpStoreError], match: str
) -> None:
    before = path.read_bytes()
    with pytest.raises(error, match=match):
        ClusterFile.change(path, act)
    assert path.read_bytes() == before


def test_files_that_are_no_cluster_are_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="cluster init"):
        FileMembers(tmp_path / "missing.json")
    with pytest.raises(StateError, match="exists"):
        ClusterFile.create(path, STORES)
    facts = json.loads(path.read_text())
    for text, match in (
        ("{", "not a cluster file"),
        ("[]", "not a cluster file"),
        (json.dumps(facts | {"format": 2}), "upgrade"),
        (json.dumps(facts | {"next": 1}), "do not ascend"),
        (json.dumps(facts | {"shards": [facts["shards"][0] | {"accepts": 1}]}), "not a cluster file"),
        (json.dumps(facts | {"shards": facts["shards"][::-1]}), "do not ascend"),
    ):
        path.write_text(text)
        with pytest.raises(StateError, match=match):
            FileMembers(path)


def test_a_file_of_another_cluster_or_an_older_one_is_refused(path: Path, tmp_path: Path) -> None:
    members, old = FileMembers(path), path.read_bytes()
    ClusterFile.change(path, lambda known: known.retire(0))
    members.read()
    path.write_bytes(old)
    with pytest.raises(StateError, match="revision 1, and had 2"):
        members.read()
    other = tmp_path / "other.json"
    ClusterFile.create(other, STORES)
    other.rename(path)
    with pytest.raises(StateError, match="file of cluster"):
        members.read()
    path.unlink()
    with pytest.raises(NotFoundError, match="no cluster file"):
        members.read()


def test_a_file_behind_a_link_is_followed(path: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.json"
    link.symlink_to(path)
    members = FileMembers(link)
    ClusterFile.change(path, lambda known: known.retire(1))
    assert members.read().revision == 2


def test_one_process_changes_the_file_at_a_time(path: Path) -> None:
    def change(known: ClusterFile) -> ClusterFile:
        with pytest.raises(LockedError, match="changes"):
            ClusterFile.change(path, lambda known: known.retire(1))
        return known.retire(0)

    ClusterFile.change(path, change)
    assert [one.accepts for one in FileMembers(path).read().members] == [False, True]
    assert not os.path.exists(f"{path}.tmp")
