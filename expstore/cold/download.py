"""`pull`: make a store of a version on an object storage; `restore`: of one in a local folder.

Used by programs and by the command line. The store is built next to its path and renamed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from expstore.cold.object_storage import ObjectStorage
from expstore.cold.parts import fetch_version
from expstore.cold.version_list import RemoteVersion, VersionList, note_removal
from expstore.core.retention_policy import Retain
from expstore.disk.atomic_build import build_atomically
from expstore.disk.files import Disk
from expstore.disk.local_path import local_path
from expstore.storages.engine.open_settings import Settings
from expstore.storages.factory import open_storage
from expstore.storages.format.layout import ColumnLayout
from expstore.storages.format.lineage import PULL, RESTORE
from expstore.storages.format.manifest import Manifest as StoreManifest
from expstore.storages.format.manifest import check_target
from expstore.storages.snapshots.catalog import find_version


def pull(
    where: str | ObjectStorage | Any, store: str | Path, *, version: int | str | None = None
) -> RemoteVersion:
    """Create a store from a version on an object storage, completely or not at all.

    The new store has the rows, episodes, priorities and settings of the version, also its capacity or
    retention policy. Every part is compared with its checksum. The version is fetched next to the store and
    then copied into it, so that twice its size must be free.

    Processes: any number may pull one version. Crashes: the store is complete or does not exist.

    Args:
        where: A URL such as `s3://bucket/run`, an `ObjectStorage`, or a store of obstore.
        store: The new store's folder, which must not exist yet.
        version: Number or tag; None: the newest.

    Returns:
        The version.

    Raises:
        StateError: `store` exists, is inside another store, or the URL contains credentials.
        NotFoundError: The folder above `store` does not exist.
        SnapshotError: There is no such version; the message lists the versions that exist.
        CorruptionError: A part is missing or damaged; the message names the file.
        RemoteError: The server does not answer, or refuses a request.
        StorageError: The disk failed or is full.

    Example:
        >>> expstore.cold.pull("s3://bucket/run", "run.exp")
        >>> rb = expstore.open("run.exp")
    """
    bucket, disk, target = ObjectStorage.of(where).connect(), Disk(), local_path(store)
    check_target(disk, target)
    found = VersionList.load(bucket)[0].find(version, bucket.name)
    with build_atomically(disk, target, single=True, doing="pulls to") as temporary:
        folder = temporary / "version"
        with note_removal(bucket, found):
            fetch_version(bucket, disk, found, folder)
        facts = {"source": bucket.name, "version": found.number, "tag": found.tag, "push": found.push}
        _restore(disk, folder, temporary / target.name, PULL, **facts)
    return found


def restore(version: str | Path, store: str | Path) -> None:
    """Create a store from a version in a local folder, completely or not at all; see `pull`.

    Args:
        version: The folder that `dumps` was given, or one of its versions.
        store: The new store's folder, which must not exist yet.

    Raises:
        StateError: `store` exists, or is inside another store.
        NotFoundError: The folder above `store` does not exist.
        SnapshotError: There is no version in the folder, or it is incomplete.
        StorageError: The disk failed or is full.
    """
    disk, target = Disk(), local_path(store)
    check_target(disk, target)
    folder = find_version(disk, local_path(version))
    with build_atomically(disk, target, single=True, doing="restores to") as temporary:
        _restore(disk, folder, temporary / target.name)


def _restore(disk: Disk, folder: Path, store: Path, kind: str = RESTORE, **facts: Any) -> None:
    """Create a store with the settings and the content of a version; see `ContentAccess.restore`."""
    origin = StoreManifest.load(disk, folder)
    settings = Settings(
        storage=origin.storage,
        layout=ColumnLayout(**origin.layout),
        compression=origin.compression,
        retain=Retain.of(origin.retain),
        window=origin.window,
    )
    storage = open_storage(store, origin.capacity, settings=settings)
    try:
        storage.snapshots.restore(folder, kind, **facts)
    finally:
        storage.close()
