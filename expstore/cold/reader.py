"""The storage of a version that was opened by its URL: a reader of its folder in the cache.

Used by `expstore.open`.
"""

from __future__ import annotations

from expstore.cold.cache import Cache, Lease
from expstore.cold.object_storage import ObjectStorage
from expstore.cold.version_list import VersionList, note_removal
from expstore.disk.files import Disk
from expstore.storages.engine.open_settings import Settings
from expstore.storages.follower import FollowerStorage


class CachedStorage(FollowerStorage):
    """A version in the cache, which stays there until the storage is closed.

    Threads and processes: as `FollowerStorage`. A forked or pickled copy reads the same folder; the cache may
    remove the folder once the storage is closed in the process that opened it, and every fork of it has
    ended.

    Args:
        lease: The version in the cache; closed with the storage.
        capacity: As in `FollowerStorage`.
        settings: As in `FollowerStorage`.
    """

    def __init__(self, lease: Lease, capacity: int | None, settings: Settings) -> None:
        self._lease = lease
        super().__init__(lease.path, capacity, settings=settings)

    def close(self) -> None:
        """Close the files, and allow the cache to remove them; a second call does nothing."""
        super().close()
        self._lease.close()


def open_cached(
    where: ObjectStorage, version: int | str | None, capacity: int | None, settings: Settings
) -> CachedStorage:
    """Open a version for reading, through the cache.

    Args:
        where: The address, the cache and its size.
        version: Number or tag; None: the newest.
        capacity: As in `FollowerStorage`.
        settings: As in `FollowerStorage`.

    Raises:
        SnapshotError: There is no such version.
        StateError: The version does not fit into the cache, or a setting contradicts it.
        CorruptionError: A part is missing or damaged.
        RemoteError: The server does not answer, or refuses a request.
        StorageError: The disk of the cache failed or is full.
    """
    bucket = where.connect()
    found = VersionList.load(bucket)[0].find(version, bucket.name)
    with note_removal(bucket, found):
        lease = Cache(Disk(), where.cache, where.cache_bytes).open_version(bucket, found)
    try:
        return CachedStorage(lease, capacity, settings)
    except BaseException:
        lease.close()
        raise
