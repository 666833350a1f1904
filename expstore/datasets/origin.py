"""Where a data set comes from, where it is kept, and how it becomes a store there.

Used by the data set classes and by the command line.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from expstore.datasets.download import RemoteFile, fetch_files
from expstore.datasets.episode import Reader
from expstore.datasets.importer import import_dataset
from expstore.disk.atomic_build import LOCK
from expstore.disk.files import Disk
from expstore.disk.local_path import local_path
from expstore.disk.writer_lock import WriterLock
from expstore.errors import LockedError, NotFoundError, StateError
from expstore.exchange.progress_bar import ShowProgress, show_nothing
from expstore.storages.format.manifest import MANIFEST

__all__ = ["Download", "Origin", "data_folder", "prepare_dataset", "remove_dataset"]

#: `True`: fetch the data set if it is not there; `"force"`: fetch it again.
Download = bool | Literal["force"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Say where a data set comes from and what reads it.

    Args:
        name: Of the collection, and of its folder: "d4rl".
        dataset_id: Of the data set.
        make_reader: Makes the reader of a source: a folder, or the only file of the data set.
        list_files: Lists what to fetch from the public address. It raises NotFoundError if the data set is
            known to be gone.
    """

    name: str
    dataset_id: str
    make_reader: Callable[[Path], Reader]
    list_files: Callable[[], Sequence[RemoteFile]]


def data_folder(name: str = "") -> Path:
    """Return the folder of a collection of data sets: `~/.cache/expstore/NAME`.

    The environment variable `EXPSTORE_DATA` replaces `~/.cache/expstore`.
    """
    base = os.environ.get("EXPSTORE_DATA")
    folder = local_path(base) if base else Path.home() / ".cache" / "expstore"
    return folder / name if name else folder


def prepare_dataset(
    origin: Origin,
    root: Path,
    *,
    source: str | Path | None = None,
    download: Download = True,
    show: ShowProgress = show_nothing,
) -> Path:
    """Return the store of a data set, and make it if it is not there.

    Files that are fetched lie in `ROOT/.downloads/ID` until the store is complete.

    Args:
        origin: The data set.
        root: Folder of the collection. The store is `ROOT/ID`.
        source: File or folder with the files of the public source. A store that is there must have been made
            of the same files. None: fetch them.
        download: Whether to fetch the files if the store is not there. "force" removes the store and makes it
            again.
        show: Shows what is done.

    Raises:
        NotFoundError: The store is not there and `download` is False; the source does not exist; or the
            public address has no such data set.
        StateError: The folder is there and is not a store, or was made of other files.
        LockedError: Another process makes the store.
        RemoteError: The server does not answer.
        SchemaError, StorageError: As `import_dataset`.
    """
    if download not in (True, False, "force"):
        raise ValueError(f"download={download!r} is not True, False or 'force'")
    disk, path = Disk(), root / origin.dataset_id
    if download == "force":
        remove_dataset(root, origin.dataset_id)
    if source is None and disk.exists(path / MANIFEST):
        return path
    if source is None and not download:
        raise NotFoundError(
            f"The dataset could not be found in {path}.", hint="give source= or download=True"
        )
    if source is not None:
        given = local_path(source)
        if not disk.exists(given):
            raise NotFoundError(f"there is no file or folder {given}")
        return _import(origin, given, path, show)
    fetched = root / ".downloads" / origin.dataset_id
    files = origin.list_files()
    _fetch(disk, files, fetched, origin.dataset_id, show)
    only = fetched / files[0].name if len(files) == 1 else fetched
    found = _import(origin, only, path, show)
    disk.remove_tree(fetched)
    return found


def _fetch(
    disk: Disk, files: Sequence[RemoteFile], folder: Path, dataset_id: str, show: ShowProgress
) -> None:
    """Download files to a folder, as the only process that does.

    Raises:
        LockedError: Another process does.
    """
    disk.make_dir(folder)
    try:
        lock = WriterLock(disk, folder / LOCK)
    except LockedError as exc:
        raise LockedError(f"another process fetches {dataset_id} to {folder} just now") from exc
    try:
        with show(f"fetching {dataset_id}", "bytes") as progress:
            fetch_files(files, folder, progress=progress)
        disk.unlink(folder / LOCK)
    finally:
        lock.release()


def _import(origin: Origin, source: Path, path: Path, show: ShowProgress) -> Path:
    Disk().make_dir(path.parent)
    with show(f"importing {origin.dataset_id}", "rows") as progress:
        return import_dataset(origin.make_reader(source), path, progress=progress).path


def remove_dataset(root: Path, dataset_id: str) -> bool:
    """Remove the store of a data set, and what an interrupted import or download of it left.

    Returns:
        Whether there was a store.

    Raises:
        StateError: The folder is there and is not a store.
    """
    disk, path = Disk(), root / dataset_id
    existed = disk.exists(path / MANIFEST)
    if disk.exists(path) and not existed and disk.names(path):
        raise StateError(f"{path} is not a store", hint="remove it yourself, or choose another root=")
    left = [
        path,
        path.with_name(path.name + "_split"),
        path.with_name(f".{path.name}.import"),
        root / ".downloads" / dataset_id,
    ]
    for folder in left:
        if disk.exists(folder):
            disk.remove_tree(folder)
    return existed
