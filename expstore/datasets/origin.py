"""Fetch a data set, import it, and keep the store in the folder of its collection.

Used by the data set classes and by the command line.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from expstore.datasets.download import RemoteFile, fetch_files
from expstore.datasets.episode import Reader
from expstore.disk.atomic_build import LOCK
from expstore.disk.files import Disk
from expstore.disk.local_path import local_path
from expstore.disk.writer_lock import WriterLock
from expstore.errors import ArgumentError, LockedError, NotFoundError, RemoteError, StateError, StorageError
from expstore.exchange.base import ShowProgress, show_import, show_nothing
from expstore.storages.format.manifest import MANIFEST

#: `True`: fetch the data set if it is missing; `"force"`: fetch it again.
Download = bool | Literal["force"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Describe where a data set comes from and how it is read.

    Args:
        name: Name of the collection and of its folder, for instance "d4rl".
        dataset_id: Id of the data set.
        make_reader: Function that returns the reader of a source: a folder, or the only file of the data set.
        list_files: Function that lists the files at the public address. It raises NotFoundError if the data
            set is known to have been removed.
        sources: What `source=` may be, for messages: "source=, the .hdf5 file".
    """

    name: str
    dataset_id: str
    make_reader: Callable[[Path], Reader]
    list_files: Callable[[], Sequence[RemoteFile]]
    sources: str = "source=, files that you fetched yourself"


def data_folder(name: str = "") -> Path:
    """Return the folder of a collection of data sets: `~/.cache/expstore/NAME`.

    The environment variable `EXPSTORE_DATA` replaces `~/.cache/expstore`.
    """
    base = os.environ.get("EXPSTORE_DATA")
    folder = local_path(base) if base else Path.home() / ".cache" / "expstore"
    return folder / name if name else folder


def download_folder(root: Path, dataset_id: str) -> Path:
    """Return the folder for the files of a data set until its store is complete."""
    return root / ".downloads" / dataset_id


def prepare_dataset(
    origin: Origin,
    root: Path,
    *,
    source: str | Path | None = None,
    download: Download = True,
    show: ShowProgress = show_nothing,
) -> Path:
    """Return the store of a data set; make it if it does not exist.

    Fetched files are kept in `ROOT/.downloads/ID` until the store is complete.

    Crashes: with `download="force"` the new store is made next to the old one and replaces it when it is
    complete. Before that, an error or a crash keeps the old store. If a crash happens between the two
    renames, the next call finishes the replacement.

    Args:
        origin: The data set.
        root: Folder of the collection. The store is `ROOT/ID`.
        source: File or folder with the files of the public source. An existing store must have been made from
            the same files; if the files are gone, the store is opened without a check. None fetches them.
        download: Whether to fetch the files if the store does not exist. "force" makes the store again.
        show: Shows the progress.

    Raises:
        NotFoundError: The store does not exist and `download` is False; the source does not exist; or the
            public address does not have the data set.
        StateError: The folder exists and is not a store, or was made from other files.
        LockedError: Another process is making the store.
        RemoteError: The server does not answer.
        SchemaError, StorageError: As in `import_dataset`.
    """
    if download not in (True, False, "force"):
        raise ArgumentError(f"download={download!r} is not True, False or 'force'")
    disk, path = Disk(), root / origin.dataset_id
    _finish_swap(disk, path)
    is_there, again = disk.exists(path / MANIFEST), download == "force"
    if again:
        _check_replaceable(disk, path)
    if source is None and is_there and not again:
        return path
    if source is None and not download:
        raise NotFoundError(
            f"The dataset could not be found in {path}",
            hint=f"pass {origin.sources}, or download=True to fetch it",
        )
    if source is not None:
        given = local_path(source)
        if is_there and not again and _is_gone(disk, given):
            return path
        if not disk.exists(given):
            raise NotFoundError(f"there is no file or folder {given}", hint="check the path in source=")
        return _make(disk, origin, given, path, show, again=again)
    fetched = download_folder(root, origin.dataset_id)
    if again:
        _discard_download(disk, fetched, origin.dataset_id)
    try:
        files = origin.list_files()
        _fetch(disk, files, fetched, origin.dataset_id, show)
    except (NotFoundError, RemoteError) as exc:
        if "source=" in exc.hint:
            raise
        hint = f"{exc.hint}, or pass {origin.sources}" if exc.hint else f"pass {origin.sources}"
        raise exc.with_hint(hint) from exc
    finally:
        _remove_empty(disk, fetched, root)
    only = fetched / files[0].name if len(files) == 1 else fetched
    found = _make(disk, origin, only, path, show, again=again)
    disk.remove_tree(fetched)
    _remove_empty(disk, fetched.parent, root)
    return found


def _is_gone(disk: Disk, source: Path) -> bool:
    """Return whether a source is gone: there is no file, or a folder without files."""
    if not disk.exists(source):
        return True
    return disk.is_dir(source) and not any(names for _, names in disk.tree(source))


