"""The columns that every store has besides the user's fields."""

from __future__ import annotations

from expstore.schema.schema import Field, Schema

__all__ = ["ROW_BYTES", "ROW_FIELDS", "priority_place"]

#: In the order of the columns after the user's; `priority` comes last and is not part of a checksum.
ROW_FIELDS = (
    Field(("_row", "id"), "int64", ()),
    Field(("_row", "episode"), "int64", ()),
    Field(("_row", "step"), "int64", ()),
    Field(("_row", "time"), "int64", ()),
    Field(("_row", "priority"), "float32", ()),
)
ROW_BYTES = sum(entry.row_bytes for entry in ROW_FIELDS)


def priority_place(schema: Schema) -> int:
    """Return the position of the column of priorities in a store with this schema."""
    return len(schema.fields) + len(ROW_FIELDS) - 1
