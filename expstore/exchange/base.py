"""Shared parts of exports and imports: results, progress, checks of sizes, files for other libraries.

Used by the modules of the formats, by data sets, and by the command line, whose progress bars are here. This
module knows no format.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import io
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np

from expstore.core import tuning
from expstore.disk.atomic_build import LOCK
from expstore.disk.bulk_files import sync_paths
from expstore.disk.files import Disk, File, ReadingDisk
from expstore.errors import MissingExtraError, NotFoundError, StorageError

#: Called with the amount done so far and the total amount.
Progress = Callable[[int, int], None]
#: Called with descriptions of what is left out or changed, before any row is written.
Tell = Callable[[Sequence[str]], None]

#: What imports say about groups of episodes.
REGROUPED = "episodes are grouped again, by their keys: which groups had been ended is left out"
#: Bytes that are hashed at a time.
_HASHED_BYTES = 1 << 20
#: Up to this many files have their own hash in the lineage.
_HASHES_LISTED = 100
#: Version of the facts that an export stores with its rows; an import refuses newer ones.
FORMAT = 1

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


def hash_file(path: Path, hashed: Callable[[int], None] = lambda size: None) -> str:
    """Return the SHA-256 of a file as hexadecimal digits.

    Args:
        path: The file.
        hashed: Called with the size of each piece in bytes, after it was hashed.

    Raises:
        NotFoundError: The file does not exist.
        StorageError: It cannot be read.
    """
    digest = hashlib.sha256()
    try:
        with open_to_read(path) as file:
            while data := file.read(_HASHED_BYTES):
                digest.update(data)
                hashed(len(data))
    except OSError as exc:
        raise StorageError(f"cannot read {path}: {exc}") from exc
    return digest.hexdigest()


def describe_source(source: Path | str, hashes: Mapping[str, str]) -> dict[str, Any]:
    """Return what the lineage of a store says about the files that were imported.

    Args:
        source: What was imported.
        hashes: The SHA-256 of each file that is read, by its name.

    Returns:
        `source`, the number of `files`, and `sha256`: of one file its own, of several that of the lines which
        `sha256sum` prints for them, in the order of their names. `hashes` are by name, of up to 100 files.
    """
    lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(hashes.items()))
    whole = hashlib.sha256(lines.encode()).hexdigest() if len(hashes) > 1 else "".join(hashes.values())
    found = {"source": str(source), "files": len(hashes), "sha256": whole or None}
    return found | ({"hashes": dict(hashes)} if 1 < len(hashes) <= _HASHES_LISTED else {})


def names_of(keys: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Return keys as dotted names."""
    return tuple(".".join(key) for key in keys)


# -- progress bars ------------------------------------------------------------------------------------

Unit = Literal["bytes", "rows"]

#: Shows progress under a title, in a unit; yields a function to call with the amount done and the total.
ShowProgress = Callable[[str, Unit], AbstractContextManager[Progress]]


@contextlib.contextmanager
def show_nothing(what: str, unit: Unit = "bytes") -> Iterator[Progress]:
    """Show nothing."""
    yield no_progress


@contextlib.contextmanager
def show_progress(
    what: str, unit: Unit = "bytes", *, note: Callable[[], str] | None = None
) -> Iterator[Progress]:
    """Show a bar on the terminal, or nothing if standard error is not a terminal.

    Args:
        what: The title.
        unit: The unit of the amounts.
        note: Returns a text that is shown at the end of the line; None: nothing is.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        ProgressColumn,
        Task,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as Bar
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text("" if task.speed is None else f"{task.speed:,.0f} {unit}/s")

    class Note(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text("" if note is None else note())

    # Not `console.is_terminal`: with FORCE_COLOR it is true for a pipe.
    console, is_terminal = Console(stderr=True), sys.stderr.isatty()
    much = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
    rate = (Rate(),) if unit == "rows" else ()
    columns = (TextColumn(what), BarColumn(), much, *rate, TimeRemainingColumn(), Note())
    with Bar(*columns, console=console, disable=not is_terminal, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total or None)  # 0: unknown


@contextlib.contextmanager
def show_import(show: ShowProgress, what: str = "") -> Iterator[tuple[Progress, Progress]]:
    """Show two bars, one after the other: of bytes while files are hashed, of rows while they are imported.

    Args:
        show: Shows one bar.
        what: Name of the data set, for the titles.

    Yields:
        A function that is called with bytes done and in total, and one that is called with rows. The first
        call with rows ends the bar of bytes.
    """
    with contextlib.ExitStack() as bar:
        checking = bar.enter_context(show(f"checking {what}".rstrip(), "bytes"))
        rows: list[Progress] = []

        def progress(done: int, total: int) -> None:
            if not rows:
                bar.close()
                rows.append(bar.enter_context(show(f"importing {what}".rstrip(), "rows")))
            rows[0](done, total)

        yield checking, progress


# -- sizes that files claim ---------------------------------------------------------------------------

#: The most bytes that one byte of a file becomes: deflate reaches 1032, with headers a little less.
LARGEST_RATIO = 1100
#: Up to this size nothing is compared: arrays of nothing but one value take no space in some formats.
_ALWAYS = 16 << 20


def check_size(what: str, detail: str, *, claimed: int, stored: int) -> None:
    """Refuse an array that claims more bytes than its stored bytes can become.

    Args:
        what: The array, for the message.
        detail: What it claims, for the message.
        claimed: Number of bytes of its values.
        stored: Number of bytes that it has in the file, compressed or not.

    Raises:
        StorageError: It claims over 16 MiB and over 1100 times its stored bytes.
    """
    if claimed > _ALWAYS and claimed > LARGEST_RATIO * stored:
        raise StorageError(
            f"{what} claims {claimed:,} bytes ({detail}), but has {stored:,} bytes in the file",
            hint="the file is damaged, or made to fill the memory; if it is right, write it again in full",
        )
