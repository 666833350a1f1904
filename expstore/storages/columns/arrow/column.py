"""A variable-length field as a column of a store; its rows are in the segments that all such fields share.

Used by the set of columns. A slot means the newest id that belongs to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from expstore.core.values import Array, IntArray, key_name
from expstore.disk.files import File
from expstore.errors import SchemaError
from expstore.schema.schema import Field
from expstore.storages.columns.arrow.capture import SegmentCapture
from expstore.storages.columns.arrow.segments import Segments
from expstore.storages.columns.capture import Capture
from expstore.storages.columns.column import Column, FieldSize, ReadTogether


class SegmentColumn(Column):
    """Read rows of one field from segments.

    Threads: as `Segments`.

    Args:
        entry: The field.
        segments: The segments with its rows.
        folder: The folder that a Zarr array of the field would have.
    """

    def __init__(self, entry: Field, segments: Segments, folder: Path) -> None:
        super().__init__(entry, folder, segments.slots, 0)
        self._segments, self._number = segments, segments.fields.index(entry)

    def gather(self, slots: IntArray) -> pa.Array:
        """Copy rows out. `slots` has shape `(n,)`."""
        return self._segments.gather_ids(self._segments.ids_of(slots), [self._number])[0]

    def part(self, slot: int, count: int) -> pa.Array:
        """Copy a run of slots out."""
        return self.gather(np.arange(slot, slot + count))

    def views(self, first_id: int, count: int) -> list[pa.Array]:
        """Return a run of rows, one array per batch; rows that were removed meanwhile are None."""
        return self._segments.views(self._number, first_id, count)

    def mix(self, slots: IntArray, newer: Array, rows: pa.Array) -> pa.Array:
        """Return rows of which some are only in memory; see `Column`."""
        here = newer >= 0
        written = self.gather(slots[~here])
        places = np.empty(slots.size, np.int64)
        places[~here] = np.arange(len(written))
        places[here] = len(written) + newer[here]
        return pa.concat_arrays([written, rows]).take(pa.array(places))

    def write_rows(self, slots: IntArray, values: Array) -> list[File]:
        """Raise SchemaError: rows in segments are immutable."""
        raise in_place([self.entry], "its rows cannot be changed")

    def size(self, held: int, ids: Callable[[IntArray], IntArray]) -> FieldSize:
        """Return how the field is stored on disk; see `Column`."""
        rows, sizes = self._segments.field_bytes()
        used = sizes[self._number]
        return FieldSize("segments", self._segments.codec, None, used, None, None, used / max(1, rows))

    def sum_run(self, slot: int, count: int) -> int:
        """Return 0: batches have checksums of their own."""
        return 0


@dataclass(frozen=True, slots=True)
class SegmentFields(ReadTogether):
    """The fields whose rows are in one set of segments.

    Args:
        segments: The segments.
        places: Positions of the fields among all columns, in the order of the segments' fields.
    """

    segments: Segments
    places: tuple[int, ...]

    def columns(self, folder: Path) -> dict[int, SegmentColumn]:
        """Return a column for each field, by position; `folder` is the folder of all columns."""
        entries = zip(self.places, self.segments.fields, strict=True)
        return {n: SegmentColumn(entry, self.segments, folder.joinpath(*entry.key)) for n, entry in entries}

    def capture(self, low: int) -> Capture:
        """Return the rows as they are now; rows up to an id need not be kept."""
        return SegmentCapture(self.segments, self.places, low)

    def renumber(self, number: Callable[[int], int | None]) -> SegmentFields:
        """Return the fields with other positions, which `number` returns for each of them."""
        places = (number(place) for place in self.places)
        return SegmentFields(self.segments, tuple(place for place in places if place is not None))

    def gather_together(self, slots: IntArray, places: Sequence[int]) -> dict[int, Any]:
        """Copy rows of some fields out, as pyarrow Arrays."""
        wanted = [place for place in places if place in self.places]
        if not wanted:
            return {}
        numbers = [self.places.index(place) for place in wanted]
        found = self.segments.gather_ids(self.segments.ids_of(slots), numbers)
        return dict(zip(wanted, found, strict=True))


def in_place(entries: Sequence[Field], what: str) -> SchemaError:
    """Return the error for changing variable-length rows in place."""
    names = ", ".join(sorted(f"{key_name(entry.key)!r} ({entry})" for entry in entries))
    return SchemaError(
        f"{'fields' if entries[1:] else 'field'} {names} without a fixed size: {what}",
        hint="only fixed-size fields can be changed; append changed rows as new rows",
    )
