"""Read the content of a store for a snapshot, and replace the content.

A service of the store. `expstore.storages.snapshots.restore` defines what a restore writes, and in which
order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from expstore.core.values import Array
from expstore.storages.columns.capture import Capture
from expstore.storages.columns.checksums import BlockCheck, blocks_of
from expstore.storages.snapshots.resize import Progress, read_resized
from expstore.storages.snapshots.restore import CONTENT, Arrival, ContentAccess, ContentLike, build_load

if TYPE_CHECKING:
    from expstore.storages.engine.store import Store


class StoreSnapshots(ContentAccess):
    """Read the content of a store, and replace it.

    Threads: a replacement holds the store's lock; others may read meanwhile, and see the former content or
    the new one. Crashes: the store has its former content until the new one is complete, and the new one from
    then on.

    Args:
        store: The store.
        check: Called before a snapshot is made; raises SnapshotError if none can be made.
        convert: Applies load hooks to the content of a snapshot; None: there are no hooks.
        reopen: Calls a function, then opens the store again.
    """

    __slots__ = ("_reopen",)
    _storage: Store

    def __init__(
        self,
        store: Store,
        *,
        check: Callable[[], None],
        convert: Callable[[ContentLike], ContentLike] | None = None,
        reopen: Callable[[Callable[[], None]], None],
    ) -> None:
        super().__init__(store, check, convert)
        self._reopen = reopen

    def settle(self) -> None:
        """Write every row that was changed to the columns; the caller holds the store's lock."""
        if self._storage.state.memtable.replaced:
            self._storage.sync()

    def captures(self, low: int) -> list[Capture]:
        """Capture the columns that cannot be viewed, for rows newer than `low`."""
        if self._storage.state.columns is None:
            return []
        self._storage.drain()
        return self._storage.state.require_columns().capture(low)

    def block_sums(self) -> Array | None:
        """Return an entry of checksums per block; None: there are no fields yet.

        Entries of blocks that have changed since the newest checkpoint are zeros.
        """
        store = self._storage
        state, checkpoints = store.state, store.checkpoints
        if state.checksums is None:
            return None
        with checkpoints.lock, store.locks.episodes:
            entries, covered = state.checksums.entries(), checkpoints.covered
            newer = state.last - covered
            runs = store.geometry.runs(covered + 1, newer) if newer else []
            changed = state.checksums.changed | blocks_of(runs)
            entries[[block for block in changed if block < entries.size]] = 0
        return entries

    def adopt(self, content: ContentLike) -> None:
        """Replace the content.

        Raises:
            StateError: The store is closed or cannot be written.
            StorageError: The disk failed or is full; the store has its former content.
        """
        store = self._storage
        with store.lock:
            self._finish_writes()
            columns = store.state.columns
            # Other processes may read by former slots, so the new columns must have at least as many.
            self._replace(Arrival.of(content, store), ready=0 if columns is None else columns.ready)

    def resize(self, capacity: int | None, progress: Progress | None = None) -> None:
        """Change the capacity; rows that do not fit are removed, the oldest first, or the worst.

        Do not draw from the store meanwhile, and do not keep indices: rows keep their ids, but get other
        indices.

        Args:
            capacity: Most readable rows; None: unbounded.
            progress: Called with bytes done and bytes in all.

        Raises:
            SchemaError: Packed fields would have chunks that do not fit.
            CorruptionError: Rows do not have their checksum; the store is not changed.
            StorageError: The disk failed or is full; the store has its former content.
        """
        store = self._storage
        with store.lock:
            self._finish_writes()
            columns, entries = store.state.columns, self.block_sums()
            sums = None if columns is None or entries is None else BlockCheck(columns, entries)
            self._replace(read_resized(store, capacity, sums, progress), ready=0)

    def _finish_writes(self) -> None:
        """Write all rows to the columns."""
        store = self._storage
        store.writer()
        store.snapshot_pin.wait()
        self.settle()
        store.write_values()
        if store.state.write_keys.waiting:
            store.sync()  # the new content has another journal

    def _replace(self, arrival: Arrival, *, ready: int) -> None:
        """Build the new content in a separate folder, then swap it in.

        Args:
            arrival: The content.
            ready: The least number of slots of the new columns.
        """
        store = self._storage
        build_load(store, store.path, arrival, sequence=store.state.journal.sequence, ready=ready)
        recovered = store.counters.recovered
        self._reopen(lambda: CONTENT.commit(store.disk, store.path))
        store.counters.recovered = recovered
        store.priorities.note_set()
