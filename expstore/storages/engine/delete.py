"""Delete episodes of a store without a capacity, and free their disk space.

A service of the store. `expstore.buffers.retention` decides which rows are deleted. This module defines the
order of the steps: first a durable record says that the rows are deleted, only then is their space freed, in
place, so that nothing is moved and every id is kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from expstore.core.id_set import IdSet
from expstore.core.retention_policy import Retain
from expstore.core.values import IntArray
from expstore.disk.checkpointed import Pin
from expstore.disk.files import File
from expstore.episodes.fragments import all_ids
from expstore.errors import StateError
from expstore.storages.capabilities import GivenUp
from expstore.storages.columns.checksums import BLOCK_ROWS
from expstore.storages.columns.column import Deleted
from expstore.storages.format.journal import Kind
from expstore.storages.format.manifest import Manifest, pack_ids
from expstore.storages.format.paths import COLUMNS, SEGMENTS

if TYPE_CHECKING:
    from expstore.storages.engine.store import Store

_PAGE = 4096


class Deletion:
    """Delete whole episodes of a store.

    Threads: other threads write and read meanwhile; a reader of deleted rows reads other rows instead.
    Crashes: a row is deleted once a durable record says so, and not before. Its space is freed after that; if
    the process ends before, the space stays allocated.

    Args:
        store: The store whose episodes are deleted.
        save: Writes expstore.json.
    """

    __slots__ = ("_save", "_store")

    def __init__(self, store: Store, save: Callable[[Manifest], None]) -> None:
        self._store, self._save = store, save

    @property
    def policy(self) -> Retain | None:
        """The policy that says which rows to keep; None: all rows."""
        kept = self._store.manifest.retain
        return Retain(**kept) if kept else None

    def keep_policy(self, policy: Mapping[str, Any]) -> None:
        """Store the policy that says which rows to keep, in the form of `expstore.core.retention_policy`.

        The policy is durable when this returns.

        Raises:
            StateError: The store is a ring, closed, or cannot be written.
            StorageError: The disk failed; nothing was changed.
        """
        store = self._store
        with store.lock:
            store.writer()
            if policy and store.capacity is not None:
                raise StateError(
                    f"{store.path} keeps its newest {store.capacity} rows and cannot have a policy",
                    hint="create a store without a capacity",
                )
            if policy != store.manifest.retain:
                self._save(store.manifest.replace(retain=dict(policy)))

    def columns_bytes(self) -> int:
        """Return the disk space of the columns, bytes."""
        disk, path = self._store.disk, self._store.path
        return disk.measure_space(path / COLUMNS) + disk.measure_space(path / SEGMENTS)

    def bytes_per_row(self) -> float:
        """Return the disk space of a row in the columns, bytes; for packed fields the average."""
        columns = self._store.state.columns
        return 1.0 if columns is None else columns.measure_row_bytes(self._store.stored.rows)

    def rows_of(self, episodes: IntArray) -> IdSet:
        """Return the ids of the readable rows of episodes, except open episodes. The lock is held.

        Raises:
            StateError: The store is a ring, from which no rows are deleted.
        """
        if self._store.geometry.slots is not None:
            raise StateError(f"{self._store.path} has a capacity: its rows are evicted by age, not deleted")
        window, episodes_known = self._store.state.stored, self._store.state.episodes
        with self._store.locks.episodes:
            still_open = [entry.episode for entry in episodes_known.open_entries()]
            fragments = episodes_known.fragments.capture()
        found = _ids_of(fragments.of(np.setdiff1d(episodes, still_open)))
        return found.between(window.low, window.last)

    def delete(self, episodes: IntArray) -> GivenUp:
        """Delete all rows of ended episodes permanently; the facts about the episodes are kept.

        Args:
            episodes: Ids of the episodes. Shape `(n,)`.

        Raises:
            StateError: The store is a ring, closed, or cannot be written.
            StorageError: The disk failed. The next opening decides by what is on the disk whether the rows
                exist.
        """
        store = self._store
        with store.lock:
            store.writer()
            store.snapshot_pin.wait()  # a snapshot may still have to copy them
            going = self.rows_of(episodes)
            if not going:
                return GivenUp()
            before, rows = self.columns_bytes(), store.stored.rows
            self.delete_rows(going)
            gone = int(np.unique(episodes).size)
            return GivenUp(gone, rows - store.stored.rows, max(0, before - self.columns_bytes()))

    def delete_rows(self, going: IdSet) -> None:
        """Delete rows of a growing store permanently; see `delete`."""
        store = self._store
        with store.lock:
            store.writer()
            if store.last > store.checkpoints.covered:
                store.sync()  # otherwise these ids could be reused after a power failure
            try:
                dead, pages, pin = self._record(going)
            except BaseException:
                store.health.note_interruption()
                raise
            files: set[File] = set()
            try:
                files = self._empty(dead, pages)
            finally:
                self._note_emptied(pages, files)
                store.checkpoints.release(pin)
            store.background.note()

    def _record(self, going: IdSet) -> tuple[IdSet, IdSet, Pin]:
        """Record durably that rows are deleted, then remove them in memory.

        Returns:
            All deleted rows, the rows around which space is to be freed, and the pin that prevents
            checkpoints from covering the record until that is done.
        """
        store, rows = self._store, self._store.state
        window = rows.stored
        deleted = window.deleted.join(going)
        through = window.low
        if deleted and deleted.first[0] <= window.low + 1:
            through = max(through, int(deleted.last[0]))
        rest = deleted.between(through, window.last)
        dead = deleted.join(IdSet.of([(1, through)] if through else []))
        # Pages of rows deleted earlier may become free only together with these rows.
        pages = dead.intersect(going.widen(_PAGE))
        # One record has all that is deleted, because a kill may follow it at once.
        new = pack_ids(going.between(through, window.last))
        body = json.dumps({"through": through, "blocks": _blocks_of(pages), "gaps": new}).encode()
        # The pin is held until the blocks are summed again.
        sequence, pin = store.checkpoints.append_synced(store, Kind.RETIRE, body)
        # Raise the low watermark before the tombstones below it are dropped: a reader that sees neither would
        # treat deleted rows as live.
        store.shared.retire(max(rows.retired, through))
        manifest = store.manifest.replace(deleted=rest)
        if rest != window.deleted:  # after the record: an index without the record is rebuilt
            self._save(manifest)
        store.shared.note_layout()  # followers look again; rows that they are gathering become invalid
        with store.locks.episodes:
            self._store.epochs.note_deleted()
            rows.delete(replace(window, low=through, deleted=rest))
            rows.episodes.give_up(going)
            rows.note_content((manifest.generation, sequence))
        store.shared.note_record(sequence)
        return dead, pages, pin

    def _note_emptied(self, pages: IdSet, files: set[File]) -> None:
        """Make the next checkpoint sync files, and sum the blocks again or give them up."""
        rows = self._store.state
        if rows.columns is None or rows.checksums is None:
            return
        blocks = {block for start, stop in _blocks_of(pages) for block in range(start, stop)}
        deleted, low, last = rows.stored.deleted, rows.stored.low, rows.stored.last
        empty = {
            block
            for block in blocks
            if (block + 1) * BLOCK_ROWS <= last
            and not _live(deleted, low, block * BLOCK_ROWS, (block + 1) * BLOCK_ROWS)
        }
        with self._store.locks.episodes:
            rows.columns.touched |= files
            rows.checksums.note_changed(blocks, emptied=empty)

    # -- space -----------------------------------------------------------------------------------

    def _empty(self, dead: IdSet, pages: IdSet) -> set[File]:
        """Free the space of deleted rows around `pages`; return the files changed in place."""
        rows = self._store.state
        if rows.columns is None:
            return set()
        counts = [] if rows.sampled is None else [rows.sampled.column]
        deleted = Deleted(dead, pages, *rows.tombstones(self._store.geometry.slots))
        files = rows.columns.free(deleted, *counts)
        with self._store.checkpoints.lock:
            return files | rows.columns.free_shared(deleted)


def _ids_of(fragments: IntArray) -> IdSet:
    """Return the ids of all rows of fragments."""
    _, _, count, first, stride = fragments
    dense = (stride <= 1) | (count == 1)
    found = IdSet.merge(first[dense], first[dense] + count[dense] - 1)
    if dense.all():
        return found
    return found.join(IdSet.of_ids(all_ids(fragments[:, ~dense])))


def _live(deleted: IdSet, low: int, start: int, stop: int) -> bool:
    """Return whether a row in slots `start` to `stop` - 1 of a growing store can be read."""
    first = max(start, low)
    return first < stop and deleted.upto(stop) - deleted.upto(first) < stop - first


def _blocks_of(ids: IdSet) -> list[list[int]]:
    """Return the blocks of slots of these rows: per run, the first block and the one after the last."""
    blocks = IdSet.merge((ids.first - 1) // BLOCK_ROWS, (ids.last - 1) // BLOCK_ROWS)
    return [[first, last + 1] for first, last in blocks]
