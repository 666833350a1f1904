"""Packed columns that keep rows in one another, and how such two are read: each chunk is unpacked once.

Used by the set of columns. The column of a field may keep rows in that of its next values: the bytes of a row
are often those that came next after an earlier one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from expstore.core.values import Array, IntArray
from expstore.storages.columns.column import ReadTogether
from expstore.storages.columns.packed.column import PackedRows

__all__ = ["PackedPair", "pair_columns"]


@dataclass(frozen=True, slots=True)
class PackedPair(ReadTogether):
    """Two packed columns, one of which keeps rows in the other one.

    Args:
        place: The number of the first one.
        partner: The number of the one that has rows of it.
        column: The first one.
    """

    place: int
    partner: int
    column: PackedRows

    def take(self, slots: IntArray, places: Sequence[int]) -> dict[int, Array]:
        """Copy rows of both out, if both are wanted: each chunk is unpacked once."""
        if self.place not in places or self.partner not in places:
            return {}
        own, other = self.column.take_pair(slots)
        return {self.place: own, self.partner: other}


def pair_columns(columns: Mapping[int, PackedRows]) -> list[PackedPair]:
    """Tell packed columns, given by place, which ones have rows of theirs."""
    found = []
    by_key = {column.entry.key: (place, column) for place, column in columns.items()}
    for key, (place, column) in by_key.items():
        other, partner = by_key.get(("next", *key), (-1, None))
        if partner is None or not column.packing.shares:
            continue
        if (partner.entry.dtype, partner.entry.shape) == (column.entry.dtype, column.entry.shape):
            column.partner = partner
            found.append(PackedPair(place, other, column))
    return found
