"""Find the rows of a snapshot that a store has had, so that what names them can follow them.

Used by a restore. Copies of a store have the same uuid and continue with the same ids, so equal ids are not
enough.
"""

from __future__ import annotations

import numpy as np

from expstore.core.values import Array, IntArray
from expstore.schema.row_fields import ROW_FIELDS
from expstore.storages.base import Storage
from expstore.storages.format.manifest import Manifest
from expstore.storages.format.renumbering import Renumbering


class CommonRows:
    """Compare the rows of a snapshot with those of a store, oldest first.

    A row is the same if its step and its time are. Both have the same history up to the newest row before the
    first difference, so that rows of the snapshot up to it were rows of the store, also those that the store
    has lost. Without any row in both nothing is known, and no row counts.

    Threads: one, which holds the store's lock.

    Args:
        storage: The store's storage.
        table: The former ids of its rows.
        low: The newest id of the snapshot that is left out.
    """

    def __init__(self, storage: Storage, table: Renumbering, low: int) -> None:
        self._storage, self._table = storage, table
        self._low = self._last = low
        self._differs = False

    @classmethod
    def of(cls, there: Manifest, storage: Storage, low: int) -> CommonRows | None:
        """Return an object for a snapshot with this manifest; None: it is not of this store."""
        own = storage.manifest
        if storage.path is None or own is None or own.uuid != there.uuid or storage.schema is None:
            return None
        return cls(storage, Renumbering.load(storage.disk, storage.path), low)

    def compare(self, arrays: list[Array]) -> None:
        """Compare the next rows of the snapshot: one array per column, the row fields last."""
        ids, _, *theirs = arrays[-len(ROW_FIELDS) : -1]
        former = self._table.present(ids)
        there = self._storage.stored.holds(former)
        if self._differs or not there.any():
            return
        place = len(self._storage.require_schema().fields) + 2
        own = self._storage.read(former[there], [place, place + 1])
        same = np.logical_and(*(one == other[there] for one, other in zip(own, theirs, strict=True)))
        self._differs = not same.all()
        same_ids = ids[there][: int(np.argmin(same))] if self._differs else ids[there]
        self._last = int(same_ids[-1]) if same_ids.size else self._last

    def shift(self, ids: int) -> IntArray:
        """Return the common rows, whose ids in the snapshot increase by `ids`.

        Returns:
            Runs: first id in the store, rows, first new id. Shape `(n, 3)`.
        """
        rows = self._last - self._low
        if not ids or not rows:
            return np.empty((0, 3), np.int64)
        first = self._low + 1
        found = self._table.follow(np.array([[first + ids, rows, first]]))
        return found[:, ::-1]
