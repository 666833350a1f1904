"""A disk whose operations a test watches, refuses or delays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from expstore.disk.files import Disk
from expstore.errors import StorageError

Before = Callable[[str, Path], object]


def _nothing(act: str, path: Path) -> None:
    return None


class GatedDisk(Disk):
    """Call `before` with the name and the path of each operation that changes something on the disk.

    `before` may raise, wait or take notes. Tests replace it at any time.
    """

    def __init__(self, before: Before = _nothing) -> None:
        super().__init__()
        self.before = before

    def gate(self, act: str, path: Path) -> None:
        self.before(act, path)

    def relax(self) -> None:
        """Do nothing before the operations that follow."""
        self.before = _nothing


def refuse(*acts: str, where: str = "", error: Exception | None = None) -> Before:
    """Return a function for `GatedDisk.before` that raises before operations with these names.

    Args:
        acts: Names of operations, such as "write" and "sync".
        where: A part of the path; other paths are not refused.
        error: What is raised; None raises that the disk is full.
    """

    def before(act: str, path: Path) -> None:
        if act in acts and where in str(path):
            raise error or StorageError(f"no {act} today", kind="disk_full")

    return before
