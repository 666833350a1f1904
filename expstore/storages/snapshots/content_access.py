"""Replace the content of a storage: by that of a snapshot, of a state dict, or of other stores."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path

from expstore.storages.snapshot_access import SnapshotAccess
from expstore.storages.snapshots.restore import ContentLike, read_content

__all__ = ["ContentAccess"]


class ContentAccess(SnapshotAccess):
    """Give the content of a storage, and replace it: all of it, or nothing.

    Threads and crashes: as the storage.

    Args:
        storage: Whose content.
    """

    __slots__ = ()

    def restore(self, folder: Path) -> None:
        """Replace the content by that of the snapshot in a folder.

        Raises:
            SchemaError: The storage has other fields.
            CorruptionError: The snapshot is damaged.
            StateError: The storage is closed, or cannot be written.
        """
        storage = self._storage.writer()
        self.adopt(read_content(storage.disk, folder))

    @abstractmethod
    def adopt(self, content: ContentLike) -> None:
        """Replace the content by another one.

        Raises:
            SchemaError: The storage has other fields.
            StateError: The storage is closed, or cannot be written.
        """
