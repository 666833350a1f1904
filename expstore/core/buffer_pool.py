"""The memory of a large batch that nobody holds any more, kept for the next one.

Used by columns, on disk and in RAM. Fresh memory comes from the system page by page, each filled with zeros
first, which takes as long as copying the rows does. It never hands memory out that anything still refers to.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from expstore.core.values import Array

__all__ = ["LEAST_BYTES", "Recycled"]

#: Smaller arrays get memory that the allocator has at hand.
LEAST_BYTES = 1 << 20
#: Larger ones would be too much to keep.
_MOST_BYTES = 1 << 26


class Recycled:
    """Make arrays, in the memory of one that is gone where there is such.

    At most one array's memory is kept: that of a loop that lets go of a batch when it has the next.
    Threads may share it.
    """

    def __init__(self) -> None:
        self._kept: list[Array] = []

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return an array of any values.

        Args:
            shape: Its own.
            dtype: Of its values.
        """
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if not LEAST_BYTES <= size <= _MOST_BYTES:
            return np.empty(shape, dtype)
        try:
            memory = self._kept.pop()
        except IndexError:
            memory = np.empty(0, np.uint8)
        if memory.size != size:
            memory = np.empty(size, np.uint8)
        # Views of an array refer to the last one that is no view of another. What is made of a memoryview is
        # none, so whoever has a view of `lent`, or a tensor, has `lent`.
        lent = np.frombuffer(memory.data, np.uint8)
        weakref.finalize(lent, self._back, memory).atexit = False
        return lent.view(dtype).reshape(shape)

    def _back(self, memory: Array) -> None:
        if not self._kept:
            self._kept.append(memory)
