"""Reuse the memory of a large batch that was garbage-collected for the next batch.

Used by columns, on disk and in RAM. The system provides new memory page by page and fills each page with
zeros, which takes as long as copying the rows. Memory that anything still refers to is never reused.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from expstore.core.values import Array

#: The allocator itself reuses the memory of smaller arrays.
LEAST_BYTES = 1 << 20
#: Larger arrays would be too much memory to keep.
_MOST_BYTES = 1 << 26


class Recycled:
    """Create arrays, if possible in the memory of an array that no longer exists.

    The memory of at most one array is kept: enough for a loop that drops a batch when it gets the next one.
    Threads may share the object.
    """

    def __init__(self) -> None:
        self._kept: list[Array] = []

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return an uninitialized array.

        Args:
            shape: The array's shape.
            dtype: The array's dtype.
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
        # A view refers to the array at the end of its chain of views. An array made from a memoryview is such
        # an end, so every view of `lent`, and every tensor, keeps `lent` alive.
        lent = np.frombuffer(memory.data, np.uint8)
        weakref.finalize(lent, self._put_back, memory).atexit = False
        return lent.view(dtype).reshape(shape)

    def _put_back(self, memory: Array) -> None:
        if not self._kept:
            self._kept.append(memory)
