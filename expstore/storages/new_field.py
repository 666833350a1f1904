"""A field that is added to a storage with existing rows.

Used by storages and `expstore.storages.engine.backfill`. It computes and writes no values.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from expstore.core.values import Array, IntArray, key_name
from expstore.errors import NoRowError, SchemaError, StateError
from expstore.schema.schema import DTYPES, OBJECT, Field
from expstore.storages.format.annotation_log import Part
from expstore.storages.read_view import keys_for

if TYPE_CHECKING:
    from expstore.storages.read_view import ReadView

#: Gets ids of rows; returns the ids of those that still exist, ascending, and their values. Shapes `(n,)` and
#: `(n, *row shape)`.
Compute = Callable[[IntArray], tuple[IntArray, Array]]
#: Called with the number of rows that have their value, and the number of all rows.
Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class NewField:
    """A field to be added.

    Args:
        entry: The field.
        default: The value of later rows that are written without the field; None: they must have it.
        fill: The value of all existing rows, of the field's row shape; None: `compute` returns their values.
        compute: Computes the values of existing rows.
        rows: The most rows that are passed to `compute` at a time.
        specs: The specs of all fields including this one, as `expstore.schema.spec_text` writes them.
        progress: Called with the progress.
        annotations: Of an annotated field, which has no other values: ids of existing rows, and their values.
        origin: How existing rows got their values, for the lineage, as values that JSON can store.
    """

    entry: Field
    default: Array | None = None
    fill: Array | None = None
    compute: Compute | None = None
    rows: int = 4096
    specs: str = ""
    progress: Progress | None = None
    annotations: Iterable[tuple[IntArray, Part]] = ()
    origin: Mapping[str, Any] = field(default_factory=dict)


def check_new_field(storage: ReadView, entry: Field) -> None:
    """Check that a storage can get another field.

    Raises:
        SchemaError: Rows are not TensorDicts, episodes would be split by the field, or its values cannot be
            stored.
        StateError: The store has no rows yet, or its rows are objects.
    """
    schema, name = storage.require_schema(), key_name(entry.key)
    if storage.row_traits.whole:
        raise StateError(f"a {type(storage).__name__} stores rows as objects, which have no fields")
    if entry.key in schema:
        raise SchemaError(f"there is a field {name!r} already: {schema[entry.key]}", hint="drop it first")
    if storage.ranking is not None and entry.annotated:
        raise build_ranked_error(entry)
    if entry.dtype == OBJECT or not (entry.annotated or entry.dtype in DTYPES):
        raise SchemaError(
            f"field {name!r} has dtype {entry.dtype}, but an added field must have a fixed size",
            hint="use a fixed-size dtype",
        )
    inner = inner_dims(schema.form)
    if inner is None:
        raise SchemaError(
            f"rows of this store are not TensorDicts: field {name!r} cannot be added",
            hint="create a store of TensorDicts",
        )
    if entry.shape[: len(inner)] != inner:
        raise SchemaError(
            f"each row has batch dims {list(inner)}, but field {name!r} has shape {list(entry.shape)}",
            hint=f"use the shape {[*inner, '...']}",
        )
    if keys_for(storage, schema.grow(entry, None)) != storage.keys:
        raise SchemaError(
            f"field {name!r} would mark trajectories, ends or rewards, which existing rows lack",
            hint="use another name",
        )


def check_present(storage: ReadView, ids: IntArray) -> None:
    """Raise NoRowError if there is no row with one of these ids. Shape `(n,)`."""
    gone = ids[~storage.stored.holds(ids)]
    if gone.size:
        named = ", ".join(map(str, gone[:5].tolist())) + (", ..." if gone.size > 5 else "")
        raise NoRowError(
            f"{gone.size} of {ids.size} rows are not in the store: {named}",
            hint="leave out the ids of rows that were removed",
        )


def build_ranked_error(entry: Field) -> StateError:
    """Return the error for an annotated field in a store that keeps the best rows."""
    return StateError(
        f"field {key_name(entry.key)!r} is annotated, and a store that keeps the best rows replaces rows by "
        "others, which would get the values of the former rows",
        hint="use a writer that keeps the newest rows",
    )


def inner_dims(form: str) -> tuple[int, ...] | None:
    """Return the batch dims of each row; None if rows are not TensorDicts.

    Args:
        form: The schema's form, as JSON.
    """
    data = json.loads(form or "{}")
    if set(data) - {"batch_size", "names", "nested"}:
        return None
    return tuple(data.get("batch_size", ()))
