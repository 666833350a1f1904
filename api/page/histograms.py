"""Histograms over the rows of a store: ages, priorities, how often rows were sampled.

Used by the summary of a store and by previews of samplers. Values come from columns, never from SQL; of a
store with many rows, evenly spaced ones are counted. It changes nothing.
"""

from __future__ import annotations

import time

import numpy as np
from pydantic import BaseModel, Field

from expstore.core.values import Array, IntArray
from expstore.schema.row_fields import ROW_FIELDS
from expstore.storages.read_view import ReadView, read_stable

_BINS = 64
#: Number of rows that are counted; evenly spaced ones of a store with more rows.
_ROWS = 65_536
#: Values that span more than this factor get bins whose widths grow by a factor.
_WIDE = 1000.0
_EPISODE, _TIME = ([entry.key[1] for entry in ROW_FIELDS].index(name) for name in ("episode", "time"))


class Histogram(BaseModel):
    """How often values are in each bin."""

    edges: list[float] = Field(
        description="Edges of the 64 bins, ascending; where values span more than three decades, each is the "
        "former one times a factor, and the first bin also has smaller values."
    )
    counts: list[int] = Field(description="Number of rows in each bin.")


class Ages(Histogram):
    """Ages of rows."""

    unit: str = Field(default="seconds", description="Unit of the edges: `seconds` since rows were written.")


def choose_ids(storage: ReadView) -> IntArray:
    """Return ids of readable rows, ascending: all of them, or 65,536 evenly spaced ones. Shape `(n,)`."""
    window = storage.window
    rows = window.rows
    return window.nth(np.arange(rows) if rows <= _ROWS else np.linspace(0, rows - 1, _ROWS).astype(np.int64))


def times_of(storage: ReadView, ids: IntArray) -> Array:
    """Return when rows were written, in seconds since 1970. Shapes `(n,)`, less if some have no time yet."""
    if not ids.size:
        return np.zeros(0)
    written = _read_row_field(storage, ids, _TIME)
    times: Array = written[written > 0] / 1e6
    return times


def episodes_of(storage: ReadView, ids: IntArray) -> IntArray:
    """Return the episodes of rows. Shapes `(n,)`."""
    return _read_row_field(storage, ids, _EPISODE)


def _read_row_field(storage: ReadView, ids: IntArray, number: int) -> IntArray:
    """Return a field of `ROW_FIELDS` of rows, whichever rows are in their slots by now. Shapes `(n,)`."""
    slots = storage.geometry.slot_of(ids)

    def read() -> IntArray:
        found: IntArray = storage.take(slots, [len(storage.require_schema().fields) + number])[0]
        return found

    return read_stable(storage, read)


def ages_of(storage: ReadView, ids: IntArray) -> Ages | None:
    """Return the ages of rows; None: there are no rows. Shape `(n,)`."""
    if not ids.size:
        return None
    edges, counts = _count(np.maximum(0.0, time.time() - times_of(storage, ids)))
    return Ages(edges=edges, counts=counts)


def priorities_of(storage: ReadView, ids: IntArray) -> Histogram | None:
    """Return the priorities of rows; None: none was ever set, so that all are equal. Shape `(n,)`."""
    values = priority_values(storage, ids)
    if not values.size or (not storage.priorities.were_set and float(values.min()) == float(values.max())):
        return None
    edges, counts = _count(values)
    return Histogram(edges=edges, counts=counts)


def priority_values(storage: ReadView, ids: IntArray) -> Array:
    """Return the priorities of rows. Shapes `(n,)`, less if some have none yet."""
    values, base = storage.priorities.block
    places = storage.geometry.slot_of(ids) - base
    found: Array = values[places[(places >= 0) & (places < values.size)]].astype(np.float64)
    return found


def times_sampled(storage: ReadView, ids: IntArray) -> Histogram | None:
    """Return how often rows were sampled; None: this store does not count it. Shape `(n,)`."""
    sampled = storage.state.sampled
    if sampled is None:
        return None
    slots = storage.geometry.slot_of(ids)
    values = sampled.values[slots[slots < sampled.values.size]]
    width = -(-(int(values.max(initial=0)) + 1) // _BINS)
    counts = np.bincount(values // width, minlength=_BINS)
    edges = width * np.arange(_BINS + 1.0)
    return Histogram(edges=edges.tolist(), counts=counts.tolist())


def _count(values: Array) -> tuple[list[float], list[int]]:
    """Return edges and counts of values, as `bins_of` places the edges. Shape `(n,)`."""
    edges = bins_of(values)
    return edges.tolist(), count_in(values, edges).tolist()


def count_in(values: Array, edges: Array) -> IntArray:
    """Return how many values are in each bin; values beyond the ends are in the outermost bins.

    Args:
        values: Shape `(n,)`.
        edges: Shape `(bins + 1,)`.
    """
    counts: IntArray
    counts, _ = np.histogram(np.clip(values, edges[0], edges[-1]), edges)
    return counts


def bins_of(values: Array) -> Array:
    """Return the edges of 64 bins for finite values. Shape `(n,)`."""
    low, high = float(values.min(initial=np.inf)), float(values.max(initial=-np.inf))
    if not values.size:
        low, high = 0.0, 1.0
    positive = values[values > 0]
    least = float(positive.min()) if positive.size else 0.0
    if least and high > _WIDE * least:
        edges: Array = np.geomspace(least, high, _BINS + 1)
        edges[0], edges[-1] = least, high  # rounded otherwise
        return edges
    return np.linspace(low, high if high > low else low + 1.0, _BINS + 1)
