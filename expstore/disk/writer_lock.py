"""LOCK: at most one writer per store, and a clear word about who it is.

Used by storages when they open a store for writing. The lock is the kernel's (flock), on the store's folder
and on LOCK, and goes with the process; the file's text only explains. The folder is locked because anybody
can remove LOCK or put another file in its place.
"""

from __future__ import annotations

import json
import os
import socket
import time
import weakref
from dataclasses import asdict, dataclass
from pathlib import Path

from expstore.disk.files import Disk, File
from expstore.errors import LockedError, StorageError

__all__ = ["Owner", "WriterLock", "is_locked", "read_owner"]

_LOOKS, _LOOK_SECONDS = 4, 0.005
#: So far may the clock have been set between a process's start and its taking the lock.
_CLOCK_SECONDS = 2.0

_held: weakref.WeakSet[WriterLock] = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class Owner:
    """Name who took a store's lock last.

    Args:
        pid: The process.
        host: Its machine.
        since: When it took it, seconds since 1970.
    """

    pid: int
    host: str
    since: float

    @property
    def stamp(self) -> int:
        """`since` in whole microseconds, as STATE has it once the owner has claimed that."""
        return int(self.since * 1e6)

    def lives(self, disk: Disk) -> bool | None:
        """Return whether the process is there; None: it is, or was, on another machine."""
        if self.host != socket.gethostname():
            return None
        start = disk.process_start(self.pid)
        # One that began later has only got its number.
        return start is not None and start <= self.since + _CLOCK_SECONDS


def read_owner(disk: Disk, path: Path) -> Owner | None:
    """Return whom LOCK names, without touching the lock; None where it names nobody."""
    if not disk.exists(path):
        return None
    return _parse_owner(disk.read_whole(path))


def _parse_owner(text: bytes) -> Owner | None:
    try:
        data = json.loads(text)
        return Owner(int(data["pid"]), str(data["host"]), float(data["since"]))
    except (ValueError, KeyError, TypeError):
        return None


class WriterLock:
    """Hold the right to write to a store: the folder of a lock file, and the file.

    After a fork the child closes its copies of the descriptors: closing leaves the parent's locks alone,
    unlocking would not.

    Raises:
        LockedError: Somebody else holds it; the message names process, host and time.
        StorageError: The file system cannot lock folders, or LOCK cannot be written.
    """

    def __init__(self, disk: Disk, path: Path) -> None:
        # The folder comes first: who does not get it changes nothing.
        self._folder = _open_folder(disk, path.parent)
        self._file: File | None = None
        try:
            if not _take(self._folder):
                raise _locked(path.parent, _text_of(disk, path))
            self._file = file = disk.open(path, create=True)
            if not _take(file):
                raise _locked(path.parent, file.read(0, 4096))
            self.owner = Owner(os.getpid(), socket.gethostname(), time.time())
            file.write(json.dumps(asdict(self.owner)).encode().ljust(256), 0)
        except BaseException:
            self._close()  # and with them the locks, else no later attempt could succeed
            raise
        self.held = True
        _held.add(self)

    def release(self) -> None:
        """Give the right back."""
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


def _open_folder(disk: Disk, path: Path) -> File:
    return disk.open(disk.follow_link(path), write=False)


def _take(file: File) -> bool:
    for _ in range(_LOOKS):
        if _lock(file):
            return True
        time.sleep(_LOOK_SECONDS)  # somebody may only be looking whether it is free
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
    """Return what LOCK says; nothing if it is not there."""
    try:
        return disk.read_whole(path)
    except StorageError:
        return b""


def _locked(store: Path, text: bytes) -> LockedError:
    owner = _parse_owner(text)
    if owner is None:
        return LockedError(f"cannot open {store} for writing: another process has it open")
    pid, host = owner.pid, owner.host
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(owner.since))
    if pid == os.getpid() and host == socket.gethostname():
        return LockedError(
            f"cannot open {store} for writing: it is open here (this process, {pid}) since {since}",
            hint="use that buffer, or close() it first",
        )
    return LockedError(
        f"cannot open {store} for writing: process {pid} on {host} has it open since {since}",
        hint="close it there first",
    )


def _forget_in_child() -> None:
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_forget_in_child)
