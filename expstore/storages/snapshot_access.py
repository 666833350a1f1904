"""What snapshots need of a storage: its content as it is now, and a way to replace it.

`Storage.snapshots` returns it. Snapshots themselves are made and read in `expstore.storages.snapshots`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from expstore.core.values import Array
from expstore.errors import StateError
from expstore.storages.columns.capture import Capture

if TYPE_CHECKING:
    from expstore.storages.base import Storage

__all__ = ["SnapshotAccess"]


class SnapshotAccess:
    """Give the content of a storage whose columns can all be viewed, and refuse to replace it.

    Other kinds of storage have subclasses. Threads and crashes: as the storage.

    Args:
        storage: Whose content.
        check: Called before a snapshot is made; raises SnapshotError if none can be made.
    """

    __slots__ = ("_check", "_storage")

    def __init__(self, storage: Storage, check: Callable[[], None] | None = None) -> None:
        self._storage, self._check = storage, check

    def prepare(self) -> None:
        """Check that a snapshot can be made.

        Raises:
            SnapshotError: It cannot.
        """
        if self._check is not None:
            self._check()

    def settle(self) -> None:
        """Write every row that was changed to the columns; the caller holds the storage's lock."""

    def captures(self, low: int) -> list[Capture]:
        """Return the columns as they are now whose rows newer than `low` cannot be viewed."""
        return []

    def block_sums(self) -> Array | None:
        """Return the checksums by which changed blocks of slots are found; None: there are no checksums."""
        return None

    def log_bytes(self) -> bytes:
        """Return what was noted about episodes that ended, in the format of episodes.log."""
        return b"".join(entry.pack() for entry in self._storage.state.log.read())

    def restore(self, folder: Path) -> None:
        """Replace the content by that of the snapshot in a folder.

        Raises:
            StateError: This kind of storage cannot, or it is closed.
        """
        kind = self._storage.writer().kind
        raise StateError(f"a {kind} storage cannot load versions", hint="load into a store on disk")
