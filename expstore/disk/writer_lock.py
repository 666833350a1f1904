"""LOCK: the lock that allows one writer per store, and identifies the writer's process.

Used by storages when they open a store for writing. The lock is the kernel's (flock), on the store's folder
and on LOCK; it ends with the process. The text of the file is only for messages. The folder is locked too
because any user can remove LOCK or replace it by another file.
"""

from __future__ import annotations

import json
import os
import socket
import time
import weakref
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from expstore.core.fork_hooks import call_each
from expstore.core.parsing import INVALID
from expstore.disk.files import Disk, File
from expstore.errors import LockedError, StorageError

_LOOKS, _LOOK_SECONDS = 4, 0.005
#: Size of the text in LOCK, which always overwrites the former text.
_TEXT_BYTES = 256
#: How far the clock may have changed between the start of a process and its taking the lock, in seconds.
_CLOCK_SECONDS = 2.0

_held: weakref.WeakSet[WriterLock] = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that was the last to take a store's lock.

    Args:
        pid: The process id.
        host: The name of its machine.
        since: When it took the lock, in seconds since 1970.
        address: URL at which it serves what it has locked; "" if it is no server.
    """

    pid: int
    host: str
    since: float
    address: str = ""

    @property
    def stamp(self) -> int:
        """`since` in whole microseconds, as STATE contains it once the owner has claimed STATE."""
        return int(self.since * 1e6)

    def lives(self, disk: Disk) -> bool | None:
        """Return whether the process is running; None if it is, or was, on another machine."""
        if self.host != socket.gethostname():
            return None
        start = disk.process_start(self.pid)
        # A process that started later has only reused the process id.
        return start is not None and start <= self.since + _CLOCK_SECONDS


def read_owner(disk: Disk, path: Path) -> Owner | None:
    """Return the process that LOCK names, without touching the lock; None if there is no valid LOCK."""
    if not disk.exists(path):
        return None
    return _parse_owner(disk.read_whole(path))


def _parse_owner(text: bytes) -> Owner | None:
    try:
        data = json.loads(text)
        address = str(data.get("address", ""))
        return Owner(int(data["pid"]), str(data["host"]), float(data["since"]), address)
    except INVALID:
        return None


class WriterLock:
    """The lock of a store's writer: on the folder of a lock file, and on the file.

    After a fork the child closes its copies of the descriptors. Closing does not release the parent's locks;
    unlocking would.

    Raises:
        LockedError: Another process holds the lock; the message names process, host and time.
        StorageError: The file system cannot lock folders, or LOCK cannot be written.
    """

    def __init__(self, disk: Disk, path: Path) -> None:
        # The folder is locked first, so that a process that cannot lock it changes nothing.
        self._folder = _open_folder(disk, path.parent)
        self._file: File | None = None
        try:
            if not _take(self._folder):
                raise _build_locked_error(path.parent, _text_of(disk, path))
            _drop_hard_link(disk, path)
            self._file = file = disk.open(path, create=True)
            if not _take(file):
                raise _build_locked_error(path.parent, file.read(0, 4096))
            self.owner = Owner(os.getpid(), socket.gethostname(), time.time())
            self._sign(file, self.owner)
        except BaseException:
            self._close()  # this releases the locks; otherwise no later attempt could succeed
            raise
        self.held = True
        _held.add(self)

    @property
    def is_in_place(self) -> bool:
        """Whether the folder that is locked is still at its path."""
        return self._folder.is_at(self._folder.path)

    def announce(self, address: str) -> None:
        """Tell processes that find the lock taken at which URL this process serves what it has locked.

        Raises:
            StorageError: LOCK cannot be written.
        """
        assert self._file is not None, "the lock is held"
        self.owner = replace(self.owner, address=address)
        self._sign(self._file, self.owner)

    def _sign(self, file: File, owner: Owner) -> None:
        facts = {name: value for name, value in asdict(owner).items() if value != ""}
        text = json.dumps(facts).encode()
        if len(text) <= _TEXT_BYTES:  # an address may be of any length, and the text is only for messages
            file.write(text.ljust(_TEXT_BYTES), 0)

    def release(self) -> None:
        """Release the lock."""
        self.held = False
        _held.discard(self)
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._folder.close()


def is_locked(disk: Disk, path: Path) -> bool:
    """Return whether a lock file or its folder is locked; both are unlocked again when this returns."""
    if not disk.is_dir(path.parent):
        return False
    files = [_open_folder(disk, path.parent)]
    try:
        if disk.exists(path):
            files.append(disk.open(path, write=False))
        return not all(_lock(file) for file in files)
    finally:
        for file in files:
            file.close()


def _drop_hard_link(disk: Disk, path: Path) -> None:
    """Remove a LOCK that has hard links: it may be any file, or the LOCK of a store of which this is a copy.

    Raises:
        LockedError: It is locked. Then the store may be a copy of one that is being written to.
    """
    if not disk.exists(path):
        return
    file = disk.open(path, write=False)
    try:
        if file.links() > 1:
            if not _take(file):
                raise _build_locked_error(path.parent, _text_of(disk, path))
            disk.unlink(path)
    finally:
        file.close()


def _open_folder(disk: Disk, path: Path) -> File:
    return disk.open(disk.follow_link(path), write=False)


def _take(file: File) -> bool:
    for _ in range(_LOOKS):
        if _lock(file):
            return True
        time.sleep(_LOOK_SECONDS)  # another process may hold it briefly, to test whether it is free
    return False


def _lock(file: File) -> bool:
    try:
        return file.try_lock()
    except StorageError as exc:
        error = StorageError(
            f"{exc.message}: its file system does not lock files and folders",
            kind="unsafe_filesystem",
            hint="keep the store on a local disk",
        )
        error.errno = exc.errno
        raise error from exc


def _text_of(disk: Disk, path: Path) -> bytes:
    """Return the text of LOCK; empty if it cannot be read."""
    try:
        return disk.read_whole(path)
    except StorageError:
        return b""


def _build_locked_error(store: Path, text: bytes) -> LockedError:
    owner = _parse_owner(text)
    if owner is None:
        return LockedError(f"cannot open {store} for writing: another process has it open")
    pid, host = owner.pid, owner.host
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(owner.since))
    if pid == os.getpid() and host == socket.gethostname():
        return LockedError(
            f"cannot open {store} for writing: this process ({pid}) has it open since {since}",
            hint="use that buffer, or close() it first",
        )
    message = f"cannot open {store} for writing: process {pid} on {host} has it open since {since}"
    if owner.address:
        return LockedError(
            f"{message}, and serves it at {owner.address}",
            hint="use that server, or stop it first; mode='r' reads a store meanwhile",
        )
    return LockedError(message, hint="close it there first; mode='r' reads it meanwhile")


def _forget_in_child() -> None:
    call_each(_held, WriterLock.release)


os.register_at_fork(after_in_child=_forget_in_child)
