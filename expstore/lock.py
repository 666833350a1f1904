"""LOCK: at most one writer per store, and a clear word about who it is.

Used by storages when they open a store for writing. The lock is the kernel's (flock) and goes with the
process; the file's text only explains.
"""

from __future__ import annotations

import json
import os
import socket
import time
import weakref
from pathlib import Path

from expstore.errors import LockedError
from expstore.files import Disk, File

__all__ = ["WriterLock"]

_LOOKS, _LOOK_SECONDS = 4, 0.005

_held: weakref.WeakSet[WriterLock] = weakref.WeakSet()


class WriterLock:
    """Hold the right to write to a store.

    After a fork the child closes its copy of the descriptor: closing leaves the parent's lock alone,
    unlocking would not.

    Raises:
        LockedError: Somebody else holds it; the message names process, host and time.
    """

    def __init__(self, disk: Disk, path: Path) -> None:
        self._file = disk.open(path, create=True)
        if not _take(self._file):
            text = self._file.read(0, 4096)
            self._file.close()
            raise _locked(path.parent, text)
        owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
        self._file.write(json.dumps(owner).encode().ljust(256), 0)
        self.held = True
        _held.add(self)

    def release(self) -> None:
        """Give the right back."""
        self.held = False
        _held.discard(self)
        self._file.close()


def _take(file: File) -> bool:
    for _ in range(_LOOKS):
        if file.try_lock():
            return True
        time.sleep(_LOOK_SECONDS)  # somebody may only be looking whether it is free
    return False


def _locked(store: Path, text: bytes) -> LockedError:
    try:
        owner = json.loads(text)
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(owner["since"]))
        pid, host = int(owner["pid"]), str(owner["host"])
    except (ValueError, KeyError, TypeError):
        return LockedError(f"cannot open {store} for writing: another process has it open")
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
