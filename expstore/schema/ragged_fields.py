"""The fields whose rows are tensors that differ in their first dim, and the entries that batches add to them.

`expstore/data/ragged_batches.py` makes the entries.
"""

from __future__ import annotations

from typing import Literal

from expstore.core.values import Key, key_name
from expstore.errors import ArgumentError, SchemaError
from expstore.schema.arrow_types import ragged_of
from expstore.schema.schema import Schema

RaggedForm = Literal["jagged", "padded", "packed"]

#: What is appended to the name of a ragged field for the entries with it, by form.
ENTRIES: dict[str, tuple[str, ...]] = {
    "jagged": (),
    "padded": ("_lengths", "_mask"),
    "packed": ("_cu_seqlens", "_position_ids"),
}


def check_form(form: object) -> None:
    """Raise ArgumentError if a value is not a `RaggedForm`."""
    if not isinstance(form, str) or form not in ENTRIES:
        raise ArgumentError(f"ragged={form!r} is unknown", hint=f"use {', '.join(map(repr, ENTRIES))}")


def find_ragged(schema: Schema) -> list[Key]:
    """Return the keys of the fields whose rows are tensors that differ in their first dim only."""
    return [
        entry.key
        for entry in schema.fields
        if entry.variable and (found := ragged_of(entry.arrow)) is not None and found.is_list
    ]


def check_fields(schema: Schema, form: RaggedForm) -> None:
    """Raise SchemaError if no field is ragged, or if a field has the name of an entry that batches add."""
    keys = find_ragged(schema)
    if not keys:
        raise build_no_ragged_error(f"ragged={form!r}")
    for key in keys:
        for name in ENTRIES[form]:
            if schema.place((*key[:-1], key[-1] + name)) >= 0:
                raise build_taken_error(form, (*key[:-1], key[-1] + name))


def build_no_ragged_error(what: str) -> SchemaError:
    """Return the error for a store without ragged fields. `what`: what needs one."""
    return SchemaError(
        f"{what} needs a field whose rows are tensors of different lengths, and the store has none",
        hint='such fields need layout="arrow" and the type ("int32", (None,)), for instance; '
        "otherwise leave the option out",
    )


def build_taken_error(form: str, key: Key) -> SchemaError:
    """Return the error for an entry that a batch has already."""
    return SchemaError(
        f"ragged={form!r} adds the entry {key_name(key)!r}, and rows have a field of this name",
        hint="rename the field, or use ragged='jagged'",
    )
