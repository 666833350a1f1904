"""Check that the path of a source exists, and is a file or a folder as required.

Used by the readers of data sets. Errors say what was expected and what was found.
"""

from __future__ import annotations

from pathlib import Path

from expstore.disk.files import ReadingDisk
from expstore.errors import NotFoundError

__all__ = ["check_exists", "check_file", "check_folder"]


def check_exists(path: Path) -> None:
    """Raise NotFoundError unless a path exists."""
    disk = ReadingDisk()
    if not disk.exists(path):
        raise NotFoundError(f"there is no file or folder {path}")


def check_file(path: Path) -> None:
    """Raise NotFoundError unless a path is a file."""
    disk = ReadingDisk()
    if not disk.exists(path):
        raise NotFoundError(f"there is no file {path}")
    if disk.is_dir(path):
        raise NotFoundError(f"{path} is a folder, but a file is needed", hint="pass the file in it")


def check_folder(path: Path) -> None:
    """Raise NotFoundError unless a path is a folder."""
    disk = ReadingDisk()
    if not disk.exists(path):
        raise NotFoundError(f"there is no folder {path}")
    if not disk.is_dir(path):
        raise NotFoundError(
            f"{path} is a file, but a folder is needed", hint="pass the folder that contains it"
        )
