"""What a storage does for flat fields of which rows lie with the next ones: both sides can be changed.

Part of the Zarr storage. It looks for no rows that are alike, and knows no file.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from expstore.core import tuning
from expstore.core.values import Array, IntArray, Ranking, key_name
from expstore.errors import SchemaError, StateError
from expstore.storages.columns.column_set_writer import WritableColumns
from expstore.storages.columns.dedup import SharedColumn
from expstore.storages.engine.packed_columns import PackableStorage
from expstore.storages.format.layout import ColumnLayout

__all__ = ["LendingStorage"]


class LendingStorage(PackableStorage):
    """Keep rows of some flat columns once, where the next ones of earlier rows have them.

    Threads, processes and crashes as `ZarrStorage`.
    """

    @property
    def shared_columns(self) -> dict[int, SharedColumn]:
        """Flat fields of which rows may lie with the next ones, by place."""
        return {} if self.columns is None else self.columns.shared

    def _note_ranking(self, ranking: Ranking | None) -> None:
        names = ", ".join(repr(key_name(c.entry.key)) for c in self.shared_columns.values())
        if ranking is not None and names:
            raise SchemaError(
                f"rows of {names} lie with the next ones of other rows, which cannot give way to better ones",
                hint="make the store with share_next=False",
            )
        if ranking is not None and ColumnLayout(**self.manifest.layout).asks_lent:
            raise StateError(
                "this store was made with share_next=True for a flat field, whose rows may lie with those of "
                "others, and these cannot give way to better ones",
                hint="make a store without it, or without a writer that keeps the best rows",
            )
        super()._note_ranking(ranking)

    def _change(
        self, ids: IntArray, places: Sequence[int], columns: Sequence[Array], *, replaces: bool
    ) -> None:
        group = self.columns
        if group is not None and group.shared and not replaces:
            self.drain()  # rows that were kept back may lie with these, too
            group.forget_next(places)
            ids, places, columns = self._with_copies(group, ids, places, columns)
        super()._change(ids, places, columns, replaces=replaces)

    def _with_copies(
        self, group: WritableColumns, ids: IntArray, places: Sequence[int], columns: Sequence[Array]
    ) -> tuple[IntArray, Sequence[int], Sequence[Array]]:
        """Return a change, and with it copies of what it takes from rows that lie with the changed ones.

        All in one: after any stop either all of it is there or nothing.
        """
        lying = {
            place: self._lying_with(group.shared[place], ids)
            for place, other in group.pairs.items()
            if place in group.shared and other in places
        }
        lying = {place: found for place, found in lying.items() if found.size}
        if not lying:
            return ids, places, columns
        more = np.setdiff1d(np.concatenate(list(lying.values())), ids)
        every = np.concatenate([ids, more])
        wanted = [*[place for place in lying if place not in places], *places]  # copies come first
        given = dict(zip(places, columns, strict=True))
        values = self._take(self.slot_of(every), wanted)
        for place, rows in zip(wanted, values, strict=True):
            if place in given:
                rows[: ids.size] = given[place]
        return every, wanted, values

    def _lying_with(self, column: SharedColumn, ids: IntArray) -> IntArray:
        """Return the readable rows that lie with the next ones of some rows. Shape `(n,)`."""
        first, last = int(ids.min()) + 1, min(int(ids.max()) + tuning.PACKED_LOOKBACK_ROWS[1], self.last)
        if last < first:
            return np.empty(0, np.int64)
        parts = [column.distances.copy(slot, n) for slot, _, n in self.pieces(first, last + 1 - first)]
        distances, rows = np.concatenate(parts).astype(np.int64), np.arange(first, last + 1)
        found: IntArray = rows[(distances > 0) & np.isin(rows - distances, ids)]
        return found[self.window.holds(found)]
