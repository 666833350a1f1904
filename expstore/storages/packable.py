"""What a storage does for packed columns: how they are made, and when their shards get names.

Part of the Zarr storage. It packs nothing itself.
"""

from __future__ import annotations

import math

from expstore.schema import Schema
from expstore.storages.columnwriter import Unnamed
from expstore.storages.displacing import DisplacingStorage
from expstore.storages.grid import round_up
from expstore.storages.layout import ColumnLayout

__all__ = ["PackableStorage"]


class PackableStorage(DisplacingStorage):
    """Keep some columns packed.

    Threads, processes and crashes as `ZarrStorage`.
    """

    def _begin_packed(self) -> None:
        self._unnamed: Unnamed = []  # shards that the sync under way lets have their names

    @property
    def layout(self) -> ColumnLayout:
        """How the columns of this store are made."""
        # The best rows come in the places of others: that needs places.
        return ColumnLayout() if self.ranking is not None else ColumnLayout(**self.manifest.layout)

    def spare_for(self, schema: Schema, capacity: int | None, lanes: int) -> int:
        """Return the number of spare slots: whole steps, and whole chunks."""
        spare = super().spare_for(schema, capacity, lanes)
        if capacity is None:
            return spare
        return round_up(capacity + spare, math.lcm(lanes, self.layout.chunk_rows(schema.fields))) - capacity

    def _name_columns(self) -> None:
        finished, self._unnamed = self._unnamed, []
        if self.columns is not None:
            self.columns.name(finished)

    def _note_marked(self) -> None:
        if self.columns is not None:
            self.columns.note_marked()

    def _put_back_unnamed(self) -> None:
        for column, fillings in self._unnamed:
            column.put_back(fillings)
        self._unnamed = []
