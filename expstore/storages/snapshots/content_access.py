"""Replace the content of a storage: by that of a snapshot, of a state dict, or of other stores."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path

from expstore.storages.base import Storage
from expstore.storages.snapshot_access import SnapshotAccess
from expstore.storages.snapshots.restore import ContentLike, read_content


class ContentAccess(SnapshotAccess):
    """Read the content of a storage, and replace it: completely or not at all.

    Threads and crashes: as the storage.

    Args:
        storage: The storage.
        check: Called before a snapshot is made; raises SnapshotError if none can be made.
        convert: Applies load hooks to the content of a snapshot; None: there are no hooks.
    """

    __slots__ = ("_convert",)

    def __init__(
        self,
        storage: Storage,
        check: Callable[[], None] | None = None,
        convert: Callable[[ContentLike], ContentLike] | None = None,
    ) -> None:
        super().__init__(storage, check)
        self._convert = convert

    def restore(self, folder: Path) -> None:
        """Replace the content by that of the snapshot in a folder.

        Raises:
            SchemaError: The storage has other fields.
            CorruptionError: The snapshot is damaged.
            StateError: The storage is closed, or cannot be written.
        """
        storage = self._storage.writer()
        content: ContentLike = read_content(storage.disk, folder)
        self.adopt(content if self._convert is None else self._convert(content))

    @abstractmethod
    def adopt(self, content: ContentLike) -> None:
        """Replace the content.

        Raises:
            SchemaError: The storage has other fields.
            StateError: The storage is closed, or cannot be written.
        """
