"""Pairs of packed columns, of which one stores rows in the other.

Used by the set of columns. The column of a field may store rows in the column of its next values, because the
bytes of a row often equal the next value of an earlier row. The two are read together, so that each chunk is
unpacked once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from expstore.core.values import Array, IntArray
from expstore.storages.columns.column import ReadTogether
from expstore.storages.columns.packed.column import PackedRows


@dataclass(frozen=True, slots=True)
class PackedPair(ReadTogether):
    """Two packed columns, of which the first one stores rows in the other.

    Args:
        place: Position of the first column.
        partner: Position of the column that stores some of its rows.
        column: The first column.
    """

    place: int
    partner: int
    column: PackedRows

    def gather_together(self, slots: IntArray, places: Sequence[int]) -> dict[int, Array]:
        """Copy rows of both columns out, if both are requested: each chunk is unpacked once."""
        if self.place not in places or self.partner not in places:
            return {}
        own, other = self.column.gather_pair(slots)
        return {self.place: own, self.partner: other}


def pair_columns(columns: Mapping[int, PackedRows]) -> list[PackedPair]:
    """Set the partner of each packed column whose rows may be stored in another one; return the pairs."""
    found = []
    by_key = {column.entry.key: (place, column) for place, column in columns.items()}
    for key, (place, column) in by_key.items():
        other, partner = by_key.get(("next", *key), (-1, None))
        if partner is None or not column.packing.shares:
            continue
        kinds = [(one.entry.dtype, one.entry.shape, one.packing.parts) for one in (column, partner)]
        if kinds[0] == kinds[1] and not column.packing.within:
            column.partner = partner
            found.append(PackedPair(place, other, column))
    return found
