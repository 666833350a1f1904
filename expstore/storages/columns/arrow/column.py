"""A field without a fixed size among the columns of a store: its rows lie in the segments of all such fields.

Used by the group of columns. Slots stand for the newest ids that belong to them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from expstore.core.values import Array, IntArray, key_name
from expstore.disk.files import File
from expstore.errors import SchemaError
from expstore.schema.schema import Field
from expstore.storages.columns.arrow.segments import Segments
from expstore.storages.columns.flat import CHUNK_ROWS, Column

__all__ = ["SegmentColumn", "in_place"]


class SegmentColumn(Column):
    """Take rows of one field out of segments.

    Threads: as `Segments`.

    Args:
        entry: The field.
        segments: Where its rows are.
        number: Which of their fields it is.
        folder: Where a column of it would lie.
    """

    packed = True
    viewed = False

    def __init__(self, entry: Field, segments: Segments, number: int, folder: Path) -> None:
        self.entry, self.segments, self.number, self.folder = entry, segments, number, folder
        self.row_bytes, self.rows, self.separator = 0, CHUNK_ROWS, "."
        self.files: list[File] = []
        self.blank = self.fills = False
        self.fault: str | None = None
        self.wide_row = 0
        self.damaged: dict[int, str] = {}

    @property
    def ready(self) -> int:
        """How many slots have a place; segments come as rows do."""
        return sys.maxsize

    def open_shards(self) -> None:
        """Do nothing: the group opens segments."""

    def look(self, slots: int, *, due: bool = True) -> None:
        """Do nothing: the group looks at segments."""

    def look_for_true(self) -> None:
        """Do nothing: there are no flags here."""

    def require(self, slots: int) -> None:
        """Check nothing: the group requires rows."""

    def take(self, slots: IntArray) -> Any:
        """Copy rows out, as a pyarrow Array. `slots` has shape `(n,)`."""
        return self.segments.take(self.segments.ids_of(slots), [self.number])[0]

    def part(self, slot: int, count: int) -> Any:
        """Copy a run of slots out, as a pyarrow Array."""
        return self.take(np.arange(slot, slot + count))

    read = copy = part

    def spans(self, slot: int, count: int) -> Iterator[tuple[File, int, int, int]]:
        """Yield nothing: a row has no place of its own in a file."""
        return iter(())

    def write_rows(self, slots: IntArray, values: Array) -> list[File]:
        """Raise SchemaError: what lies in a segment stays as it is."""
        raise in_place([self.entry], "its rows cannot be changed")

    def close(self) -> None:
        """Do nothing: the group closes segments."""


def in_place(entries: list[Field], what: str) -> SchemaError:
    """Return what is raised where rows without a fixed size would have to change."""
    names = ", ".join(sorted(f"{key_name(entry.key)!r} ({entry})" for entry in entries))
    return SchemaError(
        f"{'fields' if entries[1:] else 'field'} {names} without a fixed size: {what}",
        hint="fields of fixed size can be changed; add rows anew where others must change",
    )
