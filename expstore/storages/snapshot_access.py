"""The interface of storages for snapshots: keep rows while they are copied, read the content, replace it.

`Storage.snapshots` and `Storage.snapshot_pin` return it. `expstore.storages.snapshots` creates and reads the
snapshots. The copier reports which rows it still needs, oldest first; a writer that would overwrite one of
them waits.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from expstore.core.counters import Counters
from expstore.core.lock_order import LockOrder
from expstore.core.values import Array
from expstore.errors import StateError
from expstore.storages.columns.capture import Capture

if TYPE_CHECKING:
    from expstore.storages.base import Storage


class SnapshotPin:
    """Keep rows unchanged until they are copied.

    Threads: one copies at a time, the next one waits; any number of writers may wait. Processes: a forked
    child never waits, because the copying thread does not exist there.

    Args:
        order: The lock order of the storage.
        counters: Counts the waits.
    """

    def __init__(self, order: LockOrder, counters: Counters) -> None:
        self._order, self._counters = order, counters
        self._begin()

    def _begin(self) -> None:
        #: The oldest id that must not change; 0: no id is pinned. Read without a lock.
        self.first = 0
        self._moved = threading.Condition(self._order.rank_lock("pin", threading.Lock()))
        self._copying = self._order.rank_lock("dump", threading.Lock())
        self._pid = os.getpid()

    @contextmanager
    def acquire(self) -> Iterator[None]:
        """Let only the caller copy during the block; release all rows at its end, also after an error."""
        if os.getpid() != self._pid:
            self._begin()
        with self._copying:
            try:
                yield
            finally:
                self.move(0)

    def move(self, first: int) -> None:
        """Record that ids below `first` are copied; 0: all ids are."""
        with self._moved:
            self.first = first
            self._moved.notify_all()

    def wait(self, through: int | None = None) -> None:
        """Wait until the ids up to `through` are copied, or all ids (None)."""
        if not self.first:
            return
        if os.getpid() != self._pid:
            self._begin()
        started, waited = time.monotonic(), False
        with self._moved:
            while self.first and (through is None or through >= self.first):
                waited = True
                self._moved.wait()
        if waited:
            self._counters.note_wait(started)


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
