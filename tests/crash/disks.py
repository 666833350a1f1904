"""File layers that end the process at some act: by kill -9, or by a power cut that loses what is not synced.

Used by the children of the crash tests in place of the library's own. They never bring anything to a real
disk: for a kill that makes no difference, and what a power cut costs is worked out page by page.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import shutil
import signal
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from expstore.files import Disk, File

__all__ = ["KillingDisk", "PlainDisk", "PowerDisk", "cut_power"]

PAGE = 4096
UNSYNCED = "unsynced"


class _Machine:
    """Which start of the machine this is; a power cut begins a new one."""

    boot = 0


machine = _Machine()


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class _KillingFile(File):
    disk: KillingDisk

    def sync(self) -> None:
        self.disk.gate("sync", self.path)
        self.disk.syncs += 1

    def write(self, data: Any, offset: int) -> None:
        part = self.disk.part_of(len(data) if isinstance(data, bytes) else data.nbytes)
        if part is not None:
            raw = data if isinstance(data, bytes) else data.tobytes()
            os.pwrite(self.fd, raw[:part], offset)
            _kill()
        super().write(data, offset)


class KillingDisk(Disk):
    """Kill the process at the N-th act: before it, or, where it is a write, in the middle of it.

    Args:
        at: N; 0: never.
        torn: How much of a write is done, 0 to 1; None: nothing.
        in_turn: Sync files one after another in the order of their names, so that acts can be counted.
        syncs: Whether a sync is an act. A kill just before one leaves what a kill before the next act does.
    """

    file_class: type[File] = _KillingFile

    def __init__(
        self, at: int = 0, *, torn: float | None = None, in_turn: bool = False, syncs: bool = True
    ) -> None:
        super().__init__()
        self.at = at
        self.torn = torn
        self.in_turn = in_turn
        self.skipped = () if syncs else ("sync", "sync_dir")
        self.acts = 0
        self.trace: list[str] = []

    def arm(self, at: int) -> None:
        """Count acts from here on, and end the process at number `at`."""
        self.at, self.acts, self.trace = at, 0, []

    def gate(self, act: str, path: Path) -> None:
        if act in self.skipped:
            return
        self.acts += 1
        self.trace.append(f"{act} {path.name}")
        if self.acts == self.at and (act != "write" or self.torn is None):
            self.end()

    def end(self) -> None:
        """End the process."""
        _kill()

    def part_of(self, size: int) -> int | None:
        """Return how much of a write is done before the end; None: all of it, and no end."""
        return int(size * self.torn) if self.torn is not None and self.acts + 1 == self.at else None

    def open(self, path: Path, *, create: bool = False, write: bool = True) -> File:
        file = super().open(path, create=create, write=write)
        return self.file_class(self, file.path, file.fd)

    def sync_dir(self, path: Path) -> None:
        self.gate("sync_dir", path)
        self.syncs += 1

    def sync_all(self, files: Iterable[File], folders: Iterable[Path], pool: Any) -> None:
        if not self.in_turn:
            super().sync_all(files, folders, pool)
            return
        for file in sorted(files, key=lambda file: str(file.path)):
            file.sync()
        for folder in sorted(folders):
            self.sync_dir(folder)

    def boot_id(self) -> bytes:
        return machine.boot.to_bytes(16, "big")


class PlainDisk(Disk):
    """The library's own file layer, with its compiled loops and true syncs; only the clock kills it."""

    def __init__(self) -> None:
        super().__init__()
        self._warmed = True
        self._load_kernel()

    def boot_id(self) -> bytes:
        return machine.boot.to_bytes(16, "big")


# -- power cuts ------------------------------------------------------------------------------------------


@dataclass
class _Inode:
    """What the disk has of a file whose newest bytes are only in the page cache."""

    size: int
    pages: dict[int, bytes] = field(default_factory=dict)


@dataclass
class _Change:
    """One change of a folder's names that is not on the disk yet."""

    act: str
    path: Path
    old: Path | None = None
    replaced: int | None = None  # inode of what had the name before


@dataclass
class Unsynced:
    """All that a power cut may cost; it outlives the process, as the page cache does."""

    inodes: dict[int, _Inode] = field(default_factory=dict)
    names: dict[Path, list[_Change]] = field(default_factory=dict)


class _PowerFile(File):
    disk: PowerDisk

    def write(self, data: Any, offset: int) -> None:
        size = len(data) if isinstance(data, bytes) else data.nbytes
        with self.disk.turn:
            self.disk.keep(self, offset, offset + size)
            super().write(data, offset)

    def truncate(self, size: int) -> None:
        with self.disk.turn:
            self.disk.keep(self, size, max(size, self.size()))
            super().truncate(size)

    def allocate(self, size: int) -> None:
        with self.disk.turn:
            self.disk.keep(self, 0, 0)
            super().allocate(size)

    def sync(self) -> None:
        with self.disk.turn:
            self.disk.gate("sync", self.path)
            self.disk.syncs += 1
            self.disk.unsynced.inodes.pop(os.fstat(self.fd).st_ino, None)


