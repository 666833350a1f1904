"""Statistics of fields: one pass over the readable rows. Nothing is kept and nothing is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from expstore.core.bfloat16 import widen_bfloat16
from expstore.core.moments import Moments
from expstore.core.values import Array, Key, key_name, to_key
from expstore.errors import ArgumentError, NotReadyError, SchemaError, StateError
from expstore.samplers.filter import Filter
from expstore.schema.schema import ARROW, OBJECT, Field, Schema
from expstore.storages.read_view import ReadView, read_present

#: Largest number of rows, and of values, that are read at a time.
_ROWS, _VALUES = 1 << 16, 1 << 21
#: Fields with more values per row are skipped unless they are named.
_WIDE = 4096
#: Number of attempts if the store's content is replaced during the call.
_TRIES = 3
#: Dtypes whose values have no order, or no fixed size.
_UNORDERED = frozenset({ARROW, OBJECT, "complex64"})


@dataclass(frozen=True, slots=True, eq=False)
class FieldStats:
    """Statistics of one field over the readable rows, for each element of the field.

    Args:
        count: Number of rows.
        mean: Mean. Shape the field's, float64.
        std: Standard deviation of the population (`ddof=0`). Shape the field's, float64.
        min: Smallest value. Shape and dtype the field's; float32 for bfloat16.
        max: Largest value. Shape and dtype as `min`.
    """

    count: int
    mean: NDArray[np.float64]
    std: NDArray[np.float64]
    min: Array
    max: Array

    @classmethod
    def of(cls, moments: Moments) -> Self:
        """Return the statistics for moments, as new arrays."""
        std = np.sqrt(moments.squares / moments.count)
        parts = moments.mean, std, moments.smallest, moments.largest
        return cls(moments.count, *(np.array(part) for part in parts))


def compute_stats(
    storage: ReadView, names: list[str | tuple[str, ...]] | None, split: str | None
) -> dict[str | Key, FieldStats]:
    """Return the statistics of fields; see `Columns.stats`."""
    if names is not None and not isinstance(names, list):
        raise ArgumentError(f"fields= is a list of names, got {names!r}")
    if storage.schema is None or not storage.window.rows:
        raise _no_rows()
    entries, filter = _choose(storage.schema, names), Filter(None, None, split=split)
    if not entries:
        return {}
    for _ in range(_TRIES):
        content = storage.epochs.content
        moments = _read_moments(storage, entries, filter)
        if content == storage.epochs.content:
            if moments is None:
                raise _no_rows()
            named = [entry.key if len(entry.key) > 1 else entry.key[0] for entry in entries]
            return {name: FieldStats.of(part) for name, part in zip(named, moments, strict=True)}
    raise StateError("the content of the store was replaced while it was read", hint="try again")


def _read_moments(storage: ReadView, entries: Sequence[Field], filter: Filter) -> list[Moments] | None:
    """Return the moments of each field over the readable rows of a split, or None without rows."""
    schema, ids = storage.require_schema(), storage.window.until(storage.query_window.last).ids()
    places = [schema.place(entry.key) for entry in entries]
    piece = max(1, min(_ROWS, _VALUES // sum(entry.row_items for entry in entries)))
    total: list[Moments] | None = None
    for start in range(0, ids.size, piece):
        chosen = ids[start : start + piece]
        present, columns = read_present(storage, chosen[filter.find_split(storage, chosen)], places)
        if not present.size:
            continue
        parts = [
            Moments.of(widen_bfloat16(rows) if entry.dtype == "bfloat16" else rows)
            for entry, rows in zip(entries, columns, strict=True)
        ]
        total = parts if total is None else [Moments.merge(pair) for pair in zip(total, parts, strict=True)]
    return total


def _choose(schema: Schema, names: list[str | tuple[str, ...]] | None) -> Sequence[Field]:
    """Return the fields to summarize.

    Raises:
        SchemaError: A named field does not exist, or has no statistics.
    """
    if names is None:
        return [
            entry for entry in schema.fields if entry.dtype not in _UNORDERED and entry.row_items <= _WIDE
        ]
    chosen = [schema.fields[schema.place_of(to_key(name))] for name in names]
    for entry in chosen:
        if entry.dtype in _UNORDERED:
            raise SchemaError(
                f"field {key_name(entry.key)!r} is {entry}; only bools and real numbers of a fixed size "
                "have statistics",
                hint="leave it out, or use sql()",
            )
    return chosen


def _no_rows() -> NotReadyError:
    return NotReadyError(
        "the store has no rows of this split to compute statistics of", hint="extend() it first"
    )
