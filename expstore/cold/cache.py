"""A folder of bounded size with the files of versions that were read from an object storage.

Used to open versions for reading. `files/` has each file once, under a name that follows from its bytes, or
from the version of a shipped store that was built; `versions/` has a folder of hard links for each version,
next to a lock file that its readers hold.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from expstore.cold.parts import build_state, fetch_file, make_folders, run_all
from expstore.cold.ship_log import ShippedState
from expstore.cold.version_list import Manifest, PartFile, RemoteVersion
from expstore.core.tables import size_text
from expstore.disk.atomic_build import build_folder
from expstore.disk.files import Disk, File
from expstore.disk.writer_lock import WriterLock
from expstore.errors import LockedError, StateError, StorageError

if TYPE_CHECKING:
    from expstore.cold.bucket import Bucket

_SCRAP, _USE = ".tmp", ".use"
_WAIT_SECONDS = 0.05
_DISK_BLOCK = 4096


class Lease:
    """A version in the cache that is not removed until `close`, or until the process ends.

    Args:
        path: The version's folder.
        file: Its lock file, locked.
    """

    def __init__(self, path: Path, file: File) -> None:
        self.path = path
        self._file = file

    def close(self) -> None:
        """Allow the version to be removed; a second call does nothing."""
        self._file.close()


class Cache:
    """Keep versions in a folder, the last used ones.

    Processes: any number share a cache; one at a time adds and removes versions, the others wait. Crashes: a
    file gets its name once it was checked and synced, and a version once it has all files.

    Args:
        disk: Access to files.
        folder: The cache's folder; created if it is missing.
        most_bytes: Most disk space that it takes.
    """

    def __init__(self, disk: Disk, folder: Path, most_bytes: int) -> None:
        self._disk, self._folder, self._most_bytes = disk, folder, most_bytes
        self._files, self._versions = folder / "files", folder / "versions"

    def open_version(self, bucket: Bucket, version: RemoteVersion) -> Lease:
        """Return a version's folder, with its files; fetch those that are missing.

        A version of a shipped store is built anew, and shares no files.

        Raises:
            StateError: The version does not fit into the cache.
            CorruptionError: A part is missing or damaged; the message names it.
            RemoteError: The server does not answer, or refuses a request.
            StorageError: The disk failed or is full, or has no hard links.
        """
        for folder in (self._files, self._versions):
            self._disk.make_dir(folder)
        with self._lock():
            tree = self._versions / version.manifest
            lease = self._lease(tree)
            try:
                if not self._disk.exists(tree):
                    for name in self._disk.names(self._versions):
                        if name.endswith(_SCRAP):  # what a kill has left
                            self._disk.remove_tree(self._versions / name)
                    (self._build_state if version.state else self._link_files)(bucket, version, tree)
            except BaseException:
                lease.close()
                raise
        return lease

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Wait until no other process or thread changes the cache."""
        while True:
            try:
                lock = WriterLock(self._disk, self._folder / "LOCK")
                break
            except LockedError:
                time.sleep(_WAIT_SECONDS)
        try:
            yield
        finally:
            lock.release()

    def _lease(self, tree: Path) -> Lease:
        path = tree.with_name(tree.name + _USE)
        self._disk.put(path, b"%d" % time.time_ns())  # its time says when the version was last opened
        file = self._disk.open(path, write=False)
        if not file.try_lock(shared=True):
            file.close()
            raise StorageError(f"cannot lock {path}: another program has locked it")
        return Lease(tree, file)

    def _build_state(self, bucket: Bucket, version: RemoteVersion, tree: Path) -> None:
        disk, shipped = self._disk, ShippedState.of_version(bucket, version)
        self._make_room(version, version.bytes, version.bytes)
        with build_folder(disk, tree) as scrap:
            build_state(bucket, disk, version, shipped, scrap)
            space = disk.measure_space(scrap)  # its parts were compressed
            self._make_room(version, space, space)
            files = [folder / name for folder, names in disk.tree(scrap) for name in names]
            for number, path in enumerate(files):
                self._link(path, self._files / f"{version.manifest}-{number}")

    def _link_files(self, bucket: Bucket, version: RemoteVersion, tree: Path) -> None:
        disk, manifest = self._disk, Manifest.load(bucket, version)
        wanted = {_name(entry): entry for entry in manifest.files.values()}
        paths = {_name(entry): path for path, entry in manifest.files.items()}
        missing = [name for name in wanted if not disk.exists(self._files / name)]
        whole, more = (sum(_space(wanted[name]) for name in names) for names in (wanted, missing))
        self._make_room(version, whole, more, wanted)
        run_all(
            "cache",
            [
                partial(self._fetch, bucket, wanted[name], name, f"{paths[name]} of version {version.number}")
                for name in missing
            ],
        )
        with build_folder(disk, tree) as scrap:
            make_folders(disk, manifest, scrap)
            for path, entry in manifest.files.items():
                self._link(self._files / _name(entry), scrap / path)
            for folder, _ in disk.tree(scrap):
                disk.sync_dir(folder)
            disk.sync_dir(self._files)

    def _link(self, source: Path, target: Path) -> None:
        if not self._disk.link(source, target):
            raise StorageError(
                f"the file system of {self._folder} cannot hard-link files", hint="pass another cache="
            )

    def _fetch(self, bucket: Bucket, entry: PartFile, name: str, what: str) -> None:
        temporary = self._files / (name + _SCRAP)
        try:
            fetch_file(bucket, self._disk, entry, temporary, what)
        except BaseException:
            with contextlib.suppress(StorageError):
                self._disk.unlink(temporary)
            raise
        self._disk.rename(temporary, self._files / name)

    def _make_room(self, version: RemoteVersion, whole: int, more: int, wanted: Collection[str] = ()) -> None:
        """Remove versions that are not in use, the longest unused first, until a version fits.

        Args:
            version: The version.
            whole: The disk space that it takes.
            more: How much of that is not in the cache yet.
            wanted: Its files, which are not removed.
        """
        if whole > self._most_bytes:
            raise self._build_full_error(version, whole, "")
        self._remove_unlinked(wanted)
        trees = [name for name in self._disk.names(self._versions) if not name.endswith((_USE, _SCRAP))]
        unused = sorted(trees, key=self._last_use)
        while self._disk.measure_space(self._files) + more > self._most_bytes:
            if not unused:
                raise self._build_full_error(version, whole, ", and other versions in it are in use")
            if self._remove(unused.pop(0)):
                self._remove_unlinked(wanted)

    def _build_full_error(self, version: RemoteVersion, whole: int, why: str) -> StateError:
        return StateError(
            f"version {version.number} takes {size_text(whole)} ({whole} bytes), but the cache "
            f"{self._folder} may "
            f"take {size_text(self._most_bytes)}{why}",
            kind="cache_full",
            hint="open ObjectStorage(url, cache_bytes=...) with more, or `expstore versions pull` it",
        )

    def _last_use(self, name: str) -> int:
        path = self._versions / (name + _USE)
        return self._disk.read_mtime(path) if self._disk.exists(path) else 0

    def _remove(self, name: str) -> bool:
        """Remove a version unless it is in use; return whether it was removed."""
        disk, use, tree = self._disk, self._versions / (name + _USE), self._versions / name
        if disk.exists(use):
            with contextlib.closing(disk.open(use, write=False)) as file:
                if not file.try_lock():
                    return False
        if disk.exists(tree):
            scrap = tree.with_name(name + _SCRAP)
            disk.rename(tree, scrap)  # a version that is removed in part must not have its name
            disk.remove_tree(scrap)
        disk.unlink(use)
        return True

    def _remove_unlinked(self, wanted: Collection[str]) -> None:
        """Remove the files that no version in the cache has."""
        for name in self._disk.names(self._files):
            if name not in wanted and self._disk.count_links(self._files / name) == 1:
                self._disk.unlink(self._files / name)


def _name(entry: PartFile) -> str:
    """Return the name of a file in the cache; files of the same bytes have the same name."""
    return hashlib.sha256(json.dumps([entry.sha256, entry.size, entry.runs]).encode()).hexdigest()


def _space(entry: PartFile) -> int:
    """Return the disk space that a file takes, bytes."""
    return -(-entry.data_bytes // _DISK_BLOCK) * _DISK_BLOCK
