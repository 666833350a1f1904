"""Histories of a part of a store that is killed at any file operation and restarted.

Used by tests of packed columns. Subclasses write and sync; this module kills and restarts them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from expstore.disk.files import Disk, File

#: A number of operations that is never reached.
NEVER = 1 << 60


class Killed(BaseException):
    """Raised at the operation at which the process is killed."""


class MortalDisk(Disk):
    """A disk that raises at the operation at which the process is killed."""

    def __init__(self) -> None:
        super().__init__()
        self.left = NEVER
        self.files: list[File] = []

    def gate(self, act: str, path: Path) -> None:
        self.left -= 1
        if self.left < 0:
            raise Killed

    def open(self, path: Path, *, create: bool = False, write: bool = True) -> File:
        file = super().open(path, create=create, write=write)
        self.files.append(file)
        return file

    def end(self) -> None:
        """Close the files that a dead process would have open."""
        for file in self.files:
            file.close()


@dataclass(kw_only=True)
class MortalLife:
    """Track which rows were committed and synced; subclasses write them, in `slots` slots."""

    last: int = 0
    synced: int = 0
    first: int = 1  # the oldest row since a jump
    rows: dict[int, Any] = field(default_factory=dict)
    reader: Any = None
    disk: MortalDisk = field(default_factory=MortalDisk)

    def extend(self, count: int, *how: Any) -> None:
        """Write rows and commit them."""
        raise NotImplementedError

    def sync(self) -> None:
        """Make committed rows durable."""
        raise NotImplementedError

    def settle(self) -> None:
        """Recover from the state of the previous process."""
        raise NotImplementedError

    def end(self) -> None:
        self.disk.end()

    def jump(self, rows: int) -> None:
        """Delete all rows, and continue at another id."""
        self.sync()
        self.rows.clear()
        self.last = self.synced = self.last + (rows if self.slots is not None else 0)
        self.first, self.reader = self.last + 1, None
        self.extend(1)
        self.sync()

    def open_again(self, acts: int = NEVER) -> None:
        self.end()
        self.disk = MortalDisk()
        self.disk.left = acts
        self.settle()

    def kill(self, acts: int, count: int, *how: Any, in_sync: bool, again: int) -> None:
        """Kill at an operation of writing, with or without a sync by another thread, and during reopening."""
        self.disk.left = acts
        try:
            self.extend(count, *how)
            if in_sync:
                self.sync()
        except Killed:
            self.disk.left = NEVER
            if in_sync:
                self.sync()
        self.disk.left = NEVER
        self.reader = None
        try:
            self.open_again(again)
        except Killed:
            self.disk.left = NEVER
            self.open_again()
        self.disk.left = NEVER
