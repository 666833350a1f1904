"""A file layer that records every operation with its bytes, to build the disks that a power cut may leave.

Used by the children of power_cuts.py instead of the library's own. Nothing is synced to a real disk;
disk_states.py computes the effect of syncs. Files that others write (STATE through its map, the index through
DuckDB) are compared before every operation that changes names, and at every message of the child.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expstore.disk.files import Disk, File
from expstore.disk.threads import Job
from tests.crash.killing_disks import machine

#: The recorded operations; an unrecorded one would invalidate the power cut tests.
_KNOWN = {
    "write", "sync", "truncate", "allocate", "create", "rename", "link", "unlink", "mkdir", "rmtree",
    "sync_dir", "punch",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Event:
    """One operation, or one message of the child (`act` "say").

    Args:
        act: The operation.
        path: Name of the file.
        inode: The file.
        at: Offset of a write or of freed bytes, or the new length.
        data: The written bytes, the number of freed bytes, the previous name, or the message.
    """

    act: str
    path: Path = Path()
    inode: int = 0
    at: int = 0
    data: Any = b""


class _RecordedFile(File):
    disk: RecordingDisk

    def write_mapped(self, data: bytes, offset: int) -> None:
        self.write(data, offset)

    def write(self, data: Any, offset: int) -> None:
        raw = data if isinstance(data, bytes) else data.tobytes()
        self.disk.meanwhile()
        with self.disk.lock:
            super().write(raw, offset)
            self._note("write", offset, raw)

    def truncate(self, size: int) -> None:
        with self.disk.lock:
            super().truncate(size)
            self._note("truncate", size)

    def punch(self, start: int, stop: int) -> None:
        with self.disk.lock:
            super().punch(start, stop)
            self.disk.events.append(Event("punch", self.path, os.fstat(self.fd).st_ino, start, stop - start))

    def allocate(self, size: int) -> None:
        with self.disk.lock:
            super().allocate(size)
            self._note("truncate", self.size())

    def sync(self) -> None:
        with self.disk.lock:
            self.disk.gate("sync", self.path)
            self.disk.syncs += 1
            self._note("sync")

    def _note(self, act: str, at: int = 0, data: bytes = b"") -> None:
        self.disk.events.append(Event(act, self.path, os.fstat(self.fd).st_ino, at, data))


class RecordingDisk(Disk):
    """Record every operation below a folder.

    Args:
        stores: The folders of the stores.
        serial: Sync files sequentially in the order of their names, so that runs are alike.
    """

    def __init__(self, *stores: Path, serial: bool = True) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.lock = threading.RLock()
        self._stores = stores
        self._serial = serial
        self._seen: dict[Path, _Seen] = {}
        self._lasting = False
        #: Called before a write: runs the background thread.
        self.meanwhile: Callable[[], None] = lambda: None

    def say(self, word: str) -> None:
        """Record a message of the child. From "closing" on the index is on the disk: DuckDB syncs it then."""
        with self.lock:
            self._look_around()
            self._lasting |= word == "closing"
            self.events.append(Event("say", data=word))

    def gate(self, act: str, path: Path) -> None:
        if act not in _KNOWN:
            raise AssertionError(f"{act} {path.name}: an operation that the power cuts do not simulate")

    def open(self, path: Path, *, create: bool = False, write: bool = True) -> File:
        with self.lock:
            self._look_around()
            file = super().open(path, create=create, write=write)
            if path.is_dir():
                return file  # to be locked, which changes nothing
            self.events.append(Event("open", path, os.fstat(file.fd).st_ino))
            fd, file.fd = file.fd, -1  # only one file owns a descriptor
            return _RecordedFile(self, path, fd)

    def rename(self, old: Path, new: Path) -> None:
        with self.lock:
            self._look_around()
            super().rename(old, new)
            self.events.append(Event("rename", new, data=old))
            if old in self._seen:
                self._seen[new] = self._seen.pop(old)

    def link(self, old: Path, new: Path) -> bool:
        with self.lock:
            done = super().link(old, new)
            if done:
                self.events.append(Event("link", new, data=old))
            return done

    def unlink(self, path: Path) -> None:
        with self.lock:
            self._look_around()
            if path.exists():
                self.events.append(Event("unlink", path))
            super().unlink(path)
            self._seen.pop(path, None)

    def make_dir(self, path: Path) -> None:
        with self.lock:
            new = [folder for folder in (path, *path.parents) if not folder.exists()]
            super().make_dir(path)
            self.events += [Event("mkdir", folder) for folder in reversed(new)]

    def remove_tree(self, path: Path) -> None:
        with self.lock:
            if path.exists():
                self.events.append(Event("rmtree", path))
            super().remove_tree(path)

    def sync_dir(self, path: Path) -> None:
        with self.lock:
            self._look_around()
            self.gate("sync_dir", path)
            self.syncs += 1
            self.events.append(Event("sync_dir", path))

    def sync_all(self, files: Iterable[File], folders: Iterable[Path], pool: Any) -> None:
        if not self._serial:
            super().sync_all(files, folders, pool)
            return
        for file in sorted(files, key=lambda file: str(file.path)):
            file.sync()
        for folder in sorted(folders):
            self.sync_dir(folder)

    def write_beside(self, pool: Any, file: File, data: Any, offset: int) -> Job | None:
        if not self._serial:
            return super().write_beside(pool, file, data, offset)
        file.write(data, offset)
        return None

    def boot_id(self) -> bytes:
        return machine.boot.to_bytes(16, "big")

    # -- what others write -----------------------------------------------------------------------------

    def _look_around(self) -> None:
        """Record the changes of files written by others."""
        names = [path for store in self._stores for path in sorted(store.glob("index.*"))]
        names += [path for store in self._stores if (path := store / "STATE").exists()]
        for path in sorted(set(self._seen) - set(names)):
            del self._seen[path]
            self.events.append(Event("unlink", path))
        for path in names:
            status = path.stat()
            seen = self._seen.get(path)
            if seen is None or seen.inode != status.st_ino:
                # Never closed: closing any descriptor would release DuckDB's lock.
                seen = self._seen[path] = _Seen(status.st_ino, os.open(path, os.O_RDONLY))
                self.events.append(Event("open", path, seen.inode))
            stamp = (status.st_mtime_ns, status.st_size)
            # Writing through a map need not change the times of the file.
            if stamp != seen.stamp or path.name == "STATE":
                seen.stamp = stamp
                self.events += seen.changes(path, status.st_size)
            if self._lasting and path.name != "STATE":
                self.events.append(Event("sync", path, seen.inode))


@dataclass
class _Seen:
    """A file that others write, as of the last comparison."""

    inode: int
    fd: int
    data: bytes = b""
    stamp: tuple[int, int] = (0, 0)

    def changes(self, path: Path, size: int) -> list[Event]:
        """Return the changes since the last comparison."""
        data, old = os.pread(self.fd, size, 0), self.data
        self.data = data
        events = [Event("truncate", path, self.inode, size)] if len(data) < len(old) else []
        for at in range(0, len(data), 4096):
            if data[at : at + 4096] != old[at : at + 4096]:
                events.append(Event("write", path, self.inode, at, data[at : at + 4096]))
        return events
