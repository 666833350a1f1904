"""A storage's versions, under TorchRL's names: `dumps`, `loads`, and what they are called beside that.

Base of the storages that can be written to. How a version is made and found is in
`expstore.storages.snapshots.create` and `expstore.storages.snapshots.catalog`. Who holds the storage is told
of another content.
"""

from __future__ import annotations

from pathlib import Path

from expstore.disk.local_path import local_path
from expstore.storages.base import Storage
from expstore.storages.snapshots.catalog import Version, find_version
from expstore.storages.snapshots.create import dump

__all__ = ["VersionedStorage"]


class VersionedStorage(Storage):
    """Make versions, and take over their content.

    Threads: others go on reading and adding rows while a version is made. Processes: one makes versions in a
    folder at a time. Crashes: a version is there whole or not at all; so is its content after `loads`.

    Example:
        >>> storage.dumps("backup")
        >>> MemoryStorage(1000).loads("backup")
    """

    def dumps(self, path: str | Path, *, keep: int = 5) -> Version:
        """Make a version of the content as it is now, in `path`/vNNNN; see `ReplayBuffer.dumps`.

        Args:
            path: A folder for versions; made if it is missing.
            keep: How many versions remain.

        Raises:
            SnapshotError: The folder holds something else, or rows are objects, for which files have no form.
            StateError: The storage is closed.
            StorageError: The disk failed or is full; versions that were there are as they were.
        """
        return dump(self, path, keep=keep)

    def dump(self, path: str | Path, *, keep: int = 5) -> Version:
        """Do as `dumps`."""
        return self.dumps(path, keep=keep)

    def save(self, path: str | Path, *, keep: int = 5) -> Version:
        """Do as `dumps`."""
        return self.dumps(path, keep=keep)

    def loads(self, path: str | Path, version: int | str | None = None) -> None:
        """Put a version's content in the place of this one; see `ReplayBuffer.loads`.

        Args:
            path: What `dumps` was given.
            version: Number or tag; None: the newest.

        Raises:
            SnapshotError: There is no such version.
            SchemaError: This storage has other fields.
            CorruptionError: The version is damaged.
            StateError: The storage is closed.
        """
        self.load_version(find_version(self.disk, local_path(path), version))
        self.tell_holders()

    def load(self, path: str | Path, version: int | str | None = None) -> None:
        """Do as `loads`."""
        self.loads(path, version)
