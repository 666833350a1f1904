"""Check that the path of a source exists, and is a file or a folder as required.

Used by the readers of data sets. Errors say what was expected and what was found.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from expstore.core.parsing import INVALID
from expstore.disk.files import ReadingDisk
from expstore.disk.source_links import check_links
from expstore.errors import ExpStoreError, NotFoundError, StorageError

_Init = TypeVar("_Init", bound=Callable[..., None])
#: What libraries raise for files that are damaged, or made to be.
UNREADABLE = (OSError, RuntimeError, *INVALID)


def parses_source(init: _Init) -> _Init:
    """Convert what the constructor of a reader raises for a damaged source to StorageError."""

    @functools.wraps(init)
    def convert(self: Any, source: str | Path, *args: Any, **kwargs: Any) -> None:
        try:
            init(self, source, *args, **kwargs)
        except (ExpStoreError, ImportError):
            raise
        except UNREADABLE as exc:
            raise StorageError(f"cannot read {source}: {exc!r}") from exc

    return cast(_Init, convert)


def check_exists(path: Path) -> None:
    """Raise NotFoundError unless a path exists, StorageError if links in the folder lead out of it."""
    disk = ReadingDisk()
    if not disk.exists(path):
        raise NotFoundError(f"there is no file or folder {path}")
    check_links(path)


def list_files(path: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """Return a file, or the files of a folder with some suffixes in the order of their names.

    Raises:
        NotFoundError: The path does not exist, or the folder has no such file.
        StorageError: A link in the folder leads out of it.
    """
    disk = ReadingDisk()
    check_exists(path)
    if not disk.is_dir(path):
        return [path]
    found = [path / name for name in sorted(disk.names(path)) if name.endswith(suffixes)]
    if not found:
        raise NotFoundError(f"there is no {' or '.join(suffixes)} file in {path}")
    return found


def check_file(path: Path) -> None:
    """Raise NotFoundError unless a path is a file."""
    disk = ReadingDisk()
    if not disk.exists(path):
        raise NotFoundError(f"there is no file {path}")
    if disk.is_dir(path):
        raise NotFoundError(f"{path} is a folder, but a file is needed", hint="pass the file in it")


def check_folder(path: Path) -> None:
    """Raise NotFoundError unless a path is a folder, StorageError if links in it lead out of it."""
    disk = ReadingDisk()
    if not disk.exists(path):
        raise NotFoundError(f"there is no folder {path}")
    if not disk.is_dir(path):
        raise NotFoundError(
            f"{path} is a file, but a folder is needed", hint="pass the folder that contains it"
        )
    check_links(path)
