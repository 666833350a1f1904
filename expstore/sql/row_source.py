"""Columns of a storage for SQL: views where the rows are contiguous, otherwise functions that copy rows.

Used by `expstore.sql.sync` for a query. It decides neither which rows are visible nor their column names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from expstore.core.values import Array, IntArray, Window
from expstore.errors import CorruptionError
from expstore.schema.row_fields import ROW_FIELDS
from expstore.storages.columns.sample_counts import SAMPLED, Sampled
from expstore.storages.read_view import ReadView

if TYPE_CHECKING:
    from expstore.sql.views import Relations

#: Rows that are read at a time to assemble a column for a query.
_PIECE_ROWS = 65_536
#: If the readable rows form more runs than this, runs are not viewed one by one,
_MANY_RUNS = 256
#: except for rows longer than this.
_NARROW_BYTES = 256


def relations_of(storage: ReadView, window: Window) -> Relations:
    """Return all columns of the rows in a window."""
    from expstore.sql.views import Column, Relations

    schema = storage.schema
    if schema is None:
        return Relations(window=window)
    fields = len(schema.fields)
    unviewed = storage.unviewed_places | {n for n, entry in enumerate(schema.fields) if entry.variable}
    places = [place for place in range(fields + len(ROW_FIELDS)) if place not in unviewed]
    found: dict[int, Any] = {}
    scattered = _Scattered(storage, window) if len(window.deleted) > _MANY_RUNS else None
    if scattered is None:
        found = dict(zip(places, zip(*_as_readable(storage, places, window), strict=True), strict=True))
    else:
        found = {place: ((), None, None, "", partial(scattered.rows, place)) for place in places}
    columns = [
        Column((f"_{entry.key[1]}",), entry.dtype, (), *found[place])
        for place, entry in enumerate(ROW_FIELDS, fields)
    ]
    sampled = storage.state.sampled
    if sampled is not None:
        gather = None if scattered is None else partial(scattered.counts, sampled)
        runs = window.runs() if scattered is None else ()
        parts = sampled.views(piece for first, count in runs for piece in storage.geometry.runs(first, count))
        columns.append(Column(("_sampled",), SAMPLED.dtype, (), parts, gather=gather))
    own = [column.key[0] for column in columns]
    columns += [
        Column(entry.key, entry.dtype, entry.shape, *found[place])
        if place in found
        else Column(
            entry.key,
            entry.dtype,
            entry.shape,
            (),
            take=_make_reader(storage, place, window),
            arrow=entry.arrow,
        )
        for place, entry in enumerate(schema.fields)
    ]
    recent = window.newest(storage.description.window_rows).low
    return Relations(columns, window, storage.capacity, rows=own, recent=recent)


def _make_reader(storage: ReadView, place: int, window: Window) -> Callable[[IntArray], Array]:
    """Return a function that copies rows of a column, given their numbers (0: the oldest row)."""
    return lambda numbers: storage.read(window.nth(numbers), [place])[0]


class _Scattered:
    """Assemble columns whose readable rows form many short runs between deleted rows.

    A column is read when a query names it, for all runs at once: each run viewed separately would cost 85 us
    in a query, whatever its length. Narrow rows are therefore copied.

    Args:
        storage: The storage to read.
        window: The readable ids; some are deleted.
    """

    def __init__(self, storage: ReadView, window: Window) -> None:
        self._storage, self._window = storage, window

    @cached_property
    def _numbers(self) -> IntArray:
        """Offsets of the readable ids from the first id above the window's low. Shape `(rows,)`."""
        numbers: IntArray = self._window.nth(np.arange(self._window.rows)) - (self._window.low + 1)
        return numbers

    def rows(self, place: int) -> list[Array]:
        """Return the readable rows of a column that can be viewed."""
        window = self._window
        return self._pick(self._storage.views([place], window.low + 1, window.size)[0])

    def counts(self, sampled: Sampled) -> list[Array]:
        """Return how often each readable row was sampled."""
        window = self._window
        return self._pick(sampled.views(self._storage.geometry.runs(window.low + 1, window.size)))

    def _pick(self, parts: Sequence[Array]) -> list[Array]:
        """Select the readable rows from views of all rows; wide rows are viewed run by run."""
        found, behind = [], 0
        for part in parts:
            low, high = np.searchsorted(self._numbers, [behind, behind + len(part)])
            numbers = self._numbers[low:high] - behind
            behind += len(part)
            if part[:1].nbytes <= _NARROW_BYTES:
                found.append(part[numbers])
                continue
            cuts = np.flatnonzero(np.diff(numbers, prepend=-2) > 1)
            starts, counts = numbers[cuts], np.diff(cuts, append=numbers.size)
            found += [part[at : at + n] for at, n in zip(starts.tolist(), counts.tolist(), strict=True)]
        return found


def readable(storage: ReadView, places: Sequence[int], window: Window) -> list[list[Array]]:
    """View columns over all readable rows without copying: for each column, arrays in row order."""
    parts = [storage.views(places, first, count) for first, count in window.runs()]
    return [[array for part in parts for array in part[number]] for number in range(len(places))]


def _as_readable(
    storage: ReadView, places: Sequence[int], window: Window
) -> tuple[list[list[Array]], list[CorruptionError | None]]:
    """Do the same as `readable`, but return an empty list and the error for a damaged column."""
    with contextlib.suppress(CorruptionError):
        return readable(storage, places, window), [None] * len(places)
    found: list[list[Array]] = []
    faults: list[CorruptionError | None] = []
    for place in places:
        try:
            found += readable(storage, [place], window)
            faults.append(None)
        except CorruptionError as exc:
            found.append([])
            faults.append(exc)
    return found, faults
