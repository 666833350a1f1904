"""Read rows in pieces of a bounded size, even if the length of rows is not known beforehand.

Used by the Parquet and Arrow formats. For variable-length rows it reads a few, measures their length, and
then reads as many as fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from expstore.core import tuning
from expstore.core.values import IntArray
from expstore.errors import SchemaError
from expstore.exchange.rows import Rows
from expstore.storages.snapshots.restore import join_parts

#: Number of variable-length rows that are read first; later pieces grow to `tuning.EXCHANGE_VARIABLE_ROWS`.
FIRST_ROWS = 16
#: Number of rows that are read to estimate the mean row length, and how many are read at a time.
_SAMPLED, _TOGETHER = 64, 8


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows that were read.

    Args:
        asked: Number of rows requested; some may have been removed from the store meanwhile.
        ids: Ids of the rows that were read. Shape `(n,)`.
        columns: One per field. Shapes `(n, *row shape)`; Arrow arrays for variable-length fields.
    """

    asked: int
    ids: IntArray
    columns: list[Any]


def mean_bytes(rows: Rows) -> int:
    """Estimate the average number of bytes of a row."""
    fields = list(rows.fields.items())
    loose = [place for place, entry in fields if entry.variable]
    if not loose or not rows.count:
        return rows.row_bytes
    ends = np.cumsum(rows.fragments[2])
    number = np.unique(np.linspace(0, ends[-1] - 1, _SAMPLED).astype(np.int64))
    place = np.searchsorted(ends, number, side="right")
    ids = (
        rows.fragments[3, place]
        + (number - ends[place] + rows.fragments[2, place]) * rows.fragments[4, place]
    )
    found = size = 0
    for start in range(0, ids.size, _TOGETHER):
        here, columns = rows.read(ids[start : start + _TOGETHER], loose)
        found += here.size
        size += sum(column.nbytes for column in columns)
    return rows.row_bytes + -(-size // max(1, found))


def read_pieces(rows: Rows, wanted: Iterable[IntArray], most: int | None = None) -> Iterator[Piece]:
    """Read rows in the given order.

    Args:
        rows: The selected rows.
        wanted: Arrays of ids; each is small enough that its fixed-size fields fit in memory. Shapes `(n,)`.
        most: Approximate maximum size of a piece in bytes; a single row may exceed it. None:
            `tuning.EXCHANGE_BYTES`.
    """
    pace = (
        _Pace(rows, most or tuning.EXCHANGE_BYTES)
        if any(entry.variable for entry in rows.fields.values())
        else None
    )
    for ids in wanted:
        if pace is None:
            yield Piece(ids.size, *rows.read(ids))
        else:
            yield from pace.read(ids)


class _Pace:
    """Choose how many rows to read next, from the size of the previous rows."""

    def __init__(self, rows: Rows, most: int) -> None:
        self._rows, self._most = rows, most
        self._next, self._each = FIRST_ROWS, 1

    def read(self, ids: IntArray) -> Iterator[Piece]:
        """Yield rows in pieces that fit in memory."""
        held: list[Piece] = []
        size = at = 0
        while at < ids.size:
            piece = self._read_some(ids[at : at + self._next])
            at += piece.asked
            held.append(piece)
            size += sum(column.nbytes for column in piece.columns)
            if 2 * size >= self._most:
                yield _join(held)
                held, size = [], 0
        if held:
            yield _join(held)

    def _read_some(self, ids: IntArray) -> Piece:
        """Read rows, or only the first of them if all together exceed the limits of an Arrow array."""
        while True:
            try:
                piece = Piece(ids.size, *self._rows.read(ids))
                break
            except SchemaError:
                if ids.size == 1:
                    raise
                ids = ids[: ids.size // 2]
        each = sum(column.nbytes for column in piece.columns) // max(1, piece.ids.size)
        self._each = max(1, each, self._each // 2)  # more long rows may follow a long one
        self._next = max(1, min(self._most // (4 * self._each), 2 * ids.size, tuning.EXCHANGE_VARIABLE_ROWS))
        return piece


def _join(pieces: list[Piece]) -> Piece:
    if len(pieces) == 1:
        return pieces[0]
    columns = zip(*(piece.columns for piece in pieces), strict=True)
    return Piece(
        sum(piece.asked for piece in pieces),
        np.concatenate([piece.ids for piece in pieces]),
        [join_parts(parts) for parts in columns],
    )
