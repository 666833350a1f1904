"""Detect the format of a source from the content of its files.

Used by `expstore.datasets.formats`. It reads only the names, shapes and dtypes of arrays, and the names of
the first members of archives.
"""

from __future__ import annotations

import itertools
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np

from expstore.core.parsing import INVALID
from expstore.disk.files import ReadingDisk
from expstore.errors import ExpStoreError, StorageError
from expstore.exchange.base import open_to_read
from expstore.exchange.flat_files import ABOUT
from expstore.exchange.hdf5 import datasets_in, reading_hdf5
from expstore.exchange.npz import check_archive, read_header

ARCHIVES = (".tar", ".tar.gz", ".tgz")
_ARRAY_FILES = (".npz", ".hdf5", ".h5")
#: The names that every D4RL file has; a genuine file also has at least one of the names in the next table.
_D4RL = ("observations", "actions", "rewards", "terminals")
_OF_D4RL_ALONE = ("timeouts", "infos", "metadata")
#: Arrays of V-D4RL: a file has at least one of these in addition to `image`, `action` and `reward`.
_OF_VD4RL = ("discount", "is_first", "is_last", "is_terminal", "step_type")
_MEMBERS = 20


class _Facts(NamedTuple):
    """Describe an array by its shape and kind."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def arrays_format(path: Path) -> tuple[str | None, str]:
    """Return the data set format of a file with one array per field: "d4rl", "vd4rl" or None.

    Args:
        path: An HDF5 or .npz file.

    Returns:
        The format, and a note for the user if the file may have a format but lacks proof.

    Raises:
        StorageError: The file cannot be read.
    """
    arrays = _npz_arrays(path) if _is_npz(path) else _hdf5_arrays(path)
    if ABOUT in arrays:
        return None, ""
    if _looks_like_vd4rl(arrays):
        if any(name in arrays for name in _OF_VD4RL):
            return "vd4rl", ""
        return None, (
            f"{path} may be a V-D4RL file, in which actions and rewards belong to the row before; "
            "if it is, import it with --format vd4rl"
        )
    if not _is_npz(path) and _looks_like_d4rl(arrays):
        groups = {name.partition("/")[0] for name in arrays}
        if groups.intersection(_OF_D4RL_ALONE) or groups == set(_D4RL):
            return "d4rl", ""
        return None, f"{path} may be a D4RL file; if it is, import it with --format d4rl"
    return None, ""


def _looks_like_d4rl(arrays: Mapping[str, _Facts]) -> bool:
    """Return whether D4RL's arrays are present, with one row per transition."""
    if any(name not in arrays or not arrays[name].shape for name in _D4RL):
        return False
    counts = {arrays[name].shape[0] for name in _D4RL}
    numbers = all(arrays[name].dtype.kind in "biuf" for name in _D4RL)
    return len(counts) == 1 and numbers


def _looks_like_vd4rl(arrays: Mapping[str, _Facts]) -> bool:
    """Return whether the images, actions and rewards of V-D4RL are present."""
    if "action" not in arrays or "reward" not in arrays:
        return False
    image = arrays.get("image")
    if image is None and "step_type" in arrays:
        image = arrays.get("observation")
    return image is not None and len(image.shape) == 4 and image.dtype == np.uint8


def _is_npz(path: Path) -> bool:
    with open_to_read(path) as file:
        return file.read(4) == b"PK\x03\x04" or path.suffix.lower() == ".npz"


def _npz_arrays(path: Path) -> dict[str, _Facts]:
    found: dict[str, _Facts] = {}
    try:
        with open_to_read(path) as raw, zipfile.ZipFile(raw) as file:
            check_archive(file, path)
            for member in file.infolist():
                if not member.filename.endswith(".npy"):
                    continue
                with file.open(member) as part:
                    shape, _, dtype = read_header(part, member.file_size, f"{member.filename} in {path}")
                    found[member.filename.removesuffix(".npy")] = _Facts(shape, dtype)
    except ExpStoreError:
        raise
    except (OSError, RuntimeError, zipfile.BadZipFile, *INVALID) as exc:
        raise StorageError(f"cannot read {path} as .npz: {exc}") from exc
    return found


def _hdf5_arrays(path: Path) -> dict[str, _Facts]:
    with reading_hdf5(path) as file:
        found = {name: _Facts(one.shape or (), one.dtype) for name, one in datasets_in(file)}
        if ABOUT in file.attrs:
            found[ABOUT] = _Facts((), np.dtype(bool))
    return found


def episodes_format(source: Path) -> str | None:
    """Return the format of an HDF5 file with a group per episode: "robomimic", "roboset" or "hdf5".

    Returns:
        None if the file has one row per transition.

    Raises:
        NotFoundError: The file does not exist.
        StorageError: The file is not an HDF5 file, or is damaged.
    """
    from expstore.datasets.hdf5_episodes import has_episodes, is_robomimic

    with reading_hdf5(source) as file:
        if is_robomimic(file):
            return "robomimic"
        trial = next((name for name in file if name.startswith("Trial")), None)
        if trial is not None and {"observations", "actions", "rewards", "done"} <= set(file[trial]):
            return "roboset"
        return "hdf5" if has_episodes(file) else None


def archive_format(path: Path) -> str | None:
    """Return the format of a tar archive, judging by the names of its first members: "openx" or "gen-dgrl".

    Returns:
        None if the members have other names, or the file is not an archive.
    """
    try:
        with (
            open_to_read(path) as raw,
            tarfile.TarFile.open(fileobj=cast(BinaryIO, raw), mode="r|*") as archive,
        ):
            for member in itertools.islice(archive, _MEMBERS):
                if member.name.endswith(".data.pickle"):
                    return "openx"
                if member.name.endswith(".npy"):
                    return "gen-dgrl"
    except (tarfile.TarError, OSError, RuntimeError, *INVALID):
        return None
    return None


def folder_format(folder: Path) -> str | None:
    """Return the format of a folder of episode files or archives, judging by the first one.

    Returns:
        "vd4rl", "roboset" or "openx"; None for another format.
    """
    disk = ReadingDisk()
    files = [folder / name for name in disk.names(folder) if not disk.is_dir(folder / name)]
    archive = next((one for one in files if one.name.endswith(ARCHIVES)), None)
    if archive is not None:
        return "openx" if archive_format(archive) == "openx" else None
    first = next((one for one in files if one.name.endswith(_ARRAY_FILES)), None)
    if first is None:
        return None
    if not _is_npz(first) and episodes_format(first) == "roboset":
        return "roboset"
    return "vd4rl" if arrays_format(first)[0] == "vd4rl" else None
