"""LOCK: one writer per store; a refused writer reads the name of the holder."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from expstore.disk.files import Disk, File, _to_error
from expstore.disk.writer_lock import WriterLock, is_locked, read_owner
from expstore.errors import LockedError, StateError, StorageError
from tests.support.forks import in_child
from tests.support.gated_disk import GatedDisk, refuse

KEEP_OPEN = """
import sys
from pathlib import Path
from expstore.disk.files import Disk, File, _to_error
from expstore.disk.writer_lock import WriterLock, is_locked, read_owner
lock = WriterLock(Disk(), Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def take(path: Path) -> WriterLock:
    return WriterLock(Disk(), path / "LOCK")


def test_a_second_one_in_this_process_learns_since_when(tmp_path: Path) -> None:
    lock = take(tmp_path)
    assert lock.held
    for _ in range(2):
        with pytest.raises(LockedError, match=rf"\({os.getpid()}\) has it open since 20\d\d-") as caught:
            take(tmp_path)
        assert str(tmp_path) in str(caught.value)
        assert "close() it first" in caught.value.hint
        assert isinstance(caught.value, StateError)
    lock.release()
    assert not lock.held
    take(tmp_path).release()


def test_a_lock_that_cannot_be_signed_is_free_again(tmp_path: Path) -> None:
    with pytest.raises(StorageError):
        WriterLock(GatedDisk(refuse("write")), tmp_path / "LOCK")
    take(tmp_path).release()


def test_another_process_is_named(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", KEEP_OPEN, str(tmp_path / "LOCK")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdout.readline() == b"held\n"
    message = rf"process {child.pid} on {socket.gethostname()} has it open since .*close it there first"
    with pytest.raises(LockedError, match=message):
        take(tmp_path)
    child.send_signal(signal.SIGKILL)  # the kernel gives the lock back
    child.wait()
    child.stdin.close()
    child.stdout.close()
    take(tmp_path).release()


def test_a_text_that_explains_nothing_still_locks(tmp_path: Path) -> None:
    lock = take(tmp_path)
    for text in (b"", b"\0" * 256, b"[]", b'{"pid": "x"}', b"\xff"):
        (tmp_path / "LOCK").write_bytes(text)
        with pytest.raises(LockedError, match="another process has it open"):
            take(tmp_path)
    lock.release()


def test_the_address_of_a_server_is_named(tmp_path: Path) -> None:
    lock, path = take(tmp_path), tmp_path / "LOCK"
    lock.announce("http://trainer:8420/demo")
    owner = read_owner(Disk(), path)
    assert (owner.address, path.stat().st_size) == ("http://trainer:8420/demo", 256)
    lock.announce(f"http://{'x' * 300}/demo")  # too long for the text, which stays as it is
    assert read_owner(Disk(), path) == owner
    path.write_text(json.dumps({"pid": 1, "host": "other", "since": 0, "address": owner.address}))
    with pytest.raises(LockedError, match="process 1 on other .*, and serves it at http://trainer:8420/demo"):
        take(tmp_path)
    lock.release()
    lock = take(tmp_path)  # by a process that is no server
    owner = read_owner(Disk(), path)
    assert owner.address == ""
    lock.release()


def test_the_text_names_the_newest_owner(tmp_path: Path) -> None:
    (tmp_path / "LOCK").write_text("x" * 200)
    lock = take(tmp_path)
    owner = json.loads((tmp_path / "LOCK").read_text())
    assert owner["pid"] == os.getpid()
    assert owner["host"] == socket.gethostname()
    lock.release()


def test_a_forked_child_does_not_own_the_lock_and_leaves_it_to_the_parent(tmp_path: Path) -> None:
    lock = take(tmp_path)

    def child() -> None:
        assert not lock.held
        with pytest.raises(LockedError):
            take(tmp_path)
        lock.release()

    in_child(child)
    assert lock.held
    with pytest.raises(LockedError):
        take(tmp_path)
    lock.release()
    take(tmp_path).release()


def test_a_child_that_lives_on_does_not_keep_the_lock(tmp_path: Path) -> None:
    lock = take(tmp_path)
    to_child, from_parent = os.pipe()
    to_parent, from_child = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(from_parent)
        os.write(from_child, b"!")
        os.read(to_child, 1)  # until the parent is done
        os._exit(0)
    os.close(to_child)
    assert os.read(to_parent, 1) == b"!"
    lock.release()
    take(tmp_path).release()
    os.close(from_parent)
    os.waitpid(pid, 0)
    os.close(to_parent)
    os.close(from_child)


@pytest.mark.guarantee("process/one-writer")
@pytest.mark.parametrize("replaced", [False, True])
def test_a_removed_or_replaced_lock_file_admits_no_second_writer(tmp_path: Path, replaced: bool) -> None:
    lock, path = take(tmp_path), tmp_path / "LOCK"
    path.unlink()
    if replaced:
        path.write_bytes(b"")
    for _ in range(2):
        with pytest.raises(LockedError, match=f"cannot open {tmp_path} for writing: another process"):
            take(tmp_path)
        assert is_locked(Disk(), path)
        assert path.exists() == replaced  # who is refused changes nothing
    lock.release()
    assert not is_locked(Disk(), path)
    take(tmp_path).release()


def test_a_folder_that_moves_keeps_its_lock(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    lock = take(tmp_path / "old")
    (tmp_path / "old").rename(tmp_path / "new")
    with pytest.raises(LockedError):
        take(tmp_path / "new")
    (tmp_path / "old").mkdir()
    take(tmp_path / "old").release()
    lock.release()
    take(tmp_path / "new").release()


def test_a_file_system_that_cannot_lock_folders_is_refused(tmp_path: Path) -> None:
    class Unlocking(Disk):
        def open(self, path: Path, *, create: bool = False, write: bool = True) -> File:
            file = super().open(path, create=create, write=write)
            if path.is_dir():

                def refuse() -> bool:
                    raise _to_error("lock", path, OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP)))

                file.try_lock = refuse  # type: ignore[method-assign]
            return file

    with pytest.raises(StorageError, match="does not lock files and folders.*local disk") as caught:
        WriterLock(Unlocking(), tmp_path / "LOCK")
    assert (caught.value.kind, caught.value.errno) == ("unsafe_filesystem", errno.EOPNOTSUPP)
    assert not (tmp_path / "LOCK").exists()
