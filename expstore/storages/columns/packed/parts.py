"""What packed columns hand one another: a chunk in memory, and where rows are found.

Used by columns that are written and by those that are only read. It touches no file.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from expstore.core.values import Array, IntArray
from expstore.disk.mapped_files import AddressRange

__all__ = ["Frame", "Locations"]


class Frame:
    """A packed chunk in memory.

    Args:
        data: It.
    """

    def __init__(self, data: bytes) -> None:
        self.data = np.frombuffer(data, np.uint8)
        self.address = int(self.data.ctypes.data)


class Locations(NamedTuple):
    """Say where rows are to be found; replaced as a whole, but for chunks that take the places of others.

    Args:
        where: Address of each chunk's frame; 0: there is no such chunk. Shape `(chunks,)`, int64.
        sizes: Length of its frame; below 0: it has none. Shape `(chunks,)`, int64.
        laps: In which lap of the ring it was written. Shape `(chunks,)`, int64.
        maps: What keeps those addresses valid, by shard: the newest last.
        base: First slot of the chunk that is not full.
        held: How many of its rows are there.
        rows: These. Shape `(chunk rows, *row shape)`.
    """

    where: IntArray
    sizes: IntArray
    laps: IntArray
    maps: dict[int, tuple[AddressRange | Frame, ...]]
    base: int
    held: int
    rows: Array
