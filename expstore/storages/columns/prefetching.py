"""Prefetching of rows into the processor's cache before they are copied.

Used by sets of columns, on disk and in RAM. It halves the time to copy 256 random rows of 11 fields out of a
million.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from expstore.core.values import Array, IntArray
from expstore.kernels.loader import compiling, load_in_background

#: Below this number of rows, copying is as fast without prefetching.
_FEW_ROWS = 16
#: Rows of more bytes than the cache of one core has would push each other out.
_MOST_BYTES = 512 * 1024
#: Number of batches after which the loop is loaded, which takes a second of another thread; the addresses of
#: columns are checked again after as many batches.
_BATCHES = 64


class RowPrefetcher:
    """Prefetch rows that are about to be copied.

    It changes no result, and keeps no reference to a column. Any number of threads may use it.
    """

    def __init__(self) -> None:
        self._loop: Any = None
        self._batches = 0
        self._known: dict[Sequence[int], _Addresses] = {}

    def ask(
        self, slots: IntArray, places: Sequence[int], views: Callable[[Sequence[int]], Sequence[Array]]
    ) -> None:
        """Prefetch rows of some columns.

        Args:
            slots: Slots of the rows. Shape `(n,)`.
            places: Positions of the columns.
            views: Returns the narrow columns among those at some positions. C-contiguous, shapes `(slots,
                *row shape)`.
        """
        self._batches += 1
        if not self._batches % _BATCHES:
            self._known = {}
        loop, known = self._loop, self._known
        if loop is None:
            if self._batches == _BATCHES:
                load_in_background(self._load)
            return
        wanted = places if type(places) is range else tuple(places)
        columns = known.get(wanted)
        if columns is None:
            columns = known[wanted] = _Addresses.of(views(places))
        if _FEW_ROWS <= slots.size <= columns.most_rows and slots.flags.carray:
            loop(columns.starts, columns.sizes, slots)

    def _load(self) -> None:
        with compiling:
            from expstore.kernels.prefetch_rows import prefetch_rows
        self._loop = prefetch_rows


@dataclass(frozen=True, slots=True)
class _Addresses:
    """The addresses of columns at the last check: a column that grows moves from time to time.

    Args:
        starts: Address of each narrow column. Shape `(columns,)`.
        sizes: Bytes of a row of each column. Shape `(columns,)`.
        most_rows: Number of rows for which the cache has room.
    """

    starts: IntArray
    sizes: IntArray
    most_rows: int

    @staticmethod
    def of(views: Sequence[Array]) -> _Addresses:
        """Return the addresses of columns."""
        sizes = np.array([view.strides[0] for view in views], np.int64)
        starts = np.array([view.ctypes.data for view in views], np.int64)
        return _Addresses(starts, sizes, _MOST_BYTES // max(1, int(sizes.sum())) if views else 0)
