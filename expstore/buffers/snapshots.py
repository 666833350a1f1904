"""`rb.snapshots`: versions of a store.

`expstore.storages.snapshots` defines what a version contains, and writes it.
"""

from __future__ import annotations

import dataclasses
import json
from contextlib import closing, nullcontext
from pathlib import Path
from typing import TypeAlias

from expstore.buffers.sampling import Sampling
from expstore.buffers.store_handle import StoreHandle
from expstore.disk.local_path import local_path
from expstore.errors import LockedError, StateError
from expstore.storages.engine.store import Store
from expstore.storages.factory import open_storage
from expstore.storages.format.paths import VERSION
from expstore.storages.read_view import ReadView
from expstore.storages.snapshots.catalog import OWN_FOLDER, Version, find_version, versions
from expstore.storages.snapshots.create import dump

_Versions: TypeAlias = list[Version]  # in the class `list` is a method


class Snapshots:
    """Create, tag, list and restore versions of a store. TorchRL's names are `rb.dumps` and `rb.loads`.

    Args:
        store: The store.
        sampling: The sampling part; a version includes its sampler's settings.

    Example:
        >>> rb.snapshots.tag("before-finetuning")
        >>> [version.tag for version in rb.snapshots.list()]
        ['before-finetuning']
        >>> rb.snapshots.restore(version="before-finetuning")
    """

    def __init__(self, store: StoreHandle, sampling: Sampling) -> None:
        self._store = store
        self._sampling = sampling

    def create(self, path: str | Path, *, keep: int = 5) -> Version:
        """Create a version in `path`/vNNNN; see `ReplayBuffer.dumps`.

        Args:
            path: Folder of versions; created if it is missing.
            keep: Number of versions to keep; tagged versions are always kept.
        """
        return self._dump(path, keep=keep)

    def tag(self, name: str, path: str | Path | None = None) -> Version:
        """Create a version with a name. It is kept until you delete its folder.

        Args:
            name: 1 to 100 letters, digits or `. _ -`; not a number.
            path: Folder of versions; None: `versions/` inside the store's folder, where `expstore.open(store,
                version=name)` finds it.

        Raises:
            SnapshotError: There is a version of this name.
            StateError: The store has no folder or is closed; or it is open for reading only, and `path` is
                None.
            StorageError: The disk failed or is full; earlier versions are unchanged.
        """
        if path is None:
            path = self._own_folder("tag(name, path)") / OWN_FOLDER
            if self._store.proxy is None:
                self._store.storage.writer()  # a reader adds nothing to the store's folder
        return self._dump(path, tag=name)

    def list(self, path: str | Path | None = None) -> _Versions:
        """Return the versions in a folder, oldest first.

        Args:
            path: Folder of versions; None: the one inside the store's folder, where `tag` puts them.

        Raises:
            NotFoundError: There is no such folder.
            StateError: The store has no folder.
        """
        return versions(self._own_folder("list(path)") if path is None else path)

    def restore(self, path: str | Path | None = None, version: int | str | None = None) -> None:
        """Replace the store's content by a version's; see `ReplayBuffer.loads`.

        Args:
            path: Folder of versions, or a store with tagged ones; None: this store.
            version: Number or tag; None: the newest.
        """
        storage = self._store.storage.writer()
        place = self._own_folder("restore(path)") if path is None else local_path(path)
        folder = find_version(storage.disk, place, version)
        settings = Version.load(storage.disk, folder).sampler  # raises before the content is replaced
        storage.snapshots.restore(folder)
        self._sampling.sampler.set_settings(settings)
        storage.holders.tell(storage)

    def _dump(self, path: str | Path, *, keep: int | None = None, tag: str | None = None) -> Version:
        proxy = self._store.proxy
        if proxy is not None:
            return unpack_version(proxy.dump(str(local_path(path).absolute()), keep=keep, tag=tag))
        settings = self._sampling.sampler.settings()
        storage = self._store.check_open()
        with closing(_open_store(storage)) if storage.follows else nullcontext(storage.writer()) as writable:
            return dump(writable, path, keep=keep, tag=tag, sampler=settings)

    def _own_folder(self, call: str) -> Path:
        storage = self._store.storage
        if storage.manifest is None or storage.path is None:
            raise StateError("this store has no folder of its own", hint=f"pass a path: {call}")
        return storage.path


def _open_store(storage: ReadView) -> Store:
    """Open the store that a buffer only reads for writing.

    Raises:
        LockedError: Another process has the store open for writing.
        StateError: The store is a version itself.
        StorageError: The store's folder cannot be written to.
    """
    path = storage.path
    assert path is not None, "what is followed has a folder"
    if storage.disk.exists(path / VERSION):
        raise StateError(f"{path} is a version already", hint="copy its folder")
    try:
        return open_storage(path)
    except LockedError as exc:
        raise LockedError(exc.message, hint="call dumps() of the buffer that writes to the store") from exc


def pack_version(version: Version) -> str:
    """Return the description of a version as JSON text."""
    return json.dumps(dataclasses.asdict(version) | {"path": str(version.path)})


def unpack_version(text: str) -> Version:
    """Return the description that `pack_version` has packed."""
    told = json.loads(text)
    return Version(**told | {"path": Path(told["path"])})
