"""The interface of storages for snapshots: read the current content, and replace it.

`Storage.snapshots` returns it. `expstore.storages.snapshots` creates and reads the snapshots.
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


class SnapshotAccess:
    """Read the content of a storage whose columns can all be viewed; refuse to replace it.

    Other kinds of storage have subclasses. Threads and crashes: as the storage.

    Args:
        storage: The storage.
        check: Called before a snapshot is made; raises SnapshotError if none can be made.
    """

    __slots__ = ("_check", "_storage")

    def __init__(self, storage: Storage, check: Callable[[], None] | None = None) -> None:
        self._storage, self._check = storage, check

    def prepare(self) -> None:
        """Check that a snapshot can be made.

        Raises:
            SnapshotError: No snapshot can be made.
        """
        if self._check is not None:
            self._check()

    def settle(self) -> None:
        """Write every row that was changed to the columns; the caller holds the storage's lock."""

    def captures(self, low: int) -> list[Capture]:
        """Capture the columns that cannot be viewed, for rows newer than `low`."""
        return []

    def block_sums(self) -> Array | None:
        """Return the checksums by which changed blocks of slots are found; None: there are no checksums."""
        return None

    def log_bytes(self) -> bytes:
        """Return the entries of ended episodes, in the format of episodes.log."""
        with self._storage.locks.episodes:
            read = self._storage.state.log.capture()
        return read()

    def restore(self, folder: Path) -> None:
        """Replace the content by that of the snapshot in a folder.

        Raises:
            StateError: This kind of storage cannot load snapshots, or it is closed.
        """
        kind = self._storage.writer().kind
        raise StateError(f"a {kind} storage cannot load snapshots", hint="load into a store on disk")
