"""Shared parts of all exports and imports: their results, progress, and file objects for other libraries.

Used by the modules of the formats. This module knows no format.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from expstore.core import tuning
from expstore.disk.atomic_build import LOCK
from expstore.disk.bulk_files import sync_paths
from expstore.disk.files import Disk, File, ReadingDisk
from expstore.errors import MissingExtraError, NotFoundError

#: Called with the amount done so far and the total amount.
Progress = Callable[[int, int], None]
#: Called with descriptions of what is left out or changed, before any row is written.
Tell = Callable[[Sequence[str]], None]

_PACKAGES = {
    "PIL.Image": "images",
    "array_record.python.array_record_module": "rlds",
    "av": "video",
    "h5py": "h5",
    "sklearn.preprocessing": "openml",
    "pandas": "openml",
    "scipy.io.arff": "openml",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """The result of an export.

    Args:
        path: The file or folder that was written.
        rows: Number of rows written.
        left_out: Number of rows that another process overwrote before they were read.
        fields: Names of the exported fields.
        disk_bytes: Disk space used by the files, in bytes.
        episodes: Number of episodes with exported rows.
        lost: Description of what the format cannot store.
    """

    path: Path
    rows: int
    left_out: int
    fields: tuple[str, ...]
    disk_bytes: int
    episodes: int = 0
    lost: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """The result of an import. `print(imported)` shows what became of the source.

    Args:
        path: The new store.
        rows: Number of rows read.
        kept: Number of readable rows in the store: the newest rows, if its capacity is smaller.
        episodes: Number of episodes with readable rows.
        fields: Names of the store's fields.
        notes: Descriptions of data that was imported in another way than one may expect.
        statuses: Number of episodes by how they ended: terminated, truncated, cut.
        roles: Fields by their role: "observation", "next observation", "action", "reward", "end flags",
            "episode", "plain fields". A field that has another name in the source is followed by that name,
            as in "observation (obs)".
        warnings: What seems wrong: no reward, no end flag, one episode with all rows.
    """

    path: Path
    rows: int
    kept: int
    episodes: int
    fields: tuple[str, ...]
    notes: tuple[str, ...] = ()
    statuses: Mapping[str, int] = field(default_factory=dict)
    roles: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """The rows, the episodes by how they ended, and the fields by their role; some lines."""
        counts = ", ".join(f"{count:,} {status}" for status, count in self.statuses.items())
        lines = [f"{self.path} holds {self.kept:,} rows of {self.episodes:,} episodes"]
        lines[0] += f": {counts}" if counts else ""
        lines += [f"  {role:<17}{', '.join(names) or '-'}" for role, names in self.roles.items()]
        return "\n".join(lines)

    def __str__(self) -> str:
        return "\n".join([self.summary, *(f"warning: {warning}" for warning in self.warnings)])


def no_progress(done: int, total: int) -> None:
    """Ignore the progress: the default of `progress=`."""


def ignore_notes(notes: Sequence[str]) -> None:
    """Ignore notes: the default of `tell=`."""


def piece_rows(row_bytes: int) -> int:
    """Return the number of rows of this size in one piece."""
    return max(1, min(tuning.EXCHANGE_ROWS, tuning.EXCHANGE_BYTES // max(1, row_bytes)))


def import_library(library: str) -> Any:
    """Import a library that only some formats need.

    Raises:
        MissingExtraError: The library is not installed; the message says how to install it.
    """
    try:
        return importlib.import_module(library)
    except ModuleNotFoundError as exc:
        raise MissingExtraError(
            f"this format needs {library}, which is not installed",
            hint=f"pip install 'expstore[{_PACKAGES[library]}]'",
        ) from exc


def sync_tree(disk: Disk, folder: Path) -> None:
    """Sync all files in a folder, and the folder and its subfolders, to the disk."""
    found = disk.tree(folder)
    paths = [inside / name for inside, names in found for name in names if name != LOCK]
    sync_paths(disk, paths, [inside for inside, _ in found], None)


class DiskFile(io.RawIOBase):
    """A Python file object over a `Disk`, for libraries that accept file objects.

    Threads: one. Crashes: a written file may be incomplete until it is synced.

    Args:
        disk: Access to the file system.
        path: The file.
        write: Create an empty file for writing; False: open an existing file for reading.
    """

    def __init__(self, disk: Disk, path: Path, *, write: bool = False) -> None:
        super().__init__()
        # A file that is read belongs to the user and may be a link; a file that is written is our own.
        self._file: File = disk.open(path if write else path.resolve(), create=write, write=write)
        self._writes, self._place = write, 0
        self.name = str(path)
        if write:
            self._file.truncate(0)

    def readable(self) -> bool:
        """Return True: the file can be read."""
        return True

    def writable(self) -> bool:
        """Return whether the file can be written."""
        return self._writes

    def seekable(self) -> bool:
        """Return True: the file can seek."""
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        """Set and return the position, relative to the beginning (0), the position (1) or the end (2)."""
        base = (0, self._place, self._file.size())[whence]
        self._place = max(0, base + offset)
        return self._place

    def tell(self) -> int:
        """Return the position."""
        return self._place

    def readinto(self, buffer: Any) -> int:
        """Read bytes into a buffer until it is full or the file ends; return the number of bytes read."""
        view = memoryview(buffer).cast("B")
        data = self._file.read(self._place, len(view))
        view[: len(data)] = data
        self._place += len(data)
        return len(data)

    def write(self, data: Any) -> int:
        """Write all bytes and return their number."""
        whole = np.frombuffer(data, np.uint8)
        if whole.size:
            self._file.write(whole, self._place)
        self._place += whole.size
        return int(whole.size)

    def truncate(self, size: int | None = None) -> int:
        """Set the length of the file and return it; None: the current position."""
        size = self._place if size is None else size
        self._file.truncate(size)
        return size

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if not self.closed:
            self._file.close()
        super().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_to_read(path: Path) -> DiskFile:
    """Open a file for reading.

    Raises:
        NotFoundError: The file does not exist.
    """
    disk = ReadingDisk()
    if not disk.exists(path):
        raise NotFoundError(f"there is no file {path}")
    if disk.is_dir(path):
        raise NotFoundError(f"{path} is a folder; give the path of a file")
    return DiskFile(disk, path)


def names_of(keys: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Return keys as dotted names."""
    return tuple(".".join(key) for key in keys)
