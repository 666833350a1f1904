"""Symbolic links: a store's folder may be one; links inside of it are refused."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore.disk.files import Disk
from expstore.disk.writer_lock import WriterLock
from expstore.errors import StorageError
from expstore.maintenance import repair, verify
from tests.support.stores import build_store, read_files

pytestmark = pytest.mark.usefixtures("no_syncs")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return build_store(tmp_path / "run.exp", TensorDict({"x": torch.arange(20)}, [20]), capacity=50, seed=1)


def move_out(path: Path) -> Path:
    """Move a file or folder out of the store and leave a link to it."""
    other = path.parents[len(path.parents) - 1 - path.parts.index("run.exp")].with_name("elsewhere")
    path.rename(other)
    path.symlink_to(other)
    return other


NAMES = ["LOCK", "STATE", "expstore.json", "episodes.log", "checksums", "journal", "columns", "columns/x/c"]


@pytest.mark.guarantee(
    "process/links",
    "No operation on a store reaches a file elsewhere through a symbolic link.",
)
@pytest.mark.some(4)
@pytest.mark.parametrize("name", NAMES)
def test_nothing_below_the_folder_may_be_a_link(run: Path, name: str) -> None:
    path = run / name
    other = move_out(path)
    before = read_files(other.parent)
    for act in (
        lambda: expstore.open(run),
        lambda: expstore.open(run, mode="w", capacity=50),
        lambda: expstore.open(run, mode="r"),
        lambda: verify(run),
        lambda: repair(run),
    ):
        with pytest.raises(StorageError, match=f"{path} is a symbolic link") as caught:
            act()
        assert caught.value.kind == "not_regular"
        assert "only the store's own folder may be a link" in str(caught.value)
        assert read_files(other.parent) == before


def test_a_lock_that_is_a_link_is_not_written_through(tmp_path: Path) -> None:
    target = tmp_path / "mine.txt"
    target.write_text("mine" * 100)
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "LOCK").symlink_to(target)
    with pytest.raises(StorageError, match="LOCK is a symbolic link"):
        WriterLock(Disk(), tmp_path / "store" / "LOCK")
    with pytest.raises(StorageError, match="LOCK is a symbolic link"):
        expstore.open(tmp_path / "store", capacity=10)
    assert target.read_text() == "mine" * 100
    assert os.listdir(tmp_path / "store") == ["LOCK"]


@pytest.mark.guarantee("process/links")
def test_a_link_to_nothing_makes_no_file_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "other")
    for act in (
        lambda: Disk().open(tmp_path / "link", create=True),
        lambda: Disk().put(tmp_path / "link", b"x"),
        lambda: Disk().read_whole(tmp_path / "link"),
    ):
        with pytest.raises(StorageError, match="is a symbolic link"):
            act()
    assert not (tmp_path / "other").exists()


def make_socket(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as end:
        end.bind(path)


@pytest.mark.guarantee("process/links")
@pytest.mark.parametrize("make", [os.mkfifo, make_socket])
def test_only_files_and_folders_are_opened(
    run: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[str], None]
) -> None:
    """And nobody waits for the other end of a pipe."""
    monkeypatch.chdir(run)  # a socket's name is short
    os.unlink("STATE")
    make("STATE")
    for write in (False, True):
        with pytest.raises(StorageError):
            Disk().open(run / "STATE", write=write)
    with pytest.raises(StorageError):
        Disk().read_whole(run / "STATE")
    for mode in ("a", "r"):
        with pytest.raises(StorageError, match="STATE is neither a file nor a folder"):
            expstore.open(run, mode=mode)


@pytest.mark.guarantee("process/links")
def test_the_folder_itself_may_be_a_link(run: Path, tmp_path: Path) -> None:
    link = tmp_path / "latest.exp"
    link.symlink_to(run)
    with expstore.open(link) as rb:
        link.unlink()  # it was followed once
        link.symlink_to(tmp_path / "nothing")
        rb.extend(TensorDict({"x": torch.arange(5)}, [5]))
        rb.flush()
        with pytest.raises(expstore.errors.LockedError):
            expstore.open(run)
        with expstore.open(run, mode="r") as follower:
            assert len(follower) == 25
    link.unlink()
    link.symlink_to(run)
    assert verify(link) == []
    with expstore.open(link, mode="r") as rb:
        assert len(rb) == 25
    assert not repair(link).left
    with expstore.open(link, mode="w", capacity=10) as rb:
        rb.extend(TensorDict({"x": torch.arange(5)}, [5]))
    assert (tmp_path / "run.exp.old-1").is_dir()
    assert link.is_symlink()


@pytest.mark.guarantee("process/links")
def test_versions_may_be_reached_through_a_link(run: Path, tmp_path: Path) -> None:
    (tmp_path / "big" / "versions").mkdir(parents=True)
    (tmp_path / "versions").symlink_to(tmp_path / "big" / "versions")
    with expstore.open(run) as rb:
        rb.dumps(tmp_path / "versions")
        rb.extend(TensorDict({"x": torch.arange(5)}, [5]))
        rb.dumps(tmp_path / "versions")
        rb.loads(tmp_path / "versions")
    with expstore.open(tmp_path / "versions", mode="r") as rb:
        assert len(rb) == 25
    assert verify(run) == []
