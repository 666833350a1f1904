"""Loading of rows from the disk before they are copied, in stores that are larger than memory.

Used by sets of columns. Copying 256 random frames that are not in memory takes 5 ms with it instead of 600:
see `expstore.kernels.load_rows`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from expstore.core.values import Array, IntArray
from expstore.disk.mapped_files import PAGE_BYTES
from expstore.kernels.loader import compiling, load_in_background

#: A copy that takes no longer has not waited for the disk. Seconds.
SLOW_COPY = 1e-3
#: The slowest copy of rows in memory, bytes per second.
_COPY_SPEED = 5e8
#: Larger batches are copied as they are: the first rows might leave memory before the last are loaded.
_MOST_BYTES = 256 << 20
#: After so many batches in memory, batches are no longer checked.
_WARM_BATCHES = 64
#: The most slow copies that are ignored after checks that found all rows in memory.
_MOST_IGNORED = 64


class ColdRows:
    """Notice copies that wait for the disk, and load the rows of the next batches beforehand.

    Whether rows are in memory is looked up only after a copy was slow, so that a store that fits into memory
    pays nothing. It changes no result. Threads: any number may use it; while it waits for the disk, others
    run.
    """

    def __init__(self) -> None:
        #: Whether rows of the next batch are to be loaded.
        self.active = False
        self._loop: Any = None
        self._requested = False  # whether the loop is being imported
        self._checks = 0  # batches left to check
        self._found = False  # whether rows were missing since the checks began
        self._ignore = self._ignored = 0

    def note_slow_copy(self, seconds: float, copied: int) -> None:
        """Decide whether rows of the next batches are to be loaded, after a copy longer than `SLOW_COPY`.

        Args:
            seconds: How long the copy took.
            copied: How much was copied, bytes.
        """
        if self.active or seconds < SLOW_COPY + copied / _COPY_SPEED or sys.platform != "linux":
            return
        if self._loop is None:
            if not self._requested:
                self._requested = True
                load_in_background(self._load)
            return
        self._ignored += 1
        if self._ignored > self._ignore:
            self._checks, self._ignored, self._found, self.active = 1, 0, False, True

    def load(self, slots: IntArray, views: Sequence[Array]) -> None:
        """Load rows that are not in memory; only if `active`.

        Args:
            slots: Which rows. Shape `(n,)`.
            views: The columns. C-contiguous, shapes `(slots, *row shape)`.
        """
        sizes = np.array([view.strides[0] for view in views], np.int64)
        if int(sizes.sum()) * slots.size > _MOST_BYTES:
            return
        starts = np.array([view.ctypes.data for view in views], np.int64)
        if self._loop(starts, sizes, np.ascontiguousarray(slots, np.int64), PAGE_BYTES):
            self._checks, self._found, self._ignore = _WARM_BATCHES, True, 0
            return
        self._checks -= 1
        if self._checks <= 0:
            self.active = False
            if not self._found:  # something else was slow
                self._ignore = min(2 * self._ignore + 1, _MOST_IGNORED)

    def _load(self) -> None:
        with compiling:
            from expstore.kernels.load_rows import load_rows
        self._loop = load_rows