class PowerDisk(KillingDisk):
    """Stop at the N-th act, and know what has not reached the disk by then: `cut_power` loses some of it.

    Args:
        aside: A folder outside the store for what the machine knows; made if it is missing.
        at: N; 0: never.
    """

    file_class = _PowerFile

    def __init__(self, aside: Path, at: int) -> None:
        super().__init__(at)
        self.turn = threading.RLock()
        self.aside = aside
        aside.mkdir(exist_ok=True)
        self.unsynced = Unsynced()
        with contextlib.suppress(FileNotFoundError):
            self.unsynced = pickle.loads((aside / UNSYNCED).read_bytes())

    def keep(self, file: File, start: int, end: int) -> None:
        """Remember what the disk has of a part of a file that is about to change."""
        status = os.fstat(file.fd)
        inode = self.unsynced.inodes.get(status.st_ino)
        if inode is None:
            inode = self.unsynced.inodes[status.st_ino] = _Inode(status.st_size)
            self._hold(file.path, status.st_ino)
        for page in range(start // PAGE, -(-end // PAGE)):
            if page not in inode.pages:
                inode.pages[page] = os.pread(file.fd, PAGE, page * PAGE)

    def _hold(self, path: Path, number: int) -> None:
        """Give a file a second name that lasts."""
        with contextlib.suppress(FileExistsError):
            os.link(path, self.aside / str(number))

    def _note(self, change: _Change) -> None:
        self.unsynced.names.setdefault(change.path.parent, []).append(change)

    def open(self, path: Path, *, create: bool = False, write: bool = True) -> File:
        with self.turn:
            new = create and not path.exists()
            file = super().open(path, create=create, write=write)
            if new:
                self._note(_Change("create", path))
            return file

    def rename(self, old: Path, new: Path) -> None:
        with self.turn:
            replaced = None
            if new.is_file():
                replaced = new.stat().st_ino
                self._hold(new, replaced)
            super().rename(old, new)
            self._note(_Change("rename", new, old, replaced))

    def unlink(self, path: Path) -> None:
        with self.turn:
            number = path.stat().st_ino if path.exists() else None
            if number is not None:
                self._hold(path, number)
            super().unlink(path)
            if number is not None:
                self._note(_Change("unlink", path, replaced=number))

    def make_dir(self, path: Path) -> None:
        with self.turn:
            new = [folder for folder in (path, *path.parents) if not folder.exists()]
            super().make_dir(path)
            for folder in reversed(new):
                self._note(_Change("mkdir", folder))

    def remove_tree(self, path: Path) -> None:
        with self.turn:
            super().remove_tree(path)  # only of scraps: their coming back would be no harm either

    def sync_dir(self, path: Path) -> None:
        with self.turn:
            super().sync_dir(path)
            self.unsynced.names.pop(path, None)

    def end(self) -> None:
        with self.turn:  # nobody else writes any more
            (self.aside / UNSYNCED).write_bytes(pickle.dumps(self.unsynced))
            _kill()


def cut_power(aside: Path, seed: int) -> None:
    """Lose, by chance, what a stopped process had not synced, and begin a new start of the machine.

    Every page, file length and name is as it is, or as it was at the last sync.
    """
    machine.boot += 1
    path = aside / UNSYNCED
    if path.exists():
        unsynced: Unsynced = pickle.loads(path.read_bytes())
        chance = random.Random(seed)
        share = chance.choice([0.0, 0.1, 0.5, 1.0])  # of the pages and names that are lost
        for number, inode in unsynced.inodes.items():
            _lose_pages(aside / str(number), inode, chance, share)
        for changes in unsynced.names.values():
            _lose_names(aside, changes, chance, share)
    shutil.rmtree(aside)


def _lose_pages(path: Path, inode: _Inode, chance: random.Random, share: float) -> None:
    fd = os.open(path, os.O_RDWR)
    length = os.fstat(fd).st_size
    if chance.random() < share / 2:
        os.ftruncate(fd, inode.size)
    size = os.fstat(fd).st_size
    for page, data in inode.pages.items():
        lost = chance.random() < share or page * PAGE >= length
        if lost and page * PAGE < size:
            os.pwrite(fd, data.ljust(PAGE, b"\0")[: size - page * PAGE], page * PAGE)
    os.close(fd)


def _lose_names(aside: Path, changes: list[_Change], chance: random.Random, share: float) -> None:
    """Undo the last changes of some names of a folder."""
    names: dict[str, list[_Change]] = {}
    for change in changes:
        names.setdefault(change.path.name.removesuffix(".tmp"), []).append(change)
    kept = {}
    for name, group in names.items():
        kept[name] = len(group)
        while kept[name] and chance.random() < share:
            kept[name] -= 1
    for change in reversed(changes):
        name = change.path.name.removesuffix(".tmp")
        if kept[name] < len(names[name]):
            names[name].pop()
            _undo(aside, change)


def _undo(aside: Path, change: _Change) -> None:
    path = change.path
    if not path.parent.exists():
        return  # it has gone with the name of its folder
    if change.act == "create":
        path.unlink(missing_ok=True)
    elif change.act == "mkdir":
        shutil.rmtree(path, ignore_errors=True)
    elif change.act == "unlink":
        os.link(aside / str(change.replaced), path)
    elif change.old is not None:
        if path.exists() and change.old.parent.exists():
            os.rename(path, change.old)
        if change.replaced is not None:
            os.link(aside / str(change.replaced), path)
