"""The columns that every store has besides the user's fields."""

from __future__ import annotations

from collections.abc import Iterable

from expstore.core.values import Key
from expstore.errors import SchemaError
from expstore.schema.schema import Field, Schema

#: In the order of the columns after the user's; `priority` comes last and is not part of a checksum.
ROW_FIELDS = (
    Field(("_row", "id"), "int64", ()),
    Field(("_row", "episode"), "int64", ()),
    Field(("_row", "step"), "int64", ()),
    Field(("_row", "time"), "int64", ()),
    Field(("_row", "priority"), "float32", ()),
)
#: Entries that samples have at their root besides the user's fields. Rows may carry them, as a sample can be
#: written again; they are left out, and no field can have such a name.
SAMPLE_ENTRIES = ("index", "id", "index_generation", "priority_weight")
ROW_BYTES = sum(entry.row_bytes for entry in ROW_FIELDS)


def check_no_sample_entry(keys: Iterable[Key]) -> None:
    """Raise SchemaError if a field would have the name of an entry of samples, and be left out of rows."""
    for key in keys:
        if key[0] in SAMPLE_ENTRIES:
            raise SchemaError(
                f"no field can be named {key[0]!r}, because samples have an entry of this name",
                hint="choose another name",
            )


def priority_place(schema: Schema) -> int:
    """Return the position of the column of priorities in a store with this schema."""
    return len(schema.fields) + len(ROW_FIELDS) - 1
