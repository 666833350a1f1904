"""Atomic builds: files and folders appear only when complete, and leave nothing after an error."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from expstore.disk.atomic_build import build_atomically, build_folder
from expstore.disk.files import Disk
from expstore.disk.writer_lock import WriterLock
from expstore.errors import LockedError, StateError, StorageError

pytestmark = pytest.mark.usefixtures("no_syncs")  # nothing here is about what a power cut leaves

#: What is built; several processes may try to build the first two at once.
every_kind = pytest.mark.parametrize("kind", ["file", "folder", "folder of one process"])


def build(target: Path, kind: str) -> AbstractContextManager[Path]:
    if kind == "folder of one process":
        return build_folder(Disk(), target)
    return build_atomically(Disk(), target, single=kind == "file")


def fill(temporary: Path, target: Path, kind: str) -> None:
    (temporary / (target.name if kind == "file" else "part")).write_text("whole")


def build_while(target: Path, kind: str, act: Callable[[], object]) -> None:
    """Build something; something else happens before its end."""
    with build(target, kind) as temporary:
        fill(temporary, target, kind)
        act()


@every_kind
def test_a_complete_build_gets_its_name(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "out"
    with build(target, kind) as temporary:
        assert os.listdir(tmp_path) == ["out.tmp"]
        fill(temporary, target, kind)
    assert os.listdir(tmp_path) == ["out"]
    assert (target if kind == "file" else target / "part").read_text() == "whole"
    assert kind == "file" or os.listdir(target) == ["part"]


@every_kind
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_error_leaves_nothing(tmp_path: Path, error: type[BaseException], kind: str) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(error):
        build_while(tmp_path / "out", kind, fail)
    assert os.listdir(tmp_path) == []


@every_kind
def test_a_target_made_by_another_process_stays(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "out"
    error = StorageError if kind == "folder of one process" else StateError

    def interfere() -> None:
        target.mkdir()
        (target / "part").write_text("theirs")

    with pytest.raises(error):
        build_while(target, kind, interfere)
    assert os.listdir(tmp_path) == ["out"]
    assert (target / "part").read_text() == "theirs"


@every_kind
def test_files_of_a_killed_build_are_removed_first(tmp_path: Path, kind: str) -> None:
    (tmp_path / "out.tmp/rows").mkdir(parents=True)
    (tmp_path / "out.tmp/rows/x").write_text("half")
    with build(tmp_path / "out", kind) as temporary:
        assert set(os.listdir(temporary)) <= {"LOCK"}
        fill(temporary, tmp_path / "out", kind)
    assert os.listdir(tmp_path) == ["out"]


def test_two_do_not_make_the_same(tmp_path: Path) -> None:
    (tmp_path / "out.tmp").mkdir()
    (tmp_path / "out.tmp/theirs").write_text("being made")
    lock = WriterLock(Disk(), tmp_path / "out.tmp/LOCK")
    with pytest.raises(LockedError, match="another process or thread merges into .*out at the moment"):
        with build_atomically(Disk(), tmp_path / "out", doing="merges into"):
            pass
    assert (tmp_path / "out.tmp/theirs").read_text() == "being made"
    lock.release()
