"""Atomic builds: files and folders appear only when complete, and leave nothing after an error."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from expstore.disk.atomic_build import build_atomically, build_folder
from expstore.disk.files import Disk
from expstore.disk.writer_lock import WriterLock
from expstore.errors import LockedError, StateError, StorageError

pytestmark = pytest.mark.usefixtures("no_syncs")  # nothing here is about what a power cut leaves


def fill(temporary: Path, target: Path, *, single: bool) -> None:
    (temporary / (target.name if single else "part")).write_text("whole")


@pytest.mark.parametrize("single", [False, True])
def test_a_complete_build_gets_its_name(tmp_path: Path, single: bool) -> None:
    target = tmp_path / "out"
    with build_atomically(Disk(), target, single=single) as temporary:
        assert os.listdir(tmp_path) == ["out.tmp"]
        fill(temporary, target, single=single)
    assert os.listdir(tmp_path) == ["out"]
    assert (target if single else target / "part").read_text() == "whole"
    assert single or os.listdir(target) == ["part"]


def make(target: Path, *, single: bool, meanwhile: Callable[[], None]) -> None:
    """Make something, while something else happens."""
    with build_atomically(Disk(), target, single=single) as temporary:
        fill(temporary, target, single=single)
        meanwhile()


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_error_leaves_nothing(tmp_path: Path, error: type[BaseException], single: bool) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(error):
        make(tmp_path / "out", single=single, meanwhile=fail)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("single", [False, True])
def test_a_target_made_by_another_process_stays(tmp_path: Path, single: bool) -> None:
    target = tmp_path / "out"

    def interfere() -> None:
        target.write_text("theirs")

    with pytest.raises(StateError, match="has created .*out meanwhile"):
        make(target, single=single, meanwhile=interfere)
    assert os.listdir(tmp_path) == ["out"]
    assert target.read_text() == "theirs"


def test_files_of_a_killed_build_are_removed_first(tmp_path: Path) -> None:
    (tmp_path / "out.tmp/rows").mkdir(parents=True)
    (tmp_path / "out.tmp/rows/x").write_text("half")
    (tmp_path / "out.tmp/y").write_text("half")
    with build_atomically(Disk(), tmp_path / "out") as temporary:
        assert os.listdir(temporary) == ["LOCK"]
        fill(temporary, tmp_path / "out", single=False)
    assert os.listdir(tmp_path / "out") == ["part"]


def test_two_do_not_make_the_same(tmp_path: Path) -> None:
    (tmp_path / "out.tmp").mkdir()
    (tmp_path / "out.tmp/theirs").write_text("being made")
    lock = WriterLock(Disk(), tmp_path / "out.tmp/LOCK")
    with pytest.raises(LockedError, match="another process or thread merges into .*out at the moment"):
        with build_atomically(Disk(), tmp_path / "out", doing="merges into"):
            pass
    assert (tmp_path / "out.tmp/theirs").read_text() == "being made"
    lock.release()


# -- folders that only one process builds --------------------------------------------------------------------


def test_a_folder_has_its_name_when_it_is_complete(tmp_path: Path) -> None:
    (tmp_path / "out.tmp").mkdir()
    (tmp_path / "out.tmp/x").write_text("left over from a process that was killed")
    with build_folder(Disk(), tmp_path / "out") as temporary:
        assert os.listdir(tmp_path) == ["out.tmp"]
        assert os.listdir(temporary) == []
        (temporary / "part").write_text("whole")
    assert os.listdir(tmp_path) == ["out"]
    assert (tmp_path / "out/part").read_text() == "whole"


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_error_leaves_no_folder(tmp_path: Path, error: type[BaseException]) -> None:
    def build() -> None:
        with build_folder(Disk(), tmp_path / "out") as temporary:
            (temporary / "part").write_text("half")
            raise error

    with pytest.raises(error):
        build()
    assert os.listdir(tmp_path) == []


def test_a_folder_in_the_way_stays(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/part").write_text("theirs")
    with pytest.raises(StorageError), build_folder(Disk(), tmp_path / "out") as temporary:
        (temporary / "part").write_text("ours")
    assert os.listdir(tmp_path) == ["out"]
    assert (tmp_path / "out/part").read_text() == "theirs"
