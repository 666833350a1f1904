"""What the files of a source show about its format: names, arrays, groups, members of archives.

The kinds of data sets (`expstore.datasets.kinds`) look at it to recognize their format. It reads only the
names, shapes and dtypes of arrays, and the names of the first members of archives.
"""

from __future__ import annotations

import itertools
import tarfile
import zipfile
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np

from expstore.core.parsing import INVALID
from expstore.disk.files import ReadingDisk
from expstore.disk.source_links import check_links
from expstore.errors import ExpStoreError, StorageError
from expstore.exchange.base import open_to_read
from expstore.exchange.flat_files import ABOUT
from expstore.exchange.formats import ARRAYS, file_format
from expstore.exchange.hdf5 import datasets_in, find_episodes, reading_hdf5
from expstore.exchange.npz import check_archive, read_header

ARCHIVES = (".tar", ".tar.gz", ".tgz")
_ARRAY_FILES = (".npz", ".hdf5", ".h5")
_MEMBERS = 20


class ArrayFacts(NamedTuple):
    """Describe an array by its shape and dtype."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class Source:
    """Show what the files of a source are. Each fact is read once, when it is first asked for.

    Args:
        path: A file or folder.

    Raises:
        StorageError: A link in the folder leads out of it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._disk = ReadingDisk()
        self.is_dir = self._disk.is_dir(path)
        if self.is_dir:
            check_links(path)

    @cached_property
    def names(self) -> list[str]:
        """Names in the folder; none for a file."""
        return list(self._disk.names(self.path)) if self.is_dir else []

    @property
    def suffix(self) -> str:
        """Suffix of the file in lower case, for instance ".arff"; "" for a folder."""
        return "" if self.is_dir else self.path.suffix.lower()

    def has(self, name: str) -> bool:
        """Return whether the folder has a file or folder of this name."""
        return self.is_dir and self._disk.exists(self.path / name)

    @cached_property
    def record(self) -> str:
        """Name of the first episode in the archive, or in the first archive of the folder; "" if none."""
        archive = self.path if self.path.name.lower().endswith(ARCHIVES) else None
        if self.is_dir:
            archive = next((one for one in self._files if one.name.endswith(ARCHIVES)), None)
        if archive is None or not self._disk.exists(archive):
            return ""
        try:
            with (
                open_to_read(archive) as raw,
                tarfile.TarFile.open(fileobj=cast(BinaryIO, raw), mode="r|*") as members,
            ):
                for member in itertools.islice(members, _MEMBERS):
                    if member.name.endswith((".data.pickle", ".npy")):
                        return member.name
        except (tarfile.TarError, OSError, RuntimeError, *INVALID):
            return ""
        return ""

    @cached_property
    def file(self) -> Path | None:
        """The file, or the first file of the folder, that has arrays by name (HDF5 or .npz); None if none."""
        path: Path | None = self.path
        if self.is_dir:
            archives = any(one.name.endswith(ARCHIVES) for one in self._files)
            first = next((one for one in self._files if one.name.endswith(_ARRAY_FILES)), None)
            path = None if archives else first
        if path is None or not self._disk.exists(path):
            return None
        return path if file_format(path) in ARRAYS else None

    @cached_property
    def is_hdf5(self) -> bool:
        """Whether `file` is an HDF5 file."""
        return self.file is not None and file_format(self.file) == "hdf5"

    @cached_property
    def arrays(self) -> dict[str, ArrayFacts]:
        """Arrays of `file` by name; none if expstore exported it, or if it has one group per episode.

        Raises:
            StorageError: The file cannot be read.
        """
        if self.file is None:
            return {}
        arrays = _hdf5_arrays(self.file) if self.is_hdf5 else _npz_arrays(self.file)
        return {} if ABOUT in arrays else arrays

    def check_hdf5(self, check: Callable[[Any], bool]) -> bool:
        """Return whether `file` is an HDF5 file for which a function of the open file returns True.

        Raises:
            StorageError: The file is damaged.
        """
        if not self.is_hdf5:
            return False
        with reading_hdf5(cast(Path, self.file)) as file:
            return check(file)

    @cached_property
    def _files(self) -> list[Path]:
        paths = [self.path / name for name in self.names]
        return [path for path in paths if not self._disk.is_dir(path)]


def _npz_arrays(path: Path) -> dict[str, ArrayFacts]:
    found: dict[str, ArrayFacts] = {}
    try:
        with open_to_read(path) as raw, zipfile.ZipFile(raw) as file:
            check_archive(file, path)
            for member in file.infolist():
                if not member.filename.endswith(".npy"):
                    continue
                with file.open(member) as part:
                    shape, _, dtype = read_header(part, member.file_size, f"{member.filename} in {path}")
                    found[member.filename.removesuffix(".npy")] = ArrayFacts(shape, dtype)
    except ExpStoreError:
        raise
    except (OSError, RuntimeError, zipfile.BadZipFile, *INVALID) as exc:
        raise StorageError(f"cannot read {path} as .npz: {exc}") from exc
    return found


def _hdf5_arrays(path: Path) -> dict[str, ArrayFacts]:
    with reading_hdf5(path) as file:
        if find_episodes(file):
            return {}
        found = {name: ArrayFacts(one.shape or (), one.dtype) for name, one in datasets_in(file)}
        if ABOUT in file.attrs:
            found[ABOUT] = ArrayFacts((), np.dtype(bool))
    return found