# -- the download ----------------------------------------------------------------------------------------


def _fetch(
    disk: Disk, files: Sequence[RemoteFile], folder: Path, dataset_id: str, show: ShowProgress
) -> None:
    """Download files to a folder under a lock.

    Raises:
        LockedError: Another process is downloading to the folder.
    """
    with _lock_download(disk, folder, dataset_id), show(f"fetching {dataset_id}", "bytes") as progress:
        fetch_files(files, folder, progress=progress)


def _discard_download(disk: Disk, folder: Path, dataset_id: str) -> None:
    """Remove the files of an earlier download.

    Raises:
        LockedError: Another process is downloading them.
    """
    if disk.exists(folder):
        with _lock_download(disk, folder, dataset_id):
            for name in disk.names(folder):
                if disk.is_dir(folder / name):
                    disk.remove_tree(folder / name)
                elif name != LOCK:
                    disk.unlink(folder / name)


@contextmanager
def _lock_download(disk: Disk, folder: Path, dataset_id: str) -> Iterator[None]:
    """Lock a download folder against other processes. Creates the folder if it does not exist."""
    disk.make_dir(folder)
    try:
        lock = WriterLock(disk, folder / LOCK)
    except LockedError as exc:
        raise LockedError(f"another process is fetching {dataset_id} to {folder}") from exc
    try:
        yield
    finally:
        with contextlib.suppress(StorageError):
            disk.unlink(folder / LOCK)
        lock.release()


def _remove_empty(disk: Disk, folder: Path, root: Path) -> None:
    """Remove a folder and its parents, up to `root`, while they contain no files."""
    while folder != root and disk.exists(folder) and not any(names for _, names in disk.tree(folder)):
        disk.remove_tree(folder)
        folder = folder.parent


# -- the store -------------------------------------------------------------------------------------------


def _make(disk: Disk, origin: Origin, source: Path, path: Path, show: ShowProgress, *, again: bool) -> Path:
    """Import a source. With `again` the result replaces the existing store."""
    from expstore.datasets.importer import import_dataset  # loads torch

    disk.make_dir(path.parent)
    again = again and disk.exists(path)
    target = _new_path(path) if again else path
    if again:
        disk.remove_tree(target)  # left by a run that was killed before the swap
    with show_import(show, origin.dataset_id) as (checking, progress):
        reader = origin.make_reader(source)
        import_dataset(reader, target, progress=progress, checking=checking)
    if again:
        _swap(disk, path)
    return path


def _new_path(path: Path) -> Path:
    """Return the path of a new store that will replace an existing one."""
    return path.with_name(f".{path.name}.new")


def _old_path(path: Path) -> Path:
    """Return the path to which a store is moved while it is replaced."""
    return path.with_name(f".{path.name}.old")


def _check_replaceable(disk: Disk, path: Path) -> None:
    """Raise StateError if the folder exists and is not a store."""
    if disk.exists(path) and not disk.exists(path / MANIFEST) and disk.names(path):
        raise StateError(f"{path} is not a store", hint="remove it yourself, or choose another root=")


def _swap(disk: Disk, path: Path) -> None:
    """Replace the old store by the complete new one, and remove what was derived from the old one."""
    new, old, split = _new_path(path), _old_path(path), _split_path(path)
    for folder in (old, split, path.with_name(f".{path.name}.import")):
        disk.remove_tree(folder)
    if disk.exists(path):
        disk.rename(path, old)
    try:
        disk.rename(new, path)
    except StorageError:
        if not disk.exists(path / MANIFEST):  # otherwise another process has finished the swap
            disk.rename(old, path)
            raise
    disk.sync_dir(path.resolve().parent)
    disk.remove_tree(old)


def _finish_swap(disk: Disk, path: Path) -> None:
    """Finish a swap that a crash interrupted between its two renames."""
    new, old = _new_path(path), _old_path(path)
    if disk.exists(path) or not disk.exists(old / MANIFEST):
        return
    disk.rename(new if disk.exists(new / MANIFEST) else old, path)
    disk.sync_dir(path.resolve().parent)
    disk.remove_tree(old)


def _split_path(path: Path) -> Path:
    return path.with_name(path.name + "_split")


def remove_dataset(root: Path, dataset_id: str) -> bool:
    """Remove the store of a data set, and the remains of an interrupted import or download.

    Returns:
        Whether the store existed.

    Raises:
        StateError: The folder exists and is not a store.
    """
    disk, path = Disk(), root / dataset_id
    existed = disk.exists(path / MANIFEST)
    _check_replaceable(disk, path)
    new = _new_path(path)
    left = [
        path,
        _split_path(path),
        path.with_name(f"{path.name}_split.tmp"),
        path.with_name(f".{path.name}.import"),
        new,
        new.with_name(f".{new.name}.import"),
        _old_path(path),
        download_folder(root, dataset_id),
    ]
    for folder in left:
        if disk.exists(folder):
            disk.remove_tree(folder)
    return existed
