"""What a storage does for packed columns: how they are made, and when their shards get names.

Part of the Zarr storage. It packs nothing itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from expstore.core.geometry import RingGeometry, round_up
from expstore.core.values import Array, IntArray, Ranking, key_name
from expstore.errors import SchemaError, StateError
from expstore.schema.schema import Schema
from expstore.storages.columns.packed.column import PackedRows
from expstore.storages.columns.packed.writer import PackedColumn
from expstore.storages.engine.replace import DisplacingStorage
from expstore.storages.format.layout import ColumnLayout

if TYPE_CHECKING:
    from expstore.storages.columns.arrow.capture import Held

__all__ = ["PackableStorage"]


class PackableStorage(DisplacingStorage):
    """Keep some columns packed.

    Threads, processes and crashes as `ZarrStorage`.
    """

    @property
    def layout(self) -> ColumnLayout:
        """How the columns of this store are made."""
        return ColumnLayout.of(self.manifest.layout, self.ranking)

    def _note_ranking(self, ranking: Ranking | None) -> None:
        if ranking is not None and self.columns is not None and self.columns.packed:
            raise _in_place(
                [column for _, column in self.columns.packed], "rows cannot give way to better ones"
            )
        if ranking is not None and ColumnLayout(**self.manifest.layout).asks_packed:
            raise StateError(
                "this store was made with packed fields, whose rows cannot give way to better ones",
                hint="make a store with layout='flat', or without a writer that keeps the best rows",
            )
        super()._note_ranking(ranking)

    def _change(
        self, ids: IntArray, places: Sequence[int], columns: Sequence[Array], *, replaces: bool
    ) -> None:
        group = self.columns
        packed = [column for place, column in ([] if group is None else group.packed) if place in places]
        if packed:
            raise _in_place(packed, "rows cannot be changed")
        super()._change(ids, places, columns, replaces=replaces)

    @property
    def unviewed_places(self) -> frozenset[int]:
        """Fields of which not all rows can be viewed."""
        return frozenset() if self.columns is None else self.columns.unviewed_places

    def geometry_for(self, schema: Schema, ring: RingGeometry) -> RingGeometry:
        """Return a ring whose slots beyond the capacity are whole steps of time and whole chunks.

        Its reach is as far back as packed rows may refer to, and one chunk: a reader may find only the newer
        rows of a chunk that is being overwritten.

        Raises:
            SchemaError: A setting of a single field does not fit the field.
        """
        ColumnLayout(**self.manifest.layout).check(schema.fields, ring.capacity)
        ring = super().geometry_for(schema, ring)
        if ring.capacity is None or ring.depth is None:
            return ring
        layout, back = self.layout, self.layout.reach(schema.fields)
        chunk = layout.chunk_rows(schema.fields)
        step = math.lcm(ring.lanes, chunk)
        reach = round_up(back + chunk, step) if back or layout.packs(schema.fields) else 0
        return ring.with_slots(round_up(ring.depth, step) - ring.capacity, reach)

    def packed_now(self) -> dict[int, PackedRows]:
        """Return the rows of packed fields as they are at this moment, by place."""
        if self.columns is None:
            return {}
        self.drain()
        return self.columns.packed_now()

    def segments_now(self, low: int) -> dict[tuple[int, ...], list[Held]]:
        """Return the segments that hold rows newer than `low`, and of which fields."""
        if self.columns is None or self.columns.segments is None:
            return {}
        from expstore.storages.columns.arrow.capture import segments_now

        self.drain()
        return {self.columns.segment_places: segments_now(self.columns.segments, low)}

    def more_stats(self) -> dict[str, Any]:
        """Return those of every storage on disk, and how much smaller packed fields are than their rows."""
        group = self.columns
        packed = (
            [] if group is None else [(column, group.packed_size(column)[0]) for _, column in group.packed]
        )
        return super().more_stats() | {"packed": {key_name(column.entry.key): n for column, n in packed}}


def _in_place(columns: Sequence[PackedColumn], what: str) -> SchemaError:
    names = ", ".join(sorted(repr(key_name(column.entry.key)) for column in columns))
    return SchemaError(
        f"{'fields' if columns[1:] else 'field'} {names} {'are' if columns[1:] else 'is'} packed: {what}",
        hint="make the store with layout='flat', or with fields={name: {'layout': 'flat'}} for single ones",
    )
