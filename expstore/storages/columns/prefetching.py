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

__all__ = ["RowPrefetcher"]

#: Fewer rows are copied as quickly without.
_FEW_ROWS = 16
#: More than fit into the cache of one core would push each other out.
_MOST_BYTES = 512 * 1024
#: After so many batches the loop is loaded, which takes a second of another thread, and after as many again
#: columns are looked for anew.
_BATCHES = 64


class RowPrefetcher:
    """Ask the processor for rows that are about to be copied.

    It changes no result, and holds no column. Threads: any number may use it.
    """

    def __init__(self) -> None:
        self._loop: Any = None
        self._batches = 0
        self._known: dict[Sequence[int], _Addresses] = {}

    def ask(
        self, slots: IntArray, places: Sequence[int], views: Callable[[Sequence[int]], Sequence[Array]]
    ) -> None:
        """Ask for rows of some columns.

        Args:
            slots: Which rows. Shape `(n,)`.
            places: Of the columns.
            views: Returns those of the columns at some places whose rows are narrow. C-contiguous, shapes
                `(slots, *row shape)`.
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
    """The addresses of columns as of the last check: a column that grows moves now and then.

    Args:
        starts: Where each narrow one begins. Shape `(columns,)`.
        sizes: How many bytes its rows have. Shape `(columns,)`.
        most_rows: Of how many rows the cache has room for.
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
